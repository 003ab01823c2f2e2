"""Results that were measured elsewhere → what storage imports, where they are consistent: problems, schedules and ids
are what this service would make, times are numbers of one device under one driver. Whether the code is the measured one
is checked when winners are built: see `workers.steps.finish`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from codegen.canonical import digest
from codegen.errors import CodegenError
from codegen.identity import CUDA, PlanVersions, candidate_id, winner_key
from codegen.kernel import Kernel
from codegen.operator import Operator
from codegen.operators import operator
from codegen.plan.generator import generator
from codegen.problem import Problem
from codegen.search.rules import Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import Target, architectures
from codegen.targets import target as data_sheet
from codegen.text.ptxas_report import Resources
from codegen.text.render_group import slice_digest
from cukiln.types import Comparison, Measurement, StageSeconds
from service.http.errors import MAX_FAULTS, Fault, Refused, json_path
from service.http.faults import Path, fault_of_codegen, faults_of
from service.requests.models import (
    MOST_TIME,
    CandidateResult,
    PredictionDetails,
    ProblemResult,
    ResultsRequest,
    VerdictDetails,
)
from service.requests.resolve import duplicate_names
from storage.database.session import Clock
from storage.database.sql import is_predicted
from storage.transfer.imports import Import, ImportedCandidate, ImportedProblem
from storage.transitions.measure import CONCLUSIVE

IMPORT_SCHEMA = 1
LEAST_TIME = 1e-3
"""Microseconds, and ratios of times: no launch takes less than a nanosecond."""
MOST_SAMPLES = 1_000_000_000
MOST_AHEAD_SECONDS = 86_400.0
"""Of a clock that measured before ours: of two imports the later one counts."""
Model = TypeVar("Model", bound=BaseModel)
NOT_MEASURED = "not measured: the results hold nothing of it"


def checked(request: ResultsRequest, plans: PlanVersions, clock: Clock | None = None, cuda: int = CUDA) -> Import:
    """What is to be imported. `plans`: those that count here; `cuda`: what kernels are compiled by. Raises Refused
    with all that is wrong."""
    return _Checker(request, plans, (clock or Clock()).now(), cuda).all()


class _Checker:
    def __init__(self, request: ResultsRequest, plans: PlanVersions, now: float, cuda: int) -> None:
        self._request = request
        self._plans = plans
        self._now = now
        self._cuda = cuda
        self._faults: list[Fault] = []
        self._slices: dict[Kernel, str] = {}

    def all(self) -> Import:
        self._check_plan()
        if is_predicted(self._request.device.name):
            self._wrong(("device", "name"), "Predictions have device classes of this name.", "a GPU's product name")
        self._check_moment(self._request.written_at, ("written_at",))
        problems = []
        for position, value in enumerate(self._request.problems):
            problems.append(self._problem(value, ("problems", position)))
            self._stop_at_many()
        self._faults += duplicate_names([problem.name for problem in self._request.problems])
        self._check_policies()
        if self._faults:
            raise Refused(self._faults)
        first, device = self._request.problems[0], self._request.device
        content = self._request.model_dump(mode="json", by_alias=True, exclude={"written_at", "complete"})
        return Import(
            digest=digest("results", IMPORT_SCHEMA, content=content),
            device_class=device.name,
            uuid=device.uuid,
            driver=device.driver,
            plans=self._plans,
            measured_at=float(self._request.written_at),
            workspace_limit_bytes=first.workspace_limit_bytes,
            deterministic=first.deterministic,
            problems=[problem for problem in problems if problem is not None],
        )

    def _problem(self, value: ProblemResult, at: Path) -> ImportedProblem | None:
        parsed = self._parsed(value, at)
        if parsed is None:
            return None
        kind, problem, target, search = parsed
        if value.generator != generator(kind.name):
            detail = (
                "The candidates were made by another release of cukiln; measure with the one that this service runs."
            )
            self._wrong((*at, "generator"), detail, generator(kind.name))
            return None
        before = len(self._faults)
        if value.space_size < len(value.candidates):
            detail = f"{len(value.candidates)} candidates come from no space of {value.space_size} schedules."
            self._wrong((*at, "space_size"), detail, f"{len(value.candidates)} or more")
        candidates = self._candidates(value, kind, problem, target, at)
        comparison = self._comparison(value, (*at, "comparison"))
        if len(self._faults) > before:
            return None
        return ImportedProblem(
            name=value.name,
            operator=kind.name,
            problem=problem.canonical(),
            target=target.name,
            key=winner_key(problem.digest, target.name, self._request.device.name, self._cuda),
            search=search.canonical(),
            space_size=value.space_size,
            candidates=candidates,
            comparison=comparison,
        )

    def _parsed(self, value: ProblemResult, at: Path) -> tuple[Operator, Problem, Target, Search] | None:
        """The problem with its operator, target and search; None where one of them is wrong."""
        before = len(self._faults)
        kind = problem = search = None
        try:
            kind = operator(value.operator)
            problem = kind.parse(value.problem)
        except CodegenError as error:
            self._faults.append(fault_of_codegen(error, at))
        except ValidationError as error:
            assert kind is not None, "only parsing raises it"
            self._faults += faults_of(error, kind.problem_type, value.problem, (*at, "problem"))
        try:
            search = Search.model_validate(value.search)
        except ValidationError as error:
            self._faults += faults_of(error, Search, value.search, (*at, "search"))
        target = self._target(value.target, (*at, "target"))
        if kind is not None and problem is not None and search is not None and target is not None:
            try:
                kind.space(problem, target, search)
            except CodegenError as error:
                self._faults.append(fault_of_codegen(error, at))
        if len(self._faults) > before:
            return None
        assert kind is not None and problem is not None and search is not None and target is not None
        return kind, problem, target, search

    def _target(self, name: str, at: Path) -> Target | None:
        if name not in architectures():
            detail = f"{name!r} is not an architecture of this service."
            self._faults.append(Fault("unknown-target", detail, json_path(at), sorted(architectures())))
            return None
        target = data_sheet(name)
        major, minor = self._request.device.capability
        if target.capability != 10 * major + minor:
            detail = f"{self._request.device.name} has compute capability {major}.{minor} and runs no code for {name}."
            self._wrong(at, detail, sorted(n for n, t in architectures().items() if t.capability == 10 * major + minor))
            return None
        return target

    def _candidates(
        self, value: ProblemResult, kind: Operator, problem: Problem, target: Target, at: Path
    ) -> list[ImportedCandidate]:
        made, seen = [], set()
        for position, result in enumerate(value.candidates):
            place = (*at, "candidates", position)
            if result.candidate in seen:
                self._wrong((*place, "candidate"), f"Candidate {result.candidate} stands twice in the problem.", None)
            seen.add(result.candidate)
            kernel = self._kernel(result, kind, problem, target, value.workspace_limit_bytes, place)
            if kernel is not None and self._fits(result, place):
                made.append(self._imported(result, kernel, place))
            self._stop_at_many()
        return made

    def _kernel(
        self,
        result: CandidateResult,
        kind: Operator,
        problem: Problem,
        target: Target,
        workspace_limit: int | None,
        at: Path,
    ) -> Kernel | None:
        """The candidate's kernel, where its ids and its schedule are what this service would have made."""
        schedule = Schedule.of(result.schedule)
        own = candidate_id(problem.digest, schedule.as_dict())
        if result.candidate != own:
            self._wrong(
                (*at, "candidate"), f"{result.candidate} is not the id of this problem with this schedule.", own
            )
            return None
        try:
            space = kind.space(problem, target, Search.model_validate({"schedules": [result.schedule]}))
        except (CodegenError, ValidationError) as error:
            self._wrong((*at, "schedule"), f"The problem has no such schedule: {error}"[:500], None)
            return None
        if list(space) != [schedule]:
            whole = next(iter(space)).as_dict()
            self._wrong((*at, "schedule"), "The schedule leaves tunables out.", whole)
            return None
        outcome = kind.rules(problem, schedule, target, workspace_limit)
        if isinstance(outcome, Rejected):
            self._wrong((*at, "schedule"), f"The rule {outcome.rule} rejects it: {outcome.message}.", None)
            return None
        kernel = kind.candidate(problem, schedule).kernel
        if result.kernel != kernel.id:
            self._wrong((*at, "kernel"), f"{result.kernel} is not the id of the candidate's kernel.", kernel.id)
            return None
        return kernel

    def _fits(self, result: CandidateResult, at: Path) -> bool:
        """Whether verdict, code and times go together."""
        before = len(self._faults)
        compiled = result.verdict in CONCLUSIVE
        if compiled and (result.code_digest is None or result.resources is None):
            self._wrong((*at, "code_digest"), f"A candidate that is {result.verdict} has code and resources.", None)
        if result.verdict != "skipped" and result.toolchain not in self._request.toolchains:
            toolchains = sorted(self._request.toolchains)
            self._wrong((*at, "toolchain"), "The results describe no such toolchain.", toolchains)
        if result.resources is not None:
            missing = {"registers", *Resources.__dataclass_fields__} - result.resources.keys()
            if missing:
                self._wrong((*at, "resources"), f"The report lacks {', '.join(sorted(missing))}.", None)
        if (result.measurement is not None) != (result.verdict == "ok"):
            self._wrong((*at, "measurement"), "A candidate has a measurement if, and only if, its verdict is ok.", None)
        self._read(PredictionDetails, result.prediction, (*at, "prediction"))
        self._read(VerdictDetails, result.details, (*at, "details"))
        return len(self._faults) == before

    def _imported(self, result: CandidateResult, kernel: Kernel, at: Path) -> ImportedCandidate:
        measurement = self._measurement(result.measurement, (*at, "measurement"))
        if kernel not in self._slices:
            self._slices[kernel] = slice_digest(kernel)
        seconds = {stage: StageSeconds(wall=spent.wall, cpu=spent.cpu) for stage, spent in result.seconds.items()}
        return ImportedCandidate(
            **result.model_dump(exclude={"seconds", "message", "measurement"}),
            slice=self._slices[kernel],
            message=result.message or (NOT_MEASURED if result.verdict == "skipped" else None),
            measurement=measurement,
            verify=seconds.get("verify", StageSeconds()),
            measure=seconds.get("measure", StageSeconds()),
        )

    def _measurement(self, value: Mapping[str, Any] | None, at: Path) -> dict[str, Any] | None:
        measurement = self._read(Measurement, value, at)
        if measurement is None:
            return None
        self._check_times(measurement.median_us, measurement.low_us, measurement.high_us, at)
        self._check_device(measurement.device, measurement.driver, at)
        if not (1 <= measurement.samples <= MOST_SAMPLES and 1 <= measurement.launches_per_sample <= MOST_SAMPLES):
            self._wrong(at, "A measurement has samples, and each has launches.", f"1 to {MOST_SAMPLES}")
        if not 0 <= measurement.spread <= MOST_TIME:
            self._wrong(at, "A spread is a share.", f"0 to {MOST_TIME:g}")
        self._check_moment(measurement.measured_at, (*at, "measured_at"))
        return measurement.model_dump(mode="json")

    def _comparison(self, value: ProblemResult, at: Path) -> dict[str, Any] | None:
        comparison = self._read(Comparison, value.comparison, at)
        if comparison is None:
            return None
        correct = {result.candidate for result in value.candidates if result.verdict == "ok"}
        self._check_device(comparison.device, comparison.driver, at)
        self._check_moment(comparison.measured_at, (*at, "measured_at"))
        if not comparison.contenders:
            self._wrong((*at, "contenders"), "A comparison has contenders; send null where there was none.", None)
        for position, contender in enumerate(comparison.contenders):
            place = (*at, "contenders", position)
            if contender.candidate not in correct:
                self._wrong((*place, "candidate"), "Only correct candidates of the problem compare.", None)
            self._check_times(contender.median_us, contender.low_us, contender.high_us, place)
            self._check_times(contender.ratio, contender.ratio_low, contender.ratio_high, place)
            if (beside := contender.vendor_ratio) is not None:
                self._check_times(beside.ratio, beside.low, beside.high, (*place, "vendor_ratio"))
                if comparison.vendor is None:
                    detail = "Without a vendor there is no ratio to it; send null."
                    self._wrong((*place, "vendor_ratio"), detail, None)
        if comparison.vendor is not None:
            self._check_times(
                comparison.vendor.median_us, comparison.vendor.low_us, comparison.vendor.high_us, (*at, "vendor")
            )
        return comparison.model_dump(mode="json")

    def _read(self, model: type[Model], value: Mapping[str, Any] | None, at: Path) -> Model | None:
        if value is None:
            return None
        try:
            return model.model_validate(value)
        except ValidationError as error:
            self._faults += faults_of(error, model, value, at)
            return None

    def _check_times(self, middle: float, low: float, high: float, at: Path) -> None:
        if not LEAST_TIME <= low <= middle <= high <= MOST_TIME:
            allowed = f"{LEAST_TIME:g} <= low <= it <= high <= {MOST_TIME:g}"
            self._wrong(at, f"{middle:g} with the interval {low:g} to {high:g} is no measurement.", allowed)

    def _check_moment(self, moment: float, at: Path) -> None:
        latest = self._now + MOST_AHEAD_SECONDS
        if not 0 <= moment <= latest:
            detail = f"{moment:g} is no time in seconds since 1970, or lies in the future: look at the clock there."
            self._wrong(at, detail, f"0 to {latest:.0f}")

    def _check_device(self, name: str, driver: str, at: Path) -> None:
        device = self._request.device
        if (name, driver) != (device.name, device.driver):
            detail = f"It was measured on {name!r} under driver {driver}; the results are of one device and one driver."
            self._wrong(at, detail, [device.name, device.driver])

    def _check_plan(self) -> None:
        named = {problem.operator for problem in self._request.problems}
        versions = {name: version for name, version in self._plans.items() if name in named}
        if any(self._request.plan_versions.get(name) != version for name, version in versions.items()):
            detail = (
                "The results were verified and timed by another version of the verification plan; measure with the "
                "release of cukiln, and the operators of OPERATOR_PATH, that this service runs."
            )
            self._wrong(("plan_versions",), detail, versions)

    def _check_policies(self) -> None:
        first = self._request.problems[0]
        for position, value in enumerate(self._request.problems):
            for name in ("workspace_limit_bytes", "deterministic"):
                if getattr(value, name) != getattr(first, name):
                    detail = "Problems of one job have one policy; send those of another one by themselves."
                    self._wrong(("problems", position, name), detail, getattr(first, name))

    def _wrong(self, at: Sequence[str | int], detail: str, allowed: Any) -> None:
        self._faults.append(Fault("invalid-value", detail, json_path(at), allowed))

    def _stop_at_many(self) -> None:
        if len(self._faults) > MAX_FAULTS:  # more would not be shown
            raise Refused(self._faults)
