"""How a convolution becomes a graph of cuDNN: by NumPy, and by the library itself where it is installed.

Without a GPU cuDNN plans graphs for the description of one (`DEVICE`), and needs a libcuda.so.1 only to be loaded.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from codegen.epilogue_reference import Bounded, apply_chain
from codegen.operator import Operand
from codegen.operators import operator, operators
from codegen.plan.verification_plan import check_output
from tests.operators.conv2d.kernels import conv2d
from tests.support.gpu.cudnn_without_a_gpu import planned_without_a_gpu
from tests.support.gpu.numpy_bench import NumpyBench, quiet
from tests.support.run.each_run import some_each_run
from workers.cuda.cupy_gpu import VENDORS
from workers.gpu.interface import GpuError, LaunchRefused
from workers.vendor import convolution, cublaslt, cudnn
from workers.vendor.convolution_plan import FORMS, ConvolutionPlan, after, plans
from workers.vendor.cublaslt import LibraryMissing
from workers.vendor.cudnn import Cudnn, CudnnError, Found
from workers.vendor.tensor import Tensor

BIAS, RESIDUAL, RELU, GELU = {"op": "bias"}, {"op": "residual"}, {"op": "relu"}, {"op": "gelu"}
HALF, MASK, CLIP = {"op": "scale", "value": 0.5}, {"op": "mask"}, {"op": "clip", "lo": 0.0, "hi": 6.0}
LEAKY = {"op": "leaky_relu", "slope": 0.25}
SMALL = {"n": 2, "h": 7, "w": 6, "c": 8, "k": 12, "r": 3, "s": 2}
# Everything that a problem can ask of a graph.
PROBLEMS: list[dict[str, Any]] = [
    {},
    {"allow_tf32": True, "groups": 2},
    {"dtype": "float16", "stride": [2, 1], "padding": [1, 2], "dilation": [1, 2]},
    {"dtype": "bfloat16", "groups": 4, "padding": [[0, 1], [2, 0]]},
    {"dtype": "float16", "out_dtype": "float32", "padding": 1, "epilogue": [HALF, RESIDUAL]},
    {"dtype": "float32", "out_dtype": "float16", "epilogue": [HALF, MASK]},
    {"dtype": "float16", "out_dtype": "bfloat16", "stride": 3, "padding": 2},
    {"dtype": "float16", "r": 1, "s": 1, "stride": 2},
]
FORWARD: list[dict[str, Any]] = [
    {"dtype": "float16", "epilogue": [BIAS, RESIDUAL, RELU]},
    {"dtype": "float16", "c": 12, "groups": 12, "padding": 1, "epilogue": [BIAS, LEAKY, MASK]},
    {"dtype": "bfloat16", "epilogue": [RELU, CLIP, BIAS]},
]
EVERY = [
    (name, {**SMALL, **fields, "layout": layout})
    for name in FORMS
    for layout in ("nhwc", "nchw")
    for fields in (PROBLEMS + FORWARD if name == "conv2d" else PROBLEMS)
]
NOT_HERE = "nvidia-cudnn-frontend, which needs no GPU here, is not installed: " + cudnn.HOW_TO_INSTALL


def parsed(name: str, fields: Mapping[str, Any]) -> tuple[Any, tuple[Operand, ...]]:
    if name not in operators():
        pytest.skip(f"{name} is no operator here")
    problem = operator(name).parse({"operator": name, **fields})
    return problem, operator(name).operands(problem)


def small(**fields: Any) -> tuple[Any, tuple[Operand, ...]]:
    problem = conv2d(**{**SMALL, **fields})
    return problem, operator("conv2d").operands(problem)


# --- the plan


@pytest.mark.parametrize(
    ("layout", "x", "w", "out"),
    [
        ("nhwc", ((336, 1, 48, 8), (48, 1, 16, 8)), (12, 8, 3, 2), (300, 1, 60, 12)),
        ("nchw", ((336, 42, 6, 1), (48, 6, 2, 1)), (12, 8, 3, 2), (300, 25, 5, 1)),
    ],
)
def test_extents_are_in_cudnns_order_and_strides_say_the_layout(layout: str, x: Any, w: Any, out: Any) -> None:
    (plan,) = plans(*small(layout=layout))
    assert plan.tensors["x"] == Tensor("float32", (2, 8, 7, 6), x[0])
    assert plan.tensors["w"] == Tensor("float32", w, x[1])
    assert plan.product == Tensor("float32", (2, 12, 5, 5), out)
    assert plan.form.tensors == {"image": "x", "weight": "w"}


def test_a_bias_has_its_numbers_along_the_channels_of_the_output_or_the_filters_of_a_gradient() -> None:
    plan, *_ = plans(*small(dtype="float16", out_dtype="float32", epilogue=[BIAS]))
    assert plan.tensors["bias"] == Tensor("float32", (1, 12, 1, 1), (12, 1, 1, 1))
    assert FORMS["conv2d_wgrad"].bias == 0


@pytest.mark.parametrize(
    ("epilogue", "ways"),
    [
        ([], [0]),
        ([BIAS, RELU], [2, 1, 0]),
        ([BIAS, RESIDUAL, GELU, HALF], [4, 3, 2, 1, 0]),
        ([CLIP, BIAS], [0]),
        ([BIAS, MASK, RELU], [1, 0]),
        ([BIAS, {"op": "cast", "dtype": "float16"}], [1, 0]),
    ],
)
def test_ever_less_of_the_epilogue_is_tried_in_one_graph(epilogue: list[Any], ways: list[int]) -> None:
    problem, operands = small(dtype="float16", epilogue=epilogue)
    plan_list = plans(problem, operands)
    assert [len(plan.fused) for plan in plan_list] == ways
    assert all(plan.fused + plan.rest == problem.epilogue and plan.in_place for plan in plan_list)


def test_over_a_ring_the_library_has_nothing() -> None:
    problem = conv2d(dtype="int64", fraction_bits=18)
    assert plans(problem, operator("conv2d").operands(problem)) == ()


def test_words_say_what_is_done_where() -> None:
    most, _, nothing = plans(*small(dtype="float16", epilogue=[BIAS, RELU, MASK]))
    assert most.text() == "bias, relu in its graph; mask in a kernel after it"
    assert most.rest_operands == ("mask",) and nothing.rest_operands == ("bias", "mask")
    assert nothing.text() == "bias, relu, mask in a kernel after it"
    assert plans(*small(epilogue=[BIAS]))[0].text() == "bias in its graph"


@pytest.mark.parametrize(
    ("fields", "products"),
    [
        ({"dtype": "float16"}, ["float16"]),
        ({"dtype": "float16", "out_dtype": "float32"}, ["float32"]),
        ({"dtype": "float32", "out_dtype": "float16"}, ["float16", "float32"]),
        ({"dtype": "float16", "out_dtype": "bfloat16"}, ["bfloat16", "float32"]),
    ],
)
def test_a_product_is_rounded_to_the_outputs_type_or_not_at_all(fields: dict[str, Any], products: list[str]) -> None:
    problem, operands = small(**fields)
    ways = plans(problem, operands)
    if problem.dtype == "float32" and problem.out_dtype == "float16":
        ways = tuple(plan for plan in ways if plan.product.dtype in products)
    assert [plan.product.dtype for plan in ways][: len(products)] == products[: len(ways)]
    assert [plan.in_place for plan in ways] == [product == problem.out_dtype for product in products[: len(ways)]]
    assert ways[-1].needs_kernel == (not ways[-1].in_place)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "products"),
    [
        ("float16", "float32", ["float32", "float16"]),
        ("bfloat16", "float32", ["float32", "bfloat16"]),
        ("float16", "float16", ["float16"]),
        ("float32", "float32", ["float32"]),
    ],
)
def test_a_gradient_of_filters_in_fp32_is_also_tried_in_the_tensors_type_and_converted(
    dtype: str, out_dtype: str, products: list[str]
) -> None:
    problem, operands = parsed("conv2d_wgrad", {**SMALL, "dtype": dtype, "out_dtype": out_dtype})
    ways = plans(problem, operands)
    assert [way.product.dtype for way in ways] == products
    assert [way.needs_kernel for way in ways] == [False, True][: len(ways)]


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [({}, False), ({"allow_tf32": True}, True), ({"dtype": "float16"}, True), ({"dtype": "bfloat16"}, True)],
)
def test_float32_has_tensor_cores_where_tf32_is_allowed_only(fields: dict[str, Any], allowed: bool) -> None:
    assert all(plan.tensor_cores is allowed for plan in plans(*small(**fields)))


def test_every_convolution_has_this_vendor_and_another_operator_is_refused() -> None:
    assert all(VENDORS[name] is convolution.offers for name in FORMS)
    with pytest.raises(TypeError, match="matmul"):
        matmul = operator("matmul").parse({"operator": "matmul", "m": 8, "n": 8, "k": 8})
        convolution.offers(NumpyBench(), matmul, {}, 1, quiet)


# --- the whole way, with NumPy in the place of the library and of the device


class NumpyLibrary:
    """cuDNN by its documentation, one product of every pair at a time; `refuses` says which graphs it has no plan for,
    and plans whose number is in `broken` do not run."""

    version = "9.99.0"

    def __init__(self, bench: NumpyBench, refuses: Callable[[ConvolutionPlan], bool], broken: Sequence[int]) -> None:
        self.bench, self.refuses, self.broken = bench, refuses, broken
        self.stream: int | None = None

    def open(self, stream: int) -> None:
        self.stream = stream

    def graph(self, plan: ConvolutionPlan) -> NumpyGraph:
        return NumpyGraph(self, plan)


class NumpyGraph:
    def __init__(self, library: NumpyLibrary, plan: ConvolutionPlan) -> None:
        self.library, self.plan = library, plan

    def find(self, count: int, workspace_bytes: int, seconds: float) -> Iterator[Found]:
        if self.library.refuses(self.plan):
            raise CudnnError("no valid engine configs")
        yield from (Found(index, f"eng{index}", 64 * index) for index in range(min(count, 5)))

    def execute(self, index: int, pointers: Mapping[str, int], output: int, workspace: int) -> None:
        if index in self.library.broken:
            raise CudnnError("not for this device")
        memory = self.library.bench.memory
        assert memory[workspace].nbytes >= 64 * index
        given = {name: view(memory[address], self.plan.tensors[name]) for name, address in pointers.items()}
        view(memory[output], self.plan.product, write=True)[...] = computed(self.plan, given)


def view(flat: np.ndarray[Any, Any], tensor: Tensor, write: bool = False) -> np.ndarray[Any, Any]:
    """A tensor as cuDNN reads it: of four dimensions, channels second."""
    values = flat.view(ml_dtypes.bfloat16) if tensor.dtype == "bfloat16" else flat
    steps = [stride * values.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(values, tensor.extents, steps, writeable=write)


def computed(plan: ConvolutionPlan, tensors: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The graph in float64. Each element of a filter ties elements of the image to elements of the output."""
    given = {role: tensors[name].astype(np.float64) for role, name in plan.form.tensors.items()}
    result = np.zeros(plan.product.extents)
    image, filters, loss = (
        given.get(role, result) for role in ("image", "weight" if "weight" in given else "filter", "loss")
    )
    # Which of the three is computed: those that are not given are the result itself.
    _, c, h, w = image.shape
    (k, of_group, r, s), (_, _, p, q) = filters.shape, loss.shape
    for f in range(k):
        first = f // (k // (c // of_group)) * of_group
        for i in range(r):
            for j in range(s):
                for y in range(p):
                    for x in range(q):
                        row = y * plan.stride[0] - plan.padding[0][0] + i * plan.dilation[0]
                        column = x * plan.stride[1] - plan.padding[1][0] + j * plan.dilation[1]
                        if not (0 <= row < h and 0 <= column < w):
                            continue
                        channels = slice(first, first + of_group)
                        if plan.form.method == "conv_fprop":
                            loss[:, f, y, x] += image[:, channels, row, column] @ filters[f, :, i, j]
                        elif plan.form.method == "conv_dgrad":
                            image[:, channels, row, column] += np.outer(loss[:, f, y, x], filters[f, :, i, j])
                        else:
                            filters[f, :, i, j] += loss[:, f, y, x] @ image[:, channels, row, column]
    for node, name in zip(plan.fused, plan.fused_operands, strict=True):
        if name is not None:
            result = result + tensors[name].astype(np.float64)
        elif node.op == "scale":
            result = result * node.scalars[0]
        elif node.op == "relu":
            result = np.maximum(result, 0.0)
        else:
            assert node.op == "leaky_relu"
            result = np.where(result > 0, result, node.scalars[0] * result)
    return result


def offered(
    monkeypatch: pytest.MonkeyPatch,
    problem: Any,
    inputs: Mapping[str, Any],
    refuses: Callable[[ConvolutionPlan], bool] = lambda plan: False,
    broken: Sequence[int] = (),
) -> tuple[NumpyBench, list[convolution.ConvolutionCall]]:
    bench = NumpyBench()
    monkeypatch.setattr(convolution, "Cudnn", lambda: NumpyLibrary(bench, refuses, broken))
    return bench, convolution.offers(bench, problem, inputs, 2, quiet)


def finished(problem: Any, plan: ConvolutionPlan, operands: Sequence[Operand], inputs: Any, product: Any) -> Any:
    """What the kernel after cuDNN's makes of its product, by the matrices that it is given."""
    work = after(problem, plan, operands)
    matrices = (work.batch, work.rows, work.columns)
    tensors = {
        name: inputs[name] if inputs[name].ndim == 1 else inputs[name].reshape(matrices) for name in plan.rest_operands
    }
    start = Bounded(product.reshape(matrices), np.zeros(matrices))
    return apply_chain(work.chain, start, tensors, exact=False, out_dtype=problem.out_dtype).value


@pytest.mark.parametrize(("name", "fields"), EVERY, ids=lambda of: of if isinstance(of, str) else str(of)[70:150])
def test_every_plan_computes_the_problem(name: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    problem, operands = parsed(name, fields)
    own, (out,) = operator(name), [operand for operand in operands if operand.role == "out"]
    inputs = own.make_inputs(problem, "integer", np.random.default_rng(5))
    expected, bound = own.reference(problem, inputs)
    rounding = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
    for way in plans(problem, operands):
        narrow = max(rounding.get(element, 0.0) for element in (problem.out_dtype, way.product.dtype))
        _, calls = offered(monkeypatch, problem, inputs, refuses=lambda plan, way=way: plan != way)  # type: ignore[misc]
        assert len(calls) == 5 and calls[0].describe()["fused"] is not way.needs_kernel
        calls[0].run(1)
        flat = calls[0].prepared.sets[1].product
        product = (flat.view(ml_dtypes.bfloat16) if way.product.dtype == "bfloat16" else flat).astype(np.float64)
        result = finished(problem, way, operands, inputs, product.reshape(out.shape)).reshape(out.shape)
        if not way.needs_kernel:
            assert np.array_equal(result, calls[0].result(1))
        # Narrow types round the product, where nodes are left, and the output.
        largest = np.abs(expected) + np.abs(product.reshape(out.shape))
        assert np.all(np.abs(result - expected) <= bound + narrow * largest)


def test_what_runs_is_offered_most_in_one_graph_first_up_to_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = small(dtype="float16", epilogue=[BIAS, RELU])
    inputs = operator("conv2d").make_inputs(problem, "normal", np.random.default_rng(5))
    bench, calls = offered(monkeypatch, problem, inputs, refuses=lambda plan: len(plan.fused) == 1, broken=[0, 3])
    words = [call.describe() for call in calls]
    assert [(word["algorithm"].partition(";")[0], word["fused"]) for word in words] == [
        ("eng1", True), ("eng2", True), ("eng4", True), ("eng1", False), ("eng2", False), ("eng4", False),
    ]  # fmt: skip
    assert [word["workspace_bytes"] for word in words[:3]] == [64, 128, 256]
    assert words[0]["library"] == "cuDNN" and words[0]["version"] == "9.99.0"
    assert len(bench.texts) == 1 and len(bench.launches) == 3
    _, all_of_them = offered(monkeypatch, problem, inputs)
    # Those without the epilogue have places of their own: a fused one need not be faster.
    assert [call.describe()["fused"] for call in all_of_them] == [True] * 5 + [False] * 3
    expected, bound = operator("conv2d").reference(problem, inputs)
    all_of_them[0].run(0)
    assert check_output(all_of_them[0].result(0), expected, bound + 2.0**-9 * np.abs(expected), exact=False).ok


def test_an_engine_may_read_what_no_window_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = small(r=1, s=1, stride=3)
    inputs = operator("conv2d").make_inputs(problem, "normal", np.random.default_rng(5))
    assert np.isnan(inputs["x"]).any()
    _, calls = offered(monkeypatch, problem, inputs)
    assert np.isfinite(calls[0].prepared.sets[1].arrays["x"]).all()


def test_a_problem_that_no_graph_fits_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = small()
    inputs = operator("conv2d").make_inputs(problem, "normal", np.random.default_rng(5))
    with pytest.raises(GpuError, match="does not take this problem: no valid engine configs"):
        offered(monkeypatch, problem, inputs, refuses=lambda plan: True)


def test_a_plan_that_stops_running_refuses_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = small()
    inputs = operator("conv2d").make_inputs(problem, "normal", np.random.default_rng(5))
    _, calls = offered(monkeypatch, problem, inputs)
    calls[0].prepared.graph.library.broken = [0]  # type: ignore[attr-defined]
    with pytest.raises(LaunchRefused, match="not for this device"):
        calls[0].run(0)


# --- where the library is


def test_a_machine_without_the_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.setattr(cudnn, "libraries", list)
    with pytest.raises(LibraryMissing, match=r"no libcudnn\.so\.9 .*pip install .*nvidia-cudnn-frontend"):
        Cudnn()
    with pytest.raises(GpuError, match=r"no cuDNN: .*pip install"):
        convolution.offers(NumpyBench(), small()[0], {}, 1, quiet)


def test_cudnn_is_not_loaded_where_it_would_find_no_cublas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none() -> Any:
        raise cublaslt.LibraryMissing("no libcublasLt: nowhere")

    there = tmp_path / "nvidia" / "cudnn" / "lib" / cudnn.SONAME
    there.parent.mkdir(parents=True)
    there.write_text("no library, and not opened")
    monkeypatch.setattr(cublaslt, "CublasLt", none)
    monkeypatch.setattr(cudnn, "libraries", lambda: [there])
    with pytest.raises(LibraryMissing, match="no libcublasLt: nowhere"):
        Cudnn()
    beside = tmp_path / "nvidia" / "cu13" / "lib" / "libcublasLt.so.13"
    beside.parent.mkdir(parents=True)
    beside.touch()
    with pytest.raises(LibraryMissing, match=str(there)):  # opened now
        Cudnn()


def test_the_library_is_found_where_the_package_looks_then_beside_pytorch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = [tmp_path / "path", tmp_path / "torch" / "lib"]
    for place in places:
        place.mkdir(parents=True)
        (place / cudnn.SONAME).touch()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(cudnn.sysconfig, "get_path", lambda name: str(tmp_path / "purelib"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'none'}:{places[0]}")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    libraries = cudnn.libraries()
    assert libraries[0] == places[0] / cudnn.SONAME and places[1] / cudnn.SONAME in libraries
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert places[0] / cudnn.SONAME not in cudnn.libraries()


def test_the_version_is_spelled_as_the_wheel_is() -> None:
    made = object.__new__(Cudnn)

    class Package:
        def __init__(self, number: int) -> None:
            self.backend_version = lambda: number

    for number, words in ((92600, "9.26.0"), (91302, "9.13.2")):
        made.package = Package(number)
        assert made.version == words


# --- the library itself


@pytest.fixture(scope="module")
def library() -> Cudnn:
    if importlib.util.find_spec("cudnn") is None:
        pytest.skip(NOT_HERE)
    try:
        return Cudnn()
    except LibraryMissing as error:
        pytest.skip(f"{error}")


@pytest.mark.parametrize(("name", "fields"), EVERY, ids=lambda of: of if isinstance(of, str) else str(of)[70:150])
def test_the_library_accepts_every_graph(library: Cudnn, name: str, fields: dict[str, Any]) -> None:
    problem, operands = parsed(name, fields)
    for plan in plans(problem, operands):
        described = json.loads(str(library.graph(plan).graph))
        nodes = [node["tag"] for node in described["nodes"]]
        assert nodes[0] == {"conv_fprop": "CONV_FPROP", "conv_dgrad": "CONV_DGRAD", "conv_wgrad": "CONV_WGRAD"}[
            plan.form.method
        ] and nodes[1:] == ["POINTWISE"] * len(plan.fused)
        first = described["nodes"][0]
        sides = [list(each) for each in zip(*plan.padding, strict=True)]
        assert [first["pre_padding"], first["post_padding"]] == sides
        assert [first["stride"], first["dilation"]] == [list(plan.stride), list(plan.dilation)]
        tensors = {tensor["uid"]: tensor for tensor in described["tensors"].values()}
        assert tensors[cudnn.OUTPUT]["dim"] == list(plan.product.extents)
        assert tensors[cudnn.OUTPUT]["stride"] == list(plan.product.strides)
        assert tensors[cudnn.OUTPUT]["data_type"] == cudnn.DATA_TYPES[plan.product.dtype]
        for number, tensor in enumerate(plan.tensors.values(), start=1):
            assert tensors[number]["data_type"] == cudnn.DATA_TYPES[tensor.dtype]


PLAN = """
import json, sys
from codegen.operators import operator
from workers.vendor.convolution_plan import plans
from workers.vendor.cudnn import Cudnn, CudnnError
asked = json.load(sys.stdin)
library, answers = Cudnn(json.dumps(asked["device"])), []
for fields in asked["problems"]:
    problem = operator("conv2d").parse({"operator": "conv2d", **fields})
    plan = plans(problem, operator("conv2d").operands(problem))[0]
    try:
        found = [[one.name, one.workspace_bytes] for one in library.graph(plan).find(8, 2**30, 60.0)]
    except CudnnError as error:
        found = str(error)
    answers.append(found)
print(json.dumps(answers))
"""


LAYER = {"n": 8, "h": 28, "w": 28, "c": 64, "k": 64, "r": 3, "s": 3, "padding": 1}
LAYOUTS = ("nhwc", "nchw")


def halves(layout: str) -> list[dict[str, Any]]:
    half = {**LAYER, "layout": layout, "dtype": "float16"}
    return [half, {**half, "epilogue": [BIAS]}, {**half, "epilogue": [BIAS, RELU]}, {**half, "groups": 64}]


def singles(layout: str) -> list[dict[str, Any]]:
    single = {**LAYER, "layout": layout}
    return [single, {**single, "allow_tf32": True}]


def planned(folder: Path, problems: Sequence[Mapping[str, Any]], **environment: str) -> dict[str, Any]:
    """What cuDNN plans of those, by problem."""
    answers = planned_without_a_gpu(folder, PLAN, problems, **environment)
    return {str(problem): answer for problem, answer in zip(problems, answers, strict=True)}


@pytest.fixture(scope="module", params=some_each_run(LAYOUTS))
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A layout; what one process plans of it, and another of what is in fp32 where the environment turns TF32 off."""
    if importlib.util.find_spec("cudnn") is None:
        pytest.skip(NOT_HERE)
    layout, folder = request.param, tmp_path_factory.mktemp("planned")
    of_singles = singles(layout)
    return (
        layout,
        planned(folder, [*halves(layout), *of_singles]),
        planned(folder, of_singles, NVIDIA_TF32_OVERRIDE="0"),
    )


def test_cudnn_plans_halves_with_and_without_a_fused_bias(
    found: tuple[str, dict[str, Any], dict[str, Any]],
) -> None:
    layout, plans_of, _ = found
    for each in (plans_of[str(problem)] for problem in halves(layout)):
        assert len(each) == 8 and len({name for name, _ in each}) == 8


def test_without_tf32_cudnn_leaves_what_it_has_where_tf32_is_off(
    found: tuple[str, dict[str, Any], dict[str, Any]],
) -> None:
    layout, plans_of, without = found
    strict, allowed = (plans_of[str(problem)] for problem in singles(layout))
    assert strict and not {name for name, _ in strict} & {name for name, _ in allowed}
    off, forbidden = (without[str(problem)] for problem in singles(layout))
    assert off == strict and {name for name, _ in forbidden} >= {name for name, _ in strict}
