"""Jobs say which of their candidates are run from their PTX; what that showed is stored with the build."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("ptx", sa.String(length=8), server_default=sa.text("'winners'"), nullable=False))
    op.add_column("builds", sa.Column("ptx_verdict", sa.JSON(none_as_null=True), nullable=True))
