"""Groups are sized by what compiling took before, and a winner's library is built by one attempt at a time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "compile_models",
        sa.Column("toolchain", sa.String(length=64), nullable=False),
        sa.Column("family", sa.String(length=128), nullable=False),
        sa.Column("records", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("toolchain", "family", name=op.f("pk_compile_models")),
    )
    op.create_table(
        "library_builders",
        sa.Column("library", sa.String(length=64), nullable=False),
        sa.Column("item_id", sa.Integer(), nullable=False),
        sa.Column("token", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("library", name=op.f("pk_library_builders")),
    )


def downgrade() -> None:
    op.drop_table("library_builders")
    op.drop_table("compile_models")
