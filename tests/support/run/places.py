"""Folders that tests read, and that in which they leave what is there to be read."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FAULTY = ROOT / "tests" / "support" / "kernels" / "operators" / "faulty"
PROBE = ROOT / "tests" / "support" / "kernels" / "operators" / "probe"
"""Operators of the tests' own: one whose kernels are wrong by request, one that is as small as can be."""
ARTIFACTS = Path(os.environ.get("CUKILN_TEST_ARTIFACTS") or ROOT / ".test-artifacts")
