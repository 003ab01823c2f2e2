"""What the PTX of a winner's library showed is stored beside it, and found by the PTX."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.add_column("libraries", sa.Column("ptx_verdict", sa.JSON(none_as_null=True), nullable=True))
    op.create_index(op.f("ix_libraries_ptx"), "libraries", ["ptx"], unique=False)
