"""The profile of a job: what a run of each problem's winner does, by operator, kernel and primitive."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import RowMapping, select

from codegen.counts import LaunchCounts, Openings, Primitive
from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.predict.roofline import Prediction, launch_times, predict, products_us
from codegen.search.schedule import Schedule
from codegen.targets import Target
from codegen.targets import target as data_sheet
from codegen.text.ptxas_report import Resources
from cukiln.types import (
    ProfileCounts,
    ProfileKernel,
    ProfileLeftOut,
    ProfileOperator,
    ProfilePage,
    RankedBy,
    RingForm,
)
from storage.database.pages import read_page
from storage.database.session import Session
from storage.database.sql import core
from storage.database.tables import JobProblemRow
from storage.entities.jobs import MAX_PAGE, job_state
from storage.reports.job import WITHDRAWN, winner_entries


def profile_page(
    session: Session, job_id: str, openings: Openings, *, limit: int = 100, cursor: str | None = None
) -> ProfilePage | None:
    """`limit` problems in the job's order; those without a winner, or of an operator that is not loaded here, are left
    out. None if there is no such job. Raises `BadCursor`."""
    job = job_state(session, job_id)
    if job is None:
        return None
    job_problem = core(JobProblemRow).c
    query = select(core(JobProblemRow)).where(job_problem.job_id == job_id)
    rows, next_cursor = read_page(
        session, query, (job_problem.position, job_problem.key), (int, str), max(1, min(limit, MAX_PAGE)), cursor
    )
    entries = winner_entries(session, rows, job)
    made = [_row(row, entries[row["id"]][1], openings) if row["id"] in entries else _left_out(row) for row in rows]
    return ProfilePage(
        filters=openings.filters,
        opened=openings.operands,
        operators=[row for row in made if isinstance(row, ProfileOperator)],
        left_out=[row for row in made if isinstance(row, ProfileLeftOut)],
        next_cursor=next_cursor,
    )


def _left_out(row: RowMapping, why: str | None = None) -> ProfileLeftOut:
    withdrawn = WITHDRAWN if row["winner"] is not None else None
    why = why or withdrawn or row["error"] or f"it is {row['state']}"
    return ProfileLeftOut(problem=row["name"], operator=row["operator"], state=row["state"], why=why)


def profile_row(
    name: str, device_class: str, candidate: Candidate, target: Target, resources: Resources, openings: Openings,
    measured_us: float | None = None,
) -> ProfileOperator:  # fmt: skip
    """Of one run of a candidate for the problem `name`. `measured_us`: of the run, where it was measured."""
    op, problem, schedule = operator(candidate.problem.operator), candidate.problem, candidate.schedule
    prediction, launches = predict(candidate, resources, target), op.launches(problem, schedule, target)
    functions = [launch.function for launch in launches]
    times_us = launch_times(prediction, op.work(problem, schedule, target), target, functions)
    imads = op.imads(problem)
    counts = _counts(
        op.name,
        launches,
        prediction.us if measured_us is None else measured_us,
        "predicted" if measured_us is None else "measured",
        times=1,
        launches=sum(launch.times for launch in launches),
        multiplications=op.multiplications(problem),
        workspace_bytes=op.cost(problem, schedule).workspace_bytes,
        ring_bytes=op.ring_bytes(problem, schedule, openings),
    )
    return ProfileOperator(
        problem=name,
        operator=op.name,
        target=target.name,
        device_class=device_class,
        candidate=candidate.id,
        schedule=schedule.as_dict(),
        counts=counts,
        kernels=[_kernel(launch, us, prediction, imads, target) for launch, us in zip(launches, times_us, strict=True)],
        ring_forms=[RingForm(**asdict(form)) for form in op.ring_forms(problem, schedule, openings)],
    )


def _counts(
    name: str, parts: Sequence[LaunchCounts], us: float | None, us_from: RankedBy = "predicted", **others: Any
) -> ProfileCounts:
    """A row of what these launches do, or these parts of them, in so many microseconds."""
    names = ("limb_products", "bytes_read", "bytes_written")
    sums = {count: sum(getattr(part.total, count) for part in parts) for count in names}
    sums["executed"] = sum(part.total.multiplications for part in parts)
    sums["truncations"] = sum(part.truncations for part in parts)
    seconds = {"seconds": None, "seconds_from": None} if us is None else {"seconds": us * 1e-6, "seconds_from": us_from}
    return ProfileCounts.model_validate({"name": name, **seconds, **sums, **others})


def _kernel(
    launch: LaunchCounts, us: float | None, prediction: Prediction, imads: int, target: Target
) -> ProfileKernel:
    """Its seconds are always predicted. Those of a primitive are its roof's alone, which others hide: they do not add
    up; products of an epilogue alone have those of their own instructions."""
    moved = launch.total.bytes_read + launch.total.bytes_written
    roofs = prediction.roofs_us if launch.function == "run" else {}
    multiplies = max(launch.primitives, key=lambda part: part.multiplications, default=None)

    def us_of(part: Primitive) -> float | None:
        if part.of_epilogue and part.of_epilogue == part.multiplications:
            return products_us(part.multiplications, imads, target)
        if part.multiplications:
            return roofs.get("mma" if part.name.startswith("mma") else "fma")
        bytes_ = part.bytes_read + part.bytes_written
        return max(roofs["l2"], roofs["dram"]) * bytes_ / moved if roofs and bytes_ else None

    def row(part: Primitive) -> ProfileCounts:
        products = part.of_epilogue + (launch.multiplications if part is multiplies else 0)
        alone = [LaunchCounts(launch.function, (part,))]
        return _counts(part.name, alone, us_of(part), times=part.times, launches=0, multiplications=products)

    times, products = launch.times, launch.multiplications + launch.total.of_epilogue
    whole = _counts(
        launch.function, [launch], us, times=times, launches=times, multiplications=products, once_for=launch.once_for
    )
    return ProfileKernel(counts=whole, primitives=[row(part) for part in launch.primitives])


def _row(row: RowMapping, entry: Mapping[str, Any], openings: Openings) -> ProfileOperator | ProfileLeftOut:
    """Left out where the operator is not loaded here, or another version of it made the schedule."""
    try:
        kind = operator(row["operator"])
        candidate = kind.candidate(kind.parse(row["problem"]), Schedule.of(entry["schedule"]))
        resources = Resources.from_dict(entry["resources"])
        target = data_sheet(row["target"])
        return profile_row(
            row["name"], row["device_class"], candidate, target, resources, openings, entry["measured_us"]
        )
    except (ValueError, KeyError):
        return _left_out(row, "its operator, in the version that made its winner, is not loaded here")
