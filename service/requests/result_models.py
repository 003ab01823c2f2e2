"""What POST /v1/results may hold: the content of a results.json that `workers.offline.measure_bundle` wrote."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from codegen.canonical import LARGEST_INTEGER
from cukiln.types import VerdictName
from service.requests.models import LARGEST_WORKSPACE, DeviceClass, Name, Target

Digest = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
Word = Annotated[StrictStr, Field(min_length=1, max_length=128)]
Message = Annotated[StrictStr, Field(max_length=10_000)]
Count = Annotated[StrictInt, Field(ge=0, le=LARGEST_INTEGER)]
Seconds = Annotated[StrictFloat | StrictInt, Field(ge=0, le=1e9)]
MOST_MOMENT = 1e11
"""Seconds since the epoch: the year 5138."""
Moment = Annotated[StrictFloat | StrictInt, Field(ge=0, le=MOST_MOMENT)]
MOST_BYTES = 16 << 10
"""Of one free-form object, such as a verdict's details, as JSON. The largest of a run in the tests takes 1.1 KB."""
LARGEST_NUMBER = 1e15
"""Of a free-form object: what every reader of JSON takes for the same number."""


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    if (size := len(json.dumps(value))) > MOST_BYTES:
        raise ValueError(f"takes {size} bytes, {MOST_BYTES} are allowed")
    if (number := _beyond(value)) is not None:
        # Not as a float: an integer may be beyond every one.
        raise ValueError(
            f"holds {str(number)[:20]}, numbers from {-LARGEST_NUMBER:g} to {LARGEST_NUMBER:g} are allowed"
        )
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


class DeviceResult(Part):
    name: DeviceClass
    uuid: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]
    capability: Annotated[list[Annotated[StrictInt, Field(ge=0, le=99)]], Field(min_length=2, max_length=2)]
    driver: Annotated[StrictStr, Field(pattern=r"^[^\x00-\x1f\x7f]{1,32}$")]
    multiprocessors: Count
    l2_bytes: Count
    memory_bytes: Count


class SecondsResult(Part):
    wall: Seconds = 0.0
    cpu: Seconds = 0.0


class CandidateResult(Part):
    """`measurement` is read as `cukiln.types.Measurement`, `comparison` of a problem as `cukiln.types.Comparison`."""

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
    workspace_limit_bytes: Annotated[StrictInt, Field(ge=0, le=LARGEST_WORKSPACE)] | None
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
