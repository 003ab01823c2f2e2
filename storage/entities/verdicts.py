"""Verdicts: what a slice (on the CPU) or a code digest (on a GPU) is under a version of the verification plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import RowMapping, select, union_all

from codegen.identity import PlanVersions
from storage.database.session import Session, clock_of
from storage.database.sql import change, chunks, core, insert_new, one_of, remove, rows_among
from storage.database.tables import BuildRow, VerdictRow

CPU, GPU = "cpu", "gpu"
LIMITED = ("run_timeout", "runtime_error", "compile_error")
"""Verdicts that a limit of this service may have caused: then it stands in their details."""


@dataclass(frozen=True)
class NewVerdict:
    """`details`: seeds, extents, errors against their bounds, on the CPU also the accesses to shared memory."""

    subject: str
    operator: str
    verdict: str
    message: str | None
    details: Mapping[str, Any]
    wall_seconds: float
    cpu_seconds: float


Verdict = VerdictRow


def known_verdicts(session: Session, subjects: Iterable[str], venue: str, plans: PlanVersions) -> dict[str, Verdict]:
    """The verdicts there are on these subjects, by subject; of code that two operators share, a failure."""
    here = (VerdictRow.venue == venue) & VerdictRow.plan_version.in_(set(plans.values()))
    query = select(core(VerdictRow)).where(here).order_by(VerdictRow.verdict != "ok")
    rows = rows_among(session, query, VerdictRow.subject, subjects)
    return {row.subject: Verdict(**row._mapping) for row in rows}


def best_verdicts(
    session: Session, subjects: Iterable[tuple[str | None, str | None]]
) -> dict[tuple[str | None, str | None], Verdict]:
    """For each (slice, code digest) the verdict to show: that of a GPU before that of the CPU, the newest first.

    A GPU counts no accesses to shared memory: its verdict gets the counts of the CPU run, where there was one.
    """
    pairs = set(subjects)
    by_age = select(core(VerdictRow)).order_by(VerdictRow.created_at)
    rows = rows_among(session, by_age, VerdictRow.subject, {subject for pair in pairs for subject in pair if subject})
    newest = {row.subject: dict(row._mapping) for row in rows}
    shown = {}
    for built, code in pairs:
        on_gpu, on_cpu = newest.get(code or ""), newest.get(built or "")
        if on_gpu and on_cpu and "shared_memory" in on_cpu["details"]:
            counted = {"shared_memory": on_cpu["details"]["shared_memory"]}
            on_gpu = {**on_gpu, "details": {**counted, **on_gpu["details"]}}
        if verdict := on_gpu or on_cpu:
            shown[built, code] = Verdict(**verdict)
    return shown


def verdicts_to_show(session: Session, rows: Sequence[RowMapping]) -> list[Verdict | None]:
    """The verdict to show of each row of a candidate with its build (`slice`, `code_digest`, `imported`): of an
    imported candidate the verdict from elsewhere, unless a GPU here has verified its code."""
    best = best_verdicts(session, [(row["slice"], row["code_digest"]) for row in rows])
    shown = []
    for row in rows:
        verdict = best.get((row["slice"], row["code_digest"]))
        if row["imported"] is not None and (verdict is None or verdict.venue != GPU):
            verdict = Verdict(subject=row["code_digest"] or row["slice"], venue=GPU, **row["imported"])
        shown.append(verdict)
    return shown


def wrong_codes(session: Session, code_digests: Iterable[str]) -> set[str]:
    """Those of the code digests that a GPU found wrong, and none has found right since by another verification plan."""
    by_age = (
        select(VerdictRow.subject, VerdictRow.verdict)
        .where(VerdictRow.venue == GPU)
        .order_by(VerdictRow.created_at, VerdictRow.verdict != "ok")  # of two of the same time, a failure is the later
    )
    newest = dict(rows_among(session, by_age, VerdictRow.subject, code_digests))
    return {subject for subject, verdict in newest.items() if verdict != "ok"}


def forget_outgrown(session: Session, build_ids: Iterable[str], limits: Mapping[str, Mapping[str, float]]) -> None:
    """Delete verdicts on these builds that only record a limit (by device kind, then name) which is larger now."""
    verdict = core(VerdictRow).c
    for ids in chunks(set(build_ids)):
        subjects = [select(column).where(BuildRow.id.in_(ids)) for column in (BuildRow.slice, BuildRow.code_digest)]
        rows = session.execute(
            select(verdict.subject, verdict.venue, verdict.plan_version, verdict.details).where(
                verdict.subject.in_(union_all(*subjects)), verdict.verdict.in_(LIMITED)
            )
        )
        old = [row[:3] for row in rows if is_outgrown(row.details.get("limit"), limits.get(row.venue))]
        outgrown = one_of((verdict.subject, verdict.venue, verdict.plan_version), old)
        remove(session, VerdictRow, outgrown)


def is_outgrown(reached: Mapping[str, float] | None, limits: Mapping[str, float] | None) -> bool:
    """Whether the limit that was reached (by name) is larger now: what it ended is tried again."""
    return any((limits or {}).get(name, 0.0) > value for name, value in (reached or {}).items())


def write_verdicts(session: Session, verdicts: Iterable[NewVerdict], venue: str, plans: PlanVersions) -> None:
    """Write them: a failure replaces an earlier "ok", nothing replaces a failure."""
    now = clock_of(session).now()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for verdict in verdicts:
        fields = {name: value for name, value in asdict(verdict).items() if name != "operator"}
        place = {"venue": venue, "plan_version": plans[verdict.operator], "created_at": now}
        rows[verdict.subject, verdict.operator] = {**fields, **place, "details": dict(verdict.details)}
    insert_new(session, VerdictRow, list(rows.values()))
    for row in rows.values():
        if row["verdict"] != "ok":
            same = (VerdictRow.subject == row["subject"]) & (VerdictRow.plan_version == row["plan_version"])
            change(session, VerdictRow, same, VerdictRow.venue == venue, VerdictRow.verdict == "ok", **row)
