"""Which fault comes when: chosen by the seed and the fault's number alone, whatever lives when it comes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

# How often each kind of process is killed, of a hundred kills.
KINDS = {
    "tool": 24, "worker child": 26, "worker": 15, "fence": 8, "api": 8, "bodies": 3, "valkey": 6, "reconcile": 4,
    "fork server": 4, "supervisor": 2,
}  # fmt: skip
# How often anything else is done to it, after one kill in seven.
OTHERS = {
    "pause worker": 4, "pause worker child": 2, "pause fork server": 2, "pause api": 2, "pause bodies": 2,
    "pause valkey": 2, "pause fence": 2,
    "empty queue": 2, "torn log": 1, "database": 2, "full disk": 2, "read-only blobs": 1,
}  # fmt: skip
# What is taken, in this order, where the chosen kind has no process. None of it lives while the service starts:
# then the fault waits, and a service that starts is not killed over and over.
INSTEAD = ("worker child", "worker")
OTHERS_INSTEAD = ("pause worker",)
PAUSES = (1.0, 12.0)  # seconds: shorter and longer than the leases, and than what a silent API is given


@dataclass(frozen=True)
class Fault:
    """`kinds`: the chosen one, then what is taken instead. `victim`: which of the processes, as a share of them.
    `seconds`: of a pause, or of a disk's state."""

    kinds: tuple[str, ...]
    victim: float
    seconds: float

    @property
    def chosen(self) -> str:
        return self.kinds[0]


def kill(seed: int, number: int) -> Fault:
    return _draw(f"{seed}:{number}", KINDS, INSTEAD)


def another(seed: int, number: int) -> Fault:
    """What follows on kill `number`."""
    return _draw(f"{seed}:{number}:another", OTHERS, OTHERS_INSTEAD)


def _draw(name: str, weights: Mapping[str, int], instead: tuple[str, ...]) -> Fault:
    rng = random.Random(name)
    (kind,) = rng.choices([*weights], [*weights.values()])
    return Fault((kind, *instead), rng.random(), rng.uniform(*PAUSES))
