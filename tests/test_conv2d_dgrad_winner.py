"""Conv2d_dgrad's winners: what nvcc makes of them, what their libraries launch and refuse, and a job over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.rules import ACCEPTED
from codegen.schedule import Schedule
from codegen.search import Search
from cukiln.client import Client
from storage.settings import load_settings
from tests.conv2d_dgrad_kernels import dgrad
from tests.conv2d_kernels import DIRECT
from tests.fixtures_compile import *  # noqa: F403
from tests.fixtures_compile import LIMITS, SM_90A
from tests.fixtures_library import *  # noqa: F403
from tests.fixtures_library import Built, Child, build, calls, launches
from tests.test_tensor_ptx import Code, codes_of
from workers.build_winner import plan_launch
from workers.processes import Processes
from workers.serve import embedded
from workers.toolchain import Toolchain

OP = operator("conv2d_dgrad")
LAYER: dict[str, Any] = {"n": 8, "h": 28, "w": 28, "c": 128, "k": 128, "padding": 1, "dtype": "float16"}
STRIDED: dict[str, Any] = {**LAYER, "stride": 2}


def level_0(**fields: Any) -> Candidate:
    (found,) = lower(dgrad(**fields), SM_90A, Search(level=0)).candidates
    return found


# ---- what nvcc makes of them


@pytest.fixture(scope="module")
def codes(
    toolchain: Toolchain, processes: Processes, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Kernel, Code]]:
    asked = {
        "fp16 3x3": level_0(**LAYER).kernel,
        "fp16 3x3 with stride": level_0(**STRIDED).kernel,
        "tf32 3x3": level_0(**{**LAYER, "dtype": "float32", "allow_tf32": True}).kernel,
        "fp16 nchw with stride": level_0(**STRIDED, layout="nchw").kernel,
        "fp32 3x3 with stride": level_0(**{**STRIDED, "dtype": "float32"}).kernel,
        "fp16 depthwise with stride": level_0(**STRIDED, groups=128).kernel,
    }
    same = OP.candidate(dgrad(**{**LAYER, "r": 1, "s": 1, "padding": 0}), level_0(**LAYER).schedule)
    asked["fp16 1x1 in the tiles of the 3x3"] = same.kernel
    folder = tmp_path_factory.mktemp("codes")
    found = codes_of(list(asked.values()), "sm_90a", folder, toolchain, processes)
    return {name: (kernel, found[kernel]) for name, kernel in asked.items()}


@pytest.mark.parametrize("name", ["fp16 3x3", "fp16 3x3 with stride", "tf32 3x3"])
def test_aligned_kernels_have_tensor_cores_and_wide_copies(name: str, codes: dict[str, tuple[Kernel, Code]]) -> None:
    _, code = codes[name]
    assert code.count("mma.sync") > 0 and code.count("ldmatrix") > 0
    copies = {one for one in code.instructions if re.match(r"cp\.async\.c[ag]\.", one)}
    assert copies == {"cp.async.cg.shared.global 16"}


def test_other_kernels_are_what_they_say(codes: dict[str, tuple[Kernel, Code]]) -> None:
    assert codes["fp16 nchw with stride"][1].count("mma.sync") > 0
    for name in ("fp32 3x3 with stride", "fp16 depthwise with stride"):
        assert codes[name][1].count("mma.sync") == 0 and codes[name][1].count("fma.rn.f32") > 0


def test_a_gather_has_no_branches_of_its_own(codes: dict[str, tuple[Kernel, Code]]) -> None:
    """A branch for each vector would keep the copies from being started together."""
    gathered, stored = (codes[name][1].count("bra") for name in ("fp16 3x3", "fp16 1x1 in the tiles of the 3x3"))
    assert 0 < gathered <= stored + 1


def test_no_kernel_spills_or_keeps_its_phase_in_memory(codes: dict[str, tuple[Kernel, Code]]) -> None:
    assert {name: code.resources.spill_store_bytes for name, (_, code) in codes.items()} == dict.fromkeys(codes, 0)
    assert {name: code.resources.stack_bytes for name, (_, code) in codes.items()} == dict.fromkeys(codes, 0)


def test_depthwise_channels_come_in_16_bytes_at_once(codes: dict[str, tuple[Kernel, Code]]) -> None:
    assert codes["fp16 depthwise with stride"][1].count("ld.global.nc.v4") > 0


# ---- what the launch code does


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        ("nhwc", {}),
        ("nhwc", {"c": 4, "stride": [1, 40]}),
        ("nchw", {"stride": [2, 3], "groups": 16}),
    ],
)
def test_the_launches_are_what_cost_and_work_say(
    layout: str, change: dict[str, Any], toolchain: Toolchain, processes: Processes
) -> None:
    problem = dgrad(**{**LAYER, "n": 1, "layout": layout, **change})
    found = lower(problem, SM_90A, Search(level=1)).candidates
    # Of each way to compute it one: directly, and with every division of the sums.
    chosen = {one.schedule.as_dict().get("split", "direct"): one for one in found}
    for one in chosen.values():
        planned, cost = plan_launch(one, toolchain, processes, LIMITS), OP.cost(problem, one.schedule)
        work = OP.work(problem, one.schedule, SM_90A)
        assert (len(planned.functions), planned.workspace_bytes) == (cost.launches, cost.workspace_bytes)
        run = planned.functions[OP.functions(one.kernel).index("run")]
        blocks = run.grid[0] * run.grid[1] * run.grid[2]
        assert (blocks, run.block[0], run.shared_bytes) == (work.blocks, work.threads, OP.shared_bytes(one.kernel))


@pytest.mark.parametrize(("n", "launches"), [(4096, 1), (32768, 0)])
def test_a_direct_kernel_has_no_launch_for_a_dy_that_32_bits_cannot_reach(
    n: int, launches: int, toolchain: Toolchain, processes: Processes
) -> None:
    problem = dgrad(n=n, h=128, w=128, c=4, k=4, r=1, s=1, dtype="float16")
    assert problem.pointwise
    candidate = OP.candidate(problem, Schedule.of(DIRECT))
    assert len(plan_launch(candidate, toolchain, processes, LIMITS).functions) == launches


def test_more_phases_of_all_groups_than_an_int_holds_are_launched(toolchain: Toolchain, processes: Processes) -> None:
    sizes = {"n": 1, "h": 2**14, "w": 2**14, "c": 64, "k": 64, "groups": 64, "r": 1, "s": 1, "dtype": "float16"}
    schedule = Schedule.of({**DIRECT, "threads": 64, "threads_k": 64, "filters": 1, "pixels": 1})
    one = OP.candidate(dgrad(**sizes, stride=2**14), schedule)
    assert OP.rules(one.problem, schedule, SM_90A) == ACCEPTED
    (run,) = plan_launch(one, toolchain, processes, LIMITS).functions
    assert (run.grid[0], run.grid[1]) == (2**28, 1)
    assert run.grid[0] * run.grid[1] == OP.work(one.problem, schedule, SM_90A).blocks


# ---- what a library refuses

DO_NOT_FIT = "or the scalars (such as stride and padding) do not fit"
OPERANDS = """
def H(*shape, **where): return T(shape, 'float16', **where)
dy, w, r = H(2, 6, 5, 24), H(24, 3, 3, 16), H(2, 12, 10, 16)
dx = H(2, 12, 10, 16, address=0x50000000)
rest = (2, 2, 1, 1, 1, 1, 1, 1)
"""
REFUSED = {
    "a tensor less": ("dy, w, dx, *rest", "TypeError", "3 tensors were given; this kernel takes 4: dy, w, dx and 1"),
    "no geometry": ("dy, w, dx, r, 2", "TypeError", "this call takes 4 tensors, then 8 numbers"),
    "dtype": ("dy, T((24, 3, 3, 16)), dx, r, *rest", "TypeError", "w is float32; float16 is allowed"),
    "rank": ("H(2, 30, 24), w, dx, r, *rest", "ValueError", "dy has rank 3; rank 4 (n, p, q, k) is allowed"),
    "channels": ("dy, H(24, 3, 3, 12), dx, r, *rest", "ValueError", "dx has 16 channels and w 12"),
    "filters": ("dy, H(16, 3, 3, 16), dx, r, *rest", "ValueError", "k differs between w and dy"),
    "images": ("H(3, 6, 5, 24), w, dx, r, *rest", "ValueError", "n differs between dx and dy"),
    "strides": (
        "H(2, 6, 5, 24, strides=(800, 120, 24, 1)), w, dx, r, *rest",
        "ValueError",
        "dy has stride 800 along axis 0; it must be packed (stride 720)",
    ),
    "vectors of dy": (
        "H(2, 6, 5, 20), H(20, 3, 3, 16), dx, r, *rest",
        "ValueError",
        "k / groups is 20; this kernel moves 8 elements at once",
    ),
    "vectors of dx": (
        "dy, H(24, 3, 3, 12), H(2, 12, 10, 12, address=0x50000000), H(2, 12, 10, 12), *rest",
        "ValueError",
        "c / groups is 12; this kernel moves 8 elements at once",
    ),
    "address": ("H(2, 6, 5, 24, address=0x40000008), w, dx, r, *rest", "ValueError", "16 bytes"),
    "residual": ("dy, w, dx, H(2, 12, 5, 32), *rest", "ValueError", "the shape of dx"),
    "overlap": ("dy, w, dx, dx, *rest", "ValueError", "dx overlaps residual"),
    "in place": ("dy, H(24, 3, 3, 16, address=0x50000000), dx, r, *rest", "ValueError", "dx overlaps w"),
    "device": ("dy, w, H(2, 12, 10, 16, device=1), r, *rest", "ValueError", "dx is on cuda:1, but dy is on cuda:0"),
    "the residual's device": (
        "dy, w, dx, H(2, 12, 10, 16, device=1), *rest",
        "ValueError",
        "residual is on cuda:1, but dx is on cuda:0",
    ),
    "another geometry": ("dy, w, dx, r, 3, *rest[1:]", "ValueError", DO_NOT_FIT),
    "a stride of 0": ("dy, w, dx, r, 0, *rest[1:]", "ValueError", DO_NOT_FIT),
    "padding behind": ("dy, w, dx, r, *rest[:3], 3, *rest[4:]", "ValueError", DO_NOT_FIT),
    "a negative dilation": ("dy, w, dx, r, *rest[:7], -1", "ValueError", DO_NOT_FIT),
}


@pytest.fixture(scope="module")
def winner(folder: Path, toolchain: Toolchain, processes: Processes) -> Built:
    fields: dict[str, Any] = {"padding": 1, "stride": 2, "dtype": "float16", "epilogue": [{"op": "residual"}]}
    return build(level_0(**fields), folder, toolchain, processes)


def test_the_record_describes_the_call(winner: Built) -> None:
    launch = winner.launch
    assert [one.name for one in launch.operands] == ["dy", "w", "dx", "residual"]
    assert launch.extents == {
        "n": 2, "h": 12, "w": 10, "c": 16, "k": 24, "r": 3, "s": 3, "p": 6, "q": 5, "groups": 1
    }  # fmt: skip
    assert launch.scalars == [2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_call_launches_what_the_record_says(winner: Built, child: Child, fake_driver: Path) -> None:
    body = f"{OPERANDS}\nanswer = attempt('run', dy, w, dx, r, *rest)"
    answer, log = child(calls(winner.path, body), driver=fake_driver)
    assert answer is None
    (function,), (launch,) = winner.launch.functions, launches(log)
    assert (launch["grid"], launch["block"], launch["shared"]) == (function.grid, function.block, function.shared_bytes)


@pytest.fixture(scope="module")
def answers(winner: Built, folder: Path, processes: Processes, fake_driver: Path) -> dict[str, list[str]]:
    """Of all wrong calls, in one process."""
    attempts = ", ".join(f"{name!r}: attempt('run', {arguments})" for name, (arguments, _, _) in REFUSED.items())
    body = f"{OPERANDS}\nanswer = {{{attempts}}}"
    found, log = Child(folder, processes)(calls(winner.path, body), driver=fake_driver)
    assert launches(log) == []
    return dict(found)


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_cannot_be_right_is_refused(name: str, answers: dict[str, list[str]]) -> None:
    _, kind, said = REFUSED[name]
    got, message = answers[name]
    assert (got, said in message) == (kind, True), message


def test_a_kernel_without_phases_refuses_a_stride(
    folder: Path, toolchain: Toolchain, processes: Processes, child: Child, fake_driver: Path
) -> None:
    plain = build(level_0(padding=1, dtype="float16", epilogue=[{"op": "residual"}]), folder, toolchain, processes)
    body = f"{OPERANDS}\nanswer = attempt('run', dy, w, dx, r, *rest)"
    (got, message), log = child(calls(plain.path, body), driver=fake_driver)
    assert (got, DO_NOT_FIT in message, launches(log)) == ("ValueError", True, []), message


# ---- a job, the whole way


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    data = tmp_path_factory.mktemp("conv2d-dgrad-job")
    settings = load_settings(data_dir=data, port=0, workers=2)
    with embedded(settings) as running, Client(running.url, cache_dir=data / "client") as found:
        yield found


def test_a_job_ends_with_verified_winners_that_are_found_again(client: Client) -> None:
    layer = {"operator": "conv2d_dgrad", "n": 2, "h": 14, "w": 14, "c": 64, "k": 64, "r": 3, "s": 3, "padding": 1}
    problems = [
        {**layer, "name": "strided", "dtype": "float16", "stride": 2, "epilogue": [{"op": "residual"}]},
        {**layer, "name": "depthwise", "groups": 64, "dtype": "float16", "layout": "nchw"},
    ]
    job = client.tune(problems, target="sm_90a", search={"level": 1, "limit": 2})
    assert job.state == "done"
    assert {problem.name: problem.state for problem in job.problems} == {one["name"]: "done" for one in problems}
    assert all(problem.verdicts == {"ok": 2} for problem in job.problems)
    assert client.tune(problems, target="sm_90a", search={"level": 1, "limit": 2}).cached


def test_a_search_without_a_schedule_says_the_numbers(client: Client) -> None:
    large = {"operator": "conv2d_dgrad", "n": 2**15, "h": 128, "w": 128, "c": 8, "k": 8, "r": 3, "s": 3}
    job = client.tune([{**large, "dtype": "float16", "name": "large"}], target="sm_90a", search={"level": 0})
    (problem,) = job.problems
    assert problem.state == "failed"
    assert problem.rejected == {"index": 1}
