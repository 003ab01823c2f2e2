"""Winners are found by the signature of their problem and its size, jobs by their labels."""

import json

import sqlalchemy as sa
from alembic import op

from codegen.neighbours import stored_place

revision = "0016"
down_revision = "0015"
_AT_ONCE = 500


def upgrade() -> None:
    op.add_column("winners", sa.Column("signature", sa.String(length=64), nullable=True))
    op.add_column("winners", sa.Column("size", sa.Float(), nullable=True))
    _fill_winners()
    op.create_index("ix_winners_neighbours", "winners", ["signature", "target", "size"], unique=False)
    labels = op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("label", sa.String(length=64), nullable=False),
        sa.Column("value", sa.String(length=256), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_labels_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "label", name=op.f("pk_job_labels")),
    )
    _fill_labels(labels)
    op.create_index(
        op.f("ix_job_labels_label_value_created_at_job_id"), "job_labels", ["label", "value", "created_at", "job_id"]
    )


def _fill_winners() -> None:
    """A part at a time. Of an operator from outside nothing is filled in: the next publishing does it."""
    page = sa.text(
        "SELECT key, operator, CAST(problem AS TEXT) FROM winners "
        "WHERE key > :last AND CAST(record AS TEXT) != '{}' ORDER BY key LIMIT :most"
    )
    change = sa.text("UPDATE winners SET signature = :signature, size = :size WHERE key = :key")
    last = ""
    while rows := op.get_bind().execute(page, {"last": last, "most": _AT_ONCE}).all():
        last = rows[-1][0]
        places = [(key, stored_place(operator, json.loads(problem))) for key, operator, problem in rows]
        if values := [{"key": key, "signature": at.signature, "size": at.size} for key, at in places if at is not None]:
            op.get_bind().execute(change, values)


def _fill_labels(labels: sa.Table) -> None:
    page = sa.text(
        "SELECT id, created_at, CAST(labels AS TEXT) FROM jobs "
        "WHERE id > :last AND labels IS NOT NULL ORDER BY id LIMIT :most"
    )
    last = ""
    while rows := op.get_bind().execute(page, {"last": last, "most": _AT_ONCE}).all():
        last = rows[-1][0]
        new = [
            {"job_id": job, "label": label, "value": value, "created_at": created_at}
            for job, created_at, text in rows
            for label, value in json.loads(text).items()
        ]
        if new:
            op.get_bind().execute(sa.insert(labels), new)
