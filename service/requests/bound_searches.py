"""A job's searches before anything is written: tunables that exist, and sizes (computed, never enumerated) and limits
within the settings' bounds. Problems of one signature share a look, and another is taken only near the bound, since the
size depends on the problem only by lists that the search does not name. The plan step looks at each again."""

import json
from dataclasses import dataclass, replace

from codegen.errors import InvalidSearch, SpaceTooLarge, UnknownTunable
from codegen.operator import Operator
from codegen.problem import Problem
from codegen.search.search import Search
from codegen.search.space_bound import require_bounded
from codegen.targets import target as data_sheet
from service.http.errors import Fault, json_path
from service.http.faults import Path, fault_of_codegen
from storage.config.settings import Settings

NEAR = 64
"""A size times this is more than lists that a search does not name can make of it."""
MOST_LOOKS = 1_000  # at further problems of a signature, in one request: 0.2 to 2 ms each


@dataclass(frozen=True)
class _Look:
    size: int = 0
    fault: Fault | None = None


class SearchChecks:
    """Of one request, whose searches are kept alive by it: equal ids are equal searches."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._looks: dict[tuple[str, str, str, int], _Look] = {}
        self._looks_left = MOST_LOOKS
        self._listed = 0  # by signature; each takes 40 us to look at

    def fault(
        self, kind: Operator, problem: Problem, target: str, search: Search, at: Path, position: int
    ) -> Fault | None:
        """What is wrong with the search at `at` for the problem at `position`; None where it may be planned."""
        too_many = self._too_many_candidates(search, at)
        if too_many is not None:
            return too_many
        # Schedules of two signatures may have other tunables.
        shared = (kind.name, json.dumps(kind.signature(problem), sort_keys=True), target, id(search))
        look = self._looks.get(shared)
        if look is None:
            self._listed += len(search.schedules or ())
            if self._listed > self._settings.max_candidates_per_job and search.schedules is not None:
                return self._too_many_listed(at)
            look = self._looks[shared] = self._look(kind, problem, target, search, at, position)
        elif look.fault is None and self._is_near(search, look.size) and self._looks_left > 0:
            self._looks_left -= 1
            look = self._look(kind, problem, target, search, at, position)
        return look.fault

    def _is_near(self, search: Search, size: int) -> bool:
        return search.limit is None and search.tunables is not None and size * NEAR > self._settings.max_space

    def _look(self, kind: Operator, problem: Problem, target: str, search: Search, at: Path, position: int) -> _Look:
        try:
            space = kind.space(problem, data_sheet(target), search)
            require_bounded(space, search, self._settings.max_space)
        except SpaceTooLarge as error:
            fault = replace(fault_of_codegen(error, at), kind="search-space-too-large")
            if not at:
                fault = replace(fault, detail=f"For problems[{position}] {fault.detail[:1].lower()}{fault.detail[1:]}")
            return _Look(fault=fault)
        except InvalidSearch as error:
            kind_of_fault = "unknown-tunable" if isinstance(error, UnknownTunable) else "invalid-value"
            return _Look(fault=replace(fault_of_codegen(error, at), kind=kind_of_fault))
        return _Look(space.size)

    def _too_many_listed(self, at: Path) -> Fault:
        most = self._settings.max_candidates_per_job
        detail = f"The job lists more than {most:,} schedules, a list counted for each signature among its problems."
        detail += " Give shorter lists, or send several jobs."
        return Fault("search-space-too-large", detail, json_path((*at, "search", "schedules")), {"maximum": most})

    def _too_many_candidates(self, search: Search, at: Path) -> Fault | None:
        """A `limit` or `keep` that may leave more candidates than a problem may have."""
        given = {name: value for name in ("keep", "limit") if (value := getattr(search, name)) is not None}
        most = self._settings.max_candidates_per_problem
        if not given or min(given.values()) <= most:
            return None
        name = next(iter(given))
        field = json_path((*at, "search", name))
        detail = f"{field} is {given[name]:,}, but a problem may have at most {most:,} candidates."
        if name == "limit":
            detail += " Give a smaller limit, or keep beside it, which compiles only the best predicted."
        return Fault("invalid-value", detail, field, {"minimum": 1, "maximum": most})
