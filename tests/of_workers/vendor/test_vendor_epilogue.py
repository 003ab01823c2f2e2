"""The kernel after a vendor's product: the same text as on the GPU, run by g++ on the CPU emulation of the
primitives."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy's bfloat16)
import numpy as np
import pytest

from codegen.dtypes import dtype
from codegen.epilogue_reference import Bounded, apply_chain, rounded_to_float32, stored
from codegen.operators import operator
from codegen.text.render_cpu import CPU_HEADERS, render_runtime
from codegen.text.render_group import header_text
from tests.gpu.run_primitives import find_nvcc
from tests.support.fixtures.codegen import EVERY_NODE, matmul
from workers.cpu.build import CPU_FLAGS
from workers.vendor.bench import laid_out
from workers.vendor.epilogue import NAME, After, Matrices
from workers.vendor.matmul import Fused, after, plans

FIRST, SECOND = EVERY_NODE[:8], EVERY_NODE[8:]
CASES: list[dict[str, Any]] = [
    {"dtype": "float16", "epilogue": FIRST},
    {"dtype": "float16", "epilogue": SECOND},
    {"dtype": "bfloat16", "epilogue": FIRST, "n": 21},
    {"dtype": "float32", "epilogue": FIRST, "m": 70, "n": 10, "batch": 3},
    {"dtype": "float32", "out_dtype": "float16"},
    {"dtype": "float16", "out_dtype": "bfloat16", "epilogue": SECOND, "ldc": 28},
    {"dtype": "int8", "out_dtype": "float32", "epilogue": [{"op": "scale", "value": 0.5}, {"op": "relu"}], "n": 30},
    {"dtype": "int8", "out_dtype": "float16", "n": 3, "m": 300, "batch": 2, "stride_c": 1000, "epilogue": FIRST[:3]},
]
_ENTRY = """
static void run(const cukiln::after_vendor::Arguments arguments) { cukiln::after_vendor::finish(arguments); }
CUKILN_CPU_EXPORT int after_run(const void* arguments, const unsigned* grid, const unsigned* block) {
  cukiln::cpu::Call call = {};
  call.cpu_seconds = 30;
  const cukiln::cpu::Function functions[] = {cukiln::cpu::call_kernel<cukiln::after_vendor::Arguments, run>};
  const cukiln::Launch launch = {0, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, 0};
  return cukiln::cpu::execute(call, &launch, 1, functions, 1, arguments);
}
"""


class Arguments(ctypes.Structure):
    """As in the kernel's text."""

    _fields_ = (
        ("product", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("extents", ctypes.c_int * 3),
        ("steps", ctypes.c_longlong * 4),
        ("tensors", ctypes.c_void_p * 8),
        ("scalars", ctypes.c_float * 16),
    )


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The header that all cases begin with, and the runtime beside it, compiled once."""
    nodes = [
        line for path in CPU_HEADERS for line in header_text(path).splitlines() if not line.startswith('#include "')
    ]
    defines = "#define CUKILN_DEVICE 1\n#define CUKILN_HOST 1\n#define CUKILN_CPU 1\n"
    header = tmp_path_factory.mktemp("emulation") / "emulation.h"
    header.write_text(defines + "\n".join(nodes), encoding="utf-8")
    compiled("-x", "c++-header", header.name, "-o", f"{header.name}.gch", folder=header.parent)
    (header.parent / "runtime.cpp").write_text(render_runtime(), encoding="utf-8")
    compiled("-c", "runtime.cpp", folder=header.parent)
    return header


def compiled(*words: str, folder: Path) -> None:
    command = [os.environ.get("CUKILN_CXX", "g++"), *CPU_FLAGS, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def run_on_cpu(work: After, product: Any, out: Any, tensors: list[Any], emulation: Path, folder: Path) -> None:
    runtime = str(emulation.with_name("runtime.o"))
    text = f'#include "{emulation}"\n' + work.kernel_text() + _ENTRY
    (folder / "after.cpp").write_text(text, encoding="utf-8")
    compiled("-Winvalid-pch", "-Werror=invalid-pch", "after.cpp", runtime, "-o", "after.so", folder=folder)
    library = ctypes.CDLL(str(folder / "after.so"))
    library.cukiln_message.restype = ctypes.c_char_p
    library.cukiln_allocate.restype = ctypes.c_void_p

    def address(name: str, array: Any) -> Any:
        """In memory of the harness, which looks at every access."""
        writable = name in ("out", "in_place")
        found = library.cukiln_allocate(
            name.encode(), ctypes.c_uint64(array.nbytes), ctypes.c_uint64(16), ctypes.c_int(writable)
        )
        ctypes.memmove(found, array.ctypes.data, array.nbytes)
        return found

    target = address("in_place" if product is out else "out", out)
    given = target if product is out else address("product", product)
    pointers = tuple(address(f"tensor_{index}", each) for index, each in enumerate(tensors))
    arguments = Arguments(given, target, work.extents()[:3], work.extents()[3:], pointers, tuple(work.scalars()))
    grid, block = (ctypes.c_uint * 3)(*work.grid), (ctypes.c_uint * 3)(*work.block)
    status = library.after_run(ctypes.byref(arguments), grid, block)
    ctypes.memmove(out.ctypes.data, target, out.nbytes)
    assert status == 0, library.cukiln_message()
    library.cukiln_free_all()


def name_of(fields: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in fields.items() if key != "epilogue")


@pytest.mark.parametrize(
    "fields", CASES, ids=lambda each: " ".join(f"{k}={v}" for k, v in each.items() if k != "epilogue")
)
def test_the_kernel_computes_the_rest_of_the_epilogue(fields: dict[str, Any], emulation: Path, tmp_path: Path) -> None:
    problem = matmul(**{"m": 20, "n": 24, "k": 8, **fields})
    plan = plans(problem)[-1]
    assert plan.fused == Fused() and plan.needs_kernel
    work = after(problem, plan)
    op = operator("matmul")
    inputs = op.make_inputs(problem, "normal", np.random.default_rng(3))
    operands = {operand.name: operand for operand in op.operands(problem)}
    rng = np.random.default_rng(4)
    shape = (problem.batch, plan.d.columns, plan.d.rows)
    product = rng.integers(-40, 40, shape).astype(dtype(plan.d.dtype).numpy)
    if plan.in_place and problem.ldc != problem.n:
        pytest.fail("not a case of this test")
    flat = laid_out(operands["out"], np.zeros(operands["out"].shape, np.float32))
    flat.view(np.uint8)[...] = 0xFF
    out = flat
    source = product
    if plan.in_place:
        out = source = np.ascontiguousarray(product).reshape(-1)
    values = product[:, : problem.m, : problem.n].astype(np.float64)
    values = values[0] if problem.batch == 1 else values
    tensors = [laid_out(operands[name], inputs[name]) for name in plan.rest_operands]
    run_on_cpu(work, source, out, tensors, emulation, tmp_path)

    start: Bounded = rounded_to_float32(values)
    expected = stored(
        problem.out_dtype,
        apply_chain(problem.epilogue, start, inputs, exact=False, out_dtype=problem.out_dtype),
    )
    element = dtype(problem.out_dtype).numpy
    strides = [stride * element.itemsize for stride in operands["out"].strides]
    result = np.lib.stride_tricks.as_strided(out.view(element), operands["out"].shape, strides).astype(np.float64)
    assert np.all(np.abs(result - expected.value) <= expected.error)
    if not plan.in_place:
        written = np.zeros(flat.shape, bool)
        np.lib.stride_tricks.as_strided(written, operands["out"].shape, operands["out"].strides)[...] = True
        assert (flat.view(np.uint8).reshape(len(flat), -1)[~written] == 0xFF).all()


@pytest.mark.parametrize(
    ("product", "out", "columns", "width"),
    [
        (Matrices("float16", 64, 0), Matrices("float16", 64, 0), 64, 8),
        (Matrices("float32", 64, 0), Matrices("float16", 64, 0), 64, 4),
        (Matrices("int32", 64, 0), Matrices("float32", 64, 0), 62, 2),
        (Matrices("bfloat16", 64, 0), Matrices("bfloat16", 63, 0), 32, 1),
        (Matrices("float32", 64, 4096), Matrices("float32", 64, 4098), 64, 2),
    ],
)
def test_a_thread_moves_as_much_as_every_row_allows(product: Matrices, out: Matrices, columns: int, width: int) -> None:
    assert After((), 64, columns, 2, product, out).width == width


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 3), (1000, 8), (100_000, 4096), (3, 1_000_001)])
def test_the_grid_covers_every_element_and_fits_cuda(rows: int, columns: int) -> None:
    work = After((), rows, columns, 70_000, Matrices("float32", columns, 0), Matrices("float32", columns, 0))
    (gx, gy, gz), (along, across, one) = work.grid, work.block
    assert gx * along * work.width >= columns and max(gy, gz) <= 65535
    assert (along * across * one) == 256 and min(along, across) >= 1
    assert gy * across >= min(rows, 65535 * across) and gz == 65535


@pytest.mark.parametrize("fields", CASES[:2] + CASES[5:7], ids=str)
def test_nvcc_takes_the_text_for_the_gpu(fields: dict[str, Any], tmp_path: Path) -> None:
    problem = matmul(**{"m": 20, "n": 24, "k": 8, **fields})
    work = after(problem, plans(problem)[-1])
    (tmp_path / "after.cu").write_text(work.device_text(), encoding="utf-8")
    command = [find_nvcc(), "-cubin", "-std=c++17", "-arch=sm_90", "-o", "after.cubin", "after.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert NAME.encode() in (tmp_path / "after.cubin").read_bytes()
