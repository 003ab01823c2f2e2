"""Builds are leased by free workers into groups: demands of jobs instead of groups that jobs own.

Both ways an unfinished problem is planned anew, from what is known of its builds by then: nothing that was compiled or
judged is done again.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_PLANNED_ANEW = """
    SELECT id FROM job_problems WHERE state IN ('queued', 'running')
    AND EXISTS (SELECT 1 FROM items WHERE kind = 'plan' AND ref LIKE job_problems.job_id || ':%')
    AND NOT EXISTS (SELECT 1 FROM items WHERE kind = 'finish' AND ref = CAST(job_problems.id AS VARCHAR(64))
        AND state IN ('waiting', 'claimed'))
"""


def upgrade() -> None:
    _plan_anew()
    # Of a kernel that was compiled before, and lost its library, nothing else has the text.
    op.execute(
        "DELETE FROM groups WHERE state IN ('waiting', 'joined') "
        "AND NOT EXISTS (SELECT 1 FROM builds WHERE builds.group_id = groups.id)"
    )
    op.execute("UPDATE groups SET state = 'cancelled' WHERE state IN ('waiting', 'joined')")
    op.execute("DELETE FROM items WHERE state = 'joined'")
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
    insert = sa.text("INSERT INTO item_jobs (item_id, job_id, wanted) SELECT id, job_id, :wanted FROM jobs_of_items")
    op.execute(insert.bindparams(sa.bindparam("wanted", True, type_=sa.Boolean())))
    op.drop_table("jobs_of_items")
    op.create_index(op.f("ix_item_jobs_job_id"), "item_jobs", ["job_id"], unique=False)
    op.drop_index("ix_builds_verify_group_id", table_name="builds")
    with op.batch_alter_table("builds") as builds:
        builds.drop_column("verify_group_id")
        builds.add_column(sa.Column("kernel_json", sa.JSON(none_as_null=True), nullable=True))
        for name in ("predicted_seconds", "predicted_bytes"):
            builds.add_column(sa.Column(name, sa.Float(), server_default=sa.text("0"), nullable=False))
        builds.add_column(sa.Column("suspect", sa.String(length=64), nullable=True))
        builds.add_column(sa.Column("attempts", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.create_index(op.f("ix_builds_suspect"), "builds", ["suspect"], unique=False)
    op.create_index("ix_builds_state", "builds", ["state", "target", "toolchain"], unique=False)
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
    op.create_index(
        "ix_candidates_unjudged", "candidates", ["job_problem_id"], sqlite_where=unjudged, postgresql_where=unjudged
    )


def downgrade() -> None:
    _plan_anew()
    op.drop_index("ix_candidates_unjudged", table_name="candidates")
    op.drop_table("demands")
    op.drop_index("ix_builds_state", table_name="builds")
    op.drop_index("ix_builds_suspect", table_name="builds")
    with op.batch_alter_table("builds") as builds:
        for name in ("attempts", "suspect", "predicted_bytes", "predicted_seconds", "kernel_json"):
            builds.drop_column(name)
        builds.add_column(sa.Column("verify_group_id", sa.String(length=32), nullable=True))
    op.create_index("ix_builds_verify_group_id", "builds", ["verify_group_id"], unique=False)
    op.execute("UPDATE groups SET state = 'failed' WHERE state NOT IN ('compiled', 'cancelled')")
    op.execute("UPDATE items SET state = 'failed' WHERE state IN ('lost', 'released')")
    with op.batch_alter_table("groups") as groups:
        groups.add_column(sa.Column("job_id", sa.String(length=32), nullable=True))
        groups.add_column(sa.Column("joined_to", sa.String(length=32), nullable=True))
        groups.add_column(sa.Column("started_at", sa.Float(), nullable=True))
        groups.create_foreign_key(op.f("fk_groups_job_id_jobs"), "jobs", ["job_id"], ["id"], ondelete="SET NULL")
    op.execute("CREATE TABLE jobs_of_items AS SELECT item_id, MIN(job_id) AS job_id FROM item_jobs GROUP BY item_id")
    op.drop_table("item_jobs")
    with op.batch_alter_table("items") as items:
        items.add_column(sa.Column("job_id", sa.String(length=32), nullable=True))
        items.add_column(sa.Column("priority", sa.Integer(), server_default=sa.text("0"), nullable=False))
        items.create_foreign_key(op.f("fk_items_job_id_jobs"), "jobs", ["job_id"], ["id"], ondelete="CASCADE")
    op.execute("UPDATE items SET job_id = (SELECT job_id FROM jobs_of_items WHERE item_id = items.id)")
    op.drop_table("jobs_of_items")
    op.execute("UPDATE items SET priority = COALESCE((SELECT priority FROM jobs WHERE jobs.id = items.job_id), 0)")
    op.execute(
        "UPDATE groups SET job_id = (SELECT MIN(job_id) FROM items WHERE kind = 'compile' AND items.ref = groups.id)"
    )
    for table, column in (("items", "job_id"), ("groups", "job_id"), ("groups", "joined_to")):
        op.create_index(op.f(f"ix_{table}_{column}"), table, [column], unique=False)


def _drop(table: str, indexed: list[str], columns: list[str]) -> None:
    for column in indexed:
        op.drop_index(f"ix_{table}_{column}", table_name=table)
    with op.batch_alter_table(table) as altered:
        if "job_id" in columns:
            altered.drop_constraint(f"fk_{table}_job_id_jobs", type_="foreignkey")
        for column in columns:
            altered.drop_column(column)


def _plan_anew() -> None:
    """Unfinished problems as if no planner had seen them. Imported ones have no plan: theirs go on as they are."""
    again = f"IN ({_PLANNED_ANEW})"
    op.execute(f"DELETE FROM candidates WHERE job_problem_id {again}")
    op.execute(
        "DELETE FROM items WHERE kind IN ('refine', 'compare', 'finish') AND ref IN "
        f"(SELECT CAST(again.id AS VARCHAR(64)) FROM ({_PLANNED_ANEW}) AS again)"
    )
    op.execute("DELETE FROM items WHERE kind IN ('compile', 'verify', 'measure') AND state IN ('waiting', 'claimed')")
    op.execute(
        "UPDATE items SET state = 'waiting', attempt = 0, token = NULL, worker = NULL, lease_expires_at = NULL, "
        "started_at = NULL, finished_at = NULL WHERE kind = 'plan' AND EXISTS (SELECT 1 FROM job_problems WHERE "
        "job_problems.state IN ('queued', 'running') AND items.ref LIKE job_problems.job_id || ':%')"
    )
    update = sa.text(
        "UPDATE job_problems SET planned = :no, screening = :no, candidate_count = 0, comparison = NULL "
        f"WHERE id {again}"
    )
    op.execute(update.bindparams(sa.bindparam("no", False, type_=sa.Boolean())))
    op.execute("DELETE FROM builds WHERE state IN ('pending', 'compiling') AND code_digest IS NULL")
    op.execute("UPDATE builds SET state = 'ok' WHERE state IN ('pending', 'compiling')")
