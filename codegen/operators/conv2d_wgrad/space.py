"""Conv2d_wgrad's tunables and search spaces: those of each algorithm that is worth trying for a problem on a target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from codegen.operators.conv2d.implicit import SIMT_TUNABLES, TENSOR_TUNABLES
from codegen.operators.conv2d.space import ALGORITHM, MANY_FILTERS, default_of, together
from codegen.operators.conv2d_wgrad import direct, implicit
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from codegen.search.joined_space import Kind, build_joined
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable
from codegen.targets import Target

# The order of those chosen at launch is the launch ABI's: raster, split_k, stream_blocks.
TUNABLES = together(SIMT_TUNABLES, TENSOR_TUNABLES, direct.TUNABLES)


def space(
    problem: Conv2dWgradProblem, target: Target, search: Search, admit: Callable[[Schedule], Accepted | Rejected]
) -> SearchSpace:
    """The schedules of a search. Raises InvalidSearch."""
    every: dict[Value, tuple[Tunable, ...]] = {
        "implicit_gemm": implicit.tunables(problem, target),
        "direct": direct.TUNABLES,
    }
    kinds: dict[Value, Kind] = {}
    if not problem.depthwise:
        kinds["implicit_gemm"] = implicit.kind(problem, target, search)
    if problem.one_channel:
        kinds["direct"] = direct.kind(problem, target)
    return build_joined(search, ALGORITHM, every, kinds, _default(problem, target, admit))


def _default(problem: Conv2dWgradProblem, target: Target, admit: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """The level-0 schedule: directly where filters are few; the other way where no schedule of that one is left."""
    directly = partial(direct.default, problem, target, admit) if problem.one_channel else None
    as_product = None if problem.depthwise else partial(implicit.default, problem, target, admit)
    return default_of(directly, as_product, admit, direct_first=problem.group_filters < MANY_FILTERS)
