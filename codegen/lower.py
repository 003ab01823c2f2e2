"""From a problem and a search to candidates: every rejected schedule is counted, none is dropped silently.

Lowering takes as long as the space is large, so a `Check` may end it on the way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from codegen.canonical import LARGEST_INTEGER
from codegen.kernel import Candidate, Kernel
from codegen.operators import operator
from codegen.predict.predict_uncompiled import BestPredicted, Choice
from codegen.problem import Problem
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check_deterministic
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import Target

# Under this name stands what `search.keep` left out.
KEEP_RULE = "keep"

CHECK_EVERY = 256
"""Schedules between two checks: 3 to 5 ms (59,000 to 97,000 are looked at in a second, 5,000 where all are
predicted)."""


@dataclass(frozen=True)
class Rejection:
    """What one rule rejected: how many schedules, and one of them with the rule's message."""

    count: int
    example: dict[str, Any]
    message: str

    def to_json(self) -> dict[str, Any]:
        return {"count": self.count, "example": self.example, "message": self.message}


@dataclass(frozen=True)
class Lowered:
    """`space_size` counts the schedules before any rule, up to 2**53 - 1; with a limit not all of them were looked at.
    `stopped`: the sentence of the check that ended it; then there are no candidates."""

    candidates: tuple[Candidate, ...]
    rejections: Mapping[str, Rejection] = field(default_factory=dict)
    space_size: int = 0
    stopped: str | None = None

    @property
    def why_empty(self) -> str | None:
        """The check that ended the lowering, or the rules that emptied the search space (`keep` never does); None where
        a candidate is left."""
        if self.candidates or self.stopped is not None:
            return self.stopped
        by_count = sorted(self.rejections.items(), key=lambda item: (-item[1].count, item[0]))
        reasons = "; ".join(f"{rule} rejected {of.count} (e.g. {of.message})" for rule, of in by_count)
        return f"no schedule of the {self.space_size} in the search space is left: {reasons}"


@dataclass
class Progress:
    """How far a lowering has come: schedules looked at and accepted, and the candidates that it would leave if it ended
    now, which `keep` makes fewer."""

    space: SearchSpace
    looked_at: int = 0
    accepted: int = 0
    candidates: int = 0


Check = Callable[[Progress], str | None]
"""Called before the first schedule and then every `CHECK_EVERY`: None to continue, or the reason to stop."""


class _Stopped(Exception):
    """Ends the walk through a space, with the sentence of the check."""


def lower(
    problem: Problem,
    target: Target,
    search: Search,
    workspace_limit: int | None = None,
    *,
    deterministic: bool = False,
    check: Check = lambda progress: None,
) -> Lowered:
    """The candidates in the order of the space, at most `search.limit`; of those the `search.keep` that are predicted
    fastest, where that is given. Raises InvalidSearch, and what `check` raises.

    `workspace_limit` (bytes) and `deterministic` (the same bits in every run) are the request's policy: what breaks it
    is rejected like what breaks a rule.
    """
    op = operator(problem.operator)
    space = op.space(problem, target, search)
    size = min(space.size, LARGEST_INTEGER)  # what JSON readers and databases hold
    signature = op.signature(problem)
    kernels: dict[Schedule, Kernel] = {}
    candidates: list[Candidate] | BestPredicted = [] if search.keep is None else BestPredicted(search.keep, target)
    rejections: dict[str, Rejection] = {}
    progress = Progress(space)
    try:
        for schedule in space.walk(_every(CHECK_EVERY, check, progress)):
            progress.looked_at += 1
            outcome = op.rules(problem, schedule, target, workspace_limit)
            if isinstance(outcome, Accepted):
                tunables = schedule.only(op.kernel_tunables)
                # One object per kernel: its id is computed once for all candidates that differ only at launch.
                kernel = kernels.get(tunables) or kernels.setdefault(tunables, Kernel.of(op.name, signature, tunables))
                outcome = check_deterministic(not deterministic or op.deterministic(kernel)) or ACCEPTED
            if isinstance(outcome, Rejected):
                _count(rejections, schedule, outcome)
                continue
            candidates.append(Candidate(problem, schedule, kernel))
            progress.accepted += 1
            progress.candidates = len(candidates)
            if progress.accepted == space.limit:
                break
    except _Stopped as stopped:
        return Lowered((), rejections, size, str(stopped))
    if isinstance(candidates, list):
        return Lowered(tuple(candidates), rejections, size)
    choice = candidates.choice()
    return Lowered(choice.kept, {**rejections, **_left_out(choice)}, size)


def _every(count: int, check: Check, progress: Progress) -> Callable[[], None]:
    """A step that calls `check` the first time and then every `count` times."""
    steps = 0

    def step() -> None:
        nonlocal steps
        if steps % count == 0 and (reason := check(progress)) is not None:
            raise _Stopped(reason)
        steps += 1

    return step


def _count(rejections: dict[str, Rejection], schedule: Schedule, outcome: Rejected) -> None:
    first = rejections.get(outcome.rule)
    if first is None:
        rejections[outcome.rule] = Rejection(1, schedule.as_dict(), outcome.message)
    else:
        rejections[outcome.rule] = Rejection(first.count + 1, first.example, first.message)


def _left_out(choice: Choice) -> dict[str, Rejection]:
    """Counted like what a rule rejects, though it broke none; the example is the best of them."""
    if choice.best_left is None:
        return {}
    example, us = choice.best_left
    most = f"{len(choice.kept)} that are predicted fastest, at most {choice.slowest_us:.2f} us"
    message = f"predicted {us:.2f} us before compiling; kept are the {most}"
    return {KEEP_RULE: Rejection(choice.left, example.schedule.as_dict(), message)}
