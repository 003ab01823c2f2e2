"""`python -m tests.support.processes.caching_worker FOLDER FILES KIND`: a worker that compiles what no process of the
run has compiled before. FOLDER is that of `tests.support.kernels.compile_cache`; FILES, if any, are all it keeps."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from tests.support.kernels.compile_cache import CachingProcesses
from workers.processes import processes
from workers.worker import main as worker

MODULE = "tests.support.processes.caching_worker"
prepare = worker.prepare


def keep_compiled(folder: str, files: str) -> None:
    """In this process, from now on."""
    made = partial(CachingProcesses, Path(folder), frozenset(files.split()))
    processes.Processes = made  # type: ignore[misc, assignment]


def main() -> int:
    keep_compiled(sys.argv.pop(1), sys.argv.pop(1))
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
