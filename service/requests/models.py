"""What a request may say, read once at the edge: lookups, and results that were measured elsewhere; jobs are
`codegen.job_request`."""

import json
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
)

from codegen.canonical import LARGEST_INTEGER
from codegen.job_request import DeviceClass, JobRequest, Name, Target
from cukiln.types import FrontEntry, OnMiss, SharedAccess, VerdictName, WinnerRecord

_RECORD_FIELDS = (*WinnerRecord.model_fields, *(f"front.{name}" for name in FrontEntry.model_fields))
RecordField = StrEnum("RecordField", [(name, name) for name in _RECORD_FIELDS])  # type: ignore[misc]


class LookupRequest(JobRequest):
    """A job's body is one, too. What is no matter of a lookup (`search`, `priority`, …) is for the job of `on_miss`."""

    fields: Annotated[list[RecordField], Field(min_length=1)] | None = Field(
        None, description="Of a record, and as `front.…` of its kernels: what the answer holds of them. Default: all."
    )
    on_miss: OnMiss = Field(
        "none",
        description="`tune`: a job, by the other fields, of the misses that no job is trying, and none failed at by "
        "this search within a day. `nearest`: that, and until then verified kernels that were tuned for a problem near "
        "this one: such a record is `tuned_for` it.",
    )


LOOKUP_FIELDS = LookupRequest.model_fields.keys() - JobRequest.model_fields.keys()
"""What a job's body does not have."""

Digest = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
Word = Annotated[StrictStr, Field(min_length=1, max_length=128)]
Message = Annotated[StrictStr, Field(max_length=10_000)]
Count = Annotated[StrictInt, Field(ge=0, le=LARGEST_INTEGER)]
Seconds = Annotated[StrictFloat | StrictInt, Field(ge=0, le=1e9)]
MOST_MOMENT = 1e11
"""Seconds since the epoch: the year 5138."""
Moment = Annotated[StrictFloat | StrictInt, Field(ge=0, le=MOST_MOMENT)]
MOST_TIME = 1e10
"""Microseconds, and ratios of times: nothing is measured for three hours."""
MOST_BYTES = 16 << 10
"""Of one free-form object, such as a verdict's details, as JSON. The largest of 246 results of an H100 takes 2.2 KB."""
LARGEST_NUMBER = 2**53
"""Of a free-form object: what every reader of JSON takes for the same number. A GPU's state has microseconds since the
epoch."""


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    if (size := len(json.dumps(value))) > MOST_BYTES:
        raise ValueError(f"takes {size} bytes, {MOST_BYTES} are allowed")
    if (number := _beyond(value)) is not None:
        # Not as a float: an integer may be beyond every one.
        raise ValueError(f"holds {str(number)[:20]}, numbers from {-LARGEST_NUMBER} to {LARGEST_NUMBER} are allowed")
    return value


def _beyond(value: Any) -> int | float | None:
    """The first number in it that is not finite or too large."""
    if isinstance(value, int | float):
        return None if -LARGEST_NUMBER <= value <= LARGEST_NUMBER else value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((number for part in parts if (number := _beyond(part)) is not None), None)


Free = Annotated[dict[str, Any], AfterValidator(_bounded)]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Described(BaseModel):
    """What is read of a free-form object: more may stand in it."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


Error = Annotated[StrictFloat | StrictInt, Field(ge=0)] | None


class CaseDetails(Described):
    """What is read of a verification's case."""

    kind: Word
    extents: list[Count]
    exact: StrictBool = False
    sum_length: Count | None = None
    max_error: Error = None
    error_bound: Error = None
    max_ratio: Error = None


class VerdictDetails(Described):
    """What is read of a verdict's details; which device and which plan they are of stands beside them."""

    seed: Count = 0
    cases: list[CaseDetails] = []
    shared_memory: list[SharedAccess] | None = None
    limit: dict[Word, Seconds] = {}


class PredictionDetails(Described):
    """What is read of a prediction."""

    us: Annotated[StrictFloat | StrictInt, Field(ge=0, le=MOST_TIME)]
    occupancy: Annotated[StrictFloat | StrictInt, Field(ge=0)] | None = None


class DeviceResult(Part):
    name: DeviceClass
    uuid: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]
    capability: Annotated[list[Annotated[StrictInt, Field(ge=0, le=99)]], Field(min_length=2, max_length=2)]
    driver: Annotated[StrictStr, Field(pattern=r"^[^\x00-\x1f\x7f]{1,32}$")]
    multiprocessors: Count
    l2_bytes: Count
    memory_bytes: Count
    cuda: Count = 0


class SecondsResult(Part):
    wall: Seconds = 0.0
    cpu: Seconds = 0.0


class CandidateResult(Part):
    """`measurement` is read as `cukiln.types.Measurement`, `comparison` of a problem as `cukiln.types.Comparison`,
    `prediction` and `details` as what is read of them."""

    candidate: Digest
    schedule: Annotated[
        dict[Word, Annotated[StrictInt, Field(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)] | Word], Field(max_length=64)
    ]
    kernel: Digest
    toolchain: Digest | None
    code_digest: Digest | None
    resources: Annotated[dict[Word, Count], Field(max_length=64)] | None
    prediction: Free | None
    verdict: VerdictName
    message: Message | None
    details: Free
    measurement: Free | None
    seconds: dict[Literal["verify", "measure"], SecondsResult]


class ProblemResult(Part):
    """`problem` and `search` are read as those of a job request."""

    name: Name
    operator: Word
    problem: dict[str, Any]
    target: Target
    search: dict[str, Any]
    generator: Digest
    workspace_limit_bytes: Annotated[StrictInt, Field(ge=0, le=LARGEST_INTEGER)] | None
    deterministic: StrictBool
    space_size: Count
    candidates: Annotated[list[CandidateResult], Field(min_length=1)]
    comparison: Free | None


class ResultsRequest(Part):
    """The results of one run on one GPU."""

    schema_: Annotated[StrictInt, Field(alias="schema", ge=1, le=1)]
    complete: StrictBool
    device: DeviceResult
    plan_versions: Annotated[dict[Word, Digest], Field(max_length=64)]
    written_at: Moment
    toolchains: Annotated[dict[Digest, Free], Field(max_length=64)]
    problems: Annotated[list[ProblemResult], Field(min_length=1)]
