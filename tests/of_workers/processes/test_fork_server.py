"""A fork server runs what it is asked for, ends it with its client, and says how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.fixtures.queue import wait_for
from tests.support.processes.running import still_runs
from tests.support.run.places import ROOT
from workers.processes.fork_server import Forked, ForkServer, Request

PATHS = os.pathsep.join((str(ROOT), str(ROOT / "client")))
CHILD = (sys.executable, "-m", "tests.support.processes.fenced_child")
SLEEP = ("/bin/sleep", "300")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    made = ForkServer("fork server", [CHILD[2]], env={"PYTHONPATH": PATHS}, log=tmp_path / "log")
    made.ensure_running()
    yield made
    made.stop()


def fork(server: ForkServer, *argv: str, start: bool = True) -> Forked:
    forked = server.fork(Request("it", argv, {"GIVEN": "1"}))
    if start:
        assert forked.receive(30.0) and forked.pid is not None
    return forked


def running(forked: Forked) -> bool:
    try:
        return psutil.Process(forked.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_module_is_run_by_the_process_that_imported_it_and_a_program_is_executed(
    server: ForkServer, tmp_path: Path
) -> None:
    assert fork(server, *CHILD, "forked").wait(30.0)
    imported_by, pid = map(int, (tmp_path / "log").read_text().split())
    assert imported_by == server.pid != pid
    assert fork(server, "/bin/sh", "-c", "echo $GIVEN $PPID").wait(30.0)
    assert (tmp_path / "log").read_text().splitlines()[-1] == f"1 {server.pid}"


@pytest.mark.parametrize(
    ("arguments", "returncode"), [(("exit", "3"), 3), (("fail",), 1), (("signal", "6"), -6), (("signal", "9"), -9)]
)
def test_an_end_is_reported_as_it_was(server: ForkServer, arguments: tuple[str, ...], returncode: int) -> None:
    ending = fork(server, *CHILD, *arguments).wait(30.0)
    assert ending is not None and ending.returncode == returncode
    assert ending.max_rss_kib > 1024


def test_a_process_keeps_its_pid_until_its_client_has_seen_the_end(server: ForkServer) -> None:
    forked = fork(server, *CHILD, "exit", "0")
    assert forked.pid is not None
    wait_for(lambda: not running(forked))
    fork(server, *CHILD, "exit", "0").wait(30.0)
    assert psutil.pid_exists(forked.pid)  # a zombie
    assert forked.wait(30.0)
    assert not psutil.pid_exists(forked.pid)


def test_a_signal_reaches_what_runs_and_nothing_else(server: ForkServer) -> None:
    forked = fork(server, *SLEEP)
    forked.send_signal(signal.SIGTERM)
    ending = forked.wait(30.0)
    assert ending is not None and ending.returncode == -signal.SIGTERM
    forked.send_signal(signal.SIGTERM)
    forked.kill()


def test_a_process_can_be_killed_before_it_is_there(server: ForkServer) -> None:
    forked = fork(server, *SLEEP, start=False)
    forked.send_signal(signal.SIGTERM)
    forked.kill()
    ending = forked.wait(30.0)
    assert forked.pid is not None
    assert ending is not None and ending.returncode == -signal.SIGKILL


def test_a_process_ends_with_its_client(server: ForkServer) -> None:
    forked = fork(server, *SLEEP)
    client = os.fork()
    if client == 0:
        signal.pause()
    forked._channel.close()  # as at the end of this process: only its fork holds the channel now
    assert running(forked)
    os.kill(client, signal.SIGKILL)
    os.waitpid(client, 0)
    wait_for(lambda: not running(forked))


@pytest.mark.parametrize("stopped", [True, False])
def test_what_was_forked_ends_with_the_server_which_can_start_again(server: ForkServer, stopped: bool) -> None:
    forked, before = fork(server, *SLEEP), server.pid
    assert before is not None
    server.stop() if stopped else os.kill(before, signal.SIGKILL)
    ending = forked.wait(30.0)
    assert ending is not None and ending.returncode == -signal.SIGKILL
    assert server.ended(30.0) == -signal.SIGKILL
    lost = fork(server, *SLEEP, start=False) if not stopped else forked
    assert lost.wait(30.0)
    server.ensure_running()
    assert server.pid not in (None, before)
    assert fork(server, *CHILD, "exit", "0").wait(30.0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_server_that_a_signal_has_stopped_ends_with_a_client_that_is_killed(tied: bool) -> None:
    client = textwrap.dedent(f"""
        import time
        from workers.processes.fork_server import ForkServer, Request
        server = ForkServer("fork server", [], env={{"PYTHONPATH": {PATHS!r}}}, tied={tied})
        server.ensure_running()
        forked = server.fork(Request("it", {SLEEP!r}, {{}}))
        assert forked.receive(30.0)
        print(server.pid, forked.pid, flush=True)
        time.sleep(300)
    """)
    process = subprocess.Popen([sys.executable, "-c", client], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    started = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    try:
        started[0].suspend()
        wait_for(lambda: started[0].status() == psutil.STATUS_STOPPED)
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(still_runs, started)))
    finally:
        process.kill()
        process.stdout.close()
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def test_it_refuses_to_fork_once_a_module_has_started_a_thread(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=[300]).start()"
    )
    paths = os.pathsep.join((PATHS, str(tmp_path)))
    server = ForkServer("fork server", ["threaded"], env={"PYTHONPATH": paths}, log=tmp_path / "log")
    server.ensure_running()
    forked = fork(server, *SLEEP, start=False)
    assert forked.wait(30.0) and forked.pid is None
    assert server.ended(30.0) == 1
    assert "has started a thread" in (tmp_path / "log").read_text()
