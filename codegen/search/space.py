"""Search spaces: the schedules of a search, enumerable by index without being materialised.

A space is the product of value lists (or an explicit list), or several such spaces one after the other. A search's
`limit` samples it: the schedules come in an order that only the seed decides, so a smaller limit is always a prefix of
a larger one; kernel by kernel, so that a model's problems try the same ones.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product

from codegen.errors import InvalidSearch, UnknownTunable
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search, distinct, value_order

Allowed = tuple[Value, ...] | range
"""The values that a tunable may take: listed, or every integer of a range."""


@dataclass(frozen=True)
class Tunable:
    """One knob: every value a search may name; `levels` 1 and 2 are the operator's choice per problem.

    `default`: of a schedule that a request names without it, and of a level that has no list for it; it never changes.
    `constant`: whether the kernel's Config has it, as a number (see `number`). `later`: it was added to an operator of
    which schedules are stored: at its default it is in no schedule, so that what was known by an id stays known.
    """

    name: str
    allowed: Allowed
    launch_time: bool
    meaning: str
    default: Value
    constant: bool = True
    later: bool = False

    def __post_init__(self) -> None:
        if not self.allowed or (isinstance(self.allowed, range) and self.allowed.step != 1):
            raise ValueError(f"{self.name}: allowed is a list of values or a range of all integers between two")
        if self.default not in self.allowed:
            raise ValueError(f"{self.name}: the default {self.default!r} is not among {allowed_text(self.allowed)}")

    def number(self, values: Mapping[str, Value]) -> int:
        """Of a schedule's values the one that code reads; of a word its place among those that are allowed."""
        value = values.get(self.name, self.default)
        return tuple(self.allowed).index(value) if isinstance(value, str) else value


def allowed_json(allowed: Allowed) -> list[Value] | dict[str, int]:
    """What is allowed, as JSON: the values, or the two ends of a range in the words of JSON Schema."""
    if isinstance(allowed, range):
        return {"minimum": allowed[0], "maximum": allowed[-1]}
    return list(allowed)


def union(first: Iterable[Value], second: Iterable[Value]) -> tuple[Value, ...]:
    """The values of both: numbers in ascending order, words in the order of `first`."""
    values = dict.fromkeys([*first, *second])
    return tuple(values) if any(isinstance(value, str) for value in values) else tuple(sorted(values))


def allowed_text(allowed: Allowed) -> str:
    """What is allowed, in a sentence: `16, 32, 64`, or `1 to 1024`."""
    if isinstance(allowed, range):
        return f"{allowed[0]} to {allowed[-1]}"
    return ", ".join(map(str, allowed))


@dataclass(frozen=True)
class Linked:
    """Tunables whose values make sense only together: one digit of a space's index chooses a value for each of them."""

    names: tuple[str, ...]
    choices: tuple[tuple[Value, ...], ...]

    @property
    def lists(self) -> dict[str, tuple[Value, ...]]:
        """What each of them takes in some choice."""
        return {name: tuple(dict.fromkeys(choice[i] for choice in self.choices)) for i, name in enumerate(self.names)}


def launch_time_names(tunables: Iterable[Tunable]) -> frozenset[str]:
    """Those that do not make another kernel."""
    return frozenset(tunable.name for tunable in tunables if tunable.launch_time)


def later_defaults(tunables: Iterable[Tunable]) -> frozenset[tuple[str, Value]]:
    """What schedules do not name."""
    return frozenset((tunable.name, tunable.default) for tunable in tunables if tunable.later)


def completed(values: Mapping[str, Value], tunables: Iterable[Tunable]) -> Schedule:
    """The schedule of these values: what they leave out has its default."""
    whole = {**{tunable.name: tunable.default for tunable in tunables}, **values}
    return Schedule(tuple(sorted(whole.items() - later_defaults(tunables))))


_Pairs = tuple[tuple[str, Value], ...]


@dataclass(frozen=True)
class SearchSpace:
    """Schedules by index. `first` (the level-0 default) leads a sample, so the smallest sample is a sane one; then come
    `compared`, which the others are to be seen beside. `launch_time`: the tunables that do not make another kernel."""

    values: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    linked: tuple[Linked, ...] = ()
    schedules: tuple[Schedule, ...] | None = None
    limit: int | None = None
    seed: int = 0
    first: Schedule | None = None
    launch_time: frozenset[str] = frozenset()
    # Spaces of schedules with different tunables; then there are no values, linked tunables or schedules here.
    parts: "tuple[SearchSpace, ...]" = ()
    compared: tuple[Schedule, ...] = ()
    # Values of tunables that no schedule names.
    unnamed: frozenset[tuple[str, Value]] = frozenset()

    @classmethod
    def of_one(cls, schedule: Schedule, launch_time: frozenset[str]) -> "SearchSpace":
        """A single schedule, which may be a part."""
        return cls(values=tuple((name, (value,)) for name, value in schedule.values), launch_time=launch_time)

    @cached_property
    def axes(self) -> tuple[Linked, ...]:
        """The digits of an index, the last one fastest: each list alone, by name, then what goes together."""
        alone = (Linked((name,), tuple((value,) for value in values)) for name, values in sorted(self.values))
        return (*alone, *self.linked)

    @cached_property
    def size(self) -> int:
        """How many schedules there are before any rule."""
        if self.parts:
            return sum(part.size for part in self.parts)
        return len(self.schedules) if self.schedules is not None else math.prod(len(axis.choices) for axis in self.axes)

    @property
    def tunables(self) -> dict[str, tuple[Value, ...]]:
        """The value lists, but for those of `parts`."""
        return {name: values for axis in self.axes for name, values in axis.lists.items()}

    def by_index(self, index: int) -> Schedule:
        """The schedule at 0 <= index < size."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is outside a space of {self.size} schedules")
        for part in self.parts:
            if index < part.size:
                return part.by_index(index)
            index -= part.size
        if self.schedules is not None:
            return self.schedules[index]
        chosen: list[_Pairs] = []
        for choices in reversed(self._choices):
            index, digit = divmod(index, len(choices))
            chosen.append(choices[digit])
        return self._by_name(chosen)

    @cached_property
    def _choices(self) -> list[list[_Pairs]]:
        """Of each axis the tunables that a choice sets."""
        return [[tuple(zip(axis.names, choice, strict=True)) for choice in axis.choices] for axis in self.axes]

    def _by_name(self, chosen: Iterable[_Pairs]) -> Schedule:
        """The schedule of a choice of each axis."""
        return self._schedule(sorted(chain.from_iterable(chosen)))

    def index_of(self, schedule: Schedule) -> int | None:
        """Where the space has `schedule`; None where it does not."""
        before = 0
        for part in self.parts:
            if (inside := part.index_of(schedule)) is not None:
                return before + inside
            before += part.size
        if self.parts:
            return None
        if self.schedules is not None:
            return self.schedules.index(schedule) if schedule in self.schedules else None
        chosen = {**{name: value for name, value in self.unnamed if name in self.tunables}, **schedule.as_dict()}
        if chosen.keys() != self.tunables.keys():
            return None
        index = 0
        for axis in self.axes:
            choice = tuple(chosen[name] for name in axis.names)
            if choice not in axis.choices:
                return None
            index = index * len(axis.choices) + axis.choices.index(choice)
        return index

    def __iter__(self) -> Iterator[Schedule]:
        return self.walk()

    def walk(self, step: Callable[[], object] = lambda: None) -> Iterator[Schedule]:
        """All schedules: in index order without a limit; with one, `first` and `compared`, then an order that the seed
        decides.

        The limit itself counts accepted schedules, so it is applied where the rules are. `step` is called for each
        index, also where a sample passes over one without a schedule: what it raises ends the walk.
        """
        if self.limit is None:
            for schedule in self._in_order():
                step()
                yield schedule
            return
        wanted = (*(() if self.first is None else (self.first,)), *self.compared)
        leading = [schedule for schedule in wanted if self.index_of(schedule) is not None]
        for schedule in leading:
            step()
            yield schedule
        sample = self._sample(step) if self.schedules is None else self._at(permuted(self.size, self.seed), step)
        yield from (schedule for schedule in sample if schedule not in leading)

    def _in_order(self) -> Iterator[Schedule]:
        """As `by_index`, from the first to the last."""
        if self.parts:
            return chain.from_iterable(part._in_order() for part in self.parts)
        return iter(self.schedules) if self.schedules is not None else map(self._by_name, product(*self._choices))

    def _at(self, indices: Iterable[int], step: Callable[[], object]) -> Iterator[Schedule]:
        for index in indices:
            step()
            yield self.by_index(index)

    def _sample(self, step: Callable[[], object]) -> Iterator[Schedule]:
        """Every schedule once: each kernel with one of its launch-time choices, then each with another, and so on.

        The order of the kernels depends on the seed and on what the kernels can be, not on how many launch-time choices
        there are: the layers of a model, whose spaces often differ in the latter alone, try the same kernels, and each
        of those is compiled once.
        """
        spaces = [(part, part._kernel_axes()) for part in self.parts or (self,)]
        kernels = [math.prod(map(len, axes)) for _, axes in spaces]
        most = max(math.prod(max(len(choices) for _, choices in axis) for axis in axes) for _, axes in spaces)
        for turn in range(most):
            for number in permuted(sum(kernels), self.seed):
                step()
                taken = []
                left = number
                which = 0
                while left >= kernels[which]:
                    left -= kernels[which]
                    which += 1
                space, axes = spaces[which]
                for axis in axes:
                    left, digit = divmod(left, len(axis))
                    taken.append(axis[digit])
                count = math.prod(len(choices) for _, choices in taken)
                if turn >= count:
                    continue
                left = (_mix(self.seed, number) + turn) % count
                chosen: list[tuple[str, Value]] = []
                for made, choices in taken:
                    left, digit = divmod(left, len(choices))
                    chosen += [*made, *choices[digit]]
                yield space._schedule(sorted(chosen))

    def _schedule(self, pairs: Iterable[tuple[str, Value]]) -> Schedule:
        return Schedule(tuple(pair for pair in pairs if pair not in self.unnamed) if self.unnamed else tuple(pairs))

    def _kernel_axes(self) -> list[list[tuple[_Pairs, list[_Pairs]]]]:
        """Of each axis what it can make of a kernel, and the launch-time choices of that."""
        axes = []
        for axis in self.axes:
            options: dict[_Pairs, list[_Pairs]] = {}
            for choice in axis.choices:
                pairs = tuple(zip(axis.names, choice, strict=True))
                made = tuple(pair for pair in pairs if pair[0] not in self.launch_time)
                options.setdefault(made, []).append(tuple(pair for pair in pairs if pair[0] in self.launch_time))
            axes.append(list(options.items()))
        return axes


def permuted(size: int, seed: int) -> Iterator[int]:
    """Every index below `size` once, in an order that `seed` decides, without a list of them.

    A four-round Feistel network on the next even number of bits, walking cycles until it falls below `size`
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = [_mix(seed, round_) for round_ in range(4)]
    for start in range(size):
        index = start
        while True:
            left, right = index >> half, index & mask
            for key in keys:
                left, right = right, left ^ (_mix(key, right) & mask)
            index = left << half | right
            if index < size:
                break
        yield index


def _mix(key: int, value: int) -> int:
    """64 well-mixed bits (the finaliser of SplitMix64: Steele, Lea and Flood, OOPSLA 2014)."""
    word = (key * 0x9E3779B97F4A7C15 + value * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return word ^ word >> 31


def build_space(
    search: Search,
    tunables: Sequence[Tunable],
    levels: Mapping[int, Mapping[str, tuple[Value, ...]]],
    default: Schedule,
    linked: Mapping[int, Linked] | None = None,
    every_way: Linked | None = None,
) -> SearchSpace:
    """The space of a search. `levels` has the value lists of levels 1 and 2, and `linked` what goes together in them;
    level 0 is `default` alone. A search that names one of the linked tunables takes every combination of its lists:
    those of `every_way`, where there is one, because with the few choices of level 1 such a list may leave nothing.

    Raises InvalidSearch, which names the tunable or value at fault and what is allowed.
    """
    allowed = {tunable.name: tunable.allowed for tunable in tunables}
    values: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    schedules: tuple[Schedule, ...] | None = None
    together = (linked[1 if search.level is None else search.level],) if linked and search.level != 0 else ()
    levels = {
        level: {**{t.name: (t.default,) for t in tunables if not linked or t.name not in linked[level].names}, **lists}
        for level, lists in levels.items()
    }
    if search.schedules is not None:
        schedules = tuple(distinct(require_listed(i, values, tunables) for i, values in enumerate(search.schedules)))
        together = ()
    elif search.tunables is not None:
        lists = dict(levels[1])
        if any(name in search.tunables for axis in together for name in axis.names):
            for axis in (every_way,) if every_way else together:
                lists |= axis.lists
            together = ()
        values = _with_lists(lists, search.tunables, allowed)
    elif search.level == 0:
        schedules = (default,)
    else:
        values = tuple(levels[search.level or 1].items())
    at_launch = launch_time_names(tunables)
    unnamed = later_defaults(tunables)
    return SearchSpace(values, together, schedules, search.limit, search.seed, default, at_launch, unnamed=unnamed)


def require_listed(index: int, values: Mapping[str, Value], tunables: Sequence[Tunable]) -> Schedule:
    """The schedule that a request names: a value that is allowed for each of these tunables, or none."""
    where = f"search.schedules.{index}"
    allowed = {tunable.name: tunable.allowed for tunable in tunables}
    require_known(values, allowed, where)
    for name, value in values.items():
        require_allowed(name, [value], allowed[name], f"{where}.{name}")
    return completed(values, tunables)


def _with_lists(
    level: Mapping[str, tuple[Value, ...]],
    named: Mapping[str, Sequence[Value]],
    allowed: Mapping[str, Allowed],
) -> tuple[tuple[str, tuple[Value, ...]], ...]:
    require_known(named, allowed, "search.tunables")
    lists = dict(level)
    for name, values in named.items():
        require_allowed(name, values, allowed[name], f"search.tunables.{name}")
        lists[name] = tuple(sorted(set(values), key=value_order))
    return tuple(lists.items())


def require_known(names: Iterable[str], allowed: Mapping[str, Allowed], where: str) -> None:
    for name in names:
        if name not in allowed:
            raise UnknownTunable(
                f"unknown tunable {name!r}; allowed: {', '.join(sorted(allowed))}",
                field=f"{where}.{name}",
                allowed=sorted(allowed),
            )


def require_allowed(name: str, values: Sequence[Value], allowed: Allowed, where: str) -> None:
    for value in values:
        if value not in allowed:
            raise InvalidSearch(
                f"{name} = {value!r:.60} is not allowed; allowed: {allowed_text(allowed)}",
                field=where,
                allowed=allowed_json(allowed),
            )
