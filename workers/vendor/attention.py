"""Attention by cuDNN, and by PyTorch's flash backend where PyTorch for CUDA is installed: the peers in a comparison."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from codegen.arrays import as_float64
from codegen.operator import Operand
from codegen.operators import operator
from codegen.operators.attention.problem import AttentionProblem
from codegen.problem import Problem
from workers.gpu.interface import DeviceArray, GpuError, GpuFault, LaunchRefused, VendorCall
from workers.gpu.tensors import stored_as
from workers.vendor.attention_plan import LOG2_OF_E, cudnn_refuses, heads_first, plan, pytorch_refuses
from workers.vendor.bench import Beat, Bench, HostArray, described, gpu_errors, laid_out, or_its_error, poisoned, runs
from workers.vendor.cudnn import BUILD_SECONDS, PLANS, WORKSPACE_BYTES, Cudnn, CudnnError, Found, Graph, all_built

INSTALL_PYTORCH = "pip install torch, for CUDA, brings it"


class CudnnAttention:
    """One plan of cuDNN; a `workers.gpu.interface.VendorCall`."""

    def __init__(self, bench: Bench, version: str, prepared: "Prepared", found: Found) -> None:
        self._bench, self._version, self.prepared, self._found = bench, version, prepared, found

    def describe(self) -> dict[str, Any]:
        return described("cuDNN", self._version, self._found.name, workspace_bytes=self._found.workspace_bytes)

    def run(self, number: int) -> None:
        prepared, address = self.prepared, self._bench.address
        arrays = prepared.sets[number]
        pointers = {name: address(array) for name, array in arrays.items() if name != "out"}
        try:
            prepared.graph.execute(self._found.index, pointers, address(arrays["out"]), address(prepared.workspace))
        except CudnnError as error:
            raise LaunchRefused(str(error)) from error

    def result(self, number: int) -> DeviceArray:
        xp, prepared = self._bench.arrays, self.prepared
        out, arrays = prepared.out, prepared.sets[number]
        with self._bench.faults():
            steps = [stride * arrays["out"].itemsize for stride in out.strides]
            shaped = xp.lib.stride_tricks.as_strided(arrays["out"], out.shape, steps)
            value = as_float64(shaped, out.dtype)
            if "lse" not in arrays:
                return value
            return xp.concatenate([value.reshape(-1), arrays["lse"].reshape(-1).astype(np.float64) * LOG2_OF_E])


@dataclass(frozen=True)
class Prepared:
    """What cuDNN's plans of a problem share. `sets`: flat arrays by the operand's name, outputs too."""

    graph: Graph
    out: Operand
    sets: tuple[Mapping[str, DeviceArray], ...]
    workspace: DeviceArray


class TorchAttention:
    """PyTorch's function, restricted to its flash backend; a `workers.gpu.interface.VendorCall`."""

    def __init__(
        self, bench: Bench, torch: ModuleType, problem: AttentionProblem, sets: Sequence[Sequence[Any]]
    ) -> None:
        """`sets`: q, k and v as tensors of PyTorch, heads second."""
        self._bench, self._torch, self._problem, self._sets = bench, torch, problem, sets
        self._outs: list[Any] = [None] * len(sets)

    def describe(self) -> dict[str, Any]:
        return described("PyTorch", self._torch.__version__, "scaled_dot_product_attention by its flash backend")

    def run(self, number: int) -> None:
        torch, problem = self._torch, self._problem
        q, k, v = self._sets[number]
        with self._bench.faults(), ExitStack() as within:
            within.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION))
            if q.is_cuda:
                within.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(self._bench.stream)))
            try:
                self._outs[number] = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=problem.window_right == 0, scale=problem.scale, enable_gqa=problem.group > 1
                )
            except RuntimeError as error:
                raise LaunchRefused(f"PyTorch: {error}") from error

    def result(self, number: int) -> DeviceArray:
        out = self._outs[number]
        in_order = out.transpose(1, 2) if self._problem.layout == "bshd" else out
        with self._bench.faults():
            return self._bench.arrays.from_dlpack(in_order.double().contiguous())


def offers(bench: Bench, problem: Problem, inputs: Mapping[str, HostArray], sets: int, beat: Beat) -> list[VendorCall]:
    """What runs of both libraries. Raises GpuError, with what each says, where neither has anything; GpuFault."""
    if not isinstance(problem, AttentionProblem):
        raise TypeError(f"an attention is expected, not {problem.operator}")
    calls: list[VendorCall] = []
    refusals = []
    libraries: dict[str, Callable[[], Sequence[VendorCall]]] = {
        "cuDNN": partial(by_cudnn, bench, problem, inputs, sets, beat),
        "PyTorch": partial(by_pytorch, bench, problem, inputs, sets, beat),
    }
    for name, offer in libraries.items():
        beat(f"what {name} offers")
        try:
            calls += or_its_error(bench, name, offer)
        except GpuFault:
            raise
        except GpuError as error:
            refusals.append(str(error))
    if refusals and not calls:
        raise GpuError("; ".join(refusals))
    return calls


def by_cudnn(
    bench: Bench, problem: AttentionProblem, inputs: Mapping[str, HostArray], sets: int, beat: Beat
) -> list[CudnnAttention]:
    if (why := cudnn_refuses(problem)) is not None:
        raise GpuError(f"cuDNN {why}")
    operands = operator("attention").operands(problem)
    with gpu_errors(sets, "cuDNN does not take this problem", CudnnError):
        library = Cudnn()
        library.open(bench.stream)
        graph = library.graph(plan(problem, operands))
        built = all_built(graph.find(PLANS, WORKSPACE_BYTES, BUILD_SECONDS), beat)
        if not built:
            return []
        with bench.faults():
            workspace = bench.arrays.empty(max(1, *(found.workspace_bytes for found in built)), np.uint8)
        made = tuple(_operands(bench, operands, inputs) for _ in range(sets))
    out = next(operand for operand in operands if operand.name == "out")
    prepared = Prepared(graph, out, made, workspace)
    calls = [CudnnAttention(bench, library.version, prepared, found) for found in built]
    return [call for call in calls if runs(bench, call)]


def by_pytorch(
    bench: Bench, problem: AttentionProblem, inputs: Mapping[str, HostArray], sets: int, beat: Beat
) -> list[TorchAttention]:
    if (why := pytorch_refuses(problem)) is not None:
        raise GpuError(f"PyTorch's flash backend {why}")
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise GpuError(f"no PyTorch: {error}; {INSTALL_PYTORCH}") from error
    beat("PyTorch is imported")
    operands = operator("attention").operands(problem)
    of_cpus = RuntimeError, BufferError, AssertionError  # of a PyTorch for CPUs
    with gpu_errors(sets, f"PyTorch {torch.__version__} does not take this device's memory", *of_cpus):
        made = [_tensors(bench, torch, problem, operands, inputs) for _ in range(sets)]
    call = TorchAttention(bench, torch, problem, made)
    try:
        call.run(0)
    except GpuFault:
        raise
    except LaunchRefused as error:
        bench.synchronize()  # raises GpuFault where the refusal was a fault
        raise GpuError(str(error)) from error
    bench.synchronize()
    return [call]


def _operands(bench: Bench, operands: Sequence[Operand], inputs: Mapping[str, HostArray]) -> dict[str, DeviceArray]:
    """One set. Outputs are NaN."""
    with bench.faults():
        return {
            operand.name: bench.arrays.asarray(laid_out(operand, inputs[operand.name]))
            if operand.role == "in"
            else poisoned(bench, operand.elements, stored_as(operand.dtype))
            for operand in operands
        }


def _tensors(
    bench: Bench,
    torch: ModuleType,
    problem: AttentionProblem,
    operands: Sequence[Operand],
    inputs: Mapping[str, HostArray],
) -> list[Any]:
    """q, k and v of one set, heads second, in memory as the problem has them."""
    given = [operand for operand in operands if operand.role == "in"]
    with bench.faults():
        flat = [bench.arrays.asarray(laid_out(operand, inputs[operand.name])) for operand in given]
        tensors = []
        for array, operand in zip(flat, given, strict=True):
            # As 16 bits of any kind: not every library that exchanges arrays has bfloat16.
            shared = torch.from_dlpack(array.view(np.int16)).view(getattr(torch, operand.dtype))
            tensor = heads_first(operand, problem.layout)
            tensors.append(shared.as_strided(tensor.extents, tensor.strides))
        return tensors
