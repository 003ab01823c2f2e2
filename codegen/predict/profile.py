"""The profile of a run: an operator, its kernels, their primitives, each with what it does and its seconds.

A measurement is of the whole run: seconds of kernels are always predicted. Those of a primitive are its roof's alone,
which others hide: they do not add up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from codegen.counts import TRUNCATE, LaunchCounts, Openings, Primitive, RingForm
from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.predict.roofline import Prediction, launch_times, predict
from codegen.targets import Target
from codegen.text.ptxas_report import Resources

SecondsFrom = Literal["measured", "predicted"]


@dataclass(frozen=True)
class Counts:
    """One row. `multiplications` are the problem's, `executed` those of whole tiles; `workspace_bytes` and `ring_bytes`
    (null: over no ring) are of the whole run, and of no part."""

    name: str
    times: int
    seconds: float | None
    seconds_from: SecondsFrom | None
    multiplications: int
    executed: int
    limb_products: int
    truncations: int
    bytes_read: int
    bytes_written: int
    launches: int
    workspace_bytes: int | None = None
    ring_bytes: int | None = None


@dataclass(frozen=True)
class KernelProfile:
    counts: Counts
    primitives: tuple[Counts, ...]


@dataclass(frozen=True)
class Profile:
    counts: Counts
    kernels: tuple[KernelProfile, ...]
    ring_forms: tuple[RingForm, ...]


def profile(
    candidate: Candidate, target: Target, resources: Resources, openings: Openings, measured_us: float | None = None
) -> Profile:
    """Of one run of the candidate. `measured_us`: of the run, where it was measured."""
    op, problem, schedule = operator(candidate.problem.operator), candidate.problem, candidate.schedule
    prediction, cost = predict(candidate, resources, target), op.cost(problem, schedule)
    launches = op.launches(problem, schedule, target)
    times_us = launch_times(prediction, op.work(problem, schedule, target), target, [one.function for one in launches])
    kernels = tuple(
        KernelProfile(_of_launch(launch, us), _of_primitives(launch, prediction))
        for launch, us in zip(launches, times_us, strict=True)
    )
    measured = measured_us is not None
    whole = _total(
        op.name, launches, (measured_us if measured_us is not None else prediction.us) * 1e-6,
        "measured" if measured else "predicted", op.multiplications(problem), cost.workspace_bytes,
        op.ring_bytes(problem, schedule, openings),
    )  # fmt: skip
    return Profile(whole, kernels, op.ring_forms(problem))


def _total(
    name: str, launches: Sequence[LaunchCounts], seconds: float, seconds_from: SecondsFrom, multiplications: int,
    workspace_bytes: int, ring_bytes: int | None,
) -> Counts:  # fmt: skip
    def sum_of(count: str) -> int:
        return sum(getattr(launch, count) for launch in launches)

    return Counts(
        name, 1, seconds, seconds_from, multiplications, sum_of("executed"), sum_of("limb_products"),
        sum_of("truncations"), sum_of("bytes_read"), sum_of("bytes_written"), sum_of("times"), workspace_bytes,
        ring_bytes,
    )  # fmt: skip


def _of_launch(launch: LaunchCounts, us: float | None) -> Counts:
    return Counts(
        launch.function, launch.times, None if us is None else us * 1e-6, None if us is None else "predicted",
        launch.multiplications, launch.executed, launch.limb_products, launch.truncations, launch.bytes_read,
        launch.bytes_written, launch.times,
    )  # fmt: skip


def _of_primitives(launch: LaunchCounts, prediction: Prediction) -> tuple[Counts, ...]:
    moved = launch.bytes_read + launch.bytes_written
    roofs = prediction.roofs_us if launch.function == "run" else {}

    def seconds_of(part: Primitive) -> float | None:
        if part.multiplications:
            us = roofs.get("mma" if part.name.startswith("mma") else "fma")
        else:
            bytes_ = part.bytes_read + part.bytes_written
            us = max(roofs["l2"], roofs["dram"]) * bytes_ / moved if roofs and bytes_ else None
        return None if us is None else us * 1e-6

    multiplies = max(launch.primitives, key=lambda part: part.multiplications, default=None)
    rows = []
    for part in launch.primitives:
        seconds = seconds_of(part)
        rows.append(
            Counts(
                part.name, part.times, seconds, None if seconds is None else "predicted",
                launch.multiplications if part is multiplies else 0, part.multiplications, part.limb_products,
                part.times if part.name == TRUNCATE else 0, part.bytes_read, part.bytes_written, 0,
            )
        )  # fmt: skip
    return tuple(rows)
