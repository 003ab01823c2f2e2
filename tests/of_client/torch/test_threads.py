"""Blocks, configurations and searches of several threads: what ends last decides, and nothing is left unanswered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")

import cukiln.torch as ck  # noqa: E402
from cukiln.client import Client  # noqa: E402
from cukiln.http.breaker import Breaker  # noqa: E402
from cukiln.torch import dispatch  # noqa: E402
from tests.support.fixtures.client import MATMUL, ScriptedService, hits  # noqa: E402
from tests.support.fixtures.queue import wait_for  # noqa: E402
from tests.support.kernels.reference_kernel import PlayedService, ReferenceKernel  # noqa: E402

Played = Callable[..., PlayedService]
A, B = torch.randn(24, 16), torch.randn(16, 8)
BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "using": lambda: ck.using(target="sm_90a"),
    "counted": ck.counted,
    "record": ck.record,
}


def right() -> bool:
    torch.testing.assert_close(ck.matmul(A, B), A @ B)
    return True


@pytest.fixture(autouse=True)
def _default() -> Iterator[None]:
    yield
    ck.configure()


@pytest.mark.parametrize("second", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("first", BLOCKS.values(), ids=BLOCKS)
def test_blocks_that_end_in_any_order_leave_what_was_there_before(first: Any, second: Any, played: Played) -> None:
    service = played()
    before = dispatch.current()
    one, other = ExitStack(), ExitStack()  # as two threads enter and leave them
    one.enter_context(first())
    other.enter_context(second())
    one.close()
    assert dispatch.current() is not before
    other.close()
    assert dispatch.current() is before
    assert right() and service.calls == 1


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_configuration_stays_when_a_block_that_began_before_it_ends(block: Any) -> None:
    with block():
        ck.configure(enabled=False)
        configured = dispatch.current()
    assert dispatch.current() is configured and not configured.options.enabled


def finders() -> set[threading.Thread]:
    """The threads that find kernels now."""
    return {thread for thread in threading.enumerate() if thread.name == "cukiln-torch"}


def test_what_is_asked_of_a_closed_configuration_is_answered(played: Played) -> None:
    before, service = finders(), played()
    closed = dispatch.current()
    assert right() and ck.settle(30)
    assert finders() > before
    closed.close()
    wait_for(lambda: finders() == before)
    torch.testing.assert_close(ck.matmul(A, B.repeat(1, 2)), A @ B.repeat(1, 2))  # a call that was under way
    assert ck.settle(30) and service.calls == 2
    wait_for(lambda: finders() == before)  # no thread is left behind


def test_what_is_asked_while_it_is_closed_is_answered(played: Played) -> None:
    go = threading.Event()

    class Slow(PlayedService):
        def load(self, entry: Any, client: Any) -> ReferenceKernel:
            go.wait(60)
            return super().load(entry, client)

    played(Slow(), wait_seconds=0)
    finder = dispatch.current().finder
    assert right()
    finder.close()
    ck.matmul(A, B.repeat(1, 2))  # behind what ends the thread
    go.set()
    assert ck.settle(30)


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_a_call_is_pytorchs_own_and_asked_again_later(
    played: Played, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = played(retry_seconds=0)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_thread)
        assert right() and right() and ck.settle(0)
        assert service.calls == 0
    assert "can't start new thread; PyTorch's own operator runs" in caplog.text
    right()
    assert ck.settle(30) and right() and service.calls >= 1


def test_without_a_thread_a_lookup_is_a_miss_and_a_stale_winner_is_answered(
    scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.on("POST", "/v1/lookups", hits(), hits(2))
    with Client(scripted.url, fresh_seconds=0) as client:
        with monkeypatch.context() as full, patch.object(Breaker, "failed", autospec=True) as failed:
            full.setattr(threading.Thread, "start", no_thread)
            assert "can't start new thread" in str(client.lookup([MATMUL])[0].unanswered)
            failed.assert_called_once()
        assert client.lookup([MATMUL])[0].record is not None
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", no_thread)
            assert client.lookup([MATMUL])[0].record is not None
        wait_for(lambda: client.lookup([MATMUL])[0].record.revision == 2)  # type: ignore[union-attr]


def test_an_address_that_cannot_be_one_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUKILN_URL", "http://a..b")
    with caplog.at_level(logging.WARNING), ck.using(target="cpu", wait_seconds=30.0, retry_seconds=0):
        assert right() and right() and ck.settle(30)
    (said,) = caplog.records
    assert "a part that is empty" in said.message and said.exc_info is None


def test_a_child_of_a_fork_leaves_its_block_as_it_entered_it(played: Played) -> None:
    import os

    service = played()
    before = dispatch.current()
    with ck.using(enabled=False):
        if (child := os.fork()) == 0:
            code = 1
            try:
                with ck.counted() as calls:
                    right()
                assert (calls.kernels, calls.own) == (0, 1)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert dispatch.current() is before and service.calls == 0
