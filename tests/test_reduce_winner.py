"""Reduce's winners: what nvcc makes of them, what their libraries launch and refuse, and a job over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import public_shape
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.reduce.problem import FUNCTIONS, OF_NOTHING
from codegen.predict_before import predict_before
from codegen.search import Search
from cukiln.client import Client
from storage.settings import load_settings
from tests.fixtures_compile import *  # noqa: F403
from tests.fixtures_compile import LIMITS, SM_90A
from tests.fixtures_library import *  # noqa: F403
from tests.fixtures_library import Built, Child, build, calls, launches
from tests.reduce_kernels import reduction
from tests.test_tensor_ptx import Code, codes_of
from workers.build_winner import plan_launch
from workers.processes import Processes
from workers.serve import embedded
from workers.toolchain import Toolchain

OP = operator("reduce")
GRADIENT: dict[str, Any] = {"shape": [32, 28, 28, 128], "axes": [0, 1, 2], "map": "gelu_grad", "write_map": True}


def level_0(**fields: Any) -> Candidate:
    (found,) = lower(reduction(**fields), SM_90A, Search(level=0)).candidates
    return found


def public(name: str) -> dict[str, Any]:
    return {field: value for field, value in public_shape(name).items() if field not in ("name", "operator")}


# ---- what nvcc makes of them


@pytest.fixture(scope="module")
def codes(
    toolchain: Toolchain, processes: Processes, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Kernel, Code]]:
    asked = {
        "columns": level_0(**public("mnist/b1000_conv1")).kernel,
        "fp16 columns": level_0(**public("ffn/bias")).kernel,
        "rows": level_0(**public("rowsum")).kernel,
        "fp16 maximum": level_0(**public("rowmax")).kernel,
        "all": level_0(**public("all")).kernel,
        "middle": level_0(**public("middle")).kernel,
        "gradient": level_0(**GRADIENT).kernel,
        "variance of rows": level_0(shape=[4096, 4096], axes=[1], fn="variance").kernel,
        "logsumexp of rows": level_0(shape=[4096, 16384], axes=[1], fn="logsumexp", dtype="bfloat16").kernel,
        "argmax of columns": level_0(shape=[4096, 4096], axes=[0], fn="argmax").kernel,
    }
    folder = tmp_path_factory.mktemp("codes")
    found = codes_of(list(asked.values()), "sm_90a", folder, toolchain, processes)
    return {name: (kernel, found[kernel]) for name, kernel in asked.items()}


def test_every_thread_has_several_loads_of_16_bytes_in_flight(codes: dict[str, tuple[Kernel, Code]]) -> None:
    for name, (kernel, code) in codes.items():
        wide = code.count("ld.global.nc.v4")
        assert wide >= int(kernel.tunables.get("unroll")) >= 4, name


def test_written_maps_leave_in_16_bytes(codes: dict[str, tuple[Kernel, Code]]) -> None:
    kernel, code = codes["gradient"]
    assert code.count("st.global.v4") >= int(kernel.tunables.get("unroll"))


def test_nothing_is_added_atomically(codes: dict[str, tuple[Kernel, Code]]) -> None:
    assert {name: code.count("atom") + code.count("red.") for name, (_, code) in codes.items()} == dict.fromkeys(
        codes, 0
    )


def test_no_kernel_spills(codes: dict[str, tuple[Kernel, Code]]) -> None:
    assert {name: code.resources.spill_store_bytes for name, (_, code) in codes.items()} == dict.fromkeys(codes, 0)


# ---- what the launch code does, and what is predicted of it


@pytest.mark.parametrize(
    "fields",
    [
        public("mnist/b100_conv1"), public("rowmax"), public("all"), public("middle"), GRADIENT,
        {"shape": [64, 96, 56, 56], "axes": [0, 2, 3]}, {"shape": [3, 5], "axes": [1], "fn": "variance"},
    ],
)  # fmt: skip
def test_the_launches_are_what_cost_and_work_say(
    fields: dict[str, Any], toolchain: Toolchain, processes: Processes
) -> None:
    problem = reduction(**fields)
    found = lower(problem, SM_90A, Search(level=1)).candidates
    chosen = {(one.schedule.get("split"), one.schedule.get("lanes")): one for one in found}
    for one in list(chosen.values())[:3]:
        planned, cost = plan_launch(one, toolchain, processes, LIMITS), OP.cost(problem, one.schedule)
        work = OP.work(problem, one.schedule, SM_90A)
        assert (len(planned.functions), planned.workspace_bytes) == (cost.launches, cost.workspace_bytes)
        run = planned.functions[0]
        assert run.grid[0] * run.grid[1] == work.blocks
        assert (run.block[0], run.shared_bytes) == (work.threads, work.dynamic_shared_bytes)
        assert [other.blocks for other in work.others] == [one.grid[0] for one in planned.functions[1:]]


def test_a_problem_that_few_outputs_divide_is_predicted_faster_in_slices() -> None:
    found = lower(reduction(**public("mnist/b1000_conv1")), SM_90A, Search(level=1)).candidates
    ranked = sorted(found, key=lambda one: predict_before(one, SM_90A).us)
    assert ranked[0].schedule.get("split") == "workspace"
    assert ranked[-1].schedule.get("split") == "none"
    # 43 MB at an H100's 3,350 GB/s take 13 µs.
    assert 13.0 < predict_before(ranked[0], SM_90A).us < 26.0


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_comparisons_are_no_additions(fn: str) -> None:
    candidate = next(
        one
        for one in lower(reduction(shape=[676000, 16], fn=fn), SM_90A, Search(level=1)).candidates
        if one.schedule.get("split") == "workspace"
    )
    work = OP.work(candidate.problem, candidate.schedule, SM_90A)
    compared = fn in ("max", "min", "argmax")
    assert [one.fma == 0.0 for one in (work, *work.others)] == [compared, compared]


def test_bytes_are_those_of_each_operand_once() -> None:
    cost = OP.cost(reduction(**GRADIENT), level_0(**GRADIENT).schedule)
    elements = 32 * 28 * 28 * 128
    assert (cost.bytes_read, cost.bytes_written) == (2 * 4 * elements, 4 * elements + 4 * 128)


# ---- what a library refuses

OPERANDS = """
def F(*shape, **where): return T(shape, 'float32', **where)
dy, x = F(2, 12, 10, 16), F(2, 12, 10, 16)
out, dx = F(16, address=0x50000000), F(2, 12, 10, 16, address=0x60000000)
channels = (14,)
"""
REFUSED = {
    "a tensor less": ("dy, x, out", "TypeError", "3 tensors were given; this kernel takes 4: dy, x, out, dx"),
    "no axes": ("dy, x, out, dx", "TypeError", "this call takes 4 tensors, then 1 number"),
    "dtype": ("dy, T((2, 12, 10, 16), 'float16'), out, dx, *channels", "TypeError", "x is float16; float32 is allowed"),
    "rank": ("F(), x, out, dx, *channels", "ValueError", "dy has rank 0; 1 to 8 is allowed"),
    "shape": ("dy, F(2, 12, 5, 32), out, dx, *channels", "ValueError", "x must have the shape and the strides of dy"),
    "strides": (
        "dy, x, out, F(2, 12, 10, 16, strides=(3840, 160, 16, 1), address=0x60000000), *channels",
        "ValueError",
        "dx must have the shape and the strides of dy",
    ),
    "a stride of 0": ("F(2, 12, 10, 16, strides=(0, 160, 16, 1)), x, out, dx, *channels", "ValueError", "stride 0"),
    "gaps in out": (
        "dy, x, F(16, strides=(2,), address=0x50000000), dx, *channels",
        "ValueError",
        "out must be packed",
    ),
    "address": ("F(2, 12, 10, 16, address=0x40000004), x, out, dx, *channels", "ValueError", "16 bytes"),
    "overlap": ("dy, x, out, dy, *channels", "ValueError", "dx overlaps dy"),
    "other axes": ("dy, x, out, dx, 12", "ValueError", "an extent is below 1 or beyond what the kernel can index"),
    "no axes at all": ("dy, x, out, dx, 0", "ValueError", "an extent is below 1 or beyond"),
    "another output": (
        "dy, x, F(8, address=0x50000000), dx, *channels",
        "ValueError",
        "an extent is below 1 or beyond",
    ),
}


@pytest.fixture(scope="module")
def winner(folder: Path, toolchain: Toolchain, processes: Processes) -> Built:
    gradient = {**GRADIENT, "shape": [2, 12, 10, 16], "map": "relu_grad"}
    return build(level_0(**gradient), folder, toolchain, processes)


def test_the_record_describes_the_call(winner: Built) -> None:
    assert [(one.name, one.role) for one in winner.launch.operands] == [
        ("dy", "in"), ("x", "in"), ("out", "out"), ("dx", "out"),
    ]  # fmt: skip
    assert winner.launch.extents["outputs"] == 16
    assert winner.launch.scalars == [14.0]


def test_a_call_launches_what_the_record_says(winner: Built, child: Child, fake_driver: Path) -> None:
    body = f"{OPERANDS}\nanswer = attempt('run', dy, x, out, dx, *channels)"
    answer, log = child(calls(winner.path, body), driver=fake_driver)
    assert answer is None
    (function,), (launch,) = winner.launch.functions, launches(log)
    assert (launch["grid"], launch["block"], launch["shared"]) == (function.grid, function.block, function.shared_bytes)


def test_a_kernel_takes_other_extents_and_ranks_of_its_lists(winner: Built, child: Child, fake_driver: Path) -> None:
    arguments = "F(500, 16), F(500, 16), out, F(500, 16, address=0x60000000), 2"
    body = f"{OPERANDS}\nanswer = attempt('run', {arguments})"
    answer, log = child(calls(winner.path, body), driver=fake_driver)
    assert answer is None
    assert len(launches(log)) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_cannot_be_right_is_refused(name: str, winner: Built, child: Child, fake_driver: Path) -> None:
    arguments, kind, said = REFUSED[name]
    body = f"{OPERANDS}\nanswer = attempt('run', {arguments})"
    (got, message), log = child(calls(winner.path, body), driver=fake_driver)
    assert (got, said in message) == (kind, True), message
    assert launches(log) == []


@pytest.fixture(scope="module")
def in_either_order(folder: Path, toolchain: Toolchain, processes: Processes) -> dict[bool, Built]:
    """By whether outputs are scattered. The kernels' lists of axes are alike."""
    fields: dict[bool, dict[str, Any]] = {
        False: {"shape": [12, 3, 16], "axes": [1]},
        True: {"shape": [16, 3, 12], "axes": [1], "strides": [1, 16, 48]},
    }
    return {scattered: build(level_0(**one), folder, toolchain, processes) for scattered, one in fields.items()}


# Scattered outputs may begin anywhere: they are written one at a time.
PERMUTED = "T((16, 3, 12), 'float32', strides=(1, 16, 48)), T((16, 12), 'float32', address=0x50000004), 2"
PACKED = "T((12, 3, 16), 'float32'), T((12, 16), 'float32', address=0x50000000), 2"


@pytest.mark.parametrize(("scattered", "arguments"), [(True, PERMUTED), (True, PACKED), (False, PACKED)])
def test_arrays_of_its_order_are_taken_by_a_kernel(
    scattered: bool, arguments: str, in_either_order: dict[bool, Built], child: Child, fake_driver: Path
) -> None:
    body = f"answer = attempt('run', {arguments})"
    answer, log = child(calls(in_either_order[scattered].path, body), driver=fake_driver)
    assert answer is None
    assert len(launches(log)) == 1


def test_a_permuted_array_is_refused_where_outputs_are_not_scattered(
    in_either_order: dict[bool, Built], child: Child, fake_driver: Path
) -> None:
    body = f"answer = attempt('run', {PERMUTED.replace('0x50000004', '0x50000000')})"
    (kind, message), log = child(calls(in_either_order[False].path, body), driver=fake_driver)
    assert kind == "ValueError"
    assert "an extent is below 1 or beyond what the kernel can index" in message
    assert launches(log) == []


CALLED = ("sum", "mean", "max", "argmax")


@pytest.fixture(scope="module")
def of_each_function(folder: Path, toolchain: Toolchain, processes: Processes) -> dict[str, Built]:
    return {fn: build(level_0(shape=[30, 16], fn=fn), folder, toolchain, processes) for fn in CALLED}


@pytest.mark.parametrize("fn", CALLED)
def test_no_values_are_refused_where_a_function_has_none_of_them(
    fn: str, of_each_function: dict[str, Built], child: Child, fake_driver: Path
) -> None:
    out = "int32" if fn == "argmax" else "float32"
    arguments = f"T((EXTENT, 16), 'float32'), T((16,), '{out}', address=0x50000000), 2"
    attempts = [f"attempt('run', {arguments.replace('EXTENT', extent)})" for extent in ("0", "5")]
    body = f"answer = [{', '.join(attempts)}]"
    (empty, full), log = child(calls(of_each_function[fn].path, body), driver=fake_driver)
    assert full is None
    if fn in OF_NOTHING:
        assert empty is None
    else:
        assert empty[0] == "ValueError"
        assert "axis 0 of x has extent 0; this kernel's function has no value of no elements" in empty[1]
    assert len(launches(log)) == (2 if fn in OF_NOTHING else 1)


# ---- a job, the whole way


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    data = tmp_path_factory.mktemp("reduce-job")
    settings = load_settings(data_dir=data, port=0, workers=2)
    with embedded(settings) as running, Client(running.url, cache_dir=data / "client") as found:
        yield found


def test_a_job_ends_with_verified_winners_that_are_found_again(client: Client) -> None:
    problems = [
        {"name": "bias", "operator": "reduce", **public("mnist/b100_conv1")},
        {"name": "gradient", "operator": "reduce", **GRADIENT},
        {
            "name": "channels first",
            "operator": "reduce",
            "shape": [8, 64, 28, 28],
            "axes": [0, 2, 3],
            "dtype": "float16",
        },
        {"name": "argmax", "operator": "reduce", "shape": [512, 1000], "axes": [-1], "fn": "argmax"},
        {"name": "whole numbers", "operator": "reduce", "shape": [9, 7, 5], "axes": [0, 2], "dtype": "int32"},
        {"name": "nothing", "operator": "reduce", "shape": [0, 16], "axes": [0]},
    ]
    job = client.tune(problems, target="sm_90a", search={"level": 1, "limit": 2})
    assert {problem.name: problem.state for problem in job.problems} == {one["name"]: "done" for one in problems}
    assert {problem.name: set(problem.verdicts) for problem in job.problems} == {
        one["name"]: {"ok"} for one in problems
    }
    assert client.tune(problems, target="sm_90a", search={"level": 1, "limit": 2}).cached
