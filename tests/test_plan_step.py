"""The plan step: what it writes where others are at work on the same kernels, and the tickets that follow."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import pytest
from sqlalchemy import select

from codegen.compile_model import PRIOR, CompiledFile
from codegen.identity import winner_key
from codegen.kernel import Kernel
from codegen.operators import operator
from cukiln.types import StageSeconds
from storage import items, jobs, new_items
from storage.blobs import BlobStore
from storage.builds import known_builds
from storage.compile_models import idle_workers, learn, load_model
from storage.database import Session
from storage.errors import PlanOutdated
from storage.groups import BuildOutcome, load_group, record_compiled
from storage.tables import ItemRow
from tests.fixtures_queue import QueueWorld, queue_world, valkey  # noqa: F401
from workers import tickets
from workers.processes import Processes
from workers.steps.context import Cancel, StepContext, Workplace

step = import_module("workers.steps.plan")  # the package has its function under the same name
recording = import_module("workers.steps.wanted_builds")
COMPILING = (ItemRow.kind == "compile") & (ItemRow.state == "waiting")
MATMUL = {"operator": "matmul", "m": 64, "n": 64, "k": 64}


class Planner:
    """Jobs of one matmul, and the step that plans them."""

    def __init__(self, world: QueueWorld) -> None:
        self.world, self.database = world, world.database
        blobs = BlobStore(world.database, world.settings.blobs_url)
        self.workplace = Workplace(world.settings, world.database, blobs, world.redis, Processes(), "planner")

    def plan(self) -> items.Claim:
        """A new job, planned in one attempt."""
        parsed = operator("matmul").parse(MATMUL)
        problem = jobs.NewProblem(
            name="p",
            operator="matmul",
            problem=parsed.canonical(),
            target="sm_80",
            device_class="predicted:sm_80",
            key=winner_key(parsed.digest, "sm_80", "predicted:sm_80"),
            search={"level": 1, "limit": 3, "seed": 0},
        )
        with self.database.write() as session:
            self.job = jobs.create_job(session, jobs.NewJob([problem])).id
        claim = self.claim("plan")
        step.plan(StepContext(self.workplace, claim, Cancel()))
        return claim

    def claim(self, kind: str) -> items.Claim:
        with self.database.write() as session:
            claim = items.claim(session, [kind], None, "planner", 60.0)
        assert claim is not None
        return claim

    def waiting(self) -> dict[tuple[str, str | None], int]:
        with self.database.read() as session:
            return items.waiting_counts(session)

    def tickets(self) -> int:
        return tickets.queued_tickets(self.world.redis, "compile", "sm_80")


@pytest.fixture
def planner(queue_world: QueueWorld) -> Planner:  # noqa: F811
    return Planner(queue_world)


def outdated_for(times: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The planner is told `times` times that every build is known: made by a group that is cancelled right then."""
    asked: list[int] = []

    def known(session: Session, ids: Iterable[str], **options: Any) -> dict[str, Any]:
        asked.append(len(asked))
        return dict.fromkeys(ids) if len(asked) <= times else known_builds(session, ids, **options)

    monkeypatch.setattr(recording, "known_builds", known)
    return asked


def test_a_plan_that_was_outdated_is_made_again_in_the_same_attempt(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = outdated_for(2, monkeypatch)
    claim = planner.plan()
    assert len(asked) == 3
    assert claim.attempt == 1
    assert planner.waiting().keys() == {("compile", "sm_80")}
    assert planner.tickets() == planner.waiting()["compile", "sm_80"]


def test_a_plan_that_is_always_outdated_is_given_back_with_the_reason(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = outdated_for(10**6, monkeypatch)
    with pytest.raises(PlanOutdated, match="plan again"):
        planner.plan()
    assert len(asked) == recording.RECORD_ATTEMPTS
    assert planner.waiting() == {}  # nothing was written


def test_kernels_that_only_need_a_verdict_get_a_ticket_for_it(planner: Planner) -> None:
    planner.plan()
    groups = planner.waiting()["compile", "sm_80"]
    for _ in range(groups):
        compiled(planner)
    with planner.database.write() as session:  # the job goes before they are verified, its compiled kernels stay
        jobs.cancel_job(session, planner.job)
    before = planner.tickets()
    planner.plan()
    assert planner.waiting() == {("verify", "sm_80"): 1}
    assert planner.tickets() == before + 1


def compiled(planner: Planner) -> None:
    """The next compile item, recorded as if nvcc had done it."""
    claim = planner.claim("compile")
    with planner.database.write() as session:
        group = load_group(session, claim.ref)
        assert group is not None
        record_compiled(
            session,
            claim,
            [BuildOutcome(kernel.build, "ok", "c" * 64, {}, library="d" * 64) for kernel in group.kernels],
            source=None,
            log=None,
            library=None,
            cubin=None,
            phases=[],
            codegen=StageSeconds(),
            compile=StageSeconds(),
            plan_version="1",
            gpu_plan_version="1",
            drivers={},
        )


def test_groups_are_sized_by_what_compiling_took_here(planner: Planner) -> None:
    toolchain = planner.workplace.toolchain.digest
    slow = CompiledFile({"matmul/simt/float32": 4.0}, 16.4, 100 * 2**20)
    with planner.database.write() as session:
        learn(session, toolchain, [slow] * 5)
    planner.plan()
    with planner.database.read() as session:
        groups = [load_group(session, ref) for ref in session.scalars(select(ItemRow.ref).where(COMPILING))]
        model = load_model(session, toolchain)
    assert model.factors["matmul/simt/float32"].seconds == pytest.approx(4.0)
    assert groups
    for group in groups:
        assert group is not None
        kernels = [Kernel.from_json(kernel.kernel_json) for kernel in group.kernels]
        assert group.predicted_seconds == pytest.approx(model.seconds(kernels))
        assert group.predicted_seconds > PRIOR.seconds(kernels)
        parts = [kernel.predicted_seconds for kernel in group.kernels]
        assert parts == pytest.approx([model.kernel_seconds(kernel) for kernel in kernels]), "what a file's times go by"


@pytest.mark.parametrize(("most", "groups"), [(48, 1), (2, 2), (1, 3)])
def test_a_group_has_no_more_kernels_than_the_settings_say(planner: Planner, most: int, groups: int) -> None:
    settings = planner.world.settings.model_copy(update={"group_kernels": most})
    planner.workplace.settings = settings
    planner.plan()
    assert planner.waiting()["compile", "sm_80"] == groups


@pytest.mark.parametrize(
    ("busy", "waiting", "priority", "idle"),
    [(0, 0, 0, 4), (1, 0, 0, 3), (1, 1, 0, 2), (3, 4, 0, 1), (0, 2, -1, 4), (1, 2, -1, 3), (0, 2, 1, 2)],
)
def test_idle_workers_are_those_without_work_that_goes_first(
    planner: Planner, busy: int, waiting: int, priority: int, idle: int
) -> None:
    """`priority`: of what waits, over the job's own."""
    with planner.database.write() as session:
        new_items.add_items(session, [new_items.NewItem("plan", "me")])
        new_items.add_items(session, [new_items.NewItem("compile", f"b{n}", "sm_80") for n in range(busy)])
        new_items.add_items(session, [new_items.NewItem("compile", "other", "sm_90a")])
    me = planner.claim("plan")
    with planner.database.write() as session:
        for _ in range(busy):
            assert items.claim(session, ["compile"], ["sm_80"], "w", 60.0) is not None
        new_items.add_items(
            session, [new_items.NewItem("compile", f"w{n}", "sm_80", priority=priority) for n in range(waiting)]
        )
    with planner.database.read() as session:
        assert idle_workers(session, me, "sm_80", 4) == idle
