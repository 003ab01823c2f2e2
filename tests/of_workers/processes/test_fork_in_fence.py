"""A child that is forked from a process that is kept warm is fenced in as a new interpreter is, and shares nothing."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from codegen.kernel import Kernel
from tests.of_workers.processes.limits import limits
from tests.support.fixtures.queue import wait_for
from tests.support.kernels.cpu_helpers import faulty_kernel, loaded, toolchain
from tests.support.processes.fences import NAMESPACES
from tests.support.processes.running import running_with, still_runs
from tests.support.run.places import FAULTY, ROOT
from workers.cpu.verify import CHILD, CHILD_ENVIRONMENT, CpuVerdict, verify_on_cpu
from workers.processes.process_stream import Finished
from workers.processes.processes import InfrastructureError, Limits, Processes

pytestmark = pytest.mark.skipif(not NAMESPACES, reason="PID namespaces are not allowed here")

MODULE = "tests.support.processes.fenced_child"
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client")))}
LIMITS = Limits(wall_seconds=60, cpu_seconds=20, memory_bytes=800 << 20, output_bytes=1 << 20)
SECRET = secrets.token_hex(16)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """With a secret in the environment of this process, as a worker has."""
    made = Processes(root=tmp_path_factory.mktemp("warm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUKILN_API_KEY", SECRET)
        made.keep_warm(MODULE, ENVIRONMENT)
        yield made
    made.close()


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    made = Processes(root=tmp_path_factory.mktemp("cold"))
    yield made
    made.close()


def run(processes: Processes, cwd: Path, *words: object, bounds: Limits = LIMITS, stdin: bytes = b"") -> Finished:
    argv = [sys.executable, "-m", MODULE, *map(str, words)]
    with processes.stream(argv, cwd=cwd, limits=bounds, env=ENVIRONMENT, stdin=stdin) as stream:
        return stream.wait()


def server_of(processes: Processes) -> int:
    assert processes._warm is not None and processes._warm.pid is not None
    return processes._warm.pid


def test_children_are_forks_of_one_process(warm: Processes, tmp_path: Path) -> None:
    said = [run(warm, tmp_path, "forked").stdout.decode().split() for _ in range(3)]
    assert {imported_by for imported_by, _ in said} == {str(server_of(warm))}
    assert {pid for _, pid in said} == {"2"}  # of a namespace of its own, beside process 1


def test_closing_in_a_fork_ends_nothing_that_the_worker_keeps(warm: Processes, tmp_path: Path) -> None:
    worker_child = os.fork()
    if worker_child == 0:
        warm.close()
        os._exit(0)
    assert os.waitpid(worker_child, 0)[1] == 0
    assert run(warm, tmp_path, "forked").stdout.startswith(str(server_of(warm)).encode())


def test_a_program_that_is_not_kept_warm_is_started(warm: Processes, tmp_path: Path) -> None:
    assert warm.run(["echo", "words"], cwd=tmp_path, limits=LIMITS).stdout == b"words\n"
    other = [sys.executable, "-c", "import os; print(os.getppid())"]
    assert warm.run(other, cwd=tmp_path, limits=LIMITS).stdout == b"1\n"


def test_it_reads_its_arguments_and_its_stdin_and_answers_on_both_streams(warm: Processes, tmp_path: Path) -> None:
    finished = run(warm, tmp_path, "say", "one", "two words", stdin=b"given")
    assert (finished.ok, finished.stdout, finished.stderr) == (True, b"4 one two words\ngiven", b"words\n")
    assert finished.argv[-3:] == ("say", "one", "two words")
    assert finished.peak_memory_bytes > 1 << 20


SAME = ["environment", "about", "descriptors"]


@pytest.mark.parametrize("what", SAME)
def test_the_fence_is_that_of_a_new_interpreter(warm: Processes, cold: Processes, tmp_path: Path, what: str) -> None:
    network = Path("/proc/self/ns/net").readlink()
    forked, started = (run(processes, tmp_path, what, network) for processes in (warm, cold))
    assert forked.ok and forked.stdout
    assert forked.stdout == started.stdout


def test_it_has_no_network_of_ours(warm: Processes, tmp_path: Path) -> None:
    if not warm.means.network:
        pytest.skip("network namespaces are not allowed here")
    assert "True" not in run(warm, tmp_path, "about", Path("/proc/self/ns/net").readlink()).text()


def test_no_secret_of_the_worker_is_in_its_memory(warm: Processes, tmp_path: Path) -> None:
    assert run(warm, tmp_path, "secrets", SECRET[::-1]).stdout == b"False False\n"
    root = ENVIRONMENT["PYTHONPATH"].split(":")[0]  # what is there is found
    assert run(warm, tmp_path, "secrets", root[::-1]).stdout == b"True True\n"


@pytest.mark.parametrize(
    ("arguments", "changes", "ended_by", "returncode"),
    [
        (("exit", 3), {}, None, 3),
        (("fail",), {}, None, 1),
        (("crash",), {}, None, -signal.SIGSEGV),
        (("signal", int(signal.SIGABRT)), {}, None, -signal.SIGABRT),
        (("signal", int(signal.SIGKILL)), {}, None, -signal.SIGKILL),
        (("burn",), {"wall_seconds": 0.5}, "wall", -signal.SIGKILL),
        (("burn",), {"cpu_seconds": 0.5}, "cpu", -signal.SIGKILL),
        (("allocate",), {"memory_bytes": 200 << 20}, "memory", -signal.SIGKILL),
        (("yes",), {"output_bytes": 100_000}, "output", -signal.SIGKILL),
    ],
    ids=str,
)
def test_it_ends_as_a_new_interpreter_does(
    warm: Processes,
    cold: Processes,
    tmp_path: Path,
    arguments: tuple[object, ...],
    changes: dict[str, float],
    ended_by: str | None,
    returncode: int,
) -> None:
    bounds = Limits(**{**vars(LIMITS), **changes})  # type: ignore[arg-type]
    for processes in (warm, cold):
        finished = run(processes, tmp_path, *arguments, bounds=bounds)
        assert (finished.ended_by, finished.returncode) == (ended_by, returncode), finished.text()
    assert run(warm, tmp_path, "say").ok  # and the next is fine


def test_a_file_may_not_be_larger_than_the_limit(warm: Processes, cold: Processes, tmp_path: Path) -> None:
    for processes in (warm, cold):
        finished = run(processes, tmp_path, "write")
        assert not finished.ok and "File too large" in finished.text()
        assert (tmp_path / "file").stat().st_size == LIMITS.output_bytes


def test_an_exception_shows_as_of_a_new_interpreter(warm: Processes, tmp_path: Path) -> None:
    assert "ArithmeticError: not today" in run(warm, tmp_path, "fail").stderr.decode()


@pytest.mark.parametrize("ends", ["by itself", "wall"])
def test_what_it_started_ends_with_it(warm: Processes, tmp_path: Path, ends: str) -> None:
    marker = f"28803.{os.getpid()}{time.monotonic_ns() % 10**6}"
    bounds = limits(wall_seconds=1.0) if ends == "wall" else LIMITS
    run(warm, tmp_path, "leave", marker, "wait" if ends == "wall" else "end", bounds=bounds)
    wait_for(lambda: not running_with(f"sleep\0{marker}"), what="the grandchild")


@pytest.mark.parametrize("killed", ["worker child", "worker", "server"])
def test_no_process_survives_the_one_that_is_killed(tmp_path: Path, killed: str) -> None:
    marker = f"28804.{os.getpid()}{time.monotonic_ns() % 10**6}"
    worker = textwrap.dedent(f"""
        import os, sys, time
        from pathlib import Path
        from workers.processes.processes import Limits, Processes
        from workers.processes.die_with_parent import die_with_parent
        processes = Processes(root=Path({str(tmp_path)!r}))
        processes.keep_warm({MODULE!r}, {ENVIRONMENT!r})
        worker = os.getpid()
        worker_child = os.fork()
        if worker_child:
            print(worker_child, processes._warm.pid, flush=True)
            time.sleep(300)
        die_with_parent(worker)
        argv = [sys.executable, "-m", {MODULE!r}, "leave", {marker!r}, "wait"]
        finished = processes.run(argv, cwd=Path("/"), limits=Limits(300, 300, 1 << 30, 1 << 20), env={ENVIRONMENT!r})
        Path({str(tmp_path / "ended")!r}).write_text(f"{{finished.returncode}} {{finished.infrastructure_failure()}}")
    """)
    process = subprocess.Popen([sys.executable, "-c", worker], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        worker_child, server = map(int, process.stdout.readline().split())
        wait_for(lambda: running_with(f"sleep\0{marker}"), what="the grandchild")
        tree = psutil.Process(server).children(recursive=True)
        assert len(tree) == 4  # the leader, process 1, the child, what it started
        os.kill({"worker child": worker_child, "server": server, "worker": process.pid}[killed], signal.SIGKILL)
        wait_for(lambda: not any(map(still_runs, tree)))
        if killed == "server":
            wait_for((tmp_path / "ended").exists)
            wait_for(lambda: (tmp_path / "ended").read_text())
            assert (tmp_path / "ended").read_text().startswith("-9 python was killed by SIGKILL")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    wait_for(lambda: not psutil.pid_exists(server), what="the server")


# ---- verification


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(root=tmp_path)
    made.keep_warm(CHILD, CHILD_ENVIRONMENT)
    with loaded([FAULTY]):
        yield made
    made.close()


def verify(runner: Processes, *numbers: int, on_result: Callable[[CpuVerdict], None] | None = None) -> list[CpuVerdict]:
    kernels: list[Kernel] = [faulty_kernel(number) for number in numbers]
    bounds = Limits(wall_seconds=120, cpu_seconds=120, memory_bytes=2 << 30, output_bytes=16 << 20)
    return verify_on_cpu(
        kernels, toolchain(), runner, bounds, seed=1, on_result=on_result, kernel_cpu_seconds=60, kernel_wall_seconds=6
    )


def test_verdicts_do_not_depend_on_how_the_child_came_to_be(runner: Processes, tmp_path: Path) -> None:
    started = Processes(root=tmp_path)
    numbers = (0, 1, 28, 33, 60)  # right, a missing barrier, ends the process, forges an answer, right
    forked, new = ([(one.verdict, one.message) for one in verify(each, *numbers)] for each in (runner, started))
    started.close()
    assert forked == new
    assert [verdict for verdict, _ in forked] == ["ok", "runtime_error", "runtime_error", "runtime_error", "ok"]


def test_a_server_that_is_killed_under_a_kernel_is_the_machines_fault_and_it_works_again(runner: Processes) -> None:
    server = server_of(runner)

    def kill(verdict: CpuVerdict) -> None:  # the next kernel hangs
        os.kill(server, signal.SIGKILL)

    with pytest.raises(InfrastructureError, match="SIGKILL"):
        verify(runner, 0, 12, on_result=kill)
    assert [each.verdict for each in verify(runner, 0)] == ["ok"]  # in a new interpreter
    runner.keep_warm(CHILD, CHILD_ENVIRONMENT)
    assert server_of(runner) != server
    assert [each.verdict for each in verify(runner, 60)] == ["ok"]
