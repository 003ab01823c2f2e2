"""Verify one candidate on the GPU: run the cases of `codegen.plan.gpu_verification_plan` in guarded, poisoned memory
and compare what comes out with the references. Time one that is right: recorded calls on sets of operands that the L2
does not hold, then another look."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.arrays import Array, Float64
from codegen.kernel import Kernel
from codegen.operator import Operator
from codegen.operators import operator
from codegen.plan.gpu_verification_plan import GpuCase, PromisedGpuCase
from codegen.plan.promised import digest_of, digest_of_inputs
from codegen.plan.verification_plan import check_output, differing
from codegen.problem import Problem
from cukiln.types import Measurement
from workers.cpu.cpu_check import keep_worst
from workers.gpu.interface import Device, Gpu, KernelLibrary
from workers.gpu.libraries import Call
from workers.gpu.samplers import RotatingSampler, SampleCost, alone, cost_of_samples, warm_up
from workers.gpu.sampling import Sampling, sample_until_tight
from workers.gpu.tensors import DeviceTensor, Operands, on_device, workspace


@dataclass(frozen=True)
class Prepared:
    """A case's inputs and what must come out, all on the GPU; `host` are the inputs as they were made."""

    host: Mapping[str, NDArray[Any]]
    inputs: Mapping[str, Array]
    expected: Float64
    bound: Float64


class References:
    """Keeps what was made until `forget`. `beat` gets what is made, before it is: large ones take long."""

    def __init__(self, gpu: Gpu, beat: Callable[[str], None]) -> None:
        self._gpu = gpu
        self._beat = beat
        self._kept: dict[tuple[tuple[str, str, int], bool], Prepared] = {}

    def of(self, operator: Operator, case: GpuCase, *, keep: bool) -> Prepared:
        key = (case.inputs, case.exact)
        if key in self._kept:
            return self._kept[key]
        extents = list(operator.extents(case.problem))
        self._beat(f"making {case.kind} inputs of extents {extents}")
        host = operator.make_inputs(case.problem, case.kind, np.random.default_rng(case.seed))
        inputs = on_device(self._gpu, host, operator.operands(case.problem))
        self._beat(f"making the reference of {case.kind} inputs of extents {extents}")
        expected, bound = operator.reference(case.problem, inputs, exact=case.exact)
        made = Prepared(host, inputs, expected, bound)
        if keep:
            self._kept[key] = made
        return made

    def forget(self) -> None:
        self._kept.clear()


@dataclass(frozen=True)
class Wrong:
    """What was wrong first. `harmed`: memory that other candidates share may have been written."""

    message: str
    harmed: bool = False

    def at(self, place: str) -> "Wrong":
        return replace(self, message=f"{self.message} [{place}]")


class Verifier:
    """Runs cases of one kernel, of which `cases` keeps those before a failure. `beat` is called before each."""

    def __init__(
        self, gpu: Gpu, operator: Operator, kernel: Kernel, references: References, beat: Callable[[str], None]
    ) -> None:
        self._gpu = gpu
        self._operator = operator
        self._kernel = kernel
        self._references = references
        self._beat = beat
        self.cases: list[dict[str, Any]] = []

    def run(self, library: KernelLibrary, cases: Iterable[GpuCase], *, keep: bool) -> Wrong | None:
        """The first thing that is wrong, or null. `keep` the references. Raises LaunchRefused, GpuFault."""
        operands: Operands | None = None
        held = ""
        for case in cases:
            extents = tuple(self._operator.extents(case.problem))
            described = case.describe(extents)
            self.cases.append(described)
            self._beat(f"{case.kind} inputs, extents {list(extents)}")
            prepared = self._references.of(self._operator, case, keep=keep)
            if operands is None or held != case.problem.digest:
                # Else in the same buffers: so an answer that is remembered by address shows.
                operands, held = None, case.problem.digest
                operands = Operands(self._gpu, self._operator.operands(case.problem), verifying=True)
            operands.write(prepared.inputs)
            integers, scalars = (
                tuple(self._operator.integers(case.problem)),
                tuple(self._operator.scalars(case.problem)),
            )
            for launch in case.launches:
                call = Call(library, self._kernel, integers, launch, scalars)
                if wrong := self._launch(call, case, prepared, operands, described):
                    return wrong
        return None

    def _launch(
        self, call: Call, case: GpuCase, prepared: Prepared, operands: Operands, described: dict[str, Any]
    ) -> Wrong | None:
        # How much a call needs depends on its launch; each gets exactly that, so that a byte more is noticed.
        space = workspace(self._gpu, call.workspace_bytes(self._gpu.device.memory_bytes), verifying=True)
        first: Array | None = None
        for _ in range(case.repeats):
            wrong = run_once(self._gpu, call, case, prepared, operands, space, described)
            if wrong is None and case.same_bits and case.repeats > 1:
                bits = operands.out.bits()
                if first is None:
                    first = bits
                elif changed := differing(first, bits):
                    wrong = Wrong(f"{changed} of {bits.size} elements differ between two runs on the same inputs")
            if wrong is not None:
                return wrong.at(where(case, call))
            if isinstance(case, PromisedGpuCase):
                described["inputs_sha256"] = digest_of_inputs(prepared.host)
                described["sha256"] = digest_of([self._gpu.to_host(operands.out.bits())])
        return None


def run_once(
    gpu: Gpu,
    call: Call,
    case: GpuCase,
    prepared: Prepared,
    operands: Operands,
    space: DeviceTensor | None,
    described: dict[str, Any],
) -> Wrong | None:
    """One run from poisoned memory; what is wrong, or null. The error goes into the case's description."""
    operands.out.poison()
    if space is not None:
        space.poison()
    gpu.poison_shared()
    call.run(operands.pointers, 0 if space is None else space.pointer)
    gpu.synchronize()
    expected, bound = prepared.expected, prepared.bound
    output_check = check_output(operands.out.values(), expected, bound, exact=case.exact, signed=case.signed)
    keep_worst(described, output_check)
    harm = operands.harm() or (space.harm() if space is not None else None)
    if not output_check.ok:
        return Wrong(output_check.sentence(), harmed=harm is not None)
    return Wrong(harm, harmed=True) if harm is not None else None


def where(case: GpuCase, call: Call) -> str:
    extents = operator(case.problem.operator).extents(case.problem)
    return f"{case.kind} inputs, extents {extents}, launch {list(call.launch)}"


MOST_SETS = 2048
# The L2 keeps what was used last; after twice its size nothing of a set is left in it, whatever it replaces first.
L2_TIMES = 2
MEMORY_SHARE = 4  # the sets may take one part in so many of the GPU's memory
# Of the sets, which are looked at after timing: each takes as long as a few runs.
LOOKED_AT = 16


@dataclass(frozen=True)
class OperandSets:
    """Copies of a problem's operands with the same values. `cold`: together they are more than the L2 twice over."""

    sets: tuple[Operands, ...]
    inputs: Mapping[str, Array]
    cold: bool

    def harm(self) -> str | None:
        """The first that is found in those sets that are looked at."""
        looked_at = self.sets[:: max(1, len(self.sets) // LOOKED_AT)]
        return next((message for operand_set in looked_at if (message := operand_set.harm())), None)

    def restore(self) -> None:
        """What earlier runs did to them is no later one's fault."""
        for operand_set in self.sets:
            operand_set.restore()


def set_count(device: Device, one_set: int) -> tuple[int, bool]:
    """How many sets of that many bytes to rotate through, and whether that leaves nothing of a set in the L2."""
    # Two at least: what a run used last of a set, however large, is what the next run on it would find in the L2.
    beyond_l2 = max(2, L2_TIMES * device.l2_bytes // one_set + 1)
    count = max(1, min(beyond_l2, MOST_SETS, device.memory_bytes // MEMORY_SHARE // one_set))
    return count, count > 1 and count * one_set > L2_TIMES * device.l2_bytes


def operand_sets(gpu: Gpu, operator: Operator, problem: Problem, prepared: Prepared) -> OperandSets:
    """Raises MemoryError."""
    operands = operator.operands(problem)
    count, cold = set_count(gpu.device, sum(operand.bytes for operand in operands))
    sets = tuple(Operands(gpu, operands, verifying=False) for _ in range(count))
    for operand_set in sets:
        operand_set.write(prepared.inputs)
    return OperandSets(sets, prepared.inputs, cold)


class Timing:
    """One candidate's own call on the sets of its problem."""

    def __init__(self, gpu: Gpu, call: Call, sets: OperandSets) -> None:
        self._gpu = gpu
        self._call = call
        self._sets = sets
        # One for all sets: on one stream no run sees another one's, and a framework reuses its own as well.
        self.space: DeviceTensor | None = workspace(gpu, call.workspace_bytes(gpu.device.memory_bytes), verifying=False)

    def restore(self) -> None:
        """Everything that the call may touch, as it was before any run."""
        self._sets.restore()
        if self.space is not None:
            self.space.wipe()

    def calls(self) -> list[Callable[[], None]]:
        """On each set."""
        space = 0 if self.space is None else self.space.pointer
        return [partial(self._call.run, operand_set.pointers, space) for operand_set in self._sets.sets]

    def check_again(self, case: GpuCase, prepared: Prepared, described: dict[str, Any]) -> Wrong | None:
        """Whether it is still right: other inputs in the buffers that it was timed with, outputs poisoned anew. Finds
        what was right only the first times, remembers an answer by address, or wrote beside its buffers meanwhile."""
        sets = self._sets.sets
        harm = self._sets.harm() or (self.space.harm() if self.space is not None else None)
        if harm is not None:
            return Wrong(f"after it was timed: {harm}", harmed=True).at(where(case, self._call))
        for operand_set in dict.fromkeys((sets[0], sets[-1])):
            operand_set.write(prepared.inputs)
            wrong = run_once(self._gpu, self._call, case, prepared, operand_set, self.space, described)
            if wrong is not None:
                return replace(wrong, message=f"after it was timed: {wrong.message}").at(where(case, self._call))
            # The next candidate must find other inputs here than those it is checked with.
            operand_set.write(self._sets.inputs)
        return None


class KnownCost:
    """What a sample costs beside its launches: of this GPU and its driver, so found once, with the first one."""

    def __init__(self) -> None:
        self._cost: SampleCost | None = None

    def of(self, sampler: RotatingSampler, seconds: float) -> SampleCost:
        if self._cost is None:
            self._cost = cost_of_samples([sampler.cost_us], time.monotonic, seconds=seconds)
        return self._cost


def measure(
    gpu: Gpu, timing: Timing, cost: KnownCost, *, cold: bool, seconds: float, best: float | None
) -> dict[str, Any]:
    """`cukiln.types.Measurement` as JSON. Raises GpuFault."""
    sampler = alone(gpu, timing.calls(), cold=cold)
    warm_up([sampler.sample_us])
    sampler.cost = cost.of(sampler, seconds)
    before = gpu.state()
    sampling: Sampling = sample_until_tight(sampler, time.monotonic, seconds=seconds, best=best)
    measurement = Measurement(
        median_us=sampling.interval.median,
        low_us=sampling.interval.low,
        high_us=sampling.interval.high,
        spread=sampling.spread,
        samples=len(sampling.samples),
        launches_per_sample=sampler.launches,
        overhead_us=sampler.cost.us,
        cold=cold,
        stopped=sampling.stopped,
        device=gpu.device.name,
        uuid=gpu.device.uuid,
        driver=gpu.device.driver,
        before=before,
        after=gpu.state(),
        measured_at=time.time(),
    )
    return measurement.model_dump(mode="json")
