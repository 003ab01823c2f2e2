"""Conv2d_wgrad's winners: what nvcc makes of them, what their libraries launch and refuse, and a job over HTTP."""

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
from tests.conv2d_wgrad_kernels import DIRECT, wgrad
from tests.fixtures_compile import *  # noqa: F403
from tests.fixtures_compile import LIMITS, SM_90A
from tests.fixtures_library import *  # noqa: F403
from tests.fixtures_library import Built, Child, build, calls, launches
from tests.test_tensor_ptx import Code, codes_of
from workers.build_winner import plan_launch
from workers.processes import Processes
from workers.serve import embedded
from workers.toolchain import Toolchain

OP = operator("conv2d_wgrad")
LAYER: dict[str, Any] = {"n": 8, "h": 28, "w": 28, "c": 128, "k": 128, "padding": 1, "dtype": "float16"}


def level_0(**fields: Any) -> Candidate:
    (found,) = lower(wgrad(**fields), SM_90A, Search(level=0)).candidates
    return found


# ---- what nvcc makes of them


@pytest.fixture(scope="module")
def codes(
    toolchain: Toolchain, processes: Processes, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Kernel, Code]]:
    asked = {
        "fp16 3x3": level_0(**LAYER, out_dtype="float32").kernel,
        "tf32 3x3": level_0(**{**LAYER, "dtype": "float32", "allow_tf32": True}).kernel,
        "fp16 1x1": level_0(**{**LAYER, "r": 1, "s": 1, "padding": 0}).kernel,
        "fp16 stem": level_0(**{**LAYER, "c": 3, "r": 7, "s": 7, "stride": 2, "padding": 3}).kernel,
        "fp16 nchw": level_0(**LAYER, layout="nchw").kernel,
        "fp32 3x3": level_0(**{**LAYER, "dtype": "float32"}).kernel,
        "fp16 depthwise": level_0(**LAYER, groups=128).kernel,
    }
    same = OP.candidate(
        wgrad(**{**LAYER, "r": 1, "s": 1, "padding": 0}, out_dtype="float32"),
        level_0(**LAYER, out_dtype="float32").schedule,
    )
    asked["fp16 1x1 in the tiles of the 3x3"] = same.kernel
    folder = tmp_path_factory.mktemp("codes")
    found = codes_of(list(asked.values()), "sm_90a", folder, toolchain, processes)
    return {name: (kernel, found[kernel]) for name, kernel in asked.items()}


@pytest.mark.parametrize("name", ["fp16 3x3", "tf32 3x3", "fp16 1x1"])
def test_aligned_kernels_have_tensor_cores_and_wide_copies(name: str, codes: dict[str, tuple[Kernel, Code]]) -> None:
    _, code = codes[name]
    assert code.count("mma.sync") > 0
    assert (code.count("ldmatrix") > 0) == (name != "tf32 3x3"), "words of 4 bytes are not turned by ldmatrix"
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
    assert codes["fp16 depthwise"][1].count("ld.global.nc.v4") > 0


# ---- what the launch code does


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        ("nhwc", {"stride": 2}),
        ("nhwc", {"r": 1, "s": 1, "padding": 0}),
        ("nhwc", {"groups": 128}),
        ("nchw", {"groups": 4}),
    ],
)
def test_the_launches_are_what_cost_and_work_say(
    layout: str, change: dict[str, Any], toolchain: Toolchain, processes: Processes
) -> None:
    problem = wgrad(**{**LAYER, "n": 2, "layout": layout, **change})
    found = lower(problem, SM_90A, Search(tunables={"split_k": [1, 3]})).candidates
    chosen = {(one.schedule.get("algorithm"), one.schedule.get("split")): one for one in found}
    chosen = {key: one for key, one in chosen.items() if key[1] != "atomic"}
    assert {"none", "workspace"} <= {str(split) for _, split in chosen}
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
    problem = wgrad(n=n, h=128, w=128, c=4, k=8, groups=4, r=1, s=1, dtype="float16")
    assert problem.pointwise and not problem.depthwise
    candidate = OP.candidate(problem, Schedule.of({**DIRECT, "threads_k": 2, "elements": 1, "filters": 2}))
    assert len(plan_launch(candidate, toolchain, processes, LIMITS).functions) == launches


# ---- what a library refuses

OPERANDS = """
def H(*shape, **where): return T(shape, 'float16', **where)
dy, x = H(2, 12, 10, 24), H(2, 12, 10, 16)
dw = T((24, 3, 3, 16), 'float32', address=0x50000000)
geometry = (1, 1, 1, 1, 1, 1, 1, 1)
"""
REFUSED = {
    "a tensor less": ("dy, x", "TypeError", "2 tensors were given; this kernel takes 3: dy, x, dw and 0"),
    "dtype": ("T((2, 12, 10, 24)), x, dw, *geometry", "TypeError", "dy is float32; float16 is allowed"),
    "dtype of dw": ("dy, x, H(24, 3, 3, 16), *geometry", "TypeError", "dw is float16; float32 is allowed"),
    "channels": ("dy, H(2, 12, 10, 24), dw, *geometry", "ValueError", "x has 24 channels and dw 16"),
    "filters": ("H(2, 12, 10, 32), x, dw, *geometry", "ValueError", "k differs between dw and dy"),
    "strides": (
        "dy, H(2, 12, 10, 16, strides=(2000, 160, 16, 1)), dw, *geometry",
        "ValueError",
        "x has stride 2000 along axis 0; it must be packed (stride 1920)",
    ),
    "vectors": (
        "H(2, 12, 10, 12), x, T((12, 3, 3, 16), 'float32', address=0x50000000), *geometry",
        "ValueError",
        "k / groups is 12; this kernel moves 8 elements at once",
    ),
    "overlap": (
        "dy, H(2, 12, 10, 16, address=0x50000000), dw, *geometry",
        "ValueError",
        "dw overlaps x",
    ),
    "device": ("dy, H(2, 12, 10, 16, device=1), dw, *geometry", "ValueError", "x is on cuda:1, but dy is on cuda:0"),
    "padding behind": (
        "dy, x, dw, *geometry[:5], 2, *geometry[6:]",
        "ValueError",
        "stride and padding) do not fit the tensors",
    ),
    "another geometry": ("dy, x, dw, 2, *geometry[1:]", "ValueError", "stride and padding) do not fit the tensors"),
}


@pytest.fixture(scope="module")
def winner(folder: Path, toolchain: Toolchain, processes: Processes) -> Built:
    return build(level_0(padding=1, dtype="float16", out_dtype="float32"), folder, toolchain, processes)


def test_the_record_describes_the_call(winner: Built) -> None:
    launch = winner.launch
    assert [one.name for one in launch.operands] == ["dy", "x", "dw"]
    assert launch.extents == {
        "n": 2, "h": 12, "w": 10, "c": 16, "k": 24, "r": 3, "s": 3, "p": 12, "q": 10, "groups": 1
    }  # fmt: skip
    assert launch.scalars == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_call_launches_what_the_record_says(winner: Built, child: Child, fake_driver: Path) -> None:
    body = f"{OPERANDS}\nanswer = attempt('run', dy, x, dw, *geometry)"
    answer, log = child(calls(winner.path, body), driver=fake_driver)
    assert answer is None
    assert [(one["grid"], one["block"], one["shared"]) for one in launches(log)] == [
        (one.grid, one.block, one.shared_bytes) for one in winner.launch.functions
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_cannot_be_right_is_refused(name: str, winner: Built, child: Child, fake_driver: Path) -> None:
    arguments, kind, said = REFUSED[name]
    body = f"{OPERANDS}\nanswer = attempt('run', {arguments})"
    (got, message), log = child(calls(winner.path, body), driver=fake_driver)
    assert (got, said in message) == (kind, True), message
    assert launches(log) == []


# ---- a job, the whole way


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    data = tmp_path_factory.mktemp("conv2d-wgrad-job")
    settings = load_settings(data_dir=data, port=0, workers=2)
    with embedded(settings) as running, Client(running.url, cache_dir=data / "client") as found:
        yield found


def test_a_job_ends_with_verified_winners_that_are_found_again(client: Client) -> None:
    layer = {"operator": "conv2d_wgrad", "n": 8, "h": 14, "w": 14, "c": 64, "k": 64, "r": 3, "s": 3, "padding": 1}
    problems = [
        {**layer, "name": "fp16", "dtype": "float16", "out_dtype": "float32"},
        {**layer, "name": "depthwise nchw", "layout": "nchw", "groups": 64, "dtype": "float16"},
    ]
    job = client.tune(problems, target="sm_90a", search={"level": 1, "limit": 2})
    assert job.state == "done"
    assert {problem.name: problem.state for problem in job.problems} == {one["name"]: "done" for one in problems}
    assert all(problem.verdicts == {"ok": 2} for problem in job.problems)
    again = client.tune(problems, target="sm_90a", search={"level": 1, "limit": 2})
    assert again.cached


def test_a_workspace_cap_below_the_smallest_need_says_the_numbers(client: Client) -> None:
    layer = {"operator": "conv2d_wgrad", "n": 8, "h": 14, "w": 14, "c": 64, "k": 64, "r": 3, "s": 3, "padding": 1}
    job = client.tune(
        [{**layer, "name": "capped", "dtype": "float16"}],
        target="sm_90a", search={"tunables": {"split": ["workspace"], "split_k": [4]}}, workspace_limit_bytes=1000,
    )  # fmt: skip
    (problem,) = job.problems
    assert problem.state == "failed"
    assert "workspace" in problem.rejected
    assert problem.error is not None and "bytes of workspace, the limit is 1000" in problem.error


def test_a_search_without_a_schedule_says_the_numbers(client: Client) -> None:
    large = {"operator": "conv2d_wgrad", "n": 65536, "h": 128, "w": 128, "c": 8, "k": 8, "r": 3, "s": 3}
    job = client.tune([{**large, "name": "large", "dtype": "float16"}], target="sm_90a", search={"level": 0})
    (problem,) = job.problems
    assert problem.state == "failed"
    assert problem.rejected == {"index": 1}
