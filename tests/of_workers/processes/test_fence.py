"""A probe of real machine code tries each door out of the fence: which open depends on the means of the machine alone,
and each means shuts its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from storage.config.settings import load_settings
from tests.support.processes.fences import machine, processes_with
from tests.support.processes.running import running_with
from tests.support.service.doors import ENVIRONMENT, LIMITS, MOST_PROCESSES, ROOT, build, house, opened
from workers.processes import process_stream
from workers.processes.fence.access import secrets_of
from workers.processes.fence.means import Means
from workers.processes.job_files import read_bytes, write_text
from workers.processes.processes import Processes

NOTHING = {"namespaces": "", "network": False, "proc": False, "landlock": 0, "sockets": False, "users": ()}
NO_NAMESPACES = {"namespaces": "", "network": False, "proc": False}  # a container without capabilities
ORDINARY = 61000  # an unused user number


def test_no_child_may_touch_the_database_or_what_sqlite_keeps_beside_it(tmp_path: Path) -> None:
    """https://www.sqlite.org/tempfiles.html: the rollback journal, the write-ahead log and its index."""
    elsewhere = tmp_path / "elsewhere" / "own.db"
    settings = load_settings(data_dir=tmp_path / "data", database_url=f"sqlite:///{elsewhere}")
    beside = {elsewhere.with_name(f"own.db{end}") for end in ("", "-journal", "-wal", "-shm")}
    assert {tmp_path / "data", *beside} <= {*secrets_of(settings)}


@dataclass(frozen=True)
class Case:
    means: Means
    is_root: bool
    is_device: bool
    is_another: bool  # the child has a user of its own

    @property
    def hides(self) -> bool:
        """The data folder, by a mount."""
        return bool(self.means.namespaces) and not self.means.landlock


# What shuts each door. Without any means, root's child has no capabilities all the same.
SHUT: dict[str, Callable[[Case], object]] = {
    "environment": lambda case: True,
    "environment-of-others": lambda case: case.means.landlock or case.means.proc or case.is_root,
    "processes-of-others": lambda case: (case.means.landlock and not case.is_device) or case.means.proc,
    "database-read": lambda case: case.means.landlock or case.is_another or case.hides,
    "database-write": lambda case: case.means.landlock or case.is_another or case.hides,
    "data-folder": lambda case: case.means.landlock or case.is_another or case.hides,
    "file-of-another": lambda case: (case.means.landlock and not case.is_device) or case.is_another,
    "shadow": lambda case: case.means.landlock or case.is_another or not case.is_root,
    "unix-socket": lambda case: case.means.sockets or case.is_another or case.hides,
    "abstract-socket": lambda case: case.means.sockets or case.means.network or case.means.landlock >= 6,
    "tcp": lambda case: case.means.sockets or case.means.network or case.means.landlock >= 4,
    "socket-pair": lambda case: case.means.sockets and not case.is_device,
    "ptrace": lambda case: case.means.landlock or case.means.namespaces or case.is_root,
    "memory-of-others": lambda case: case.means.landlock or case.means.namespaces or case.is_root,
    "signal": lambda case: case.means.landlock >= 6 or case.means.namespaces or case.is_another,
    "fork-bomb": lambda case: (case.is_another or case.means.namespaces == "user") and not case.is_device,
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where every user may go."""
    made = Path(tempfile.mkdtemp(prefix="doors-"))
    made.chmod(0o1777)
    (made / "probe").mkdir(mode=0o755)
    build(made / "probe")
    yield made
    shutil.rmtree(made)


def users() -> list[int]:
    return [0, ORDINARY] if os.geteuid() == 0 else [os.geteuid()]


def but(*means: str) -> dict[str, Any]:
    return {name: value for name, value in NOTHING.items() if name not in means}


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "compiler": ("compiler", {}),
    "kernel": ("kernel", {}),
    "gpu": ("gpu", {}),
    "nothing": ("compiler", NOTHING),
    "Landlock alone": ("compiler", but("landlock")),
    "refused sockets alone": ("compiler", but("sockets")),
    "namespaces alone": ("compiler", but("namespaces", "network", "proc")),
    "users alone": ("compiler", but("users")),
    "kernel in a container": ("kernel", NO_NAMESPACES),
    "gpu in a container": ("gpu", NO_NAMESPACES),
    "kernel without Landlock": ("kernel", {"landlock": 0}),
    "gpu without Landlock": ("gpu", {"landlock": 0}),
    "gpu without a /proc of its own": ("gpu", {"proc": False, "landlock": 0}),
}


@pytest.fixture(scope="module")
def tried(folder: Path) -> dict[tuple[int, str], tuple[set[str], Case]]:
    """Which doors opened, by user and way: all of a user's are tried by one process, one after the other."""
    found = {}
    for user in users():
        arguments = [str(folder), str(user), json.dumps(list(WAYS.values()))]
        command = [sys.executable, "-m", "tests.support.service.doors", *arguments]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for (name, (way, _)), answer in zip(WAYS.items(), json.loads(done.stdout), strict=True):
            means = Means(**answer["means"])
            if way == "gpu" and not means.proc:  # where CUDA would not start
                means = replace(means, namespaces="", network=False)
            case = Case(means, user == 0, way == "gpu", answer["user"] != user)
            found[user, name] = set(answer["opened"]), case
    return found


@pytest.mark.parametrize("user", users())
@pytest.mark.parametrize("name", WAYS)
def test_the_doors_that_open_are_those_that_no_means_shuts(
    tried: dict[tuple[int, str], tuple[set[str], Case]], name: str, user: int
) -> None:
    answers, case = tried[user, name]
    way, less = WAYS[name]
    assert case.is_another or not case.means.users or way != "compiler"
    assert answers == {door for door, is_shut in SHUT.items() if not is_shut(case)}
    if not less and way != "gpu" and machine().landlock >= 6 and machine().namespaces:
        assert answers == set()


def test_a_secret_that_is_handed_over_is_found(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the probe looks for, it sees."""
    monkeypatch.setattr(process_stream, "PROCESSES", MOST_PROCESSES // 2)
    place = tmp_path / "house"
    place.mkdir(mode=0o700)
    with house(place) as home:
        processes = processes_with(place, (home.data,))
        answers, _ = opened(processes, "compiler", home, folder / "probe", {"CUKILN_API_KEY": home.secret})
        processes.close()
    assert "environment" in answers


def test_a_link_that_leads_into_the_data_folder_opens_nothing_of_it(tmp_path: Path) -> None:
    if not machine().landlock:
        pytest.skip("this kernel has no Landlock")
    kept, root = tmp_path / "data" / "kept", tmp_path / "root"
    kept.mkdir(parents=True)
    root.mkdir()
    (kept / "file").write_text("secret")
    (tmp_path / "own").write_text("own")
    for name, leads_to in (("link", kept), ("back", tmp_path), ("nowhere", tmp_path / "none")):
        (tmp_path / name).symlink_to(leads_to)
    processes = processes_with(root, (tmp_path / "data",), **NO_NAMESPACES)
    with closing(processes), processes.private_folder() as made:
        command = [
            "cat",
            *(str(tmp_path / way / "file") for way in ("data/kept", "link", "back/link")),
            f"{tmp_path}/own",
        ]
        said = processes.run(command, cwd=made, limits=LIMITS, device=True).text()
    assert "secret" not in said
    assert said.count("Permission denied") == 3 and said.startswith("own")


# ---- what a child writes


@pytest.fixture(params=[{}, NO_NAMESPACES], ids=["all", "in a container"])
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = processes_with(tmp_path, **request.param)
    yield made
    made.close()


def test_endless_files_end_their_writer(processes: Processes) -> None:
    script = "i=0; while :; do head -c 1000000 /dev/zero > f$i || exit; i=$((i+1)); done"
    with processes.private_folder() as made:
        finished = processes.run(["sh", "-c", script], cwd=made, limits=LIMITS)
        written = sum(path.stat().st_size for path in made.iterdir())
    assert finished.ended_by == "output" and written < 10**10


def test_it_writes_nowhere_but_into_its_folders(processes: Processes, tmp_path: Path) -> None:
    if not machine().landlock:
        pytest.skip("this kernel has no Landlock")
    (tmp_path / "beside").mkdir(mode=0o777)
    (tmp_path / "beside").chmod(0o777)
    script = (
        f'echo > here; echo > "$TMPDIR/there"; echo > {tmp_path}/beside/file; echo > /dev/shm/file; rm -f {tmp_path}'
    )
    with processes.private_folder() as made:
        said = processes.run(["sh", "-c", script], cwd=made, limits=LIMITS).text()
        assert [path.name for path in made.iterdir()] == ["here"]
    assert "beside/file" in said and "shm/file" in said and "there" not in said
    assert list((tmp_path / "beside").iterdir()) == []


def test_what_a_tool_in_a_closed_folder_makes_is_read_by_the_next(processes: Processes, tmp_path: Path) -> None:
    """The first cannot have a user of its own, the second has."""
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "tool"
    tool.write_text("#!/bin/sh\necho made > made\n")
    tool.chmod(0o755)
    tmp_path.chmod(0o700)
    before = os.umask(0o077)
    try:
        with processes.private_folder() as made:
            assert processes.run([str(tool)], cwd=made, limits=LIMITS).ok
            finished = processes.run(["cat", "made"], cwd=made, limits=LIMITS)
            assert (finished.returncode, finished.text()) == (0, "made\n")
    finally:
        os.umask(before)


# Each sleeps and none forks: 40 of them, whatever fails.
_MANY = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep {0} & sleep {0} & done; wait"


@pytest.mark.parametrize("is_own", [True, False], ids=["own user", "root"])
def test_too_many_processes_end_their_tree(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    monkeypatch.setattr(process_stream, "PROCESSES", 20)
    marker = f"28805.{os.getpid()}{time.monotonic_ns() % 10**6}"
    with processes.private_folder() as made:
        finished = processes.run(["sh", "-c", _MANY.format(marker)], cwd=made if is_own else tmp_path, limits=LIMITS)
    assert finished.ended_by == "processes" or "fork" in finished.text()  # looked at, or refused by the kernel
    assert not finished.ok and running_with(marker) == []


# ---- what this process reads of it


def test_a_link_a_pipe_and_an_endless_file_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    os.truncate(os.open(tmp_path / "endless", os.O_CREAT | os.O_RDWR), 10**10)
    for name in ("link", "pipe", "endless"):
        with pytest.raises(OSError, match=r"link|plain file|longer than 100 bytes"):
            read_bytes(tmp_path / name, 100)
    assert read_bytes(tmp_path / "secret", 100) == b"secret"


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "secret").read_text() == "secret"
    assert (tmp_path / "link").read_text() == "text" and not (tmp_path / "link").is_symlink()
