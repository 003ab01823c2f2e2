"""`python -m tests.support.processes.counting_worker KIND`: a worker that writes down the kernels of each file
that its nvcc is given.

In the worker itself: what nvcc starts can write nowhere but into its own folders. What runs kernels on the CPU is
compiled once in a run."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.support.kernels.compile_cache import RUNTIME
from tests.support.processes.caching_worker import keep_compiled
from workers.compile.compile_file import DeviceCode, FileCompiler
from workers.worker import main as worker

LOG = "TEST_COMPILED"
COMPILED = "TEST_COMPILED_BEFORE"
_compile = FileCompiler.compile_device


def _compile_counted(self: FileCompiler, text: str, target: str, symbols: frozenset[str]) -> DeviceCode:
    kernels = re.findall(r"^namespace (kernel_[0-9a-f]*)", text, re.MULTILINE)
    with Path(os.environ[LOG]).open("a") as log:
        log.write(" ".join(kernels) + "\n")
    return _compile(self, text, target, symbols)


def main() -> int:
    keep_compiled(os.environ[COMPILED], " ".join(RUNTIME))
    FileCompiler.compile_device = _compile_counted  # type: ignore[method-assign]
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
