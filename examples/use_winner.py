"""Look up a winner, load it and call it on the GPU, with CuPy or PyTorch.

    cukiln tune examples/quickstart.json       # once, beside `make serve`: finds the winners
    python examples/use_winner.py              # needs an NVIDIA GPU, and CuPy or PyTorch

Computes ffn1 of BERT-base, gelu(a · bᵀ + bias), and compares it with the framework's own result.
"""

# ruff: noqa: T201 - printing is what this program is for

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cukiln

REQUEST = json.loads((Path(__file__).parent / "quickstart.json").read_text())
FFN1 = next(problem for problem in REQUEST["problems"] if problem["name"] == "ffn1")


def winner(client: cukiln.Client) -> cukiln.WinnerRecord:
    """The record of ffn1; ends the program where there is none."""
    (result,) = client.lookup([FFN1], target=REQUEST["target"])
    if result.record is None:
        sys.exit("No winner for ffn1 yet: run `cukiln tune examples/quickstart.json` against this service first.")
    return result.record


def gpu_arrays() -> tuple[Any, Any, Any, Any, Any]:
    """(a, b, bias, out, expected) on the GPU, from PyTorch or CuPy; ends the program without a GPU."""
    m, n, k = FFN1["m"], FFN1["n"], FFN1["k"]
    if find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            a, b = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
            bias, out = torch.randn(n, device="cuda"), torch.empty(m, n, device="cuda")
            return a, b, bias, out, torch.nn.functional.gelu(a @ b.T + bias)
    if find_spec("cupy"):
        import cupy
        from cupyx.scipy.special import erf

        if cupy.is_available():
            random: Any = cupy.random.default_rng(0)
            a, b = (random.standard_normal(shape, dtype=cupy.float32) for shape in ((m, k), (n, k)))
            bias, out = random.standard_normal(n, dtype=cupy.float32), cupy.empty((m, n), cupy.float32)
            x = a @ b.T + bias
            return a, b, bias, out, 0.5 * x * (1 + erf(x / 2**0.5))
    sys.exit("This needs an NVIDIA GPU with its driver, and PyTorch or CuPy; `cukiln doctor` shows what is here.")


def main() -> None:
    with cukiln.Client() as client:
        record = winner(client)
        # Checks the library's SHA-256; needs no GPU. The fastest kernel; where it needs a workspace, calls share one.
        kernel = cukiln.load(record, client=client)
    best = kernel.entry or record.front[0]
    time_us = best.measured_us if record.ranked_by == "measured" else best.predicted_us
    print(f"loaded {kernel.path.name[:12]}…, verified: {best.verified}, {record.ranked_by} {time_us} µs")
    a, b, bias, out, expected = gpu_arrays()
    kernel.prepare(0)  # before a CUDA graph is captured; otherwise the first call does it
    kernel(a, b, bias, out)
    print(f"largest difference from the framework's own result: {float(abs(out - expected).max()):.2e}")


if __name__ == "__main__":
    try:
        main()
    except cukiln.CukilnError as error:
        sys.exit(f"use_winner: {error}")
