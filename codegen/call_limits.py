"""What calls of a kernel may give, and what its launch code must refuse."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ScalarBounds:
    """What a call may give for a scalar: its kernel computes nothing meaningful of others."""

    name: str
    least: float
    most: float


@dataclass(frozen=True)
class EdgeCall:
    """A call that has these numbers and launch-time values, by name, in place of a problem's own, and whether launch
    code takes it."""

    numbers: Mapping[str, int]
    taken: bool
    launch: Mapping[str, int] = field(default_factory=dict)
