"""Candidates are not screened any more: there is one kind of build.

Unfinished problems that asked for screening are planned anew, without it. In those that have ended, the candidates that
were only screened are skipped. Searches that screened cover nothing: only some of their kernels were compiled in full.
"""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

ONLY_SCREENED = "it was only screened, which this release does not do: submit its problem again"
_JSON = sa.JSON(none_as_null=True)


def upgrade() -> None:
    _forget_builds()
    _forget_searches()
    _plan_anew()
    skip = sa.text(
        "UPDATE candidates SET verdict = 'skipped', message = :why, predicted_us = NULL, prediction = NULL, "
        "measured_us = NULL, measurement = NULL WHERE screening_build = build"
    )
    op.execute(skip.bindparams(why=ONLY_SCREENED))
    op.execute("DELETE FROM items WHERE kind = 'refine'")
    op.drop_column("candidates", "screening_build")
    op.drop_column("job_problems", "screening")


def downgrade() -> None:
    op.add_column("job_problems", sa.Column("screening", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("candidates", sa.Column("screening_build", sa.String(length=64), nullable=True))


def _forget_builds() -> None:
    """The builds that were compiled fast, with the demands for them, and the work on their files."""
    builds = "SELECT screening_build FROM candidates WHERE screening_build IS NOT NULL"
    groups = f"SELECT group_id FROM builds WHERE id IN ({builds}) AND group_id IS NOT NULL"
    for update in (
        "UPDATE items SET state = 'cancelled', finished_at = :now, lease_expires_at = NULL "
        "WHERE kind IN ('compile', 'verify', 'measure') AND state IN ('waiting', 'claimed') "
        f"AND substr(ref, 1, 32) IN ({groups})",
        f"UPDATE groups SET state = 'cancelled', finished_at = :now WHERE state = 'compiling' AND id IN ({groups})",
    ):
        op.execute(sa.text(update).bindparams(now=time.time()))
    op.execute(f"DELETE FROM builds WHERE id IN ({builds})")
    op.execute("DELETE FROM toolchains WHERE CAST(targets AS TEXT) = '[]'")


def _forget_searches() -> None:
    """Of problems that have not ended, `screening` stays as a mark of those that are planned anew."""
    problems = sa.table("job_problems", *(sa.column(name) for name in ("id", "state", "search", "screening")))
    search = sa.type_coerce(problems.c.search, _JSON).label("search")
    for row in op.get_bind().execute(sa.select(problems.c.id, problems.c.state, search)).all():
        if "screening" in row.search:
            asked = {name: value for name, value in row.search.items() if name != "screening"}
            values = {"search": _json(asked), "screening": row.state in ("queued", "running")}
            op.execute(sa.update(problems).where(problems.c.id == row.id).values(values))
    winners = sa.table("winners", *(sa.column(name) for name in ("key", "record", "searches")))
    record, searches = (sa.type_coerce(winners.c[name], _JSON).label(name) for name in ("record", "searches"))
    for row in op.get_bind().execute(sa.select(winners.c.key, record, searches)).all():
        kept = [entry for entry in row.searches if "screening" not in entry["search"]]
        if len(kept) < len(row.searches):
            values = {"searches": _json(kept), "record": _json({**row.record, "searches": kept})}
            op.execute(sa.update(winners).where(winners.c.key == row.key).values(values))


def _json(value: Any) -> Any:
    return sa.bindparam(None, value, type_=_JSON)


def _plan_anew() -> None:
    plan = (
        "kind = 'plan' AND EXISTS "
        "(SELECT 1 FROM job_problems WHERE screening AND items.ref LIKE job_problems.job_id || ':%')"
    )
    op.execute("DELETE FROM candidates WHERE job_problem_id IN (SELECT id FROM job_problems WHERE screening)")
    op.execute(
        "DELETE FROM items WHERE kind IN ('compare', 'finish') "
        "AND ref IN (SELECT CAST(id AS VARCHAR(64)) FROM job_problems WHERE screening)"
    )
    op.execute(f"UPDATE item_jobs SET wanted = true WHERE item_id IN (SELECT id FROM items WHERE {plan})")
    op.execute(
        "UPDATE items SET state = 'waiting', attempt = 0, token = NULL, worker = NULL, lease_expires_at = NULL, "
        f"started_at = NULL, finished_at = NULL WHERE {plan}"
    )
    op.execute("UPDATE job_problems SET planned = false, candidate_count = 0, comparison = NULL WHERE screening")
