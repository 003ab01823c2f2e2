"""cuDNN through its graph API, by NVIDIA's own Python package for it, `nvidia-cudnn-frontend`: cuDNN's legacy functions
by ctypes would not reach its fused graphs; PyTorch's functions allocate, and choose by themselves.

That no tf32 is used has no switch in a graph: plans whose numerical notes say that they may use tensor cores are left
out, as PyTorch does it. (The heuristics of cuDNN 9.28 for sm_90 then leave the same plans as under
NVIDIA_TF32_OVERRIDE=0.)
"""

import ctypes
import importlib.util
import json
import os
import sysconfig
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from workers.vendor import cublaslt
from workers.vendor.attention_plan import AttentionPlan
from workers.vendor.bench import Beat
from workers.vendor.convolution_plan import ConvolutionPlan
from workers.vendor.cublaslt import LibraryMissing
from workers.vendor.tensor import Tensor

SONAME = "libcudnn.so.9"
HOW_TO_INSTALL = (
    "pip install --constraint constraints.txt nvidia-cudnn-frontend nvidia-cudnn-cu13 (about 900 MB of libraries), or "
    "nvidia-cudnn-frontend beside a PyTorch for CUDA, which brings the library"
)
DATA_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16"}
PLANS = 8
"""Of a problem, that are timed."""
WORKSPACE_BYTES = 2**30
"""Kernels for channels last compute problems with channels first, with room for copies of all tensors."""
BUILD_SECONDS = 30.0
"""For all graphs of a problem: cuDNN compiles some kernels; a process that measures must not be silent for a minute."""
OUTPUT = 1000  # id of the tensor that a graph writes; those that it reads count from 1


class CudnnError(Exception):
    """A call failed, with cuDNN's messages."""


@dataclass(frozen=True)
class Found:
    """A plan of a graph that is built: its number, what cuDNN calls it, and its workspace."""

    index: int
    name: str
    workspace_bytes: int


class Cudnn:
    """The package with its library. Raises LibraryMissing; its calls raise CudnnError.

    `device`: a device's properties, in the JSON of cuDNN, in the place of the current device: graphs are then planned
    but cannot be executed.
    """

    def __init__(self, device: str | None = None) -> None:
        self.package = _load()
        self._target: dict[str, Any] = {}
        if device is not None:
            properties = self.call(self.package.create_device_properties, device)
            # Of attention cuDNN asks the device itself where the version is not given: 90 for 9.0, of which it is 900.
            self._target = {"device_property": properties, "sm_version": json.loads(device)["deviceVer"] // 10}
        self._handle: Any = None

    @property
    def version(self) -> str:
        """As the wheel is numbered: 9.28.0."""
        number = int(self.package.backend_version())
        # CUDNN_VERSION of cuDNN 9: major * 10000 + minor * 100 + patch.
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def open(self, stream: int) -> None:
        """A handle on the current device, whose work is queued on that stream."""
        self._handle = self.call(self.package.create_handle)
        # Not __del__, which would keep no order at the interpreter's end.
        weakref.finalize(self, self.package.destroy_handle, self._handle)
        self.call(self.package.set_stream, handle=self._handle, stream=stream)
        self._target = {"handle": self._handle}

    def graph(self, plan: ConvolutionPlan | AttentionPlan) -> "Graph":
        """Raises CudnnError where cuDNN has no such graph."""
        if isinstance(plan, AttentionPlan):
            return AttentionGraph(self, plan, self._target)
        return ConvolutionGraph(self, plan, self._target)

    def execute(self, graph: Any, index: int, pointers: Mapping[int, int], workspace: int) -> None:
        self.call(graph.execute_plan_at_index, pointers, workspace, index, handle=self._handle)

    def call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except (RuntimeError, ValueError, self.package.cudnnGraphNotSupportedError) as error:
            raise CudnnError(" ".join(str(error).split())[:500]) from error


class Graph:
    """What a plan asks for. `ids`: of its tensors but the output, by the operand's name."""

    def __init__(self, library: Cudnn, tensors: Mapping[str, Tensor], target: Mapping[str, Any]) -> None:
        self._library = library
        single = library.package.data_type.FLOAT
        self.graph = library.call(
            library.package.pygraph,
            io_data_type=single,
            intermediate_data_type=single,
            compute_data_type=single,
            **target,
        )
        self.ids = {name: number for number, name in enumerate(tensors, start=1)}
        self._given = {name: self._tensor(name, described) for name, described in tensors.items()}
        # Kept as long as the graph: it is given their addresses.
        self._scalars: dict[int, ctypes.c_float] = {}
        self._unwanted = [library.package.numerical_note.DOWN_CONVERT_INPUTS,
                          library.package.numerical_note.REDUCED_PRECISION_REDUCTION]  # fmt: skip

    def find(self, count: int, workspace_bytes: int, seconds: float) -> Iterator[Found]:
        """Plans that can be built and compute what the problem asks for, in the order of cuDNN's heuristics; at
        most `count`, and none is begun after `seconds`: it takes milliseconds where the kernels are in the library,
        seconds where cuDNN compiles them. Raises CudnnError where there are none at all."""
        self._list()
        graph, until, seen = self.graph, time.monotonic() + seconds, set[str]()
        for index in range(graph.get_execution_plan_count()):
            if len(seen) == count or time.monotonic() > until:
                return
            name = graph.get_plan_name_at_index(index)
            if name in seen:
                continue
            try:
                self._library.call(graph.build_plan_at_index, index)
            except CudnnError:
                continue  # left out by its notes, or not for this device
            built = Found(index, name, int(graph.get_workspace_size_plan_at_index(index)))
            if built.workspace_bytes <= workspace_bytes:
                seen.add(name)
                yield built

    def execute(self, index: int, pointers: Mapping[str, int], output: int, workspace: int) -> None:
        """Queues a plan. `pointers`: by the operand's name."""
        given = {number: pointers[name] for name, number in self.ids.items()}
        given |= {number: ctypes.addressof(scalar) for number, scalar in self._scalars.items()}
        self._library.execute(self.graph, index, {**given, OUTPUT: output}, workspace)

    def _list(self) -> None:
        """The graph's plans, none built yet. Raises CudnnError where there are none."""
        library, graph = self._library, self.graph
        modes = library.package.heur_mode
        library.call(graph.build_operation_graph)
        library.call(graph.create_execution_plans, [modes.A, modes.B, modes.FALLBACK])
        library.call(graph.deselect_numeric_notes, self._unwanted)

    def _tensor(self, name: str, described: Tensor) -> Any:
        return self._library.call(
            self.graph.tensor,
            dim=list(described.extents),
            stride=list(described.strides),
            data_type=self._type(described.dtype),
            name=name,
            uid=self.ids[name],
        )

    def _write(self, value: Any, described: Tensor, number: int) -> None:
        """The value is an output, so laid out."""
        value.set_output(True).set_data_type(self._type(described.dtype)).set_uid(number)
        value.set_dim(list(described.extents)).set_stride(list(described.strides))

    def _scalar(self, value: float) -> Any:
        """A number in host memory, read when the graph is executed."""
        number = OUTPUT + 1 + len(self._scalars)
        self._scalars[number] = ctypes.c_float(value)
        return self._library.call(
            self.graph.tensor,
            dim=[1, 1, 1, 1],
            stride=[1, 1, 1, 1],
            data_type=self._type("float32"),
            is_pass_by_value=True,
            uid=number,
        )

    def _type(self, name: str) -> Any:
        return getattr(self._library.package.data_type, DATA_TYPES[name])


class ConvolutionGraph(Graph):
    """A convolution and the nodes fused after it."""

    def __init__(self, library: Cudnn, plan: ConvolutionPlan, target: Mapping[str, Any]) -> None:
        super().__init__(library, plan.tensors, target)
        if not plan.tensor_cores:
            self._unwanted.append(library.package.numerical_note.TENSOR_CORE)
        self._describe(plan)

    def _describe(self, plan: ConvolutionPlan) -> None:
        graph, library, tensors = self.graph, self._library, self._given
        given = {role: tensors[name] for role, name in plan.form.tensors.items()}
        value = library.call(
            getattr(graph, plan.form.method),
            **given,
            pre_padding=[before for before, _ in plan.padding],
            post_padding=[behind for _, behind in plan.padding],
            stride=list(plan.stride),
            dilation=list(plan.dilation),
        )
        # The shape of a gradient does not follow from those of the others.
        value.set_dim(list(plan.product.extents)).set_stride(list(plan.product.strides))
        for node, name in zip(plan.fused, plan.fused_operands, strict=True):
            if name is not None:
                value = graph.add(a=value, b=tensors[name])  # a bias is repeated along its other dimensions
            elif node.op == "scale":
                value = graph.mul(a=value, b=self._scalar(node.scalars[0]))
            elif node.op == "leaky_relu":
                value = graph.leaky_relu(input=value, negative_slope=node.scalars[0])
            else:
                value = getattr(graph, {"silu": "swish"}.get(node.op, node.op))(input=value)
        self._write(value, plan.product, OUTPUT)
        library.call(graph.validate)


class AttentionGraph(Graph):
    """One node, which writes the logarithms of its sums where the problem has them."""

    def __init__(self, library: Cudnn, plan: AttentionPlan, target: Mapping[str, Any]) -> None:
        super().__init__(library, plan.tensors, target)
        bounds: dict[str, Any] = {}
        if plan.left is not None:
            bounds["diagonal_band_left_bound"] = plan.left
        if plan.right is not None:
            bounds["diagonal_band_right_bound"] = plan.right
        if bounds:
            bounds["diagonal_alignment"] = library.package.diagonal_alignment.BOTTOM_RIGHT
        out, stats = library.call(
            self.graph.sdpa, **self._given, attn_scale=plan.scale, generate_stats=plan.lse is not None, **bounds
        )
        self._write(out, plan.out, OUTPUT)
        if plan.lse is not None:
            self.ids["lse"] = len(plan.tensors) + 1
            self._write(stats, plan.lse, self.ids["lse"])
        library.call(self.graph.validate)


def all_built(found: Iterator[Found], beat: Beat) -> list[Found]:
    """All of them; `beat` gets the name of each when it is built."""
    plans = []
    for plan in found:
        beat(f"cuDNN builds plans, {plan.name} at last")
        plans.append(plan)
    return plans


def libraries() -> list[Path]:
    """The copies of libcudnn on this machine, in the order of the package's own search (`cudnn/__init__.py`)."""
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    folders.append(Path(sysconfig.get_path("purelib"), "nvidia", "cudnn", "lib"))
    for package, inside in (("nvidia", "cudnn/lib"), ("torch", "lib")):
        spec = importlib.util.find_spec(package)
        folders += [Path(root, inside) for root in (spec.submodule_search_locations or ())] if spec else []
    return [folder / SONAME for folder in folders if (folder / SONAME).exists()]


def _load() -> Any:
    """The package, with a library. What is loaded already is found by its name."""
    there = libraries()
    try:
        _require_cublas(there)
        if there:
            ctypes.CDLL(str(there[0]))
        package: Any = import_module("cudnn")
        package.backend_version()
    except (ImportError, OSError, RuntimeError, LibraryMissing) as error:
        looked = f"tried {there[0]}" if there else f"no {SONAME} beside PyTorch, in a wheel or in LD_LIBRARY_PATH"
        raise LibraryMissing(f"no cuDNN: {error}; {looked}. {HOW_TO_INSTALL}") from error
    return package


def _require_cublas(there: Sequence[Path]) -> None:
    """cuDNN ends the process where it finds no cuBLASLt: loaded, or in the places that its own parts name."""
    try:
        cublaslt.CublasLt()
    except LibraryMissing:
        name = "libcublasLt.so.*"
        if not any((*library.parent.glob(name), *library.parents[2].glob(f"*/lib/{name}")) for library in there[:1]):
            raise
