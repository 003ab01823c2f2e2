"""Items keep the attempts after which they waited again, since when they wait, and phases: a trace shows them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("items", sa.Column("available_at", sa.Float(), nullable=True))
    op.add_column("items", sa.Column("phases", sa.JSON(none_as_null=True), nullable=True))
    # Of items from before nothing is known but their last attempt.
    op.add_column(
        "items", sa.Column("past", sa.JSON(none_as_null=True), nullable=False, server_default=sa.text("'[]'"))
    )


def downgrade() -> None:
    op.drop_column("items", "past")
    op.drop_column("items", "phases")
    op.drop_column("items", "available_at")
