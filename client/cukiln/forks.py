"""What a child of a fork must not share with its parent: connections, over which each would read the other's answers,
and locks, which a thread may hold that the child does not have."""

import os
from typing import Protocol
from weakref import WeakSet


class Renewed(Protocol):
    def after_fork(self) -> None:
        """In the child, before anything else of it runs."""


_RENEWED: "WeakSet[Renewed]" = WeakSet()


def renew_after_fork(renewed: Renewed) -> None:
    _RENEWED.add(renewed)


def _after_fork() -> None:
    for renewed in list(_RENEWED):
        renewed.after_fork()


os.register_at_fork(after_in_child=_after_fork)
