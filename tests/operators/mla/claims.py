"""What nvcc makes of the kernels, and classes of problems."""

from __future__ import annotations

from codegen.kernel import Kernel
from tests.operators.attention.claims import reads_values_transposed
from tests.operators.harness.machine_code import ALIGNED, Code, reads_tables_ahead_of_copies
from tests.operators.mla.kernels import (
    DECODE,
    OP,
    PREFILL,
    WIDE_DECODE,
)

CLASSES = {"decode": DECODE, "decode of 128 heads": {**WIDE_DECODE, "page_size": 16}, "prefill": PREFILL}


def touches_no_local_memory(kernel: Kernel, code: Code) -> None:
    assert code.count("ld.local") == code.count("st.local") == 0
    assert (code.resources.spill_bytes, code.resources.stack_bytes) == (0, 0)


def weighs_by_approximate_powers(kernel: Kernel, code: Code) -> None:
    """One for each score of a lane, and one for each row to rescale."""
    t = kernel.tunables.as_dict()
    pieces = int(t["tile_q"]) * int(t["warps_vo"]) // int(t["warps"]) // 16
    assert code.count("ex2.approx.ftz.f32") == pieces * (int(t["tile_kv"]) // int(t["warps_vo"]) // 2 + 2)


def has_its_estimate_of_registers(kernel: Kernel, code: Code) -> None:
    assert code.resources.registers <= OP.estimated_registers(kernel) + 8


CLAIMS = (
    *ALIGNED,
    reads_values_transposed,
    touches_no_local_memory,
    weighs_by_approximate_powers,
    reads_tables_ahead_of_copies,
)
