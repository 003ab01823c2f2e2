"""Libraries of kernels for 16-bit floats and bytes: called with tensors of those types, checked in their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fixtures.compile import matmul_candidates
from tests.support.fixtures.library import Built, Child, build, calls, launches
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes

EPILOGUE = [{"op": "bias"}, {"op": "mask"}, {"op": "residual"}]
# Types of A and B, and of out with what is added to it.
TYPES = {"float16": ("float16", "float16"), "bfloat16": ("bfloat16", "float32"), "int8": ("int8", "bfloat16")}
# `c` and `sliced`, columns of one 256 x 576 tensor, lie where the test says; the other tensors anywhere.
OPERANDS = """
IN, OUT = {types!r}
SIZE = 4 if OUT == 'float32' else 2
a, b, c = T((256, 64), IN), T((192, 64), IN), T((256, 192), OUT, address=0x50000000)
v, m, r = T((192,), OUT), T((256, 192), 'uint8'), T((256, 192), OUT)
def sliced(first): return T((256, 192), OUT, strides=(576, 1), address=0x60000000 + SIZE * first)
def mask_of(strides): return T((256, 192), 'uint8', strides=strides)
workspace = [library.workspace_bytes(a, b, v, m, r, c)]
def run(*tensors): return attempt('run', *tensors, *([T(workspace, 'int8')] if workspace[0] else []))
"""


@pytest.fixture(scope="module", params=TYPES)
def built(
    request: pytest.FixtureRequest, folder: Path, toolchain: Toolchain, processes: Processes
) -> tuple[tuple[str, str], Built]:
    types = TYPES[request.param]
    (candidate,) = matmul_candidates(1, dtype=types[0], out_dtype=types[1], layout="nt", epilogue=EPILOGUE)
    return types, build(candidate, folder, toolchain, processes)


def answers(
    built: tuple[tuple[str, str], Built], child: Child, fake_driver: Path, tries: dict[str, str]
) -> dict[str, object]:
    types, library = built
    body = OPERANDS.format(types=types) + "answer = {}\n"
    body += "\n".join(f"answer[{name!r}] = run({arguments})" for name, arguments in tries.items())
    values, log = child(calls(library.path, body), driver=fake_driver)
    return {**values, "launched": len(launches(log))}


def test_tensors_of_the_kernel_s_types_are_taken(
    built: tuple[tuple[str, str], Built], child: Child, fake_driver: Path
) -> None:
    values = answers(built, child, fake_driver, {
        "apart": "a, b, v, m, r, c",
        "columns beside each other": "a, b, v, mask_of((576, 1)), sliced(192), sliced(0)",
    })  # fmt: skip
    each = len(built[1].launch.functions)
    assert values == {"apart": None, "columns beside each other": None, "launched": 2 * each}


def test_tensors_of_other_types_are_refused_by_name(
    built: tuple[tuple[str, str], Built], child: Child, fake_driver: Path
) -> None:
    given, out = built[0]
    wrong = {
        "a": ("T((256, 64), 'float32'), b, v, m, r, c", f"a is float32; {given} is allowed"),
        "b": ("a, T((192, 64), 'uint8'), v, m, r, c", f"b is uint8; {given} is allowed"),
        "out": ("a, b, v, m, r, T((256, 192), 'int32')", f"out is int32; {out} is allowed"),
        "bias": ("a, b, T((192,), 'int8'), m, r, c", f"bias is int8; {out} is allowed"),
        "mask": ("a, b, v, T((256, 192), 'float16'), r, c", "mask is float16; uint8 is allowed"),
        "residual": ("a, b, v, m, T((256, 192), 'float64'), c", f"residual is another dtype; {out} is allowed"),
    }
    values = answers(built, child, fake_driver, {name: arguments for name, (arguments, _) in wrong.items()})
    assert values == {**{name: ["TypeError", words] for name, (_, words) in wrong.items()}, "launched": 0}


def test_bytes_decide_what_is_aligned_and_what_overlaps(
    built: tuple[tuple[str, str], Built], child: Child, fake_driver: Path
) -> None:
    values = answers(built, child, fake_driver, {
        "alignment of a": "T((256, 64), IN, address=0x70000008), b, v, m, r, c",
        "alignment of out": "a, b, v, m, r, T((256, 192), OUT, address=0x70000008)",
        "alignment of the mask": "a, b, v, T((256, 192), 'uint8', address=0x70000002), r, c",
        "out over the end of a": "T((256, 64), IN, address=0x50000000 + 256 * 192 * SIZE - 16), b, v, m, r, c",
        "out up to a": "T((256, 64), IN, address=0x50000000 + 256 * 192 * SIZE), b, v, m, r, c",
        "columns in common": "a, b, v, mask_of((576, 1)), sliced(184), sliced(0)",
        "pitch": "a, b, v, m, r, T((256, 192), OUT, strides=(193, 1))",
    })  # fmt: skip
    assert values["launched"] == len(built[1].launch.functions)
    assert values["out up to a"] is None
    said = {name: answer[1] for name, answer in values.items() if isinstance(answer, list)}
    assert "multiple of 16 bytes" in said["alignment of a"]
    assert "multiple of 16 bytes" in said["alignment of out"]
    width = 4 if built[0][1] == "float32" else 8
    assert f"multiple of {width} bytes" in said["alignment of the mask"]
    assert "out overlaps a" in said["out over the end of a"]
    assert "out overlaps residual" in said["columns in common"]
    assert f"multiple of {width}" in said["pitch"]
