"""Jobs of one priority take turns: what each has used of the workers' time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    for name in ("used_seconds", "turn_seconds"):
        op.add_column("jobs", sa.Column(name, sa.Float(), server_default=sa.text("0"), nullable=False))
    op.drop_index("ix_items_best", table_name="items")
    op.create_index("ix_items_waiting", "items", ["state", "kind"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_items_waiting", table_name="items")
    best = [*map(sa.text, ("state", "kind", "priority DESC", "predicted_seconds DESC", "id"))]
    op.create_index("ix_items_best", "items", best, unique=False)
    for name in ("turn_seconds", "used_seconds"):
        op.drop_column("jobs", name)
