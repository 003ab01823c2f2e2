"""Jobs, their problems and candidates; measurements. Base of all answers."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Priority = Literal["low", "normal", "high"]
JobState = Literal["queued", "running", "done", "partial", "failed", "cancelled"]
ENDED: tuple[JobState, ...] = ("done", "partial", "failed", "cancelled")
ProblemState = Literal["queued", "running", "done", "failed", "cancelled"]
VerdictName = Literal["ok", "compile_error", "compile_timeout", "runtime_error", "run_timeout", "incorrect", "skipped"]
PtxAsked = Literal["winners", "all"]
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
    overhead_us: float | None = None  # of a sample, beside its launches: taken off
    stopped: Literal["tight", "time", "loser"]  # the interval was narrow enough; the time was up; clearly slower


class VendorRatio(Answer):
    """The vendor's library beside a kernel of ours: its time over the kernel's, from samples of the same rounds, with
    the ends of a 95 % interval. `tie`: the difference is below 1 %, or not certain to be more; an interval that holds 1
    always is one."""

    ratio: float
    low: float
    high: float
    tie: bool


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
    vendor_ratio: VendorRatio | None = None  # null: there was no vendor, or an older release compared them


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
    launches_per_sample: int | None = None  # of each contender and the vendor
    overhead_us: float | None = None  # of a sample, beside its launches: taken off
    unsteady: list[str] = []  # what changed of the GPU meanwhile, twice: the times may be other ones, ratios hardly
    limited_by: list[str] = []  # throttle reasons before and after: times are of a GPU that was held back throughout


class MeasuredOn(RunOn):
    """Where a time comes from."""

    rounds: int | None = None  # of a comparison, with interleaved runs of all contenders; null: it was measured alone
    unsteady: list[str] = []  # as in Comparison; so are the next two
    limited_by: list[str] = []
    vendor_missing: str | None = None


class RunnerUp(Answer):
    """The best of the others. `margin`: how much longer it takes, as a share of the winner's time. `low`, `high`: the
    ends of its 95 % interval, of samples of the same rounds; null where they are of no comparison, or neither is the
    fastest of it, to which its ratios are."""

    candidate: str
    us: float
    margin: float
    tie: bool
    low: float | None = None
    high: float | None = None


class PromisedOutput(Answer):
    """What a GPU must give to the bit: the SHA-256 of a kernel's output elements, row by row, on inputs of a kind that
    `seed` makes (`Operator.make_inputs`). Another NumPy or C library may make others of it: `inputs_sha256` says which
    they are. `launch`: the launch-time values."""

    extents: list[int]
    kind: Literal["integer", "normal"]
    seed: int
    launch: list[int]
    inputs_sha256: str
    sha256: str


class PtxMark(Answer):
    """What the PTX that nvcc made of the kernel showed, run on the CPU before it was published. `untranslated`:
    something has no translation, as `message` says, so it was not run; that says nothing of the kernel.
    Whatever it found wrong was not published."""

    verdict: Literal["ok", "untranslated"]
    message: str | None = None
    cpu_seconds: float  # g++ and the run; a library that was there already has those of then
    # Empty where some rounding is left to ptxas or the GPU. Null: of an older record, and in what a job says.
    promised: list[PromisedOutput] | None = None
    # Of the GPU that the kernel was verified on: which of these it did not give. Its elements are within their bounds.
    broken: str | None = None


class PtxCost(Answer):
    """Of a problem whose every candidate is run from its PTX: kernels by verdict, those known from another job too, and
    the CPU seconds that were spent for this one. They are in `seconds.verify` as well."""

    kernels: dict[str, int]
    cpu_seconds: float


class WinnerSummary(Answer):
    candidate: str
    schedule: dict[str, Any]
    verified: Verified
    ptx: PtxMark | None = None
    ranked_by: RankedBy
    predicted_us: float | None
    measured_us: float | None
    vendor_us: float | None = None  # of the vendor's library, from the same run
    vendor_library: str | None = None  # its name
    vendor_max_error: float | None = None  # as in VendorResult
    vendor_error_bound: float | None = None
    vendor_ratio: VendorRatio | None = None  # of the comparison that the winner was in; so are the next three
    vendor_missing: str | None = None  # why there was no vendor in it
    unsteady: list[str] = []
    limited_by: list[str] = []
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
    ptx: PtxCost | None = None  # null: the job asks for its winners alone
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
    name: str | None = None
    labels: dict[str, str] | None = None
    state: JobState
    cached: bool
    created_at: float
    finished_at: float | None = None


class Job(JobHead):
    priority: Priority
    started_at: float | None = None
    budget_seconds: float | None = None
    ptx: PtxAsked = "winners"
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
    """Bank conflicts at one place of the source. The counts are sums over the blocks of the CPU's race-checked cases,
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
    ptx: PtxMark | None = None  # null: no job has asked for it; what was wrong is `verdict`
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
