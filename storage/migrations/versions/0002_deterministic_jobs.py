"""Jobs may ask for kernels that give the same bits in every run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    # Jobs from before had no kernels that are not: false changes nothing for them.
    op.add_column("jobs", sa.Column("deterministic", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    op.drop_column("jobs", "deterministic")
