"""What the tests of `workers.processes.fence.fence` have forked: `main` does what its first argument names."""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import sys
import time
from pathlib import Path

IMPORTED_BY = os.getpid()


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "say":
        say(len(sys.argv), *rest)
        sys.stdout.write(sys.stdin.read())
        sys.stderr.write("words\n")
    elif what == "environment":
        say(*sorted(os.environ.keys() - {"PWD", "OLDPWD", "SHLVL", "_"}))  # those are a shell's
    elif what == "secrets":
        # The argument is the secret backwards, and so is what is searched: this process must not hold it itself.
        say(rest[0].encode() in Path("/proc/self/environ").read_bytes()[::-1], rest[0].encode() in _memory_backwards())
    elif what == "about":
        names = (resource.RLIMIT_CORE, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)
        limits = [resource.getrlimit(name) for name in names]
        say(os.getuid(), limits, Path.cwd(), Path("/proc/self/ns/net").readlink() == Path(rest[0]))
        say(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    elif what == "descriptors":
        say(*sorted(os.listdir("/proc/self/fd"), key=int))  # noqa: PTH208
    elif what == "doors":
        importlib.import_module("encodings.utf_16_be")  # what is imported late is found

        words = ["doors", *rest[1:]]
        ctypes.CDLL(rest[0]).doors(len(words), (ctypes.c_char_p * len(words))(*(word.encode() for word in words)))
    elif what == "forked":
        say(IMPORTED_BY, os.getpid())
    elif what == "signal":
        os.kill(os.getpid(), int(rest[0]))
    elif what == "crash":
        ctypes.string_at(0)
    elif what == "exit":
        os._exit(int(rest[0]))
    elif what == "fail":
        raise ArithmeticError("not today")
    elif what == "burn":
        while True:
            pass
    elif what == "allocate":
        memory = bytearray(300 << 20)
        time.sleep(300)
        say(len(memory))
    elif what == "write":
        Path("file").write_bytes(bytes(2_000_000))
    elif what == "yes":
        while True:
            say("y" * 1000)
    elif what == "leave":  # a grandchild with a session of its own
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", rest[0]])
        if rest[1] == "wait":
            time.sleep(300)
        time.sleep(0.2)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def _memory_backwards() -> bytes:
    """All that is mapped and can be read."""
    answers = []
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/mem").open("rb", 0) as memory:
        for line in maps:
            place, rights, *_ = line.split()
            if rights.startswith("r") and "[v" not in line:
                first, last = (int(word, 16) for word in place.split("-"))
                memory.seek(first)
                answers.append(memory.read(last - first))
    return b"".join(answers)[::-1]


if __name__ == "__main__":
    main()
