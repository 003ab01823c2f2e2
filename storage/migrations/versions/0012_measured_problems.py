"""What was measured is found by its problem, on whichever device class."""

import sqlalchemy as sa
from alembic import op

from codegen.identity import problem_digest

revision = "0012"
down_revision = "0011"
_AT_ONCE = 1000


def upgrade() -> None:
    op.add_column("winners", sa.Column("measured_problem", sa.String(length=64), nullable=True))
    winner = sa.table(
        "winners",
        sa.column("key", sa.String),
        sa.column("device_class", sa.String),
        sa.column("problem", sa.JSON),
        sa.column("record", sa.JSON),
        sa.column("measured_problem", sa.String),
    )
    session = op.get_bind()
    measured = sa.select(winner.c.key, winner.c.problem).where(
        winner.c.device_class.not_like("predicted:%"), sa.cast(winner.c.record, sa.Text) != "{}"
    )
    found = sa.update(winner).where(winner.c.key == sa.bindparam("of")).values(measured_problem=sa.bindparam("digest"))
    last = ""
    while rows := session.execute(measured.where(winner.c.key > last).order_by(winner.c.key).limit(_AT_ONCE)).all():
        last = rows[-1].key
        session.execute(found, [{"of": row.key, "digest": problem_digest(row.problem)} for row in rows])
    op.create_index("ix_winners_measured", "winners", ["measured_problem", "target", "device_class"], unique=False)
