"""A convolution or a gradient of one by cuDNN, and by one kernel after it where its graphs do not reach: the peer in a
comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from codegen.arrays import as_float64
from codegen.operator import Operand
from codegen.operators import operator
from codegen.problem import Problem
from workers.gpu.interface import DeviceArray, GpuError, LaunchRefused
from workers.gpu.tensors import stored_as
from workers.vendor.bench import Bench, HostArray, laid_out, poisoned, runs
from workers.vendor.convolution_plan import Convolution, ConvolutionPlan, after, of_convolution, plans
from workers.vendor.cudnn import Cudnn, CudnnError, Found, Graph, LibraryMissing
from workers.vendor.epilogue import NAME

PLANS = 8
# Kernels for channels last compute problems with channels first, with room for copies of all tensors.
WORKSPACE_BYTES = 2**30
# For all graphs of a problem together; a process that measures must not be silent for a minute.
BUILD_SECONDS = 30.0


@dataclass(frozen=True)
class Set:
    """One set of operands in the device's memory: flat arrays by the operand's name; `product` is what cuDNN writes,
    the output or a buffer of its own."""

    arrays: Mapping[str, DeviceArray]
    product: DeviceArray
    out: DeviceArray


@dataclass(frozen=True)
class Prepared:
    """A plan with its graph and operands: what its engines share. `after` queues the kernel behind it."""

    plan: ConvolutionPlan
    graph: Graph
    sets: tuple[Set, ...]
    workspace: DeviceArray
    after: Callable[[Set], None] | None


class ConvolutionCall:
    """One plan of cuDNN; a `workers.gpu.interface.VendorCall`."""

    def __init__(self, bench: Bench, version: str, out: Operand, prepared: Prepared, found: Found) -> None:
        self._bench, self._version, self._out = bench, version, out
        self._prepared, self._found = prepared, found

    def describe(self) -> dict[str, Any]:
        words = [word for word in (self._found.name, self._prepared.plan.words()) if word]
        return {
            "library": "cuDNN",
            "version": self._version,
            "algorithm": "; ".join(words),
            "fused": not self._prepared.plan.needs_kernel,
            "workspace_bytes": self._found.workspace_bytes,
        }

    def run(self, number: int) -> None:
        prepared, address = self._prepared, self._bench.address
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
            return as_float64(self._prepared.sets[number].out.reshape(self._out.shape), self._out.dtype)


def offers(bench: Bench, problem: Problem, inputs: Mapping[str, HostArray], sets: int) -> list[ConvolutionCall]:
    """The plans that cuDNN deems best and that run, those with most of the epilogue in one graph first. Raises GpuError
    where there is no library, no plan, or no memory for the operands; GpuFault."""
    convolution, operands = of_convolution(problem), operator(problem.operator).operands(problem)
    calls: list[ConvolutionCall] = []
    refused: CudnnError | None = None
    try:
        library = Cudnn()
        library.open(bench.stream)
        made = _upload(bench, operands, inputs, sets)
        ways = plans(convolution, operands)
        for plan in ways:
            if len(calls) == PLANS:
                break
            try:
                graph = library.graph(plan)
                built = list(graph.find(PLANS - len(calls), WORKSPACE_BYTES, BUILD_SECONDS / len(ways)))
            except CudnnError as error:  # it has no kernel for this graph
                refused = error
                continue
            if built:
                prepared = _prepare(bench, convolution, plan, graph, operands, made, built)
                offered = [ConvolutionCall(bench, library.version, _out(operands), prepared, one) for one in built]
                calls += [call for call in offered if runs(bench, call)]
    except LibraryMissing as error:
        raise GpuError(str(error)) from error
    except CudnnError as error:
        raise GpuError(f"cuDNN cannot be used: {error}") from error
    except MemoryError as error:
        raise GpuError(f"no memory on the GPU for {sets} sets of the vendor's operands: {error}") from error
    if refused is not None and not calls:
        raise GpuError(f"cuDNN does not take this problem: {refused}")
    return calls


def _prepare(
    bench: Bench,
    problem: Convolution,
    plan: ConvolutionPlan,
    graph: Graph,
    operands: Sequence[Operand],
    made: Sequence[Set],
    built: Sequence[Found],
) -> Prepared:
    with bench.faults():
        workspace = bench.arrays.empty(max(1, *(one.workspace_bytes for one in built)), np.uint8)
    queue = _after(bench, problem, plan, operands) if plan.needs_kernel else None
    return Prepared(plan, graph, tuple(_with_product(bench, plan, operands, one) for one in made), workspace, queue)


def _after(
    bench: Bench, problem: Convolution, plan: ConvolutionPlan, operands: Sequence[Operand]
) -> Callable[[Set], None]:
    work = after(problem, plan, operands)
    kernel = bench.kernel(work.device_text(), NAME)
    rows, columns, batch, *steps = work.extents()
    fixed = (*map(np.int32, (rows, columns, batch)), *map(np.int64, steps))
    values = tuple(map(np.float32, work.scalars()))

    def queue(one: Set) -> None:
        tensors = (bench.address(one.arrays[name]) for name in plan.rest_operands)
        pointers = (bench.address(one.product), bench.address(one.out))
        kernel(work.grid, work.block, (*map(np.uint64, pointers), *fixed, *map(np.uint64, tensors), *values))

    return queue


def _upload(bench: Bench, operands: Sequence[Operand], inputs: Mapping[str, HostArray], sets: int) -> tuple[Set, ...]:
    """The operands as the problem has them. Outputs are NaN."""
    out = _out(operands)
    flat = {one.name: laid_out(one, _numbers(inputs[one.name])) for one in operands if one.role == "in"}
    with bench.faults():
        written = poisoned(bench, out.elements, stored_as(out.dtype))
        first = Set({name: bench.arrays.asarray(array) for name, array in flat.items()}, written, written)
        return (first, *(_copy(first) for _ in range(sets - 1)))


def _numbers(values: HostArray) -> HostArray:
    """Tests put NaN where no window reaches. An engine that transforms tiles may read there, and is no worse for it."""
    unseen = np.isnan(values)
    return np.where(unseen, np.zeros((), values.dtype), values) if unseen.any() else values


def _copy(one: Set) -> Set:
    written = one.out.copy()
    return Set({name: array.copy() for name, array in one.arrays.items()}, written, written)


def _with_product(bench: Bench, plan: ConvolutionPlan, operands: Sequence[Operand], one: Set) -> Set:
    if plan.in_place:
        return one
    with bench.faults():
        return Set(one.arrays, poisoned(bench, _out(operands).elements, stored_as(plan.product.dtype)), one.out)


def _out(operands: Sequence[Operand]) -> Operand:
    (out,) = (one for one in operands if one.role == "out")
    return out
