"""Imports stand apart from what was found here, and can be withdrawn."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("builds", sa.Column("imported", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("winners", sa.Column("own", sa.JSON(none_as_null=True), nullable=True))
    op.create_table(
        "imports",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("by", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=8), nullable=True),
        sa.Column("overwrites", sa.Boolean(), nullable=False),
        sa.Column("device_class", sa.String(length=128), nullable=False),
        sa.Column("uuid", sa.String(length=64), nullable=False),
        sa.Column("driver", sa.String(length=32), nullable=False),
        sa.Column("measured_at", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("withdrawn_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_imports")),
    )
    op.create_index(op.f("ix_imports_device_class"), "imports", ["device_class"])
    op.create_index(op.f("ix_imports_created_at"), "imports", ["created_at"])
    for table, column, more in (
        ("imported_winners", "key", [sa.Column("record", sa.JSON(none_as_null=True), nullable=False)]),
        ("imported_findings", "code_digest", []),
    ):
        op.create_table(
            table,
            sa.Column("import_id", sa.String(length=32), nullable=False),
            sa.Column(column, sa.String(length=64), nullable=False),
            *more,
            sa.ForeignKeyConstraint(["import_id"], ["imports.id"], name=op.f(f"fk_{table}_import_id_imports")),
            sa.PrimaryKeyConstraint("import_id", column, name=op.f(f"pk_{table}")),
        )
        op.create_index(op.f(f"ix_{table}_{column}"), table, [column])
