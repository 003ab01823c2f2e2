"""Conv2d_dgrad's search spaces: those of each algorithm that is worth trying for a problem on a target. The tunables
are conv2d's."""

from __future__ import annotations

from collections.abc import Callable

from codegen.joined_space import Kind, build_joined
from codegen.operators.conv2d import direct as forward
from codegen.operators.conv2d.space import ALGORITHM, MANY_FILTERS
from codegen.operators.conv2d_dgrad import direct, implicit
from codegen.operators.conv2d_dgrad.phases import largest
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.rules import Accepted, Rejected, first_accepted
from codegen.schedule import Schedule, Value
from codegen.search import Search
from codegen.search_space import SearchSpace, Tunable
from codegen.targets import Target


def space(
    problem: Conv2dDgradProblem, target: Target, search: Search, judge: Callable[[Schedule], Accepted | Rejected]
) -> SearchSpace:
    """The schedules of a search. Raises InvalidSearch."""
    every: dict[Value, tuple[Tunable, ...]] = {
        "implicit_gemm": implicit.tunables(problem, target),
        "direct": forward.TUNABLES,
    }
    kinds: dict[Value, Kind] = {}
    if not problem.depthwise:
        kinds["implicit_gemm"] = implicit.kind(problem, target, search)
    if direct.worth(problem):
        kinds["direct"] = Kind(forward.TUNABLES, forward.levels(largest(problem), forward.window_of(problem)))
    return build_joined(search, ALGORITHM, every, kinds, _default(problem, target, judge))


def _default(problem: Conv2dDgradProblem, target: Target, judge: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """The level-0 schedule: directly where both the channels and the filters of a group are few; the other way where no
    schedule of that one is left."""
    ways: list[Callable[[], Schedule]] = []
    if direct.worth(problem):
        ways.append(lambda: forward.default(largest(problem), forward.window_of(problem), judge))
    if not problem.depthwise:
        ways.append(lambda: implicit.default(problem, target, judge))
    few = problem.group_filters <= forward.MOST_CHANNELS and problem.group_channels < MANY_FILTERS
    return first_accepted((way() for way in (ways if few else ways[::-1])), judge)
