"""From a problem and a search to candidates: every rejected schedule is counted, none is dropped silently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from codegen.kernel import Candidate, Kernel
from codegen.operators import operator
from codegen.predict_before import Choice, best_predicted
from codegen.problem import Problem
from codegen.rules import ACCEPTED, Accepted, Rejected, check_deterministic
from codegen.schedule import Schedule
from codegen.search import Search
from codegen.targets import Target

# Under this name stands what `search.keep` left out.
KEEP_RULE = "keep"


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
    """`space_size` counts the schedules before any rule; with a limit not all of them were looked at."""

    candidates: tuple[Candidate, ...]
    rejections: Mapping[str, Rejection] = field(default_factory=dict)
    space_size: int = 0

    @property
    def why_empty(self) -> str | None:
        """The rules that emptied the search space; None where a candidate is left. `keep` never does."""
        if self.candidates:
            return None
        by_count = sorted(self.rejections.items(), key=lambda item: (-item[1].count, item[0]))
        told = "; ".join(f"{rule} rejected {found.count} (e.g. {found.message})" for rule, found in by_count)
        return f"no schedule of the {self.space_size} in the search space is left: {told}"


def lower(
    problem: Problem,
    target: Target,
    search: Search,
    workspace_limit: int | None = None,
    *,
    deterministic: bool = False,
) -> Lowered:
    """The candidates in the order of the space, at most `search.limit`; of those the `search.keep` that are predicted
    fastest, where that is given. Raises InvalidSearch.

    `workspace_limit` (bytes) and `deterministic` (the same bits in every run) are the request's policy: what breaks it
    is rejected like what breaks a rule.
    """
    op = operator(problem.operator)
    space = op.space(problem, target, search)
    signature = op.signature(problem)
    kernels: dict[Schedule, Kernel] = {}
    candidates: list[Candidate] = []
    rejected: dict[str, list[tuple[Schedule, str]]] = {}
    counts: dict[str, int] = {}
    for schedule in space:
        outcome = op.rules(problem, schedule, target, workspace_limit)
        if isinstance(outcome, Accepted):
            tunables = schedule.only(op.kernel_tunables)
            # One object per kernel: its id is computed once for all candidates that differ only at launch.
            kernel = kernels.get(tunables) or kernels.setdefault(tunables, Kernel.of(op.name, signature, tunables))
            outcome = check_deterministic(not deterministic or op.deterministic(kernel)) or ACCEPTED
        if isinstance(outcome, Rejected):
            counts[outcome.rule] = counts.get(outcome.rule, 0) + 1
            rejected.setdefault(outcome.rule, [(schedule, outcome.message)])
            continue
        candidates.append(Candidate(problem, schedule, kernel))
        if len(candidates) == space.limit:
            break
    rejections = {
        rule: Rejection(counts[rule], examples[0][0].as_dict(), examples[0][1]) for rule, examples in rejected.items()
    }
    if search.keep is not None and len(candidates) > search.keep:
        choice = best_predicted(candidates, search.keep, target)
        return Lowered(choice.kept, {**rejections, KEEP_RULE: _left_out(choice)}, space.size)
    return Lowered(tuple(candidates), rejections, space.size)


def _left_out(choice: Choice) -> Rejection:
    """Counted like what a rule rejects, though it broke none; the example is the best of them."""
    example, us = choice.left[0]
    most = f"{len(choice.kept)} that are predicted fastest, at most {choice.slowest_us:.2f} us"
    message = f"predicted {us:.2f} us before compiling; kept are the {most}"
    return Rejection(len(choice.left), example.schedule.as_dict(), message)
