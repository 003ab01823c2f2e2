"""A candidate's predicted time before anything is compiled, and the best of a search by it: what `keep` goes by.

The same roofline as after a compile (`codegen.predict.roofline`), with registers that the operator estimates
(accumulators, fragments and a fixed part, on the safe side) instead of those that ptxas reports, as far as the launch
bounds allow them. Nothing counts as spilled: what must spill breaks a rule. As long as no GPU has confirmed the ranks,
only searches with `keep` get fewer candidates by it.
"""

from bisect import insort
from dataclasses import dataclass

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.predict.roofline import Prediction, predict
from codegen.targets import Target
from codegen.text.ptxas_report import Resources

# Predicted microseconds, id, place among the offered, candidate: no two have the same id and place.
_Ranked = tuple[float, str, int, Candidate]


@dataclass(frozen=True)
class Choice:
    """The candidates that are predicted fastest, in their given order; how many are left out, and the fastest of those.
    Each time in microseconds; `slowest_us` is that of the kept."""

    kept: tuple[Candidate, ...]
    slowest_us: float
    left: int = 0
    best_left: tuple[Candidate, float] | None = None


def estimate(candidate: Candidate, target: Target) -> Resources:
    """What stands in for a compiler's report. Kernels have no static shared memory, and nothing counts as spilled."""
    op = operator(candidate.kernel.operator)
    bounds = op.launch_bounds(candidate.kernel, "run")
    # The compiler leaves a block of so many threads room on the multiprocessor, in units of 8 registers.
    registers = min(
        op.estimated_registers(candidate.kernel),
        bounds.registers(target),
        target.registers_per_sm // bounds.threads // 8 * 8,
    )
    return Resources(registers, 0, spill_load_bytes=0, spill_store_bytes=0, stack_bytes=0, barriers=0)


def predict_uncompiled(candidate: Candidate, target: Target) -> Prediction:
    """As `predict`, without a compiler's report."""
    return predict(candidate, estimate(candidate, target), target)


class BestPredicted:
    """The `count` best (at least 1) of candidates that come one after the other; no others are held.

    Of equal predictions the candidate whose id is smaller. So the best 3 are among the best 4, in whichever order the
    candidates come.
    """

    def __init__(self, count: int, target: Target) -> None:
        self._count, self._target = count, target
        self._kept: list[_Ranked] = []
        self._best_left: _Ranked | None = None
        self._offered = 0

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, candidate: Candidate) -> None:
        us = predict_uncompiled(candidate, self._target).us
        insort(self._kept, (us, candidate.id, self._offered, candidate))
        self._offered += 1
        if len(self._kept) > self._count:
            out = self._kept.pop()
            self._best_left = out if self._best_left is None else min(out, self._best_left)

    def choice(self) -> Choice:
        """Of what was offered until now."""
        in_order = sorted(self._kept, key=lambda ranked: ranked[2])
        candidates = tuple(candidate for *_, candidate in in_order)
        slowest_us = self._kept[-1][0] if self._kept else 0.0
        if self._best_left is None:
            return Choice(candidates, slowest_us)
        us, _, _, candidate = self._best_left
        return Choice(candidates, slowest_us, self._offered - len(candidates), (candidate, us))
