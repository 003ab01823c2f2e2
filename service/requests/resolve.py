"""A request's problems → problems as they are stored and looked up: parsed, canonical, with target, classes and keys.

Where a request names no device class, a job measures on every class with a live GPU of the architecture, else it
predicts; a lookup takes what is known of those classes, else what was measured on any other, else what was predicted.

Tunables that a search names exist, some schedule may have them, and sizes of spaces (computed, never enumerated) and
limits are within the settings' bounds. Problems of one signature share a look, unless the search names tunables or
schedules: what those mean may depend on all of a problem, and a size near the bound does too. The plan step looks at
each again.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from codegen.errors import CodegenError, InvalidSearch, SpaceTooLarge, UnknownTunable
from codegen.identity import CUDA, winner_key
from codegen.job_request import HEAD_FIELDS, JobRequest, ProblemHead
from codegen.operator import Operator
from codegen.operators import operator, operators
from codegen.problem import Problem
from codegen.search.search import Search
from codegen.search.space_bound import require_bounded
from codegen.targets import target as data_sheet
from cukiln.counted import counted
from service.http.errors import MAX_FAULTS, Fault, Refused, json_path, refuse
from service.http.faults import Path, fault_of_codegen, faults_of
from storage.config.settings import Settings
from storage.database.sql import PREDICTED

MOST_LOOKS = 1_000  # at further problems of a signature, in one request: 0.2 to 2 ms each
LISTED_OF_A_LOOK = 25
"""Schedules that take as long as a look."""
RequestModel = TypeVar("RequestModel", bound=JobRequest)
Model = TypeVar("Model", bound=BaseModel)


def read_request(model: type[RequestModel], value: Any, max_problems: int) -> RequestModel:
    """The envelope of the body; its problems are read one by one. Raises Refused."""
    problems = value.get("problems") if isinstance(value, dict) else None
    if isinstance(problems, list) and len(problems) > max_problems:
        detail = f"There are {counted(len(problems), 'problem')}; send at most {max_problems} at once."
        raise refuse("invalid-value", detail, field="problems", allowed={"maxItems": max_problems})
    return read_body(model, value)


def read_body(model: type[Model], value: Any) -> Model:
    """Raises Refused."""
    if not isinstance(value, dict):
        raise refuse("invalid-value", "The body is not a JSON object.", allowed={"type": "object"})
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise Refused(faults_of(error, model, value)) from None


def duplicate_names(names: Sequence[str | None], hint: str = "") -> list[Fault]:
    """A fault for each problem whose name an earlier one has; None: a problem that is wrong anyway."""
    first: dict[str, int] = {}
    faults = []
    for position, name in enumerate(names):
        if name is not None and first.setdefault(name, position) != position:
            detail = f"problems[{first[name]}] is already called {name!r}{hint}."
            faults.append(Fault("duplicate-name", detail, f"problems[{position}].name", "a name no other problem has"))
    return faults


def read_head(value: dict[str, Any], position: int) -> ProblemHead | list[Fault]:
    """The part of a problem that is not the operator's, or what is wrong with it."""
    head = {name: value[name] for name in HEAD_FIELDS & value.keys()}
    try:
        return ProblemHead.model_validate(head)
    except ValidationError as error:
        return faults_of(error, ProblemHead, head, ("problems", position))


class SearchChecks:
    """Of one request, whose searches are kept alive by it: equal ids are equal searches."""

    def __init__(self, settings: Settings, *, several: bool) -> None:
        """`several`: problems, of which a fault names its own."""
        self._settings, self._several = settings, several
        self._looks: dict[tuple[str, str, str, int], Fault | None] = {}
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
        if shared not in self._looks:
            self._listed += len(search.schedules or ())
            if self._listed > self._settings.max_candidates_per_job and search.schedules is not None:
                return self._too_many_listed(at)
            self._looks[shared] = self._look(kind, problem, target, search, at, position)
        elif self._looks[shared] is None and (search.tunables or search.schedules) and self._looks_left > 0:
            self._looks_left -= 1 + len(search.schedules or ()) // LISTED_OF_A_LOOK
            return self._look(kind, problem, target, search, at, position)
        return self._looks[shared]

    def _look(
        self, kind: Operator, problem: Problem, target: str, search: Search, at: Path, position: int
    ) -> Fault | None:
        try:
            space = kind.space(problem, data_sheet(target), search)
            require_bounded(space, search, self._settings.max_space)
        except UnknownTunable as error:
            return replace(fault_of_codegen(error, at), kind="unknown-tunable")
        except InvalidSearch as error:
            too_large = isinstance(error, SpaceTooLarge)
            fault = replace(
                fault_of_codegen(error, at), kind="search-space-too-large" if too_large else "invalid-value"
            )
            if at or not self._several:
                return fault
            return replace(fault, detail=f"For problems[{position}]: {fault.detail}")
        return None

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


DEFAULT_SEARCH = Search()
REMEMBERED = 16_384


@dataclass(frozen=True)
class Resolved:
    """One problem on one device class. As it is read: on the class that it or the request names, and without a key."""

    name: str
    operator: Operator
    problem: Problem
    target: str
    device_class: str
    search: Search
    key: str = ""
    cuda: int = CUDA


@dataclass(frozen=True)
class Known:
    """What a request may name. `targets`: with a data sheet, and of a live toolchain where there is one. `devices`: the
    classes with a live GPU, by compute capability as digits (`90`), in one order. `cuda`: what kernels are compiled
    by."""

    default_target: str | None
    targets: Set[str]
    devices: Mapping[int, Sequence[str]] = field(default_factory=dict)
    cuda: int = CUDA

    def live_classes(self, target: str) -> Sequence[str]:
        """Those that run kernels of the target: of its very capability, `sm_90` and `sm_90a` alike. An emulation's run
        on none."""
        sheet = data_sheet(target)
        return self.devices.get(sheet.capability, ()) if sheet.emulates is None else ()

    def device_classes(self, target: str) -> list[str]:
        """What a job's problem may name; where it names none, all but the last are taken, or the last alone."""
        return [*self.live_classes(target), predicted_class(target)]


@dataclass(frozen=True)
class LookupProblem:
    """One problem of a lookup, as it was read (`asked`; its class is empty where none is named). `classes`, `keys`: of
    the records of that class, or of those with a live GPU, the best first. `predicted`: the key of the last resort,
    where no class is named. `key`, `key_class`: of the record that a job of today would make, which names a miss."""

    asked: Resolved
    classes: Sequence[str]
    keys: Sequence[str]
    predicted: str | None

    @property
    def key(self) -> str:
        return self.keys[0] if self.keys else str(self.predicted)

    @property
    def key_class(self) -> str:
        return self.classes[0] if self.classes else predicted_class(self.asked.target)


def predicted_class(target: str) -> str:
    """The device class of an architecture without a live GPU."""
    return f"{PREDICTED}{target}"


def resolve_jobs(request: JobRequest, known: Known, settings: Settings) -> list[Resolved]:
    """The problems of a job, each once for every class that it is measured on. Raises Refused."""
    resolved = []
    for p in _Resolver(request, known, SearchChecks(settings, several=len(request.problems) > 1)).all():
        live = known.live_classes(p.target) or [predicted_class(p.target)]
        for name in [p.device_class] if p.device_class else live:
            resolved.append(replace(p, device_class=name, key=_key_on(p, name)))
    return resolved


def resolve_lookups(request: JobRequest, known: Known) -> list[LookupProblem]:
    """The problems of a lookup: any device class may be asked for, and no search space is looked at."""
    problems = []
    for p in _Resolver(request, known, None).all():
        classes = [p.device_class] if p.device_class else known.live_classes(p.target)
        predicted = None if p.device_class else _key_on(p, predicted_class(p.target))
        keys = [_key_on(p, name) for name in classes]
        problems.append(LookupProblem(p, classes, keys, predicted))
    return problems


_SPELLED = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


# Frameworks repeat lookups; parsing and keying a problem takes 0.1 ms, a hit here 0.01 ms. Only valid problems are
# cached, so that entries are small, and by their JSON text, so that 1 and true stay apart.
@lru_cache(maxsize=REMEMBERED)
def _parsed(kind: Operator, fields: str) -> Problem:
    return kind.parse(json.loads(fields))


_key = lru_cache(maxsize=REMEMBERED)(winner_key)


def _key_on(problem: Resolved, device_class: str) -> str:
    return _key(problem.problem.digest, problem.target, device_class, problem.cuda)


class _Resolver:
    def __init__(self, request: JobRequest, known: Known, searches: SearchChecks | None) -> None:
        """`searches`: of a job; a lookup has none."""
        self._request, self._known, self._searches = request, known, searches
        self._faults: list[Fault] = []
        self._once: set[tuple[str, str | None, str]] = set()

    def all(self) -> list[Resolved]:
        resolved: list[Resolved | None] = []
        for position, value in enumerate(self._request.problems):
            resolved.append(self._resolve(value, position))
            if len(self._faults) > MAX_FAULTS:  # more would not be shown
                raise Refused(self._faults)
        if self._searches is not None:
            names = [problem.name if problem else None for problem in resolved]
            self._faults += duplicate_names(names, "; a missing name is `problem<position>`")
        if self._faults:
            raise Refused(self._faults)
        return [problem for problem in resolved if problem is not None]

    def _resolve(self, value: dict[str, Any], position: int) -> Resolved | None:
        at = ("problems", position)
        head = read_head(value, position)
        if isinstance(head, list):
            self._faults += head
            head = ProblemHead.model_validate({})
        target = self._target(head, at)
        parsed = self._problem({name: part for name, part in value.items() if name not in HEAD_FIELDS}, at)
        if parsed is None or target is None:
            return None
        kind, problem = parsed
        device_class = head.device_class or self._request.device_class
        search = head.search or self._request.search or DEFAULT_SEARCH
        if self._searches is not None:
            if device_class is not None:
                self._check_class(
                    device_class, target, (*at, "device_class") if head.device_class else ("device_class",)
                )
            # The plan step applies the operator's rules.
            fault = self._searches.fault(kind, problem, target, search, at if head.search else (), position)
            if fault is not None:
                self._add_once(fault)
        name = head.name or f"problem{position}"
        return Resolved(name, kind, problem, target, device_class or "", search, cuda=self._known.cuda)

    def _problem(self, value: dict[str, Any], at: Path) -> tuple[Operator, Problem] | None:
        field = (*at, "operator")
        name = value.get("operator")
        if name is None:
            path = json_path(field)
            self._faults.append(Fault("missing-field", f"{path} is missing.", path, sorted(operators())))
            return None
        try:
            kind = operator(name if isinstance(name, str) else repr(name)[:40])
            return kind, _parsed(kind, _SPELLED(value))
        except CodegenError as error:
            self._faults.append(fault_of_codegen(error, at))
        except ValidationError as error:
            self._faults += faults_of(error, kind.problem_type, value, at)
        return None

    def _target(self, head: ProblemHead, at: Path) -> str | None:
        name = head.target or self._request.target or self._known.default_target
        path = (*at, "target") if head.target else ("target",)
        if name in self._known.targets:
            return name
        allowed = sorted(self._known.targets)
        detail = (
            "No target is named: name the architecture of the GPU that the kernels are for."
            if name is None
            else f"{name!r} is not an architecture that this service compiles for."
        )
        self._add_once(Fault("unknown-target", detail, json_path(path), allowed))
        return None

    def _check_class(self, device_class: str, target: str, path: Path) -> None:
        allowed = self._known.device_classes(target)
        if device_class not in allowed:
            detail = f"No live worker measures {target} kernels on {device_class!r}."
            self._add_once(Fault("invalid-value", detail, json_path(path), allowed))

    def _add_once(self, fault: Fault) -> None:
        """A fault of the job is listed once, not once per problem."""
        identity = (fault.kind, fault.field, fault.detail)
        if identity not in self._once:
            self._once.add(identity)
            self._faults.append(fault)
