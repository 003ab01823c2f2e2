"""What a request may say: jobs and lookups, read once at the edge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from codegen.search.search import Search
from cukiln.counted import counted
from service.http.errors import Fault, Refused, refuse
from service.http.faults import faults_of

LONGEST_BUDGET_SECONDS = 7 * 24 * 3600
LARGEST_WORKSPACE = 2**53 - 1

Target = Annotated[StrictStr, Field(min_length=1, max_length=16)]
DeviceClass = Annotated[StrictStr, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{1,128}$")]
Name = Annotated[StrictStr, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{1,256}$")]


class Budget(BaseModel):
    """How long the job may run once it has started; verdicts until then count."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    seconds: Annotated[float, Field(strict=True, gt=0, le=LONGEST_BUDGET_SECONDS)]


class ProblemHead(BaseModel):
    """What stands in a problem beside the operator's own fields; the job's values are the defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name | None = Field(None, description="Unique in the job; `problem<i>` where it is missing.")
    target: Target | None = None
    search: Search | None = None
    device_class: DeviceClass | None = None


class JobRequest(BaseModel):
    """1 to 10,000 problems with what holds for all of them. The operators' fields: GET /v1/operators."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    target: Target | None = Field(None, description="Architecture, as in GET /v1/targets; default: the service's.")
    search: Search | None = Field(None, description='Default: {"level": 1}.')
    priority: Literal["low", "normal", "high"] = "normal"
    budget: Budget | None = None
    workspace_limit_bytes: Annotated[int, Field(strict=True, ge=0, le=LARGEST_WORKSPACE)] | None = None
    deterministic: bool = Field(False, strict=True, description="Only kernels that give the same bits in every run.")
    device_class: DeviceClass | None = Field(
        None, description="Default: each class with a live GPU of the architecture, else `predicted:<target>`."
    )
    problems: Annotated[list[dict[str, Any]], Field(min_length=1)]


class LookupRequest(JobRequest):
    """A job's body is a lookup's body too. `workspace_limit_bytes` and `deterministic` choose from the Pareto front;
    `search`, `priority` and `budget` change nothing."""


RequestModel = TypeVar("RequestModel", bound=JobRequest)
Model = TypeVar("Model", bound=BaseModel)
HEAD_FIELDS = frozenset(ProblemHead.model_fields)


def read_request(model: type[RequestModel], value: Any, max_problems: int) -> RequestModel:
    """The envelope of the body; its problems are read by `service.requests.resolve`. Raises Refused."""
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
