"""Conv2d's tunables and search spaces: those of each algorithm that is worth trying for a problem on a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from codegen.joined_space import Kind, build_joined
from codegen.operators.conv2d import direct, implicit, separate
from codegen.operators.conv2d.problem import Conv2dProblem
from codegen.rules import Accepted, Rejected, first_accepted
from codegen.schedule import Schedule, Value
from codegen.search import Search
from codegen.search_space import Allowed, SearchSpace, Tunable
from codegen.targets import Target

ALGORITHM = "algorithm"
MEANING = "how the convolution is computed; each way has tunables of its own"
# From so many filters of a group on a product of matrices is the better first guess.
MANY_FILTERS = 8


def together(*kinds: tuple[Tunable, ...]) -> tuple[Tunable, ...]:
    """Every tunable once, with the values that any kind takes."""
    found: dict[str, Tunable] = {}
    for one in (tunable for kind in kinds for tunable in kind):
        known = found.get(one.name)
        if known is None:
            found[one.name] = one
        elif known.allowed != one.allowed:
            found[one.name] = Tunable(one.name, _both(known.allowed, one.allowed), one.launch_time, known.meaning)
    found[ALGORITHM] = Tunable(ALGORITHM, found[ALGORITHM].allowed, False, MEANING)
    return tuple(found.values())


def _both(one: Allowed, other: Allowed) -> Allowed:
    every = dict.fromkeys([*one, *other])
    return tuple(every) if any(isinstance(value, str) for value in every) else tuple(sorted(every))


# The order of those chosen at launch is the launch ABI's: raster, split_k, stream_blocks.
TUNABLES = together(implicit.SIMT_TUNABLES, implicit.TENSOR_TUNABLES, (*direct.TUNABLES, separate.TUNABLE))


def space(
    problem: Conv2dProblem, target: Target, search: Search, judge: Callable[[Schedule], Accepted | Rejected]
) -> SearchSpace:
    """The schedules of a search. Raises InvalidSearch."""
    every: dict[Value, tuple[Tunable, ...]] = {
        "implicit_gemm": (*implicit.tunables(problem, target), separate.TUNABLE),
        "direct": (*direct.TUNABLES, separate.TUNABLE),
    }
    kinds: dict[Value, Kind] = {}
    if not problem.depthwise:
        kinds["implicit_gemm"] = _fused(implicit.kind(problem, target, search))
    if direct.worth(problem):
        kinds["direct"] = _fused(Kind(direct.TUNABLES, direct.levels(problem, direct.window_of(problem))))
    default = separate.fused(_default(problem, target, judge))
    found = build_joined(search, ALGORITHM, every, kinds, default)
    by_level = search.level != 0 and search.tunables is None and search.schedules is None
    if not (problem.epilogue and by_level):
        return found
    launch_time = frozenset(one.name for one in TUNABLES if one.launch_time)
    alone = separate.alone(default)
    return replace(found, parts=(*found.parts, SearchSpace.of_one(alone, launch_time)), compared=(alone,))


def _fused(kind: Kind) -> Kind:
    """Levels try the separate epilogue once, not with every schedule."""
    levels = {level: {**lists, separate.NAME: ("fused",)} for level, lists in kind.levels.items()}
    return replace(kind, tunables=(*kind.tunables, separate.TUNABLE), levels=levels)


def _default(problem: Conv2dProblem, target: Target, judge: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """The level-0 schedule: directly where filters are few; the other way where no schedule of that one is left."""
    ways: list[Callable[[], Schedule]] = []
    if direct.worth(problem):
        ways.append(lambda: direct.default(problem, direct.window_of(problem), judge))
    if not problem.depthwise:
        ways.append(lambda: implicit.default(problem, target, judge))
    few = problem.group_filters < MANY_FILTERS
    return first_accepted((way() for way in (ways if few else ways[::-1])), judge)
