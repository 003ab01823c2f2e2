"""Every candidate of a problem run from its PTX before a winner is chosen, where the job asks for it."""

import gzip
import logging
from collections.abc import Mapping, Sequence

from storage.database.sql import chunks
from storage.entities.candidates import ptx_verdict_of, write_ptx_verdicts
from storage.entities.groups import load_group
from storage.entities.jobs import JobProblem
from storage.entities.libraries import PtxVerdict
from storage.errors import BlobCorrupt, BlobMissing
from storage.transfer.imports import refuse_candidate
from workers.steps.context import StepContext
from workers.steps.ptx_runs import PtxRuns
from workers.steps.rank import Ranked

log = logging.getLogger("cukiln.finish")

AT_ONCE = 8  # kernels between two looks at the budget; the PTX of their file is read once for them
WRONG = "run from its PTX on the CPU: {message}"


def judge_candidates(runs: PtxRuns, problem: JobProblem, ranked: Sequence[Ranked], deadline: float | None) -> bool:
    """Refuse each candidate whose kernel its PTX shows to be wrong; whether all were judged. The files with the fastest
    come first; what is left when the budget ends stays as it is. Raises InfrastructureError, Cancelled."""
    if runs.target.emulates is not None:
        return True  # an emulation has no PTX
    if runs.are_off:
        return False
    plan = runs.plan(problem.operator)
    by_build: dict[str, list[Ranked]] = {}
    for entry in ranked:
        by_build.setdefault(entry.stored.build, []).append(entry)
    verdicts = {build: ptx_verdict_of(entries[0].stored, plan) for build, entries in by_build.items()}
    _refuse(runs.context, problem, by_build, {build: known for build, known in verdicts.items() if known is not None})
    by_group: dict[str | None, list[str]] = {}
    for build in (build for build, known in verdicts.items() if known is None):
        by_group.setdefault(by_build[build][0].stored.group_id, []).append(build)
    for group, builds in by_group.items():
        text = _ptx_of(runs.context, group)
        for some in chunks(builds, AT_ONCE):
            if deadline is not None and runs.context.database.clock.now() >= deadline:
                return False
            judged = runs.judge([by_build[build][0].candidate.kernel for build in some], text)
            lasting = {build: each.verdict for build, each in zip(some, judged, strict=True) if each.lasting}
            with runs.context.database.write() as session:
                write_ptx_verdicts(session, lasting)
            found = {build: each.verdict for build, each in zip(some, judged, strict=True)}
            _refuse(runs.context, problem, by_build, found)
    return True


def _ptx_of(context: StepContext, group: str | None) -> str | None:
    """What nvcc made of a group; None where it is not stored, so that nvcc has to be asked again."""
    with context.database.read() as session:
        stored = load_group(session, group) if group is not None else None
    if stored is None or stored.ptx is None:
        return None
    try:
        return gzip.decompress(context.blobs.get(stored.ptx)).decode("utf-8")
    except (BlobMissing, BlobCorrupt):
        return None


def _refuse(
    context: StepContext,
    problem: JobProblem,
    by_build: Mapping[str, Sequence[Ranked]],
    verdicts: Mapping[str, PtxVerdict],
) -> None:
    wrong = {build: verdict for build, verdict in verdicts.items() if not verdict.is_published}
    if not wrong:
        return
    with context.database.write() as session:
        for build, verdict in wrong.items():
            for entry in by_build[build]:
                words = WRONG.format(message=verdict.message)
                log.warning("candidate %s: %s", entry.candidate.id, words)
                refuse_candidate(session, problem.id, entry.candidate.id, words, verdict.verdict)
