"""What compiling is predicted to cost: the operators' estimates for each kernel, and what any file costs. That fixed
cost is most of a small kernel's, so kernels share files, within the limits here."""

from collections.abc import Sequence

from codegen.kernel import Kernel
from codegen.operators import operator

# nvcc -cubin of an empty group of these headers takes 0.28 to 0.36 CPU seconds, g++ on its launch code and the linker
# 0.1 more (docs/decisions/0016-groups-by-what-compiling-took.md).
FIXED_SECONDS = 0.4
# Peak resident memory of nvcc, cicc and ptxas together: of a file with one kernel, and what a kernel adds per second of
# its estimate (6 to 10 MiB measured there).
FIXED_BYTES = 96 * 2**20
BYTES_PER_SECOND = 10 * 2**20
_SMALLEST_ESTIMATE = 1e-3  # seconds: an operator may say 0

WORTHWHILE_SECONDS = 4 * FIXED_SECONDS
"""Of kernels in a file, while other workers are busy anyway: at most a fifth of it is what any file costs."""

ROUNDING = 1e-6
"""Seconds by which sums of estimates may exceed a limit that they reach."""

# Of one file, at most:
MAX_KERNELS = 48
MAX_SECONDS = 12.0
MAX_BYTES = 2**30


def kernel_seconds(kernel: Kernel) -> float:
    """CPU seconds of the tools for one more kernel of a group."""
    return max(_SMALLEST_ESTIMATE, operator(kernel.operator).predicted_compile_seconds(kernel))


def kernel_bytes(kernel: Kernel) -> float:
    """Memory of the largest tool for one more kernel of a group."""
    return kernel_seconds(kernel) * BYTES_PER_SECOND


def files_that_pay(seconds: float, workers: int) -> int:
    """Of so many seconds of kernels, side by side: as many as each let the last end earlier by more than the file
    costs."""
    files = 1
    while files < workers and seconds / files - seconds / (files + 1) > FIXED_SECONDS:
        files += 1
    return files


def file_seconds(pending: float, workers: int, busy: Sequence[float]) -> float:
    """Predicted seconds that the next file should take, for one of so many `workers` that is free. `pending`: seconds
    of all kernels that wait; `busy`: how long each of the other workers that is busy will be.

    As long as all of them would be busy if the others took the rest, each when it is free: so all end at the same time.
    Not so short that it is not worthwhile, unless idle workers take the rest side by side."""
    files = files_that_pay(pending, workers - len(busy))
    share = max(_level(pending, workers, busy), min(WORTHWHILE_SECONDS, pending / files))
    leaves_little = files == 1 and pending - share < WORTHWHILE_SECONDS / 2
    return FIXED_SECONDS + (pending if leaves_little else share)


def _level(pending: float, workers: int, busy: Sequence[float]) -> float:
    """How long the workers are busy that share what is pending so that they all end at the same time."""
    sharing = max(1, workers - len(busy))
    level = pending / sharing
    for seconds in sorted(busy)[: workers - sharing]:
        if seconds >= level:
            break
        level = (level * sharing + seconds) / (sharing + 1)
        sharing += 1
    return level
