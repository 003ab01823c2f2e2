"""A database of an older release gets the tables of today: its data are changed, then all that is missing is made.

A new table or column needs no code here: it is made as `storage.database.tables` has it (a column that may not be null
needs a default of the server). Each function below is of one revision, for databases that are older.
"""

import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext

from codegen.identity import problem_digest
from storage.database.tables import Base

OLDEST = "0007"
ONLY_SCREENED = "it was only screened, which this release does not do: submit its problem again"
_RENAMED = ("items", "item_jobs", "demands")  # now tasks, task_jobs, pending_builds
_FIELDS = ("so_sha256", "cubin_sha256", "source_sha256", "ptx_sha256", "sass_sha256", "code_digest")
_AT_ONCE = 500
_JSON = sa.JSON(none_as_null=True)
_LIVE = "job_problems.state IN ('queued', 'running')"
_ITS_PLAN = "items.kind = 'plan' AND items.ref LIKE job_problems.job_id || ':%'"


def migrate(connection: sa.Connection, present: str) -> None:
    """From the revision `present`, which is OLDEST or later."""
    op = Operations(MigrationContext.configure(connection, opts={"target_metadata": Base.metadata}))
    if present < "0008":
        _plan_anew(op)
        _forget_screening(op)
        _lease_builds(op)
    if present < "0014":
        (_rename if connection.dialect.name == "postgresql" else _copy)(op)
        op.execute("ALTER TABLE library_builders RENAME COLUMN item_id TO task_id")
        op.execute("UPDATE tasks SET state = 'leased' WHERE state = 'claimed'")
    _make_what_is_missing(op)
    if present < "0008":
        op.execute("INSERT INTO task_jobs (task_id, job_id, wanted) SELECT id, job_id, true FROM jobs_of_items")
        op.drop_table("jobs_of_items")
    if present < "0012":
        _find_measured(op)
    if present < "0013":
        _find_used(op)


def _make_what_is_missing(op: Operations) -> None:
    connection = op.get_bind()
    Base.metadata.create_all(connection)
    for table in Base.metadata.sorted_tables:
        inspector = sa.inspect(connection)
        columns = {column["name"] for column in inspector.get_columns(table.name)}
        indices = {index["name"] for index in inspector.get_indexes(table.name)}
        for column in table.columns:
            if column.name not in columns:
                options: Any = {"server_default": column.server_default, "nullable": column.nullable}
                op.add_column(table.name, sa.Column(column.name, column.type, **options))
        for index in table.indexes:
            if index.name not in indices:
                index.create(connection)


# ---- 0008: nothing is screened, jobs take turns, workers lease builds that jobs need, compile times are not learnt


def _plan_anew(op: Operations) -> None:
    """Unfinished problems as if never planned, but for those only to be finished, and imported ones."""
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


def _forget_screening(op: Operations) -> None:
    """Searches that screened cover nothing, because only some of their kernels were compiled in full."""
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
    op.drop_table("compile_models")


def _json(value: Any) -> Any:
    return sa.bindparam(None, value, type_=_JSON)


def _lease_builds(op: Operations) -> None:
    op.execute("CREATE TABLE jobs_of_items AS SELECT id, job_id FROM items WHERE job_id IS NOT NULL")
    op.drop_index("ix_items_best", table_name="items")
    _drop(op, "items", ["job_id"], ["job_id", "priority"])
    _drop(op, "groups", ["job_id", "joined_to"], ["job_id", "joined_to", "started_at"])
    op.drop_index("ix_builds_verify_group_id", table_name="builds")
    op.drop_column("builds", "verify_group_id")


def _drop(op: Operations, table: str, indexed: Sequence[str], columns: Sequence[str]) -> None:
    for column in indexed:
        op.drop_index(f"ix_{table}_{column}", table_name=table)
    with op.batch_alter_table(table) as altered:
        altered.drop_constraint(f"fk_{table}_job_id_jobs", type_="foreignkey")
        for column in columns:
            altered.drop_column(column)


# ---- 0014: what is now `tasks`, `task_jobs` and `pending_builds`


def _new(text: str) -> str:
    return text.replace("item", "task").replace("demands", "pending_builds")


def _there(op: Operations) -> list[str]:
    return [name for name in _RENAMED if sa.inspect(op.get_bind()).has_table(name)]


def _copy(op: Operations) -> None:
    """SQLite renames no constraints: they are written anew, in the old statements with the new names."""
    indices = []
    names = _there(op)
    for name in names:
        written = sa.text("SELECT type, sql FROM sqlite_master WHERE tbl_name = :name AND sql IS NOT NULL")
        statements = op.get_bind().execute(written, {"name": name}).all()
        indices += [row.sql for row in statements if row.type == "index"]
        (table,) = (row.sql for row in statements if row.type == "table")
        op.execute(_new(table))
        op.execute(f"INSERT INTO {_new(name)} SELECT * FROM {name}")
    for name in reversed(names):
        op.drop_table(name)
    for index in indices:
        op.execute(_new(index))


def _rename(op: Operations) -> None:
    for name in _there(op):
        inspector = sa.inspect(op.get_bind())
        keys = [inspector.get_pk_constraint(name), *inspector.get_unique_constraints(name)]
        for key in [*keys, *inspector.get_foreign_keys(name)]:
            op.execute(f"ALTER TABLE {name} RENAME CONSTRAINT {key['name']} TO {_new(str(key['name']))}")
        for index in inspector.get_indexes(name):
            if "duplicates_constraint" not in index:
                op.execute(f"ALTER INDEX {index['name']} RENAME TO {_new(str(index['name']))}")
        op.rename_table(name, _new(name))
        if name == "item_jobs":
            op.execute("ALTER TABLE task_jobs RENAME COLUMN item_id TO task_id")
    op.execute("ALTER SEQUENCE items_id_seq RENAME TO tasks_id_seq")


# ---- 0012, 0013: winner records are found by their problem, and by the digests in them; they are large, so in parts


def _find_measured(op: Operations) -> None:
    winner = Base.metadata.tables["winners"]
    measured = sa.select(winner.c.key, winner.c.problem).where(
        winner.c.device_class.not_like("predicted:%"), sa.cast(winner.c.record, sa.Text) != "{}"
    )
    last, page = "", measured.order_by(winner.c.key).limit(_AT_ONCE)
    while rows := op.get_bind().execute(page.where(winner.c.key > last)).all():
        last = rows[-1].key
        for row in rows:
            found = sa.update(winner).where(winner.c.key == row.key)
            op.get_bind().execute(found.values(measured_problem=problem_digest(row.problem)))


def _find_used(op: Operations) -> None:
    last, uses = "", Base.metadata.tables["winner_uses"]
    page = sa.text("SELECT key, CAST(record AS TEXT) FROM winners WHERE key > :last ORDER BY key LIMIT :most")
    while rows := op.get_bind().execute(page, {"last": last, "most": _AT_ONCE}).all():
        last = rows[-1][0]
        fronts = [(key, json.loads(record).get("front", [])) for key, record in rows]
        named = {(entry[name], key) for key, front in fronts for entry in front for name in _FIELDS if entry.get(name)}
        if named:
            op.get_bind().execute(sa.insert(uses), [{"digest": digest, "key": key} for digest, key in sorted(named)])
