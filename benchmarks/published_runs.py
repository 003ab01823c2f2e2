"""Published runs of others' kernels (benchmarks/published) as pairs of predicted and measured microseconds.

A kernel of others is described by the schedule of ours that does the same work, and by what is known to differ. Pure
but for reading the files.
"""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operator import Work
from codegen.operators import operator
from codegen.predict.predict_uncompiled import estimate, predict_uncompiled
from codegen.predict.roofline import predict_work
from codegen.problem import Problem
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import Target, target

PUBLISHED = Path(__file__).with_name("published")
MATMUL = operator("matmul")
VENDOR = "cublas"
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}  # by what stands in a file's name; else float32
LEVEL = 1  # of the search whose best stands beside the vendor's kernel

# Problems that a constant of the prediction was fitted to (codegen/predict/roofline.py), by file: `RING_LATENCY_US` and
# `PRODUCT_US`. The prediction is evaluated on the others.
FITTED = {"triton-h100-fp16": (128, 4096, 4096), "cublas-h100-bf16": (256, 256, 256)}

Row = Mapping[str, str]

# By the GPU's name in a file's: the target, and the fields of its data sheet in which the product differs. Sources:
# NVIDIA Turing white paper WP-09183-001, GA102 white paper v2.0, Ada white paper v2.1, RTX A4000 data sheet.
GPUS: dict[str, tuple[str, dict[str, Any]]] = {
    "rtx-2080-ti": ("sm_75", {"sm_count": 68, "clock_mhz": 1545, "dram_gb_s": 616.0, "l2_bytes": 5_767_168}),
    "titan-rtx": ("sm_75", {"sm_count": 72, "clock_mhz": 1770, "dram_gb_s": 672.0, "l2_bytes": 6_291_456}),
    "t4": ("sm_75", {}),
    "rtx-3090": ("sm_86", {"sm_count": 82, "clock_mhz": 1695, "dram_gb_s": 936.0, "l2_bytes": 6_291_456}),
    "a4000": ("sm_86", {"sm_count": 48, "clock_mhz": 1560, "dram_gb_s": 448.0, "l2_bytes": 4_194_304}),
    "a6000": ("sm_86", {}),
    "rtx-4090": ("sm_89", {"sm_count": 128, "clock_mhz": 2520, "dram_gb_s": 1008.0, "l2_bytes": 75_497_472}),
    "l40s": ("sm_89", {}),
    "a100": ("sm_80", {}),
    "h100": ("sm_90", {}),
}


@dataclass(frozen=True)
class Run:
    """One row: m, n and k, and microseconds. `predicted` is inf where a search would refuse the schedule."""

    problem: tuple[int, int, int]
    measured: float
    predicted: float


@dataclass(frozen=True)
class PublishedSet:
    """A file. `tiles`: several schedules of each problem; else one kernel each, chosen by the vendor's library."""

    name: str
    gpu: str
    dtype: str
    tiles: bool
    runs: tuple[Run, ...]


def read_sets(folder: Path = PUBLISHED) -> list[PublishedSet]:
    """All files of the folder. Raises ValueError for columns or a GPU that no reader here is for."""
    return [_read(path) for path in sorted(folder.glob("*.csv"))]


def sheet_of(name: str) -> tuple[str, Target]:
    """The GPU in a file's name, with its data sheet."""
    for gpu, (base, fields) in GPUS.items():
        if re.search(rf"(^|-){gpu}(-|$)", name):
            return gpu, replace(target(base), product=gpu, **fields)
    raise ValueError(f"{name}: no GPU of its name has a data sheet; allowed: {', '.join(GPUS)}")


def _read(path: Path) -> PublishedSet:
    gpu, sheet = sheet_of(path.stem)
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows, columns = list(reader), set(reader.fieldnames or ())
    dtype = next((long for short, long in DTYPES.items() if short in path.stem), "float32")
    if {"threads_m", "threads_n", "milliseconds"} <= columns:
        extent = int(re.findall(r"\d+", path.stem)[0])
        return PublishedSet(path.stem, gpu, dtype, True, tuple(_clblast(row, extent, sheet) for row in rows))
    if {"tile_m", "warps", "microseconds"} <= columns:
        ours = [row for row in rows if row["who"] != VENDOR]
        return PublishedSet(path.stem, gpu, dtype, True, tuple(_triton(row, dtype, sheet) for row in ours))
    if {"m", "n", "k", "tflops"} <= columns:
        return PublishedSet(path.stem, gpu, dtype, False, tuple(_vendor(row, dtype, sheet) for row in rows))
    raise ValueError(f"{path.name}: columns {', '.join(sorted(columns))} are of no known kind")


def _problem(extents: Sequence[int], **fields: str) -> Problem:
    m, n, k = extents
    return MATMUL.parse({"operator": "matmul", "m": m, "n": n, "k": k, **fields})


def _clblast(row: Row, extent: int, sheet: Target) -> Run:
    """A tile of CLBlast's kernel: one stage, A and B with k first."""
    tile = tuple(int(row[f"tile_{axis}"]) for axis in "mnk")
    threads = tuple(int(row[f"threads_{axis}"]) for axis in "mn")
    schedule = {
        "tile_m": tile[0], "tile_n": tile[1], "tile_k": tile[2], "thread_m": tile[0] // threads[0],
        "thread_n": tile[1] // threads[1], "warp_m": min(32, threads[0]), "stages": 1, "fragments": 1, "padding": 0,
        "unroll_k": 8, "min_blocks": 1, "split": "none", "raster": 0, "split_k": 1,
    }  # fmt: skip
    extents = (extent, extent, extent)
    candidate = MATMUL.candidate(_problem(extents, layout="tn"), Schedule.of(schedule))
    work = _reading_scalars(MATMUL.work(candidate.problem, candidate.schedule, sheet), schedule, extent)
    # Sums that do not fit a thread's registers are refused before anything is compiled.
    fits = schedule["thread_m"] * schedule["thread_n"] < sheet.registers_per_thread
    us = predict_work(work, estimate(candidate, sheet), sheet).us if fits else math.inf
    return Run(extents, 1e3 * float(row["milliseconds"]), us)


def _reading_scalars(work: Work, schedule: Mapping[str, Any], k: int) -> Work:
    """CLBlast gives a thread rows and columns that lie side by side, and reads its parts of A and B from shared memory
    as single floats: lanes that are `thread_m` floats apart share banks. Ours reads quads that are interleaved. That
    reads are scalar follows from the times on the RTX 2080 Ti, which grow with thread_m squared."""
    lanes = (schedule["warp_m"], 32 // schedule["warp_m"])
    own = (schedule["thread_m"], schedule["thread_n"])
    wavefronts = sum(
        count * max(1, math.ceil(across * math.gcd(count, 32) / 32)) for count, across in zip(own, lanes, strict=True)
    )
    warps, lanes_in_all = work.blocks * work.threads / 32, float(work.blocks) * work.threads
    filled = 4.0 * work.blocks * k * (schedule["tile_m"] + schedule["tile_n"])
    moved = (schedule["tile_m"] + schedule["tile_n"]) / 4 / work.threads * 6  # vectors of four, a step's share of k
    per_row = own[0] + own[1] + 4 / schedule["unroll_k"] + moved
    return replace(
        work,
        shared_bytes=128.0 * wavefronts * warps * k + filled,
        other_instructions=lanes_in_all * (k * per_row + 12 * work.steps + 2 * own[0] * own[1]),
    )


def _triton(row: Row, dtype: str, sheet: Target) -> Run:
    """A tile of Triton's kernel: its warps as square as they go, and the columns of its raster."""
    m, n, k, stages, warps = (int(row[name]) for name in ("tile_m", "tile_n", "tile_k", "stages", "warps"))
    warps_m, warps_n = _warps(m, n, warps)
    schedule = {
        "tile_m": m, "tile_n": n, "tile_k": k, "warps_m": warps_m, "warps_n": warps_n, "mma_k": 16, "stages": stages,
        "copy": "cp_async", "fragments": 2, "epilogue_path": "shared", "static_k": 0, "maxnreg": 0, "min_blocks": 1,
        "split": "none", "stream_blocks": 0, "split_k": 1, "raster": 8,
    }  # fmt: skip
    extents = (int(row["m"]), int(row["n"]), int(row["k"]))
    candidate = MATMUL.candidate(_problem(extents, dtype=dtype), Schedule.of(schedule))
    us = predict_uncompiled(candidate, sheet).us
    return Run(extents, float(row["microseconds"]), us)


def _warps(tile_m: int, tile_n: int, warps: int) -> tuple[int, int]:
    """Along m and n, so that their tiles are as square as they go."""
    ways = [
        (abs(tile_m // along - tile_n // (warps // along)), along)
        for along in (1, 2, 4, 8)
        if warps % along == 0 and tile_m % (16 * along) == 0 and tile_n % (16 * (warps // along)) == 0
    ]
    along = min(ways)[1]
    return along, warps // along


def _vendor(row: Row, dtype: str, sheet: Target) -> Run:
    """A product of the vendor's library beside the schedule of ours that is predicted fastest."""
    extents = (int(row["m"]), int(row["n"]), int(row["k"]))
    candidate: Candidate = lower(_problem(extents, dtype=dtype), sheet, Search(level=LEVEL, keep=1)).candidates[0]
    measured = 2.0 * math.prod(extents) / float(row["tflops"]) / 1e6
    return Run(extents, measured, predict_uncompiled(candidate, sheet).us)
