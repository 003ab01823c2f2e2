"""Calls of `cukiln.torch` through a real service, whose kernels compute on CPU tensors, beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cukiln  # noqa: E402
import cukiln.torch as ck  # noqa: E402
from cukiln.torch import dispatch  # noqa: E402
from tests.support.run.each_run import one_each_run, some_each_run  # noqa: E402
from tests.support.service.running_service import soon_running_service  # noqa: E402

Tensor = torch.Tensor


def mlp(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return ck.softmax(ck.matmul(x, w.t(), bias=bias, activation="relu"))


def own_mlp(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(torch.relu(x @ w.t() + bias), -1)


def block(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return ck.conv2d(x, w, bias, stride=2, padding=1, activation="relu")


def own_block(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(torch.nn.functional.conv2d(x, w, bias, 2, 1))


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "products, their gradients, softmax": (mlp, own_mlp, [(2, 6, 16), (24, 16), (24,)]),
    "a convolution and its gradients": (block, own_block, [(1, 8, 6, 5), (8, 8, 3, 3), (8,)]),
    "layer_norm": (
        lambda x, g, b: ck.layer_norm(x, (24,), g, b),
        lambda x, g, b: torch.nn.functional.layer_norm(x, (24,), g, b),
        [(6, 24), (24,), (24,)],
    ),
}


def heads(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.half(), k.half(), k.half()


X, MASK = torch.linspace(-2, 2, 192).view(8, 24), torch.arange(192).view(8, 24) % 3 == 0
Q, K = torch.linspace(-1, 1, 160).sin().view(1, 2, 5, 16), torch.linspace(-3, 3, 224).cos().view(1, 2, 7, 16)
# Those whose gradients are PyTorch's own, with what they give.
FORWARD: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
    "rms_norm": (lambda: ck.rms_norm(X, (24,)), torch.nn.functional.rms_norm(X, (24,))),
    "reduce": (lambda: ck.reduce(X, (0,), "sum"), X.sum(0)),
    "masked_activation": (
        lambda: ck.masked_activation(X, MASK, where_set="relu", where_clear="square"),
        torch.where(MASK, torch.relu(X), X.square()),
    ),
    "attention": (
        lambda: ck.attention(*heads(Q, K)),
        torch.nn.functional.scaled_dot_product_attention(*heads(Q, K)),
    ),
}


def operands(name: str) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape, requires_grad=True) for shape in CASES[name][2]]


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    made = function(*tensors)
    return [made, *torch.autograd.grad(made, tensors, torch.linspace(-1, 1, made.numel()).view(made.shape))]


def asked_for(calls: Callable[[], object]) -> list[dict[str, Any]]:
    """The problems of calls: PyTorch computes, and the problems are kept."""

    class Asked:
        def lookup(self, problems: list[Any], **options: Any) -> list[Any]:
            asked.extend(problems)
            return [cukiln.LookedUp(name=None, key="", record=None) for _ in problems]

    asked: list[dict[str, Any]] = []
    with ck.using(client=Asked(), target="cpu", wait_seconds=60):  # type: ignore[arg-type]
        calls()
    return asked


@pytest.fixture(scope="module")
def problems() -> list[dict[str, Any]]:
    """What all cases call, with their gradients, and a reduction."""

    def calls() -> None:
        for name, (function, _, _) in CASES.items():
            with_gradients(function, operands(name))
        FORWARD["reduce"][0]()

    return asked_for(calls)


@pytest.fixture(scope="module")
def client(
    problems: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[cukiln.Client]:
    """Of a service that has tuned them, with one candidate each."""
    folder = tmp_path_factory.mktemp("torch")
    with (
        soon_running_service(request, folder / "data") as url,
        cukiln.Client(url, cache_dir=folder / "cache") as client,
    ):
        job = client.tune(problems, target="cpu", search={"level": 0, "limit": 1}, timeout=900)  # type: ignore[arg-type]
        assert job.state == "done", [problem.error for problem in job.problems]
        yield client


def kernels() -> list[str]:
    table = dispatch.current().table
    return [entry.plan.problem["operator"] for entry in table.values() if entry.call is not None]


@pytest.mark.parametrize("compiled", some_each_run([False, True]))
@one_each_run("kernels in a framework", 1)
def test_kernels_give_what_pytorch_gives_and_so_do_their_gradients(
    compiled: bool, client: cukiln.Client, problems: list[dict[str, Any]]
) -> None:
    torch._dynamo.reset()
    with ck.using(client=client, target="cpu", wait_seconds=60):
        for name, (function, own, _) in CASES.items():
            call = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
            made, expected = with_gradients(call, operands(name)), with_gradients(own, operands(name))
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
        call, expected = FORWARD["reduce"]
        torch.testing.assert_close(call(), expected)
        assert sorted(kernels()) == sorted(problem["operator"] for problem in problems)
    assert set(kernels()) == set()  # of the settings before


# By kernels in NumPy the other operators are in `test_norms_and_reduce` and `test_masked_and_attention`.
@pytest.mark.long
def test_every_operator_gives_what_pytorch_gives(client: cukiln.Client) -> None:
    problems: Any = asked_for(lambda: [call() for call, _ in FORWARD.values()])
    assert client.tune(problems, target="cpu", search={"level": 0, "limit": 1}, timeout=240).state == "done"
    with ck.using(client=client, target="cpu", wait_seconds=60):
        for call, expected in FORWARD.values():
            torch.testing.assert_close(call(), expected)
        assert {*kernels()} == {*FORWARD}


@one_each_run("kernels in a framework", 1)
def test_a_workspace_of_a_kernel_is_pytorchs(client: cukiln.Client, tmp_path: Path) -> None:
    a, b = torch.randn(24, 512), torch.randn(512, 16)
    problem: Any = {"operator": "matmul", "m": 24, "n": 16, "k": 512, "layout": "nn", "dtype": "float32"}
    search = {"tunables": {"split": ["workspace"], "split_k": [3]}, "limit": 1}
    job = client.tune([problem], target="cpu", search=search, timeout=120)
    assert job.state == "done"
    with ck.using(client=client, target="cpu", wait_seconds=60):
        torch.testing.assert_close(ck.matmul(a, b), a @ b, rtol=1e-4, atol=1e-4)
        assert kernels() == ["matmul"]


@one_each_run("kernels in a framework", 1)
def test_gradcheck_of_the_kernels_gradients(client: cukiln.Client) -> None:
    """In float32, whose differences are coarse: a wrong gradient is off by more."""
    x, w, bias = operands("a convolution and its gradients")
    with ck.using(client=client, target="cpu", wait_seconds=60):
        assert torch.autograd.gradcheck(
            lambda w: block(x.detach(), w, bias.detach()).square().sum(), [w], eps=1e-2, atol=0.5, rtol=5e-2
        )
        assert "conv2d_wgrad" in kernels()


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_compiles_around_the_operators(dynamic: bool, client: cukiln.Client) -> None:
    torch._dynamo.reset()
    with ck.using(client=client, target="cpu", wait_seconds=60):
        for name, (function, own, _) in CASES.items():
            call = torch.compile(lambda *of, f=function: f(*of).exp(), fullgraph=True, dynamic=dynamic)
            made = with_gradients(call, operands(name))
            expected = with_gradients(lambda *of, f=own: f(*of).exp(), operands(name))
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
        assert "conv2d_dgrad" in kernels()
