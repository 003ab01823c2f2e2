"""Groups that share the file of another, whichever jobs they are of."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("groups", sa.Column("joined_to", sa.String(length=32), nullable=True))
    op.create_index(op.f("ix_groups_joined_to"), "groups", ["joined_to"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_groups_joined_to"), table_name="groups")
    op.drop_column("groups", "joined_to")
