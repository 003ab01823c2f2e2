"""Conv2d's winners: what nvcc makes of them, what their libraries launch and refuse, and a job over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.schedule import Schedule
from codegen.search import Search
from cukiln.client import Client
from storage.settings import load_settings
from tests.conv2d_kernels import DIRECT, conv2d, direct_kernel
from tests.fixtures_compile import *  # noqa: F403
from tests.fixtures_compile import LIMITS, SM_90A
from tests.fixtures_library import *  # noqa: F403
from tests.fixtures_library import Built, Child, build, calls, launches
from tests.test_tensor_ptx import Code, codes_of
from workers.build_winner import plan_launch
from workers.processes import Processes
from workers.serve import embedded
from workers.toolchain import Toolchain

OP = operator("conv2d")
LAYER: dict[str, Any] = {"n": 8, "h": 28, "w": 28, "c": 128, "k": 128, "padding": 1, "dtype": "float16"}
EPILOGUE = [{"op": "bias"}, {"op": "leaky_relu", "slope": 0.25}, {"op": "residual"}]


def level_0(**fields: Any) -> Candidate:
    (found,) = lower(conv2d(**fields), SM_90A, Search(level=0)).candidates
    return found


# ---- what nvcc makes of them


@pytest.fixture(scope="module")
def codes(
    toolchain: Toolchain, processes: Processes, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Kernel, Code]]:
    asked = {
        "fp16 3x3": level_0(**LAYER).kernel,
        "bf16 3x3 with stride": level_0(**{**LAYER, "dtype": "bfloat16", "stride": 2}).kernel,
        "tf32 3x3": level_0(**{**LAYER, "dtype": "float32", "allow_tf32": True}).kernel,
        "fp16 1x1": level_0(**{**LAYER, "r": 1, "s": 1, "padding": 0}).kernel,
        "fp16 stem": level_0(**{**LAYER, "c": 3, "r": 7, "s": 7, "stride": 2, "padding": 3}).kernel,
        "fp16 nchw": level_0(**LAYER, layout="nchw").kernel,
        "fp32 3x3": level_0(**{**LAYER, "dtype": "float32"}).kernel,
        "fp16 depthwise": level_0(**LAYER, groups=128).kernel,
        "fp16 depthwise with stride": level_0(**{**LAYER, "stride": 2}, groups=128).kernel,
    }
    wide = {"depthwise": True, "epilogue": ("relu",)}
    asked |= {
        "fp16 depthwise 7x7": direct_kernel(wide | {"align": (8, 1, 8)}, window=7, filters=8, pixels=8, threads=256),
        "fp32 depthwise 7x7": direct_kernel(
            wide | {"align": (4, 1, 4), "dtype": "float32"}, window=7, pixels=8, threads=256
        ),
    }
    same = OP.candidate(conv2d(**{**LAYER, "r": 1, "s": 1, "padding": 0}), level_0(**LAYER).schedule)
    asked["fp16 1x1 in the tiles of the 3x3"] = same.kernel
    folder = tmp_path_factory.mktemp("codes")
    found = codes_of(list(asked.values()), "sm_90a", folder, toolchain, processes)
    return {name: (kernel, found[kernel]) for name, kernel in asked.items()}


@pytest.mark.parametrize("name", ["fp16 3x3", "bf16 3x3 with stride", "tf32 3x3", "fp16 1x1"])
def test_aligned_kernels_have_tensor_cores_and_wide_copies(name: str, codes: dict[str, tuple[Kernel, Code]]) -> None:
    _, code = codes[name]
    assert code.count("mma.sync") > 0 and code.count("ldmatrix") > 0
    copies = {one for one in code.instructions if re.match(r"cp\.async\.c[ag]\.", one)}
    assert copies == {"cp.async.cg.shared.global 16"}


def test_other_kernels_are_what_they_say(codes: dict[str, tuple[Kernel, Code]]) -> None:
    for name in ("fp16 stem", "fp16 nchw"):
        assert codes[name][1].count("mma.sync") > 0
    for name in ("fp32 3x3", "fp16 depthwise"):
        assert codes[name][1].count("mma.sync") == 0 and codes[name][1].count("fma.rn.f32") > 0


def test_a_gather_has_no_branches_of_its_own(codes: dict[str, tuple[Kernel, Code]]) -> None:
    """A branch for each vector would keep the copies from being started together."""
    gathered, stored = (codes[name][1].count("bra") for name in ("fp16 3x3", "fp16 1x1 in the tiles of the 3x3"))
    assert 0 < gathered <= stored + 1


def test_no_kernel_spills(codes: dict[str, tuple[Kernel, Code]]) -> None:
    assert {name: code.resources.spill_store_bytes for name, (_, code) in codes.items()} == dict.fromkeys(codes, 0)


def test_depthwise_channels_come_in_16_bytes_at_once(codes: dict[str, tuple[Kernel, Code]]) -> None:
    for name in ("fp16 depthwise", "fp16 depthwise with stride"):
        assert codes[name][1].count("ld.global.nc.v4") > 0


@pytest.mark.parametrize(
    ("name", "pixels", "window", "filters"),
    [("fp16 depthwise", 4, 3, 8), ("fp16 depthwise 7x7", 8, 7, 8), ("fp32 depthwise 7x7", 8, 7, 4)],
)
def test_neighbouring_pixels_load_what_they_share_once(
    name: str, pixels: int, window: int, filters: int, codes: dict[str, tuple[Kernel, Code]]
) -> None:
    kernel, code = codes[name]
    columns = pixels + window - 1
    assert kernel.tunables.get("window") == window
    assert code.count("ld.global.nc.v4") == columns
    assert code.count("fma.rn.f32") == window * pixels * filters
    if kernel.signature_dict["dtype"] == "float16":
        # Those of the row of the image, and of the filter's one element at a time.
        assert code.count("cvt.f32.f16") == columns * filters + 1


def test_registers_of_neighbouring_pixels_are_about_what_is_estimated(codes: dict[str, tuple[Kernel, Code]]) -> None:
    for name in ("fp16 depthwise", "fp16 depthwise 7x7", "fp32 depthwise 7x7"):
        kernel, code = codes[name]
        assert abs(code.resources.registers - OP.estimated_registers(kernel)) <= 20


# ---- what the launch code does


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"stride": 2},
        {"r": 1, "s": 1, "padding": 0},
        {"groups": 4},
        {"groups": 128, "w": 29},
        {"c": 4},
        {"c": 4, "epilogue": EPILOGUE},
    ],
)
def test_the_launches_are_what_cost_and_work_say(
    layout: str, change: dict[str, Any], toolchain: Toolchain, processes: Processes
) -> None:
    problem = conv2d(**{**LAYER, "n": 1, "layout": layout, **change})
    found = lower(problem, SM_90A, Search(level=1)).candidates
    chosen = {one.schedule.get("algorithm"): one for one in found}
    chosen |= {one.schedule.get("split"): one for one in found if one.schedule.get("algorithm") == "implicit_gemm"}
    chosen |= {one.schedule.get("epilogue"): one for one in found}
    chosen |= {one.schedule.get("window"): one for one in found if one.schedule.get("algorithm") == "direct"}
    assert (3 in chosen) == (layout == "nhwc" and "w" in change)
    assert ("separate" in chosen) == ("epilogue" in change)
    for one in chosen.values():
        planned, cost = plan_launch(one, toolchain, processes, LIMITS), OP.cost(problem, one.schedule)
        work = OP.work(problem, one.schedule, SM_90A)
        assert (len(planned.functions), planned.workspace_bytes) == (cost.launches, cost.workspace_bytes)
        run = planned.functions[OP.functions(one.kernel).index("run")]
        blocks = run.grid[0] * run.grid[1] * run.grid[2]
        assert (blocks, run.block[0], run.shared_bytes) == (work.blocks, work.threads, OP.shared_bytes(one.kernel))


@pytest.mark.parametrize(("n", "launches"), [(4096, 1), (32768, 0)])
def test_a_direct_kernel_has_no_launch_for_an_image_that_32_bits_cannot_reach(
    n: int, launches: int, toolchain: Toolchain, processes: Processes
) -> None:
    problem = conv2d(n=n, h=128, w=128, c=4, k=4, r=1, s=1, dtype="float16")
    assert problem.pointwise
    candidate = OP.candidate(problem, Schedule.of(DIRECT))
    assert len(plan_launch(candidate, toolchain, processes, LIMITS).functions) == launches


# ---- what a library refuses

OPERANDS = """
def H(*shape, **where): return T(shape, 'float16', **where)
x, w, b, r = H(2, 12, 10, 16), H(24, 3, 3, 16), H(24), H(2, 12, 10, 24)
out = H(2, 12, 10, 24, address=0x50000000)
rest = (1, 1, 1, 1, 1, 1, 1, 1, 0.25)
"""
REFUSED = {
    "a tensor less": ("x, w, out, b", "TypeError", "4 tensors were given; this kernel takes 5: x, w, out and 2"),
    "no geometry": ("x, w, out, b, r, 0.25", "TypeError", "this call takes 5 tensors, then 9 numbers"),
    "dtype": ("x, T((24, 3, 3, 16)), out, b, r, *rest", "TypeError", "w is float32; float16 is allowed"),
    "rank": ("H(2, 120, 16), w, out, b, r, *rest", "ValueError", "rank 4 (n, h, w, c) is allowed"),
    "channels": ("x, H(24, 3, 3, 12), out, b, r, *rest", "ValueError", "16 channels and w 12"),
    "filters": ("x, H(16, 3, 3, 16), out, b, r, *rest", "ValueError", "k differs between w and out"),
    "images": ("H(3, 12, 10, 16), w, out, b, r, *rest", "ValueError", "n differs between x and out"),
    "strides": (
        "H(2, 12, 10, 16, strides=(2000, 160, 16, 1)), w, out, b, r, *rest",
        "ValueError",
        "x has stride 2000 along axis 0; it must be packed (stride 1920)",
    ),
    "vectors": (
        "H(2, 12, 10, 12), H(24, 3, 3, 12), out, b, r, *rest",
        "ValueError",
        "c / groups is 12; this kernel moves 8 elements at once",
    ),
    "address": ("H(2, 12, 10, 16, address=0x40000008), w, out, b, r, *rest", "ValueError", "16 bytes"),
    "bias": ("x, w, out, H(16), r, *rest", "ValueError", "bias must be a contiguous vector of 24"),
    "residual": ("x, w, out, b, H(2, 12, 5, 48), *rest", "ValueError", "the shape of out"),
    "device": ("x, H(24, 3, 3, 16, device=1), out, b, r, *rest", "ValueError", "w is on cuda:1, but x is on cuda:0"),
    "overlap": ("x, w, out, b, out, *rest", "ValueError", "out overlaps residual"),
    "another geometry": (
        "x, w, out, b, r, 2, *rest[1:]",
        "ValueError",
        "or the scalars (such as stride and padding) do not fit",
    ),
    "padding behind": (
        "x, w, out, b, r, *rest[:3], 0, *rest[4:]",
        "ValueError",
        "or the scalars (such as stride and padding) do not fit",
    ),
    "half a row of padding": (
        "x, w, out, b, r, *rest[:2], 1.5, *rest[3:]",
        "ValueError",
        "or the scalars (such as stride and padding) do not fit",
    ),
    "a negative padding": (
        "x, w, out, b, r, *rest[:2], -1, 3, *rest[4:]",
        "ValueError",
        "or the scalars (such as stride and padding) do not fit",
    ),
    "a negative stride": (
        "x, w, out, b, r, -1, *rest[1:]",
        "ValueError",
        "or the scalars (such as stride and padding) do not fit",
    ),
}


@pytest.fixture(scope="module")
def winner(folder: Path, toolchain: Toolchain, processes: Processes) -> Built:
    return build(level_0(padding=1, dtype="float16", epilogue=EPILOGUE), folder, toolchain, processes)


def test_the_record_describes_the_call(winner: Built) -> None:
    launch = winner.launch
    assert [one.name for one in launch.operands] == ["x", "w", "out", "bias", "residual"]
    assert launch.extents == {
        "n": 2, "h": 12, "w": 10, "c": 16, "k": 24, "r": 3, "s": 3, "p": 12, "q": 10, "groups": 1
    }  # fmt: skip
    assert launch.scalars == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.25]


def test_a_call_launches_what_the_record_says(winner: Built, child: Child, fake_driver: Path) -> None:
    body = f"{OPERANDS}\nanswer = attempt('run', x, w, out, b, r, *rest)"
    answer, log = child(calls(winner.path, body), driver=fake_driver)
    assert answer is None
    (function,), (launch,) = winner.launch.functions, launches(log)
    assert (launch["grid"], launch["block"], launch["shared"]) == (function.grid, function.block, function.shared_bytes)


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_cannot_be_right_is_refused(name: str, winner: Built, child: Child, fake_driver: Path) -> None:
    arguments, kind, said = REFUSED[name]
    body = f"{OPERANDS}\nanswer = attempt('run', {arguments})"
    (got, message), log = child(calls(winner.path, body), driver=fake_driver)
    assert (got, said in message) == (kind, True), message
    assert launches(log) == []


DEPTHWISE_OPERANDS = """
def H(*shape, **where): return T(shape, 'float16', **where)
x, w = H(2, 12, 10, 16), H(16, 3, 3, 1)
out = H(2, 12, 10, 16, address=0x50000000)
"""
OUT_OF_WINDOW = {
    "other columns": (
        "x, H(16, 3, 5, 1), out, 1, 1, 1, 1, 2, 2, 1, 1",
        "w has 5 columns; this kernel is for filters of 3",
    ),
    "a stride": (
        "x, w, H(2, 12, 5, 16, address=0x50000000), 1, 2, 1, 1, 1, 1, 1, 1",
        "the scalars (such as stride and padding)",
    ),
    "a dilation": ("x, w, out, 1, 1, 1, 1, 2, 2, 1, 2", "the scalars (such as stride and padding) do not fit"),
}


@pytest.fixture(scope="module")
def neighbours(folder: Path, toolchain: Toolchain, processes: Processes) -> Built:
    return build(level_0(c=16, k=16, groups=16, padding=1, dtype="float16"), folder, toolchain, processes)


def test_a_kernel_of_neighbouring_pixels_takes_any_height_of_the_filter(
    neighbours: Built, child: Child, fake_driver: Path
) -> None:
    for arguments in (
        "x, w, out, 1, 1, 1, 1, 1, 1, 1, 1",
        "x, H(16, 5, 3, 1), out, 1, 1, 2, 2, 1, 1, 1, 1",
        "x, w, out, 1, 1, 0, 2, 2, 0, 1, 1",
    ):
        body = f"{DEPTHWISE_OPERANDS}\nanswer = attempt('run', {arguments})"
        answer, log = child(calls(neighbours.path, body), driver=fake_driver)
        assert answer is None and len(launches(log)) == 1


@pytest.mark.parametrize("name", OUT_OF_WINDOW)
def test_a_call_that_a_window_does_not_fit_is_refused(
    name: str, neighbours: Built, child: Child, fake_driver: Path
) -> None:
    arguments, said = OUT_OF_WINDOW[name]
    body = f"{DEPTHWISE_OPERANDS}\nanswer = attempt('run', {arguments})"
    (got, message), log = child(calls(neighbours.path, body), driver=fake_driver)
    assert (got, said in message) == ("ValueError", True), message
    assert launches(log) == []


# ---- a job, the whole way


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    data = tmp_path_factory.mktemp("conv2d-job")
    settings = load_settings(data_dir=data, port=0, workers=2)
    with embedded(settings) as running, Client(running.url, cache_dir=data / "client") as found:
        yield found


def test_a_job_ends_with_verified_winners_that_are_found_again(client: Client) -> None:
    layer = {"operator": "conv2d", "n": 2, "h": 14, "w": 14, "c": 64, "k": 64, "r": 3, "s": 3, "padding": 1}
    problems = [
        {**layer, "name": "fp16", "dtype": "float16", "epilogue": [{"op": "bias"}, {"op": "relu"}]},
        {**layer, "name": "nchw", "layout": "nchw"},
        {**layer, "name": "depthwise", "groups": 64, "dtype": "float16"},
        {**layer, "name": "both", "c": 4, "dtype": "float16"},
    ]
    job = client.tune(problems, target="sm_90a", search={"level": 1, "limit": 3})
    assert job.state == "done"
    assert {problem.name: problem.state for problem in job.problems} == {one["name"]: "done" for one in problems}
    assert all(problem.verdicts == {"ok": 3} for problem in job.problems)
    again = client.tune(problems, target="sm_90a", search={"level": 1, "limit": 3})
    assert again.cached


def test_a_search_without_a_schedule_says_the_numbers(client: Client) -> None:
    large = {"operator": "conv2d", "n": 65536, "h": 128, "w": 128, "c": 8, "k": 8, "r": 3, "s": 3, "dtype": "float16"}
    job = client.tune([{**large, "name": "large"}], target="sm_90a", search={"level": 0})
    (problem,) = job.problems
    assert problem.state == "failed"
    assert problem.rejected == {"index": 1}
