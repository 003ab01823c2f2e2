"""Verify and time the candidates of a measure task, one after the other, in the process that owns the GPU."""

import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from typing import Any

from codegen.kernel import Candidate
from codegen.operator import Operator
from codegen.operators import operator
from codegen.plan.gpu_verification_plan import fresh_case, full_cases, promised_cases, reduced_cases
from codegen.search.schedule import Schedule
from workers.gpu.interface import Device, Gpu, GpuError, GpuFault, LaunchRefused
from workers.gpu.leftovers import belongings, leftover
from workers.gpu.libraries import Libraries, call_of
from workers.gpu.task import CandidateResult, GpuTask, TaskCandidate
from workers.gpu.verify_and_time import (
    KnownCost,
    OperandSets,
    References,
    Timing,
    Verifier,
    Wrong,
    measure,
    operand_sets,
)
from workers.processes.stopwatch import Stopwatch

Say = Callable[[dict[str, Any]], None]


class _Verification:
    """One candidate on its way to a verdict."""

    def __init__(self, seed: int) -> None:
        self._stopwatch = Stopwatch()
        self._seconds = dict.fromkeys(("verify_wall", "verify_cpu", "measure_wall", "measure_cpu"), 0.0)
        self.verdict, self.message, self.tainted = "ok", "", False
        self.cases: list[dict[str, Any]] = []
        self.measurement: dict[str, Any] | None = None
        self._head = {"seed": seed, "began_at": time.time()}

    def count(self, part: str) -> None:
        """What has passed since the last call belongs to `part`: verify or measure."""
        spent, self._stopwatch = self._stopwatch.read(), Stopwatch()
        self._seconds[f"{part}_wall"] += spent.wall
        self._seconds[f"{part}_cpu"] += spent.cpu

    def fail(self, verdict: str, message: str, *, tainted: bool = False) -> None:
        self.verdict, self.message, self.measurement = verdict, message, None
        self.tainted = self.tainted or tainted

    def skip(self, device: Device, error: MemoryError) -> None:
        """Another GPU may hold it: no verdict on the code."""
        self.fail("skipped", f"the memory of {device.name} does not hold this problem: {error}")

    def result(self, candidate: str) -> CandidateResult:
        details = {**self._head, "cases": self.cases}
        return CandidateResult(
            candidate, self.verdict, self.message, details, self.measurement, **self._seconds, tainted=self.tainted
        )


class MeasureTask:
    """Verifies a task's candidates, problem by problem: they share inputs and references. `say` gets the lines."""

    def __init__(self, gpu: Gpu, task: GpuTask, say: Say) -> None:
        self._gpu = gpu
        self._task = task
        self._say = say
        self._references = References(gpu, self._beat)
        self._sets: OperandSets | None = None
        self._known_cost = KnownCost()
        self._reduced: dict[tuple[str, str], tuple[Wrong | None, list[dict[str, Any]]]] = {}  # by path and kernel
        self._best = dict(task.best_us)
        self._candidates = candidates_of(task)
        self._libraries = libraries_of(gpu, task, self._candidates)

    def run(self) -> None:
        """Until one candidate may have damaged this process."""
        problem: str | None = None
        order = list(self._task.problems)
        for entry in sorted(self._task.candidates, key=lambda entry: order.index(entry.problem)):
            if entry.problem != problem:
                self._references.forget()
                self._sets, problem = None, entry.problem
            verification = _Verification(self._task.seed)
            ready = self._get_ready(entry, verification)
            # Silence from here on is caused by the candidate's own code.
            self._say({"start": entry.candidate})
            if ready:
                self._verify(entry, verification)
            self._say({"candidate": asdict(verification.result(entry.candidate))})
            if verification.tainted:
                return

    def _get_ready(self, entry: TaskCandidate, verification: _Verification) -> bool:
        """Before its code runs; false where its file gives the verdict. Raises GpuFault, which is no verdict."""
        try:
            self._prepare(self._candidates[entry.candidate])
            self._libraries.check(entry.library)
        except LaunchRefused as error:
            verification.fail("runtime_error", str(error))
        except MemoryError as error:
            verification.skip(self._gpu.device, error)
        verification.count("verify")
        return verification.verdict == "ok"

    def _verify(self, entry: TaskCandidate, verification: _Verification) -> None:
        try:
            # The candidate's own code runs only after this: what is there now is not its doing.
            before = belongings()
            try:
                self._verify_and_time(entry, verification)
            except (GpuError, MemoryError):
                raise
            except Exception:
                self._gpu.synchronize()  # where the context is lost, that is the reason, wherever it showed first
                raise
            finally:
                verification.count("verify")
                if message := leftover(before):
                    verification.fail("runtime_error", message, tainted=True)
        except GpuFault as error:
            verification.fail("runtime_error", str(error), tainted=True)
        except LaunchRefused as error:
            verification.fail("runtime_error", str(error), tainted=verification.tainted)
        except MemoryError as error:
            verification.skip(self._gpu.device, error)

    def _prepare(self, candidate: Candidate) -> None:
        own = operator(candidate.kernel.operator)
        for case in (*full_cases(own, candidate, self._task.seed), fresh_case(own, candidate, self._task.seed)):
            self._references.of(own, case, keep=True)

    def _verify_and_time(self, entry: TaskCandidate, verification: _Verification) -> None:
        candidate = self._candidates[entry.candidate]
        own = operator(candidate.kernel.operator)
        library = self._libraries.load(entry.library)
        verifier = Verifier(self._gpu, own, candidate.kernel, self._references, self._beat)
        verification.cases = verifier.cases
        if not entry.verified and (wrong := self._verify_reduced(entry.library, own, candidate, verifier)):
            return verification.fail("incorrect", wrong.message, tainted=wrong.harmed)
        cases = tuple(full_cases(own, candidate, self._task.seed))
        if wrong := verifier.run(library, cases, keep=True):
            return verification.fail("incorrect", wrong.message, tainted=wrong.harmed)
        if self._sets is None:
            normal = next(case for case in cases if case.kind == "normal")
            prepared = self._references.of(own, normal, keep=True)
            self._beat("making the sets of operands")
            self._sets = operand_sets(self._gpu, own, candidate.problem, prepared)
        verification.count("verify")
        self._beat("timing")
        timing = Timing(self._gpu, call_of(library, own, candidate), self._sets)
        best = self._best.get(entry.problem)
        verification.measurement = measure(
            self._gpu, timing, self._known_cost, cold=self._sets.cold, seconds=self._task.seconds, best=best
        )
        verification.count("measure")
        fresh = fresh_case(own, candidate, self._task.seed)
        described = fresh.describe(own.extents(candidate.problem))
        verifier.cases.append(described)
        if wrong := timing.check_again(fresh, self._references.of(own, fresh, keep=True), described):
            # It was right before: whatever it did in the meantime, it did it beside what others are timed with.
            return verification.fail("incorrect", wrong.message, tainted=True)
        median = float(verification.measurement["median_us"])
        self._best[entry.problem] = median if best is None else min(best, median)
        return None

    def _verify_reduced(self, path: str, own: Operator, candidate: Candidate, verifier: Verifier) -> Wrong | None:
        """Once per kernel in this process; each of its candidates has the digests, and all cases where it is wrong."""
        kernel = candidate.kernel
        if (path, kernel.id) not in self._reduced:
            library = self._libraries.load(path)
            planned = chain(reduced_cases(own, kernel, self._task.seed), promised_cases(own, kernel))
            wrong = verifier.run(library, planned, keep=False)
            self._reduced[path, kernel.id] = wrong, list(verifier.cases)
            return wrong
        wrong, cases = self._reduced[path, kernel.id]
        verifier.cases += [case for case in cases if wrong is not None or "sha256" in case]
        return wrong

    def _beat(self, what: str) -> None:
        self._say({"beat": what})


def candidates_of(task: GpuTask) -> dict[str, Candidate]:
    """By their names in the task."""
    problems = {key: operator(str(fields["operator"])).parse(fields) for key, fields in task.problems.items()}
    return {
        entry.candidate: operator(problems[entry.problem].operator).candidate(
            problems[entry.problem], Schedule.of(dict(entry.schedule))
        )
        for entry in task.candidates
    }


def libraries_of(gpu: Gpu, task: GpuTask, candidates: dict[str, Candidate]) -> Libraries:
    kernels: dict[str, list[Any]] = {}
    for entry in task.candidates:
        kernels.setdefault(entry.library, []).append(candidates[entry.candidate].kernel)
    return Libraries(gpu, kernels)
