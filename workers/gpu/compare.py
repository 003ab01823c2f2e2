"""Compare the last few candidates of a problem in one process, taking turns, with the vendor's library among them; once
more where the GPU was not steady meanwhile."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.plan.gpu_verification_plan import fresh_case, full_cases
from codegen.plan.verification_plan import check_output
from cukiln.types import Comparison, Contender, VendorRatio, VendorResult
from workers.cpu.cpu_check import number
from workers.gpu.interface import PEER_ERRORS, Gpu, GpuError, GpuFault, LaunchRefused, VendorCall
from workers.gpu.libraries import Libraries, call_of
from workers.gpu.measure import Say, candidates_of
from workers.gpu.samplers import Compared, RotatingSampler, alone, compare_samplers, rough_us, samplers
from workers.gpu.sampling import Placed, is_tie, sample_until_tight
from workers.gpu.task import VENDOR, CandidateResult, GpuTask
from workers.gpu.verify_and_time import (
    OperandSets,
    Prepared,
    References,
    Timing,
    Wrong,
    operand_sets,
    run_once,
    where,
)

# Of a finalist's time, what finding the vendor's best algorithm may take for each of them.
CHOOSING_SHARE = 0.1
# How often the finalists take turns, as long as the GPU changes meanwhile.
ATTEMPTS = 2
# Reasons of `workers.cuda.state` that are no throttling: an idle GPU, and clocks that a person has set.
SETTINGS = frozenset({"gpu_idle", "applications_clocks_setting", "display_clock_setting"})
# Clocks move in steps of 15 MHz, of 1,500 and more, all the time: that is one per cent.
STEADY = 0.03
LITTLE = 0.05  # of the time
FEWEST_SAMPLES = 8


class Harmed(Exception):
    """Finalists wrote where they must not. `wrong` are those alone: a process that may be damaged verifies no other."""

    def __init__(self, wrong: Sequence[CandidateResult]) -> None:
        super().__init__(", ".join(result.candidate for result in wrong))
        self.wrong = wrong


class UnexplainedHarm(Exception):
    """Something was written where it must not be, and none of the finalists does it when it runs alone."""


@dataclass
class _Runner:
    """A finalist that is right so far."""

    candidate: Candidate
    timing: Timing
    rough_us: float
    described: dict[str, Any]


@dataclass(frozen=True)
class _Vendor:
    """The best of what the vendor's library offers."""

    description: dict[str, Any]
    calls: Sequence[Callable[[], None]]
    rough_us: float


class ComparisonTask:
    """Of candidates that all are of one problem. `libraries` hold their kernels; `say` gets the lines; `touched`: what
    the GPU worked for last, as the cause of a death."""

    def __init__(self, gpu: Gpu, task: GpuTask, libraries: Libraries, say: Say) -> None:
        self.gpu, self._task, self._say = gpu, task, say
        self._candidates = candidates_of(task)
        self._paths = {entry.candidate: entry.library for entry in task.candidates}
        self._libraries = libraries
        self._references = References(gpu, self._beat)
        first = next(iter(self._candidates.values()))
        self._problem, self._operator = first.problem, operator(first.problem.operator)
        self._fresh = fresh_case(self._operator, first, task.seed)
        (self._normal,) = (case for case in full_cases(self._operator, first, task.seed) if case.kind == "normal")
        self.wrong: list[CandidateResult] = []
        self.touched = ""

    def run(self) -> dict[str, Any] | None:
        """As JSON; None where no candidate is right. Raises GpuFault, Harmed, UnexplainedHarm."""
        prepared = self._references.of(self._operator, self._normal, keep=True)
        # Made now, so that the time it takes is no candidate's.
        self._references.of(self._operator, self._fresh, keep=True)
        self._beat("making the sets of operands")
        sets = operand_sets(self.gpu, self._operator, self._problem, prepared)
        runners = self._right_runners(prepared, sets)
        vendor, missing = (
            self._vendor(prepared, len(sets.sets)) if runners else (None, "no candidate to compare it with")
        )
        while runners:
            turns = self._samplers(runners, vendor, cold=sets.cold)
            compared, changes = self._steady_ranking(turns)
            still = self._still_right(runners, turns, sets)
            if len(still) == len(runners):
                placed = {entry.name: entry for entry in compared.ranking.placed}
                device = self.gpu.device
                comparison = Comparison(
                    contenders=[self._contender(placed[name], runners[name]) for name in placed if name != VENDOR],
                    vendor=VendorResult(**vendor.description, **_times(placed[VENDOR])) if vendor is not None else None,
                    vendor_missing=missing,
                    rounds=compared.ranking.rounds,
                    launches_per_sample=next(iter(turns.values())).launches,
                    overhead_us=compared.cost.us,
                    unsteady=changes,
                    limited_by=limited_by(*compared.states),
                    cold=sets.cold,
                    device=device.name,
                    uuid=device.uuid,
                    driver=device.driver,
                    before=compared.states[0],
                    after=compared.states[1],
                    measured_at=time.time(),
                )
                return comparison.model_dump(mode="json")
            runners = still  # once more, without those that the others were compared with wrongly
        return None

    def _right_runners(self, prepared: Prepared, sets: OperandSets) -> dict[str, _Runner]:
        runners: dict[str, _Runner] = {}
        for name, candidate in self._candidates.items():
            self._touch(name)
            described = self._normal.describe(self._operator.extents(self._problem))
            try:
                call = call_of(self._libraries.load(self._paths[name]), self._operator, candidate)
                timing = Timing(self.gpu, call, sets)
                sets.sets[0].restore()  # the samplers of those before it have run in there
                wrong = run_once(self.gpu, call, self._normal, prepared, sets.sets[0], timing.space, described)
                if wrong is None:
                    about_us = rough_us(self.gpu, timing.calls())
            except LaunchRefused as error:
                self._lose(name, "runtime_error", Wrong(str(error)), described)
                continue
            if wrong is not None:
                self._lose(name, "incorrect", wrong.at(where(self._normal, call)), described)
                continue
            runners[name] = _Runner(candidate, timing, about_us, described)
        self._stop_where_harmed()
        return runners

    def _touch(self, name: str) -> None:
        self.touched = name
        self._say({"start": name})

    def _beat(self, what: str) -> None:
        self._say({"beat": what})

    def _lose(self, name: str, verdict: str, wrong: Wrong, *cases: dict[str, Any]) -> None:
        details = {"seed": self._task.seed, "cases": list(cases)}
        self.wrong.append(CandidateResult(name, verdict, wrong.message, details, tainted=wrong.harmed))

    def _stop_where_harmed(self) -> None:
        if harmed := [result for result in self.wrong if result.tainted]:
            raise Harmed(harmed)

    def _still_right(
        self, runners: Mapping[str, _Runner], turns: Mapping[str, RotatingSampler], sets: OperandSets
    ) -> dict[str, _Runner]:
        """They have taken turns in the same buffers, so each is looked at after runs of its own in restored ones."""
        harm = sets.harm()
        still = {name: runner for name, runner in runners.items() if self._right_alone(name, runner, turns[name])}
        self._stop_where_harmed()
        if harm is not None and len(still) == len(runners):
            raise UnexplainedHarm(
                f"while the finalists took turns, one of them {harm}; none does so when it runs alone"
            )
        return still

    def _right_alone(self, name: str, runner: _Runner, sampler: RotatingSampler) -> bool:
        self._touch(name)
        described = self._fresh.describe(self._operator.extents(self._problem))
        prepared = self._references.of(self._operator, self._fresh, keep=True)
        runner.timing.restore()
        sampler.replay()
        wrong = runner.timing.check_again(self._fresh, prepared, described)
        if wrong is not None:
            self._lose(name, "incorrect", wrong, runner.described, described)
        return wrong is None

    def _samplers(
        self, runners: Mapping[str, _Runner], vendor: _Vendor | None, *, cold: bool
    ) -> dict[str, RotatingSampler]:
        calls: dict[str, Sequence[Callable[[], None]]] = {
            name: runner.timing.calls() for name, runner in runners.items()
        }
        rough = {name: runner.rough_us for name, runner in runners.items()}
        if vendor is not None:
            calls[VENDOR], rough[VENDOR] = vendor.calls, vendor.rough_us
        return samplers(self.gpu, calls, cold=cold, rough=rough)

    def _steady_ranking(self, turns: Mapping[str, RotatingSampler]) -> tuple[Compared, list[str]]:
        """Once more where the GPU changed meanwhile; what did, where it changed again."""
        for _ in range(ATTEMPTS):
            compared = compare_samplers(
                turns,
                time.monotonic,
                seconds=self._task.seconds * len(turns),
                beside={VENDOR} & turns.keys(),
                before=self._touch,
                state=self.gpu.state,
            )
            changes = unsteady(*compared.states, compared.ranking.placed)
            if not changes:
                break
        return compared, changes

    def _vendor(self, prepared: Prepared, sets: int) -> tuple[_Vendor | None, str | None]:
        """The fastest of what is offered, or why there is none. Raises GpuFault."""
        if not self._task.vendor:
            return None, "it was not asked for"
        self._touch(VENDOR)
        try:
            return self._best_offer(prepared, sets)
        except GpuFault:
            raise
        except (GpuError, MemoryError) as error:
            return None, f"the vendor's library failed: {error}"
        except PEER_ERRORS as error:
            self.gpu.synchronize()  # raises GpuFault where that was a fault
            return None, f"the vendor's library failed: {type(error).__name__}: {error}"

    def _best_offer(self, prepared: Prepared, sets: int) -> tuple[_Vendor | None, str | None]:
        offered = self.gpu.vendor(self._problem, prepared.host, sets, self._beat)
        timed, refused = self._time_offers(offered, sets)
        if not timed:
            reason = f"refuses all of its algorithms: {refused}" if refused else "has nothing for this problem"
            return None, f"the vendor's library {reason}"
        us, _, call = min(timed, key=lambda entry: entry[:2])
        call.run(0)
        self.gpu.synchronize()
        checked = check_output(call.result(0), prepared.expected, prepared.bound, exact=False)
        described = call.describe()
        if len(timed) > 1:
            described["algorithm"] += f" (the fastest of {len(timed)})"
        if refused:
            described["algorithm"] += f"; refused: {refused}"
        described |= {"max_error": number(checked.max_error), "error_bound": number(checked.error_bound)}
        return _Vendor(described, _vendor_calls(call, sets), us), None

    def _time_offers(self, offered: Sequence[VendorCall], sets: int) -> tuple[list[tuple[float, int, VendorCall]], str]:
        """Those that run, and why the others were refused: one that is does not speak for all."""
        timed, refused = [], []
        for position, call in enumerate(offered):
            try:
                timed.append(self._time_vendor(position, call, sets))
            except LaunchRefused as error:
                refused.append(str(error))
                self.gpu.synchronize()  # raises GpuFault where the refusal was a fault
            except PEER_ERRORS as error:
                refused.append(f"{call.describe()['library']} failed: {type(error).__name__}: {error}")
                self.gpu.synchronize()
        return timed, "; ".join(dict.fromkeys(refused))

    def _time_vendor(self, number: int, call: VendorCall, sets: int) -> tuple[float, int, VendorCall]:
        self._touch(VENDOR)
        # Of one process and one library, so without a sample's cost: it is much the same for all.
        sampler = alone(self.gpu, _vendor_calls(call, sets), cold=True)
        sampling = sample_until_tight(sampler, time.monotonic, seconds=CHOOSING_SHARE * self._task.seconds)
        return sampling.interval.median, number, call

    def _contender(self, placed: Placed, runner: _Runner) -> Contender:
        flops = self._operator.cost(self._problem, runner.candidate.schedule).flops
        return Contender(
            candidate=placed.name,
            **_times(placed),
            ratio=placed.ratio.median,
            ratio_low=placed.ratio.low,
            ratio_high=placed.ratio.high,
            tie=placed.tie,
            max_error=runner.described.get("max_error"),
            error_bound=runner.described.get("error_bound"),
            tflops=flops / placed.interval.median / 1e6,
            vendor_ratio=_vendor_ratio(placed),
        )


def _vendor_calls(call: VendorCall, sets: int) -> list[Callable[[], None]]:
    return [partial(call.run, number) for number in range(sets)]


def _vendor_ratio(placed: Placed) -> VendorRatio | None:
    if (ratio := placed.beside.get(VENDOR)) is None:
        return None
    return VendorRatio(ratio=ratio.median, low=ratio.low, high=ratio.high, tie=is_tie(ratio))


def _times(placed: Placed) -> dict[str, Any]:
    return {"median_us": placed.interval.median, "low_us": placed.interval.low, "high_us": placed.interval.high}


# ---- whether the GPU was the same throughout: its throttle reasons, its clock, and the times themselves


def limited_by(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The throttle reasons before and after, or all the time between: a cap that holds all the time is the same for all
    that are compared, and another try would find it, too."""
    throughout = {reason for reason, share in _held_back(before, after).items() if share > 1 - LITTLE}
    return sorted((_reasons(before) & _reasons(after)) | throughout)


def unsteady(before: Mapping[str, Any], after: Mapping[str, Any], placed: Sequence[Placed]) -> list[str]:
    """What changed while these took turns, for a person; nothing of a steady GPU."""
    limits = limited_by(before, after)
    came, went = (
        sorted(first - second - set(limits)) for first, second in itertools.permutations(map(_reasons, (after, before)))
    )
    changes = [f"throttling began: {', '.join(came)}"] if came else []
    changes += [f"throttling ended: {', '.join(went)}"] if went else []
    # Whatever holds at the two moments: what came and went between them is in no list of reasons.
    between = {reason: share for reason, share in _held_back(before, after).items() if share > LITTLE}
    changes += [
        f"throttling for {between[reason]:.0%} of the time: {reason}" for reason in sorted(between.keys() - limits)
    ]
    first, last = before.get("sm_mhz"), after.get("sm_mhz")
    if first and last and abs(last / first - 1) > STEADY:
        changes.append(f"the clock went from {first} to {last} MHz")
    if (change := drift(placed)) is not None and abs(change) > STEADY:
        changes.append(f"all times changed by {change:+.1%} between the first half of the rounds and the second")
    return changes


def _held_back(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """The share of the time between for which the clocks were held back, by reason; of those that both states have."""
    first, last = before.get("held_back", {}), after.get("held_back", {})
    passed = {reason: last[reason]["at_us"] - first[reason]["at_us"] for reason in first.keys() & last.keys()}
    return {reason: (last[reason]["us"] - first[reason]["us"]) / us for reason, us in passed.items() if us > 0}


def _reasons(state: Mapping[str, Any]) -> set[str]:
    return set(state.get("throttle", ())) - SETTINGS


def drift(placed: Sequence[Placed]) -> float | None:
    """How much longer a run took in the second half of the samples than in the first: the median of all that took
    turns, for a change that they share. None of too few samples."""
    changes = []
    for entry in placed:
        half = len(entry.samples) // 2
        if half >= FEWEST_SAMPLES // 2:
            changes.append(median(entry.samples[half:]) / median(entry.samples[:half]) - 1)
    return median(changes) if changes else None
