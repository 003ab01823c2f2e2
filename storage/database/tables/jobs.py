"""Jobs and what is done for them: problems, candidates, builds, groups, tasks."""

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, MetaData, String, Text, UniqueConstraint, false, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


PENDING_OR_GIVEN_UP = text("state IN ('pending', 'given_up')")
"""Of a build's row: it is in the index of those that are to be compiled, or to be forgotten."""


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    # none_as_null: an absent value is NULL, not the JSON text `null`.
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads a plain dict
        float: Float,
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(none_as_null=True),
    }


class JobRow(Base):
    """One request. `state`: queued, running, done, partial, failed, cancelled; one of `HIDDEN` before all of it is
    written."""

    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    state: Mapped[str] = mapped_column(String(16), index=True)
    cached: Mapped[bool] = mapped_column(default=False)
    priority: Mapped[int] = mapped_column(default=0)  # higher goes first
    # Predicted seconds of its work that workers have taken, and the same before they took the latest:
    # storage.queue.tasks.
    used_seconds: Mapped[float] = mapped_column(default=0.0, server_default=text("0"))
    turn_seconds: Mapped[float] = mapped_column(default=0.0, server_default=text("0"))
    budget_seconds: Mapped[float | None]
    deadline: Mapped[float | None]  # set from the budget when the job starts running
    workspace_limit_bytes: Mapped[int | None] = mapped_column(BigInteger)
    deterministic: Mapped[bool] = mapped_column(default=False, server_default=false())
    ptx: Mapped[str] = mapped_column(String(8), default="winners", server_default=text("'winners'"))  # or all
    created_at: Mapped[float] = mapped_column(index=True)
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    error: Mapped[str | None] = mapped_column(Text)
    name: Mapped[str | None] = mapped_column(String(256), index=True)
    labels: Mapped[dict[str, Any] | None]
    # Digests of a caller's Idempotency-Key and of what was sent with it.
    idempotency: Mapped[str | None] = mapped_column(String(64), index=True, unique=True)
    request: Mapped[str | None] = mapped_column(String(64))


class JobLabelRow(Base):
    """A label of a job, by which it is listed; the job's own row has all of them."""

    __tablename__ = "job_labels"
    # With the time: jobs of a label are listed newest first, a page at a time.
    __table_args__ = (Index(None, "label", "value", "created_at", "job_id"),)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    label: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(256))
    created_at: Mapped[float]  # of the job


class JobProblemRow(Base):
    """One problem of a job. `state`: queued, running, done, failed, cancelled; `cached` when answered without work."""

    __tablename__ = "job_problems"
    # By state: every finished problem asks whether others of its job are still live.
    __table_args__ = (UniqueConstraint("job_id", "position"), Index(None, "job_id", "state"))
    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    position: Mapped[int]
    name: Mapped[str] = mapped_column(String(256))
    operator: Mapped[str] = mapped_column(String(64), index=True)
    problem: Mapped[dict[str, Any]]  # canonical: every default filled in
    target: Mapped[str] = mapped_column(String(16))
    device_class: Mapped[str] = mapped_column(String(128))
    key: Mapped[str] = mapped_column(String(64), index=True)  # of the winner record
    search: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(String(16))
    cached: Mapped[bool] = mapped_column(default=False)
    planned: Mapped[bool] = mapped_column(default=False)
    space_size: Mapped[int] = mapped_column(BigInteger, default=0)
    candidate_count: Mapped[int] = mapped_column(default=0)
    rejections: Mapped[dict[str, Any]] = mapped_column(default=dict)  # rule -> {count, example, message}
    seconds: Mapped[dict[str, Any]] = mapped_column(default=dict)  # stage or phase -> {wall, cpu}
    comparison: Mapped[dict[str, Any] | None]  # of the last few candidates on a GPU: cukiln.types.Comparison
    winner: Mapped[str | None] = mapped_column(String(64))  # candidate id
    error: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]


class CandidateRow(Base):
    """A candidate of a job's problem: what was compiled or verified, never what a rule rejected."""

    __tablename__ = "candidates"
    # Queried often; candidates without a verdict are few at the end of a large problem, and of a shared build.
    __table_args__ = tuple(
        Index(name, column, sqlite_where=text("verdict IS NULL"), postgresql_where=text("verdict IS NULL"))
        for name, column in (("ix_candidates_unjudged", "job_problem_id"), ("ix_candidates_unjudged_build", "build"))
    )
    job_problem_id: Mapped[int] = mapped_column(ForeignKey("job_problems.id", ondelete="CASCADE"), primary_key=True)
    candidate: Mapped[str] = mapped_column(String(64), primary_key=True)
    schedule: Mapped[dict[str, Any]]
    kernel: Mapped[str] = mapped_column(String(64))
    build: Mapped[str] = mapped_column(String(64), index=True)
    verdict: Mapped[str | None] = mapped_column(String(20))  # null until it has one
    message: Mapped[str | None] = mapped_column(Text)
    predicted_us: Mapped[float | None]
    prediction: Mapped[dict[str, Any] | None]
    measured_us: Mapped[float | None]
    measurement: Mapped[dict[str, Any] | None]  # cukiln.types.Measurement


class GroupRow(Base):
    """One .cu file: what a compile worker took at once, for the jobs of its compile task. `state`: compiling, compiled,
    failed, lost, released, cancelled; `kernels`: {build, id, slice, kernel, predicted_seconds} in order."""

    __tablename__ = "groups"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    target: Mapped[str] = mapped_column(String(16))
    toolchain: Mapped[str | None] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    kernels: Mapped[list[Any]]
    predicted_seconds: Mapped[float] = mapped_column(default=0.0)
    source: Mapped[str | None] = mapped_column(String(64))  # blob digests
    log: Mapped[str | None] = mapped_column(String(64))
    library: Mapped[str | None] = mapped_column(String(64))
    cubin: Mapped[str | None] = mapped_column(String(64))
    ptx: Mapped[str | None] = mapped_column(String(64))
    sass: Mapped[str | None] = mapped_column(String(64))  # where a disassembler is found
    # [{name, seconds, start, kernels}]: `start` from the lease of the task, `kernels` by place, where it is not all.
    phases: Mapped[list[Any]] = mapped_column(default=list)
    codegen_seconds: Mapped[dict[str, Any]] = mapped_column(default=dict)  # {wall, cpu}
    compile_seconds: Mapped[dict[str, Any]] = mapped_column(default=dict)
    verify_seconds: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created_at: Mapped[float]
    finished_at: Mapped[float | None]


class BuildRow(Base):
    """A kernel's rendered slice under one toolchain. `state`: pending, compiling, ok, compile_error, compile_timeout,
    given_up (until its candidates are skipped, then it is forgotten).

    A pending build is compiled because a job needs it; from then on it names its group.
    """

    __tablename__ = "builds"
    # Partial, for queries with this very condition: SQLite would prefer an index of all states to the ids in a query,
    # and read every build.
    __table_args__ = (
        Index(
            "ix_builds_unbuilt",
            "state",
            "target",
            "toolchain",
            sqlite_where=PENDING_OR_GIVEN_UP,
            postgresql_where=PENDING_OR_GIVEN_UP,
        ),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kernel: Mapped[str] = mapped_column(String(64), index=True)
    slice: Mapped[str] = mapped_column(String(64), index=True)
    toolchain: Mapped[str] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(String(16))
    kernel_json: Mapped[dict[str, Any] | None]  # the kernel itself, to render it from
    predicted_seconds: Mapped[float] = mapped_column(default=0.0, server_default=text("0"))  # of compiling it
    predicted_bytes: Mapped[float] = mapped_column(default=0.0, server_default=text("0"))
    group_id: Mapped[str | None] = mapped_column(String(32), index=True)
    state: Mapped[str] = mapped_column(String(20))
    # After a file failed without naming a kernel: builds with the same label, and no other, are tried in one file.
    suspect: Mapped[str | None] = mapped_column(String(64), index=True)
    attempts: Mapped[int] = mapped_column(default=0, server_default=text("0"))  # that failed, alone in a file
    losses: Mapped[float] = mapped_column(default=0.0, server_default=text("0"))  # storage.queue.losses
    not_before: Mapped[float | None]  # where it is pending after a loss
    reached: Mapped[dict[str, Any] | None]  # the limit, by name, that ended its compile
    code_digest: Mapped[str | None] = mapped_column(String(64), index=True)
    library: Mapped[str | None] = mapped_column(String(64))  # blob digest of the group library that holds the kernel
    resources: Mapped[dict[str, Any] | None]
    log: Mapped[str | None] = mapped_column(Text)
    imported: Mapped[dict[str, Any] | None]  # the verdict on what was built elsewhere: storage.transfer.imports
    ptx_verdict: Mapped[dict[str, Any] | None]  # storage.entities.libraries.PtxVerdict, of jobs that ask for all
    created_at: Mapped[float]


class PendingBuildRow(Base):
    """A job needs a build that has not been compiled; gone once it has, or nothing waits for it any more."""

    __tablename__ = "pending_builds"
    # In the order in which a worker takes them.
    __table_args__ = (
        Index("ix_pending_builds_longest", "job_id", "target", "toolchain", text("predicted_seconds DESC")),
    )
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    build: Mapped[str] = mapped_column(ForeignKey("builds.id", ondelete="CASCADE"), primary_key=True, index=True)
    target: Mapped[str] = mapped_column(String(16))
    toolchain: Mapped[str] = mapped_column(String(64))
    predicted_seconds: Mapped[float]
    wanted_at: Mapped[float]


class TaskRow(Base):
    """A task. `kind`: plan, compile, verify, measure, compare, finish; `state`: waiting, leased, done, failed,
    cancelled. A compile task is made by the attempt that leases it, and never waits; it may also end lost or
    released.
    """

    __tablename__ = "tasks"
    __table_args__ = (
        UniqueConstraint("kind", "ref"),
        Index("ix_tasks_waiting", "state", "kind"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    # What a worker must serve to take it: an architecture, or for measure and compare a device class.
    target: Mapped[str | None] = mapped_column(String(128))
    # What to work on: "job:first-last" positions, a group id, "group:device" (see storage.transitions.measure), a
    # job_problem.
    ref: Mapped[str] = mapped_column(String(64))
    predicted_seconds: Mapped[float] = mapped_column(default=0.0)
    state: Mapped[str] = mapped_column(String(16), index=True)
    attempt: Mapped[int] = mapped_column(default=0)
    losses: Mapped[float] = mapped_column(default=0.0, server_default=text("0"))  # storage.queue.losses
    token: Mapped[str | None] = mapped_column(String(32))  # of the present attempt
    worker: Mapped[str | None] = mapped_column(String(128))
    lease_expires_at: Mapped[float | None] = mapped_column(index=True)
    created_at: Mapped[float]
    available_at: Mapped[float | None]  # since when it waits again; null: since its creation
    not_before: Mapped[float | None]  # where it waits after a loss
    started_at: Mapped[float | None]  # of the present attempt, or the last
    finished_at: Mapped[float | None]
    phases: Mapped[list[Any] | None]  # as those of groups: of the compiles of a finish task
    # Attempts after which it waited again: see storage.queue.new_tasks.
    past: Mapped[list[Any]] = mapped_column(default=list, server_default=text("'[]'"))
    error: Mapped[str | None] = mapped_column(Text)


class PauseRow(Base):
    """A worker that takes no work for now, and why."""

    __tablename__ = "pauses"
    worker: Mapped[str] = mapped_column(String(128), primary_key=True)
    reason: Mapped[str] = mapped_column(Text)
    told_at: Mapped[float]


class TaskJobRow(Base):
    """The jobs that need a task. A task that is `wanted` by no job any more is cancelled."""

    __tablename__ = "task_jobs"
    task_id: Mapped[int] = mapped_column(ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True, index=True)
    wanted: Mapped[bool] = mapped_column(default=True)
    # Of a compile task: how long the job's builds had been pending. Jobs that join a running file: 0.
    waited_seconds: Mapped[float] = mapped_column(default=0.0, server_default=text("0"))


LIVE = ("queued", "running")
ACCEPTING, ABANDONED = HIDDEN = ("accepting", "abandoned")
"""Of a large job that is written in parts: nothing shows it, and nothing is done for it."""

COMPILE_FAILURES = ("compile_error", "compile_timeout")
UNBUILT = ("pending", "compiling")
BUILT = ("ok", *COMPILE_FAILURES)
