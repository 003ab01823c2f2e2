"""Compile kernels as a service's workers do it one after the other, until each has an outcome."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from codegen.kernel import Kernel
from workers.compile.compile_group import GroupOutcome, compile_group


def compile_to_the_end(kernels: Sequence[Kernel], *rest: Any) -> Iterator[GroupOutcome]:
    """`compile_group` of these kernels, of the halves of what that leaves, and of each kernel that those leave or that
    a limit of time left."""
    outcome = compile_group(kernels, *rest)
    yield outcome
    if outcome.hung:
        yield from (compile_group([kernel], *rest) for kernel in outcome.left)
        return
    for half in filter(None, (outcome.left[::2], outcome.left[1::2])):
        of_half = compile_group(half, *rest)
        yield of_half
        yield from (compile_group([kernel], *rest) for kernel in of_half.left)
