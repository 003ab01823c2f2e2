"""Verify and time every candidate, compare the best: the loop of a stand-alone run over the engine that the service's
steps use too (`workers.gpu.engine`).

Problem by problem, so that a child makes each problem's inputs and references once. Where there is a budget, all
problems have their best predicted candidates measured and compared before any has the rest. What is found is in the
journal before the next thing begins.
"""

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
from storage.config.limits import MEASURE_LIMITS
from storage.entities.pareto_front import finalists
from workers.gpu.engine import Engine
from workers.gpu.measure_on_gpu import GpuGone
from workers.gpu.task import CandidateResult, TaskCandidate, TaskKind
from workers.offline.measured import Journal, results_of, right_of, write_results
from workers.offline.work import Built, Work, WorkProblem, predicted_us
from workers.processes.processes import InfrastructureError

# Candidates of one child, whole problems where they fit: its start takes seconds, as long as a few candidates. With a
# budget comparisons come after fewer, so that little is measured in vain.
MOST_IN_TASK, MOST_BUDGETED = 512, 48
# A child has more candidates than one of the service's; one that hangs is noticed by its silence.
LIMITS = replace(MEASURE_LIMITS, wall_seconds=max(MEASURE_LIMITS.wall_seconds, 10.0 * MOST_IN_TASK))
SECONDS_BETWEEN_FILES = 20.0  # results.json is written anew: the journal beside it has everything at once
# With a budget: of each problem so many candidates, the best predicted, before any problem has more; then all.
BUDGETED_ROUNDS: tuple[int | None, ...] = (4, 16, 64, None)

Entry = tuple[WorkProblem, Candidate, Built]


def say(line: str) -> None:
    """One line of progress, at once: a log may be all that is left of a run."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


@dataclass
class Run:
    """One run over `work`, whose results are in `out`. `deadline`: by `time.monotonic()`. `cancel` ends it early: what
    is known by then stays."""

    work: Work
    journal: Journal
    engine: Engine
    out: Path
    deadline: float | None
    cancel: threading.Event

    def __post_init__(self) -> None:
        self._written = 0.0

    def everything(self) -> bool:
        """Measure and compare all there is; whether nothing is left. Raises GpuGone and other InfrastructureErrors."""
        timer = threading.Timer(max(0.0, (self.deadline or 0.0) - time.monotonic()), self.cancel.set)
        timer.daemon = True
        if self.deadline is not None:
            timer.start()
        ordered = in_turns(self.work.problems)
        try:
            for most in BUDGETED_ROUNDS if self.deadline is not None else (None,):
                self._round(ordered, most)
            return not self.cancel.is_set() and not any(
                self._is_open(problem, candidate) for problem in ordered for candidate in problem.candidates
            )
        finally:
            timer.cancel()

    def results(self, *, complete: bool) -> dict[str, Any]:
        return results_of(self.work, self.journal, complete=complete)

    def _round(self, problems: Sequence[WorkProblem], most: int | None) -> None:
        """Of each problem the `most` best predicted, all without it: measured, then compared with the vendor's."""
        left = deque(problems)
        room = MOST_IN_TASK if self.deadline is None else MOST_BUDGETED
        while left and not self.cancel.is_set():
            chunk: list[WorkProblem] = []
            distinct: dict[tuple[str, str | None], Entry] = {}
            while left:  # as many whole problems as a child takes
                entries = {(entry[1].id, entry[2].code_digest): entry for entry in self._next(left[0], most)}
                if chunk and len(distinct) + len(entries) > room:
                    break
                chunk.append(left.popleft())
                # Of problems that share a candidate the first one has it measured for all.
                distinct |= {key: entry for key, entry in entries.items() if key not in distinct}
            self._measure(list(distinct.values()))
            self._compare(chunk)
            self._write()

    def _next(self, problem: WorkProblem, most: int | None) -> list[Entry]:
        """Those of the problem's `most` best predicted candidates that have no verdict."""
        standing = [
            (problem, candidate, built)
            for candidate in problem.candidates
            if (built := self.work.built(problem, candidate)).state == "ok" and candidate.id not in problem.left_out
        ]
        # The best first: one that is clearly slower than the best so far is dropped after a few samples.
        standing.sort(key=lambda entry: predicted_us(entry[1], entry[2], problem.target))
        return [entry for entry in standing[:most] if self._is_open(*entry[:2])]

    def _is_open(self, problem: WorkProblem, candidate: Candidate) -> bool:
        """Whether the candidate is to be verified still."""
        built = self.work.built(problem, candidate)
        if candidate.id in problem.left_out or built.state != "ok":
            return False
        return self.journal.result(candidate.id, built.code_digest) is None

    def _measure(self, entries: Sequence[Entry]) -> None:
        for first in range(0, len(entries), MOST_IN_TASK):
            if self.cancel.is_set():
                return
            some = entries[first : first + MOST_IN_TASK]
            self._run("measure", some)
            results = [self.journal.result(candidate.id, built.code_digest) for _, candidate, built in some]
            right = sum(result is not None and result["verdict"] == "ok" for result in results)
            say(f"{counted(len(some), 'candidate')} measured, {right} of them right")

    def _run(self, kind: TaskKind, entries: Sequence[Entry]) -> None:
        """`entries` come problem by problem. Each result is in the journal at once."""
        verified = self.journal.verified()
        code_of = {candidate.id: built.code_digest for _, candidate, built in entries}
        own = {problem.problem.digest: problem for problem, _, _ in entries}
        names = {key: [candidate.id for problem, candidate, _ in entries if problem is own[key]] for key in own}

        def keep_comparison(key: str, comparison: dict[str, Any] | None) -> None:
            self.journal.add_comparison(names[key], comparison)
            say(f"{own[key].name}: {len(names[key])} compared{_vendor_text(comparison)}")
            self._write(at_least=SECONDS_BETWEEN_FILES)

        def keep_result(result: CandidateResult) -> None:
            self.journal.add(result, code_of[result.candidate])
            self._write(at_least=SECONDS_BETWEEN_FILES)

        candidates = [
            TaskCandidate(
                candidate.id,
                problem.problem.digest,
                candidate.schedule.as_dict(),
                str(built.library),
                built.code_digest in verified,
            )
            for problem, candidate, built in entries
        ]
        self.engine.run(
            kind,
            {key: problem.problem.canonical() for key, problem in own.items()},
            candidates,
            {key: min(us for us, _, _ in right) for key in own if (right := self._right(own[key]))},
            keep_result,
            keep_comparison,
            self.cancel,
        )

    def _right(self, problem: WorkProblem) -> list[tuple[float, Candidate, Built]]:
        return right_of(problem, self.work, self.journal)

    def _compare(self, problems: Sequence[WorkProblem]) -> None:
        """All of them in one child. A finalist that turns out wrong leaves the next ones to be compared."""
        while not self.cancel.is_set() and (chosen := self._to_compare(problems)):
            try:
                self._run("compare", [entry for entries in chosen.values() for entry in entries])
            except GpuGone:
                raise
            except InfrastructureError as error:
                if len(chosen) == 1:  # their own medians rank them then
                    ((_, entries),) = chosen.items()
                    say(f"{entries[0][0].name}: {error}")
                    self.journal.add_comparison([candidate.id for _, candidate, _ in entries], None)
                    continue
                for key in chosen:  # that of one problem failed; each has another try by itself
                    self._compare([problem for problem in problems if problem.problem.digest == key])

    def _to_compare(self, problems: Iterable[WorkProblem]) -> dict[str, list[Entry]]:
        """The finalists of those that are not compared yet, by problem: two names of one are compared once."""
        chosen: dict[str, list[Entry]] = {}
        for problem in problems:
            right = {candidate.id: (us, candidate, built) for us, candidate, built in self._right(problem)}
            names = finalists(problem.operator, ((candidate, us) for us, candidate, _ in right.values()))
            if names and not self.journal.was_compared(names):
                chosen.setdefault(problem.problem.digest, [(problem, *right[name][1:]) for name in names])
        return chosen

    def _write(self, *, at_least: float = 0.0) -> None:
        """Where so many seconds have passed since the last time."""
        if time.monotonic() - self._written >= at_least:
            write_results(self.out, self.results(complete=False))
            self._written = time.monotonic()


def _vendor_text(comparison: Mapping[str, Any] | None) -> str:
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
