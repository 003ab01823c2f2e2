"""Where up to three tests of `make test` failed, they are run again, one after the other.

Tests with sockets, threads and processes run beside the compilers of other tests; what they show must hold on a machine
that is free, too. `python -m tests.support.run.again_alone` ends with 1 where more failed, and names what it repeats.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MOST = 3
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")  # pytest's own, written by every run


def may_run_again(failed: Sequence[str]) -> bool:
    """`failed`: ids of tests, or of modules that could not be imported."""
    return 0 < len(failed) <= MOST and all("::" in test for test in failed)


def main() -> int:
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not may_run_again(failed):
        return 1
    sys.stdout.write("\n  ".join(["failed beside other tests, and run again alone:", *failed]) + "\n")
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", *failed], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
