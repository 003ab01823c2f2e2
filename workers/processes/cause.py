"""What a tool's end says: whether the work, the compiler, a limit of ours or the machine is to blame.

A driver that loses a child says so in words and ends with a status of its own, so the messages are read too. They are
those of gcc 12, binutils 2.40 and nvcc 13.2 in the C locale, of children that were killed
(`tests/of_workers/processes/test_cause.py` kills them). A kernel cannot make a compiler say them: text from a request
never reaches a file.
"""

import errno
import re
import signal
from typing import Literal

Cause = Literal["ok", "cancelled", "limit", "machine", "crash", "refusal"]
"""`limit`: one of ours was reached. `machine`: killed from outside, out of memory or disk; it says nothing about the
work. `crash`: the tool died of itself, which may be the machine once, and is the work's where it happens again.
`refusal`: it ended with an error."""

# Sent by a person, the out-of-memory killer, a stopping system; SIGBUS by a full disk under a mapped file.
MACHINE_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGBUS, signal.SIGQUIT}
)
CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS})
# What libc and the tools say where the machine is exhausted: g++, cicc and its front end, ptxas without memory; ptxas
# and nvcc on a full disk.
MACHINE_MESSAGES = (
    "No space left on device",
    "Disk quota exceeded",
    "Cannot allocate memory",
    "out of memory",
    "Memory allocation failure",
    "Failed to write to outp file",
    "Input/output error",
    "Read-only file system",
    "Stale file handle",
    "Too many open files",
    "Permission denied",  # the fence keeps it from a file: another folder has to be named
    "Resource temporarily unavailable",
    "error while loading shared libraries",
)
# Of nvcc, whatever became of the preprocessor's child: on a full disk there is no other word.
_PREPROCESSOR_FAILED = "Failed to preprocess host compiler properties"
_BY_NAME = {str(signal.strsignal(number)): number for number in signal.Signals if signal.strsignal(number)}
_NAMES = "|".join(map(re.escape, sorted(_BY_NAME, key=len, reverse=True)))
_NAMED = re.compile(  # by g++ of a child; by cc1plus, as and ld of themselves
    rf"({_NAMES}) signal terminated program|internal compiler error: ({_NAMES})|Internal error \(({_NAMES})\)"
)
_NUMBERED = re.compile(r"(?:terminated with|died due to) signal (\d+)")  # by collect2 and nvcc of a child
_MACHINE_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
)


def is_of_the_machine(error: BaseException) -> bool:
    """Of an exception in our own code: a full or broken disk, no memory, no descriptors."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _MACHINE_ERRORS)


def signed(returncode: int) -> int:
    """Negative for a signal, also where a shell or a driver reported a child's death as 128 + signal."""
    return 128 - returncode if 128 < returncode <= 128 + signal.NSIG else returncode


def cause_of(returncode: int, text: str) -> Cause:
    """Of an end that no limit and no cancel brought about, by its `signed` return code."""
    if returncode == 0:
        return "ok"
    signals = signals_in(returncode, text)
    # cicc and cudafe++ catch SIGTERM and SIGINT: they say this after errors too, but then count those.
    was_terminated = "Compilation terminated." in text and "detected in the compilation" not in text
    if signals & MACHINE_SIGNALS or was_terminated or any(message in text for message in MACHINE_MESSAGES):
        return "machine"
    if signals & CRASH_SIGNALS:
        return "crash"
    return "machine" if _PREPROCESSOR_FAILED in text else "refusal"


def signals_in(returncode: int, text: str) -> frozenset[int]:
    """What ended the tool or, as it reports, one of its children."""
    signals = {-returncode} if returncode < 0 else set()
    signals |= {_BY_NAME[name] for names in _NAMED.findall(text) for name in names if name}
    signals |= {int(number) for number in _NUMBERED.findall(text)}
    return frozenset(signals)
