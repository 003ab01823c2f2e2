"""A reduction by CuPy and by PyTorch, as a program without a kernel of its own would ask for it: peers in a comparison.

CuPy has its own kernels and CUB's behind one function; which of them runs is its choice. PyTorch is asked where it is
installed for CUDA.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from codegen.operators import operator
from codegen.operators.reduce.problem import ReduceProblem
from codegen.problem import Problem
from workers.gpu.interface import DeviceArray, LaunchRefused, VendorCall
from workers.vendor.bench import Beat, Bench, HostArray, described, gpu_errors, laid_out, or_its_error, poisoned, runs

# By the problem's function: CuPy's and PyTorch's, which takes all axes one by one, of an argmax one. CuPy has none for
# sums of squares and logsumexp in one call.
FUNCTIONS = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin", "argmax": "argmax", "variance": "var"}


@contextmanager
def accelerated(arrays: Any) -> Iterator[None]:
    """With CUB for CuPy's reductions, which what verifies does without (`workers.cuda.cupy_gpu`)."""
    if arrays.__name__ != "cupy":
        yield
        return
    core = arrays._core
    before = core.get_reduction_accelerators()
    core.set_reduction_accelerators(["cub"])
    try:
        yield
    finally:
        core.set_reduction_accelerators(before)


class ReductionCall:
    """A `workers.gpu.interface.VendorCall`."""

    def __init__(
        self, bench: Bench, problem: ReduceProblem, inputs: list[DeviceArray], outs: list[DeviceArray]
    ) -> None:
        self._name, self._axes, self._shape = FUNCTIONS[problem.fn], axes_of(problem), problem.out_shape
        self._bench, self._inputs, self.outs = bench, inputs, outs

    @property
    def operands(self) -> list[tuple[DeviceArray, DeviceArray]]:
        """Input and output of each set."""
        return list(zip(self._inputs, self.outs, strict=True))

    def describe(self) -> dict[str, Any]:
        xp = self._bench.arrays
        return described("CuPy", xp.__version__, f"{xp.__name__}.{self._name}, into {self.outs[0].dtype}")

    def run(self, number: int) -> None:
        with self._bench.faults():
            try:
                function = getattr(self._bench.arrays, self._name)
                with accelerated(self._bench.arrays):
                    function(self._inputs[number], out=self.outs[number], axis=self._axes)
            except (TypeError, ValueError) as error:
                raise LaunchRefused(f"CuPy's {self._name}: {error}") from error

    def result(self, number: int) -> DeviceArray:
        with self._bench.faults():
            return self.outs[number].reshape(self._shape).astype(np.float64)


class TorchReduction:
    """A `workers.gpu.interface.VendorCall`, on the memory of CuPy's call."""

    def __init__(self, bench: Bench, torch: ModuleType, problem: ReduceProblem, memory: "ReductionCall") -> None:
        self._name, self._bench, self._torch, self.memory = FUNCTIONS[problem.fn], bench, torch, memory
        self._arguments: dict[str, Any] = {
            "dim": problem.axes[0] if problem.fn == "argmax" else tuple(problem.axes),
            **({"correction": 0} if problem.fn == "variance" else {}),
        }
        with bench.faults():
            self._sets = [tuple(map(torch.from_dlpack, pair)) for pair in memory.operands]

    def describe(self) -> dict[str, Any]:
        element = str(self._sets[0][1].dtype).removeprefix("torch.")
        return described("PyTorch", self._torch.__version__, f"torch.{self._name}, into {element}")

    def run(self, number: int) -> None:
        torch, (given, out) = self._torch, self._sets[number]
        on_ours = torch.cuda.stream(torch.cuda.ExternalStream(self._bench.stream)) if given.is_cuda else nullcontext()
        try:
            with on_ours, torch.no_grad():
                getattr(torch, self._name)(given, out=out, **self._arguments)
        except (RuntimeError, TypeError) as error:
            self._bench.synchronize()  # raises GpuFault where that was a fault
            raise LaunchRefused(f"PyTorch's {self._name}: {error}") from error

    def result(self, number: int) -> DeviceArray:
        return self.memory.result(number)


def by_pytorch(bench: Bench, problem: ReduceProblem, memory: "ReductionCall") -> list[TorchReduction]:
    """Where PyTorch is installed, for this device, and takes the problem."""
    try:
        torch = import_module("torch")
    except ImportError:
        return []
    if problem.fn == "argmax" and len(problem.axes) != 1:
        return []
    try:
        call = TorchReduction(bench, torch, problem, memory)
    except (RuntimeError, BufferError, AssertionError):  # of a PyTorch for CPUs
        return []
    return [call] if runs(bench, call) else []


def offers(bench: Bench, problem: Problem, inputs: Mapping[str, HostArray], sets: int, beat: Beat) -> list[VendorCall]:
    """CuPy's function and PyTorch's, where one call is the whole problem. Raises GpuError (no memory), GpuFault."""
    if not isinstance(problem, ReduceProblem):
        raise TypeError(f"a reduction is expected, not {problem.operator}")
    if not computes(problem):
        return []
    (x,) = (operand for operand in operator("reduce").operands(problem) if operand.name == "x")
    flat = laid_out(x, inputs["x"])
    with gpu_errors(sets), bench.faults():
        strides = [stride * flat.itemsize for stride in x.strides]
        as_strided = bench.arrays.lib.stride_tricks.as_strided
        arrays = [as_strided(bench.arrays.asarray(flat), x.shape, strides) for _ in range(sets)]
        element = out_dtype(problem, flat.dtype)
        shape = tuple(problem.shape[axis] for axis in problem.kept)
        outs = [poisoned(bench, problem.outputs, element).reshape(shape) for _ in range(sets)]
    call = ReductionCall(bench, problem, arrays, outs)
    by_cupy = or_its_error(bench, "CuPy", lambda: [call] if runs(bench, call) else [])
    beat("what PyTorch offers")
    return [*by_cupy, *or_its_error(bench, "PyTorch", lambda: by_pytorch(bench, problem, call))]


def computes(problem: ReduceProblem) -> bool:
    """Whether one call does it: a plain reduction, of argmax over one axis or all, no mean of whole numbers."""
    plain = problem.map == "identity" and not problem.epilogue and not problem.write_map
    all_or_one = problem.fn != "argmax" or len(problem.axes) in (1, len(problem.shape))
    is_known = (
        problem.fn in FUNCTIONS and problem.dtype != "bfloat16" and (problem.fn, problem.dtype) != ("mean", "int32")
    )
    return plain and all_or_one and is_known and 0 not in problem.shape


def axes_of(problem: ReduceProblem) -> Any:
    """As CuPy takes them."""
    if len(problem.axes) == len(problem.shape):
        return None
    return problem.axes[0] if problem.fn == "argmax" else tuple(problem.axes)


def out_dtype(problem: ReduceProblem, element: np.dtype[Any]) -> np.dtype[Any]:
    """Of what CuPy writes by itself, which is as NumPy has it."""
    if problem.fn == "argmax" or (problem.fn == "sum" and element.kind == "i"):
        return np.dtype(np.int64)
    return np.dtype(np.float64) if problem.fn == "variance" and element.kind == "i" else element
