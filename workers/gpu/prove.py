"""Verify one candidate on the GPU: run the cases of `codegen.plan.gpu_verification_plan` in guarded, poisoned memory
and compare what comes out with the references."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.arrays import Array, Float64
from codegen.kernel import Kernel
from codegen.operator import Operator
from codegen.operators import operator
from codegen.plan.gpu_verification_plan import GpuCase
from codegen.plan.verification_plan import check_output, differing
from workers.cpu.cpu_check import keep_worst
from workers.gpu.interface import Gpu, KernelLibrary
from workers.gpu.libraries import Call
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
                operands = Operands(self._gpu, self._operator.operands(case.problem), proving=True)
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
        space = workspace(self._gpu, call.workspace_bytes(self._gpu.device.memory_bytes), proving=True)
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
    output_check = check_output(operands.out.values(), prepared.expected, prepared.bound, exact=case.exact)
    keep_worst(described, output_check)
    harm = operands.harm() or (space.harm() if space is not None else None)
    if not output_check.ok:
        return Wrong(output_check.sentence(), harmed=harm is not None)
    return Wrong(harm, harmed=True) if harm is not None else None


def where(case: GpuCase, call: Call) -> str:
    extents = operator(case.problem.operator).extents(case.problem)
    return f"{case.kind} inputs, extents {extents}, launch {list(call.launch)}"
