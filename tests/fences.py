"""What this machine has to fence children in with, and seams for processes that have less of it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from workers.means import Means
from workers.processes import Processes


@cache
def machine() -> Means:
    """Tried once."""
    with closing(Processes()) as processes:
        return processes.means


NAMESPACES = bool(machine().namespaces)


def processes_with(root: Path, secrets: tuple[Path, ...] = (), **less: Any) -> Processes:
    """As on a machine whose means are ours but for `less`."""
    made = Processes(root=root, secrets=secrets)
    made._means = replace(machine(), **less)
    return made


class Listener:
    """Listens on the loopback of this test and counts who comes."""

    def __init__(self) -> None:
        self.visitors = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = self._socket.accept()
                self.visitors += 1
                visitor.close()

    def close(self) -> None:
        # A connection of our own is the last one that is accepted: everybody who came before it has been counted.
        with socket.create_connection(("127.0.0.1", self.port)) as last:
            last.recv(1)
        self.visitors -= 1
        self._socket.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    with contextlib.suppress(OSError):
        made.close()
