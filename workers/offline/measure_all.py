"""Compile what is not compiled, verify and time every candidate, compare the best: the loop of a stand-alone run.

Problem by problem, so that a child makes each problem's inputs and references once; kernels are compiled ahead, in the
same order. Where there is a budget, all problems have their best predicted candidates measured and compared before any
has the rest. What is found is in the journal before the next thing begins.
"""

import argparse
import os
import secrets
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from codegen.kernel import Candidate
from cukiln.counted import counted
from storage.config.files import gpu_lock_folder
from storage.config.limits import MEASURE_LIMITS
from workers.compile.toolchain import Toolchain
from workers.gpu.lease import lease_file
from workers.gpu.measure_on_gpu import GpuGone, run_gpu_task
from workers.gpu.rank_measured import contenders, point_of
from workers.gpu.task import GpuTask, TaskCandidate, TaskKind, operator_folders
from workers.offline.compile_ahead import CompileAhead
from workers.offline.measured import CompiledHere, Conditions, Journal, results_of, right_of, write_results
from workers.offline.work import Built, Work, WorkProblem, predicted_us
from workers.processes.processes import InfrastructureError, Processes

# Candidates of one child, whole problems where they fit: its start takes seconds, as long as a few candidates. With a
# budget comparisons come after fewer, so that little is measured in vain.
MOST_IN_TASK, MOST_BUDGETED = 512, 128
SECONDS_BETWEEN_FILES = 20.0  # results.json is written anew: the journal beside it has everything at once
# With a budget: of each problem so many candidates, the best predicted, before any problem has more; then all.
BUDGETED_ROUNDS: tuple[int | None, ...] = (4, 16, 64, None)

Entry = tuple[WorkProblem, Candidate, Built]


def say(words: str) -> None:
    """One line of progress, at once: a log may be all that is left of a run."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {words}\n")
    sys.stdout.flush()


def lease_of(uuid: str) -> Path:
    """The file that each process on this machine locks while using the GPU, services too."""
    return lease_file(gpu_lock_folder(os.environ.get("CUKILN_GPU_LOCKS")).absolute(), uuid)


@dataclass
class Run:
    """One run over `work`. `options`: of the command line; `deadline`: by `time.monotonic()`. `cancel` ends it early:
    what is known by then stays."""

    work: Work
    conditions: Conditions
    options: argparse.Namespace
    processes: Processes
    toolchain: Toolchain | None
    deadline: float | None
    cancel: threading.Event

    def __post_init__(self) -> None:
        self.out: Path = self.options.out
        self.journal = Journal(self.out, self.conditions)
        self._compiled = CompiledHere(self.out)
        self._written = 0.0
        for build, built in self._compiled.load().items():
            if self.work.waiting.pop(build, None) is not None:
                self.work.builds[build] = built

    def everything(self) -> bool:
        """Measure and compare all there is; whether nothing is left. Raises GpuGone and other InfrastructureErrors."""
        timer = threading.Timer(max(0.0, (self.deadline or 0.0) - time.monotonic()), self.cancel.set)
        timer.daemon = True
        if self.deadline is not None:
            timer.start()
        ordered = in_turns(self.work.problems)
        ahead = CompileAhead(
            self.work,
            ordered,
            self._compiled,
            toolchain=self.toolchain,
            processes=self.processes,
            workers=self.options.workers,
            cancel=self.cancel,
            say=say,
        )
        try:
            for most in BUDGETED_ROUNDS if self.deadline is not None else (None,):
                self._round(ordered, most, ahead)
            return not self.cancel.is_set() and not any(
                self._is_open(problem, candidate) for problem in ordered for candidate in problem.candidates
            )
        finally:
            timer.cancel()
            # Whatever ended the loop, the compilers must end too: a thread pool waits for its threads.
            self.cancel.set()
            ahead.close()

    def results(self, *, complete: bool) -> dict[str, Any]:
        return results_of(self.work, self.journal, self.conditions, complete=complete)

    def _round(self, problems: Sequence[WorkProblem], most: int | None, ahead: CompileAhead) -> None:
        """Of each problem the `most` best predicted, all without it: measured, then compared with the vendor's."""
        left = deque(problems)
        while left and ahead.until(left[0].builds.values()):
            chunk: list[WorkProblem] = []
            wanted: dict[tuple[str, str | None], Entry] = {}
            room = MOST_IN_TASK if self.deadline is None else MOST_BUDGETED
            # As many whole problems as a child takes, of those that are compiled by now.
            while left and self.work.waiting.keys().isdisjoint(left[0].builds.values()):
                entries = {(entry[1].id, entry[2].code_digest): entry for entry in self._next(left[0], most)}
                if chunk and len(wanted) + len(entries) > room:
                    break
                chunk.append(left.popleft())
                # Of problems that share a candidate the first one has it measured for all.
                wanted |= {key: entry for key, entry in entries.items() if key not in wanted}
            self._measure(list(wanted.values()))
            for problem in chunk:
                if not self.cancel.is_set():
                    self._compare(problem)
            self._write()

    def _next(self, problem: WorkProblem, most: int | None) -> list[Entry]:
        """Those of the problem's `most` best predicted candidates that have no verdict."""
        standing = [
            (problem, candidate, built)
            for candidate in problem.candidates
            if (built := self.work.built(problem, candidate)) is not None
            and built.state == "ok"
            and candidate.id not in problem.left_out
        ]
        # The best first: one that is clearly slower than the best so far is dropped after a few samples.
        standing.sort(key=lambda entry: predicted_us(entry[1], entry[2], problem.target))
        return [entry for entry in standing[:most] if self._is_open(*entry[:2])]

    def _is_open(self, problem: WorkProblem, candidate: Candidate) -> bool:
        """Whether the candidate is to be verified still."""
        built = self.work.built(problem, candidate)
        if candidate.id in problem.left_out or (built is not None and built.state != "ok"):
            return False
        return built is None or self.journal.result(candidate.id, built.code_digest) is None

    def _measure(self, wanted: Sequence[Entry]) -> None:
        for first in range(0, len(wanted), MOST_IN_TASK):
            if self.cancel.is_set():
                return
            some = wanted[first : first + MOST_IN_TASK]
            self._run("measure", some)
            results = [self.journal.result(candidate.id, built.code_digest) for _, candidate, built in some]
            right = sum(result is not None and result["verdict"] == "ok" for result in results)
            say(f"{counted(len(some), 'candidate')} measured, {right} of them right")

    def _run(self, kind: TaskKind, entries: Sequence[Entry]) -> dict[str, Any] | None:
        """`entries` come problem by problem. Each result is in the journal at once; returns the comparison, if any."""
        proven = self.journal.proven()
        code_of = {candidate.id: built.code_digest for _, candidate, built in entries}
        own = {problem.problem.digest: problem for problem, _, _ in entries}
        problems = {key: problem.problem.canonical() for key, problem in own.items()}
        task = GpuTask(
            kind,
            gpu=self.options.gpu_module,
            device=self.conditions.device.uuid,
            lease=str(lease_of(self.conditions.device.uuid)),
            operators=operator_folders(problems.values()),
            seed=secrets.randbits(48),
            problems=problems,
            candidates=tuple(
                TaskCandidate(
                    candidate.id,
                    problem.problem.digest,
                    candidate.schedule.as_dict(),
                    str(built.library),
                    built.code_digest in proven,
                )
                for problem, candidate, built in entries
            ),
            best_us={key: min(us for us, _, _ in right) for key in own if (right := self._right(own[key]))},
            seconds=self.options.seconds,
        )
        outcome = run_gpu_task(
            task,
            self.processes,
            replace(MEASURE_LIMITS, wall_seconds=max(MEASURE_LIMITS.wall_seconds, 10.0 * len(entries))),
            cache=self.out / "cache",
            cancel=self.cancel,
            on_result=lambda result: self.journal.add(result, code_of[result.candidate]),
        )
        return outcome.comparison

    def _right(self, problem: WorkProblem) -> list[tuple[float, Candidate, Built]]:
        return right_of(problem, self.work, self.journal)

    def _compare(self, problem: WorkProblem) -> None:
        # A finalist that turns out wrong leaves the next ones to be compared; each round has one less.
        while not self.cancel.is_set() and (chosen := self._contenders(problem)):
            names = [candidate.id for _, candidate, _ in chosen]
            if self.journal.was_compared(names):
                break
            try:
                comparison = self._run("compare", chosen)
            except GpuGone:
                raise
            except InfrastructureError as error:  # their own medians rank them then
                say(f"{problem.name}: {error}")
                comparison = None
            if self.cancel.is_set() and comparison is None:
                return
            self.journal.add_comparison(names, comparison)
            say(f"{problem.name}: {len(names)} compared{_vendor_words(comparison)}")
            if time.monotonic() - self._written > SECONDS_BETWEEN_FILES:
                self._write()

    def _contenders(self, problem: WorkProblem) -> list[Entry]:
        right = {candidate.id: (us, candidate, built) for us, candidate, built in self._right(problem)}
        chosen = contenders(point_of(problem.operator, candidate, us) for us, candidate, _ in right.values())
        return [(problem, *right[point.candidate][1:]) for point in chosen]

    def _write(self) -> None:
        write_results(self.out, self.results(complete=False))
        self._written = time.monotonic()


def _vendor_words(comparison: Mapping[str, Any] | None) -> str:
    if comparison is None:
        return ", without an answer: their own medians rank them"
    if (vendor := comparison.get("vendor")) is None:
        return f", no vendor's library ({comparison.get('vendor_missing')})"
    return f", the vendor's library takes {vendor['median_us']:.1f} µs"


def in_turns(problems: Iterable[WorkProblem]) -> list[WorkProblem]:
    """Of each operator and dtype in turn the one with the fewest operations: no kind takes another's time."""

    def flops(problem: WorkProblem) -> float:
        candidates = problem.candidates[:1]
        return sum(problem.operator.cost(problem.problem, candidate.schedule).flops for candidate in candidates)

    taken: Counter[tuple[str, ...]] = Counter()
    turns = []
    for problem in sorted(problems, key=flops):
        fields = problem.problem.canonical()
        kind = problem.operator.name, str(fields.get("dtype")), str(fields.get("allow_tf32"))
        turns.append((taken[kind], problem))
        taken[kind] += 1
    return [problem for _, problem in sorted(turns, key=lambda turn: turn[0])]
