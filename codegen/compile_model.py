"""What compiling costs here: the operators' estimates, corrected by the files that were compiled before.

An operator's estimate (`predicted_compile_seconds`) was fitted on one machine to one nvcc. Here every family of kernels
(an operator's kernels that one correction fits) has a factor on it, for seconds and for memory: the weighted median
(Edgeworth, 1888) of measured over estimated in the latest files. The estimate itself counts as a few records of factor
1, so one strange record moves nothing, and before the first records the estimate stands. Factors end at 1/4 and 4: what
is further off is not an estimate's error but another problem (a busy machine, a compiler that hangs).

The fixed seconds of a file are no part of it: groups are made about equally long, and among files of equal length an
intercept cannot be told from a slope.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from codegen.kernel import Kernel
from codegen.operators import operator

# nvcc -cubin of an empty group of these headers takes 0.28 to 0.36 CPU seconds, g++ on its launch code and the linker
# 0.1 more (docs/decisions/0016-groups-by-what-compiling-took.md).
FIXED_SECONDS = 0.4
# Peak resident memory of nvcc, cicc and ptxas together: of a file with one kernel, and what a kernel adds per second of
# its estimate (6 to 10 MiB measured there).
FIXED_BYTES = 96 * 2**20
BYTES_PER_SECOND = 10 * 2**20

KEPT_RECORDS = 64  # of a family under a toolchain: the latest
PRIOR_WEIGHT = 2.0  # seconds of evidence that the estimate counts for
MOST_WEIGHT = 1.0  # seconds of evidence that one file can give
SMALLEST_FACTOR, LARGEST_FACTOR = 0.25, 4.0
_SMALLEST_ESTIMATE = 1e-3  # seconds: an operator may say 0


@dataclass(frozen=True)
class CompiledFile:
    """What one file that compiled took: CPU seconds of all its tools, and the most memory that one of them held.
    `estimates`: family -> seconds that its kernels in the file were estimated at."""

    estimates: Mapping[str, float]
    cpu_seconds: float
    peak_bytes: int

    @classmethod
    def of(cls, kernels: Iterable[Kernel], cpu_seconds: float, peak_bytes: int) -> CompiledFile:
        estimates: dict[str, float] = {}
        for kernel in kernels:
            estimates[family(kernel)] = estimates.get(family(kernel), 0.0) + estimate(kernel)
        return cls(estimates, cpu_seconds, peak_bytes)


@dataclass(frozen=True)
class Record:
    """What one file says about one family. `weight`: seconds of evidence; the factors are measured over estimated."""

    weight: float
    seconds: float
    memory: float


@dataclass(frozen=True)
class Factors:
    """On an operator's estimate, for one family."""

    seconds: float = 1.0
    memory: float = 1.0


@dataclass(frozen=True)
class CompileModel:
    """Seconds and bytes of groups. `factors` by family; a family without them is estimated by its operator alone."""

    factors: Mapping[str, Factors] = field(default_factory=dict)

    def kernel_seconds(self, kernel: Kernel) -> float:
        """CPU seconds of one more kernel of a group."""
        return estimate(kernel) * self._of(family(kernel)).seconds

    def kernel_bytes(self, kernel: Kernel) -> float:
        """Of memory, for one more kernel of a group."""
        return estimate(kernel) * self._of(family(kernel)).memory * BYTES_PER_SECOND

    def seconds(self, kernels: Iterable[Kernel]) -> float:
        """CPU seconds of the tools for one group of these kernels."""
        return FIXED_SECONDS + sum(map(self.kernel_seconds, kernels))

    def bytes(self, kernels: Iterable[Kernel]) -> float:
        """The most memory of one of the tools for one group of these kernels."""
        return FIXED_BYTES + sum(map(self.kernel_bytes, kernels))

    def records(self, file: CompiledFile) -> dict[str, Record]:
        """What the file says about each of its families. Where it holds several, what it took is shared out as this
        model would have it, and each counts for less: by its share of the file."""
        whole = sum(file.estimates.values())
        seconds = sum(self._of(name).seconds * spent for name, spent in file.estimates.items())
        memory = sum(self._of(name).memory * spent for name, spent in file.estimates.items()) * BYTES_PER_SECOND
        if not (min(whole, seconds, memory) > 0 and math.isfinite(file.cpu_seconds)):
            return {}
        longer = max(0.0, file.cpu_seconds - FIXED_SECONDS) / seconds
        larger = max(0, file.peak_bytes - FIXED_BYTES) / memory
        return {
            name: Record(
                weight=min(MOST_WEIGHT, spent * spent / whole),
                seconds=_within(self._of(name).seconds * longer),
                memory=_within(self._of(name).memory * larger),
            )
            for name, spent in file.estimates.items()
        }

    def _of(self, name: str) -> Factors:
        return self.factors.get(name, Factors())


PRIOR = CompileModel()
"""What is known before anything was compiled."""


def family(kernel: Kernel) -> str:
    """The kernels that one factor corrects: of one operator, and alike by what its estimate distinguishes."""
    return f"{kernel.operator}/{operator(kernel.operator).compile_family(kernel)}".rstrip("/")


def added_seconds(predicted: float) -> float:
    """What a group of so many predicted seconds adds to a file that is compiled anyway."""
    return max(0.0, predicted - FIXED_SECONDS)


def estimate(kernel: Kernel) -> float:
    """The operator's own: CPU seconds of nvcc for one more kernel of a group."""
    return max(_SMALLEST_ESTIMATE, operator(kernel.operator).predicted_compile_seconds(kernel))


def fit(records: Sequence[Record]) -> Factors:
    """Of one family, from its latest records."""
    latest = records[-KEPT_RECORDS:]
    return Factors(
        seconds=_median([(one.seconds, one.weight) for one in latest]),
        memory=_median([(one.memory, one.weight) for one in latest]),
    )


def _median(weighted: Sequence[tuple[float, float]]) -> float:
    """The lower weighted median of these and the estimate's own factor, 1."""
    values = sorted([*((_within(value), weight) for value, weight in weighted if weight > 0), (1.0, PRIOR_WEIGHT)])
    half = sum(weight for _, weight in values) / 2
    below = 0.0
    for value, weight in values:
        below += weight
        if below >= half:
            return value
    return 1.0  # weights that rounding lost


def _within(factor: float) -> float:
    if not math.isfinite(factor):
        return 1.0
    return min(LARGEST_FACTOR, max(SMALLEST_FACTOR, factor))
