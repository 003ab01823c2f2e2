"""Losses are counted apart from failures; what a limit ended is remembered with the limit; workers pause."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    for table in ("items", "builds"):
        op.add_column(table, sa.Column("losses", sa.Float(), server_default=sa.text("0"), nullable=False))
        op.add_column(table, sa.Column("not_before", sa.Float(), nullable=True))
    op.add_column("builds", sa.Column("reached", sa.JSON(none_as_null=True), nullable=True))
    op.create_table(
        "pauses",
        sa.Column("worker", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("told_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("worker", name=op.f("pk_pauses")),
    )
