"""A candidate's predicted time before anything is compiled, and the best of a search by it: what `keep` goes by.

The same roofline as after a compile (`codegen.predict`), with registers that the operator estimates (accumulators,
fragments and a fixed part, on the safe side) instead of those that ptxas reports, as far as the launch bounds allow
them. Nothing counts as spilled: what must spill breaks a rule. As long as no GPU has confirmed the ranks, nobody gets
fewer candidates by it who did not ask for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.predict import Prediction, predict
from codegen.targets import Target


@dataclass(frozen=True)
class Estimated:
    """What stands in for a compiler's report: `codegen.predict.Resources`. Kernels have no static shared memory."""

    registers: int
    static_shared_bytes: int = 0
    spill_load_bytes: int = 0
    spill_store_bytes: int = 0


@dataclass(frozen=True)
class Choice:
    """The candidates that are predicted fastest, in their given order, and the rest, fastest first, each with its
    microseconds; `slowest_us` is that of the kept."""

    kept: tuple[Candidate, ...]
    left: tuple[tuple[Candidate, float], ...]
    slowest_us: float


def estimate(candidate: Candidate, target: Target) -> Estimated:
    """The resources of the candidate's kernel."""
    own = operator(candidate.kernel.operator)
    limit = own.launch_bounds(candidate.kernel, "run").registers(target)
    return Estimated(min(own.estimated_registers(candidate.kernel), limit))


def predict_before(candidate: Candidate, target: Target) -> Prediction:
    """As `predict`, without a compiler's report."""
    return predict(candidate, estimate(candidate, target), target)


def best_predicted(candidates: Sequence[Candidate], count: int, target: Target) -> Choice:
    """The `count` best, at least 1; of equal predictions the candidate whose id is smaller. So the best 3 are among the
    best 4, in whichever order the candidates come."""
    times = {one.id: predict_before(one, target).us for one in candidates}
    ranked = sorted(candidates, key=lambda one: (times[one.id], one.id))
    kept = {one.id for one in ranked[:count]}
    return Choice(
        tuple(one for one in candidates if one.id in kept),
        tuple((one, times[one.id]) for one in ranked[count:]),
        max((times[identity] for identity in kept), default=0.0),
    )
