"""What is searched: the schedules of a request, and whether an earlier search has tried them all.

`keep` comes after a `limit`: of the accepted schedules (of the sample, where there is one) those that are predicted
fastest before anything is compiled.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, model_validator

from codegen.canonical import LARGEST_INTEGER, as_integer
from codegen.problem import refuse
from codegen.search.schedule import Schedule, Value

MAX_LIMIT = 100_000
MAX_SCHEDULES = 10_000
MAX_VALUES = 64
MAX_TUNABLES = 64


def _as_value(value: Any) -> Any:
    """One error where the union would have one for each type."""
    value = as_integer(value)
    if type(value) not in (int, str):
        raise refuse("search_value", "Input should be an integer or a string")
    return value


SearchValue = Annotated[StrictInt | StrictStr, BeforeValidator(_as_value)]
Name = Annotated[StrictStr, Field(min_length=1, max_length=64)]


class Search(BaseModel):
    """Which schedules to try: a level, value lists per tunable, or explicit schedules; at most `limit` accepted ones,
    and of those only the `keep` that are predicted fastest.

    Tunables that `tunables` does not name take their level-1 values, those that one of `schedules` leaves out their
    defaults. Without any of the three the level is 1. The
    prediction is no measurement: without `keep` everything that breaks no rule is compiled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Annotated[Annotated[int, Field(strict=True, ge=0, le=2)] | None, BeforeValidator(as_integer)] = None
    tunables: (
        Annotated[
            dict[Name, Annotated[list[SearchValue], Field(min_length=1, max_length=MAX_VALUES)]],
            Field(min_length=1, max_length=MAX_TUNABLES),
        ]
        | None
    ) = None
    schedules: (
        Annotated[
            list[Annotated[dict[Name, SearchValue], Field(min_length=1, max_length=MAX_TUNABLES)]],
            Field(min_length=1, max_length=MAX_SCHEDULES),
        ]
        | None
    ) = None
    limit: Annotated[Annotated[int, Field(strict=True, ge=1, le=MAX_LIMIT)] | None, BeforeValidator(as_integer)] = None
    keep: Annotated[Annotated[int, Field(strict=True, ge=1, le=MAX_LIMIT)] | None, BeforeValidator(as_integer)] = None
    seed: Annotated[int, Field(strict=True, ge=0, le=LARGEST_INTEGER), BeforeValidator(as_integer)] = 0

    @model_validator(mode="before")
    @classmethod
    def _one_kind(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kinds = [name for name in ("level", "tunables", "schedules") if data.get(name) is not None]
        if len(kinds) > 1:
            raise refuse("one_search", f"give one of level, tunables and schedules; {' and '.join(kinds)} are given")
        return data if kinds else {**data, "level": 1}

    def canonical(self) -> dict[str, Any]:
        """JSON with only what matters: sorted, without repetition; no seed where nothing is sampled, no `keep` where
        there cannot be more schedules."""
        fields: dict[str, Any] = {}
        most = [] if self.limit is None else [self.limit]
        if self.tunables is not None:
            fields["tunables"] = {
                name: sorted(set(self.tunables[name]), key=value_order) for name in sorted(self.tunables)
            }
        elif self.schedules is not None:
            fields["schedules"] = [schedule.as_dict() for schedule in distinct(map(Schedule.of, self.schedules))]
            most.append(len(fields["schedules"]))
        else:
            fields["level"] = self.level
            most += [1] if self.level == 0 else []
        if self.limit is not None:
            fields |= {"limit": self.limit, "seed": self.seed}
        if self.keep is not None and not any(self.keep >= count for count in most):
            fields["keep"] = self.keep
        return fields


def value_order(value: Value) -> tuple[str, Value]:
    # Integers and strings do not compare with each other.
    return (type(value).__name__, value)


def distinct(schedules: Iterable[Schedule]) -> list[Schedule]:
    return sorted(
        set(schedules),
        key=lambda schedule: [(name, value_order(value)) for name, value in schedule.values],
    )


def covers(done: Search, asked: Search) -> bool:
    """Whether every schedule that `asked` tries was tried by `done`, for the same problem and target.

    Errs on the side of no: a value list is not compared with a level, because levels depend on problem and target.
    """
    chosen, wanted = done.canonical().get("keep"), asked.canonical().get("keep")
    done, asked = (search.model_copy(update={"keep": None}) for search in (done, asked))
    if chosen is not None:
        # Which are the best depends on all that were looked at: the best of a part need not be among them.
        return wanted is not None and wanted <= chosen and done.canonical() == asked.canonical()
    if done.limit is not None:
        same = (
            done.model_copy(update={"limit": None}).canonical() == asked.model_copy(update={"limit": None}).canonical()
        )
        return same and asked.limit is not None and asked.limit <= done.limit and asked.seed == done.seed
    if done.level is not None and asked.level is not None:
        return asked.level <= done.level
    if done.tunables is not None and asked.tunables is not None:
        # Tunables that one of the two leaves out take their level-1 values, which depend on problem and target.
        return done.tunables.keys() == asked.tunables.keys() and all(
            set(values) <= set(done.tunables[name]) for name, values in asked.tunables.items()
        )
    if done.schedules is not None and asked.schedules is not None:
        return set(map(Schedule.of, asked.schedules)) <= set(map(Schedule.of, done.schedules))
    return False
