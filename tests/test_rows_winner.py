"""Winners of softmax and the norms: what nvcc makes of them, what their libraries launch and refuse, and a job over
HTTP."""

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
from tests.fixtures_compile import *  # noqa: F403
from tests.fixtures_compile import LIMITS, SM_90A
from tests.fixtures_library import *  # noqa: F403
from tests.fixtures_library import Built, Child, build, calls, launches
from tests.row_kernels import OPERATORS, problem
from tests.test_tensor_ptx import codes_of
from workers.build_winner import plan_launch
from workers.processes import Processes
from workers.serve import embedded
from workers.toolchain import Toolchain


def by_algorithm(name: str, *shape: int, **fields: Any) -> dict[Any, Candidate]:
    """The first of level 1 of each."""
    found: dict[Any, Candidate] = {}
    for one in lower(problem(name, *shape, **fields), SM_90A, Search(level=1)).candidates:
        found.setdefault(one.schedule.get("algorithm"), one)
    return found


@pytest.mark.parametrize("name", OPERATORS)
def test_the_launches_are_what_cost_and_work_say(name: str, toolchain: Toolchain, processes: Processes) -> None:
    own = operator(name)
    found = by_algorithm(name, 1000, 1024, dtype="float16")
    assert set(found) == {"registers", "shared", "online"}
    for one in found.values():
        planned, cost = plan_launch(one, toolchain, processes, LIMITS), own.cost(one.problem, one.schedule)
        work = own.work(one.problem, one.schedule, SM_90A)
        assert (len(planned.functions), planned.workspace_bytes) == (cost.launches, cost.workspace_bytes)
        (run,) = planned.functions
        assert (run.grid[0], run.block[0]) == (work.blocks, work.threads)
        assert run.shared_bytes == own.shared_bytes(one.kernel)


def test_rows_move_16_bytes_at_once_and_nothing_spills(
    toolchain: Toolchain, processes: Processes, tmp_path: Path
) -> None:
    asked = {
        (name, algorithm): one.kernel
        for name in OPERATORS
        for algorithm, one in by_algorithm(name, 1000, 8192, dtype="bfloat16").items()
    }
    codes = codes_of(list(asked.values()), "sm_90a", tmp_path, toolchain, processes)
    for (name, algorithm), kernel in asked.items():
        loads = {one.rpartition(".")[0] for one in codes[kernel].instructions if one.startswith("ld.global")}
        # Three elements of a row are looked at before it is normalised online.
        single = {"ld.global.nc"} if (name, algorithm) == ("layer_norm", "online") else set()
        assert loads == {"ld.global.nc.v4"} | single
        assert codes[kernel].count("st.global.v4") > 0
        assert codes[kernel].resources.spill_store_bytes == codes[kernel].resources.stack_bytes == 0


OPERANDS = """
def H(*shape, **where): return T(shape, 'float16', **where)
x, out = H(3, 5, 1024), H(3, 5, 1024, address=0x50000000)
gamma, beta = H(1024, address=0x60000000), H(1024, address=0x61000000)
"""
REFUSED = {
    "a tensor less": (
        "x, out, gamma, 1e-5",
        "TypeError",
        "3 tensors were given; this kernel takes 4: x, out, gamma, beta",
    ),
    "no epsilon": ("x, out, gamma, beta", "TypeError", "this call takes 4 tensors, then 1 numbers"),
    "dtype": ("x, T((3, 5, 1024)), gamma, beta, 1e-5", "TypeError", "out is float32; float16 is allowed"),
    "shape": ("x, H(15, 1024, address=0x50000000), gamma, beta, 1e-5", "ValueError", "out must have the shape of x"),
    "strides": ("H(3, 5, 1024, strides=(10000, 1024, 1)), out, gamma, beta, 1e-5", "ValueError", "x has stride 10000"),
    "address": ("H(3, 5, 1024, address=0x70000008), out, gamma, beta, 1e-5", "ValueError", "a multiple of 16 bytes"),
    "vectors": (
        "H(4, 1020), H(4, 1020, address=0x50000000), H(1020), H(1020), 1e-5",
        "ValueError",
        "rows of x have 1020 elements; this kernel moves 8 at once",
    ),
    "a longer row": (
        "H(4, 8192), H(4, 8192, address=0x50000000), H(8192), H(8192), 1e-5",
        "ValueError",
        "rows of x have 8192 elements; this kernel holds rows of at most 1024",
    ),
    "gamma": ("x, out, H(512), beta, 1e-5", "ValueError", "gamma must be a contiguous vector of 1024 elements"),
    "beta": ("x, out, gamma, H(1024, 1), 1e-5", "ValueError", "beta must be a contiguous vector of 1024 elements"),
    "in place": ("x, x, gamma, beta, 1e-5", "ValueError", "out overlaps x"),
    "device": ("x, out, H(1024, device=1), beta, 1e-5", "ValueError", "gamma is on cuda:1, but x is on cuda:0"),
    "over gamma": ("x, out, H(1024, address=0x50000000), beta, 1e-5", "ValueError", "out overlaps gamma"),
    "a number for rows": ("T((), 'float16'), T((), 'float16'), gamma, beta, 1e-5", "ValueError", "x has rank 0"),
}


@pytest.fixture(scope="module")
def winner(folder: Path, toolchain: Toolchain, processes: Processes) -> Built:
    return build(by_algorithm("layer_norm", 15, 1024, dtype="float16")["registers"], folder, toolchain, processes)


def test_a_call_launches_what_the_record_says(winner: Built, child: Child, fake_driver: Path) -> None:
    body = f"{OPERANDS}\nanswer = attempt('run', x, out, gamma, beta, 1e-5)"
    answer, log = child(calls(winner.path, body), driver=fake_driver)
    assert answer is None
    (function,), (launch,) = winner.launch.functions, launches(log)
    assert (launch["grid"], launch["block"], launch["shared"]) == (function.grid, function.block, function.shared_bytes)
    assert winner.launch.extents == {"rows": 15, "columns": 1024}
    assert winner.launch.scalars == [1e-5]


@pytest.mark.parametrize("shape", ["0, 1024", "4, 0"])
def test_empty_arrays_are_a_call_that_does_nothing(shape: str, winner: Built, child: Child, fake_driver: Path) -> None:
    columns = shape.partition(", ")[2]
    body = f"{OPERANDS}\nanswer = attempt('run', H({shape}), H({shape}), H({columns}), H({columns}), 1e-5)"
    answer, log = child(calls(winner.path, body), driver=fake_driver)
    assert answer is None and len(launches(log)) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_cannot_be_right_is_refused(name: str, winner: Built, child: Child, fake_driver: Path) -> None:
    arguments, kind, said = REFUSED[name]
    body = f"{OPERANDS}\nanswer = attempt('run', {arguments})"
    (got, message), log = child(calls(winner.path, body), driver=fake_driver)
    assert (got, said in message) == (kind, True), message
    assert launches(log) == []


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    data = tmp_path_factory.mktemp("rows-job")
    settings = load_settings(data_dir=data, port=0, workers=2)
    with embedded(settings) as running, Client(running.url, cache_dir=data / "client") as found:
        yield found


def test_a_job_ends_with_verified_winners_that_are_found_again(client: Client) -> None:
    problems: list[dict[str, Any]] = [
        {"operator": "softmax", "name": "softmax", "shape": [4, 8, 128], "dtype": "float16"},
        {"operator": "layer_norm", "name": "layer_norm", "shape": [64, 768], "dtype": "bfloat16"},
        {"operator": "rms_norm", "name": "rms_norm", "shape": [64, 1001], "out_dtype": "float16"},
        {"operator": "softmax", "name": "online", "shape": [2, 100000], "dtype": "float32"},
    ]
    job = client.tune(problems, target="sm_90a", search={"level": 1, "limit": 3})
    assert {one.name: one.state for one in job.problems} == {one["name"]: "done" for one in problems}
    assert all(one.verdicts == {"ok": 3} for one in job.problems), [one.verdicts for one in job.problems]
    assert client.tune(problems, target="sm_90a", search={"level": 1, "limit": 3}).cached
