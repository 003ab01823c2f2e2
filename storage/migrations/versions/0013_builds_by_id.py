"""Builds are found by state only where few have it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    unbuilt = sa.text("state IN ('pending', 'given_up')")
    op.drop_index("ix_builds_state", table_name="builds")
    op.create_index(
        "ix_builds_unbuilt",
        "builds",
        ["state", "target", "toolchain"],
        sqlite_where=unbuilt,
        postgresql_where=unbuilt,
    )


def downgrade() -> None:
    op.drop_index("ix_builds_unbuilt", table_name="builds")
    op.create_index("ix_builds_state", "builds", ["state", "target", "toolchain"], unique=False)
