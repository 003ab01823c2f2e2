"""A PostgreSQL of its own, on a socket in a folder of its own, of the system's binaries (Debian's: `postgresql`)."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psycopg

USER = "cukiln"
READY_SECONDS = 60.0
OVERFLOW_USER = 65534  # the kernel's default (`/proc/sys/kernel/overflowuid`), which has a name on every Linux
# A test's data need not survive the machine. 100 connections would be too few for a service and its test.
OPTIONS = ("listen_addresses=", "fsync=off", "max_connections=200")


@cache
def binaries() -> Path | None:
    """The folder of `initdb` and `postgres`; Debian keeps it off the PATH."""
    on_path = shutil.which("initdb")
    programs = [Path(on_path)] if on_path else sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return programs[-1].parent if programs else None


@contextmanager
def running_postgres() -> Iterator[str]:
    """The URL of an empty database. The server ends with the block."""
    programs = binaries()
    assert programs is not None, "no PostgreSQL here"
    # Not a test's own folder: that is closed to the server's user, and a socket's path is short.
    with tempfile.TemporaryDirectory(prefix="ck-pg-") as folder:
        user = _owner_of(Path(folder))
        data = f"{folder}/data"
        words = ("--username", USER, "--auth=trust", "--no-sync", "--no-locale", "--encoding=UTF8")
        made = subprocess.run(
            [programs / "initdb", "-D", data, *words], capture_output=True, text=True, user=user, cwd=folder
        )
        assert made.returncode == 0, made.stderr
        options = [word for option in OPTIONS for word in ("-c", option)]
        with (Path(folder) / "log").open("wb") as log:
            server = subprocess.Popen(
                [programs / "postgres", "-D", data, "-k", folder, *options],
                stdout=log,
                stderr=log,
                user=user,
                cwd=folder,
            )
        url = f"postgresql://{USER}@/postgres?host={folder}"
        try:
            _wait_until_ready(url, server, Path(folder) / "log")
            yield url
        finally:
            server.send_signal(signal.SIGQUIT)  # "immediate": nothing is worth writing back
            server.wait(30)


def _owner_of(folder: Path) -> int:
    """The server refuses to run as root: the folder is then given to another user."""
    if os.geteuid() != 0:
        return os.geteuid()
    users = {entry.pw_name: entry.pw_uid for entry in pwd.getpwall()}
    user = users.get("postgres", OVERFLOW_USER)
    os.chown(folder, user, -1)
    return user


def _wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            psycopg.connect(url).close()
            return
        except psycopg.OperationalError:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
