"""A real database in a temporary folder, and a small way through it: jobs, plans, compiled and verified groups.

Every test runs on SQLite, and on PostgreSQL where its binaries are: on a schema of its own.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select, text

from cukiln.types import FrontEntry, Launch, StageSeconds, WinnerRecord
from storage.database.session import Database, Session
from storage.database.tables import Base, JobProblemRow
from storage.entities.candidates import candidates_of_problem
from storage.entities.groups import GroupKernel, NewBuild, kernels_of, load_group
from storage.entities.jobs import problems_to_plan
from storage.entities.stage_times import add_seconds
from storage.entities.verdicts import NewVerdict
from storage.queue import tasks
from storage.queue.tasks import Lease
from storage.transfer.withdrawals import find_broken_off
from storage.transitions import accept, end_jobs, take_work
from storage.transitions.accept import CreatedJob, NewJob, NewProblem
from storage.transitions.apply_verdicts import Followed, NextStep, Versions
from storage.transitions.end_jobs import expire_budgets, find_ended
from storage.transitions.groups import (
    BuildOutcome,
    GroupFiles,
    apply_group_verdicts,
    builds_to_verify,
    complete_group,
    complete_verified,
    record_builds,
    record_verdicts,
    verify_shares,
    what_follows,
)
from storage.transitions.measure import (
    Measured,
    ToMeasure,
    apply_measured_verdicts,
    candidates_to_measure,
    complete_measured,
    record_measured,
)
from storage.transitions.pending_builds import NewCandidate, PlannedProblem, end_plan, record_candidates
from storage.transitions.take_work import FileLimits
from tests.support.fake_clock import FakeClock
from tests.support.postgres_server import binaries, running_postgres

BACKENDS = ["sqlite", "postgres"]


class EveryOperator(dict[str, str]):
    """The same version of the verification plan for whatever operator."""

    def __init__(self, version: str) -> None:
        super().__init__(matmul=version)
        self._version = version

    def __missing__(self, operator: str) -> str:
        return self._version


CPU_PLAN = {"plans": EveryOperator("1")}
GPU_CLASS, OTHER_CLASS, DRIVER = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "570.1"
VERSIONS: dict[str, Any] = {
    "cpu_plans": EveryOperator("1"),
    "gpu_plans": EveryOperator("g1"),
    "drivers": {GPU_CLASS: DRIVER, OTHER_CLASS: DRIVER},
}
# What a CPU run counts of accesses to shared memory: one with bank conflicts, one without.
SITES: list[dict[str, Any]] = [
    {"site": "tile.cuh:7", "kind": "write", "bytes": 4, "warp_accesses": 8, "wavefronts": 32, "ideal": 8},
    {"site": "tile.cuh:9", "kind": "ldmatrix", "bytes": 16, "warp_accesses": 8, "wavefronts": 32, "ideal": 32},
]
TARGET, TOOLCHAIN = "sm_80", "t" * 64


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a server of this run's own."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed. Debian, Ubuntu: apt install postgresql")
    with running_postgres() as url:
        yield url


@contextmanager
def fresh_schema(server: str) -> Iterator[str]:
    """The URL of a schema with nothing in it yet."""
    schema = f"test_{uuid.uuid4().hex}"
    admin = Database(server)
    with admin.write() as session:
        session.execute(text(f"CREATE SCHEMA {schema}"))
    try:
        yield f"{server}&options=-csearch_path%3D{schema}"
    finally:
        with admin.write() as session:
            session.execute(text(f"DROP SCHEMA {schema} CASCADE"))
        admin.dispose()


@pytest.fixture(scope="session")
def migrated_postgres(postgres: str) -> Iterator[Database]:
    """A schema with all tables. Emptying them takes a twentieth of what making them does."""
    with fresh_schema(postgres) as url:
        migrated = Database(url)
        migrated.migrate()
        yield migrated
        migrated.dispose()


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database with nothing in it yet; that of the fixture `database`, where a test has both."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'cukiln.db'}"
    elif "database" in request.fixturenames:
        migrated: Database = request.getfixturevalue("migrated_postgres")
        yield migrated.url.render_as_string(hide_password=False)
        with migrated.write() as session:
            # Without a look for references to each row: all tables are emptied.
            session.execute(text("SET LOCAL session_replication_role = replica"))
            for table in reversed(Base.metadata.sorted_tables):
                session.execute(table.delete())
            sequences = "SELECT setval(oid::regclass, 1, false) FROM pg_class WHERE relkind = 'S'"
            session.execute(text(f"{sequences} AND relnamespace = current_schema()::regnamespace"))
    else:
        with fresh_schema(request.getfixturevalue("postgres")) as url:
            yield url


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@cache
def _migrated() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cukiln.db")
        template = Database(f"sqlite:///{path}")
        template.migrate()
        template.dispose()  # the last connection writes the log back into the file
        return path.read_bytes()


def write_migrated(path: Path) -> Path:
    """A migrated SQLite file: migrating takes longer than most tests."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(_migrated())
    return path


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To copy."""
    return write_migrated(tmp_path_factory.mktemp("migrated") / "cukiln.db")


@pytest.fixture
def database(database_url: str, clock: FakeClock) -> Iterator[Database]:
    opened = Database(database_url, clock)
    if opened.is_sqlite:
        write_migrated(Path(str(opened.url.database)))
    yield opened
    opened.dispose()


@contextmanager
def counted_statements(database: Database) -> Iterator[list[str]]:
    """The statements that are executed inside."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        seen.append(statement)

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(database.engine, "before_cursor_execute", note)


def new_problem(name: str = "p", **changes: Any) -> NewProblem:
    values: dict[str, Any] = {
        "name": name,
        "operator": "matmul",
        "problem": {"operator": "matmul", "m": 64},
        "target": TARGET,
        "device_class": "predicted:sm_80",
        "key": f"{name:k>64}",
        "search": {"level": 1},
    }
    return NewProblem(**{**values, **changes})


def add_job(database: Database, count: int = 1, **changes: Any) -> CreatedJob:
    """A job of `count` problems p0, p1, …"""
    with database.write() as session:
        return accept.create_job(session, NewJob([new_problem(f"p{n}") for n in range(count)], **changes))


def problem_ids(session: Session, job_id: str) -> list[int]:
    """Ids of the job's problems in the order of the request."""
    query = select(JobProblemRow.id).where(JobProblemRow.job_id == job_id).order_by(JobProblemRow.position)
    return list(session.scalars(query))


def take_one(database: Database, *kinds: str, worker: str = "w", seconds: float = 5.0, kernels: int = 48) -> Lease:
    """`kernels`: at most, of a file that it compiles."""
    with database.write() as session:
        lease = take_work.take(session, kinds, None, worker, seconds, FileLimits(kernels=kernels))
    assert lease is not None, f"no {kinds} item waits"
    return lease


def new_build(name: str, built_from: str | None = None, **changes: Any) -> NewBuild:
    """Build `name`; its slice has the same name unless said otherwise."""
    values: dict[str, Any] = {
        "id": name,
        "kernel": f"{name:0>64}",
        "slice": built_from or f"slice-{name}",
        "kernel_json": {"operator": "matmul", "tunables": {"n": name}},
        "target": TARGET,
        "toolchain": TOOLCHAIN,
    }
    return NewBuild(**{**values, **changes})


def record(session: Session, lease: Lease, builds: Sequence[str], **versions: Any) -> Followed:
    """Plan the problems of the task, each with one candidate per build."""
    return record_as(session, lease, {f"c-{build}": build for build in builds}, **versions)


def record_as(session: Session, lease: Lease, candidates: Mapping[str, str], **versions: Any) -> Followed:
    """Plan the problems of the task, each with these candidates (by id, with their builds), and complete it."""
    problems = problems_to_plan(session, lease)
    pairs = [
        (problem.id, NewCandidate(name, {"n": build}, f"{build:0>64}", build))
        for problem in problems
        for name, build in candidates.items()
    ]
    builds = {build: new_build(build) for build in candidates.values()}
    followed = record_candidates(session, lease, pairs, builds, Versions(**{**VERSIONS, **versions}))
    next_steps = [*followed.next_steps]
    for problem in problems:
        planned = PlannedProblem(
            problem.id,
            candidate_count=len(candidates),
            space_size=len(candidates) + 2,
            rejections={"rule": {"count": 2, "example": {"n": 9}, "message": "too many"}},
            lower=StageSeconds(wall=0.5, cpu=0.25),
        )
        next_steps += end_plan(session, lease, planned, lease.waited_seconds / len(problems))
    tasks.complete(session, lease)
    return Followed(sorted(next_steps), followed.waiting)


def plan_next(database: Database, *builds: str) -> Followed:
    lease = take_one(database, "plan")
    with database.write() as session:
        return record(session, lease, builds)


def compile_leased(database: Database, lease: Lease, bad: Sequence[str] = (), wall: float = 8.0) -> Followed:
    """Record the group of a leased compile task: all builds ok but the bad ones."""
    with database.write() as session:
        group = load_group(session, lease.ref)
        assert group is not None
        outcomes = [
            BuildOutcome(kernel.build, "compile_error", log="x.cu(7): error: no such thing")
            if kernel.build in bad
            else BuildOutcome(
                kernel.build,
                "ok",
                f"code-{kernel.build}",
                {"registers": 32, "static_shared_bytes": 16, "dynamic_shared_bytes": 48, "spill_load_bytes": 4},
                library=f"library-{lease.ref}",
            )
            for kernel in kernels_of(group)
        ]
        made = GroupFiles(
            blobs={"source": "a" * 64, "log": "b" * 64, "library": "c" * 64, "cubin": "d" * 64},
            phases=[{"name": "cicc", "seconds": 1.5}],
            codegen=StageSeconds(wall=wall / 8, cpu=wall / 8),
            compile=StageSeconds(wall=wall, cpu=wall),
        )
        return record_group(session, lease, outcomes, made)


def record_group(
    session: Session, lease: Lease, outcomes: Sequence[BuildOutcome], made: GroupFiles | None = None
) -> Followed:
    """Record the outcomes and complete the group, as a compile worker does."""
    made = made or GroupFiles()
    record_builds(session, lease, outcomes)
    next_steps, _ = apply_group_verdicts(session, lease, Versions(**VERSIONS))
    unverified, spent = what_follows(session, lease, made)
    add_seconds(session, spent)
    return Followed(sorted(next_steps), complete_group(session, lease, made, unverified))


def compile_next(database: Database, bad: Sequence[str] = (), kernels: int = 48) -> Followed:
    return compile_leased(database, take_one(database, "compile", kernels=kernels), bad)


def verify_leased(database: Database, lease: Lease, wrong: Sequence[str] = ()) -> list[NextStep]:
    """Record verdicts for what the group of a leased verify task still needs: ok, but incorrect for the wrong ones."""
    with database.write() as session:
        asked = builds_to_verify(session, lease.ref, **CPU_PLAN)
        verdicts = [
            NewVerdict(
                kernel.slice,
                "matmul",
                "incorrect" if kernel.build in wrong else "ok",
                "off by one" if kernel.build in wrong else None,
                {"cases": [{"exact": False, "max_error": 0.25, "error_bound": 0.5}], "shared_memory": SITES},
                1.0,
                1.0,
            )
            for kernel in asked
        ]
        return record_verified(session, lease, verdicts, asked)


def record_verified(
    session: Session,
    lease: Lease,
    verdicts: Sequence[NewVerdict],
    asked: Sequence[GroupKernel],
    verify: StageSeconds = StageSeconds(wall=4.0, cpu=4.0),  # noqa: B008 - frozen
    plan_version: str = "1",
) -> list[NextStep]:
    """Record verdicts and complete the task, as a worker does."""
    plans = EveryOperator(plan_version)
    record_verdicts(session, lease, verdicts, plans)
    next_steps, _ = apply_group_verdicts(session, lease, Versions(**{**VERSIONS, "cpu_plans": plans}))
    add_seconds(session, verify_shares(session, lease, asked, verify))
    complete_verified(session, lease, asked, plans=plans, verify=verify)
    return next_steps


def verify_next(database: Database, wrong: Sequence[str] = ()) -> list[NextStep]:
    return verify_leased(database, take_one(database, "verify"), wrong)


def end_budgets(database: Database) -> list[str]:
    """What the reconciler does about budgets and ended jobs, all of it."""
    with database.write() as session:
        ended = expire_budgets(session)
        clear_all(session)
    return ended


def clear_all(session: Session) -> int:
    """What the reconciler clears of ended work; returns in how many parts."""
    parts = 0
    while (part := find_ended(session) or find_broken_off(session)) is not None:
        part(session)
        parts += 1
    return parts


def cancel(database: Database, job_id: str) -> None:
    """Cancel the job, and clear what it leaves."""
    with database.write() as session:
        end_jobs.cancel_job(session, job_id)
        clear_all(session)


def winner_record(key: str, candidate: str, **changes: Any) -> WinnerRecord:
    """A record with one entry on its front."""
    launch = Launch(operands=[], extents={}, attributes={}, launch={}, scalars=[], functions=[], workspace_bytes=0)
    entry = FrontEntry(
        candidate=candidate,
        schedule={"tile_m": 64},
        kernel="e" * 64,
        so_sha256="1" * 64,
        cubin_sha256="2" * 64,
        source_sha256="3" * 64,
        code_digest="4" * 64,
        toolchain=TOOLCHAIN,
        launch=launch,
        workspace_bytes=0,
        deterministic=True,
        verified="cpu",
        verdict={},
        resources={},
        predicted_us=12.5,
        prediction={},
        measured_us=None,
    )
    values: dict[str, Any] = {
        "key": key,
        "revision": 0,
        "operator": "matmul",
        "problem": {"m": 64},
        "target": TARGET,
        "device_class": "predicted:sm_80",
        "ranked_by": "predicted",
        "front": [entry],
        "searches": [],
        "updated_at": 0.0,
    }
    return WinnerRecord(**{**values, **changes})


def measurement(us: float, **changes: Any) -> dict[str, Any]:
    """A `cukiln.types.Measurement` as JSON."""
    values: dict[str, Any] = {
        "median_us": us,
        "low_us": us * 0.99,
        "high_us": us * 1.01,
        "spread": 0.02,
        "samples": 40,
        "launches_per_sample": 8,
        "cold": True,
        "stopped": "tight",
        "device": GPU_CLASS,
        "uuid": "GPU-1",
        "driver": DRIVER,
        "before": {"sm_clock_mhz": 1980},
        "after": {"sm_clock_mhz": 1965},
        "measured_at": 1.0,
    }
    return {**values, **changes}


def measured(asked: ToMeasure, verdict: str = "ok", us: float = 10.0, **changes: Any) -> Measured:
    """What a GPU found of a candidate: a second of proving, two of timing."""
    values: dict[str, Any] = {
        "problem_id": asked.problem_id,
        "operator": asked.operator,
        "candidate": asked.candidate,
        "code_digest": asked.code_digest,
        "verdict": verdict,
        "message": None if verdict == "ok" else f"{verdict} at m=64",
        "details": {"cases": [{"exact": False, "max_error": 0.25, "error_bound": 0.5}]},
        "measurement": measurement(us) if verdict == "ok" else None,
        "verify": StageSeconds(wall=1.0, cpu=0.5),
        "measure": StageSeconds(wall=2.0, cpu=0.25),
    }
    return Measured(**{**values, **changes})


def to_measure(database: Database, lease: Lease) -> list[ToMeasure]:
    with database.read() as session:
        return candidates_to_measure(session, lease.ref, str(lease.target), VERSIONS["gpu_plans"])


def measure_leased(database: Database, lease: Lease, results: Sequence[Measured]) -> list[NextStep]:
    version = VERSIONS["gpu_plans"]
    with database.write() as session:
        record_measured(session, lease, results, driver=DRIVER, plans=version)
        next_steps, _ = apply_measured_verdicts(session, results, str(lease.target), version)
        return [*next_steps, *complete_measured(session, lease, results, plans=version)]


def measure_next(database: Database, wrong: Sequence[str] = (), **us: float) -> list[NextStep]:
    """Measure the next task: all of it right but the `wrong` builds; microseconds by build, 10 where not given."""
    lease = take_one(database, "measure")
    candidates = to_measure(database, lease)
    results = [measured(o, "incorrect" if o.build in wrong else "ok", us.get(o.build, 10.0)) for o in candidates]
    return measure_leased(database, lease, results)


def candidates_of(database: Database, problem_id: int) -> dict[str, str | None]:
    """Verdicts by candidate of a job's problem."""
    with database.read() as session:
        return {candidate.candidate: candidate.verdict for candidate in candidates_of_problem(session, problem_id)}
