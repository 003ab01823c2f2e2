"""Which of the two kernels computes a problem: on the CUDA cores (simt_*) or on tensor cores (tensor_*)."""

from collections.abc import Mapping
from typing import Any

from codegen.operators.matmul.problem import MatmulProblem
from codegen.targets import Target

# The first architecture with cp.async and with mma.sync on bfloat16, tf32 and (m16n8k32) int8 (PTX ISA, "mma").
AMPERE = 80


def on_tensor_cores(problem: MatmulProblem, target: Target) -> bool:
    """Whether the problem's schedules are those of the tensor-core kernel: all but fp32 without `allow_tf32`.

    A problem whose type the target's tensor cores lack is on this path too; the rules then say why there is no kernel.
    """
    return problem.dtype != "float32" or (problem.allow_tf32 and target.capability >= AMPERE)


def is_tensor(tunables: Mapping[str, Any]) -> bool:
    """Whether these are tunables of the tensor-core kernel."""
    return "mma_k" in tunables or is_limbs(tunables)


def is_limbs(tunables: Mapping[str, Any]) -> bool:
    """Whether these are tunables of the tensor-core kernel over rings."""
    return tunables.get("algorithm") == "limbs"


def mma_type(dtype: str) -> str:
    """The tensor cores' name of an input type, as in `Target.tensor_macs`."""
    return "tf32" if dtype == "float32" else dtype
