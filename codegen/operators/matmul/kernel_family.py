"""Which of the two kernels computes a problem, on the CUDA cores (simt) or on tensor cores (tensor), and what both know
of its operands."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from codegen.alignment import needs_cuda_cores, widest
from codegen.dtypes import dtype
from codegen.fixed_point import bits_of, over_ring
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
    return "chain_k" in tunables


def mma_type(dtype: str) -> str:
    """The tensor cores' name of an input type, as in `Target.tensor_macs`."""
    return "tf32" if dtype == "float32" else dtype


@lru_cache(maxsize=1024)  # called for every schedule
def aligns(problem: MatmulProblem) -> tuple[int, int, int]:
    """The classes of A, B and out (and of what has out's shape): the widest access of which columns, pitch and, in a
    batch, its stride are whole multiples."""
    p, quads = problem, needs_cuda_cores(problem.dtype, problem.allow_tf32)

    def of(element: str, columns: int, pitch: int, stride: int) -> int:
        return widest(element, math.gcd(columns, pitch, stride if p.batch > 1 else 0), quads=quads)

    return (
        of(p.dtype, p.stored("a")[1], p.lda, p.stride_a),
        of(p.dtype, p.stored("b")[1], p.ldb, p.stride_b),
        of(p.out_dtype, p.stored("c")[1], p.ldc, p.stride_c),
    )


@dataclass(frozen=True)
class Stored:
    """How A and B lie in memory: bytes of an element, elements per access of A and of B, and the layout; how many bytes
    count, where those are not all."""

    size: int
    aligns: tuple[int, int]
    layout: str
    limbs: int = 0

    @classmethod
    def of(cls, problem: MatmulProblem, aligns: tuple[int, int]) -> "Stored":
        limbs = bits_of(problem.dtype) // 8 if over_ring(problem) else 0
        return cls(dtype(problem.dtype).bytes, aligns, problem.layout, limbs)

    @property
    def along_k(self) -> tuple[bool, bool]:
        """Whether A's and B's rows in memory run along k, as fragments do."""
        return self.layout[0] == "n", self.layout[1] == "t"

    @property
    def turned(self) -> tuple[bool, bool]:
        """Whether A's and B's bytes are turned in registers on their way to shared memory."""
        return self.size == 1 and not self.along_k[0], self.size == 1 and not self.along_k[1]

    @property
    def by_words(self) -> int:
        """How many of the operands no ldmatrix can read."""
        return self.along_k.count(False) if self.size == 4 else 0
