"""The space of a problem whose schedules are of several kinds, each with tunables of its own, as those of different
algorithms are: one space after the other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from codegen.errors import InvalidSearch
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search, distinct
from codegen.search.space import (
    Linked,
    SearchSpace,
    Tunable,
    build_space,
    launch_time_names,
    require_allowed,
    require_known,
    require_listed,
    union,
)


@dataclass(frozen=True)
class Kind:
    """Schedules of one kind: their tunables, the value lists of levels 1 and 2, and what goes together in them, and in
    searches that name one of what goes together."""

    tunables: tuple[Tunable, ...]
    levels: Mapping[int, Mapping[str, tuple[Value, ...]]]
    linked: Mapping[int, Linked] | None = None
    every_way: Linked | None = None


def together(kinds: Iterable[Iterable[Tunable]], by: str, meaning: str) -> tuple[Tunable, ...]:
    """Every tunable once, with the values that any kind takes; `by` tells kinds apart."""
    by_name: dict[str, Tunable] = {}
    for tunable in (tunable for kind in kinds for tunable in kind):
        former = by_name.setdefault(tunable.name, tunable)
        if former.allowed != tunable.allowed:
            by_name[tunable.name] = replace(former, allowed=union(former.allowed, tunable.allowed))
    return tuple(replace(tunable, meaning=meaning) if name == by else tunable for name, tunable in by_name.items())


def build_joined(
    search: Search, by: str, every: Mapping[Value, Sequence[Tunable]], kinds: Mapping[Value, Kind], default: Schedule
) -> SearchSpace:
    """The schedules of a search. The tunable `by`, which each kind has with a single value, tells kinds apart; a
    schedule that is named without it is of the first kind of `every`.

    `every` has the tunables of all kinds that there are, `kinds` what levels and value lists try for this problem. A
    search that names a tunable tries the kinds that have it. `default` is in every level, whatever its lists are.
    Raises InvalidSearch.
    """
    allowed = {value: {tunable.name: tunable.allowed for tunable in tunables} for value, tunables in every.items()}
    if search.schedules is not None:
        listed = []
        for index, values in enumerate(search.schedules):
            kind_of = values.get(by, next(iter(every)))
            require_allowed(by, [kind_of], tuple(every), f"search.schedules.{index}.{by}")
            listed.append(require_listed(index, values, every[kind_of]))
        return SearchSpace(schedules=tuple(distinct(listed)), limit=search.limit, seed=search.seed, first=default)
    if search.level == 0:
        return SearchSpace(schedules=(default,), limit=search.limit, seed=search.seed, first=default)
    named = search.tunables or {}
    require_known(
        named, {name: tunables for of_kind in allowed.values() for name, tunables in of_kind.items()}, "search.tunables"
    )
    if by in named:
        require_allowed(by, named[by], tuple(allowed), f"search.tunables.{by}")
    parts = []
    for value, kind in kinds.items():
        own = {tunable.name for tunable in kind.tunables}
        if value in named.get(by, [value]) and named.keys() <= own:
            rest = {name: values for name, values in named.items() if name != by}
            part = search.model_copy(update={"tunables": rest or None, "level": None if rest else search.level or 1})
            parts.append(build_space(part, kind.tunables, kind.levels, default, kind.linked, kind.every_way))
    if not parts:
        tried = " and ".join(f"{by} = {value}" for value in kinds)
        if named.keys() == {by}:
            spelled = " or ".join(map(str, named[by]))
            message = f"{by} = {spelled} does not compute this problem: {tried} can"
            raise InvalidSearch(message, field=f"search.tunables.{by}", allowed=list(kinds))
        leave = "leaves" if len(named) == 1 else "leave"
        raise InvalidSearch(
            f"{', '.join(sorted(named))} {leave} nothing of what this problem can be computed by: {tried}",
            field="search.tunables",
            allowed=sorted({tunable.name for kind in kinds.values() for tunable in kind.tunables}),
        )
    if not named and all(part.index_of(default) is None for part in parts):
        every_tunable = (tunable for kind in kinds.values() for tunable in kind.tunables)
        parts.append(SearchSpace.of_one(default, launch_time_names(every_tunable)))
    return SearchSpace(limit=search.limit, seed=search.seed, first=default, parts=tuple(parts))
