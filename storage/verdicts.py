"""Verdicts: what a slice (on the CPU) or a code digest (on a GPU) was proved to be under a version of the test plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import select, update

from cukiln.types import StageSeconds
from storage.builds import known_builds
from storage.database import Session, clock_of
from storage.device_classes import asks_predicted
from storage.group_rows import GroupKernel, jobs_that_share, load_group
from storage.items import Claim, complete
from storage.judge import Judged, judge_builds
from storage.rows import chunks, core, insert_new
from storage.seconds import share_out
from storage.tables import BuildRow, GroupRow, VerdictRow

CPU, GPU = "cpu", "gpu"


@dataclass(frozen=True)
class NewVerdict:
    """`details`: seeds, extents, errors against their bounds, on the CPU also the accesses to shared memory."""

    subject: str
    verdict: str
    message: str | None
    details: Mapping[str, Any]
    wall_seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Verdict:
    subject: str
    venue: str
    plan_version: str
    verdict: str
    message: str | None
    details: dict[str, Any]
    wall_seconds: float
    cpu_seconds: float
    created_at: float


def known_verdicts(session: Session, subjects: Iterable[str], venue: str, plan_version: str) -> dict[str, Verdict]:
    """The verdicts there are on these subjects, by subject."""
    found: dict[str, Verdict] = {}
    for ids in chunks(set(subjects)):
        rows = session.execute(
            select(core(VerdictRow)).where(
                VerdictRow.subject.in_(ids), VerdictRow.venue == venue, VerdictRow.plan_version == plan_version
            )
        ).mappings()
        found.update((row["subject"], Verdict(**row)) for row in rows)
    return found


def best_proofs(
    session: Session, subjects: Iterable[tuple[str | None, str | None]]
) -> dict[tuple[str | None, str | None], Verdict]:
    """For each (slice, code digest) the proof to show: that of a GPU before that of the CPU, the newest first.

    A GPU counts no accesses to shared memory: its proof gets the counts of the CPU run, where there was one.
    """
    pairs = set(subjects)
    found: dict[str, Verdict] = {}
    for ids in chunks({subject for pair in pairs for subject in pair if subject is not None}):
        rows = session.execute(
            select(core(VerdictRow)).where(VerdictRow.subject.in_(ids)).order_by(VerdictRow.created_at)
        ).mappings()
        found.update((row["subject"], Verdict(**row)) for row in rows)
    proofs = {}
    for built, code in pairs:
        on_gpu, on_cpu = found.get(code or ""), found.get(built or "")
        if on_gpu and on_cpu and "shared_memory" in on_cpu.details:
            counted = {"shared_memory": on_cpu.details["shared_memory"]}
            on_gpu = replace(on_gpu, details={**counted, **on_gpu.details})
        if proof := on_gpu or on_cpu:
            proofs[built, code] = proof
    return proofs


def wrong_codes(session: Session, code_digests: Iterable[str]) -> set[str]:
    """Those of the code digests that a GPU found wrong, and none has found right since by another test plan."""
    found: set[str] = set()
    for ids in chunks(set(code_digests)):
        rows = session.execute(
            select(VerdictRow.subject, VerdictRow.verdict)
            .where(VerdictRow.subject.in_(ids), VerdictRow.venue == GPU)
            # Of two that are equally new the finding is the later one here.
            .order_by(VerdictRow.created_at, VerdictRow.verdict != "ok")
        )
        newest: dict[str, str] = dict(rows.all())
        found.update(subject for subject, verdict in newest.items() if verdict != "ok")
    return found


def builds_to_verify(session: Session, group_id: str, plan_version: str) -> list[GroupKernel]:
    """The group's kernels that compiled and that it is to have proved on the CPU, in render order.

    A build that only problems on a GPU use has no such group, and one may have moved to another group since.
    """
    group = load_group(session, group_id)
    if group is None:
        return []
    builds = known_builds(session, [kernel.build for kernel in group.kernels])
    mine = {build.id: build.slice for build in builds.values() if build.state == "ok"}
    mine = {build: built for build, built in mine.items() if builds[build].verify_group_id == group_id}
    known = known_verdicts(session, mine.values(), CPU, plan_version)
    return [kernel for kernel in group.kernels if kernel.build in mine and mine[kernel.build] not in known]


def record_verified(
    session: Session, claim: Claim, verdicts: Sequence[NewVerdict], *, plan_version: str, verify: StageSeconds
) -> list[Judged]:
    """Complete a verify item; returns the problems that are now completely judged (their next items are added).

    A kernel that was found wrong once is wrong: a finding replaces an earlier "ok", never the other way round.
    Raises `LostClaim`, and `ValueError` if a compiled kernel of the group is left without a verdict: its candidates
    would wait for ever.
    """
    complete(session, claim)
    write_verdicts(session, verdicts, CPU, plan_version)
    if left := builds_to_verify(session, claim.ref, plan_version):
        raise ValueError(f"group {claim.ref}: no verdict for {', '.join(kernel.kernel for kernel in left)}")
    group = core(GroupRow)
    session.execute(update(group).where(group.c.id == claim.ref).values(verify_seconds=verify.model_dump()))
    proved = session.scalars(select(BuildRow.id).where(BuildRow.verify_group_id == claim.ref)).all()
    stages = {"verify": verify, "queue": StageSeconds(wall=claim.waited_seconds)}
    share_out(session, jobs_that_share(session, claim.ref), proved, stages, asks_predicted())
    return judge_builds(session, _builds_of(session, [verdict.subject for verdict in verdicts]), plan_version)


def write_verdicts(session: Session, verdicts: Iterable[NewVerdict], venue: str, plan_version: str) -> None:
    """Remember them: a finding replaces an earlier "ok", nothing replaces a finding."""
    now = clock_of(session).now()
    place = {"venue": venue, "plan_version": plan_version, "created_at": now}
    rows = {verdict.subject: {**asdict(verdict), **place, "details": dict(verdict.details)} for verdict in verdicts}
    insert_new(session, VerdictRow, list(rows.values()))
    for row in rows.values():
        if row["verdict"] != "ok":
            session.execute(
                update(core(VerdictRow))
                .where(
                    VerdictRow.subject == row["subject"],
                    VerdictRow.venue == venue,
                    VerdictRow.plan_version == plan_version,
                    VerdictRow.verdict == "ok",
                )
                .values(row)
            )


def _builds_of(session: Session, slices: Sequence[str]) -> list[str]:
    """Every build the verdicts speak about: equal slices, whichever group they came from."""
    found: list[str] = []
    for ids in chunks(slices):
        found.extend(session.scalars(select(BuildRow.id).where(BuildRow.slice.in_(ids))))
    return found
