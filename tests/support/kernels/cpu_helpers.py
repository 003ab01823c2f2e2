"""What the tests of the CPU execution share: one toolchain per test process, kernels by a few words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from codegen import operators
from codegen.kernel import Kernel
from codegen.plan.verification_plan import Part
from codegen.search.schedule import Schedule
from workers.compile.toolchain import Toolchain, find_toolchain
from workers.cpu.verify import CHILD, CHILD_ENVIRONMENT, CpuVerdict, verify_on_cpu
from workers.processes.processes import Limits, Processes

LIMITS = Limits(wall_seconds=240, cpu_seconds=240, memory_bytes=4 << 30, output_bytes=64 << 20)
# A small tile: two warps of 32 threads, each computing 4 x 4 elements.
SMALL_TILE: dict[str, int | str] = {
    "tile_m": 32, "tile_n": 32, "tile_k": 8, "thread_m": 4, "thread_n": 4, "warp_m": 4, "stages": 1, "fragments": 1,
    "padding": 0, "unroll_k": 4, "min_blocks": 1, "split": "none",
}  # fmt: skip
# A small tile of the tensor cores: two warps, each computing 16 x 16 elements; two k-steps of 32 bytes.
SMALL_IMAD: dict[str, int | str] = {
    "algorithm": "imad", "tile_m": 32, "tile_n": 32, "tile_k": 8, "thread_m": 4, "thread_n": 4, "warp_m": 4,
    "stages": 1, "fragments": 1, "padding": 0, "unroll_k": 4, "min_blocks": 1, "split": "none", "truncate": "once",
}  # fmt: skip
SMALL_LIMBS: dict[str, int | str] = {
    "algorithm": "limbs", "tile_m": 32, "tile_n": 16, "tile_k": 32, "warps_m": 2, "warps_n": 1, "stages": 2,
    "copy": "cp_async", "split": "none", "truncate": "once", "chain_k": 0,
}  # fmt: skip
SMALL_TENSOR_TILE: dict[str, int | str] = {
    "tile_m": 32, "tile_n": 16, "warps_m": 2, "warps_n": 1, "stages": 2, "fragments": 1, "copy": "cp_async",
    "epilogue_path": "direct", "split": "none", "static_k": 0, "min_blocks": 1, "maxnreg": 0,
}  # fmt: skip
# By input type: the k of one mma and of that tile, and the elements of 16 bytes.
MMA_K = {"float16": 16, "bfloat16": 16, "float32": 8, "int8": 32}
TILE_K = {"float16": 32, "bfloat16": 32, "float32": 16, "int8": 64}
PER_VECTOR = {"float16": 8, "bfloat16": 8, "float32": 4, "int8": 16, "int32": 4}


@cache
def processes() -> Processes:
    """Called first by a thread that stays: as of a compile worker, what runs kernels is forked from a process that has
    imported it, which that thread keeps."""
    made = Processes()
    made.keep_warm(CHILD, CHILD_ENVIRONMENT)
    return made


@cache
def toolchain() -> Toolchain:
    return find_toolchain(processes())


def verify(
    kernels: Sequence[Kernel],
    *,
    seed: int = 1,
    limits: Limits = LIMITS,
    sanitize: bool = False,
    cancel: threading.Event | None = None,
    on_result: Callable[[CpuVerdict], None] | None = None,
    kernel_cpu_seconds: float = 10.0,
    kernel_wall_seconds: float = 60.0,
    runner: Processes | None = None,
    part: Part | None = None,
) -> list[CpuVerdict]:
    return verify_on_cpu(
        kernels,
        toolchain(),
        runner or processes(),
        limits,
        seed=seed,
        sanitize=sanitize,
        cancel=cancel,
        on_result=on_result,
        kernel_cpu_seconds=kernel_cpu_seconds,
        kernel_wall_seconds=kernel_wall_seconds,
        part=part,
    )


@contextmanager
def loaded(folders: Iterable[Path]) -> Iterator[None]:
    """Operator folders that exist for a while only: other tests count the operators."""
    before = dict(operators._LOADED)
    operators.load_operators(folders)
    try:
        yield
    finally:
        operators._LOADED.clear()
        operators._LOADED.update(before)


def faulty_kernel(fault: int) -> Kernel:
    """A kernel of the operator `faulty`, which must be loaded: wrong in one way, right for 0 and from 60 on."""
    return Kernel.of("faulty", {}, Schedule.of({"fault": fault}))


def matmul_kernel(
    layout: str = "nn",
    align: int | tuple[int, int, int] = 4,
    epilogue: Sequence[str] = (),
    operator: str = "matmul",
    **tunables: Any,
) -> Kernel:
    a, b, c = (align, align, align) if isinstance(align, int) else align
    signature = {
        "layout": layout, "dtype": "float32", "acc_dtype": "float32", "out_dtype": "float32", "allow_tf32": False,
        "epilogue": list(epilogue), "align_a": a, "align_b": b, "align_c": c,
    }  # fmt: skip
    return Kernel.of(operator, signature, Schedule.of({**SMALL_TILE, **tunables}))


def tensor_kernel(
    layout: str = "nt",
    dtype: str = "float16",
    align: tuple[int, int, int] | None = None,
    epilogue: Sequence[str] = (),
    out_dtype: str | None = None,
    operator: str = "matmul",
    **tunables: Any,
) -> Kernel:
    """A kernel on tensor cores (float32 is TF32). `align` in elements; default: 16 bytes of each."""
    out = out_dtype or ("int32" if dtype == "int8" else dtype)
    a, b, c = align or (PER_VECTOR[dtype], PER_VECTOR[dtype], PER_VECTOR[out])
    signature = {
        "layout": layout, "dtype": dtype, "acc_dtype": "int32" if dtype == "int8" else "float32", "out_dtype": out,
        "allow_tf32": dtype == "float32", "epilogue": list(epilogue), "align_a": a, "align_b": b, "align_c": c,
    }  # fmt: skip
    schedule: dict[str, Any] = {**SMALL_TENSOR_TILE, "tile_k": TILE_K[dtype], "mma_k": MMA_K[dtype], **tunables}
    return Kernel.of(operator, signature, Schedule.of(schedule))
