"""Which kernel a call of `cukiln.torch` runs: misses, services that are gone, vendors that won, threads, errors."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cukiln.torch as ck  # noqa: E402
from cukiln.client import Client  # noqa: E402
from cukiln.errors import BadRequest, DeviceError, NotLoadable, ServiceUnreachable, UsageError  # noqa: E402
from cukiln.torch import dispatch, find_kernels  # noqa: E402
from cukiln.torch.find_kernels import device_target  # noqa: E402
from tests.support.fixtures.client import closed_port, silent_server  # noqa: E402
from tests.support.fixtures.queue import wait_for  # noqa: E402
from tests.support.kernels.reference_kernel import PlayedService, ReferenceKernel  # noqa: E402

Played = Callable[..., PlayedService]
A, B = torch.randn(24, 16), torch.randn(16, 8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Time of misses; `clock.now` is set."""
    clock = SimpleNamespace(now=1000.0)
    for module in (dispatch, find_kernels):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def right(made: Any) -> bool:
    torch.testing.assert_close(made, A @ B)
    return True


def until_replaced(before: Any) -> None:
    """Wait until the only entry's call is another one: that happens behind the caller's back."""
    (entry,) = entries()
    wait_for(lambda: entry.call is not before)


def entries() -> list[Any]:
    return list(dispatch.current().table.values())


def test_a_problem_is_looked_up_once_and_its_kernel_runs_from_then_on(played: Played) -> None:
    service = played(on_miss="tune", deterministic=True, workspace_limit_bytes=1024)
    for _ in range(3):
        assert right(ck.matmul(A, B))
    assert right(ck.matmul(A.clone(), B))
    assert len(service.asked) == 1 and service.calls == 4
    assert service.asked[0]["target"] == "cpu"
    assert service.options == {"on_miss": "tune", "deterministic": True, "workspace_limit_bytes": 1024}


@pytest.mark.parametrize("first", ["aligned", "beside"])
def test_the_same_tensor_at_an_address_that_no_kernel_takes_is_another_call(first: str, played: Played) -> None:
    service = played()
    memory = torch.randn(8 * 16 + 1)
    at = {"aligned": memory[:-1].view(8, 16), "beside": memory[1:].view(8, 16)}
    assert (at["aligned"].data_ptr() % 16, at["beside"].data_ptr() % 16) == (0, 4)
    for name in sorted(at, key=lambda name: name != first):
        torch.testing.assert_close(ck.softmax(at[name]), torch.softmax(at[name], -1))
    assert service.calls == 1


def test_a_miss_is_asked_for_again_behind_the_callers_back(played: Played, clock: Any) -> None:
    missing = True
    service = played(PlayedService(lacks=lambda problem: missing), retry_seconds=20.0)
    assert right(ck.matmul(A, B)) and right(ck.matmul(A, B))
    assert len(service.asked) == 1 and service.calls == 0
    missing = False
    clock.now += 19
    assert right(ck.matmul(A, B)) and len(service.asked) == 1
    clock.now += 2
    assert right(ck.matmul(A, B))  # PyTorch's own, or the kernel if it is there already
    until_replaced(None)
    before = service.calls
    assert right(ck.matmul(A, B)) and service.calls == before + 1


def test_kernels_of_a_neighbour_serve_until_the_problems_own_are_tuned(played: Played, clock: Any) -> None:
    nearest = True
    neighbour = {"key": "k", "revision": 1, "device_class": "predicted:cpu", "problem": {}, "distance": 1.0}

    def change(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "tuned_for": neighbour if nearest else None}

    service = played(PlayedService(change=change), on_miss="nearest", retry_seconds=20.0)
    assert right(ck.matmul(A, B)) and service.calls == 1 and service.options["on_miss"] == "nearest"
    nearest = False
    clock.now += 21
    neighbours = entries()[0].call
    assert right(ck.matmul(A, B))  # the neighbour's, or its own if it is there already
    until_replaced(neighbours)
    clock.now += 1000
    before = service.kernels[0].calls
    assert right(ck.matmul(A, B)) and len(service.asked) == 2 and len(service.kernels) == 2
    assert service.kernels[0].calls == before and service.kernels[1].calls > 0


@pytest.mark.parametrize("ours, kernels", [(10.0, 0), (4.0, 1), (None, 1)])
def test_where_the_vendor_was_faster_pytorchs_own_runs(ours: float | None, kernels: int, played: Played) -> None:
    vendor = {
        "library": "cuBLASLt", "version": "13", "algorithm": "1", "fused": True, "workspace_bytes": 0,
        "median_us": 5.0, "low_us": 4.9, "high_us": 5.1,
    }  # fmt: skip

    def change(record: dict[str, Any]) -> dict[str, Any]:
        record["front"][0]["measured_us"] = ours
        return {**record, "vendor": vendor}

    service = played(PlayedService(change=change))
    assert right(ck.matmul(A, B)) and right(ck.matmul(A, B))
    assert len(service.kernels) == kernels and len(service.asked) == 1


def test_tensors_of_a_cpu_are_pytorchs_own_where_cpu_is_not_the_target(played: Played) -> None:
    service = played(target=None)
    assert right(ck.matmul(A, B)) and not service.asked
    service = played(target="sm_90a")
    assert right(ck.matmul(A, B)) and not service.asked


def test_nothing_is_looked_up_where_cukiln_is_off(played: Played) -> None:
    service = played()
    with ck.using(client=service, target="cpu", enabled=False):  # type: ignore[arg-type]
        assert right(ck.matmul(A, B))
    assert not service.asked
    assert right(ck.matmul(A, B)) and service.calls == 1


def test_settings_are_checked_and_said() -> None:
    with pytest.raises(UsageError, match="on_miss is 'later'; allowed: none, tune, nearest"):
        ck.configure(on_miss="later")  # type: ignore[typeddict-item]
    with pytest.raises(UsageError, match="client and url are given"):
        ck.configure(client=Client(), url="http://here")
    for seconds in (-1, float("nan"), float("inf"), 1e12):
        with pytest.raises(UsageError, match=r"wait_seconds is .*; expected seconds from 0 to \d+"):
            ck.configure(wait_seconds=seconds)
        with pytest.raises(UsageError, match=r"seconds is .*; expected seconds from 0 to \d+"):
            ck.settle(seconds)
    for seconds in (-1, float("nan")):
        with pytest.raises(UsageError, match=r"retry_seconds is .*; expected seconds from 0 on"):
            ck.configure(retry_seconds=seconds)


def test_a_service_that_hangs_costs_one_wait_and_a_dead_one_none(tmp_path: Any) -> None:
    own = {"target": "cpu", "wait_seconds": 0.2}
    waits: list[float] = []

    def timed(url: str) -> None:
        waits.clear()
        with Client(url, cache_dir=tmp_path) as client, ck.using(client=client, **own):  # type: ignore[arg-type]
            for n in range(8, 20):
                began = time.monotonic()
                torch.testing.assert_close(ck.matmul(A, torch.ones(16, n)), A @ torch.ones(16, n))
                waits.append(time.monotonic() - began)
            assert all(entry.call is None for entry in entries())

    with silent_server() as (url, _):
        timed(url)
        assert sum(wait >= 0.2 for wait in waits) == 1
    timed(closed_port())


def test_a_dead_service_is_dead_for_every_configuration_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_server() as (url, accepted):
        for _ in range(6):
            with ck.using(url=url, target="cpu", wait_seconds=30.0):
                assert right(ck.matmul(A, B))
        assert len(accepted) == 3


def test_a_problem_that_the_service_refuses_is_said_once_and_does_not_harm_others(
    played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(PlayedService):
        def lookup(self, problems: Any, on_miss: str = "none", **options: Any) -> Any:
            if any(problem["n"] == 7 for problem in problems):
                raise BadRequest("n must not be 7", status=422)
            return super().lookup(problems, on_miss, **options)

    service = played(Refusing())
    with caplog.at_level(logging.WARNING):
        for columns in (7, 8, 7):
            odd = torch.randn(16, columns)
            torch.testing.assert_close(ck.matmul(A, odd), A @ odd)
    assert service.calls == 1
    (record,) = caplog.records
    assert "n must not be 7; PyTorch's own operator runs" in record.message and "n 7" in record.message


def test_a_library_that_does_not_load_is_said_and_pytorchs_own_runs(
    played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(PlayedService):
        def load(self, entry: Any, client: Any) -> ReferenceKernel:
            raise NotLoadable("it is no library")

    played(Broken())
    assert right(ck.matmul(A, B))
    assert "it is no library" in caplog.text


def test_a_library_that_does_not_come_has_further_calls_wait_no_more(played: Played) -> None:
    class Hung(PlayedService):
        def load(self, entry: Any, client: Any) -> ReferenceKernel:
            raise ServiceUnreachable("no answer within 1 s")

    played(Hung())
    assert right(ck.matmul(A, B))
    assert dispatch.current().finder.failed_until > time.monotonic()


def test_an_error_of_the_kernel_is_raised_and_nothing_else_runs_in_its_place(played: Played) -> None:
    class Failing(ReferenceKernel):
        def _run(self, *given: Any) -> None:
            raise RuntimeError("CUDA error 700: an illegal address\nTraceback …")

    class Service(PlayedService):
        def load(self, entry: Any, client: Any) -> ReferenceKernel:
            kernel = super().load(entry, client)
            kernel.__class__ = Failing
            return kernel

    played(Service())
    with pytest.raises(DeviceError, match="kernel of matmul could not run: CUDA error 700: an illegal address"):
        ck.matmul(A, B)


def test_a_workspace_is_pytorchs_memory_and_of_the_call(played: Played) -> None:
    service = played(PlayedService(workspace=4000))
    assert right(ck.matmul(A, B)) and right(ck.matmul(A, B)) and service.calls == 2


def test_threads_ask_for_a_problem_once(played: Played) -> None:
    started = threading.Barrier(8)
    service = played()
    made: list[Any] = []

    def call() -> None:
        started.wait()
        made.append(ck.matmul(A, B))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and all(map(right, made))
    assert len(service.asked) == 1 and service.calls == 8


def test_a_call_that_does_not_wait_is_pytorchs_own_until_the_kernel_is_there(played: Played) -> None:
    go = threading.Event()

    class Slow(PlayedService):
        def load(self, entry: Any, client: Any) -> ReferenceKernel:
            go.wait(60)
            return super().load(entry, client)

    service = played(Slow(), wait_seconds=0)
    assert right(ck.matmul(A, B)) and service.calls == 0
    assert not ck.settle(0.01)
    go.set()
    assert ck.settle(60)
    assert right(ck.matmul(A, B)) and service.calls == 1


def test_settling_waits_for_what_is_asked_again_too(played: Played, clock: Any) -> None:
    go, missing = threading.Event(), True

    class Slow(PlayedService):
        def load(self, entry: Any, client: Any) -> ReferenceKernel:
            go.wait(60)
            return super().load(entry, client)

    service = played(Slow(lacks=lambda problem: missing), retry_seconds=20.0)
    assert right(ck.matmul(A, B)) and ck.settle(60)
    missing = False
    clock.now += 21
    assert right(ck.matmul(A, B)) and service.calls == 0
    assert not ck.settle(0.01)  # a graph that is captured now would meet the load
    go.set()
    assert ck.settle(60)
    assert right(ck.matmul(A, B)) and service.calls == 1


def test_an_unexpected_error_of_one_search_leaves_the_others_their_kernels(
    played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(PlayedService):
        def load(self, entry: Any, client: Any) -> ReferenceKernel:
            kernel = super().load(entry, client)
            if kernel.problem.model_dump()["n"] == 7:
                raise RuntimeError("it is no fault of the service")
            return kernel

    service = played(Failing())
    odd = torch.randn(16, 7)
    torch.testing.assert_close(ck.matmul(A, odd), A @ odd)
    assert right(ck.matmul(A, B)) and service.calls == 1 and ck.settle(0)
    assert "it is no fault of the service" in caplog.text and "n 7" in caplog.text


def test_a_child_of_a_fork_finds_kernels_itself(played: Played) -> None:
    service = played()
    assert right(ck.matmul(A, B))
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            right(ck.matmul(A, torch.cat([B, B])[:16]))
            os.write(writer, f"{service.calls} {len(service.asked)}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"2 2"  # with those of before the fork
    os.close(reader), os.close(writer)


def test_the_target_is_that_of_the_tensors_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {torch.device("cuda", 0): (8, 0), torch.device("cuda", 1): (12, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert [device_target(device) for device in capabilities] == ["sm_80", "sm_120a"]
