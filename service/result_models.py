"""What POST /v1/results may hold: the content of a results.json that `workers.measure_bundle` wrote."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from codegen.canonical import LARGEST_INTEGER
from cukiln.types import VerdictName
from service.requests import LARGEST_WORKSPACE, DeviceClass, Name, Target

Digest = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
Word = Annotated[StrictStr, Field(min_length=1, max_length=128)]
Message = Annotated[StrictStr, Field(max_length=10_000)]
Count = Annotated[StrictInt, Field(ge=0, le=LARGEST_INTEGER)]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DeviceResult(Part):
    name: DeviceClass
    uuid: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]
    capability: Annotated[list[Count], Field(min_length=2, max_length=2)]
    driver: Annotated[StrictStr, Field(pattern=r"^[^\x00-\x1f\x7f]{1,32}$")]
    multiprocessors: Count
    l2_bytes: Count
    memory_bytes: Count


class SecondsResult(Part):
    wall: Annotated[StrictFloat | StrictInt, Field(ge=0)] = 0.0
    cpu: Annotated[StrictFloat | StrictInt, Field(ge=0)] = 0.0


class CandidateResult(Part):
    """`measurement` is read as `cukiln.types.Measurement`, `comparison` of a problem as `cukiln.types.Comparison`."""

    candidate: Digest
    schedule: dict[Word, StrictInt | StrictStr]
    kernel: Digest
    toolchain: Digest | None
    code_digest: Digest | None
    resources: dict[Word, Count] | None
    prediction: dict[str, Any] | None
    verdict: VerdictName
    message: Message | None
    details: dict[str, Any]
    measurement: dict[str, Any] | None
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
    comparison: dict[str, Any] | None


class ResultsRequest(Part):
    """The results of one run on one GPU."""

    schema_: Literal[1] = Field(alias="schema")
    complete: StrictBool
    device: DeviceResult
    plan_version: Digest
    written_at: StrictFloat | StrictInt
    toolchains: dict[Digest, dict[str, Any]]
    problems: Annotated[list[ProblemResult], Field(min_length=1)]
