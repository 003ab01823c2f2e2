"""Problems of a kernel's plan that are run once, each for a purpose of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the plan of a recorded kernel is checked where no operator is known
    from codegen.problem import Problem

# `long`: as many parts as candidates have, more steps than a pipeline remembers, extents that are too short for more,
# an end in each copy of an unrolled loop.
# `positive`: numbers on which roundings in one direction add up. `special`: normals with NaN, infinities and
# zeros. `far`: on the CPU
# alone, elements that lie FAR and more apart, where an offset in 32 bits ends elsewhere.
Purpose = Literal["long", "positive", "special", "far"]
FAR = 2**31


@dataclass(frozen=True)
class LastBlocks:
    """Of a launch: the last `count` blocks of each `of` along x (0: of all of them), for each y and z."""

    count: int
    of: int = 0


@dataclass(frozen=True)
class RunOnce:
    """A problem with its launch-time values. Of a far one little is computed: `part`, the last elements of each axis of
    each operand, as a problem of its own, by the `last` blocks of each launch; by all where there are none."""

    purpose: Purpose
    problem: Problem
    launch: tuple[int, ...] = ()
    part: Problem | None = None
    last: tuple[LastBlocks, ...] = ()

    @property
    def kind(self) -> Literal["integer", "positive", "special"]:
        """Of its inputs."""
        return self.purpose if self.purpose in ("positive", "special") else "integer"


def long_steps(stages: int) -> int:
    """Of a loop that a pipeline of so many stages feeds: it has come round several times."""
    return 3 * stages + 5


def of_purpose(every: Iterable[RunOnce], purpose: Purpose) -> list[RunOnce]:
    return [each for each in every if each.purpose == purpose]
