"""Tasks, leased by workers, and pending builds: until here `items`, `claimed` and `demands`."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

_TABLES = ("items", "item_jobs", "demands")


def upgrade() -> None:
    (_rename if op.get_bind().dialect.name == "postgresql" else _copy)()
    op.execute("ALTER TABLE library_builders RENAME COLUMN item_id TO task_id")
    op.execute("UPDATE tasks SET state = 'leased' WHERE state = 'claimed'")


def _new(text: str) -> str:
    return text.replace("item", "task").replace("demands", "pending_builds")


def _copy() -> None:
    """SQLite renames no constraints: they are written anew, in the old statements with the new names."""
    indices = []
    for name in _TABLES:
        written = sa.text("SELECT type, sql FROM sqlite_master WHERE tbl_name = :name AND sql IS NOT NULL")
        statements = op.get_bind().execute(written, {"name": name}).all()
        indices += [row.sql for row in statements if row.type == "index"]
        (table,) = (row.sql for row in statements if row.type == "table")
        op.execute(_new(table))
        op.execute(f"INSERT INTO {_new(name)} SELECT * FROM {name}")
    for name in reversed(_TABLES):
        op.drop_table(name)
    for index in indices:
        op.execute(_new(index))


def _rename() -> None:
    for name in _TABLES:
        inspector = sa.inspect(op.get_bind())
        keys = [inspector.get_pk_constraint(name), *inspector.get_unique_constraints(name)]
        for key in [*keys, *inspector.get_foreign_keys(name)]:
            op.execute(f"ALTER TABLE {name} RENAME CONSTRAINT {key['name']} TO {_new(str(key['name']))}")
        for index in inspector.get_indexes(name):
            if "duplicates_constraint" not in index:
                op.execute(f"ALTER INDEX {index['name']} RENAME TO {_new(str(index['name']))}")
        op.rename_table(name, _new(name))
    op.execute("ALTER TABLE task_jobs RENAME COLUMN item_id TO task_id")
    op.execute("ALTER SEQUENCE items_id_seq RENAME TO tasks_id_seq")
