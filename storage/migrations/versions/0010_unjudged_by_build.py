"""Unjudged candidates are found by their build among as many that are judged."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    unjudged = sa.text("verdict IS NULL")
    op.create_index(
        "ix_candidates_unjudged_build", "candidates", ["build"], sqlite_where=unjudged, postgresql_where=unjudged
    )


def downgrade() -> None:
    op.drop_index("ix_candidates_unjudged_build", table_name="candidates")
