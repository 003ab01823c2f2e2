"""The child of a worker that performs its wake-ups, one after the other: it may be killed with whatever it does, and
the worker continues with another. A fork, new connections and first writes into shared pages cost 20 ms: it is kept
until it fails or has grown."""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import socket
from collections.abc import Callable
from typing import NoReturn

from workers.processes.die_with_parent import die_with_parent

log = logging.getLogger("cukiln.worker")

Perform = Callable[[str, str | None], bool]
"""(kind, target) of a wake-up; returns whether there was work."""

MAX_GROWTH_BYTES = 256 << 20
_MESSAGE_BYTES = 4096
_THERE_WAS = b"1"
_STOPPING = {signal.SIGTERM, signal.SIGINT}


class WorkerChild:
    """SIGKILLed by the kernel when the worker ends, however that ends. For the worker's main thread."""

    def __init__(self, perform: Perform) -> None:
        worker = os.getpid()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # the worker's handlers are not for the child
            self.pid = os.fork()
            if self.pid == 0:
                self._channel.close()
                _perform_wake_ups(theirs, worker, perform)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def give(self, kind: str, target: str | None) -> bool:
        """False where it has ended."""
        try:
            self._channel.send(json.dumps((kind, target)).encode())
        except ConnectionError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Whether it has performed what it was given, or ended, within that time."""
        waiting = select.poll()
        waiting.register(self._channel, select.POLLIN)
        return bool(waiting.poll(1000 * seconds))

    def answer(self) -> bool | None:
        """After `wait`: whether there was work; None where it cannot be given another wake-up."""
        try:
            told = self._channel.recv(1)
        except ConnectionError:
            return None
        return told == _THERE_WAS if told else None

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Itself alone: what it started dies with it."""
        os.kill(self.pid, number)  # of a child that is not reaped yet, so never another's

    def end(self) -> int:
        """Once it is idle or has ended: its exit code, negative for a signal."""
        self._channel.close()
        self.kill()  # changes nothing where it is ending by itself
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _perform_wake_ups(channel: socket.socket, worker: int, perform: Perform) -> NoReturn:
    try:
        os.setpgrp()  # Ctrl-C is for the worker, which passes it on
        die_with_parent(worker)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        most = _resident_bytes() + MAX_GROWTH_BYTES
        while message := channel.recv(_MESSAGE_BYTES):
            there_was = perform(*json.loads(message))
            if _resident_bytes() > most:
                break
            channel.send(_THERE_WAS if there_was else b"0")
    except BaseException:  # nothing may unwind into the worker's loop, of which this process holds a copy
        log.exception("the worker child %d failed", os.getpid())
        os._exit(1)
    os._exit(0)


def _resident_bytes() -> int:
    """At most, so far; of a fork, from what it had of its parent."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
