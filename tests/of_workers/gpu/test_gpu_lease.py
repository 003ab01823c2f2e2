"""The lease of a GPU: one process at a time, given back by the kernel, safe in a folder that all users share."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.of_workers.processes.limits import wait_until
from tests.support.gpu import fake_gpu
from tests.support.gpu.gpu_tasks import Gpu, children, matmul_candidate, matmul_problem
from tests.support.kernels.hostile_libraries import CONTROL, build
from tests.support.run.places import ROOT
from workers.gpu.lease import GpuLease, LeaseRefused, is_leased, take_lease

HOLDER = """
import sys, time
from pathlib import Path
from workers.gpu.lease import take_lease
take_lease(Path(sys.argv[1]), "a test holds it", lambda holder: print(holder, flush=True))
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, that asks for the lease and keeps it."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def unexpected(holder: str) -> None:
    raise AssertionError(f"it was free, but {holder} is said to have it")


def test_a_free_lease_is_taken_at_once_and_the_file_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "leases" / "gpu.lock"
    lease = take_lease(path, "cukiln measure: 3 candidates", unexpected)
    assert path.read_text() == f"{os.getpid()}\ncukiln measure: 3 candidates\n"
    assert is_leased(path)
    lease.release()
    assert not is_leased(path)


@pytest.mark.parametrize("reopened", [False, True])
def test_a_lease_whose_file_was_closed_is_not_held_whatever_has_its_number_since(
    tmp_path: Path, reopened: bool
) -> None:
    (tmp_path / "other").touch()
    descriptor = os.open(tmp_path / "gpu.lock", os.O_RDWR | os.O_CREAT)
    lease = GpuLease(descriptor)
    assert lease.held()
    os.close(descriptor)
    if reopened:
        assert os.open(tmp_path / "other", os.O_RDONLY) == descriptor
    assert not lease.held()
    if reopened:
        os.close(descriptor)


def test_a_lease_that_was_never_taken_is_free(tmp_path: Path) -> None:
    assert not is_leased(tmp_path / "gpu.lock")


def test_a_wait_reports_the_holder_again_and_again_and_gets_the_lease_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lock"
    first = take_lease(path, "the first", unexpected)
    messages: list[str] = []
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) > 3.5:
            first.release()

    second = take_lease(path, "the second", messages.append, sleep=sleep)
    assert messages == [f"process {os.getpid()}: the first"] * 4
    assert path.read_text().endswith("the second\n")
    second.release()


def test_a_process_that_is_killed_gives_its_lease_back(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lock"
    with holder(path) as process:
        assert said(process) == "held"
        assert is_leased(path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        take_lease(path, "the next one", unexpected).release()


def test_two_processes_never_have_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lock"
    with holder(path) as first:
        assert said(first) == "held"
        with holder(path) as second:
            assert said(second) == f"process {first.pid}: a test holds it"
            first.kill()
            while (words := said(second)) != "held":
                assert words.startswith("process ")


def test_the_folder_is_open_to_every_user_and_none_removes_the_files_of_others(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        take_lease(tmp_path / "deep" / "leases" / "gpu.lock", "another process", unexpected).release()
    finally:
        os.umask(before)
    folder = tmp_path / "deep" / "leases"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert stat.S_IMODE((folder / "gpu.lock").stat().st_mode) == 0o666


def test_a_folder_in_which_any_user_may_remove_the_files_of_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(LeaseRefused, match="chmod 1777"):
        take_lease(folder / "gpu.lock", "another process", unexpected)


def test_a_link_is_not_followed_and_its_target_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "gpu.lock").symlink_to(precious)
    with pytest.raises(LeaseRefused, match="is a link"):
        take_lease(tmp_path / "gpu.lock", "another process", unexpected)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "leases").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LeaseRefused, match="is no folder, or a link"):
        take_lease(tmp_path / "leases" / "gpu.lock", "another process", unexpected)
    assert precious.read_text() == "mine"


def test_something_else_than_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gpu.lock")
    with pytest.raises(LeaseRefused, match="is no plain file"):
        take_lease(tmp_path / "gpu.lock", "another process", unexpected)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_file_of_another_user_that_may_only_be_read_can_be_leased() -> None:
    open_to_all = Path(tempfile.mkdtemp(dir="/tmp"))  # tmp_path is not
    open_to_all.chmod(0o755)
    folder = open_to_all / "leases"
    take_lease(folder / "gpu.lock", "root", unexpected).release()
    (folder / "gpu.lock").chmod(0o644)
    script = (
        "import os\nfrom pathlib import Path\nfrom workers.gpu.lease import take_lease\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"take_lease(Path({str(folder / 'gpu.lock')!r}), 'another user', print); print('held')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    shutil.rmtree(open_to_all)
    assert done.stdout == "held\n", done.stderr


def test_a_task_waits_for_the_gpu_however_long_another_process_has_it(gpu: Gpu) -> None:
    candidate = matmul_candidate(matmul_problem())
    library = build(CONTROL, gpu.folder / "good.so", candidate.kernel.id)
    lease: GpuLease = take_lease(gpu.lease, "a test", unexpected)
    waited = threading.Event()
    outcomes = []
    # Shorter than the wait: a process that reports its wait is not silent.
    thread = threading.Thread(
        target=lambda: outcomes.append(gpu.run(gpu.task([(candidate, library)]), silence_seconds=6.0))
    )
    thread.start()
    assert not waited.wait(9.0)
    lease.release()
    thread.join()
    assert [result.verdict for result in outcomes[0].results] == ["ok"]
    assert outcomes[0].wall_seconds > 9.0


def test_a_task_that_is_cancelled_while_it_waits_ends(gpu: Gpu) -> None:
    candidate = matmul_candidate(matmul_problem())
    library = build(CONTROL, gpu.folder / "good.so", candidate.kernel.id)
    lease = take_lease(gpu.lease, "a test", unexpected)
    cancel = threading.Event()
    outcomes = []
    task = gpu.task([(candidate, library)])
    thread = threading.Thread(target=lambda: outcomes.append(gpu.run(task, cancel=cancel)))
    thread.start()
    assert wait_until(lambda: bool(gpu.left_behind()))  # its folder is there
    cancel.set()
    thread.join()
    lease.release()
    assert outcomes[0].results == [] and outcomes[0].device is None


def test_the_lease_file_names_the_measuring_process_as_people_see_it(gpu: Gpu) -> None:
    candidate = matmul_candidate(matmul_problem())
    gpu.configure(open="silent")
    library = build(CONTROL, gpu.folder / "good.so", candidate.kernel.id)
    cancel = threading.Event()
    task = gpu.task([(candidate, library)])
    thread = threading.Thread(target=lambda: gpu.run(task, cancel=cancel))
    thread.start()
    assert wait_until(lambda: gpu.lease.exists() and gpu.lease.read_text().count("\n") == 2, 60)
    pid, words = gpu.lease.read_text().splitlines()
    running = children()
    cancel.set()
    thread.join()
    assert int(pid) in [process.pid for process in running] and children() == []
    assert words == "cukiln measure: 1 candidate"
    assert fake_gpu.UUID in gpu.lease.name
