"""What nvcc makes of the kernels."""

from __future__ import annotations

from codegen.kernel import Kernel
from tests.operators.harness.machine_code import ALIGNED, Code


def reads_values_transposed(kernel: Kernel, code: Code) -> None:
    assert code.count("ldmatrix.sync.aligned.m8n8.x4.trans") > 0
    assert code.count("ldmatrix.sync.aligned.m8n8.x4.shared") > 0


def touches_no_local_memory(kernel: Kernel, code: Code) -> None:
    assert code.count("ld.local") == code.count("st.local") == 0


def weighs_by_approximate_powers(kernel: Kernel, code: Code) -> None:
    """One for each score of a lane, and one for each row to rescale."""
    t = kernel.tunables.as_dict()
    pieces = int(t["tile_q"]) // int(t["warps"]) // 16
    own = pieces * (int(t["tile_kv"]) // 2 + 2)
    assert code.count("ex2.approx.ftz.f32") - own in range(
        1 + 4 * int(t["tile_kv"]) * pieces * kernel.signature_dict["softcap"]
    )


def writes_16_bytes_at_once(kernel: Kernel, code: Code) -> None:
    stores = {name for name in code.instructions if name.startswith("st.global")}
    t = kernel.tunables.as_dict()
    if t.get("split"):  # `merge` writes out
        of_rows = 2 * int(t["tile_q"]) // int(t["warps"]) // 16
        pairs = of_rows * kernel.signature_dict["columns_vo"] // 8
        # nvcc makes one store of the greatest score and the total of a row, or two.
        assert code.count("st.global.v2.f32") + code.count("st.global.f32") - pairs in (of_rows, 2 * of_rows)
        assert code.count("st.global.v2.f32") >= pairs and stores <= {"st.global.v2.f32", "st.global.f32"}
        return
    lse = {name for name in stores if "v4" not in name}
    assert stores - lse and bool(lse) == kernel.signature_dict["lse"]


CLAIMS = (
    *ALIGNED,
    reads_values_transposed,
    touches_no_local_memory,
    weighs_by_approximate_powers,
    writes_16_bytes_at_once,
)
