"""Prove and time the candidates of a measure task, one after the other, in the process that owns the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from codegen.gpu_plan import fresh_case, full_cases, reduced_cases
from codegen.kernel import Candidate
from codegen.operator import Operator
from codegen.operators import operator
from codegen.schedule import Schedule
from workers.gpu.interface import Device, Gpu, GpuError, GpuFault, LaunchRefused
from workers.gpu.leftovers import belongings, leftover
from workers.gpu.libraries import Libraries, call_of
from workers.gpu.prove import Proof, Wrong
from workers.gpu.references import References
from workers.gpu.task import CandidateResult, GpuTask, TaskCandidate
from workers.gpu.timing import OperandSets, Timing, measure, operand_sets

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class _Proved:
    """What the reduced problems said of a kernel in this process; the cases are for the details of its candidates."""

    wrong: Wrong | None
    cases: list[dict[str, Any]]


class _Clock:
    """Wall and CPU seconds of the parts of one candidate."""

    def __init__(self) -> None:
        self._seconds = {"verify": (0.0, 0.0), "measure": (0.0, 0.0)}
        self._since = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def count(self, part: str) -> None:
        """What has passed since the last call belongs to `part`."""
        (wall, cpu), (wall_before, cpu_before), now = self._seconds[part], self._since, self._now()
        self._seconds[part] = (wall + now[0] - wall_before, cpu + now[1] - cpu_before)
        self._since = now

    def seconds(self) -> tuple[float, float, float, float]:
        """Verify wall and CPU, measure wall and CPU."""
        return *self._seconds["verify"], *self._seconds["measure"]


class _Judging:
    """One candidate on its way to a verdict."""

    def __init__(self, seed: int) -> None:
        self.clock = _Clock()
        self.verdict, self.message, self.tainted = "ok", "", False
        self.cases: list[dict[str, Any]] = []
        self.measurement: dict[str, Any] | None = None
        self._head = {"seed": seed, "began_at": time.time()}

    def fail(self, verdict: str, message: str, *, tainted: bool = False) -> None:
        self.verdict, self.message, self.measurement = verdict, message, None
        self.tainted = self.tainted or tainted

    def skip(self, device: Device, error: MemoryError) -> None:
        """Nobody's fault, and another GPU may hold it: no verdict on the code."""
        self.fail("skipped", f"the memory of {device.name} does not hold this problem: {error}")

    def result(self, candidate: str) -> CandidateResult:
        details = {**self._head, "cases": self.cases}
        return CandidateResult(
            candidate, self.verdict, self.message, details, self.measurement, *self.clock.seconds(), self.tainted
        )


class MeasureTask:
    """Judges a task's candidates; those of a problem come together, because they share inputs and references. `say`
    gets the lines for the parent."""

    def __init__(self, gpu: Gpu, task: GpuTask, say: Say) -> None:
        self._gpu = gpu
        self._task = task
        self._say = say
        self._references = References(gpu, self._beat)
        self._sets: OperandSets | None = None
        self._proved: dict[tuple[str, str], _Proved] = {}
        self._best = dict(task.best_us)
        self._candidates = candidates_of(task)
        self._libraries = libraries_of(gpu, task, self._candidates)

    def run(self) -> None:
        """Until one candidate may have damaged this process."""
        problem: int | None = None
        for one in sorted(self._task.candidates, key=lambda one: one.problem):
            if one.problem != problem:
                self._references.forget()
                self._sets, problem = None, one.problem
            judging = _Judging(self._task.seed)
            ready = self._get_ready(one, judging)
            # Whoever is silent from here on is silent by the candidate's own code.
            self._say({"start": one.candidate})
            if ready:
                self._judge(one, judging)
            self._say({"candidate": asdict(judging.result(one.candidate))})
            if judging.tainted:
                return

    def _get_ready(self, one: TaskCandidate, judging: _Judging) -> bool:
        """Make what the candidate is proved with, and look at its library's file; false where it has its verdict by
        that. Raises GpuFault, which is nobody's verdict: none of the candidate's code has run."""
        try:
            self._prepare(self._candidates[one.candidate])
            self._libraries.check(one.library)
        except LaunchRefused as error:
            judging.fail("runtime_error", str(error))
        except MemoryError as error:
            judging.skip(self._gpu.device, error)
        judging.clock.count("verify")
        return judging.verdict == "ok"

    def _judge(self, one: TaskCandidate, judging: _Judging) -> None:
        try:
            # The candidate's own code runs only after this: what is there now is not its doing.
            before = belongings()
            try:
                self._prove_and_time(one, judging)
            except (GpuError, MemoryError):
                raise
            except Exception:
                self._gpu.synchronize()  # where the context is lost, that is the reason, whoever noticed it first
                raise
            finally:
                judging.clock.count("verify")
                if words := leftover(before):
                    judging.fail("runtime_error", words, tainted=True)
        except GpuFault as error:
            judging.fail("runtime_error", str(error), tainted=True)
        except LaunchRefused as error:
            judging.fail("runtime_error", str(error), tainted=judging.tainted)
        except MemoryError as error:
            judging.skip(self._gpu.device, error)

    def _prepare(self, candidate: Candidate) -> None:
        own = operator(candidate.kernel.operator)
        for case in (*full_cases(own, candidate, self._task.seed), fresh_case(own, candidate, self._task.seed)):
            self._references.of(own, case, keep=True)

    def _prove_and_time(self, one: TaskCandidate, judging: _Judging) -> None:
        candidate = self._candidates[one.candidate]
        own = operator(candidate.kernel.operator)
        library = self._libraries.load(one.library)
        proof = Proof(self._gpu, own, candidate.kernel, self._references, self._beat)
        judging.cases = proof.cases
        if not one.proven and (wrong := self._prove_reduced(one.library, own, candidate, proof)):
            return judging.fail("incorrect", wrong.message, tainted=wrong.harmed)
        cases = full_cases(own, candidate, self._task.seed)
        if wrong := proof.run(library, cases, keep=True):
            return judging.fail("incorrect", wrong.message, tainted=wrong.harmed)
        if self._sets is None:
            normal = next(case for case in full_cases(own, candidate, self._task.seed) if case.kind == "normal")
            prepared = self._references.of(own, normal, keep=True)
            self._beat("making the sets of operands")
            self._sets = operand_sets(self._gpu, own, candidate.problem, prepared)
        judging.clock.count("verify")
        self._beat("timing")
        timing = Timing(self._gpu, call_of(library, own, candidate), self._sets)
        best = self._best.get(one.problem)
        judging.measurement = measure(self._gpu, timing, cold=self._sets.cold, seconds=self._task.seconds, best=best)
        judging.clock.count("measure")
        fresh = fresh_case(own, candidate, self._task.seed)
        described = fresh.describe(own.extents(candidate.problem))
        proof.cases.append(described)
        if wrong := timing.check_again(fresh, self._references.of(own, fresh, keep=True), described):
            # It was right before: whatever it did in the meantime, it did it beside what others are timed with.
            return judging.fail("incorrect", wrong.message, tainted=True)
        median = float(judging.measurement["median_us"])
        self._best[one.problem] = median if best is None else min(best, median)
        return None

    def _prove_reduced(self, path: str, own: Operator, candidate: Candidate, proof: Proof) -> Wrong | None:
        """Once per kernel in this process."""
        kernel = candidate.kernel
        key = (path, kernel.id)
        if key not in self._proved:
            library = self._libraries.load(path)
            wrong = proof.run(library, reduced_cases(own, kernel, self._task.seed), keep=False)
            self._proved[key] = _Proved(wrong, list(proof.cases))
        elif self._proved[key].wrong is not None:
            proof.cases += self._proved[key].cases
        return self._proved[key].wrong

    def _beat(self, what: str) -> None:
        self._say({"beat": what})


def candidates_of(task: GpuTask) -> dict[str, Candidate]:
    """By their names in the task."""
    problems = [operator(str(fields["operator"])).parse(fields) for fields in task.problems]
    return {
        one.candidate: operator(problems[one.problem].operator).candidate(
            problems[one.problem], Schedule.of(dict(one.schedule))
        )
        for one in task.candidates
    }


def libraries_of(gpu: Gpu, task: GpuTask, candidates: dict[str, Candidate]) -> Libraries:
    kernels: dict[str, list[Any]] = {}
    for one in task.candidates:
        kernels.setdefault(one.library, []).append(candidates[one.candidate].kernel)
    return Libraries(gpu, kernels)
