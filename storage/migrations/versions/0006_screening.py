"""Candidates may be screened before the best of them are compiled in full."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    # Nothing from before was screened.
    op.add_column("job_problems", sa.Column("screening", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("candidates", sa.Column("screening_build", sa.String(length=64), nullable=True))


ENDED = "the service went back to a release without screening: submit the problem again, without search.screening"


def _fail_what_is_screened() -> None:
    """The older release would wait for ever for what is being screened, and publish what was only screened."""
    fields = {"now": time.time(), "error": ENDED}
    screened = (
        "(id IN (SELECT job_problem_id FROM candidates WHERE screening_build IS NOT NULL) "
        "OR CAST(search AS TEXT) LIKE '%\"screening\"%') AND state IN ('queued', 'running')"
    )
    connection = op.get_bind()
    connection.execute(
        sa.text(
            "UPDATE items SET state = 'cancelled', finished_at = :now, lease_expires_at = NULL "
            "WHERE kind IN ('compare', 'finish') AND state IN ('waiting', 'claimed') "
            f"AND ref IN (SELECT CAST(id AS VARCHAR(64)) FROM job_problems WHERE {screened})"
        ),
        {"now": fields["now"]},
    )
    jobs = connection.execute(sa.text(f"SELECT DISTINCT job_id FROM job_problems WHERE {screened}")).scalars().all()
    connection.execute(
        sa.text(f"UPDATE job_problems SET state = 'failed', finished_at = :now, error = :error WHERE {screened}"),
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


def _forget_screened_searches() -> None:
    """The older release cannot read them: what they covered is searched again."""
    connection = op.get_bind()
    winners = sa.table("winners", *(sa.column(name) for name in ("key", "record", "searches")))
    json = sa.JSON(none_as_null=True)
    record, searches = (sa.type_coerce(winners.c[name], json).label(name) for name in ("record", "searches"))
    for row in connection.execute(sa.select(winners.c.key, record, searches)).all():
        kept = [entry for entry in row.searches if "screening" not in entry["search"]]
        if len(kept) < len(row.searches):
            values = {"searches": kept, "record": {**row.record, "searches": kept}}
            typed = {name: sa.bindparam(name, value, type_=json) for name, value in values.items()}
            connection.execute(sa.update(winners).where(winners.c.key == row.key).values(typed))


def downgrade() -> None:
    _fail_what_is_screened()
    _forget_screened_searches()
    op.execute(sa.text("DELETE FROM items WHERE kind = 'refine'"))
    op.drop_column("candidates", "screening_build")
    op.drop_column("job_problems", "screening")
