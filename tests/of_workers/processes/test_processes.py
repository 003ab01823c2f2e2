"""What the processes promises, in both ways of fencing a process tree in."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from storage.config.settings import load_settings
from tests.of_workers.processes.limits import LIMITS, limits, wait_until
from tests.support.processes.fences import NAMESPACES, machine, processes_with
from tests.support.processes.running import running_with
from tests.support.run.places import ROOT
from workers.processes import process_stream, process_tree
from workers.processes import processes as processes_module
from workers.processes.process_stream import Finished
from workers.processes.processes import InfrastructureError, Limits, Processes, ProgramMissing, fenced_processes

# Not what is first on PATH: the fence shows no environment.
PYTHON = f"{Path(sys.executable).resolve()} -c"
# A process that uses 0.2 CPU seconds, however busy the machine is.
BURN = f"{PYTHON} 'import time\nwhile time.process_time() < 0.2: pass'"


LESS: dict[str, dict[str, Any]] = {
    "namespace": {},
    "sweep": {"namespaces": "", "network": False, "proc": False},
}


@pytest.fixture(params=LESS)
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Processes]:
    if request.param == "namespace" and not NAMESPACES:
        pytest.skip("PID namespaces are not allowed here")
    made = processes_with(tmp_path, **LESS[request.param])
    yield made
    made.close()


def run(processes: Processes, script: str, cwd: Path, *, bounds: Limits = LIMITS, **more: Any) -> Finished:
    return processes.run(["sh", "-c", script], cwd=cwd, limits=bounds, **more)


def test_returns_what_the_program_said_and_how_it_ended(processes: Processes, tmp_path: Path) -> None:
    finished = run(processes, "echo words; echo faults >&2; exit 7", tmp_path)
    assert (finished.stdout, finished.stderr, finished.returncode) == (b"words\n", b"faults\n", 7)
    assert finished.ended_by is None and not finished.ok


@pytest.mark.parametrize("name", ["KILL", "ABRT", "SEGV", "TERM"])
def test_a_death_by_signal_shows_as_its_negative_number(processes: Processes, tmp_path: Path, name: str) -> None:
    assert run(processes, f"kill -{name} $$", tmp_path).returncode == -getattr(signal, f"SIG{name}")


def test_a_signal_that_a_driver_reports_as_128_plus_its_number_shows_the_same(
    processes: Processes, tmp_path: Path
) -> None:
    assert run(processes, "exit 137", tmp_path).returncode == -signal.SIGKILL


def test_only_a_minimal_environment_is_passed_on(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUKILN_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    finished = run(processes, "env", tmp_path, env={"GIVEN": "yes"})
    names = {line.split("=")[0] for line in finished.stdout.decode().splitlines()}
    assert names - {"PWD", "OLDPWD", "_", "SHLVL"} == {"PATH", "LANG", "LC_ALL", "TMPDIR", "HOME", "GIVEN"}


def test_the_private_temporary_folder_is_gone_after_the_run(processes: Processes, tmp_path: Path) -> None:
    finished = run(processes, 'touch "$TMPDIR/left"; echo "$TMPDIR"', tmp_path)
    folder = Path(finished.stdout.decode().strip())
    assert folder.is_relative_to(tmp_path) and not folder.exists()


def test_the_private_temporary_folder_is_gone_after_a_kill(processes: Processes, tmp_path: Path) -> None:
    script = 'touch "$TMPDIR/left"; echo "$TMPDIR"; sleep 300'
    finished = run(processes, script, tmp_path, bounds=limits(wall_seconds=0.3))
    folder = Path(finished.stdout.decode().strip())
    assert finished.ended_by == "wall"
    assert folder.is_relative_to(tmp_path) and not folder.exists()


@pytest.mark.parametrize(
    ("script", "changes", "ended_by"),
    [
        ("while :; do :; done", {"wall_seconds": 0.3}, "wall"),
        ("while :; do :; done", {"cpu_seconds": 0.3}, "cpu"),
        # Each child stays below the limit: only the sum of the tree is over it.
        (f"for i in 1 2 3 4 5 6; do {BURN}; done", {"cpu_seconds": 0.5}, "cpu"),
        (
            f"{sys.executable} -c 'import time; a = bytearray(300 << 20); time.sleep(300)'",
            {"memory_bytes": 100 << 20},
            "memory",
        ),
        ("yes", {"output_bytes": 100_000}, "output"),
        ("yes >&2", {"output_bytes": 100_000}, "output"),
        ("head -c 2000000 /dev/zero > file", {}, "output"),
    ],
)
def test_a_limit_ends_the_tree_and_is_named(
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    changes: dict[str, float],
    ended_by: process_stream.EndedBy,
) -> None:
    monkeypatch.setattr(process_stream, "BUSY_SHARE", 0.02)  # of a core that other tests share
    bounds = limits(**changes)
    finished = run(processes, script, tmp_path, bounds=bounds)
    assert (finished.ended_by, finished.cause) == (ended_by, "limit")
    assert len(finished.stdout + finished.stderr) <= 1 << 20
    assert finished.infrastructure_failure() is None
    assert set(bounds.reached(finished.ended_by) or {}) == {ended_by}


def test_a_tree_that_gets_no_core_until_its_wall_limit_is_the_machines_failure(
    processes: Processes, tmp_path: Path
) -> None:
    finished = run(processes, "sleep 300", tmp_path, bounds=limits(wall_seconds=0.3))
    assert (finished.ended_by, finished.cause) == ("wall", "machine")
    assert "less than 50% of a core" in str(finished.infrastructure_failure())


def test_what_was_done_before_a_silence_does_not_count_as_work_in_it(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_stream, "BUSY_SHARE", 0.15)
    script = "for i in 1 2 3 4; do " + BURN + "; echo; done; sleep 300"
    with processes.stream(["sh", "-c", script], cwd=tmp_path, limits=LIMITS) as stream:
        assert list(stream.lines(timeout=2.0)) == [b""] * 4
        assert stream.finished is not None and stream.finished.stalled
        assert stream.finished.cpu_seconds > 0.75


def test_cancelling_ends_the_tree(processes: Processes, tmp_path: Path) -> None:
    cancel = threading.Event()
    threading.Timer(0.2, cancel.set).start()
    finished = run(processes, "sleep 300", tmp_path, cancel=cancel)
    assert finished.ended_by == "cancelled"


def test_a_grandchild_with_its_own_session_is_killed_with_the_tree(processes: Processes, tmp_path: Path) -> None:
    marker = f"28800.{os.getpid()}{time.monotonic_ns() % 10**6}"
    script = f"setsid sleep {marker} >/dev/null 2>&1 & (sleep {marker} &) ; sleep 300"
    assert run(processes, script, tmp_path, bounds=limits(wall_seconds=0.5)).ended_by == "wall"
    assert running_with(marker) == []


def test_what_a_finished_program_left_behind_is_killed(processes: Processes, tmp_path: Path) -> None:
    marker = f"28801.{os.getpid()}{time.monotonic_ns() % 10**6}"
    # It holds the pipes open: the run must end with the program, not with what it left.
    assert run(processes, f"setsid sleep {marker} & exit 0", tmp_path).ok
    assert running_with(marker) == []


def test_cpu_seconds_are_those_of_the_whole_tree(processes: Processes, tmp_path: Path) -> None:
    finished = run(processes, f"{BURN} & {BURN} & wait", tmp_path)
    assert finished.ok
    assert finished.cpu_seconds >= 0.375


@pytest.mark.parametrize("isolation", LESS)
def test_a_sigkilled_caller_leaves_neither_processes_nor_files(tmp_path: Path, isolation: str) -> None:
    if isolation == "namespace" and not NAMESPACES:
        pytest.skip("PID namespaces are not allowed here")
    marker = f"28802.{os.getpid()}{time.monotonic_ns() % 10**6}"
    caller = textwrap.dedent(f"""
        from pathlib import Path
        from tests.support.processes.fences import processes_with
        from workers.processes.processes import Limits
        processes = processes_with(Path({str(tmp_path)!r}), **{LESS[isolation]!r})
        with processes.private_folder():
            processes.run(["sh", "-c", "touch $TMPDIR/left; setsid sleep {marker} & sleep {marker}"],
                          cwd=Path("/"), limits=Limits(300, 300, 1 << 30, 1 << 20))
    """)
    process = subprocess.Popen([sys.executable, "-c", caller], cwd=ROOT)
    try:
        # Two sleeps, beside the shells that carry the script and its marker in their command lines.
        assert wait_until(lambda: len(running_with(f"sleep\0{marker}")) == 2)
        assert any(tmp_path.iterdir())
    finally:
        process.kill()
        process.wait()
    assert wait_until(lambda: not running_with(marker))
    assert wait_until(lambda: not any(tmp_path.iterdir()))


@pytest.mark.parametrize("reads", [True, False], ids=["afterwards", "before it is sent"])
def test_a_folder_is_gone_with_a_caller_that_dies_while_it_is_made(tmp_path: Path, reads: bool) -> None:
    command = ["sh", "-c", processes_module.CLEANER, "cleaner", str(tmp_path / "folder"), "700"]
    ours, its = os.pipe()
    if not reads:
        os.close(ours)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=its, stderr=subprocess.PIPE)
    os.close(its)
    assert done.stderr == b"" and not (tmp_path / "folder").exists()
    if reads:
        with os.fdopen(ours, "rb") as said:
            assert said.read() == b"made\n"


def test_a_folder_that_cannot_be_made_is_the_machines_failure(tmp_path: Path) -> None:
    processes = Processes(root=tmp_path / "missing")
    with pytest.raises(InfrastructureError, match="No such file or directory"), processes.private_folder():
        pass


@pytest.mark.parametrize("reaped", [False, True])
def test_closing_removes_the_folder_of_a_cleaner_that_was_killed(tmp_path: Path, reaped: bool) -> None:
    processes = Processes(root=tmp_path)
    with processes.private_folder() as folder:
        (cleaner,) = running_with(f"cleaner\0{folder.parent}")
        cleaner.kill()
        if reaped:
            os.waitpid(cleaner.pid, 0)
    processes.close()
    assert not any(tmp_path.iterdir())


def test_closing_continues_a_cleaner_that_is_stopped(tmp_path: Path) -> None:
    processes = Processes(root=tmp_path)
    with processes.private_folder() as folder:
        (cleaner,) = running_with(f"cleaner\0{folder.parent}")
        cleaner.suspend()
    closing = threading.Thread(target=processes.close, daemon=True)
    closing.start()
    closing.join(30)
    try:
        assert not closing.is_alive() and not any(tmp_path.iterdir())
    finally:
        with suppress(psutil.NoSuchProcess):
            cleaner.resume()


def test_closing_removes_the_folder_and_later_runs_make_a_new_one(tmp_path: Path) -> None:
    processes = Processes(root=tmp_path)
    with processes.private_folder() as folder:
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o077 == 0
        processes.close()
    assert list(tmp_path.iterdir()) == []
    assert run(processes, "true", Path("/")).ok
    processes.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_waits_for_no_fork_of_this_process(tmp_path: Path) -> None:
    processes = Processes(root=tmp_path)
    with processes.private_folder():
        pass
    until, ours = os.pipe()
    if (child := os.fork()) == 0:
        os.close(ours)
        os.read(until, 1)
        os._exit(0)
    try:
        closing = threading.Thread(target=processes.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive() and list(tmp_path.iterdir()) == []
    finally:
        os.close(ours)
        os.waitpid(child, 0)
        os.close(until)


def test_a_path_without_the_systems_folders_neither_stops_runs_nor_leaves_files(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert processes.run(["/bin/sh", "-c", "exit 0"], cwd=tmp_path, limits=LIMITS).ok
    processes.close()
    assert list(tmp_path.iterdir()) == []


def test_lines_arrive_while_the_program_runs(processes: Processes, tmp_path: Path) -> None:
    script = "echo first; while [ ! -e go ]; do sleep 0.02; done; printf 'second\\nrest'"
    with processes.stream(["sh", "-c", script], cwd=tmp_path, limits=LIMITS) as stream:
        lines = stream.lines()
        assert next(lines) == b"first"
        assert stream.finished is None
        (tmp_path / "go").touch()
        assert list(lines) == [b"second", b"rest"]
        assert stream.finished is not None and stream.finished.ok


def test_a_silent_program_ends_with_the_line_timeout(processes: Processes, tmp_path: Path) -> None:
    with processes.stream(["sh", "-c", "echo one; sleep 300"], cwd=tmp_path, limits=LIMITS) as stream:
        assert list(stream.lines(timeout=0.3)) == [b"one"]
        assert stream.finished is not None and stream.finished.ended_by == "wall"


def test_a_program_reads_what_it_is_given_and_nothing_more(processes: Processes, tmp_path: Path) -> None:
    for given, said in ((b"a secret", [b"a secret", b"the end"]), (b"", [b"the end"])):
        script = 'cat; [ -n "$1" ] && echo; echo the end'
        argv = ["sh", "-c", script, "sh", given.decode()]
        with processes.stream(argv, cwd=tmp_path, limits=LIMITS, stdin=given) as stream:
            assert list(stream.lines()) == said
    with processes.stream(["sh", "-c", "exit 3"], cwd=tmp_path, limits=LIMITS, stdin=b"unread") as stream:
        assert stream.wait().returncode == 3


def test_the_wall_limit_can_begin_anew(processes: Processes, tmp_path: Path) -> None:
    script = "for i in 1 2 3 4 5; do sleep 0.4; echo wait; done; sleep 300"
    with processes.stream(["sh", "-c", script], cwd=tmp_path, limits=limits(wall_seconds=1.5)) as stream:
        for _ in stream.lines():
            stream.restart_wall()
        assert stream.finished is not None and stream.finished.ended_by == "wall"
        assert stream.finished.stdout == b"wait\n" * 5 and stream.finished.wall_seconds > 3.4


def test_what_was_done_before_the_wall_limit_began_anew_does_not_count_as_work_since(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_stream, "BUSY_SHARE", 0.15)
    script = f"{f'{BURN}; echo; ' * 4}sleep 300"  # each within the limit on a busy machine, too
    with processes.stream(["sh", "-c", script], cwd=tmp_path, limits=limits(wall_seconds=3.0)) as stream:
        for _ in stream.lines():
            stream.restart_wall()
        assert stream.finished is not None and stream.finished.ended_by == "wall"
        assert stream.finished.stalled and stream.finished.cpu_seconds > 0.15 * 3.0


def test_leaving_the_block_kills_what_runs(processes: Processes, tmp_path: Path) -> None:
    marker = f"28803.{os.getpid()}{time.monotonic_ns() % 10**6}"
    script = f"echo up; sleep {marker}"
    with processes.stream(["sh", "-c", script], cwd=tmp_path, limits=LIMITS) as stream:
        assert next(stream.lines()) == b"up"
        assert running_with(marker)
    assert running_with(marker) == []
    assert stream.finished is not None and stream.finished.ended_by == "cancelled"


def test_a_missing_program_is_named(processes: Processes, tmp_path: Path) -> None:
    with pytest.raises(ProgramMissing, match="no-such-compiler"):
        processes.run(["no-such-compiler"], cwd=tmp_path, limits=LIMITS)


def test_a_folder_that_cannot_be_made_is_the_machines_fault(tmp_path: Path) -> None:
    processes = Processes(root=tmp_path / "missing")
    with pytest.raises(InfrastructureError, match="temporary folder"):
        run(processes, "true", tmp_path)


def ended(returncode: int, stderr: str = "", ended_by: process_stream.EndedBy | None = None) -> Finished:
    return Finished(("nvcc",), returncode, b"", stderr.encode(), 1.0, 1.0, 0, ended_by)


@pytest.mark.parametrize(
    "finished",
    [
        ended(-signal.SIGKILL),
        ended(-signal.SIGTERM),
        ended(-signal.SIGBUS),
        ended(1, "fatal error: error writing to /tmp/x.s: No space left on device"),
        ended(1, "cc1plus: out of memory: Cannot allocate memory"),
        ended(127, "cicc: error while loading shared libraries: libnvvm.so"),
    ],
)
def test_the_machines_faults_are_distinguished_from_the_works(finished: Finished) -> None:
    assert finished.infrastructure_failure()


@pytest.mark.parametrize(
    "finished",
    [
        ended(0),
        ended(1, "group.cu(3): error: expected a ;"),
        ended(-signal.SIGSEGV),
        ended(-signal.SIGABRT),
        ended(-signal.SIGKILL, ended_by="memory"),
        ended(-signal.SIGKILL, ended_by="wall"),
    ],
)
def test_the_works_own_faults_are_not_the_machines(finished: Finished) -> None:
    assert finished.infrastructure_failure() is None


def test_namespaces_can_be_left_out_by_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKILN_PID_NAMESPACES", "false")
    with closing(fenced_processes(load_settings(data_dir=tmp_path / "data"))) as without:
        means = without.means
        assert (means.namespaces, means.network, means.proc) == ("", False, False)
        assert (means.landlock, means.sockets, means.users) == (machine().landlock, machine().sockets, machine().users)
        # Its parent is the sub-reaper, which is not process 1 of a namespace of its own.
        assert int(run(without, "echo $$", tmp_path).stdout) > 2


def test_without_a_free_descriptor_no_process_is_taken_for_stopped() -> None:
    """So a supervisor goes on: it looks at its processes again later."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path("/dev/null").open("rb") as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), hard))
        try:
            assert not process_tree.is_stopped(os.getpid())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
