"""Problems with elements beyond 32 bits, of which little is computed."""

from dataclasses import dataclass

from codegen.problem import Problem

FAR = 2**31


@dataclass(frozen=True)
class Far:
    """A problem with elements beyond FAR of which little is computed: `part`, the last elements of each axis of each
    operand, as a problem of its own, by the `last_blocks` of each launch; all of it where that is 0."""

    problem: Problem
    part: Problem
    launch: tuple[int, ...] = ()
    last_blocks: int = 0
