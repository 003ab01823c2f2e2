"""Verdicts: what a slice (on the CPU) or a code digest (on a GPU) was proved to be under a version of the test plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import RowMapping, delete, select, union_all, update

from storage.database import Session, clock_of
from storage.rows import chunks, core, insert_new, one_of
from storage.tables import BuildRow, VerdictRow

CPU, GPU = "cpu", "gpu"
LIMITED = ("run_timeout", "runtime_error", "compile_error")
"""Verdicts that a limit of ours may have brought about: then it stands in their details."""


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


def proofs_of(session: Session, rows: Sequence[RowMapping]) -> list[Verdict | None]:
    """The proof to show of each row of a candidate with its build (`slice`, `code_digest`, `imported`): of one that was
    imported what was found elsewhere, unless a GPU here has judged its code."""
    known = best_proofs(session, [(row["slice"], row["code_digest"]) for row in rows])
    found = []
    for row in rows:
        proof = known.get((row["slice"], row["code_digest"]))
        if row["imported"] is not None and (proof is None or proof.venue != GPU):
            proof = Verdict(row["code_digest"] or row["slice"], GPU, **row["imported"])
        found.append(proof)
    return found


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


def forget_outgrown(session: Session, build_ids: Iterable[str], limits: Mapping[str, Mapping[str, float]]) -> None:
    """Forget verdicts on these builds that say no more than that a limit was reached which is larger now. `limits`: by
    venue, then by name."""
    verdict = core(VerdictRow).c
    for ids in chunks(set(build_ids)):
        subjects = [select(column).where(BuildRow.id.in_(ids)) for column in (BuildRow.slice, BuildRow.code_digest)]
        rows = session.execute(
            select(verdict.subject, verdict.venue, verdict.plan_version, verdict.details).where(
                verdict.subject.in_(union_all(*subjects)), verdict.verdict.in_(LIMITED)
            )
        )
        old = [row[:3] for row in rows if is_outgrown(row.details.get("limit"), limits.get(row.venue))]
        these = one_of((verdict.subject, verdict.venue, verdict.plan_version), old)
        session.execute(delete(core(VerdictRow)).where(these))


def is_outgrown(reached: Mapping[str, float] | None, limits: Mapping[str, float] | None) -> bool:
    """Whether the limit that was reached (by name) is larger now: what it ended is tried again."""
    return any((limits or {}).get(name, 0.0) > value for name, value in (reached or {}).items())


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
