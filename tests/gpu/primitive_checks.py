"""What is compared of each primitive: a kernel of primitive_kernels.cuh, inputs, and how far GPU and CPU may differ.

Needs Python and NumPy alone. Inputs and outputs are 32-bit words, a row for each thread block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.gpu import primitive_inputs as inputs
from tests.gpu.primitive_inputs import Inputs, Kind, Words


@dataclass(frozen=True)
class Difference:
    """The first word that differs: block and word of the block, and its bits on the GPU and on the CPU."""

    block: int
    word: int
    gpu: int
    cpu: int


@dataclass(frozen=True)
class Comparison:
    """`worst` is the largest difference as a part of what is allowed; 0 where results must be equal."""

    values: int
    worst: float
    difference: Difference | None


# Gets the inputs, the results of GPU and CPU, and a way to ask the CPU for the results of other inputs.
Compare = Callable[[Words, Words, Words, Callable[[Words], Words]], Comparison]


@dataclass(frozen=True)
class Check:
    """`kernel`: its expression in primitive_kernels.cuh; threads and words are those of one block; `capability`: of the
    oldest GPU that has the instructions."""

    name: str
    kernel: str
    primitives: tuple[str, ...]
    inputs: Inputs
    words_out: int
    compare: Compare
    threads: int = 32
    shared_bytes: int = 0
    capability: int = 75

    @property
    def function(self) -> str:
        """An identifier for the kernel."""
        return "confirm_" + "".join(character if character.isalnum() else "_" for character in self.name)


def _compared(gpu: Words, cpu: Words, wrong: NDArray[np.bool_] | np.bool_, worst: float = 0.0) -> Comparison:
    if not wrong.any():
        return Comparison(gpu.size, worst, None)
    block, word = (int(i) for i in np.argwhere(wrong)[0])
    return Comparison(gpu.size, worst, Difference(block, word, int(gpu[block, word]), int(cpu[block, word])))


def _floats(words: Words) -> NDArray[np.float32]:
    return words.view(np.float32)


def _both_nan(gpu: Words, cpu: Words) -> NDArray[np.bool_]:
    return np.isnan(_floats(gpu)) & np.isnan(_floats(cpu))


def same_bits(_: Words, gpu: Words, cpu: Words, __: object = None) -> Comparison:
    return _compared(gpu, cpu, gpu != cpu)


def same_floats(_: Words, gpu: Words, cpu: Words, __: object = None) -> Comparison:
    """Equal bits, or NaN on both."""
    return _compared(gpu, cpu, (gpu != cpu) & ~_both_nan(gpu, cpu))


def same_sums(_: Words, gpu: Words, cpu: Words, __: object = None) -> Comparison:
    """The first half of the words are floats, the others integers."""
    wrong = gpu != cpu
    half = gpu.shape[1] // 2
    wrong[:, :half] &= ~_both_nan(gpu, cpu)[:, :half]
    return _compared(gpu, cpu, wrong)


def within_ulps(limits: tuple[int, ...]) -> Compare:
    """Float i of a thread differs by at most `limits[i]` units in the last place; 0: equal bits, or NaN on both."""

    def compare(_: Words, gpu: Words, cpu: Words, __: object = None) -> Comparison:
        allowed = np.broadcast_to(np.resize(np.array(limits, np.int64), gpu.shape[1]), gpu.shape)
        # Integers in the order of the floats, one apart where the floats are neighbours.
        magnitudes = ((w & np.uint32(0x7FFFFFFF)).astype(np.int64) for w in (gpu, cpu))
        left, right = (np.where(np.signbit(_floats(w)), -m, m) for w, m in zip((gpu, cpu), magnitudes, strict=True))
        apart = np.abs(left - right)
        wrong = np.where(allowed > 0, apart > allowed, gpu != cpu) | (np.isnan(_floats(gpu)) != np.isnan(_floats(cpu)))
        wrong &= ~_both_nan(gpu, cpu)
        ratios = (apart / np.maximum(allowed, 1))[(allowed > 0) & ~wrong & ~_both_nan(gpu, cpu)]
        return _compared(gpu, cpu, wrong, float(ratios.max(initial=0.0)))

    return compare


# --- mma


def _sums(words: Words, kind: Kind) -> NDArray[np.float64]:
    """With an axis more: the one or two numbers of a register of d."""
    halves = kind.sum == "float16"
    return words.view(np.float16 if halves else np.float32).astype(np.float64).reshape(*words.shape, 2 if halves else 1)


def same_numbers(kind: Kind) -> Compare:
    """Equal as numbers: a sum that is zero may have either sign."""

    def compare(_: Words, gpu: Words, cpu: Words, __: object = None) -> Comparison:
        equal = np.equal(_sums(gpu, kind), _sums(cpu, kind))
        return _compared(gpu, cpu, ~equal.all(axis=-1))

    return compare


# --- the checks

_HALF = Kind((4, 4, 2), "float16", "float32")
_BFLOAT16 = Kind((4, 4, 2), "bfloat16", "float32")
_HALF_SUMS = Kind((2, 4, 2), "float16", "float16")
_HALF_K8 = Kind((4, 2, 1), "float16", "float32")
_TF32 = Kind((4, 4, 2), "tf32", "float32")
_INT8 = Kind((4, 4, 2), "int8", "int32")
_UINT8 = Kind((4, 4, 2), "uint8", "int32")


def _mma(name: str, kind: Kind, largest: int, largest_d: int, capability: int = 80) -> tuple[Check, ...]:
    """Sums that are exact in any order, and others, which round as cpu/tensor_sums.h says."""
    words, primitives = 32 * kind.registers[0], (f"mma_{name}",)
    exact = inputs.integers(kind, largest, largest_d)
    sums = inputs.numbers(kind)
    return (
        Check(f"{name} integers", name, primitives, exact, words, same_numbers(kind), capability=capability),
        Check(f"{name} numbers", name, primitives, sums, words, same_bits, capability=capability),
    )


_MEMORY = ("load_global", "store_global", "load_shared", "store_shared", "shared_memory")
_SIZES = {"float": 4, "int": 4, "Half": 2, "BFloat16": 2, "signed char": 1, "unsigned char": 1}


def _vectors(element: str, count: int) -> Check:
    bytes_ = _SIZES[element] * count
    return Check(
        f"vectors {element} {count}", f"vectors<{element}, {count}>", _MEMORY, inputs.random_words(8 * bytes_),
        16 * bytes_, same_bits, shared_bytes=32 * bytes_,
    )  # fmt: skip


def _matrices(count: int, transposed: bool) -> Check:
    name = "ldmatrix_trans" if transposed else "ldmatrix"
    kernel = f"matrices<{count}, {str(transposed).lower()}>"
    return Check(f"{name} x{count}", kernel, (name,), inputs.rows, 32 * count, same_bits, shared_bytes=512)


# How far from the true value the functions are at most, in units in the last place: on the GPU expf 1, erff 2, tanhf 2,
# logf 1, log2f 1 (CUDA C++ Programming Guide, "Mathematical functions"), ex2 2 (PTX ISA, "ex2"), on the CPU expf 1,
# erff 1, tanhf 2, logf 1, exp2f 1, log2f 1 (The GNU C Library, "Known maximum errors in math functions"); and one where
# both round to neighbours. Roots and the greater of two have no error.
_ARITHMETIC = within_ulps((0, 3, 4, 5, 0, 0, 0, 3, 0, 4, 3, 0))
_FUNCTIONS = (
    "fma", "exp", "erf", "tanh", "round_to_half", "round_to_bfloat16", "exact_epilogue", "log", "sqrt", "exp2", "log2",
    "maximum",
)  # fmt: skip
_SHUFFLES = ("shuffle_idx", "shuffle_up", "shuffle_down", "shuffle_xor")

CHECKS: tuple[Check, ...] = (
    *(_vectors(element, count) for element in ("float", "int") for count in (1, 2, 4)),
    *(_vectors(element, count) for element in ("Half", "BFloat16") for count in (1, 2, 4, 8)),
    *(_vectors(element, count) for element in ("signed char", "unsigned char") for count in (1, 2, 4, 8, 16)),
    Check("arithmetic", "arithmetic", _FUNCTIONS, inputs.floats(96), 384, _ARITHMETIC),
    Check("conversions", "conversions", ("to_float", "from_float"), inputs.every_half, 224, same_floats),
    Check("pairs", "pairs", ("pack_pair", "round_to_tf32"), inputs.floats(64), 160, same_floats, capability=80),
    Check("bytes", "bytes_transposed", ("transpose_bytes",), inputs.random_words(128), 128, same_bits),
    Check("shuffles", "shuffles", _SHUFFLES, inputs.operands_of_shuffles, 128, same_bits),
    Check("votes", "votes", ("vote_any", "vote_all", "vote_ballot"), inputs.votes, 96, same_bits),
    Check("warp", "warp_exchange", ("warp_barrier",), inputs.random_words(32), 64, same_bits, shared_bytes=128),
    Check(
        "block", "block_exchange", ("__syncthreads",), inputs.random_words(128), 256, same_bits, threads=128,
        shared_bytes=512,
    ),
    Check(
        "some warps", "named_exchange", ("named_barrier", "named_barrier_arrive"), inputs.random_words(96), 96,
        same_bits, threads=96, shared_bytes=256,
    ),
    Check("additions", "additions", ("atomic_add",), inputs.addends, 66, same_sums),
    Check(
        "copies", "async_copies", ("cp_async", "cp_async_commit", "cp_async_wait"), inputs.random_words(512), 640,
        same_bits, shared_bytes=1536, capability=80,
    ),
    *(_matrices(count, transposed) for transposed in (False, True) for count in (1, 2, 4)),
    *_mma("m16n8k16_f16", _HALF, 16, 2**15),
    *_mma("m16n8k16_bf16", _BFLOAT16, 16, 2**15),
    *_mma("m16n8k16_f16_f16", _HALF_SUMS, 4, 1024),
    *_mma("m16n8k8_f16", _HALF_K8, 16, 2**15, capability=75),
    *_mma("m16n8k8_tf32", _TF32, 16, 2**15),
    Check("m16n8k32_s8", "m16n8k32_s8", ("mma_m16n8k32_s8",), inputs.any_bytes(_INT8), 128, same_bits, capability=80),
    Check("m16n8k32_u8", "m16n8k32_u8", ("mma_m16n8k32_u8",), inputs.any_bytes(_UINT8), 128, same_bits, capability=80),
)  # fmt: skip
