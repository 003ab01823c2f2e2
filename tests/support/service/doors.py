"""A service's secrets beside a fence, and a probe of real machine code inside that tries each door to them.

`python -m tests.support.service.doors FOLDER USER CASES` prints which opened, as JSON, in each of CASES (JSON): a way
(compiler, kernel, gpu) that the user with number USER runs, on a machine whose means are ours but for others.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.processes.fences import machine, processes_with
from tests.support.run.places import ROOT
from workers.processes import process_stream
from workers.processes.fence.access import outermost_closed
from workers.processes.fence.namespaces import CLONE_NEWNS, cover, make_private
from workers.processes.processes import Limits, Processes

LIMITS = Limits(wall_seconds=60, cpu_seconds=60, memory_bytes=2 << 30, output_bytes=1 << 20)
CHILD = "tests.support.processes.fenced_child"
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client")))}
MOST_PROCESSES = 24


@cache
def build(folder: Path) -> tuple[Path, Path]:
    """The probe as a program and as a library."""
    program, library = folder / "doors", folder / "doors.so"
    for way, output in (((), program), (("-shared", "-fPIC"), library)):
        source = Path(__file__).with_name("doors.cpp")
        subprocess.run(["g++", "-O1", "-w", *way, str(source), "-o", str(output)], check=True)
        output.chmod(0o755)
    return program, library


@dataclass(frozen=True)
class House:
    """What a service has: a process with a secret, a data folder with a database and a socket, listeners."""

    secret: str
    pid: int
    address: int  # of a byte that the process has mapped
    data: Path
    other: Path
    abstract: str
    port: int

    def words(self) -> list[str]:
        database, unix = self.data / "cukiln.db", self.data / "queue.sock"
        places = [database, self.other, self.data, unix]
        numbers = [self.abstract, self.port, MOST_PROCESSES]
        return [self.secret, str(self.pid), f"{self.address:x}", *map(str, [*places, *numbers])]


@contextlib.contextmanager
def house(folder: Path) -> Iterator[House]:
    """In `folder`, closed to others, of the calling user."""
    secret = secrets.token_hex(16)
    data = folder / "data"
    data.mkdir(mode=0o700)
    for path in (data / "cukiln.db", folder / "other"):
        path.touch(mode=0o600)
    with contextlib.ExitStack() as stack:
        for address in (str(data / "queue.sock"), f"\0{secret}"):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
        network = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        script = "import ctypes, sys; b = ctypes.create_string_buffer(8); print(ctypes.addressof(b)); "
        script += "sys.stdout.flush(); sys.stdin.read()"
        command = [sys.executable, "-I", "-S", "-c", script, secret]
        environment = {"CUKILN_API_KEY": secret, "DATABASE_URL": f"postgresql://me:{secret}@db/x"}
        process = stack.enter_context(
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        try:
            assert process.stdout is not None
            address_of_byte = int(process.stdout.readline())
            port = network.getsockname()[1]
            yield House(secret, process.pid, address_of_byte, data, folder / "other", secret, port)
        finally:
            process.kill()


def opened(
    processes: Processes, way: str, home: House, probe: Path, env: dict[str, str] | None = None
) -> tuple[set[str], int]:
    """The doors that opened to a probe that runs that way, and the number of its user."""
    environment = {**(ENVIRONMENT if way != "compiler" else {}), **(env or {})}
    argv = {
        "compiler": [str(probe / "doors"), *home.words()],
        "kernel": [sys.executable, "-m", CHILD, "doors", str(probe / "doors.so"), *home.words()],
        "gpu": [sys.executable, "-m", CHILD, "doors", str(probe / "doors.so"), *home.words()],
    }[way]
    with processes.private_folder() as folder:
        stream = processes.stream(argv, cwd=folder, limits=LIMITS, env=environment, device=way == "gpu", reads=[probe])
        with stream as running:
            finished = running.wait()
    assert finished.ok or finished.ended_by == "processes", finished
    answers = dict(line.split() for line in finished.stderr.decode().splitlines())
    if finished.ended_by == "processes":
        answers["fork-bomb"] = "open"  # no limit of the kernel ended it: it was seen
    assert len(answers) == 16 and set(answers.values()) <= {"open", "shut"}, finished
    return {name for name, answer in answers.items() if answer == "open"}, int(finished.stdout)


def become(user: int) -> None:
    """An ordinary user, to whom this Python is open also where it lies in a folder of root's own."""
    closed = outermost_closed(Path(sys.base_prefix))
    if closed is not None:
        make_private(CLONE_NEWNS)
        cover(str(closed), [sys.base_prefix])
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def main() -> None:
    folder, user, cases = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    if user != os.geteuid():
        become(user)
        machine.cache_clear()
    os.umask(0o077)  # a service's
    process_stream.PROCESSES = MOST_PROCESSES // 2
    answers = [try_doors(folder, folder / f"user-{user}-{number}", *case) for number, case in enumerate(cases)]
    print(json.dumps(answers))  # noqa: T201


def try_doors(folder: Path, place: Path, way: str, less: dict[str, Any]) -> dict[str, Any]:
    place.mkdir(mode=0o711)
    place.chmod(0o711)
    with house(place) as home:
        processes = processes_with(place, (home.data,), own_python=False, **less)
        if way == "kernel":
            processes.keep_warm(CHILD, ENVIRONMENT)
        with contextlib.closing(processes):
            answers, child = opened(processes, way, home, folder / "probe")
    return {"opened": sorted(answers), "user": child, "means": vars(processes.means)}


if __name__ == "__main__":
    main()
