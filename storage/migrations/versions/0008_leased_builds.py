"""Jobs take turns, workers lease builds that jobs demand, nothing is screened, and compile times are not learnt.

Unfinished problems are planned anew, from what is known of their builds by then: nothing that was compiled or judged is
done again. Of problems that have ended, candidates that were only screened are skipped; searches that screened cover
nothing, because only some of their kernels were compiled in full.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

ONLY_SCREENED = "it was only screened, which this release does not do: submit its problem again"
_JSON = sa.JSON(none_as_null=True)
_LIVE = "job_problems.state IN ('queued', 'running')"
_ITS_PLAN = "items.kind = 'plan' AND items.ref LIKE job_problems.job_id || ':%'"


def upgrade() -> None:
    _plan_anew()
    _forget_screening()
    _take_turns()
    _lease_builds()
    op.drop_table("compile_models")


def _plan_anew() -> None:
    """Unfinished problems as if never planned, but for those only to be finished; imported ones have no plan."""
    op.execute(
        f"CREATE TABLE anew AS SELECT id FROM job_problems WHERE {_LIVE} "
        f"AND EXISTS (SELECT 1 FROM items WHERE {_ITS_PLAN}) "
        "AND (CAST(search AS TEXT) LIKE '%\"screening\"%' OR NOT EXISTS (SELECT 1 FROM items WHERE kind = 'finish' "
        "AND ref = CAST(job_problems.id AS VARCHAR(64)) AND state IN ('waiting', 'claimed')))"
    )
    op.execute("DELETE FROM candidates WHERE job_problem_id IN (SELECT id FROM anew)")
    op.execute(
        "DELETE FROM items WHERE kind = 'refine' OR state = 'joined' "
        "OR kind IN ('compare', 'finish') AND ref IN (SELECT CAST(id AS VARCHAR(64)) FROM anew) "
        "OR kind IN ('compile', 'verify', 'measure') AND state IN ('waiting', 'claimed')"
    )
    op.execute(
        "UPDATE items SET state = 'waiting', attempt = 0, token = NULL, worker = NULL, lease_expires_at = NULL, "
        f"started_at = NULL, finished_at = NULL WHERE EXISTS (SELECT 1 FROM job_problems WHERE {_LIVE} AND {_ITS_PLAN})"
    )
    op.execute(
        "UPDATE job_problems SET planned = false, candidate_count = 0, comparison = NULL "
        "WHERE id IN (SELECT id FROM anew)"
    )
    op.drop_table("anew")
    op.execute("DELETE FROM builds WHERE state IN ('pending', 'compiling') AND code_digest IS NULL")
    op.execute("UPDATE builds SET state = 'ok' WHERE state IN ('pending', 'compiling')")
    # Of a kernel that was compiled before, and lost its library, nothing else has the text.
    op.execute(
        "DELETE FROM groups WHERE state IN ('waiting', 'joined') "
        "AND NOT EXISTS (SELECT 1 FROM builds WHERE builds.group_id = groups.id)"
    )
    op.execute("UPDATE groups SET state = 'cancelled' WHERE state IN ('waiting', 'joined')")


def _forget_screening() -> None:
    op.execute("DELETE FROM builds WHERE id IN (SELECT screening_build FROM candidates)")
    op.execute("DELETE FROM toolchains WHERE CAST(targets AS TEXT) = '[]'")
    skip = sa.text(
        "UPDATE candidates SET verdict = 'skipped', message = :why, predicted_us = NULL, prediction = NULL, "
        "measured_us = NULL, measurement = NULL WHERE screening_build = build"
    )
    op.execute(skip.bindparams(why=ONLY_SCREENED))
    op.drop_column("candidates", "screening_build")
    op.drop_column("job_problems", "screening")
    problems = sa.table("job_problems", sa.column("id"), sa.column("search", _JSON))
    for row in op.get_bind().execute(sa.select(problems)).all():
        if "screening" in row.search:
            search = {name: value for name, value in row.search.items() if name != "screening"}
            op.execute(sa.update(problems).where(problems.c.id == row.id).values(search=_json(search)))
    winners = sa.table("winners", sa.column("key"), sa.column("record", _JSON), sa.column("searches", _JSON))
    for row in op.get_bind().execute(sa.select(winners)).all():
        searches = [entry for entry in row.searches if "screening" not in entry["search"]]
        if len(searches) < len(row.searches):
            values = {"searches": _json(searches), "record": _json({**row.record, "searches": searches})}
            op.execute(sa.update(winners).where(winners.c.key == row.key).values(values))


def _json(value: Any) -> Any:
    return sa.bindparam(None, value, type_=_JSON)


def _take_turns() -> None:
    for name in ("used_seconds", "turn_seconds"):
        op.add_column("jobs", sa.Column(name, sa.Float(), server_default=sa.text("0"), nullable=False))
    op.drop_index("ix_items_best", table_name="items")
    op.create_index("ix_items_waiting", "items", ["state", "kind"], unique=False)


def _lease_builds() -> None:
    # SQLite copies a table to alter it, and what refers to the old one is deleted with it: so before there is any.
    op.execute("CREATE TABLE jobs_of_items AS SELECT id, job_id FROM items WHERE job_id IS NOT NULL")
    _drop("items", ["job_id"], ["job_id", "priority"])
    _drop("groups", ["job_id", "joined_to"], ["job_id", "joined_to", "started_at"])
    op.create_table(
        "item_jobs",
        sa.Column("item_id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("wanted", sa.Boolean(), nullable=False),
        sa.Column("waited_seconds", sa.Float(), server_default=sa.text("0"), nullable=False),
        sa.ForeignKeyConstraint(["item_id"], ["items.id"], name=op.f("fk_item_jobs_item_id_items"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_item_jobs_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("item_id", "job_id", name=op.f("pk_item_jobs")),
    )
    op.execute("INSERT INTO item_jobs (item_id, job_id, wanted) SELECT id, job_id, true FROM jobs_of_items")
    op.drop_table("jobs_of_items")
    op.create_index(op.f("ix_item_jobs_job_id"), "item_jobs", ["job_id"], unique=False)
    op.drop_index("ix_builds_verify_group_id", table_name="builds")
    with op.batch_alter_table("builds") as builds:
        builds.drop_column("verify_group_id")
        builds.add_column(sa.Column("kernel_json", _JSON, nullable=True))
        for name in ("predicted_seconds", "predicted_bytes"):
            builds.add_column(sa.Column(name, sa.Float(), server_default=sa.text("0"), nullable=False))
        builds.add_column(sa.Column("suspect", sa.String(length=64), nullable=True))
        builds.add_column(sa.Column("attempts", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.create_index(op.f("ix_builds_suspect"), "builds", ["suspect"], unique=False)
    unbuilt = sa.text("state IN ('pending', 'given_up')")
    place = ["state", "target", "toolchain"]
    op.create_index("ix_builds_unbuilt", "builds", place, sqlite_where=unbuilt, postgresql_where=unbuilt)
    op.create_table(
        "demands",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("build", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=16), nullable=False),
        sa.Column("toolchain", sa.String(length=64), nullable=False),
        sa.Column("predicted_seconds", sa.Float(), nullable=False),
        sa.Column("wanted_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["build"], ["builds.id"], name=op.f("fk_demands_build_builds"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_demands_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "build", name=op.f("pk_demands")),
    )
    op.create_index(op.f("ix_demands_build"), "demands", ["build"], unique=False)
    longest = [*map(sa.text, ("job_id", "target", "toolchain", "predicted_seconds DESC"))]
    op.create_index("ix_demands_longest", "demands", longest, unique=False)
    unjudged = sa.text("verdict IS NULL")
    for name, column in (("ix_candidates_unjudged", "job_problem_id"), ("ix_candidates_unjudged_build", "build")):
        op.create_index(name, "candidates", [column], sqlite_where=unjudged, postgresql_where=unjudged)


def _drop(table: str, indexed: list[str], columns: list[str]) -> None:
    for column in indexed:
        op.drop_index(f"ix_{table}_{column}", table_name=table)
    with op.batch_alter_table(table) as altered:
        altered.drop_constraint(f"fk_{table}_job_id_jobs", type_="foreignkey")
        for column in columns:
            altered.drop_column(column)
