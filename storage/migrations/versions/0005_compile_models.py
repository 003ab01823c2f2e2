"""Groups are sized by what compiling took before: a row per toolchain and family of kernels."""

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
        sa.Column("seconds_factor", sa.Float(), nullable=False),
        sa.Column("memory_factor", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("toolchain", "family", name=op.f("pk_compile_models")),
    )


def downgrade() -> None:
    op.drop_table("compile_models")
