"""Conv2d_dgrad's search spaces: those of each algorithm that is worth trying for a problem on a target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from codegen.operators.conv2d import direct as forward
from codegen.operators.conv2d import implicit as forward_implicit
from codegen.operators.conv2d.space import ALGORITHM, MANY_FILTERS, default_of, together
from codegen.operators.conv2d_dgrad import direct, implicit
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.operators.conv2d_dgrad.residue_classes import largest
from codegen.search.joined_space import Kind, build_joined
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable
from codegen.targets import Target

# The order of those chosen at launch is the launch ABI's: raster, split_k, stream_blocks.
TUNABLES = together(forward_implicit.SIMT_TUNABLES, forward_implicit.TENSOR_TUNABLES, forward.TUNABLES)


def space(
    problem: Conv2dDgradProblem, target: Target, search: Search, admit: Callable[[Schedule], Accepted | Rejected]
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
    return build_joined(search, ALGORITHM, every, kinds, _default(problem, target, admit))


def _default(problem: Conv2dDgradProblem, target: Target, admit: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """The level-0 schedule: directly where both the channels and the filters of a group are few; the other way where no
    schedule of that one is left."""
    directly = None
    if direct.worth(problem):
        directly = partial(forward.default, largest(problem), forward.window_of(problem), admit)
    as_product = None if problem.depthwise else partial(implicit.default, problem, target, admit)
    few = problem.group_filters <= forward.MOST_CHANNELS and problem.group_channels < MANY_FILTERS
    return default_of(directly, as_product, admit, direct_first=few)
