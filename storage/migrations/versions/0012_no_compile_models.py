"""Compiles are predicted by the operators' estimates alone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.drop_table("compile_models")


def downgrade() -> None:
    op.create_table(
        "compile_models",
        sa.Column("toolchain", sa.String(length=64), nullable=False),
        sa.Column("family", sa.String(length=128), nullable=False),
        sa.Column("records", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("toolchain", "family", name=op.f("pk_compile_models")),
    )
