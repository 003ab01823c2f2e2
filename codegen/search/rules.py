"""Rules of a search space: one-liners that accept a schedule or say, with the numbers, why not."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from codegen.search.schedule import Schedule
from codegen.targets import Target

WORKSPACE = "workspace"
DETERMINISTIC = "deterministic"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The schedule breaks no rule."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The schedule breaks `rule` (a stable name); `message` has the numbers."""

    rule: str
    message: str


ACCEPTED = Accepted()


def check(condition: bool, rule: str, message: str) -> Rejected | None:
    """None where the condition holds, so that checks chain with `or`."""
    return None if condition else Rejected(rule, message)


def check_workspace(needed: int, limit: int | None) -> Rejected | None:
    """Bytes of workspace against the request's `workspace_limit_bytes` (None: no limit)."""
    return check(
        limit is None or needed <= limit, WORKSPACE, f"needs {needed} bytes of workspace, the limit is {limit}"
    )


def check_deterministic(deterministic: bool) -> Rejected | None:
    """Whether a kernel gives the same bits in every run, where the request demands that."""
    return check(
        deterministic, DETERMINISTIC, "its bits differ from run to run, and deterministic kernels are asked for"
    )


def residency_rules(resident: int, threads: int, shared_bytes: int, registers: int, target: Target) -> Rejected | None:
    """Whether so many resident blocks as a schedule promises fit a multiprocessor with about `registers` per thread."""
    in_file = target.registers_per_sm
    per_block = shared_bytes + target.reserved_shared_bytes
    if shared_bytes > target.shared_per_block:
        return Rejected(
            "shared_memory",
            f"{shared_bytes} bytes of shared memory; {target.name} has {target.shared_per_block} per block",
        )
    if resident * threads > target.max_threads_per_sm:
        return Rejected(
            "min_blocks", f"{resident} x {threads} threads; {target.name} holds {target.max_threads_per_sm}"
        )
    if resident * per_block > target.shared_per_sm:
        return Rejected(
            "min_blocks", f"{resident} x {per_block} bytes of shared memory; {target.name} has {target.shared_per_sm}"
        )
    if registers > target.registers_per_thread:
        return Rejected("registers", f"about {registers} registers per thread; at most {target.registers_per_thread}")
    if resident * threads * registers > in_file:
        return Rejected(
            "registers", f"{resident} x {threads} threads of about {registers} registers; {target.name} has {in_file}"
        )
    return None


def first_accepted(schedules: Iterable[Schedule], admit: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """The first that breaks no rule, and no more are looked at; the first of all where every one breaks one.

    Raises ValueError where there are none.
    """
    first: Schedule | None = None
    for schedule in schedules:
        if isinstance(admit(schedule), Accepted):
            return schedule
        first = first or schedule
    if first is None:
        raise ValueError("no schedules to choose from")
    return first
