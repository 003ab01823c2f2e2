"""Processes that run now: any of them may end while it is looked at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_GONE = (psutil.NoSuchProcess, psutil.AccessDenied)


def running_with(marker: str) -> list[psutil.Process]:
    """Those whose command line holds `marker`, its words joined by NUL."""
    return list(_those(lambda place: os.fsencode(marker) in _read(f"{place}/cmdline")))


def processes_of(folder: Path) -> list[psutil.Process]:
    """Those with `folder` in their environment, working folder or arguments; not this one."""
    own = os.fsencode(folder)
    return list(
        _those(
            lambda place: (
                own in os.fsencode(os.readlink(f"{place}/cwd"))  # noqa: PTH115
                or own in _read(f"{place}/environ")
                or own in _read(f"{place}/cmdline")
            )
        )
    )


def name_of(process: psutil.Process) -> str:
    """Of its program; empty where it has ended since it was found."""
    try:
        return process.name()
    except _GONE:
        return ""


def still_runs(process: psutil.Process) -> bool:
    """Whether it has neither ended nor become a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def opened(pid: int) -> list[str]:
    """What a process has open."""
    names = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.append(str(path.readlink()))
        except FileNotFoundError:  # closed since
            continue
    return names


def _those(holds: Callable[[str], bool]) -> Iterator[psutil.Process]:
    """Of its folder in /proc. Not by psutil, which takes five times as long: tests look again and again."""
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdecimal() and int(name) != os.getpid():
            with suppress(OSError, psutil.NoSuchProcess):
                if holds(f"/proc/{name}"):
                    yield psutil.Process(int(name))


def _read(path: str) -> bytes:
    with open(path, "rb", 0) as file:  # noqa: PTH123
        return file.read()
