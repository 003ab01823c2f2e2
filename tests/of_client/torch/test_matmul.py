"""`cukiln.torch.matmul`: the problem that follows from the tensors, the result, gradients, tracing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cukiln.torch as ck  # noqa: E402
from cukiln.errors import UsageError  # noqa: E402
from tests.support.kernels.reference_kernel import PlayedService  # noqa: E402
from tests.support.run.each_run import some_each_run  # noqa: E402

Tensor = torch.Tensor
R = torch.randn


# Operands, and what of the problem they are.
LAYOUTS: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], dict[str, Any]]] = {
    "packed": (lambda: (R(24, 16), R(16, 8)), {"m": 24, "n": 8, "k": 16, "layout": "nn"}),
    "b transposed": (lambda: (R(24, 16), R(8, 16).t()), {"layout": "nt"}),
    "a transposed": (lambda: (R(16, 24).t(), R(16, 8)), {"layout": "tn"}),
    "both transposed": (lambda: (R(16, 24).t(), R(8, 16).t()), {"layout": "tt"}),
    "columns of a wider matrix": (lambda: (R(24, 64)[:, 16:32], R(16, 8)), {"lda": 64}),
    "rows with gaps, transposed": (lambda: (R(24, 16), R(8, 32)[:, :16].t()), {"layout": "nt", "ldb": 32}),
    "every other row": (lambda: (R(48, 16)[::2], R(16, 8)), {"m": 24, "lda": 32}),
    "images and rows are rows": (lambda: (R(3, 8, 16), R(16, 8)), {"m": 24, "layout": "nn"}),
    "four axes": (lambda: (R(2, 3, 4, 16), R(8, 16).t()), {"m": 24, "layout": "nt"}),
    "a batch": (lambda: (R(3, 24, 16), R(3, 16, 8)), {"batch": 3, "m": 24}),
    "two axes of batch": (lambda: (R(2, 3, 24, 16), R(2, 3, 8, 16).mT), {"batch": 6, "layout": "nt"}),
    "one a for a batch": (lambda: (R(24, 16), R(3, 16, 8)), {"batch": 3, "stride_a": 0}),
    "an expanded b": (lambda: (R(3, 16, 24).mT, R(16, 8).expand(3, 16, 8)), {"batch": 3, "stride_b": 0}),
    "a batch with gaps": (lambda: (R(6, 24, 16)[::2], R(3, 16, 8)), {"batch": 3, "stride_a": 768}),
    "one row": (lambda: (R(1, 16), R(16, 8)), {"m": 1, "layout": "nn"}),
    "one column": (lambda: (R(24, 16), R(16, 1)), {"n": 1}),
    "a product of vectors": (lambda: (R(24, 1), R(1, 8)), {"k": 1}),
    "half precision": (lambda: (R(24, 16).half(), R(16, 8).half()), {"dtype": "float16"}),
    "bfloat16": (lambda: (R(24, 16).bfloat16(), R(16, 8).bfloat16()), {"dtype": "bfloat16"}),
    "modulo 2^64": (lambda: (torch.randint(-9, 9, (24, 16)), torch.randint(-9, 9, (16, 8))), {"dtype": "int64"}),
    "begins at 8 bytes, read by 8": (lambda: (R(24 * 6 + 2)[2:].view(24, 6), R(6, 8)), {"k": 6}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_problem_follows_from_how_the_operands_lie_in_memory(name: str, service: PlayedService) -> None:
    make, fields = LAYOUTS[name]
    a, b = make()
    made = ck.matmul(a, b)
    (problem,) = service.asked
    assert problem.items() >= {"operator": "matmul", **fields}.items()
    assert service.calls == 1
    expected = torch.matmul(a, b)
    assert made.shape == expected.shape and made.is_contiguous()
    torch.testing.assert_close(made, expected)


PYTORCHS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "no axis is contiguous": lambda: (R(48, 32)[::2, ::2], R(16, 8)),
    "heads between positions and columns": lambda: (R(2, 24, 3, 16).transpose(1, 2), R(2, 3, 16, 8)),
    "begins at 4 bytes": lambda: (R(24 * 16 + 1)[1:].view(24, 16), R(16, 8)),
    "rows that overlap": lambda: (R(64).as_strided((24, 16), (1, 1)), R(16, 8)),
    "empty": lambda: (R(0, 16), R(16, 8)),
    "a sum of nothing": lambda: (R(24, 0), R(0, 8)),
    "a vector": lambda: (R(16), R(16, 8)),
    "float64": lambda: (R(24, 16).double(), R(16, 8).double()),
    "sparse": lambda: (R(24, 16).relu().to_sparse(), R(16, 8)),
    "negated when it is read": lambda: (torch._neg_view(R(24, 16)), R(16, 8)),
}


@pytest.mark.parametrize("name", PYTORCHS)
def test_what_no_kernel_takes_is_pytorchs_own(name: str, service: PlayedService) -> None:
    a, b = PYTORCHS[name]()
    torch.testing.assert_close(ck.matmul(a, b), torch.matmul(a, b))
    assert not service.asked


@pytest.mark.parametrize("a, b", [((3, 4), (5, 6)), ((2, 3, 4), (3, 4, 5)), ((), (4, 5))])
def test_shapes_that_do_not_go_together_are_pytorchs_error(
    a: tuple[int, ...], b: tuple[int, ...], service: PlayedService
) -> None:
    with pytest.raises(RuntimeError) as expected:
        torch.matmul(R(a), R(b))
    with pytest.raises(RuntimeError) as raised:
        ck.matmul(R(a), R(b))
    assert str(raised.value) == str(expected.value)


def reference(
    a: Tensor, b: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str | None = None
) -> Tensor:
    z = a @ b
    z = z if bias is None else z + bias
    z = z if residual is None else z + residual
    functions = torch.nn.functional
    return z if activation is None else getattr(functions, activation)(z)


EPILOGUES = [
    ("bias", ["bias"]), ("residual", ["residual"]), ("bias residual relu", ["bias", "residual", "relu"]),
    ("bias gelu", ["bias", "gelu"]), ("silu", ["silu"]), ("residual tanh", ["residual", "tanh"]),
    ("sigmoid", ["sigmoid"]), ("leaky_relu", ["leaky_relu"]),
]  # fmt: skip


def operands(words: list[str], grad: bool = False, dtype: Any = None) -> tuple[list[Tensor], dict[str, Any]]:
    a, b = R(2, 12, 16, dtype=dtype), R(16, 8, dtype=dtype)
    named: dict[str, Any] = {}
    if "bias" in words:
        named["bias"] = R(8, dtype=dtype)
    if "residual" in words:
        named["residual"] = R(2, 12, 8, dtype=dtype)
    tensors = [a, b, *named.values()]
    for tensor in tensors:
        tensor.requires_grad_(grad)
    for word in set(words) - {"bias", "residual"}:
        named["activation"] = word
    return tensors, named


@pytest.mark.parametrize("name, ops", EPILOGUES)
def test_bias_residual_and_activation_are_of_the_same_kernel(name: str, ops: list[str], service: PlayedService) -> None:
    (a, b, *_), named = operands(name.split())
    torch.testing.assert_close(ck.matmul(a, b, **named), reference(a, b, **named), rtol=1e-5, atol=1e-5)
    (problem,) = service.asked
    assert [node["op"] for node in problem["epilogue"]] == ops
    assert service.calls == 1


NAMES = [name for name, _ in EPILOGUES]
WITH_ALL = "bias residual relu"
COMPILED = [(WITH_ALL, True), *some_each_run([(name, True) for name in NAMES if name != WITH_ALL], 2)]


@pytest.mark.parametrize(("name", "compiled"), [*product(NAMES, (False,)), *COMPILED])
def test_gradients_are_those_of_pytorch(name: str, compiled: bool, service: PlayedService) -> None:
    words = name.split()
    tensors, named = operands(words, grad=True)

    def call(a: Tensor, b: Tensor) -> Tensor:
        return ck.matmul(a, b, **named)

    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    a, b, *_ = tensors
    dy = R(2, 12, 8)
    made, expected = call(a, b), reference(a, b, **named)
    gradients = torch.autograd.grad(made, tensors, dy), torch.autograd.grad(expected, tensors, dy)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    products = [problem for problem in service.asked if problem["operator"] == "matmul"]
    assert [problem["layout"] for problem in products] == ["nn", "nt", "tn"]  # forward, and one for each operand
    assert service.calls == 3 + ("bias" in words)  # a bias has the sum along all rows


def test_gradients_of_one_matrix_for_a_batch_are_summed(service: PlayedService) -> None:
    a, b = R(24, 16, requires_grad=True), R(3, 16, 8, requires_grad=True)
    made = torch.autograd.grad(ck.matmul(a, b).square().sum(), [a, b])
    torch.testing.assert_close(made, torch.autograd.grad((a @ b).square().sum(), [a, b]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "tanh"])
def test_gradients_of_gradients_are_right(activation: Any, service: PlayedService) -> None:
    a, b, bias = (R(*shape, requires_grad=True) for shape in ((12, 16), (16, 8), (8,)))

    def twice(y: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(y.square().sum(), [a, b], create_graph=True)
        return torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), [a, b, bias])

    made = twice(ck.matmul(a, b, bias=bias, activation=activation))
    torch.testing.assert_close(made, twice(reference(a, b, bias, None, activation)), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", some_each_run([torch.float32, torch.float16]))
def test_the_operator_is_what_pytorch_asks_of_one(grad: bool, dtype: Any, service: PlayedService) -> None:
    (a, b, bias, residual), _ = operands(["bias", "residual"], grad, dtype)
    whole = (a, b, bias, residual, "relu"), (a, b, bias, None, "gelu")
    for arguments in ((a, b), (a, b.detach().t().contiguous().t()), *whole):
        torch.library.opcheck(torch.ops.cukiln.matmul.default, arguments)
    with pytest.raises(UsageError, match="activation is 'swish'; allowed: None, relu, gelu"):
        torch.ops.cukiln.matmul(a, b, None, None, "swish")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_calls_the_operator_without_a_graph_break(backend: str, service: PlayedService) -> None:
    graphs: list[Any] = []

    def model(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return ck.matmul(ck.matmul(x, w, bias=bias, activation="gelu") * 2, w.t())

    def look(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    x, w, bias = R(12, 16), R(16, 8), R(8)
    made = torch.compile(model, fullgraph=True, backend=look)(x, w, bias)
    torch.testing.assert_close(made, model(x, w, bias), rtol=1e-5, atol=1e-5)
    (graph,) = graphs
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.cukiln.matmul.default) == 2


def test_autocast_casts_as_it_does_for_torch_matmul(service: PlayedService) -> None:
    a, b, bias = R(12, 16), R(16, 8), R(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = ck.matmul(a, b, bias=bias)
    assert made.dtype is torch.bfloat16
    assert service.asked[0]["dtype"] == "bfloat16"


def test_transforms_of_functions_have_pytorchs_own(service: PlayedService) -> None:
    a, b = R(5, 12, 16), R(16, 8)
    torch.testing.assert_close(torch.vmap(ck.matmul, in_dims=(0, None))(a, b), a @ b)
    by_transform = torch.func.grad(lambda a: ck.matmul(a, b).square().sum())(a[0])
    torch.testing.assert_close(by_transform, torch.func.grad(lambda a: (a @ b).square().sum())(a[0]))
    assert not service.asked


def test_an_activation_that_is_not_there_is_refused_with_those_that_are(service: PlayedService) -> None:
    with pytest.raises(UsageError, match="'swish'; allowed: None, relu, gelu, silu, tanh, sigmoid, leaky_relu"):
        ck.matmul(R(2, 2), R(2, 2), activation="swish")  # type: ignore[arg-type]


def test_what_exports_and_traces_sees_the_operator(service: PlayedService) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return ck.matmul(x, w.t(), activation="gelu")

    x, w = R(12, 16), R(8, 16)
    graph = torch.export.export(Layer(), (x, w)).graph
    assert torch.ops.cukiln.matmul.default in [node.target for node in graph.nodes]
    traced = torch.fx.experimental.proxy_tensor.make_fx(Layer())(x, w)
    assert torch.ops.cukiln.matmul.default in [node.target for node in traced.graph.nodes]
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        torch.testing.assert_close(ck.matmul(x, w.t()), x @ w.t())
    with torch.inference_mode():
        torch.testing.assert_close(ck.matmul(x, torch.nn.Parameter(w).t()), x @ w.t())
    assert service.calls == 3  # make_fx computes, too
