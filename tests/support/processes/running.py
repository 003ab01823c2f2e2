"""Processes that run now: any of them may end while it is looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_GONE = (psutil.NoSuchProcess, psutil.AccessDenied)


def running_with(marker: str) -> list[psutil.Process]:
    """Those whose command line holds `marker`, its words joined by NUL."""
    return [process for process, words, _ in _others() if marker in "\0".join(words)]


def processes_of(folder: Path) -> list[psutil.Process]:
    """Those with `folder` in their environment, working folder or arguments; not this one."""
    return [
        process
        for process, words, environment in _others()
        if any(str(folder) in word for word in [*words, *environment])
    ]


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


def _others() -> Iterator[tuple[psutil.Process, list[str], list[str]]]:
    """Each with the words of its command line, and with what its environment and its working folder say."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid():
                yield process, process.cmdline(), [*process.environ().values(), process.cwd()]
        except _GONE:
            continue
