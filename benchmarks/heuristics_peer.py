"""NVIDIA's estimates of the same products, where `nvidia-matmul-heuristics` is installed (PyPI; it needs no GPU).

Of the kernel that it would choose itself: of tiles that are given to it, its version 0.1.0.27 estimates most as 0.
"""

import importlib
from typing import Any

from benchmarks.published_runs import PublishedSet

PACKAGE = "nvidia-matmul-heuristics"
# Its names of GPUs by ours; it has none of Turing.
GPUS = {"rtx-3090": "RTX_3090", "a6000": "RTX_A6000", "rtx-4090": "RTX_4090", "l40s": "L40S", "a100": "A100_SXM_80GB",
        "h100": "H100_SXM"}  # fmt: skip
# Types of A and B, of the sums and of the result: H, T and S are fp16, bf16 and fp32.
PRECISIONS = {"float16": "HSH", "bfloat16": "TST"}


def estimated_us(published: PublishedSet) -> list[float] | None:
    """Microseconds of each product; None without the package, and of what it has no model for."""
    if published.tiles or published.gpu not in GPUS or published.dtype not in PRECISIONS:
        return None
    try:
        library: Any = importlib.import_module("nvMatmulHeuristics")
    except ImportError:
        return None
    interface = library.NvMatmulHeuristicsInterfaceEx(
        backend=library.NvMatmulHeuristicsTarget.CUTLASS3,
        gpu=library.NvMatmulHeuristicsNvidiaGpu[GPUS[published.gpu]],
    )
    layout, precision = library.NvMatmulHeuristicsMatmulLayout.NN_ROW_MAJOR, PRECISIONS[published.dtype]
    problems = [interface.makeNvMatmulHeuristicsProblem(*run.problem, layout) for run in published.runs]
    return [1e6 * float(interface.get(problem, 1, precision)[0]["runtime"]) for problem in problems]
