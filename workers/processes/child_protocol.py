"""How a child process that runs code under test answers its parent: one marked JSON object per line, on a pipe of its
own. What the code under test writes into the pipe lacks the mark: a keyed digest of the line's number and its text. The
parent hands the key over on stdin, where it can be read once, before any such code is loaded; a search of the process's
memory still finds it."""

import ctypes
import fcntl
import hashlib
import json
import os
import resource
import secrets
from typing import Any

_KEY_BYTES = 32
_MARK_BYTES = 16
_MOST_DESCRIPTORS = 1 << 16  # the table of a process's descriptors is as long as the highest of them


def new_key() -> bytes:
    return secrets.token_bytes(_KEY_BYTES)


class Saying:
    """The child's end. Made before anything else of the process: it reads stdin up to its end and moves the pipe from
    stdout to a number that cannot be guessed; what is written to stdout from then on goes to stderr, line by line: what
    code prints must not be lost with a process that it kills."""

    def __init__(self) -> None:
        self._key = _read_key()
        self._lines = 0
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        half = (_MOST_DESCRIPTORS if allowed == resource.RLIM_INFINITY else min(allowed, _MOST_DESCRIPTORS)) // 2
        self.pipe = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, half + secrets.randbelow(max(1, half)))
        os.dup2(2, 1)
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)  # _IOLBF

    def __call__(self, message: dict[str, Any]) -> None:
        """Raises OSError where the pipe is gone."""
        text = json.dumps(message, allow_nan=False).encode()
        line = text + b"\n"
        if self._key:
            line = _mark(self._key, self._lines, text) + b" " + line
        self._lines += 1
        while line:
            line = line[os.write(self.pipe, line) :]


class Hearing:
    """The parent's end. Without a key, lines bear no mark: for children that run no code under test."""

    def __init__(self, key: bytes = b"") -> None:
        self._key = key
        self._lines = 0

    def __call__(self, line: bytes) -> dict[str, Any]:
        """What the child said. Raises ValueError where it was not the child itself that wrote this line."""
        if self._key:
            mark, _, text = line.partition(b" ")
            if not secrets.compare_digest(mark, _mark(self._key, self._lines, text)):
                raise ValueError(f"no answer: {line[:200]!r}")
            self._lines += 1
            line = text
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ValueError(f"no answer: {line[:200]!r}")
        return answer


def _mark(key: bytes, number: int, text: bytes) -> bytes:
    """The number keeps a line from being said twice."""
    return hashlib.blake2b(b"%d " % number + text, key=key, digest_size=_MARK_BYTES).hexdigest().encode()


def _read_key() -> bytes:
    """Empty where the parent gave none, and for a person at a terminal. Stdin is /dev/null afterwards."""
    key = b""
    while not os.isatty(0) and (more := os.read(0, _KEY_BYTES)):
        key += more
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return key
