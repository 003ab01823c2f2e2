"""`cukiln.jax` beside XLA: kernels of target `cpu` under `jit`, `vmap` and `grad`; what has no kernel is XLA's."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cukiln
from tests.support.run.each_run import one_each_run, some_each_run
from tests.support.service.running_service import soon_running_service

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_tvm_ffi") is None, reason="jax and jax-tvm-ffi are not installed"
)
NAMES = (
    "dense",
    "its gradients",
    "a batch",
    "a matrix for all",
    "gradients of a matrix for all",
    "transposed",
    "gradients of transposed",
    "mapped rows",
    "mapped matrices",
    "mapped, one side",
    "mapped twice",
    "mapped biases",
    "mapped gradients",
    "convolution",
    "gradients of a convolution",
    "mapped images",
    "channels first, in groups",
    "softmax",
    "its gradient",
    "layer_norm",
    "gradients of layer_norm",
    "rms_norm",
    "reduce",
    "mapped reduce",
    "masked_activation",
    "gradient of masked_activation",
    "gradient of a mean",
    "bfloat16",
    "attention",
    "gradients of attention",
)
ALWAYS = ("its gradients", "softmax")
# Each operator and each way to map and to differentiate, of which each run has some; the others take the same ways to
# other kernels.
SHORT = (
    "dense",
    "gradients of transposed",
    "mapped twice",
    "mapped gradients",
    "gradients of a convolution",
    "mapped images",
    "its gradient",
    "gradients of layer_norm",
    "rms_norm",
    "mapped reduce",
    "gradient of masked_activation",
    "attention",
)
LONG = [pytest.param(name, marks=pytest.mark.long) for name in NAMES if name not in ALWAYS + SHORT]
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # read where JAX starts, for shard_map
LEAST = {"level": 0, "limit": 1}
SPLIT = {"schedules": [{"tile_m": 32, "tile_n": 32, "tile_k": 8, "split": "workspace", "split_k": 2}]}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[cukiln.Client]:
    """All problems of the cases that run are tuned for the CPU in one job; another has one for sm_80."""
    import jax

    import cukiln.jax as cj
    from tests.of_client.jax.cases import CASES

    data = tmp_path_factory.mktemp("jax")
    with cj.record(data / "request.json") as problems:
        for name in {"softmax", *(name for name in NAMES if asked(name, request))}:
            function, arrays = CASES[name]
            jax.jit(function).lower(*arrays)
    assert json.loads((data / "request.json").read_text()) == {"problems": problems}
    with soon_running_service(request, data) as url, cukiln.Client(url, cache_dir=data / "client") as client:
        problems += [{"operator": "softmax", "shape": [3, 8], "dtype": "float32", "target": "sm_80"}]
        job = client.tune(problems, target="cpu", search=LEAST, timeout=900)
        assert [problem.error for problem in job.problems if problem.state != "done"] == []
        yield client


def asked(name: str, request: pytest.FixtureRequest) -> bool:
    """Whether this case is one of the run."""
    return any(item.path == request.path and item.name.endswith(f"[{name}]") for item in request.session.items)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that traces took."""
    from cukiln.jax import kernels, operation

    taken: list[Any] = []

    def noted(tuned: Any, *arguments: Any) -> Any:
        taken.append(tuned)
        return kernels.call(tuned, *arguments)

    monkeypatch.setattr(operation, "call", noted)
    return taken


def test_every_case_is_named() -> None:
    from tests.of_client.jax.cases import CASES

    assert tuple(CASES) == NAMES


@pytest.mark.parametrize("name", [*ALWAYS, *some_each_run(SHORT, 3), *LONG])
@one_each_run("kernels in a framework", 0)
def test_kernels_compute_what_xla_does(name: str, client: cukiln.Client, called: list[Any]) -> None:
    import jax

    import cukiln.jax as cj
    from tests.of_client.jax.cases import CASES

    function, arrays = CASES[name]
    with cj.record():
        by_xla = jax.jit(function)(*arrays)
    assert called == []
    cj.configure(client, target="cpu")
    by_kernels = jax.jit(function)(*arrays)
    assert called, "no kernel was found"
    for ours, theirs in zip(jax.tree.leaves(by_kernels), jax.tree.leaves(by_xla), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        loose = 2e-5 if ours.dtype == np.float32 else 2e-2
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=loose, atol=loose)


@one_each_run("kernels in a framework", 0)
def test_a_workspace_comes_from_xla(client: cukiln.Client, called: list[Any]) -> None:
    import jax

    import cukiln.jax as cj

    problem: cukiln.Problem = {"operator": "matmul", "m": 32, "n": 32, "k": 64}
    job = client.tune([{**problem, "search": SPLIT}], target="cpu", timeout=240)
    assert job.problems[0].state == "done", job.problems[0]
    cj.configure(client, target="cpu")
    a, b = np.random.default_rng(3).standard_normal((2, 32, 64), np.float32)
    np.testing.assert_allclose(jax.jit(cj.matmul)(a, b.T), a @ b.T, rtol=1e-5, atol=1e-5)
    assert called[0].entry.launch.workspace_bytes > 0


def test_a_program_for_another_platform_than_the_kernel_has_xlas_way(client: cukiln.Client, called: list[Any]) -> None:
    import jax

    import cukiln.jax as cj

    cj.configure(client, target="sm_80")
    x = np.random.default_rng(3).standard_normal((3, 8), np.float32)
    np.testing.assert_allclose(jax.jit(cj.softmax)(x), jax.nn.softmax(x), rtol=1e-6)
    assert [tuned.platform for tuned in called] == ["cuda"]


def test_without_a_service_or_a_target_xla_computes(tmp_path: Path, called: list[Any]) -> None:
    import jax

    import cukiln.jax as cj

    x = np.random.default_rng(3).standard_normal((3, 9), np.float32)
    for client, target in (
        (cukiln.Client("http://127.0.0.1:9", cache_dir=tmp_path), "cpu"),
        (cukiln.Client("http://127.0.0.1:9", cache_dir=tmp_path), None),
    ):
        cj.configure(client, target=target)
        np.testing.assert_allclose(jax.jit(cj.softmax)(x), jax.nn.softmax(x), rtol=1e-6)
    assert called == []


def test_what_the_service_refuses_is_xlas_with_a_warning(client: cukiln.Client) -> None:
    import jax

    import cukiln.jax as cj

    cj.configure(client, target="cpu")
    q = jax.numpy.ones((1, 2, 1, 2), "float16")  # heads of fewer than 4 elements
    with pytest.warns(UserWarning, match="XLA computes a call of attention: .*head_dim_qk"):
        out = cj.attention(q, q, q)
    np.testing.assert_array_equal(np.float32(out), 1.0)


def test_a_kernel_that_cannot_be_loaded_is_xlas_with_a_warning(
    client: cukiln.Client, called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax

    import cukiln.jax as cj
    from cukiln.jax import kernels
    from tests.of_client.jax.cases import CASES

    def broken(*_: Any, **__: Any) -> Any:
        raise cukiln.NotLoadable("it is no library")

    function, arrays = CASES["softmax"]
    monkeypatch.setattr(kernels, "load", broken)
    cj.configure(client, target="cpu")
    with pytest.warns(UserWarning, match="XLA computes a call of softmax: it is no library"):
        np.testing.assert_allclose(jax.jit(function)(*arrays), jax.nn.softmax(*arrays), rtol=1e-6)
    assert called == []


def test_a_kernel_is_called_inside_of_shard_map(client: cukiln.Client, called: list[Any]) -> None:
    import jax
    from jax.sharding import Mesh, PartitionSpec

    import cukiln.jax as cj
    from tests.of_client.jax.cases import CASES

    function, (x,) = CASES["softmax"]
    cj.configure(client, target="cpu")
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    x = np.concatenate([x, x])
    sharded = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec("rows"), out_specs=PartitionSpec("rows"))
    np.testing.assert_allclose(sharded(x), jax.nn.softmax(x), rtol=1e-5)
    assert len(called) > 0


def test_integers_are_reduced_as_xla_reduces_them() -> None:
    import jax.numpy as jnp

    import cukiln.jax as cj

    x = jnp.array([[2**24 + 1, 2]])
    for fn, own in (("sum", jnp.sum), ("max", jnp.max), ("mean", jnp.mean)):
        made = cj.reduce(x, np.int64(1), fn)  # type: ignore[arg-type]
        assert (made.dtype, made.tolist()) == (own(x, 1).dtype, own(x, 1).tolist())
    assert cj.reduce(jnp.array([[True, True]]), 1).tolist() == [2]


def test_numbers_of_numpy_and_not_a_number_are_numbers(client: cukiln.Client) -> None:
    import jax
    import jax.numpy as jnp

    import cukiln.jax as cj

    cj.configure(client, target="cpu")
    x = jnp.ones((2, 8))
    for epsilon in (np.float32(0.5), jnp.float32(0.5)):
        np.testing.assert_allclose(cj.rms_norm(x, epsilon=epsilon), 1.5**-0.5, rtol=1e-6)
    assert np.isnan(cj.rms_norm(x, epsilon=float("nan"))).all()
    with pytest.raises(cukiln.UsageError, match="epsilon is traced"):
        jax.jit(lambda epsilon: cj.rms_norm(x, epsilon=epsilon))(0.5)


@pytest.mark.parametrize("shapes", [((2, 3, 0), (0, 4)), ((2, 3, 4), (4, 0)), ((0, 3, 4), (4, 5))], ids=str)
def test_gradients_of_empty_products_are_empty_or_zero(shapes: Any) -> None:
    import jax
    import jax.numpy as jnp

    import cukiln.jax as cj

    gradients = jax.grad(lambda a, b: cj.matmul(a, b).sum(), argnums=(0, 1))(*map(jnp.ones, shapes))
    assert [gradient.shape for gradient in gradients] == list(shapes)
    assert all(not gradient.any() for gradient in gradients)


def test_no_images_are_mapped_to_none() -> None:
    import jax
    import jax.numpy as jnp

    import cukiln.jax as cj

    made = jax.vmap(lambda x: cj.conv2d(x, jnp.ones((4, 3, 3, 2))))(jnp.ones((0, 2, 8, 8, 2)))
    assert made.shape == (0, 2, 6, 6, 4)


def test_a_query_that_sees_no_key_gives_zeros() -> None:
    import jax

    import cukiln.jax as cj

    q, k = jax.numpy.ones((1, 3, 1, 8), "float32"), jax.numpy.ones((1, 1, 1, 8), "float32")
    np.testing.assert_array_equal(cj.attention(q, k, k, causal=True)[0, :, 0, 0], [0, 0, 1])


@one_each_run("kernels in a framework", 1)
def test_a_miss_is_queued_where_that_is_asked_for(client: cukiln.Client, called: list[Any]) -> None:
    import jax

    import cukiln.jax as cj

    cj.configure(client, target="cpu", on_miss="tune")
    x = np.ones((2, 20), np.float32)
    jax.jit(cj.softmax)(x)
    assert called == []
    (job,) = [job for job in client.jobs() if job.state != "done"] or [next(iter(client.jobs()))]
    assert client.wait(job.job, timeout=240).state == "done"
    jax.clear_caches()
    jax.jit(cj.softmax)(x)
    assert len(called) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cj: cj.matmul(np.ones((2, 3)), np.ones((2, 3))), "cannot be multiplied with layout 'nn'"),
        (lambda cj: cj.matmul(np.ones(3), np.ones((3, 3))), "at least two axes"),
        (lambda cj: cj.matmul(np.ones((2, 3)), np.ones((3, 2)), layout="xy"), "allowed: 'nn', 'nt', 'tn', 'tt'"),
        (lambda cj: cj.matmul(np.ones((2, 3)), np.ones((3, 2)), activation="rely"), "'relu', 'gelu'"),
        (lambda cj: cj.matmul(np.ones((2, 3)), np.ones((3, 2)), bias=np.ones(3)), r"expected \(2,\)"),
        (lambda cj: cj.conv2d(np.ones((1, 4, 4, 3)), np.ones((8, 3, 3, 4))), "do not fit together"),
        (lambda cj: cj.conv2d(np.ones((1, 4, 4)), np.ones((8, 3, 3, 4))), "four axes"),
        (lambda cj: cj.softmax(np.ones(3, int)), "softmax takes floats, and an array is int"),
        (lambda cj: cj.matmul(*np.ones((2, 3, 3), int), activation="relu"), "an activation takes floats"),
        (lambda cj: cj.configure(on_miss="later"), "allowed: 'none', 'tune', 'nearest'"),
        (lambda cj: cj.reduce(np.ones(3), 1), "at least one of -1 to 0"),
        (lambda cj: cj.reduce(np.ones(3), 0, "median"), "'sum', 'mean'"),
        (lambda cj: cj.masked_activation(np.ones(3), np.ones(3)), "expected bools"),
        (lambda cj: cj.masked_activation(np.ones(3), np.ones(3, bool), where_set="cube"), "no function of a mask"),
        (lambda cj: cj.attention(*np.ones((3, 1, 2, 3))), "expected \\(batch, positions"),
        (lambda cj: cj.softmax(np.float32(3)), "softmax is along the last axis, and x has none"),
        (lambda cj: cj.layer_norm(np.float32(3)), "layer_norm is along the last axis, and x has none"),
        (lambda cj: cj.rms_norm(np.float32(3), np.ones(3)), "rms_norm is along the last axis, and x has none"),
        (lambda cj: cj.reduce(np.float32(3), 0), "axes are \\(0,\\), and x has none"),
    ],
)
def test_a_wrong_call_says_what_is_allowed(call: Any, message: str) -> None:
    import cukiln.jax as cj

    with pytest.raises(cukiln.UsageError, match=message):
        call(cj)
