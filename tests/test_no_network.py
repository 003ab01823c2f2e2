"""What nobody has judged yet runs without a network, in both ways of fencing a process tree in."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cpu_helpers import FAULTY, faulty_kernel, loaded, toolchain
from workers import processes as module
from workers.processes import Limits, Processes
from workers.verify_cpu import verify_on_cpu

LIMITS = Limits(wall_seconds=60, cpu_seconds=60, memory_bytes=2 << 30, output_bytes=16 << 20)
NAMESPACES = module._namespace_prefix() is not None


@pytest.fixture(params=["namespace", "sweep"])
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Processes]:
    if request.param == "namespace" and not NAMESPACES:
        pytest.skip("PID namespaces are not allowed here")
    made = Processes(isolation=request.param, root=tmp_path)
    yield made
    made.close()


class Listener:
    """Listens on the loopback of this test and counts who comes."""

    def __init__(self) -> None:
        self.visitors = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = self._socket.accept()
                self.visitors += 1
                visitor.close()

    def close(self) -> None:
        # A connection of our own is the last one that is accepted: everybody who came before it has been counted.
        with socket.create_connection(("127.0.0.1", self.port)) as last:
            last.recv(1)
        self.visitors -= 1
        self._socket.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    with contextlib.suppress(OSError):
        made.close()


def connect(port: int) -> list[str]:
    return [sys.executable, "-c", f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"]


def test_a_program_with_a_network_reaches_the_listener(
    processes: Processes, tmp_path: Path, listener: Listener
) -> None:
    assert processes.run(connect(listener.port), cwd=tmp_path, limits=LIMITS).ok
    listener.close()
    assert listener.visitors == 1


def test_a_program_without_a_network_reaches_nobody_not_even_the_loopback(
    processes: Processes, tmp_path: Path, listener: Listener
) -> None:
    if not processes.network_isolation:
        pytest.skip("network namespaces are not allowed here")
    finished = processes.run(connect(listener.port), cwd=tmp_path, limits=LIMITS, network=False)
    assert "Network is unreachable" in finished.text()
    listener.close()
    assert listener.visitors == 0


def test_a_program_without_a_network_has_the_same_user_and_its_limits(processes: Processes, tmp_path: Path) -> None:
    script = "id -u; ulimit -c; exec sleep 0"
    with_it, without = (
        processes.run(["sh", "-c", script], cwd=tmp_path, limits=LIMITS, network=network) for network in (True, False)
    )
    assert with_it.stdout == without.stdout and without.ok


def test_a_machine_without_network_namespaces_runs_the_program_all_the_same_and_says_so(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._namespace_prefix
    monkeypatch.setattr(module, "_namespace_prefix", lambda network=True: real() if network else None)
    if processes.isolation == "sweep":
        # The sub-reaper is a program of its own: whoever has no right to the network namespace gets none.
        command = Processes._command
        monkeypatch.setattr(
            Processes, "_command", lambda self, argv, limits, network: command(self, argv, limits, True)
        )
    assert processes.run(["echo", "words"], cwd=tmp_path, limits=LIMITS, network=False).stdout == b"words\n"
    assert processes.network_isolation is False


def test_kernels_on_the_cpu_run_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Watched(Processes):
        def _command(self, argv, limits, network):  # type: ignore[no-untyped-def]
            seen.append(("run_on_cpu" in " ".join(argv), network))
            return super()._command(argv, limits, network)

    runner = Watched(root=tmp_path)
    with loaded([FAULTY]):
        (verdict,) = verify_on_cpu([faulty_kernel(0)], toolchain(), runner, LIMITS, seed=1)
    runner.close()
    assert verdict.verdict == "ok"
    assert (True, False) in seen and (True, True) not in seen
