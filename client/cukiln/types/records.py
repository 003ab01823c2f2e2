"""Winner records and how they are launched, lookups, imports; what the service has; problem details."""

import time
from typing import Any, Literal

from pydantic import ConfigDict, Field

from cukiln.types.jobs import (
    Answer,
    Contender,
    MeasuredOn,
    Measurement,
    ProblemState,
    PtxMark,
    RankedBy,
    RunnerUp,
    VendorRatio,
    VendorResult,
    Verified,
)


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


class LaunchTransform(Answer):
    """The first of `functions` alone reads this operand. The library exports `transform`, which writes that many bytes,
    and `run_transformed`, which takes them in the operand's place, so that many calls share one transform."""

    operand: str
    bytes: int


class Launch(Answer):
    """How to call the library. The plain C entry is
    `int cukiln_launch(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars,
    void* workspace, void* stream)`, whose second array holds extents, then attributes; the tvm-ffi entry is
    `run(*operands, workspace, *attributes, *scalars)`, with a workspace only where `workspace_bytes` is not 0.
    `functions` are launched in their order, on one stream; of a record that is `tuned_for` another problem they are
    empty."""

    operands: list[Operand]  # in pointer order: inputs, then outputs
    extents: dict[str, int]  # what tensors show, in array order
    attributes: dict[str, int] = Field(default={})  # what none shows (stride, padding), in array order
    launch: dict[str, int]  # launch-time tunables in array order
    scalars: list[float]
    functions: list[LaunchFunction]
    workspace_bytes: int
    transform: LaunchTransform | None = None


class ImportHead(Answer):
    id: str  # of its job
    by: str  # the name of the key that sent it
    uuid: str
    measured_at: float
    imported_at: float


class Imported(ImportHead):
    """The origin of a kernel that was measured elsewhere."""

    device: str


class FrontEntry(Answer):
    """One point of the Pareto front over time, workspace and determinism."""

    candidate: str
    schedule: dict[str, Any]
    kernel: str
    so_sha256: str
    cubin_sha256: str
    source_sha256: str
    ptx_sha256: str | None = None
    sass_sha256: str | None = None  # where a disassembler was found
    code_digest: str
    toolchain: str
    launch: Launch
    workspace_bytes: int
    deterministic: bool
    verified: Verified
    verdict: dict[str, Any]
    ptx: PtxMark | None = None  # null: of target `cpu`, of an older record, or the service runs none
    resources: dict[str, Any]
    predicted_us: float | None
    prediction: dict[str, Any] | None
    measured_us: float | None
    measurement: Measurement | Contender | None = None  # how: in the last comparison, or alone
    measured_on: MeasuredOn | None = None  # where, and when
    imported: Imported | None = None  # null: measured by this service

    @property
    def vendor_ratio(self) -> VendorRatio | None:
        """Of the comparison that it was in."""
        return self.measurement.vendor_ratio if isinstance(self.measurement, Contender) else None

    @property
    def files(self) -> dict[str, str]:
        """What is fetched for it: digests by the suffix that their files get, library, cubin and source first."""
        files = {"so": self.so_sha256, "cubin": self.cubin_sha256, "cu": self.source_sha256}
        return files | {
            kind: digest for kind, digest in (("ptx", self.ptx_sha256), ("sass", self.sass_sha256)) if digest
        }

    @property
    def blobs(self) -> tuple[str, ...]:
        """The digests of its files."""
        return tuple(self.files.values())


class TunedFor(Answer):
    """The problem whose record lent its kernels. `distance`: over the axes of all operands, the sum of |log2| of the
    ratio of their lengths."""

    key: str
    revision: int
    device_class: str
    problem: dict[str, Any]
    distance: float


class WinnerRecord(Answer):
    """The best known kernels of a problem on a device class; `front[0]` is the fastest.

    `tuned_for`: these kernels were tuned for another problem, and are right for this one: the problem's own record is
    still to be made. Revision 0; its times are predicted for this problem, its `functions` are empty (the library plans
    its launches itself)."""

    key: str
    revision: int
    operator: str
    problem: dict[str, Any]
    target: str
    emulates: str | None = None  # of target `cpu`, whose libraries take CPU tensors: the architecture of all else
    device_class: str
    cuda: int = 13  # whose compiler made the kernels: 13 needs a driver of release 580 or later, 12 of 525
    ranked_by: RankedBy
    front: list[FrontEntry] = Field(min_length=1)
    runner_up: RunnerUp | None = None  # of the measured; null where nothing was measured or no other was correct
    vendor: VendorResult | None = None  # of the run that measured the front
    searches: list[dict[str, Any]]
    updated_at: float
    tuned_for: TunedFor | None = None

    def vendor_won(self, entry: FrontEntry) -> bool:
        """Whether the vendor's library, which frameworks call, was measured to be faster than this kernel; a tie is not
        enough."""
        if (compared := entry.vendor_ratio) is not None:
            return compared.ratio < 1 and not compared.tie
        if self.vendor is None or entry.measured_us is None:
            return False
        return self.vendor.median_us < entry.measured_us

    def usable(self, workspace_limit_bytes: int | None = None, deterministic: bool = False) -> list[FrontEntry]:
        """The kernels within the limit (null: any) that, if asked for, give the same bits in every run."""
        return [
            entry
            for entry in self.front
            if (workspace_limit_bytes is None or entry.workspace_bytes <= workspace_limit_bytes)
            and (entry.deterministic or not deterministic)
        ]


class Forgotten(Answer):
    """Results that were deleted; the next job that needs them computes them again."""

    key: str | None = None  # of the winner record
    builds: list[str] = Field(default=[])  # ids
    verdicts: int = 0
    measurements: int = 0
    libraries: int = 0  # of winners
    in_use: list[str] = Field(default=[])  # builds that stay, because a job that has not ended needs them


class Tuning(Answer):
    """Of a miss, where `on_miss` is not `none`: the job that makes the record, or has failed to."""

    job: str
    state: ProblemState


OnMiss = Literal["none", "tune", "nearest"]


class LookupResult(Answer):
    name: str | None
    key: str
    record: WinnerRecord | None  # null: a miss; `tuned_for` another problem: a miss with kernels of a neighbour
    tuning: Tuning | None = None


class LookedUp(LookupResult):
    """What `Client.lookup` answers. `at`: when the service gave this answer, in Unix seconds, 0 where it gave none;
    `unanswered`: then why, and `key` is empty."""

    at: float = 0.0
    unanswered: str | None = None

    @property
    def is_winner(self) -> bool:
        """Whether the record is the problem's own."""
        return self.record is not None and self.record.tuned_for is None

    @property
    def is_of_neighbour(self) -> bool:
        """Whether its kernels were tuned for another problem."""
        return self.record is not None and self.record.tuned_for is not None

    @property
    def age(self) -> float:
        """Seconds since the service gave this answer."""
        return time.time() - self.at


class Lookups(Answer):
    """`not_queued`: why `on_miss` made no job."""

    results: list[LookupResult]
    hits: int
    misses: int
    not_queued: str | None = None


class PartialResult(Answer):
    """Of a lookup that named fields: the record has these alone."""

    name: str | None
    key: str
    record: dict[str, Any] | None
    tuning: Tuning | None = None


class PartialLookups(Answer):
    results: list[PartialResult]
    hits: int
    misses: int
    not_queued: str | None = None


class ImportReport(ImportHead):
    """Results that were measured elsewhere. `records`: the winner records that they have a part in."""

    overwrites: bool
    device_class: str
    driver: str
    withdrawn_at: float | None
    records: int


class ImportPage(Answer):
    imports: list[ImportReport]
    next_cursor: str | None


class OperatorReport(Answer):
    operator: str
    schema_: dict[str, Any] = Field(alias="schema")
    tunables: dict[str, Any]  # name -> {allowed, default, launch_time, meaning}
    search: dict[str, Any]  # JSON Schema of a search

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, serialize_by_alias=True)


class Operators(Answer):
    operators: list[OperatorReport]


class TargetReport(Answer):
    target: str
    name: str
    data_sheet: dict[str, Any]
    toolchains: list[str]  # digests of live toolchains that compile for it
    device_classes: list[str]  # what a problem may name: those of live GPUs, and `predicted:<target>`
    emulates: str | None = None  # of `cpu`: the architecture whose kernels its libraries compute on the CPU


class DeviceReport(Answer):
    """A GPU with a live worker, or one that was drained lately, and why."""

    device_class: str
    uuid: str
    capability: str
    driver: str
    multiprocessors: int
    memory_bytes: int
    worker: str
    seen_at: float
    drained: str | None = None


class Targets(Answer):
    targets: list[TargetReport]
    toolchains: list[dict[str, Any]]
    devices: list[DeviceReport] = Field(default_factory=list)
    paused: dict[str, list[str]] = Field(default_factory=dict)  # workers that take no work now, by the reason


class Health(Answer):
    """Of /healthz and /readyz: the checks that passed."""

    status: Literal["ok"]
    checks: dict[str, Literal["ok"]]


class ProblemDetail(Answer):
    """RFC 9457 problem details, with the field at fault and what is allowed."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    request_id: str | None = None  # the X-Request-ID of the answer, which the service's log has, too
    field: str | None = None
    allowed: Any | None = None
    errors: list[dict[str, Any]] | None = None
