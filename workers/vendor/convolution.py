"""A convolution or a gradient of one by cuDNN, and by one kernel after it: the peer in a comparison."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from codegen.arrays import as_float64
from codegen.operator import Operand
from codegen.operators import operator
from codegen.operators.convolution.problem import Convolution
from codegen.problem import Problem
from workers.gpu.interface import DeviceArray, GpuError, LaunchRefused
from workers.gpu.tensors import stored_as
from workers.vendor.bench import (
    Beat,
    Bench,
    HostArray,
    OperandSet,
    described,
    gpu_errors,
    kernel_after,
    laid_out,
    poisoned,
    runs,
)
from workers.vendor.convolution_plan import ConvolutionPlan, after, plans
from workers.vendor.cudnn import BUILD_SECONDS, PLANS, WORKSPACE_BYTES, Cudnn, CudnnError, Found, Graph, all_built
from workers.vendor.epilogue import output_of

# Of all plans, for the last way, which leaves the epilogue to a kernel after it: one that is fused need not be faster.
UNFUSED_PLANS = 3


@dataclass(frozen=True)
class Prepared:
    """A plan with its graph and operands: what its engines share. `after` queues the kernel behind it."""

    plan: ConvolutionPlan
    graph: Graph
    sets: tuple[OperandSet, ...]
    workspace: DeviceArray
    after: Callable[[OperandSet], None] | None


class ConvolutionCall:
    """One plan of cuDNN; a `workers.gpu.interface.VendorCall`."""

    def __init__(self, bench: Bench, version: str, out: Operand, prepared: Prepared, engine: Found) -> None:
        self._bench, self._version, self._out = bench, version, out
        self.prepared, self._found = prepared, engine

    def describe(self) -> dict[str, Any]:
        plan, needed = self.prepared.plan, self._found.workspace_bytes
        fused = not plan.needs_kernel
        return described("cuDNN", self._version, self._found.name, plan.text(), fused=fused, workspace_bytes=needed)

    def run(self, number: int) -> None:
        prepared, address = self.prepared, self._bench.address
        operands = prepared.sets[number]
        pointers = {name: address(operands.arrays[name]) for name in prepared.plan.tensors}
        try:
            prepared.graph.execute(self._found.index, pointers, address(operands.product), address(prepared.workspace))
        except CudnnError as error:
            raise LaunchRefused(str(error)) from error
        if prepared.after is not None:
            prepared.after(operands)

    def result(self, number: int) -> DeviceArray:
        with self._bench.faults():
            return as_float64(self.prepared.sets[number].out.reshape(self._out.shape), self._out.dtype)


def offers(
    bench: Bench, problem: Problem, inputs: Mapping[str, HostArray], sets: int, beat: Beat
) -> list[ConvolutionCall]:
    """The plans that run, those with most of the epilogue in one graph first. Raises GpuError, GpuFault."""
    if not isinstance(problem, Convolution):
        raise TypeError(f"a convolution is expected, not {problem.operator}")
    operands = operator(problem.operator).operands(problem)
    calls: list[ConvolutionCall] = []
    refused: CudnnError | None = None
    with gpu_errors(sets, "cuDNN cannot be used", CudnnError):
        library = Cudnn()
        library.open(bench.stream)
        made = _upload(bench, operands, inputs, sets)
        ways = plans(problem, operands)
        for plan in ways:
            slots = PLANS - len(calls) - (UNFUSED_PLANS if plan is not ways[-1] else 0)
            if slots <= 0:
                continue
            beat("what cuDNN offers")
            try:
                graph = library.graph(plan)
                built = all_built(graph.find(slots, WORKSPACE_BYTES, BUILD_SECONDS / len(ways)), beat)
            except CudnnError as error:  # it has no kernel for this graph
                refused = error
                continue
            if built:
                out, sets_of_plan = output_of(operands), made
                with bench.faults():
                    workspace = bench.arrays.empty(max(1, *(engine.workspace_bytes for engine in built)), np.uint8)
                queue = None
                if plan.needs_kernel:
                    queue = kernel_after(bench, after(problem, plan, operands), plan.rest_operands)
                if not plan.in_place:
                    product = partial(poisoned, bench, out.elements, stored_as(plan.product.dtype))
                    with bench.faults():
                        sets_of_plan = tuple(replace(operand_set, product=product()) for operand_set in made)
                prepared = Prepared(plan, graph, sets_of_plan, workspace, queue)
                offered = [ConvolutionCall(bench, library.version, out, prepared, engine) for engine in built]
                calls += [call for call in offered if runs(bench, call)]
    if refused is not None and not calls:
        raise GpuError(f"cuDNN does not take this problem: {refused}")
    return calls


def _upload(
    bench: Bench, operands: Sequence[Operand], inputs: Mapping[str, HostArray], sets: int
) -> tuple[OperandSet, ...]:
    """The operands as the problem has them. Outputs are NaN."""
    out = output_of(operands)
    flat = {
        operand.name: laid_out(operand, _numbers(inputs[operand.name])) for operand in operands if operand.role == "in"
    }
    with bench.faults():
        written = poisoned(bench, out.elements, stored_as(out.dtype))
        arrays = {name: bench.arrays.asarray(array) for name, array in flat.items()}
        return OperandSet(arrays, written, written).copies(sets)


def _numbers(values: HostArray) -> HostArray:
    """Tests put NaN where no window reaches. An engine that transforms tiles may read there, and is no worse for it."""
    unseen = np.isnan(values)
    return np.where(unseen, np.zeros((), values.dtype), values) if unseen.any() else values
