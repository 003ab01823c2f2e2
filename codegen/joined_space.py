"""The space of a problem whose schedules are of several kinds, each with tunables of its own, as those of different
algorithms are: one space after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codegen.errors import InvalidSearch
from codegen.schedule import Schedule, Value
from codegen.search import Search, distinct
from codegen.search_space import (
    Linked,
    SearchSpace,
    Tunable,
    build_space,
    require_allowed,
    require_known,
    require_whole,
)


@dataclass(frozen=True)
class Kind:
    """Schedules of one kind: their tunables, the value lists of levels 1 and 2, and what goes together in them."""

    tunables: tuple[Tunable, ...]
    levels: Mapping[int, Mapping[str, tuple[Value, ...]]]
    linked: Mapping[int, Linked] | None = None


def build_joined(
    search: Search, by: str, every: Mapping[Value, Sequence[Tunable]], kinds: Mapping[Value, Kind], default: Schedule
) -> SearchSpace:
    """The schedules of a search. The tunable `by`, which each kind has with a single value, tells kinds apart.

    `every` has the tunables of all kinds that there are, `kinds` what levels and value lists try for this problem. A
    search that names a tunable tries the kinds that have it. `default` is in every level, whatever its lists are.
    Raises InvalidSearch.
    """
    allowed = {value: {one.name: one.allowed for one in tunables} for value, tunables in every.items()}
    if search.schedules is not None:
        for index, values in enumerate(search.schedules):
            where = f"search.schedules.{index}"
            if values.get(by) not in allowed:
                said = f"{by} = {values[by]!r} is not allowed" if by in values else f"schedule {index} has no {by!r}"
                words = ", ".join(map(str, allowed))
                raise InvalidSearch(f"{said}; allowed: {words}", field=f"{where}.{by}", allowed=list(allowed))
            require_whole(index, values, allowed[values[by]])
        return SearchSpace(
            schedules=tuple(distinct(search.schedules)), limit=search.limit, seed=search.seed, first=default
        )
    if search.level == 0:
        return SearchSpace(schedules=(default,), limit=search.limit, seed=search.seed, first=default)
    named = search.tunables or {}
    require_known(
        named, {name: tunables for one in allowed.values() for name, tunables in one.items()}, "search.tunables"
    )
    if by in named:
        require_allowed(by, named[by], tuple(allowed), f"search.tunables.{by}")
    parts = []
    for value, kind in kinds.items():
        own = {one.name for one in kind.tunables}
        if value in named.get(by, [value]) and named.keys() <= own:
            rest = {name: values for name, values in named.items() if name != by}
            part = search.model_copy(update={"tunables": rest or None, "level": None if rest else search.level or 1})
            parts.append(build_space(part, kind.tunables, kind.levels, default, kind.linked))
    if not parts:
        tried = " and ".join(f"{by} = {value}" for value in kinds)
        raise InvalidSearch(
            f"{', '.join(sorted(named))} leave nothing of what this problem can be computed by: {tried}",
            field="search.tunables",
            allowed=sorted({one.name for kind in kinds.values() for one in kind.tunables}),
        )
    if not named and all(part.index_of(default) is None for part in parts):
        launch_time = frozenset(one.name for kind in kinds.values() for one in kind.tunables if one.launch_time)
        parts.append(SearchSpace.of_one(default, launch_time))
    return SearchSpace(limit=search.limit, seed=search.seed, first=default, parts=tuple(parts))
