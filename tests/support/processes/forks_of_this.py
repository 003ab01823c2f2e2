"""Fork servers that are forks of the process that starts them, which has imported what they fork: for runs that start
some each time, where how one starts is not the subject."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import workers.processes.processes
from workers.processes import fork_server
from workers.processes.fork_server import ForkServer
from workers.processes.process_stream import Ending, reap


def fork_this(modules: Sequence[str]) -> None:
    """From now on, in this process: `Processes` start theirs so, and what runs `modules` is forked of them."""

    class OfThis(ForkOfThis):
        forked = tuple(modules)

    workers.processes.processes.ForkServer = OfThis  # type: ignore[misc]


class ForkOfThis(ForkServer):
    forked: tuple[str, ...] = ()

    def _start(self, theirs: socket.socket) -> Any:
        parent, child = os.getpid(), os.fork()
        if child == 0:
            assert self._control is not None
            self._control.close()
            self._serve(parent if self._tied else 0, theirs)
        return _Process(child)

    def _serve(self, parent: int, channel: socket.socket) -> None:
        """In the server, and in what it forks."""
        status = 1
        try:
            os.setpgid(0, 0)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            with Path(os.devnull).open("rb") as nothing:
                os.dup2(nothing.fileno(), 0)
            os.chdir(self._cwd or ".")
            names = dict.fromkeys((*self.modules, *self.forked))
            sys.argv = ["fork_server", str(parent), str(channel.detach()), self._name, *names]
            # A pipe that stays open here never ends for its reader.
            for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
                if number > 2 and str(number) != sys.argv[2]:
                    with suppress(OSError):
                        os.close(number)
            status = fork_server.main() or 0
        except BaseException:  # noqa: BLE001 - the last frame
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


class _Process:
    """As `subprocess.Popen`, as far as a fork server's is used."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ending: Ending | None = None

    def poll(self) -> int | None:
        self._ending = self._ending or reap(self.pid, os.WNOHANG)
        return self._ending and self._ending.returncode

    def wait(self) -> None:
        self._ending = self._ending or reap(self.pid)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
