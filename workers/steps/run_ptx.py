"""Kernels run from their PTX on the CPU before one is published: a winner's own PTX, and of a job that asks for it that
of every candidate of a problem. What it showed is remembered beside the library, or the build."""

import gzip
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from codegen.kernel import Candidate, Kernel
from codegen.ptx.module import SOURCE
from codegen.targets import Target
from cukiln.types import PtxMark, StageSeconds
from storage.database.sql import chunks
from storage.entities.candidates import StoredCandidate, forget_ptx_verdicts, ptx_verdict_of, write_ptx_verdicts
from storage.entities.groups import load_group
from storage.entities.jobs import JobProblem
from storage.entities.libraries import PUBLISHED_AS, Library, PtxVerdict, ptx_verdict, write_ptx_verdict
from storage.entities.stage_times import add_seconds
from storage.entities.verdicts import GPU, Verdict
from storage.errors import BlobCorrupt, BlobMissing
from storage.maintenance.damage import repair
from storage.queue.tasks import require_lease
from storage.transfer.imports import refuse_candidate
from storage.transitions.charge_turns import spend
from storage.transitions.take_work import yields_to_any
from workers import wake_ups
from workers.cpu import ptx as on_cpu
from workers.cpu.verify import CpuVerdict
from workers.steps.context import HandBack, StepContext
from workers.steps.rank import Ranked
from workers.steps.winner_library import once_at_a_time

log = logging.getLogger("cukiln.finish")

OF_LIMITS = ("run_timeout",)
AT_ONCE = 8  # kernels between two looks at the budget; the PTX of their file is read once for them
WRONG = "run from its PTX on the CPU: {message}"


@dataclass(frozen=True)
class RunVerdict:
    """`lasting`: another time shows the same. What a limit ended may end by itself then."""

    verdict: PtxVerdict
    lasting: bool


@dataclass
class PtxRuns:
    """Of one attempt at a problem. `spent`: on all kernels, on what was refused too, as far as it is not stored."""

    context: StepContext
    target: Target
    spent: StageSeconds = field(default_factory=StageSeconds)

    @property
    def are_off(self) -> bool:
        return self.context.settings.verify_ptx == "none"

    def plan(self, operator: str) -> str:
        """The version of the PTX plan."""
        return on_cpu.ptx_plans(self.target.tensor_sums)[operator]

    def take_spent(self) -> dict[str, StageSeconds]:
        """To be stored now: runs from PTX are of `verify`, and counted by themselves beside it."""
        spent, self.spent = self.spent, StageSeconds()
        return {"verify": spent, "ptx": spent}

    def verdicts(self, kernels: Sequence[Kernel], text: str | None) -> list[RunVerdict]:
        """Distinct kernels of one operator. `text`: the PTX that holds them all; None: nvcc is asked for it. Raises
        InfrastructureError where the machine failed, Cancelled."""
        request = on_cpu.PtxRequest(self.target.name, self.context.fresh_seed(), self.target.tensor_sums)
        shown = self._run(kernels, request, text)
        lacking = {each.kernel_id for each in shown if each.verdict not in PUBLISHED_AS and SOURCE in each.message}
        if lacking and text is not None:
            # What is stored has no lines: compiled with them it is the same PTX, and shows the same fault by name.
            wrong = [kernel for kernel in kernels if kernel.id in lacking]
            named = {each.kernel_id: each for each in self._run(wrong, request, None)}
            shown = [_named(each, named.get(each.kernel_id)) for each in shown]
        plan = self.plan(kernels[0].operator)
        return [_run_verdict(each, plan, request.seed) for each in shown]

    def _run(self, kernels: Sequence[Kernel], request: on_cpu.PtxRequest, text: str | None) -> list[CpuVerdict]:
        context = self.context
        tools = (context.toolchain, context.processes, context.settings.limits("verify"))
        verdicts = on_cpu.verify_ptx(kernels, request, *tools, ptx=text, cancel=context.cancel)
        context.check()
        for verdict in verdicts:
            self.spent += StageSeconds(wall=verdict.wall_seconds, cpu=verdict.cpu_seconds)
        return verdicts


def _named(shown: CpuVerdict, again: CpuVerdict | None) -> CpuVerdict:
    same = again is not None and again.verdict == shown.verdict
    return replace(shown, message=again.message) if again is not None and same else shown


def _run_verdict(shown: CpuVerdict, plan: str, seed: int) -> RunVerdict:
    verdict = PtxVerdict(
        verdict=shown.verdict,
        message=shown.message,
        plan_version=plan,
        seed=seed,
        wall_seconds=shown.wall_seconds,
        cpu_seconds=shown.cpu_seconds,
        promised=[
            promise(case, case["runs"][0]["launch"]) for case in shown.details.get("cases", []) if "sha256" in case
        ],
    )
    return RunVerdict(verdict, shown.verdict not in OF_LIMITS and "limit" not in shown.details)


def promise(case: Mapping[str, Any], launch: Sequence[int]) -> dict[str, Any]:
    """`cukiln.types.PromisedOutput` of a verdict's case that has a digest of its output."""
    names = ("extents", "kind", "seed", "inputs_sha256", "sha256")
    return {**{name: case[name] for name in names}, "launch": list(launch)}


def verify_candidates(
    runs: PtxRuns,
    problem: JobProblem,
    stored: Sequence[StoredCandidate],
    ranked: Sequence[Ranked],
    deadline: float | None,
) -> bool:
    """Refuse each of the `ranked` whose kernel its PTX shows to be wrong; whether all were verified. The files with the
    fastest come first; what is left when the budget ends stays as it is. Raises InfrastructureError, Cancelled,
    LostLease, and HandBack where it is another job's turn: what was verified stays."""
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
    known = {build: verdict for build, verdict in verdicts.items() if verdict is not None}
    _refuse(runs.context, problem, by_build, known)
    by_group: dict[str | None, list[str]] = {}
    for build, entries in by_build.items():
        if build not in known:
            by_group.setdefault(entries[0].stored.group_id, []).append(build)
    has_verified = False
    for group, builds in by_group.items():
        text = _ptx_of(runs.context, group)
        for some in chunks(builds, AT_ONCE):
            if deadline is not None and runs.context.database.clock.now() >= deadline:
                return False
            if has_verified:
                _give_way(runs.context)
            _verify_some(runs, problem, {build: by_build[build] for build in some}, text)
            has_verified = True
    return True


def _verify_some(
    runs: PtxRuns, problem: JobProblem, by_build: Mapping[str, Sequence[Ranked]], text: str | None
) -> None:
    """All of these builds, and store what that showed and took: another attempt continues behind them."""
    context = runs.context
    kernels = [entries[0].candidate.kernel for entries in by_build.values()]
    verified = dict(zip(by_build, runs.verdicts(kernels, text), strict=True))
    with context.database.write() as session:
        write_ptx_verdicts(session, {build: each.verdict for build, each in verified.items() if each.lasting})
    _refuse(context, problem, by_build, {build: each.verdict for build, each in verified.items()})
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
    wrong = [
        (entry, WRONG.format(message=verdict.message), verdict.verdict)
        for build, verdict in verdicts.items()
        if not verdict.is_published
        for entry in by_build[build]
    ]
    if wrong:
        refuse(context, problem, *wrong)


def refuse(context: StepContext, problem: JobProblem, *refused: tuple[Ranked, str, str]) -> None:
    """None of these wins: each with why, and the verdict that it has now."""
    with context.database.write() as session:
        for entry, message, verdict in refused:
            log.warning("candidate %s: %s", entry.candidate.id, message)
            refuse_candidate(session, problem.id, entry.candidate.id, message, verdict)


def verify_winner(runs: PtxRuns, candidate: Candidate, library: Library) -> PtxVerdict | None:
    """None where its PTX is not run: an emulation's library is not made of it. Raises InfrastructureError where the
    machine failed, Cancelled, HandBack where the PTX was lost."""
    ptx, kernel = library.ptx, candidate.kernel
    if ptx is None or runs.target.emulates is not None or runs.are_off:
        return None
    plan = runs.plan(kernel.operator)

    def there() -> PtxVerdict | None:
        with runs.context.database.read() as session:
            return ptx_verdict(session, ptx, plan)

    return once_at_a_time(runs.context, ptx, there, lambda: _verify_own(runs, kernel, ptx))


def _verify_own(runs: PtxRuns, kernel: Kernel, ptx: str) -> PtxVerdict:
    context = runs.context
    try:
        text = context.blobs.get(ptx).decode("utf-8")
    except (BlobMissing, BlobCorrupt) as error:
        repair(context.database, context.blobs, ptx)  # the library goes too, and is built again
        raise HandBack from error
    [run] = runs.verdicts([kernel], text)
    if run.lasting:
        with context.database.write() as session:
            write_ptx_verdict(session, ptx, run.verdict)
    return run.verdict


def mark_of(verdict: PtxVerdict | None, broken: str | None = None) -> PtxMark | None:
    """As the record has it, of a kernel that is published."""
    if verdict is None:
        return None
    return PtxMark.model_validate(
        {
            "verdict": verdict.verdict,
            "message": verdict.message or None,
            "cpu_seconds": verdict.cpu_seconds,
            "promised": verdict.promised,
            "broken": broken,
        }
    )


def broken_promise(verdict: PtxVerdict | None, verification: Verdict | None) -> str | None:
    """The first output of a GPU's verification that is not what the PTX gives on the same inputs; null where none is,
    or nothing is promised."""
    if verdict is None or verification is None or verification.venue != GPU:
        return None
    digests = {}
    for case in verification.details.get("cases", []):
        # Also of results that were imported: of a case that says less nothing is compared.
        launches = case.get("launches")
        if case.keys() >= _OF_PROMISE and isinstance(launches, list) and [type(of) for of in launches] == [list]:
            of = promise(case, launches[0])
            digests[_inputs(of)] = of["sha256"]
    for of in verdict.promised:
        got = digests.get(_inputs(of), of["sha256"])
        if got != of["sha256"]:
            where = f"{of['kind']} inputs, extents {of['extents']}, launch {of['launch']}, seed {of['seed']}"
            return f"its output on the GPU has SHA-256 {got}, its PTX promises {of['sha256']} [{where}]"
    return None


_OF_PROMISE = {"extents", "kind", "seed", "launches", "inputs_sha256", "sha256"}


def _inputs(of: Mapping[str, Any]) -> str:
    """Which they are: what else differs of a case, too, and whatever an import has in its place."""
    return json.dumps([of[name] for name in ("extents", "kind", "seed", "launch", "inputs_sha256")])
