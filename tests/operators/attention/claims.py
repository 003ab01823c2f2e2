"""What nvcc makes of the kernels."""

from __future__ import annotations

from codegen.kernel import Kernel
from tests.operators.harness.machine_code import Code


def reads_values_transposed(kernel: Kernel, code: Code) -> None:
    assert code.count("ldmatrix.sync.aligned.m8n8.x4.trans") > 0
    assert code.count("ldmatrix.sync.aligned.m8n8.x4.shared") > 0


def touches_no_local_memory(kernel: Kernel, code: Code) -> None:
    assert code.count("ld.local") == code.count("st.local") == 0
