"""Compare the last few candidates of a problem in one process, taking turns, with the vendor's library among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from codegen.gpu_plan import GpuCase, fresh_case, full_cases
from codegen.kernel import Candidate
from codegen.operator import Operator
from codegen.test_plan import Judgement, judge
from cukiln.types import Comparison, Contender, VendorResult
from workers.case_details import number
from workers.gpu.interface import Gpu, GpuError, GpuFault, LaunchRefused, VendorCall
from workers.gpu.libraries import Call, Libraries, call_of
from workers.gpu.prove import Wrong, run_once, where
from workers.gpu.references import Prepared, References
from workers.gpu.sampling import Placed, Ranking, rank_by_turns, sample_until_tight
from workers.gpu.task import VENDOR
from workers.gpu.timing import OperandSets, RotatingSampler, Timing, operand_sets

# Of a contender's time, what finding the vendor's best algorithm may take for each of them.
CHOOSING_SHARE = 0.1


@dataclass(frozen=True)
class Loser:
    """A contender that cannot stand: verdict and words. `harmed`: memory of others, perhaps."""

    candidate: str
    verdict: str
    message: str
    details: dict[str, Any]
    harmed: bool = False


class Harmed(Exception):
    """Contenders wrote where they must not. `wrong` are those alone: nobody else is judged in a process that may be
    damaged."""

    def __init__(self, wrong: Sequence[Loser]) -> None:
        super().__init__(", ".join(one.candidate for one in wrong))
        self.wrong = tuple(wrong)


class NobodyWasIt(Exception):
    """Something was written where it must not be, and none of the contenders does it when it runs alone."""


@dataclass
class _Runner:
    """A contender that is right so far."""

    candidate: Candidate
    timing: Timing
    call: Call
    sampler: RotatingSampler
    case: GpuCase
    described: dict[str, Any]


@dataclass(frozen=True)
class _Vendor:
    """The best of what the vendor's library offers."""

    description: dict[str, Any]
    sampler: RotatingSampler
    max_error: float | None
    error_bound: float | None


class ComparisonTask:
    """`touch` is told whom the GPU works for next, before it does: the one to blame, should the process die. `beat` is
    told what else takes long."""

    def __init__(
        self,
        gpu: Gpu,
        operator: Operator,
        libraries: Libraries,
        candidates: Mapping[str, tuple[Candidate, str]],
        *,
        seed: int,
        seconds: float,
        vendor: bool,
        touch: Callable[[str], None],
        beat: Callable[[str], None],
    ) -> None:
        """`candidates`: by name, each with the path of its library; all of one problem."""
        self._gpu = gpu
        self._operator = operator
        self._libraries = libraries
        self._candidates = candidates
        self._seed = seed
        self._seconds = seconds
        self._with_vendor = vendor
        self._touch = touch
        self._beat = beat
        self._references = References(gpu, beat)
        first, _ = next(iter(candidates.values()))
        self._problem = first.problem
        self._fresh = fresh_case(operator, first, seed)
        (self._normal,) = [case for case in full_cases(operator, first, seed) if case.kind == "normal"]
        self.wrong: list[Loser] = []

    def run(self) -> dict[str, Any] | None:
        """The comparison of those that were right before and after it, as JSON; None where none is. `wrong` has the
        others. Raises GpuFault, Harmed, NobodyWasIt."""
        prepared = self._references.of(self._operator, self._normal, keep=True)
        # Made now, while nobody can be blamed for the time that it takes.
        self._references.of(self._operator, self._fresh, keep=True)
        self._beat("making the sets of operands")
        sets = operand_sets(self._gpu, self._operator, self._problem, prepared)
        runners = self._right_ones(prepared, sets)
        before = self._gpu.state()
        vendor, missing = self._vendor(prepared, len(sets.sets)) if runners else (None, "nobody to compare it with")
        while runners:
            ranking = self._rank(runners, vendor)
            still = self._still_right(runners, sets)
            if len(still) == len(runners):
                return self._comparison(ranking, runners, vendor, missing, sets.cold, before)
            runners = still  # once more, without those that the others were compared with wrongly
        return None

    def _right_ones(self, prepared: Prepared, sets: OperandSets) -> dict[str, _Runner]:
        found: dict[str, _Runner] = {}
        for name, (candidate, path) in self._candidates.items():
            self._touch(name)
            described = self._normal.describe(self._operator.extents(self._problem))
            try:
                call = call_of(self._libraries.load(path), self._operator, candidate)
                timing = Timing(self._gpu, call, sets)
                sets.sets[0].restore()  # the samplers of those before it have run in there
                wrong = run_once(self._gpu, call, self._normal, prepared, sets.sets[0], timing.space, described)
                if wrong is None:
                    sampler = timing.sampler()
            except LaunchRefused as error:
                self._drop(name, "runtime_error", str(error), described)
                continue
            if wrong is not None:
                self._lose(name, "incorrect", wrong.at(where(self._normal, call)), described)
                continue
            found[name] = _Runner(candidate, timing, call, sampler, self._normal, described)
        self._stop_where_harmed()
        return found

    def _drop(self, name: str, verdict: str, message: str, *cases: dict[str, Any]) -> None:
        self._lose(name, verdict, Wrong(message), *cases)

    def _lose(self, name: str, verdict: str, wrong: Wrong, *cases: dict[str, Any]) -> None:
        details = {"seed": self._seed, "cases": list(cases)}
        self.wrong.append(Loser(name, verdict, wrong.message, details, wrong.harmed))

    def _stop_where_harmed(self) -> None:
        if harmed := [one for one in self.wrong if one.harmed]:
            raise Harmed(harmed)

    def _still_right(self, runners: Mapping[str, _Runner], sets: OperandSets) -> dict[str, _Runner]:
        """They have taken turns in the same buffers, so each is looked at after runs of its own in restored ones."""
        harm = sets.harm()
        still = {name: runner for name, runner in runners.items() if self._right_alone(name, runner)}
        self._stop_where_harmed()
        if harm is not None and len(still) == len(runners):
            raise NobodyWasIt(f"while the contenders took turns, one of them {harm}; none does so when it runs alone")
        return still

    def _right_alone(self, name: str, runner: _Runner) -> bool:
        self._touch(name)
        described = self._fresh.describe(self._operator.extents(self._problem))
        prepared = self._references.of(self._operator, self._fresh, keep=True)
        runner.timing.restore()
        runner.sampler.replay()
        found = runner.timing.check_again(self._fresh, prepared, described)
        if found is not None:
            self._lose(name, "incorrect", found, runner.described, described)
        return found is None

    def _rank(self, runners: Mapping[str, _Runner], vendor: _Vendor | None) -> Ranking:
        samplers: dict[str, Callable[[], float]] = {
            name: partial(self._sample, name, runner.sampler) for name, runner in runners.items()
        }
        if vendor is not None:
            samplers[VENDOR] = partial(self._sample, VENDOR, vendor.sampler)
        seconds = self._seconds * len(samplers)
        return rank_by_turns(samplers, time.monotonic, seconds=seconds, beside=(VENDOR,) if vendor is not None else ())

    def _sample(self, name: str, sampler: RotatingSampler) -> float:
        self._touch(name)
        return sampler()

    def _vendor(self, prepared: Prepared, sets: int) -> tuple[_Vendor | None, str | None]:
        """The fastest of what is offered, or why there is none. Raises GpuFault."""
        if not self._with_vendor:
            return None, "it was not asked for"
        self._touch(VENDOR)
        try:
            offered = self._gpu.vendor(self._problem, prepared.host, sets)
            timed, refused = self._time_offers(offered, sets)
        except GpuFault:
            raise
        except (GpuError, MemoryError) as error:
            return None, f"the vendor's library failed: {error}"
        if not timed:
            words = f"refuses all of its algorithms: {refused}" if refused else "has nothing for this problem"
            return None, f"the vendor's library {words}"
        _, _, call, sampler = min(timed, key=lambda one: one[:2])
        judged = self._judge_vendor(call, prepared)
        described = call.describe()
        of_how_many = f" (the fastest of {len(timed)})" if len(timed) > 1 else ""
        described["algorithm"] = f"{described['algorithm']}{of_how_many}"
        return _Vendor(described, sampler, number(judged.max_error), number(judged.error_bound)), None

    def _time_offers(
        self, offered: Sequence[VendorCall], sets: int
    ) -> tuple[list[tuple[float, int, VendorCall, RotatingSampler]], str]:
        """Those that run, and why the last of the others was refused: one that is does not speak for all."""
        timed, refused = [], ""
        for position, one in enumerate(offered):
            try:
                timed.append(self._time_vendor(position, one, sets))
            except LaunchRefused as error:
                refused = str(error)
                self._gpu.synchronize()  # raises GpuFault where the refusal was a fault
        return timed, refused

    def _time_vendor(self, number: int, call: VendorCall, sets: int) -> tuple[float, int, VendorCall, RotatingSampler]:
        self._touch(VENDOR)
        sampler = RotatingSampler(self._gpu, [partial(call.run, one) for one in range(sets)])
        found = sample_until_tight(sampler, time.monotonic, seconds=CHOOSING_SHARE * self._seconds)
        return found.interval.median, number, call, sampler

    def _judge_vendor(self, call: VendorCall, prepared: Prepared) -> Judgement:
        call.run(0)
        self._gpu.synchronize()
        return judge(call.result(0), prepared.expected, prepared.bound, exact=False)

    def _comparison(
        self,
        ranking: Ranking,
        runners: Mapping[str, _Runner],
        vendor: _Vendor | None,
        missing: str | None,
        cold: bool,
        before: dict[str, Any],
    ) -> dict[str, Any]:
        placed = {one.name: one for one in ranking.placed}
        device = self._gpu.device
        comparison = Comparison(
            contenders=[self._contender(one, runners[one.name]) for one in ranking.placed if one.name != VENDOR],
            vendor=_vendor_result(vendor, placed[VENDOR]) if vendor is not None else None,
            vendor_missing=missing,
            rounds=ranking.rounds,
            cold=cold,
            device=device.name,
            uuid=device.uuid,
            driver=device.driver,
            before=before,
            after=self._gpu.state(),
            measured_at=time.time(),
        )
        return comparison.model_dump(mode="json")

    def _contender(self, placed: Placed, runner: _Runner) -> Contender:
        flops = self._operator.cost(self._problem, runner.candidate.schedule).flops
        return Contender(
            candidate=placed.name,
            median_us=placed.interval.median,
            low_us=placed.interval.low,
            high_us=placed.interval.high,
            ratio=placed.ratio.median,
            ratio_low=placed.ratio.low,
            ratio_high=placed.ratio.high,
            tie=placed.tie,
            max_error=runner.described.get("max_error"),
            error_bound=runner.described.get("error_bound"),
            tflops=flops / placed.interval.median / 1e6,
        )


def _vendor_result(vendor: _Vendor, placed: Placed) -> VendorResult:
    return VendorResult(
        **vendor.description,
        median_us=placed.interval.median,
        low_us=placed.interval.low,
        high_us=placed.interval.high,
        max_error=vendor.max_error,
        error_bound=vendor.error_bound,
    )
