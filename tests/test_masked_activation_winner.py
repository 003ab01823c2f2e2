"""Winners of masked_activation, and of a matmul that has one behind it: their launches, what their libraries refuse,
what nvcc makes of them, and a job over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operators import operator
from codegen.search import Search
from cukiln.client import Client
from storage.settings import load_settings
from tests.fixtures_codegen import matmul
from tests.fixtures_compile import *  # noqa: F403
from tests.fixtures_compile import LIMITS, SM_90A
from tests.fixtures_library import *  # noqa: F403
from tests.fixtures_library import Built, Child, build, calls, launches
from tests.masked_kernels import POLYNOMIAL, masked, vectorised
from tests.test_tensor_ptx import codes_of, entries
from workers.build_winner import plan_launch
from workers.compile_file import PTX
from workers.processes import Processes
from workers.serve import embedded
from workers.toolchain import Toolchain

OP = operator("masked_activation")


def candidates(**fields: Any) -> dict[Any, Candidate]:
    """By algorithm, the first of level 1."""
    found: dict[Any, Candidate] = {}
    for one in lower(masked(**{"shape": (100_000,), **fields}), SM_90A, Search(level=1)).candidates:
        found.setdefault(one.schedule.get("algorithm"), one)
    return found


@pytest.mark.parametrize("mask", ["bits", "bytes"])
def test_the_launches_are_what_cost_and_work_say(mask: str, toolchain: Toolchain, processes: Processes) -> None:
    for one in candidates(mask=mask, dtype="float16").values():
        planned, cost = plan_launch(one, toolchain, processes, LIMITS), OP.cost(one.problem, one.schedule)
        work = OP.work(one.problem, one.schedule, SM_90A)
        assert (len(planned.functions), planned.workspace_bytes) == (cost.launches, cost.workspace_bytes)
        assert [run.grid[0] for run in planned.functions] == [work.blocks, *(other.blocks for other in work.others)]
        assert {run.block[0] for run in planned.functions} == {work.threads}
        assert max(run.shared_bytes for run in planned.functions) == OP.shared_bytes(one.kernel)


def test_one_pass_moves_16_bytes_at_once_and_spills_nothing(
    toolchain: Toolchain, processes: Processes, tmp_path: Path
) -> None:
    (level_0,) = lower(masked(2**22, dtype="float16"), SM_90A, Search(level=0)).candidates
    (code,) = codes_of([level_0.kernel], "sm_90a", tmp_path, toolchain, processes).values()
    loads = int(level_0.schedule.get("loads"))
    assert code.count("ld.global.nc.v4") == code.count("st.global.v4") == loads
    assert code.resources.spill_store_bytes == 0


@pytest.mark.parametrize("mask", ["bits", "bytes"])
def test_all_loads_come_before_a_function_that_branches(
    mask: str, toolchain: Toolchain, processes: Processes, tmp_path: Path
) -> None:
    one = vectorised(f"{mask}.gelu.silu", "float16", loads=4)
    codes_of([one], "sm_90a", tmp_path, toolchain, processes)
    (body,) = entries((tmp_path / PTX).read_text()).values()
    before, *_ = body.partition("ex2.")
    assert before.count("ld.global.nc.v4") == 4  # x
    assert before.count("ld.global.nc") == 8
    assert "st.global" not in before


OPERANDS = """
def H(*shape, **where): return T(shape, 'float16', **where)
x, out, mask = H(10, 100), H(10, 100, address=0x50000000), T((32,), 'int32', address=0x60000000)
rest = (0.5, -1.0, 0.25, 0.125)
"""
REFUSED = {
    "a tensor less": ("x, out", "TypeError", "2 tensors were given; this kernel takes 3: x, out, mask"),
    "no coefficients": ("x, out, mask, 0.5", "TypeError", "this call takes 3 tensors, then 4 numbers"),
    "dtype": ("T((10, 100)), out, mask, *rest", "TypeError", "x is float32; float16 is allowed"),
    "shape": ("x, H(100, 10, address=0x50000000), mask, *rest", "ValueError", "out must have the shape of x"),
    "strides": ("H(10, 100, strides=(200, 1)), out, mask, *rest", "ValueError", "x has stride 200 along axis 0"),
    "address": ("H(10, 100, address=0x70000008), out, mask, *rest", "ValueError", "a multiple of 16 bytes"),
    "a short mask": (
        "x, out, T((31,), 'int32'), *rest",
        "ValueError",
        "mask has 31 elements; 1000 elements of x need 32 words of 32 bits",
    ),
    "bytes for bits": ("x, out, T((10, 100), 'uint8'), *rest", "TypeError", "mask is uint8; int32 is allowed"),
    "mask over out": ("x, out, T((32,), 'int32', address=0x50000000), *rest", "ValueError", "out overlaps mask"),
    "device": ("x, out, T((32,), 'int32', device=1), *rest", "ValueError", "mask is on cuda:1, but x is on cuda:0"),
    "in place": ("x, x, mask, *rest", "ValueError", "out overlaps x"),
    "rank": ("H(*[1] * 9), out, mask, *rest", "ValueError", "operand 0 has rank 9; at most 8 is allowed"),
}


@pytest.fixture(scope="module")
def winner(folder: Path, toolchain: Toolchain, processes: Processes) -> Built:
    (found,) = lower(masked(1000, dtype="float16", where_clear=POLYNOMIAL), SM_90A, Search(level=0)).candidates
    return build(found, folder, toolchain, processes)


def test_a_call_launches_what_the_record_says(winner: Built, child: Child, fake_driver: Path) -> None:
    body = f"{OPERANDS}\nanswer = attempt('run', x, out, mask, *rest)"
    answer, log = child(calls(winner.path, body), driver=fake_driver)
    assert answer is None
    (function,), (launch,) = winner.launch.functions, launches(log)
    assert (launch["grid"], launch["block"], launch["shared"]) == (function.grid, function.block, function.shared_bytes)
    assert [one.name for one in winner.launch.operands] == ["x", "out", "mask"]


def test_empty_arrays_are_a_call_that_does_nothing(winner: Built, child: Child, fake_driver: Path) -> None:
    body = f"{OPERANDS}\nanswer = attempt('run', H(4, 0), H(4, 0), T((0,), 'int32'), *rest)"
    answer, log = child(calls(winner.path, body), driver=fake_driver)
    assert (answer, [one["grid"] for one in launches(log)]) == (None, [(1, 1, 1)])


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_cannot_be_right_is_refused(name: str, winner: Built, child: Child, fake_driver: Path) -> None:
    arguments, kind, said = REFUSED[name]
    body = f"{OPERANDS}\nanswer = attempt('run', {arguments})"
    (got, message), log = child(calls(winner.path, body), driver=fake_driver)
    assert (got, said in message) == (kind, True), message
    assert launches(log) == []


def test_a_matmul_refuses_a_packed_mask_of_another_length_or_outputs_with_gaps(
    folder: Path, toolchain: Toolchain, processes: Processes, child: Child, fake_driver: Path
) -> None:
    node = {"op": "masked_activation", "where_set": {"op": "relu"}}
    (level_0,) = lower(matmul(m=64, n=96, k=64, epilogue=[node]), SM_90A, Search(level=0)).candidates
    built = build(level_0, folder, toolchain, processes)
    body = """
    a, b, out = T((64, 64)), T((64, 96)), T((64, 96), address=0x50000000)
    wide = T((64, 96), strides=(100, 1), address=0x50000000)
    answer = [attempt("run", a, b, out, T((192,), "int32")), attempt("run", a, b, out, T((191,), "int32")),
              attempt("run", a, b, wide, T((192,), "int32")), attempt("run", a, b, out, T((64, 96), "uint8"))]
    """
    (fits, short, gaps, as_bytes), _ = child(calls(built.path, body), driver=fake_driver)
    assert fits is None
    assert short == ["ValueError", "mask must be a contiguous vector of 192 elements"]
    assert gaps[1].startswith("out has gaps between its rows or matrices")
    assert as_bytes == ["TypeError", "mask is uint8; int32 is allowed"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    data = tmp_path_factory.mktemp("masked-job")
    settings = load_settings(data_dir=data, port=0, workers=2)
    with embedded(settings) as running, Client(running.url, cache_dir=data / "client") as found:
        yield found


def test_a_job_ends_with_verified_winners_that_are_found_again(client: Client) -> None:
    layer = {"operator": "masked_activation", "shape": [8, 16, 100], "where_set": {"op": "gelu"}}
    node = {"op": "masked_activation", "where_set": {"op": "square"}, "where_clear": {"op": "relu"}}
    problems: list[dict[str, Any]] = [
        {**layer, "name": "bits", "dtype": "float16"},
        {**layer, "name": "bytes", "mask": "bytes", "where_clear": POLYNOMIAL},
        {"operator": "matmul", "name": "matmul", "m": 64, "n": 64, "k": 64, "epilogue": [node]},
    ]
    job = client.tune(problems, target="sm_90a", search={"level": 1, "limit": 3})
    assert {problem.name: problem.state for problem in job.problems} == {one["name"]: "done" for one in problems}
    assert all(problem.verdicts == {"ok": 3} for problem in job.problems)
    assert client.tune(problems, target="sm_90a", search={"level": 1, "limit": 3}).cached
