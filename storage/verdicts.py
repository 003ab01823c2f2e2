"""Verdicts: what a slice (on the CPU) or a code digest (on a GPU) was proved to be under a version of the test plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import select, update

from cukiln.types import StageSeconds
from storage.builds import Build, known_builds
from storage.database import Session, clock_of
from storage.group_rows import GroupKernel, load_group
from storage.items import Claim, complete
from storage.judge import judge_builds
from storage.rows import chunks, core, insert_new
from storage.seconds import share_out
from storage.tables import BuildRow, GroupRow, VerdictRow


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


def builds_without_verdict(session: Session, builds: Iterable[Build], venue: str, plan_version: str) -> list[Build]:
    """Those that compiled and were not judged at this venue by this test plan."""
    compiled = [(build, _subject(build, venue)) for build in builds if build.state == "ok"]
    known = known_verdicts(session, (subject for _, subject in compiled if subject), venue, plan_version)
    return [build for build, subject in compiled if subject not in known]


def builds_to_verify(session: Session, group_id: str, venue: str, plan_version: str) -> list[GroupKernel]:
    """The group's kernels that compiled and still need a verdict, in render order."""
    group = load_group(session, group_id)
    if group is None:
        return []
    builds = known_builds(session, [kernel.build for kernel in group.kernels]).values()
    open_builds = {build.id for build in builds_without_verdict(session, builds, venue, plan_version)}
    return [kernel for kernel in group.kernels if kernel.build in open_builds]


def record_verified(
    session: Session,
    claim: Claim,
    verdicts: Sequence[NewVerdict],
    *,
    venue: str,
    plan_version: str,
    verify: StageSeconds,
) -> list[int]:
    """Complete a verify item; returns the problems that are now completely judged (their finish items are added).

    A kernel that was found wrong once is wrong: a finding replaces an earlier "ok", never the other way round.
    Raises `LostClaim`, and `ValueError` if a compiled kernel of the group is left without a verdict: its candidates
    would wait for ever.
    """
    complete(session, claim)
    now = clock_of(session).now()
    rows = {
        verdict.subject: {
            "subject": verdict.subject,
            "venue": venue,
            "plan_version": plan_version,
            "verdict": verdict.verdict,
            "message": verdict.message,
            "details": dict(verdict.details),
            "wall_seconds": verdict.wall_seconds,
            "cpu_seconds": verdict.cpu_seconds,
            "created_at": now,
        }
        for verdict in verdicts
    }
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
    if left := builds_to_verify(session, claim.ref, venue, plan_version):
        raise ValueError(f"group {claim.ref}: no verdict for {', '.join(kernel.kernel for kernel in left)}")
    group = session.execute(select(GroupRow.job_id, GroupRow.kernels).where(GroupRow.id == claim.ref)).one()
    session.execute(
        update(core(GroupRow)).where(core(GroupRow).c.id == claim.ref).values(verify_seconds=verify.model_dump())
    )
    share_out(session, group.job_id, [entry["build"] for entry in group.kernels], {"verify": verify})
    return judge_builds(session, _builds_of(session, list(rows), venue), venue, plan_version)


def _builds_of(session: Session, subjects: Sequence[str], venue: str) -> list[str]:
    """Every build the verdicts speak about: equal slices or equal code, whichever group they came from."""
    column = BuildRow.code_digest if venue == "gpu" else BuildRow.slice
    found: list[str] = []
    for ids in chunks(subjects):
        found.extend(session.scalars(select(BuildRow.id).where(column.in_(ids))))
    return found


def _subject(build: Build, venue: str) -> str | None:
    return build.code_digest if venue == "gpu" else build.slice
