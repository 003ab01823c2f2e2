"""The body of a job request: problems, with what holds for all of them."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictStr
from pydantic_core import PydanticKnownError

from codegen.canonical import LARGEST_INTEGER
from codegen.operator import Operator
from codegen.operators import operator
from codegen.problem import Problem, refuse
from codegen.search.search import Search
from codegen.targets import Target as TargetSheet
from codegen.targets import target as find_target

LONGEST_BUDGET_SECONDS = 7 * 24 * 3600

_LINE = r"^[^\x00-\x1f\x7f-\x9f]{1,%d}$"
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def _line(most: int, value: str) -> str:
    if _SURROGATE.search(value):
        raise PydanticKnownError("string_unicode")  # as a pattern of pydantic's own would
    if re.fullmatch(_LINE % most, value) is None:
        raise refuse("line", f"Input should be 1 to {most} characters without control characters")
    return value


Target = Annotated[StrictStr, Field(min_length=1, max_length=16)]
DeviceClass = Annotated[
    StrictStr, AfterValidator(partial(_line, 128)), Field(json_schema_extra={"pattern": _LINE % 128})
]
Name = Annotated[StrictStr, AfterValidator(partial(_line, 256)), Field(json_schema_extra={"pattern": _LINE % 256})]
LabelKey = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$")]
Labels = Annotated[dict[LabelKey, Name], Field(max_length=16, json_schema_extra={"additionalProperties": False})]


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

    name: Name | None = Field(None, description="Of the job, for people: several may have one.")
    labels: Labels | None = Field(None, description="At most 16, such as a model or a team, to list jobs by.")
    target: Target | None = Field(
        None,
        description="An architecture, or `cpu`: GET /v1/targets. Each problem needs one, of its own or this.",
    )
    search: Search | None = Field(None, description='Default: {"level": 1}.')
    priority: Literal["low", "normal", "high"] = "normal"
    budget: Budget | None = None
    workspace_limit_bytes: Annotated[int, Field(strict=True, ge=0, le=LARGEST_INTEGER)] | None = None
    deterministic: bool = Field(False, strict=True, description="Only kernels that give the same bits in every run.")
    ptx: Literal["winners", "all"] = Field(
        "winners",
        description="Which right candidates are run from the PTX that nvcc made, before they may win: those that would "
        "be published, or every one, which takes 1 to 3 CPU seconds each.",
    )
    device_class: DeviceClass | None = Field(
        None, description="Default: each class with a live GPU of the architecture, else `predicted:<target>`."
    )
    problems: Annotated[list[dict[str, Any]], Field(min_length=1)]


HEAD_FIELDS = frozenset(ProblemHead.model_fields)


@dataclass(frozen=True)
class AskedProblem:
    """A problem of a request on its architecture, with its own search or the request's."""

    name: str
    operator: Operator
    problem: Problem
    target: TargetSheet
    search: Search


def asked_problem(request: JobRequest, position: int, default_target: str | None) -> AskedProblem:
    """Raises CodegenError, where no target is named, too, and pydantic.ValidationError for a field that is wrong."""
    fields = request.problems[position]
    head = ProblemHead.model_validate({name: fields[name] for name in HEAD_FIELDS & fields.keys()})
    kind = operator(str(fields.get("operator")))
    problem = kind.parse({name: value for name, value in fields.items() if name not in HEAD_FIELDS})
    target = find_target(head.target or request.target or default_target)
    return AskedProblem(name_of(fields, position), kind, problem, target, head.search or request.search or Search())


def name_of(fields: dict[str, Any], position: int) -> str:
    """Of a problem of a request, which may leave it out."""
    return fields.get("name") or f"problem{position}"
