"""Compile what is not compiled, verify and time every candidate, compare the best: the loop of a stand-alone run.

Problem by problem, of each operator and dtype in turn the cheapest that is left, so that a child makes each problem's
inputs and references once and each is compared with the vendor's library as soon as it is measured. Kernels are
compiled ahead, in the same order. Where there is a budget, all problems have their best predicted candidates measured
and compared before any has the rest: a run that is cut short has the vendor's time of as many problems of each kind as
possible. Whatever is found is in the journal before the next thing begins.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from codegen.kernel import Candidate
from codegen.operators import operators
from workers.compile.toolchain import Toolchain
from workers.gpu.interface import Device
from workers.gpu.measure_on_gpu import GpuGone, run_gpu_task
from workers.gpu.rank_measured import contenders, point_of
from workers.gpu.task import CandidateResult, GpuTask, TaskCandidate
from workers.offline.compile_ahead import CompileAhead
from workers.offline.measured import CompiledHere, Conditions, Journal, results_of, write_results
from workers.offline.work import Built, Work, WorkProblem, predicted_us
from workers.processes.processes import InfrastructureError, Limits, Processes

# As the service's settings have them by default.
MEASURE_LIMITS = Limits(wall_seconds=900, cpu_seconds=3600, memory_bytes=32 << 30, output_bytes=64 << 20)
# Candidates of one child, whole problems where they fit: its start takes seconds, as long as a few candidates. With a
# budget comparisons come after fewer, so that little is measured in vain.
MOST_IN_TASK, MOST_BUDGETED = 512, 128
SECONDS_BETWEEN_FILES = 20.0  # results.json is written anew: the journal beside it has everything at once
# With a budget: of each problem so many candidates, the best predicted, before any problem has more; then all.
BUDGETED_ROUNDS: tuple[int | None, ...] = (4, 16, 64, None)

Entry = tuple[WorkProblem, Candidate, Built]


@dataclass(frozen=True)
class Setup:
    """Where and how a run measures. `seconds`: of one candidate's samples at most. `gpu`: the module that drives it."""

    gpu: str
    device: Device
    lease: Path
    out: Path
    seconds: float
    workers: int
    processes: Processes
    toolchain: Toolchain | None
    deadline: float | None  # time.monotonic()
    say: Callable[[str], None]


@dataclass
class Run:
    """One run over `work`. `cancel` ends it early: what is known by then stays."""

    work: Work
    setup: Setup
    conditions: Conditions
    journal: Journal
    cancel: threading.Event = field(default_factory=threading.Event)
    _written: float = 0.0

    def __post_init__(self) -> None:
        self._compiled = CompiledHere(self.setup.out)
        compiled = self._compiled.load()
        for build in list(self.work.waiting):
            if build in compiled:
                self.work.builds[build] = compiled[build]
                del self.work.waiting[build]

    def everything(self) -> bool:
        """Measure and compare all there is; whether nothing is left. Raises GpuGone and other InfrastructureErrors."""
        timer = self._budget_timer()
        ordered = in_turns(self.work.problems)
        ahead = CompileAhead(
            self.work,
            ordered,
            self._compiled,
            toolchain=self.setup.toolchain,
            processes=self.setup.processes,
            workers=self.setup.workers,
            cancel=self.cancel,
            say=self.setup.say,
        )
        try:
            for most in BUDGETED_ROUNDS if self.setup.deadline is not None else (None,):
                self._round(ordered, most, ahead)
            return not self._stopped() and all(not self._open(problem) for problem in self.work.problems)
        finally:
            if timer is not None:
                timer.cancel()
            # Whatever ended the loop, the compilers must end too: a thread pool waits for its threads.
            self.cancel.set()
            ahead.close()

    def results(self, *, complete: bool) -> dict[str, Any]:
        return results_of(self.work, self.journal, self.conditions, complete=complete)

    def _budget_timer(self) -> threading.Timer | None:
        if self.setup.deadline is None:
            return None
        timer = threading.Timer(max(0.0, self.setup.deadline - time.monotonic()), self.cancel.set)
        timer.daemon = True
        timer.start()
        return timer

    def _stopped(self) -> bool:
        return self.cancel.is_set()

    # Measuring

    def _round(self, problems: Sequence[WorkProblem], most: int | None, ahead: CompileAhead) -> None:
        """Of each problem the `most` best predicted, all without it: measured, then compared with the vendor's."""
        left = deque(problems)
        while left and ahead.until(left[0].builds.values()):
            chunk: list[WorkProblem] = []
            wanted: dict[tuple[str, str | None], Entry] = {}
            room = MOST_IN_TASK if self.setup.deadline is None else MOST_BUDGETED
            # As many whole problems as a child takes, of those that are compiled by now.
            while left and self.work.waiting.keys().isdisjoint(left[0].builds.values()):
                entries = {
                    (candidate.id, built.code_digest): (left[0], candidate, built)
                    for candidate, built in self._next(left[0], most)
                }
                if chunk and len(wanted) + len(entries) > room:
                    break
                chunk.append(left.popleft())
                # Of problems that share a candidate the first one has it measured for all.
                wanted |= {key: entry for key, entry in entries.items() if key not in wanted}
            self._measure(list(wanted.values()))
            for problem in chunk:
                if not self._stopped():
                    self._compare(problem)
            self._write()

    def _next(self, problem: WorkProblem, most: int | None) -> list[tuple[Candidate, Built]]:
        """Those of the problem's `most` best predicted candidates that have no verdict."""
        standing = [
            (candidate, built)
            for candidate in problem.candidates
            if (built := self.work.builds.get(problem.builds[candidate.id])) is not None
            and built.state == "ok"
            and candidate.id not in problem.left_out
        ]
        # The best first: one that is clearly slower than the best so far is dropped after a few samples.
        standing.sort(key=lambda pair: predicted_us(pair[0], pair[1], problem.target))
        return [(candidate, built) for candidate, built in standing[:most] if self._is_open(problem, candidate, built)]

    def _measure(self, wanted: Sequence[Entry]) -> None:
        left = list(wanted)
        while left and not self._stopped():
            now, left = left[:MOST_IN_TASK], left[MOST_IN_TASK:]
            self._measure_some(now)

    def _is_open(self, problem: WorkProblem, candidate: Candidate, built: Built | None) -> bool:
        """Whether the candidate is to be verified still."""
        if candidate.id in problem.left_out or (built is not None and built.state != "ok"):
            return False
        return built is None or self.journal.result(candidate.id, built.code_digest) is None

    def _open(self, problem: WorkProblem) -> bool:
        return any(
            self._is_open(problem, candidate, self.work.builds.get(problem.builds[candidate.id]))
            for candidate in problem.candidates
        )

    def _measure_some(self, wanted: Sequence[Entry]) -> None:
        """`wanted` come problem by problem: the child keeps the inputs and the reference of the last one."""
        proven = self.journal.proven()
        code_of = {candidate.id: built.code_digest for _, candidate, built in wanted}
        task = self._task(
            "measure",
            [(problem, candidate, built, built.code_digest in proven) for problem, candidate, built in wanted],
        )
        self._run(task, code_of)
        right = sum(
            1
            for candidate, code in code_of.items()
            if (self.journal.result(candidate, code) or {}).get("verdict") == "ok"
        )
        self.setup.say(f"{len(code_of)} candidates measured, {right} of them right")

    def _task(self, kind: str, entries: Sequence[tuple[WorkProblem, Candidate, Built, bool]]) -> GpuTask:
        problems: dict[str, int] = {}
        canonical: list[dict[str, Any]] = []
        candidates = []
        best: dict[int, float] = {}
        for problem, candidate, built, proven in entries:
            digest = problem.problem.digest
            if digest not in problems:
                problems[digest] = len(canonical)
                canonical.append(problem.problem.canonical())
                if times := [us for us, _, _ in self._right(problem)]:
                    best[problems[digest]] = min(times)
            candidates.append(
                TaskCandidate(candidate.id, problems[digest], candidate.schedule.as_dict(), str(built.library), proven)
            )
        names = {problem.operator.name for problem, _, _, _ in entries}
        return GpuTask(
            kind="compare" if kind == "compare" else "measure",
            gpu=self.setup.gpu,
            device=self.setup.device.uuid,
            lease=str(self.setup.lease),
            operators={name: str(own.folder) for name, own in operators().items() if name in names},
            seed=secrets.randbits(48),
            problems=tuple(canonical),
            candidates=tuple(candidates),
            best_us=best,
            seconds=self.setup.seconds,
        )

    def _run(self, task: GpuTask, code_of: Mapping[str, str | None]) -> dict[str, object] | None:
        def keep(result: CandidateResult) -> None:
            self.journal.add(result, code_of[result.candidate])

        outcome = run_gpu_task(
            task,
            self.setup.processes,
            replace(MEASURE_LIMITS, wall_seconds=max(MEASURE_LIMITS.wall_seconds, 10.0 * len(task.candidates))),
            cache=self.setup.out / "cache",
            cancel=self.cancel,
            on_result=keep,
        )
        return outcome.comparison

    def _right(self, problem: WorkProblem) -> list[tuple[float, Candidate, Built]]:
        """The problem's candidates that were found right, with the median of their samples."""
        right = []
        for candidate in problem.candidates:
            built = self.work.builds.get(problem.builds[candidate.id])
            result = self.journal.result(candidate.id, built.code_digest) if built else None
            if built and result and result["verdict"] == "ok" and result["measurement"]:
                right.append((float(result["measurement"]["median_us"]), candidate, built))
        return right

    # Comparing

    def _compare(self, problem: WorkProblem) -> None:
        # A finalist that turns out wrong leaves the next ones to be compared; each round has one less.
        while not self._stopped() and (chosen := self._contenders(problem)):
            names = [candidate.id for candidate, _ in chosen]
            if self.journal.comparison(names)[0]:
                break
            task = self._task("compare", [(problem, candidate, built, True) for candidate, built in chosen])
            code_of = {candidate.id: built.code_digest for candidate, built in chosen}
            try:
                comparison = self._run(task, code_of)
            except GpuGone:
                raise
            except InfrastructureError as error:  # their own medians rank them then
                self.setup.say(f"{problem.name}: {error}")
                comparison = None
            if self._stopped() and comparison is None:
                return
            self.journal.add_comparison(names, comparison)
            self.setup.say(f"{problem.name}: {len(names)} compared{_vendor_words(comparison)}")
            if time.monotonic() - self._written > SECONDS_BETWEEN_FILES:
                self._write()

    def _contenders(self, problem: WorkProblem) -> list[tuple[Candidate, Built]]:
        right = {candidate.id: (us, candidate, built) for us, candidate, built in self._right(problem)}
        chosen = contenders(point_of(problem.operator, candidate, us) for us, candidate, _ in right.values())
        return [right[point.candidate][1:] for point in chosen]

    # Writing

    def _write(self) -> None:
        write_results(self.setup.out, self.results(complete=False))
        self._written = time.monotonic()


def _vendor_words(comparison: Mapping[str, object] | None) -> str:
    if comparison is None:
        return ", without an answer: their own medians rank them"
    vendor = comparison.get("vendor")
    if not isinstance(vendor, Mapping):
        return f", no vendor's library ({comparison.get('vendor_missing')})"
    return f", the vendor's library takes {vendor['median_us']:.1f} µs"


def in_turns(problems: Iterable[WorkProblem]) -> list[WorkProblem]:
    """Of each operator and dtype in turn the one that is left with the fewest operations; of equal ones as they are
    given. So a kind with many expensive problems takes no other's time."""
    ordered = sorted(problems, key=_flops)
    taken: Counter[tuple[str, ...]] = Counter()
    turns = []
    for problem in ordered:
        kind = _kind(problem)
        turns.append((taken[kind], problem))
        taken[kind] += 1
    return [problem for _, problem in sorted(turns, key=lambda turn: turn[0])]


def _flops(problem: WorkProblem) -> float:
    return problem.operator.cost(problem.problem, problem.candidates[0].schedule).flops if problem.candidates else 0


def _kind(problem: WorkProblem) -> tuple[str, ...]:
    said = problem.problem.canonical()
    return problem.operator.name, str(said.get("dtype")), str(said.get("allow_tf32"))
