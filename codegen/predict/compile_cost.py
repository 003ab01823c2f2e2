"""What compiling is predicted to cost: the operators' estimates for each kernel, and what any file costs. That fixed
cost is most of a small kernel's, so kernels share files, within the limits here."""

from collections.abc import Iterable

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


def in_files(kernels: Iterable[Kernel], workers: int) -> list[tuple[Kernel, ...]]:
    """Each kernel once, dealt out by length. As many files as pay for idle `workers`, or a multiple of that."""
    longest_first = sorted(set(kernels), key=lambda kernel: (-kernel_seconds(kernel), kernel.id))
    step = count = files_that_pay(sum(map(kernel_seconds, longest_first)), workers)
    while len(part := longest_first[::count]) > 1:  # no other has more kernels or more seconds
        if len(part) <= MAX_KERNELS and FIXED_SECONDS + sum(map(kernel_seconds, part)) <= MAX_SECONDS:
            break
        count += step
    return [tuple(longest_first[first::count]) for first in range(min(count, len(longest_first)))]
