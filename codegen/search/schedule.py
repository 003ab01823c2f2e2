"""One value for every tunable, frozen and orderable."""

from collections.abc import Mapping
from dataclasses import dataclass

Value = int | str


@dataclass(frozen=True, order=True, slots=True)
class Schedule:
    """`values` are (name, value) pairs sorted by name; equal content is equal and hashes equally."""

    values: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> "Schedule":
        return cls(tuple(sorted(values.items())))

    def get(self, name: str) -> Value:
        """The value of a tunable; KeyError where the schedule has none of that name."""
        for tunable, value in self.values:
            if tunable == name:
                return value
        raise KeyError(f"the schedule has no tunable {name!r}; it has {', '.join(name for name, _ in self.values)}")

    def as_dict(self) -> dict[str, Value]:
        return dict(self.values)

    def only(self, names: frozenset[str]) -> "Schedule":
        """The part of the schedule that sets `names`."""
        return Schedule(tuple(pair for pair in self.values if pair[0] in names))
