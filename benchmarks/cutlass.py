"""One CUTLASS kernel beside one of ours: what nvcc takes for a file with each, straight to a `.so`."""

from __future__ import annotations

import importlib.util
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.compile_ways import Ways
from benchmarks.shapes import public_shape
from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import Target
from codegen.text.render_group import render_device
from workers.processes.processes import Processes

# 128 x 128 x 32 tiles of fp16 in three stages, fp32 accumulators: a kernel as CUTLASS' own examples instantiate it.
SOURCE = """\
#include <cutlass/gemm/device/gemm.h>
using Gemm = cutlass::gemm::device::Gemm<
    cutlass::half_t, cutlass::layout::RowMajor, cutlass::half_t, cutlass::layout::RowMajor, cutlass::half_t,
    cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<128, 128, 32>, cutlass::gemm::GemmShape<64, 64, 32>, cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<cutlass::half_t, 8, float, float>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, 3>;
template __global__ void cutlass::Kernel<Gemm::GemmKernel>(Gemm::GemmKernel::Params);
"""
SHAPE = "square/float16_1024"
SAME_TILE = {"tile_m": 128, "tile_n": 128, "tile_k": 32, "warps_m": 2, "warps_n": 2, "stages": 3}
ROUNDS = 3


def cutlass_headers(named: Path | None) -> Path | None:
    """The folder that holds cutlass/cutlass.h: the named one, of the wheel, of the system; None where there is none."""
    spec = importlib.util.find_spec("cutlass_library")
    of_wheel = [Path(place) / "source/include" for place in (spec.submodule_search_locations or [])] if spec else []
    places = [named] if named else [*of_wheel, Path("/usr/local/cuda/include"), Path("/usr/include")]
    return next((place for place in places if (place / "cutlass/cutlass.h").is_file()), None)


def our_kernel(sheet: Target) -> Kernel:
    """Ours with CUTLASS' tile."""
    op = operator("matmul")
    problem = op.parse(public_shape(SHAPE))
    values = op.space(problem, sheet, Search(level=0)).by_index(0).as_dict()
    return op.candidate(problem, Schedule.of({**values, **SAME_TILE})).kernel


def cutlass_seconds(headers: Path, ways: Ways, processes: Processes, sheet: Target) -> dict[str, Any]:
    """Medians of three rounds, the two interleaved, one compiler at a time."""
    texts = {"cutlass": SOURCE, "ours": render_device([our_kernel(sheet)]).text}
    wall: dict[str, list[float]] = {name: [] for name in texts}
    cpu: dict[str, list[float]] = {name: [] for name in texts}
    for _ in range(ROUNDS):
        for name, text in texts.items():
            with processes.private_folder() as folder:
                finished = ways.library(text, folder, headers if name == "cutlass" else None)
            wall[name].append(finished.wall_seconds)
            cpu[name].append(finished.cpu_seconds)
    figures: dict[str, Any] = {f"{name}_s": round(statistics.median(seconds), 2) for name, seconds in wall.items()}
    figures |= {f"{name}_cpu_s": round(statistics.median(seconds), 2) for name, seconds in cpu.items()}
    ratio_cpu = statistics.median(cpu["cutlass"]) / statistics.median(cpu["ours"])
    return {**figures, "ratio_cpu": round(ratio_cpu, 2), "version": cutlass_version(headers)}


def cutlass_version(headers: Path) -> str:
    text = (headers / "cutlass/version.h").read_text(encoding="utf-8")
    return ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text))
