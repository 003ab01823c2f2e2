"""Jobs have names, labels, and the key under which a request may be sent twice."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("name", sa.String(length=256), nullable=True))
    op.add_column("jobs", sa.Column("labels", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("jobs", sa.Column("idempotency", sa.String(length=64), nullable=True))
    op.add_column("jobs", sa.Column("request", sa.String(length=64), nullable=True))
    op.create_index(op.f("ix_jobs_name"), "jobs", ["name"])
    op.create_index(op.f("ix_jobs_idempotency"), "jobs", ["idempotency"], unique=True)
