"""A winner's library, called as frameworks and C programs call it. The driver is faked where a launch is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.operators import operator
from codegen.text.cubin import exported_symbols, read_cubin
from codegen.text.render_group import render_device, symbols
from codegen.text.render_library import winner_exports
from tests.support.fixtures.compile import LIMITS, SM_90A, matmul_candidates, probe, probe_candidate
from tests.support.fixtures.library import Built, Child, build, calls, launches, plain
from workers.compile.compile_group import compile_group
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes
from workers.steps.winner_library import WinnerNotBuilt, build_winner

EPILOGUE = [{"op": "bias", "axis": "n"}, {"op": "leaky_relu", "slope": 0.25}, {"op": "residual"}]
RASTER_OFFSET = 4 * 8 + 4 * 4 + 6 * 8  # of `raster` in cukiln::matmul::Arguments


@pytest.fixture(scope="module")
def matmul(folder: Path, toolchain: Toolchain, processes: Processes) -> Built:
    """A matmul whose winner has a raster other than 0, so that baked and given launch values can be distinguished."""
    candidates = matmul_candidates(1, epilogue=EPILOGUE)
    schedule = candidates[0].schedule.as_dict() | {"raster": 4}
    chosen = operator("matmul").candidate(candidates[0].problem, type(candidates[0].schedule).of(schedule))
    return build(chosen, folder, toolchain, processes)


def test_a_winner_exports_its_entry_points_alone(matmul: Built, two_launches: Built) -> None:
    assert winner_exports(matmul.candidate.kernel) == {
        "cukiln_launch", "cukiln_prepare", "cukiln_workspace_bytes", "cukiln_last_error",
        "__tvm_ffi_run", "__tvm_ffi_prepare", "__tvm_ffi_workspace_bytes",
    }  # fmt: skip
    for built in (matmul, two_launches):
        assert exported_symbols(built.build.library) == winner_exports(built.candidate.kernel)


def test_a_winner_holds_its_kernel_alone(matmul: Built) -> None:
    cubin = read_cubin(matmul.build.cubin)
    assert cubin.symbols == set(symbols(matmul.candidate.kernel))
    assert matmul.build.source == render_device([matmul.candidate.kernel]).text
    assert {matmul.build.code_digest} == set(cubin.kernels.values())
    assert matmul.build.cubin in matmul.build.library


def test_the_winners_code_is_that_of_its_group(matmul: Built, toolchain: Toolchain, processes: Processes) -> None:
    kernels = [probe(), matmul.candidate.kernel]
    group = compile_group(kernels, SM_90A, toolchain, processes, LIMITS)
    assert group.outcomes[matmul.candidate.kernel.id].code_digest == matmul.build.code_digest
    assert group.outcomes[matmul.candidate.kernel.id].resources == matmul.build.resources


def test_equal_inputs_give_equal_bytes(
    two_launches: Built, folder: Path, toolchain: Toolchain, processes: Processes
) -> None:
    again = build_winner(two_launches.candidate, SM_90A, toolchain, processes, LIMITS)
    assert (again.library, again.cubin) == (two_launches.build.library, two_launches.build.cubin)


def test_a_kernel_that_does_not_compile_cannot_win(toolchain: Toolchain, processes: Processes) -> None:
    with pytest.raises(WinnerNotBuilt, match="fault 1"):
        build_winner(probe_candidate(fault="front_end"), SM_90A, toolchain, processes, LIMITS)


def test_without_a_driver_prepare_says_so(matmul: Built, child: Child) -> None:
    (kind, message), _ = child(calls(matmul.path, "answer = attempt('prepare', 0)"))
    assert kind == "RuntimeError"
    assert message.startswith("no NVIDIA driver: libcuda.so.1")


def test_a_plain_dlopen_needs_no_tvm_ffi(matmul: Built, child: Child) -> None:
    body = """
    extents = array(ctypes.c_int64, 1, 256, 192, 64, 64, 192, 192, 0, 0, 0)
    codes = [library.cukiln_prepare(0), error(), library.cukiln_workspace_bytes(extents, None)]
    answer = [*codes, "tvm_ffi" in sys.modules, "libtvm_ffi" in open("/proc/self/maps").read()]
    """
    answer, _ = child(plain(matmul.path, body))
    assert answer[0] != 0 and "no NVIDIA driver" in answer[1]
    assert answer[2:] == [0, False, False]


def test_a_call_launches_what_the_metadata_says(matmul: Built, child: Child, fake_driver: Path) -> None:
    body = """
    operands = [T((256, 64)), T((64, 192)), T((192,)), T((256, 192)), T((256, 192))]
    answer = attempt("run", *operands, 0.25)
    """
    answer, log = child(calls(matmul.path, body), driver=fake_driver, FAKE_CUDA_PEEK=str(RASTER_OFFSET))
    (function,) = matmul.launch.functions
    (launch,) = launches(log)
    assert answer is None
    assert (launch["grid"], launch["block"], launch["shared"]) == (function.grid, function.block, function.shared_bytes)
    assert (launch["first"], launch["peek"], launch["stream"]) == (0x70000000, 4, 0)
    assert any(line.startswith(function.symbol) for line in log)
    # The module is loaded with the primary context current, and nothing of that stays on the thread.
    steps = [word for word in (line.split()[0] for line in log) if word in ("push", "load", "pop")]
    assert steps == ["push", "load", "pop", "push", "pop"]


def test_the_metadata_describes_the_call(matmul: Built) -> None:
    launch = matmul.launch
    assert [operand.name for operand in launch.operands] == ["a", "b", "bias", "residual", "out"]
    assert list(launch.extents) == ["batch", "m", "n", "k", "lda", "ldb", "ldc", "stride_a", "stride_b", "stride_c"]
    assert (launch.extents["m"], launch.extents["n"], launch.extents["k"]) == (256, 192, 64)
    assert (launch.launch, launch.scalars, launch.workspace_bytes) == (
        {"raster": 4, "split_k": 1, "stream_blocks": 0},
        [0.25],
        0,
    )
    assert launch.functions[0].shared_bytes == operator("matmul").shared_bytes(matmul.candidate.kernel)
    assert launch.functions[0].block == (
        operator("matmul").launch_bounds(matmul.candidate.kernel, "run").threads,
        1,
        1,
    )


# `c` and `sliced`, columns of one 256 x 576 tensor, lie where the test says; the other tensors anywhere.
OPERANDS = """
a, b, v, r, c = T((256, 64)), T((64, 192)), T((192,)), T((256, 192)), T((256, 192), address=0x50000000)
def sliced(first): return T((256, 192), strides=(576, 1), address=0x60000000 + 4 * first)
"""
REFUSED = {
    "no arguments": ("", "TypeError", "0 tensors were given; this kernel takes 5"),
    "one tensor less": ("a, b, v, c", "TypeError", "4 tensors were given; this kernel takes 5"),
    "one tensor more": ("a, b, v, r, c, r, 0.5", "TypeError", "7 arguments were given; this call takes 5 tensors"),
    "no scalar": ("a, b, v, r, c", "TypeError", "then 1 numbers"),
    "a scalar that is text": ("a, b, v, r, c, 'x'", "TypeError", "argument 5 must be a number"),
    "a list": ("[1], b, v, r, c, 0.5", "TypeError", "0 tensors were given"),
    "dtype": ("a, T((64, 192), 'float16'), v, r, c, 0.5", "TypeError", "b is float16; float32 is allowed"),
    "rank": ("a, b, T((1, 192)), r, c, 0.5", "ValueError", "bias must be a contiguous vector of 192"),
    "rank too high": ("T((1,) * 7 + (256, 64)), b, v, r, c, 0.5", "ValueError", "rank 9; at most 8"),
    "extents": ("a, T((60, 192)), v, r, c, 0.5", "ValueError", "k differs between a and b: 64 and 60"),
    "strides": ("T((256, 64), strides=(1, 256)), b, v, r, c, 0.5", "ValueError", "last axis of a has stride 256"),
    "pitch": ("T((256, 64), strides=(66, 1)), b, v, r, c, 0.5", "ValueError", "multiple of 4"),
    "alignment": ("a, b, v, r, T((256, 192), address=0x70000004), 0.5", "ValueError", "multiple of 16 bytes"),
    "byte offset": ("T((256, 64), offset=4), b, v, r, c, 0.5", "ValueError", "multiple of 16 bytes"),
    "device": ("a, b, v, r, T((256, 192), device=1), 0.5", "ValueError", "out is on cuda:1, but a is on cuda:0"),
    "host memory": ("T((256, 64), device_type=1), b, v, r, c, 0.5", "ValueError", "a is in host memory"),
    "empty": ("T((0, 64)), b, v, r, c, 0.5", "ValueError", "a is empty"),
    "residual's strides": ("a, b, v, T((256, 192), strides=(196, 1)), c, 0.5", "ValueError", "strides of out"),
    "a residual in place": ("a, b, v, c, c, 0.5", "ValueError", "out overlaps residual; its memory must be its own"),
    "out over a": ("T((256, 64), address=0x50010000), b, v, r, c, 0.5", "ValueError", "out overlaps a;"),
    "out over b": ("a, T((64, 192), address=0x4ffffff0), v, r, c, 0.5", "ValueError", "out overlaps b;"),
    "out over bias": ("a, b, T((192,), address=0x5002fff0), r, c, 0.5", "ValueError", "out overlaps bias;"),
    "columns in common": ("a, b, v, sliced(188), sliced(0), 0.5", "ValueError", "out overlaps residual"),
    "columns in common with the next row": ("a, b, v, sliced(388), sliced(0), 0.5", "ValueError", "overlaps residual"),
    "a batch of out in itself": (
        "T((2, 256, 64)), b, v, r, T((2, 256, 192), strides=(192, 192, 1)), 0.5", "ValueError", "of out overlap",
    ),
    "too many blocks": (
        "T((2**20, 2**20, 64)), b, v, r, T((2**20, 2**20, 192)), 0.5", "ValueError", "the number of blocks is over",
    ),
    "blocks beyond 64 bits": (
        "T((2**50, 2**30, 64), strides=(0, 64, 1)), b, v, r, T((2**50, 2**30, 192), strides=(2**40, 192, 1)), 0.5",
        "ValueError", "the number of blocks is over",
    ),
}  # fmt: skip
ALLOWED = {
    "out ends where an input begins": "a, T((64, 192), address=0x50030000), v, r, c, 0.5",
    "out begins where an input ends": "T((256, 64), address=0x4fff0000), b, v, r, c, 0.5",
    "columns beside each other": "a, b, v, sliced(192), sliced(0), 0.5",
    "columns before each other": "a, b, v, sliced(0), sliced(384), 0.5",
}


@pytest.fixture(scope="module")
def refusals(matmul: Built, folder: Path, processes: Processes, fake_driver: Path) -> dict[str, list[str]]:
    body = f"{OPERANDS}answer = {{}}\n"
    body += "\n".join(f"answer[{name!r}] = attempt('run', {arguments})" for name, (arguments, _, _) in REFUSED.items())
    answer, log = Child(folder, processes)(calls(matmul.path, body), driver=fake_driver)
    assert log == []  # nothing of these reached the driver
    return dict(answer)


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_call_is_refused_with_what_is_allowed(refusals: dict[str, list[str]], name: str) -> None:
    _, kind, words = REFUSED[name]
    assert refusals[name][0] == kind
    assert words in refusals[name][1]


def test_operands_may_share_an_allocation_but_no_element(matmul: Built, child: Child, fake_driver: Path) -> None:
    tries = ", ".join(f"attempt('run', {arguments})" for arguments in ALLOWED.values())
    answer, log = child(calls(matmul.path, f"{OPERANDS}answer = [{tries}]"), driver=fake_driver)
    assert dict(zip(ALLOWED, answer, strict=True)) == dict.fromkeys(ALLOWED)
    assert len(launches(log)) == len(ALLOWED)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ("", "TypeError", "one argument"),
        ("'cuda'", "TypeError", "one argument"),
        ("tvm_ffi.device('cpu')", "TypeError", "a CUDA device"),
        ("-1", "ValueError", "0 to 63"),
        ("64", "ValueError", "0 to 63"),
        ("7", "RuntimeError", "there is no device cuda:7"),
    ],
)
def test_prepare_refuses_what_is_no_device(
    matmul: Built, child: Child, fake_driver: Path, arguments: str, kind: str, message: str
) -> None:
    answer, _ = child(calls(matmul.path, f"answer = attempt('prepare', {arguments})"), driver=fake_driver)
    assert answer[0] == kind and message in answer[1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("cuInit", "does not start"),
        ("cuModuleLoadData", "made for sm_90a, cannot be loaded on cuda:1: no kernel image"),
    ],
)
def test_a_driver_that_refuses_is_quoted_and_asked_again(
    matmul: Built, child: Child, fake_driver: Path, function: str, message: str
) -> None:
    body = """
    import ctypes
    first = attempt("prepare", 1)
    ctypes.CDLL(None).unsetenv(b"FAKE_CUDA_FAIL")
    answer = [first, attempt("prepare", tvm_ffi.device("cuda:1"))]
    """
    answer, _ = child(calls(matmul.path, body), driver=fake_driver, FAKE_CUDA_FAIL=function)
    assert answer[0][0] == "RuntimeError" and message in answer[0][1]
    assert answer[1] is None


def test_a_driver_that_lacks_a_function_is_too_old(
    matmul: Built, folder: Path, toolchain: Toolchain, processes: Processes, child: Child
) -> None:
    old = folder / "old"
    old.mkdir()
    (old / "old.c").write_text("int cuInit(unsigned flags) { return 0; }\n")
    command = [str(toolchain.host_compiler), "-x", "c", "-shared", "-fPIC", "old.c", "-o", "libcuda.so.1"]
    assert processes.run(command, cwd=old, limits=LIMITS).ok
    answer, _ = child(calls(matmul.path, "answer = attempt('prepare', 0)"), driver=old)
    assert answer == ["RuntimeError", "the NVIDIA driver is too old: libcuda.so.1 has no cuDeviceGet"]


def test_a_module_is_loaded_once_per_device_by_any_number_of_threads(
    matmul: Built, child: Child, fake_driver: Path
) -> None:
    body = """
    import threading
    threads = [threading.Thread(target=library.prepare, args=(device,)) for device in (0, 1) * 8]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    answer = None
    """
    _, log = child(calls(matmul.path, body), driver=fake_driver)
    assert sorted(line for line in log if line.startswith("load")) == ["load 100 0", "load 101 0"]
    # All shared memory that the device can give a block, less what the kernel has of its own.
    assert sum("232000" in line for line in log if line.startswith("dynamic")) == 2


CALL = "[T((256, 64)), T((64, 192)), T((192,)), T((256, 192)), T((256, 192)), 0.25]"


def test_a_module_is_never_loaded_under_graph_capture(matmul: Built, child: Child, fake_driver: Path) -> None:
    body = f"""
    first = attempt("run", *{CALL})
    library.prepare(0)
    answer = [first, attempt("run", *{CALL})]
    """
    answer, log = child(calls(matmul.path, body), driver=fake_driver, FAKE_CUDA_CAPTURING="1")
    assert answer[0][0] == "RuntimeError" and "prepare(0) must be called before graph capture" in answer[0][1]
    assert answer[1] is None
    assert len(launches(log)) == 1


def test_a_launch_that_fails_is_quoted(matmul: Built, child: Child, fake_driver: Path) -> None:
    answer, log = child(
        calls(matmul.path, f"answer = attempt('run', *{CALL})"), driver=fake_driver, FAKE_CUDA_FAIL="cuLaunchKernel"
    )
    assert answer == ["RuntimeError", "the launch failed: no kernel image is available (CUDA error 209)"]
    assert log[-1].startswith("pop")


def test_a_call_goes_to_the_frameworks_stream(matmul: Built, child: Child, fake_driver: Path) -> None:
    body = f"""
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), 4242):
        answer = attempt("run", *{CALL})
    """
    _, log = child(calls(matmul.path, body), driver=fake_driver)
    assert [launche["stream"] for launche in launches(log)] == [4242]


def test_the_plain_entry_launches_on_the_current_device(matmul: Built, child: Child, fake_driver: Path) -> None:
    body = """
    pointers = array(ctypes.c_void_p, *range(0x70000000, 0x70005000, 0x1000))
    extents = array(ctypes.c_int64, 1, 256, 192, 64, 64, 192, 192, 0, 0, 0)
    scalars = array(ctypes.c_double, 0.25)
    given = array(ctypes.c_int32, 1, 1, 0)
    launch, stream = library.cukiln_launch, ctypes.c_void_p(77)
    answer = [
        launch(pointers, extents, None, scalars, None, stream),
        launch(pointers, extents, given, scalars, None, stream),
        launch(None, extents, None, scalars, None, stream), error(),
        launch(pointers, extents, None, None, None, stream), error(),
    ]
    for place, value in ((0, 0), (1, -1), (2, 2**32 + 192), (3, 0), (0, 2**30)):
        wrong = array(ctypes.c_int64, *(value if i == place else old for i, old in enumerate(extents)))
        answer += [[launch(pointers, wrong, None, scalars, None, stream), error()]]
    """
    answer, log = child(
        plain(matmul.path, body), driver=fake_driver, FAKE_CUDA_CURRENT="1", FAKE_CUDA_PEEK=str(RASTER_OFFSET)
    )
    assert answer[:2] == [0, 0]
    assert answer[2] != 0 and "pointers, extents or scalars is null" in answer[3]
    assert answer[4] != 0 and "1 scalars are needed" in answer[5]
    assert len(answer[6:]) == 5
    for code, words in answer[6:]:
        assert code != 0 and "below 1 or beyond what the kernel can index" in words
    baked, given = launches(log)
    assert (baked["peek"], given["peek"]) == (4, 1)
    assert (baked["context"], baked["stream"], baked["first"]) == (101, 77, 0x70000000)


def test_the_plain_entry_needs_a_current_context(matmul: Built, child: Child, fake_driver: Path) -> None:
    body = """
    pointers, extents, scalars = array(ctypes.c_void_p), array(ctypes.c_int64), array(ctypes.c_double)
    answer = [library.cukiln_launch(pointers, extents, None, scalars, None, None), error()]
    """
    answer, _ = child(plain(matmul.path, body), driver=fake_driver)
    assert answer[0] != 0 and "no current CUDA context" in answer[1]


def test_a_group_library_launches_each_of_its_kernels(
    folder: Path, toolchain: Toolchain, processes: Processes, child: Child, fake_driver: Path
) -> None:
    kernels = [probe(1, threads=32), probe(2, threads=128)]
    group = compile_group(kernels, SM_90A, toolchain, processes, LIMITS)
    assert group.artifact is not None, group.why
    path = folder / "group.so"
    path.write_bytes(group.artifact.library)
    body = f"""
    pointers, extents = array(ctypes.c_void_p, 4096, 8192), array(ctypes.c_int64, 1000)
    scalars, workspace = array(ctypes.c_double, 1.0), ctypes.c_void_p(12288)
    names, two = {[kernel.id[:16] for kernel in kernels]}, array(ctypes.c_int32, 2)
    answer = [
        [
            getattr(library, "cukiln_launch_" + name)(pointers, extents, None, scalars, workspace, None),
            getattr(library, "cukiln_workspace_bytes_" + name)(extents, None),
            getattr(library, "cukiln_workspace_bytes_" + name)(extents, two),
        ]
        for name in names
    ]
    """
    # A group's library has no cukiln_workspace_bytes of its own: one per kernel.
    script = plain(path, body).replace("library.cukiln_workspace_bytes.restype = ctypes.c_int64\n", "")
    answer, log = child(script, driver=fake_driver, FAKE_CUDA_CURRENT="0")
    assert answer == [[0, 4000, 8000]] * 2
    assert [launche["block"][0] for launche in launches(log)] == [32, 32, 128, 128]
    assert [launche["function"] for launche in launches(log)] == [1000, 1001, 1002, 1003]
