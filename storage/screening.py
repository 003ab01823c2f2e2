"""The end of a problem's screening: the best candidates get builds that are compiled in full, and are judged anew."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import bindparam, update

from cukiln.types import StageSeconds
from storage.builds import NewBuild
from storage.database import Session
from storage.errors import LostClaim
from storage.items import Claim, complete
from storage.judge import LIVE, finish_judged
from storage.judging_work import Followed, Versions
from storage.plans import see_to_builds
from storage.rows import core
from storage.seconds import add_seconds
from storage.tables import CandidateRow, JobProblemRow


def record_refined(
    session: Session,
    claim: Claim,
    chosen: Mapping[str, str],
    builds: Mapping[str, NewBuild],
    versions: Versions,
    *,
    spent: StageSeconds,
) -> Followed:
    """Complete a refine item. `chosen`: the builds, compiled in full, of those candidates that get one; they count as
    unjudged again, and what was found of their screening builds is forgotten. `builds` has them by id; `spent`: on the
    choice. Returns what waits now. Raises `LostClaim`.
    """
    complete(session, claim)
    problem_id = int(claim.ref)
    device_class = session.scalar(
        update(JobProblemRow)
        .where(JobProblemRow.id == problem_id, JobProblemRow.state.in_(LIVE), JobProblemRow.screening)
        .values(screening=False)
        .returning(JobProblemRow.device_class)
    )
    if device_class is None:
        raise LostClaim(claim.kind, claim.ref, claim.token)
    _give_builds(session, problem_id, chosen)
    waited = StageSeconds(wall=claim.waited_seconds)
    add_seconds(session, {problem_id: {"lower": spent, "queue": waited}})
    followed = see_to_builds(
        session, claim.job_id, [(problem_id, device_class, build) for build in chosen.values()], builds, versions
    )
    return Followed([*followed.judged, *finish_judged(session, [problem_id])], followed.waiting)


def _give_builds(session: Session, problem_id: int, chosen: Mapping[str, str]) -> None:
    if not chosen:
        return
    table = core(CandidateRow)
    known = ("verdict", "message", "predicted_us", "prediction", "measured_us", "measurement")
    session.execute(
        update(table)
        .where(table.c.job_problem_id == problem_id, table.c.candidate == bindparam("of_candidate"))
        .values(build=bindparam("in_full"), **dict.fromkeys(known)),
        [{"of_candidate": candidate, "in_full": build} for candidate, build in chosen.items()],
    )
