"""A library of target `cpu`: every operator's kernels compute on CPU tensors, behind the entries of any library."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cukiln
from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operators import operator
from codegen.search.search import Search
from codegen.targets import target
from codegen.text.cubin import exported_symbols
from codegen.text.render_emulation import render_emulation
from codegen.text.render_library import winner_exports
from tests.support.fixtures.compile import LIMITS
from tests.support.kernels.cpu_calls import CASES, LONG_CASES, checked_call
from tests.support.run.each_run import some_each_run
from workers.compile.compile_file import FileCompiler
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes


def lowered(name: str) -> Candidate:
    kind, fields, tunables = {**CASES, **LONG_CASES}[name]
    problem = operator(kind).parse({"operator": kind, **fields})
    search = Search(level=0, limit=1) if tunables is None else Search(tunables=tunables, limit=1)
    (candidate,) = lower(problem, target("cpu"), search).candidates
    return candidate


class Libraries:
    """Builds each case's library once."""

    def __init__(self, folder: Path, toolchain: Toolchain, processes: Processes) -> None:
        self._folder, self._tools = folder, (toolchain, processes, LIMITS)
        self._built: dict[str, tuple[Candidate, bytes]] = {}

    def of(self, name: str) -> tuple[Candidate, bytes]:
        if name not in self._built:
            candidate = lowered(name)
            kernel = candidate.kernel
            text = render_emulation(kernel, operator(kernel.operator).launch_values(candidate.schedule))
            library = FileCompiler(self._folder, *self._tools).link_emulation(text, winner_exports(kernel))
            self._built[name] = candidate, library
        return self._built[name]

    def load(self, name: str) -> tuple[Candidate, cukiln.Kernel]:
        candidate, library = self.of(name)
        return candidate, cukiln.load(library, sha256=hashlib.sha256(library).hexdigest())


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory, toolchain: Toolchain, processes: Processes) -> Libraries:
    return Libraries(tmp_path_factory.mktemp("emulation"), toolchain, processes)


LONG = [pytest.param(name, marks=pytest.mark.long) for name in LONG_CASES]


@pytest.mark.parametrize("name", [*some_each_run(list(CASES), 4), *LONG])
def test_a_kernel_computes_what_its_reference_says(name: str, libraries: Libraries) -> None:
    if "bfloat16" in str({**CASES, **LONG_CASES}[name]) or name == "mla":
        pytest.importorskip("torch")
    candidate, kernel = libraries.load(name)
    checked = checked_call(kernel, candidate.problem)
    assert checked.ok, checked.sentence()


def test_a_library_exports_what_any_does_and_needs_the_c_library_alone(libraries: Libraries) -> None:
    candidate, library = libraries.of("by winograd")
    assert exported_symbols(library) == winner_exports(candidate.kernel)
    assert b"libcuda" not in library and b"libstdc++" not in library


def test_equal_inputs_give_equal_bytes(
    libraries: Libraries, tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    first, again = libraries.of("softmax")[1], Libraries(tmp_path, toolchain, processes).of("softmax")[1]
    assert first == again


def test_filters_are_transformed_once(libraries: Libraries) -> None:
    candidate, kernel = libraries.load("by winograd")
    op, problem = operator("conv2d"), candidate.problem
    inputs = op.make_inputs(problem, "normal", np.random.default_rng(3))
    x, w = (np.array(inputs[name], np.float32) for name in ("x", "w"))
    out, once = np.zeros((2, *op.operands(problem)[-1].shape), np.float32)
    attributes = tuple(op.attributes(problem))
    transformed = np.zeros(kernel.transformed_bytes(x, w, out), np.uint8)
    kernel(x, w, out, attributes=attributes)
    kernel.transform(x, w, once, transformed=transformed, attributes=attributes)
    kernel(x, np.full_like(w, np.nan), once, transformed=transformed, attributes=attributes)
    assert np.array_equal(out, once) and out.any()


def test_threads_call_one_library_at_once(libraries: Libraries) -> None:
    candidate, kernel = libraries.load("fp16 on tensor cores, in three parts")
    verdicts: list[bool] = []

    def call() -> None:
        verdicts.extend(checked_call(kernel, candidate.problem).ok for _ in range(5))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [True] * 20


def test_a_library_runs_for_one_thread_and_then_for_another(libraries: Libraries) -> None:
    """The threads of a block are fibers, which stay from call to call, whichever thread calls."""
    candidate, kernel = libraries.load("softmax")
    for _ in range(3):
        verdicts: list[bool] = []
        thread = threading.Thread(
            target=lambda seen: seen.append(checked_call(kernel, candidate.problem).ok), args=[verdicts]
        )
        thread.start()
        thread.join()
        assert verdicts == [True]


def test_a_workspace_is_the_callers_or_made_for_the_call(libraries: Libraries) -> None:
    candidate, kernel = libraries.load("fp16 on tensor cores, in three parts")
    extents = operator("matmul").extents(candidate.problem)
    needed = kernel.workspace_bytes(*extents)
    assert needed > 0
    memory = np.full(needed + 64, 0xFF, np.uint8)
    start = -memory.ctypes.data % 16
    assert checked_call(kernel, candidate.problem, workspace=memory[start : start + needed]).ok
    assert (memory[start : start + needed] != 0xFF).any() and (memory[start + needed :] == 0xFF).all()
    with pytest.raises(ValueError, match=rf"the workspace has 16 bytes; {needed} on cpu:0 are needed"):
        checked_call(kernel, candidate.problem, workspace=memory[start : start + 16])


def test_a_stream_is_not_looked_at_and_nothing_needs_preparing(libraries: Libraries) -> None:
    candidate, kernel = libraries.load("softmax")
    kernel.prepare(0)
    kernel.prepare(3)
    assert checked_call(kernel, candidate.problem, stream=12345).ok


class OnGpu:
    """A tensor whose DLPack says that it is on `cuda:1`."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        # DLTensor begins with its data, then the device: type and number.
        device = (ctypes.c_int32 * 2).from_address(get(capsule, b"dltensor") + 8)
        device[0], device[1] = 2, 1
        return capsule


def zeros(*shape: int, dtype: type = np.float32) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("operands", "error", "message"),
    [
        ([OnGpu(zeros(6, 40)), zeros(6, 40)], ValueError, "operand 0 is on a GPU; a library of target cpu takes CPU"),
        ([zeros(6, 40), OnGpu(zeros(6, 40))], ValueError, "operand 1 is on a GPU; a library of target cpu takes CPU"),
        ([zeros(6, 40, dtype=np.float16), zeros(6, 40)], TypeError, "x is float16; float32 is allowed"),
        ([zeros(6, 40), zeros(6, 41)], ValueError, "out must have the shape of x"),
        ([zeros(6, 40)], TypeError, "1 tensors were given"),
        ([zeros(6, 40), zeros(6, 40), 3], TypeError, "3 arguments were given"),
    ],
)
def test_what_is_wrong_with_a_call_is_an_exception(
    libraries: Libraries, operands: list[Any], error: type[Exception], message: str
) -> None:
    _, kernel = libraries.load("softmax")
    with pytest.raises(error, match=message):
        kernel(*operands)


def test_an_input_cannot_be_written_over(libraries: Libraries) -> None:
    _, kernel = libraries.load("softmax")
    x = zeros(6, 40)
    with pytest.raises(ValueError, match="out overlaps x"):
        kernel(x, x)


def test_the_plain_c_entries_need_no_tvm_ffi(libraries: Libraries, tmp_path: Path) -> None:
    candidate, library = libraries.of("fp32")
    path = tmp_path / "fp32.so"
    path.write_bytes(library)
    loaded = ctypes.CDLL(str(path))
    loaded.cukiln_last_error.restype = ctypes.c_char_p
    op, problem = operator("matmul"), candidate.problem
    rng = np.random.default_rng(1)
    inputs = op.make_inputs(problem, "integers", rng)
    arrays = [np.array(inputs[name], np.float32) for name in ("a", "b", "bias", "residual")]
    arrays.append(np.zeros((2, 33, 20), np.float32))
    pointers = (ctypes.c_void_p * 5)(*(array.ctypes.data for array in arrays))
    extents = (ctypes.c_int64 * 10)(*op.extents(problem))
    assert loaded.cukiln_prepare(0) == 0
    assert loaded.cukiln_launch(pointers, extents, None, None, None, None) == 0
    expected, bound = op.reference(problem, inputs)
    assert (np.abs(arrays[-1] - expected) <= bound).all()
    assert loaded.cukiln_launch(None, extents, None, None, None, None) != 0
    assert b"pointers, extents or scalars is null" in loaded.cukiln_last_error()
