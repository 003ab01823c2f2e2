"""What a verdict's details keep of a case's judgement, on the CPU and on a GPU alike."""

from __future__ import annotations

import math
from typing import Any

from codegen.test_plan import Judgement


def keep_worst(described: dict[str, Any], judgement: Judgement) -> None:
    """Into the case's description: its largest error so far with the bound there, and the first wrong element."""
    # JSON has no NaN and no infinity: null stands for an error that is no number.
    if not math.isfinite(judgement.max_error) or judgement.max_error >= (described.get("max_error") or 0.0):
        described["error_bound"] = number(judgement.error_bound)
    for name, value in (("max_error", judgement.max_error), ("max_ratio", judgement.max_ratio)):
        if not math.isfinite(value):
            described[name] = None
        elif described.get(name, 0.0) is not None:
            described[name] = max(described.get(name, 0.0), value)
    if not judgement.ok:
        described["wrong"] = judgement.wrong
        described["first_wrong"] = {
            "index": list(judgement.index or ()),
            "got": number(judgement.got),
            "expected": number(judgement.expected),
            "bound": number(judgement.bound),
        }


def number(value: float | None) -> float | None:
    """The value, where JSON has it."""
    return value if value is not None and math.isfinite(value) else None
