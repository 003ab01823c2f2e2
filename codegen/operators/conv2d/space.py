"""Conv2d's tunables and search spaces: those of each algorithm that is worth trying for a problem on a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from codegen.operators.conv2d import direct, implicit, unfused_epilogue
from codegen.operators.conv2d.problem import Conv2dProblem
from codegen.search.joined_space import Kind, build_joined
from codegen.search.rules import Accepted, Rejected, first_accepted
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable, launch_time_names, union
from codegen.targets import Target

ALGORITHM = "algorithm"
MEANING = "how the convolution is computed; each way has tunables of its own"
# From so many filters of a group on a product of matrices is the better first guess.
MANY_FILTERS = 8


def together(*kinds: tuple[Tunable, ...]) -> tuple[Tunable, ...]:
    """Every tunable once, with the values that any kind takes."""
    by_name: dict[str, Tunable] = {}
    for added in (tunable for kind in kinds for tunable in kind):
        former = by_name.get(added.name)
        if former is None:
            by_name[added.name] = added
        elif former.allowed != added.allowed:
            by_name[added.name] = replace(former, allowed=union(former.allowed, added.allowed))
    by_name[ALGORITHM] = replace(by_name[ALGORITHM], meaning=MEANING)
    return tuple(by_name.values())


# The order of those chosen at launch is the launch ABI's: raster, split_k, stream_blocks.
TUNABLES = together(implicit.SIMT_TUNABLES, implicit.TENSOR_TUNABLES, (*direct.TUNABLES, unfused_epilogue.TUNABLE))


def space(
    problem: Conv2dProblem, target: Target, search: Search, admit: Callable[[Schedule], Accepted | Rejected]
) -> SearchSpace:
    """The schedules of a search. Raises InvalidSearch."""
    every: dict[Value, tuple[Tunable, ...]] = {
        "implicit_gemm": (*implicit.tunables(problem, target), unfused_epilogue.TUNABLE),
        "direct": (*direct.TUNABLES, unfused_epilogue.TUNABLE),
    }
    kinds: dict[Value, Kind] = {}
    if not problem.depthwise:
        kinds["implicit_gemm"] = _fused(implicit.kind(problem, target, search))
    if direct.worth(problem):
        kinds["direct"] = _fused(Kind(direct.TUNABLES, direct.levels(problem, direct.window_of(problem))))
    default = unfused_epilogue.fused(_default(problem, target, admit))
    joined = build_joined(search, ALGORITHM, every, kinds, default)
    by_level = search.level != 0 and search.tunables is None and search.schedules is None
    if not (problem.epilogue and by_level):
        return joined
    alone = unfused_epilogue.alone(default)
    part = SearchSpace.of_one(alone, launch_time_names(TUNABLES))
    return replace(joined, parts=(*joined.parts, part), compared=(alone,))


def _fused(kind: Kind) -> Kind:
    """Levels try the separate epilogue once, not with every schedule."""
    levels = {level: {**lists, unfused_epilogue.NAME: ("fused",)} for level, lists in kind.levels.items()}
    return replace(kind, tunables=(*kind.tunables, unfused_epilogue.TUNABLE), levels=levels)


def _default(problem: Conv2dProblem, target: Target, admit: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """The level-0 schedule: directly where filters are few; the other way where no schedule of that one is left."""
    directly = partial(direct.default, problem, direct.window_of(problem), admit) if direct.worth(problem) else None
    as_product = None if problem.depthwise else partial(implicit.default, problem, target, admit)
    return default_of(directly, as_product, admit, direct_first=problem.group_filters < MANY_FILTERS)


def default_of(
    directly: Callable[[], Schedule] | None,
    as_product: Callable[[], Schedule] | None,
    admit: Callable[[Schedule], Accepted | Rejected],
    *,
    direct_first: bool,
) -> Schedule:
    """The first algorithm's default, or the other's where that breaks a rule. None: the problem is not tried so."""
    order = (directly, as_product) if direct_first else (as_product, directly)
    return first_accepted((default() for default in order if default is not None), admit)
