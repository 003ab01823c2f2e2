"""The answers of the service, defined once for service and client. Durations are seconds unless the name says `_us`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

JobState = Literal["queued", "running", "done", "partial", "failed", "cancelled"]
ProblemState = Literal["queued", "running", "done", "failed", "cancelled"]
VerdictName = Literal["ok", "compile_error", "compile_timeout", "runtime_error", "run_timeout", "incorrect", "skipped"]
Verified = Literal["gpu", "cpu", "cpu-unconfirmed"]
RankedBy = Literal["measured", "predicted"]
StageName = Literal["lower", "codegen", "compile", "verify", "measure"]


class Answer(BaseModel):
    """Base of all answers: frozen; unknown fields of a newer service are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StageSeconds(Answer):
    wall: float = 0.0
    cpu: float = 0.0


class Seconds(Answer):
    """Time spent per stage."""

    lower: StageSeconds = StageSeconds()
    codegen: StageSeconds = StageSeconds()
    compile: StageSeconds = StageSeconds()
    verify: StageSeconds = StageSeconds()
    measure: StageSeconds = StageSeconds()


class WinnerSummary(Answer):
    candidate: str
    schedule: dict[str, Any]
    verified: Verified
    ranked_by: RankedBy
    predicted_us: float | None
    measured_us: float | None
    so_sha256: str
    workspace_bytes: int = 0
    deterministic: bool = True


class ProblemReport(Answer):
    name: str
    key: str
    operator: str
    problem: dict[str, Any]
    target: str
    device_class: str
    state: ProblemState
    cached: bool
    candidates: int
    winner: WinnerSummary | None = None
    verdicts: dict[str, int] = Field(default_factory=dict)
    rejected: dict[str, int] = Field(default_factory=dict)
    seconds: Seconds = Seconds()
    error: str | None = None


class StageProgress(Answer):
    done: int
    total: int


class Progress(Answer):
    """Counts of a job; `eta_seconds` is an estimate from predicted and observed times, while it runs.

    `done` is what really happened: what a cancel or a spent budget left out counts in `total` alone.
    """

    lower: StageProgress  # problems
    compile: StageProgress  # kernels
    verify: StageProgress  # candidates
    finish: StageProgress  # problems
    candidates_done: int
    candidates_failed: int
    eta_seconds: float | None = None


class Job(Answer):
    job: str
    state: JobState
    cached: bool
    priority: Literal["low", "normal", "high"]
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    budget_seconds: float | None = None
    progress: Progress
    seconds: Seconds
    problems: list[ProblemReport]
    error: str | None = None


class JobSummary(Answer):
    job: str
    state: JobState
    cached: bool
    created_at: float
    finished_at: float | None = None
    problem_count: int


class JobPage(Answer):
    jobs: list[JobSummary]
    next_cursor: str | None = None


class SharedAccess(Answer):
    """Bank conflicts at one place of the source. The counts are sums over the blocks of the CPU run's watched cases,
    which have reduced extents: what compares is their ratio, and `wavefronts` = `ideal` means no conflict.
    """

    site: str  # file:line
    kind: Literal["read", "write", "cp_async", "ldmatrix"]
    bytes: int  # of one lane
    warp_accesses: int
    wavefronts: int  # how often shared memory was busy with the accesses
    ideal: int  # how often it would have been without bank conflicts


class CandidateReport(Answer):
    problem: str
    candidate: str
    schedule: dict[str, Any]
    kernel: str
    group: str | None
    verdict: VerdictName | None
    message: str | None
    verified: Verified | None
    max_error: float | None = None  # absolute, the largest over the test plan's random inputs
    error_bound: float | None = None  # at the place of max_error
    registers: int | None = None
    shared_bytes: int | None = None
    spill_bytes: int | None = None
    # Counted in the CPU run, on reduced extents; the most lost wavefronts first. Null: it was not run.
    shared_memory: list[SharedAccess] | None = None
    occupancy: float | None = None
    predicted_us: float | None
    measured_us: float | None


class CandidatePage(Answer):
    candidates: list[CandidateReport]
    next_cursor: str | None = None


class RejectionReport(Answer):
    problem: str
    rule: str
    count: int
    example: dict[str, Any]
    message: str


class Rejections(Answer):
    rejections: list[RejectionReport]


class GroupKernel(Answer):
    kernel: str
    namespace: str
    operator: str
    tunables: dict[str, Any]
    state: str
    code_digest: str | None
    resources: dict[str, Any] | None
    log: str | None


class Phase(Answer):
    name: str
    seconds: float


class GroupReport(Answer):
    group: str
    job: str | None
    target: str
    state: str
    toolchain: str | None
    kernels: list[GroupKernel]
    phases: list[Phase]
    predicted_seconds: float
    compile: StageSeconds
    verify: StageSeconds
    source_sha256: str | None
    log_sha256: str | None
    library_sha256: str | None
    cubin_sha256: str | None


class Operand(Answer):
    name: str
    dtype: str
    role: Literal["in", "out"]
    shape: list[int]
    strides: list[int]  # in elements


class LaunchFunction(Answer):
    """One kernel launch of the candidate, for driver-API users."""

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int


class Launch(Answer):
    """How to call the library. The plain C entry is
    `int cukiln_launch(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars,
    void* workspace, void* stream)`; the tvm-ffi entry is `run(*operands, *scalars)`, with the workspace last where
    `workspace_bytes` is not 0. `functions` are launched in their order, on one stream."""

    operands: list[Operand]  # in pointer order
    extents: dict[str, int]  # in array order
    launch: dict[str, int]  # launch-time tunables in array order
    scalars: list[float]
    functions: list[LaunchFunction]
    workspace_bytes: int


class FrontEntry(Answer):
    """One point of the Pareto front over time, workspace and determinism."""

    candidate: str
    schedule: dict[str, Any]
    kernel: str
    so_sha256: str
    cubin_sha256: str
    source_sha256: str
    code_digest: str
    toolchain: str
    launch: Launch
    workspace_bytes: int
    deterministic: bool
    verified: Verified
    verdict: dict[str, Any]
    resources: dict[str, Any]
    predicted_us: float | None
    prediction: dict[str, Any] | None
    measured_us: float | None
    measurement: dict[str, Any] | None = None

    @property
    def blobs(self) -> tuple[str, str, str]:
        """What is fetched for it: library, cubin, source."""
        return (self.so_sha256, self.cubin_sha256, self.source_sha256)


class WinnerRecord(Answer):
    """The best known kernels of a problem on a device class; `front[0]` is the fastest."""

    key: str
    revision: int
    operator: str
    problem: dict[str, Any]
    target: str
    device_class: str
    ranked_by: RankedBy
    front: list[FrontEntry] = Field(min_length=1)
    searches: list[dict[str, Any]]
    updated_at: float

    def usable(self, workspace_limit_bytes: int | None = None, deterministic: bool = False) -> list[FrontEntry]:
        """The kernels that need no more workspace than the limit (null: any) and, if asked for, give the same bits in
        every run; the fastest first."""
        return [
            entry
            for entry in self.front
            if (workspace_limit_bytes is None or entry.workspace_bytes <= workspace_limit_bytes)
            and (entry.deterministic or not deterministic)
        ]


class LookupResult(Answer):
    name: str | None
    key: str
    record: WinnerRecord | None  # null: a miss


class Lookups(Answer):
    results: list[LookupResult]
    hits: int
    misses: int


class OperatorReport(Answer):
    operator: str
    schema_: dict[str, Any] = Field(alias="schema")
    tunables: dict[str, Any]  # name -> {allowed, launch_time, meaning}
    search: dict[str, Any]  # JSON Schema of a search

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, serialize_by_alias=True)


class Operators(Answer):
    operators: list[OperatorReport]


class TargetReport(Answer):
    target: str
    name: str
    data_sheet: dict[str, Any]
    toolchains: list[str]  # digests of live toolchains that compile for it
    device_classes: list[str]


class Targets(Answer):
    targets: list[TargetReport]
    toolchains: list[dict[str, Any]]


class TimingRow(Answer):
    operator: str
    job: str | None = None
    day: str | None = None
    problems: int
    cached: int
    seconds: Seconds


class Timings(Answer):
    by: Literal["operator", "job", "day"]
    timings: list[TimingRow]


class Health(Answer):
    """Of /healthz and /readyz: what was looked at and found to be there."""

    status: Literal["ok"]
    checks: dict[str, Literal["ok"]]


class ProblemDetail(Answer):
    """RFC 9457 problem details, with the field at fault and what is allowed."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    field: str | None = None
    allowed: Any | None = None
    errors: list[dict[str, Any]] | None = None
