"""The answers of the service, defined once for service and client. Durations are seconds unless the name says `_us`."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

JobState = Literal["queued", "running", "done", "partial", "failed", "cancelled"]
ENDED: tuple[JobState, ...] = ("done", "partial", "failed", "cancelled")
ProblemState = Literal["queued", "running", "done", "failed", "cancelled"]
VerdictName = Literal["ok", "compile_error", "compile_timeout", "runtime_error", "run_timeout", "incorrect", "skipped"]
Verified = Literal["gpu", "cpu", "cpu-unconfirmed"]
RankedBy = Literal["measured", "predicted"]
StageName = Literal["lower", "codegen", "compile", "verify", "measure"]
# Of one compile: the wait for a worker, our text, nvcc's steps and what it took beside them, g++ on the host side, the
# linker, the blobs' way into the store.
PhaseName = Literal["queue", "render", "preprocess", "cicc", "ptxas", "nvcc", "host", "link", "upload"]


class Answer(BaseModel):
    """Base of all answers: frozen; unknown fields of a newer service are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StageSeconds(Answer):
    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: "StageSeconds") -> "StageSeconds":
        return StageSeconds(wall=self.wall + other.wall, cpu=self.cpu + other.cpu)


class Seconds(Answer):
    """Time spent per stage."""

    lower: StageSeconds = StageSeconds()
    codegen: StageSeconds = StageSeconds()
    compile: StageSeconds = StageSeconds()
    verify: StageSeconds = StageSeconds()
    measure: StageSeconds = StageSeconds()


class RunOn(Answer):
    """Where and when times were measured: the GPU, its driver, and what state it was in."""

    device: str
    uuid: str
    driver: str
    cold: bool  # whether every run found its operands outside the L2
    before: dict[str, Any]  # clocks, temperature, power, throttle reasons, other processes
    after: dict[str, Any]
    measured_at: float


class Measurement(RunOn):
    """Times of one candidate on one GPU, in microseconds of a run. The interval holds the true median with 95 %."""

    median_us: float
    low_us: float
    high_us: float
    spread: float  # the distance of the quartiles, as a share of the median
    samples: int
    launches_per_sample: int
    stopped: Literal["tight", "time", "loser"]  # the interval was narrow enough; the time was up; clearly slower


class Contender(Answer):
    """One of the last few, from interleaved runs. `ratio`: its time over the best one's, with a 95 % interval of
    the ratio; a `tie` with the best one is a difference that is below what is called one, or not certain."""

    candidate: str
    median_us: float
    low_us: float
    high_us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    tie: bool
    max_error: float | None = None
    error_bound: float | None = None  # at the place of max_error
    tflops: float | None = None


class VendorResult(Answer):
    """The vendor's library on the same problem, in the same process, its runs interleaved with ours."""

    library: str
    version: str
    algorithm: str
    fused: bool  # whether the whole epilogue is in its kernel
    workspace_bytes: int
    median_us: float
    low_us: float
    high_us: float
    max_error: float | None = None
    error_bound: float | None = None


class Comparison(RunOn):
    """The last few candidates of a problem, fastest first, and the vendor's library."""

    contenders: list[Contender]
    vendor: VendorResult | None
    vendor_missing: str | None = None  # why there is none
    rounds: int


class MeasuredOn(RunOn):
    """Where a time comes from."""

    rounds: int | None = None  # of a comparison, with interleaved runs of all contenders; null: it was measured alone


class RunnerUp(Answer):
    """The best of the others. `margin`: how much longer it takes, as a share of the winner's time."""

    candidate: str
    us: float
    margin: float
    tie: bool


class WinnerSummary(Answer):
    candidate: str
    schedule: dict[str, Any]
    verified: Verified
    ranked_by: RankedBy
    predicted_us: float | None
    measured_us: float | None
    vendor_us: float | None = None  # of the vendor's library, from the same run
    vendor_library: str | None = None  # its name
    vendor_max_error: float | None = None  # as in VendorResult
    vendor_error_bound: float | None = None
    runner_up: RunnerUp | None = None
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

    `done` counts completed work: what a cancel or a spent budget left out counts in `total` only.
    """

    lower: StageProgress  # problems
    compile: StageProgress  # kernels
    verify: StageProgress  # candidates
    measure: StageProgress = StageProgress(done=0, total=0)  # candidates of problems on a GPU that are not wrong
    finish: StageProgress  # problems
    candidates_done: int
    candidates_failed: int
    eta_seconds: float | None = None
    waiting_for: str | None = None  # why no work can start, if so: no GPU, a full disk


class JobHead(Answer):
    job: str
    state: JobState
    cached: bool
    created_at: float
    finished_at: float | None = None


class Job(JobHead):
    priority: Literal["low", "normal", "high"]
    started_at: float | None = None
    budget_seconds: float | None = None
    progress: Progress
    seconds: Seconds
    problems: list[ProblemReport]
    error: str | None = None


class JobSummary(JobHead):
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
    ideal: int  # the same without bank conflicts


class TriedCandidate(Answer):
    device_class: str
    candidate: str
    schedule: dict[str, Any]
    kernel: str
    verdict: VerdictName | None
    message: str | None
    predicted_us: float | None
    measured_us: float | None


class CandidateReport(TriedCandidate):
    problem: str
    group: str | None
    verified: Verified | None
    max_error: float | None = None  # absolute, the largest over the verification plan's random inputs
    error_bound: float | None = None  # at the place of max_error
    registers: int | None = None
    shared_bytes: int | None = None
    spill_bytes: int | None = None
    # Counted in the CPU run, on reduced extents; the most lost wavefronts first. Null: it was not run.
    shared_memory: list[SharedAccess] | None = None
    occupancy: float | None = None
    spread: float | None = None  # of the samples: the distance of the quartiles, as a share of the median
    tflops: float | None = None  # from the measured time


class CandidatePage(Answer):
    candidates: list[CandidateReport]
    next_cursor: str | None = None


class CandidateFacts(TriedCandidate):
    """All that is known of one candidate; what is not known yet is null."""

    job: str
    name: str  # of the problem in that job
    operator: str
    problem: dict[str, Any]  # canonical
    target: str
    slice: str | None
    code_digest: str | None
    toolchain: dict[str, Any] | None  # versions and flags of what compiled it
    details: dict[str, Any] | None  # of the verification: device kind, plan version, seeds, cases
    measurement: Measurement | None
    cubin_sha256: str | None  # of the winner record that it stands in, if it does
    source_sha256: str | None


Filters = Literal["secret", "public"]
Opened = Literal["multiplied", "inputs"]


class ProfileCounts(Answer):
    """A row of a profile. `times` executed: a primitive by lanes, or by warps where a warp executes it together.
    `multiplications`: of the problem, those with zeros of a padding too; `executed`: those of whole tiles. Bytes are
    those that lanes ask for: what a cache answers counts each time. Null: of no such row, or unknown."""

    name: str
    times: int
    seconds: float | None  # a kernel's are predicted; a primitive's are those of its roof alone, which others hide
    seconds_from: RankedBy | None
    multiplications: int
    executed: int
    limb_products: int  # of bytes, on tensor cores over a ring
    truncations: int
    bytes_read: int
    bytes_written: int
    launches: int
    workspace_bytes: int | None = None
    ring_bytes: int | None = None  # that one party of a two-party evaluation sends; comparisons are not in it
    once_for: str | None = None  # of a launch that many calls with this operand may share (`transform` of the library)


class RingForm(Answer):
    """What a convolution over a ring sends in one form; `ours`: one that a schedule has."""

    name: str
    filters: Filters
    ours: bool
    ring_bytes: int
    truncations: int
    multiplications: int


class ProfileKernel(Answer):
    counts: ProfileCounts
    primitives: list[ProfileCounts]


class ProfileOperator(Answer):
    """One run of a problem's winner; of an estimate, of the schedule that is predicted fastest."""

    problem: str  # its name
    operator: str
    target: str
    device_class: str
    candidate: str
    schedule: dict[str, Any]
    counts: ProfileCounts
    kernels: list[ProfileKernel]
    ring_forms: list[RingForm] = Field(default_factory=list)


class ProfilePage(Answer):
    """`filters` and `opened`: what `ring_bytes` are counted for. Problems without a winner have no row."""

    filters: Filters
    opened: Opened
    operators: list[ProfileOperator]
    next_cursor: str | None = None


class RejectionReport(Answer):
    problem: str
    rule: str
    count: int
    example: dict[str, Any]
    message: str


class Rejections(Answer):
    rejections: list[RejectionReport]


class AttributedSeconds(Answer):
    """A kernel's part of its file's phases, after predicted seconds: no compiler says what one took. Not measured."""

    attributed: Literal[True] = True
    phases: dict[str, float]


class GroupKernel(Answer):
    build: str | None = None  # its id, by which `cukiln forget` knows it
    kernel: str
    namespace: str
    operator: str
    tunables: dict[str, Any]
    state: str
    code_digest: str | None
    resources: dict[str, Any] | None
    log: str | None
    predicted_seconds: float = 0.0  # of compiling it
    seconds: AttributedSeconds | None = None


class Phase(Answer):
    """A step of a group's compile, in wall seconds; a group of several files has each step several times."""

    name: str  # a PhaseName
    seconds: float
    start: float | None = None  # from when a worker began; before that for the queue
    kernels: list[int] | None = None  # places in the group's list; None: all of them


class GroupReport(Answer):
    """One .cu file: what a compile worker leased at once, for all its `jobs`. `state`: compiling, compiled; or failed,
    lost, released or cancelled, and then its kernels are compiled in other groups, where they are still needed."""

    group: str
    jobs: list[str]
    target: str
    state: str
    toolchain: str | None
    kernels: list[GroupKernel]
    phases: list[Phase]
    predicted_seconds: float
    codegen: StageSeconds = StageSeconds()
    compile: StageSeconds
    verify: StageSeconds
    source_sha256: str | None
    log_sha256: str | None
    library_sha256: str | None
    cubin_sha256: str | None
    ptx_sha256: str | None = None
    sass_sha256: str | None = None


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
    `functions` are launched in their order, on one stream."""

    operands: list[Operand]  # in pointer order: inputs, then outputs
    extents: dict[str, int]  # what tensors show, in array order
    attributes: dict[str, int] = {}  # what none shows (stride, padding), in array order
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
    resources: dict[str, Any]
    predicted_us: float | None
    prediction: dict[str, Any] | None
    measured_us: float | None
    measurement: Measurement | Contender | None = None  # how: in the last comparison, or alone
    measured_on: MeasuredOn | None = None  # where, and when
    imported: Imported | None = None  # null: measured by this service

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
    runner_up: RunnerUp | None = None  # of the measured; null where nothing was measured or no other was correct
    vendor: VendorResult | None = None  # of the run that measured the front
    searches: list[dict[str, Any]]
    updated_at: float

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
    builds: list[str] = []  # ids
    verdicts: int = 0
    measurements: int = 0
    libraries: int = 0  # of winners
    in_use: list[str] = []  # builds that stay, because a job that has not ended needs them


class LookupResult(Answer):
    name: str | None
    key: str
    record: WinnerRecord | None  # null: a miss


class Lookups(Answer):
    results: list[LookupResult]
    hits: int
    misses: int


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


class TimingRow(Answer):
    operator: str
    job: str | None = None
    day: str | None = None
    problems: int
    cached: int
    seconds: Seconds
    # Wall seconds by PhaseName: `queue` of all work for the problems, the others of their compiles.
    phases: dict[str, float] = Field(default_factory=dict)


class Timings(Answer):
    by: Literal["operator", "job", "day"]
    timings: list[TimingRow]


class TimelineStep(Answer):
    """One attempt at a piece of work. Times are Unix seconds; it waited from `queued_at` to `started_at`."""

    kind: Literal["plan", "compile", "verify", "measure", "compare", "finish"]
    target: str | None  # an architecture, or the device class it is measured on
    # Of the work, or how an attempt ended after which it waited again: released, failed, lost.
    state: str
    attempt: int
    worker: str | None
    queued_at: float
    started_at: float | None = None
    finished_at: float | None = None


class TimelineLane(Answer):
    """All steps of one subject: problems to plan, a group, or a problem to finish."""

    name: str
    group: str | None = None
    kernels: int | None = None
    steps: list[TimelineStep]


class Timeline(Answer):
    """A job's work on a time axis, the first begun first."""

    job: str
    at: float  # when this was read: running steps have come so far
    created_at: float
    finished_at: float | None = None
    lanes: list[TimelineLane]
    lanes_left_out: int = 0


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
    field: str | None = None
    allowed: Any | None = None
    errors: list[dict[str, Any]] | None = None
