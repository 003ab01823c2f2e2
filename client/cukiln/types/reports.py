"""What is reported of a job beside its state: profiles, rejections, groups, times."""

from typing import Any, Literal

from pydantic import Field

from cukiln.types.jobs import Answer, ProblemState, RankedBy, Seconds, StageSeconds

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


class ProfileLeftOut(Answer):
    """A problem without a row. `state`: of a job's problem; null of an estimate."""

    problem: str  # its name
    operator: str
    state: ProblemState | None = None
    why: str


class ProfilePage(Answer):
    """`filters` and `opened`: what `ring_bytes` are counted for. Problems without a winner have no row, and are
    `left_out`."""

    filters: Filters
    opened: Opened
    operators: list[ProfileOperator]
    left_out: list[ProfileLeftOut] = Field(default_factory=list)
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
    build: str | None = None  # its id, for `cukiln forget`
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
