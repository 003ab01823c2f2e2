"""Candidates may be screened before the best of them are compiled in full."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    # Nothing from before was screened.
    op.add_column("job_problems", sa.Column("screening", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("candidates", sa.Column("screening_build", sa.String(length=64), nullable=True))


def downgrade() -> None:
    op.drop_column("candidates", "screening_build")
    op.drop_column("job_problems", "screening")
