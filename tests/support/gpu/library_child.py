"""`python -m tests.support.gpu.library_child FILE`: runs a script, in a fork of a process that has imported what loads
libraries. PyTorch is not found there: tvm-ffi would import it, which takes longer than all the rest."""

from __future__ import annotations

import sys
from pathlib import Path

sys.modules["torch"] = None  # type: ignore[assignment]

import tvm_ffi  # noqa: E402

import cukiln  # noqa: E402

__all__ = ["cukiln", "main", "tvm_ffi"]


def main() -> int:
    text = Path(sys.argv[1]).read_text()
    exec(compile(text, "script", "exec"), {"__name__": "__main__"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
