"""Candidates are measured on GPUs: their times, the devices, and where the machine code of a build lies."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def _resize_target(before: int, after: int) -> None:
    """SQLite copies the table for it, and forgets an index over expressions on the way."""
    op.drop_index("ix_items_best", table_name="items")
    with op.batch_alter_table("items") as items:
        items.alter_column("target", existing_type=sa.String(length=before), type_=sa.String(length=after))
    op.create_index(
        "ix_items_best",
        "items",
        ["state", "kind", sa.text("priority DESC"), sa.text("predicted_seconds DESC"), "id"],
        unique=False,
    )


def upgrade() -> None:
    op.create_table(
        "measurements",
        sa.Column("code_digest", sa.String(length=64), nullable=False),
        sa.Column("candidate", sa.String(length=64), nullable=False),
        sa.Column("device_class", sa.String(length=128), nullable=False),
        sa.Column("driver", sa.String(length=32), nullable=False),
        sa.Column("plan_version", sa.String(length=64), nullable=False),
        sa.Column("median_us", sa.Float(), nullable=False),
        sa.Column("measurement", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("code_digest", "candidate", "device_class", "driver", name=op.f("pk_measurements")),
    )
    op.create_table(
        "devices",
        sa.Column("uuid", sa.String(length=64), nullable=False),
        sa.Column("device_class", sa.String(length=128), nullable=False),
        sa.Column("capability", sa.String(length=8), nullable=False),
        sa.Column("driver", sa.String(length=32), nullable=False),
        sa.Column("description", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("worker", sa.String(length=128), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.Column("drained", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("uuid", name=op.f("pk_devices")),
    )
    op.create_index(op.f("ix_devices_device_class"), "devices", ["device_class"], unique=False)
    op.create_index(op.f("ix_winners_device_class"), "winners", ["device_class"], unique=False)
    op.add_column("candidates", sa.Column("measurement", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("job_problems", sa.Column("comparison", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("builds", sa.Column("library", sa.String(length=64), nullable=True))
    for table in ("groups", "libraries"):
        op.add_column(table, sa.Column("ptx", sa.String(length=64), nullable=True))
        op.add_column(table, sa.Column("sass", sa.String(length=64), nullable=True))
    _resize_target(16, 128)  # a device class is longer than an architecture's name


ENDED = "the service went back to a release that does not measure on GPUs: submit the problem again"


def _fail_what_is_measured() -> None:
    """The older release knows no work for problems on a GPU: they would wait for ever, and their jobs with them."""
    fields = {"now": time.time(), "error": ENDED}
    on_gpu = "device_class NOT LIKE 'predicted:%' AND state IN ('queued', 'running')"
    connection = op.get_bind()
    connection.execute(
        sa.text(
            "UPDATE items SET state = 'cancelled', finished_at = :now, lease_expires_at = NULL "
            "WHERE kind = 'finish' AND state IN ('waiting', 'claimed') "
            f"AND ref IN (SELECT CAST(id AS VARCHAR(64)) FROM job_problems WHERE {on_gpu})"
        ),
        {"now": fields["now"]},
    )
    jobs = connection.execute(sa.text(f"SELECT DISTINCT job_id FROM job_problems WHERE {on_gpu}")).scalars().all()
    connection.execute(
        sa.text(
            "UPDATE job_problems SET state = 'failed', planned = true, finished_at = :now, error = :error "
            f"WHERE {on_gpu}"
        ),
        fields,
    )
    for job in jobs:
        states = "SELECT count(*) FROM job_problems WHERE job_id = :job AND state"
        connection.execute(
            sa.text(
                f"UPDATE jobs SET state = CASE WHEN ({states} = 'done') > 0 THEN 'partial' ELSE 'failed' END, "
                "finished_at = :now, error = :error "
                f"WHERE id = :job AND state IN ('queued', 'running') AND ({states} IN ('queued', 'running')) = 0"
            ),
            {"job": job, **fields},
        )


def downgrade() -> None:
    _fail_what_is_measured()
    op.execute(sa.text("DELETE FROM items WHERE kind IN ('measure', 'compare')"))
    _resize_target(128, 16)
    for table in ("groups", "libraries"):
        op.drop_column(table, "sass")
        op.drop_column(table, "ptx")
    op.drop_column("builds", "library")
    op.drop_column("job_problems", "comparison")
    op.drop_column("candidates", "measurement")
    op.drop_index(op.f("ix_winners_device_class"), table_name="winners")
    op.drop_index(op.f("ix_devices_device_class"), table_name="devices")
    op.drop_table("devices")
    op.drop_table("measurements")
