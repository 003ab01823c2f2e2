"""Every candidate of a problem run from its PTX before a winner is chosen, where the job asks for it."""

import gzip
import logging
from collections.abc import Mapping, Sequence

from storage.database.sql import chunks
from storage.entities.candidates import StoredCandidate, forget_ptx_verdicts, ptx_verdict_of, write_ptx_verdicts
from storage.entities.groups import load_group
from storage.entities.jobs import JobProblem
from storage.entities.libraries import PtxVerdict
from storage.entities.stage_times import add_seconds
from storage.errors import BlobCorrupt, BlobMissing
from storage.queue.tasks import require_lease, spend
from storage.transfer.imports import refuse_candidate
from storage.transitions.take_work import yields_to_any
from workers import wake_ups
from workers.steps.context import HandBack, StepContext
from workers.steps.ptx_runs import PtxRuns
from workers.steps.rank import Ranked

log = logging.getLogger("cukiln.finish")

AT_ONCE = 8  # kernels between two looks at the budget; the PTX of their file is read once for them
WRONG = "run from its PTX on the CPU: {message}"


def judge_candidates(
    runs: PtxRuns,
    problem: JobProblem,
    stored: Sequence[StoredCandidate],
    ranked: Sequence[Ranked],
    deadline: float | None,
) -> bool:
    """Refuse each of the `ranked` whose kernel its PTX shows to be wrong; whether all were judged. The files with the
    fastest come first; what is left when the budget ends stays as it is. Raises InfrastructureError, Cancelled,
    LostLease, and HandBack where it is another job's turn: what was judged stays."""
    if runs.target.emulates is not None:
        return True  # an emulation has no PTX
    plan = runs.plan(problem.operator)
    _forget_other_plans(runs.context, stored, plan)
    if runs.are_off:
        return False
    by_build: dict[str, list[Ranked]] = {}
    for entry in ranked:
        by_build.setdefault(entry.stored.build, []).append(entry)
    verdicts = {build: ptx_verdict_of(entries[0].stored, plan) for build, entries in by_build.items()}
    _refuse(runs.context, problem, by_build, {build: known for build, known in verdicts.items() if known is not None})
    by_group: dict[str | None, list[str]] = {}
    for build in (build for build, known in verdicts.items() if known is None):
        by_group.setdefault(by_build[build][0].stored.group_id, []).append(build)
    has_judged = False
    for group, builds in by_group.items():
        text = _ptx_of(runs.context, group)
        for some in chunks(builds, AT_ONCE):
            if deadline is not None and runs.context.database.clock.now() >= deadline:
                return False
            if has_judged:
                _give_way(runs.context)
            _judge(runs, problem, {build: by_build[build] for build in some}, text)
            has_judged = True
    return True


def _judge(runs: PtxRuns, problem: JobProblem, by_build: Mapping[str, Sequence[Ranked]], text: str | None) -> None:
    """All of these builds, and store what that showed and took: another attempt continues behind them."""
    context = runs.context
    kernels = [entries[0].candidate.kernel for entries in by_build.values()]
    judged = dict(zip(by_build, runs.judge(kernels, text), strict=True))
    with context.database.write() as session:
        write_ptx_verdicts(session, {build: each.verdict for build, each in judged.items() if each.lasting})
    _refuse(context, problem, by_build, {build: each.verdict for build, each in judged.items()})
    with context.database.write() as session:
        require_lease(session, context.lease)
        spent = runs.take_spent()
        spend(session, problem.job_id, spent["ptx"].wall)
        add_seconds(session, {problem.id: spent})


def _give_way(context: StepContext) -> None:
    kinds, targets = wake_ups.TASKS_OF[wake_ups.COMPILE], context.workplace.targets
    with context.database.read() as session:
        if yields_to_any(session, context.lease, kinds, targets, context.toolchain.digest):
            raise HandBack


def _forget_other_plans(context: StepContext, stored: Sequence[StoredCandidate], plan: str) -> None:
    """Verdicts that this job does not take for its own."""
    other = {of.build for of in stored if of.ptx_verdict is not None and ptx_verdict_of(of, plan) is None}
    if other:
        with context.database.write() as session:
            forget_ptx_verdicts(session, other)


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
