"""Winners of several launches with a workspace between them, called as frameworks and C programs call them."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operators import operator
from codegen.problem import Problem
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.text.cubin import read_cubin
from codegen.text.render_group import functions_of, symbols
from tests.support.fixtures.compile import LIMITS, SM_90A, probe_candidate
from tests.support.fixtures.library import Built, Child, build, calls, launches, plain
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes
from workers.steps.winner_library import plan_launch


def test_several_launches_share_a_workspace(two_launches: Built, child: Child, fake_driver: Path) -> None:
    body = """
    vectors = [T((1000,)), T((1000,))]
    answer = [
        attempt("workspace_bytes", 1000),
        attempt("workspace_bytes", *vectors),
        attempt("run", *vectors, T((4000,), "uint8", address=0x72000000), 2.5),
        attempt("run", *vectors, 0x73000000, 2.5),
        attempt("run", *vectors, 2.5),
        attempt("run", *vectors, T((3999,), "uint8"), 2.5),
        attempt("run", *vectors, T((4000,), "uint8", device=1), 2.5),
        attempt("run", *vectors, 0, "2.5"),
        attempt("run", *vectors, 0, 2.5),
        attempt("run", *vectors, "here", 2.5),
        attempt("run", *vectors, 0x73000008, 2.5),
        attempt("workspace_bytes", 1000, 2),
        attempt("run", *vectors, T((4000,), "uint8", strides=(0,)), 2.5),
        attempt("run", *vectors, T((2, 4000), "uint8", strides=(8000, 1)), 2.5),
    ]
    """
    answer, log = child(calls(two_launches.path, body), driver=fake_driver, FAKE_CUDA_PEEK="16")
    assert answer[:4] == [4000, 4000, None, None]
    assert answer[4] == [
        "TypeError",
        "3 arguments were given; this call takes 2 tensors, the workspace, then 1 numbers",
    ]
    assert answer[5] == ["ValueError", "the workspace has 3999 bytes; 4000 on cuda:0 are needed"]
    assert answer[6][0] == "ValueError"
    assert answer[7] == ["TypeError", "argument 3 must be a number"]
    assert answer[8] == ["ValueError", "the workspace is null; this call needs 4000 bytes"]
    assert answer[9] == ["TypeError", "the workspace must be a CUDA tensor or an address"]
    assert answer[10] == ["ValueError", "the workspace begins at 0x73000008; a multiple of 16 bytes is allowed"]
    assert answer[11] == ["TypeError", "2 extents were given; this kernel has 1"]
    assert answer[12] == answer[13] == ["ValueError", "the workspace is not contiguous"]
    seen = launches(log)
    assert [(each["grid"], each["block"], each["shared"]) for each in seen[:2]] == [
        (function.grid, function.block, function.shared_bytes) for function in two_launches.launch.functions
    ]
    assert [each["function"] for each in seen] == [1000, 1001, 1000, 1001]
    assert [each["peek"] for each in seen] == [0x72000000] * 2 + [0x73000000] * 2  # low half of the workspace pointer
    assert two_launches.launch.workspace_bytes == 4000


@pytest.fixture(scope="module")
def three_launches(folder: Path, toolchain: Toolchain, processes: Processes) -> Built:
    return build(probe_candidate(way="atomic"), folder, toolchain, processes)


@pytest.fixture(scope="module")
def sliced_workspace(folder: Path, toolchain: Toolchain, processes: Processes) -> Built:
    """A winner whose workspace is five slices of 4,000 bytes."""
    return build(probe_candidate(slices=5), folder, toolchain, processes)


def test_a_winner_of_three_launches_runs_them_in_order(three_launches: Built, child: Child, fake_driver: Path) -> None:
    symbols_of = symbols(three_launches.candidate.kernel)
    assert [function.symbol for function in three_launches.launch.functions] == symbols_of
    assert read_cubin(three_launches.build.cubin).symbols == set(symbols_of)
    body = 'answer = attempt("run", T((1000,)), T((1000,)), T((4000,), "uint8"), 2.5)'
    answer, log = child(calls(three_launches.path, body), driver=fake_driver)
    assert answer is None
    assert [launch["function"] for launch in launches(log)] == [1000, 1001, 1002]
    assert [launch["shared"] for launch in launches(log)] == [0, 0, 128]


def test_the_workspace_of_a_call_depends_on_its_launch_values(
    sliced_workspace: Built, child: Child, fake_driver: Path
) -> None:
    assert sliced_workspace.launch.workspace_bytes == 20_000
    assert sliced_workspace.launch.launch == {"slices": 5}
    assert [function.grid for function in sliced_workspace.launch.functions] == [(16, 5, 1), (16, 1, 1)]
    body = """
    extents, three = array(ctypes.c_int64, 1000), array(ctypes.c_int32, 3)
    pointers, scalars, workspace = array(ctypes.c_void_p, 4096, 8192), array(ctypes.c_double, 1.0), ctypes.c_void_p(64)
    launch, needed = library.cukiln_launch, library.cukiln_workspace_bytes
    answer = [
        needed(extents, None),
        needed(extents, three),
        needed(array(ctypes.c_int64, 2**40), three),
        launch(pointers, extents, None, scalars, workspace, None),
        launch(pointers, extents, three, scalars, workspace, None),
        launch(pointers, extents, None, scalars, None, None), error(),
        launch(pointers, extents, three, scalars, None, None), error(),
    ]
    """
    answer, log = child(plain(sliced_workspace.path, body), driver=fake_driver, FAKE_CUDA_CURRENT="0")
    assert answer[:3] == [20_000, 12_000, 12 * 2**40]
    assert answer[3:5] == [0, 0]
    assert answer[5] != 0 and answer[6] == "ValueError: the workspace is null; this call needs 20000 bytes"
    assert answer[7] != 0 and answer[8] == "ValueError: the workspace is null; this call needs 12000 bytes"
    assert [launch["grid"] for launch in launches(log)] == [(16, 5, 1), (16, 1, 1), (16, 3, 1), (16, 1, 1)]
    answer, _ = child(calls(sliced_workspace.path, 'answer = attempt("workspace_bytes", 1000)'), driver=fake_driver)
    assert answer == 20_000  # through tvm-ffi: with the winner's own values


SPLIT = {"m": 40, "n": 30, "k": 520, "layout": "nt"}


def split_problem(dtype: str) -> Problem:
    epilogue = [] if dtype == "int8" else [{"op": "relu"}]
    return operator("matmul").parse({"operator": "matmul", "dtype": dtype, **SPLIT, "epilogue": epilogue})


def split_candidates(dtype: str, **tunables: list[int | str]) -> list[Candidate]:
    """Matmuls on the CUDA cores (float32) or tensor cores, whose k is split in every way that is asked for."""
    problem = split_problem(dtype)
    search = Search.model_validate({"tunables": {"tile_k": [32], **tunables}})
    return list(lower(problem, SM_90A, search).candidates)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_plan_of_a_split_has_the_launches_and_the_workspace_of_its_cost(
    dtype: str, toolchain: Toolchain, processes: Processes
) -> None:
    by_way: dict[tuple[str, int], Candidate] = {}
    for candidate in split_candidates(dtype, split=["none", "workspace", "atomic"], split_k=[1, 2, 5]):
        values = candidate.schedule.as_dict()
        by_way.setdefault((str(values["split"]), int(values["split_k"])), candidate)
    assert set(by_way) == {("none", 1), *((way, slices) for way in ("workspace", "atomic") for slices in (2, 5))}
    for (way, slices), candidate in by_way.items():
        launch = plan_launch(candidate, toolchain, processes, LIMITS)
        cost = operator("matmul").cost(candidate.problem, candidate.schedule)
        assert len(launch.functions) == cost.launches == {"none": 1, "workspace": 2, "atomic": 3}[way]
        # Rows of 32 sums: 30 and two that make the row whole vectors of 16 bytes.
        parts = {"none": 0, "workspace": slices, "atomic": 1}[way]
        assert launch.workspace_bytes == cost.workspace_bytes == parts * 40 * 32 * 4
        (run,) = (
            each for each, name in zip(launch.functions, functions_of(candidate.kernel), strict=True) if name == "run"
        )
        assert run.grid[1] == slices == launch.launch["split_k"]


def test_a_call_of_a_split_needs_the_workspace_of_its_own_extents(
    folder: Path, toolchain: Toolchain, processes: Processes, child: Child, fake_driver: Path
) -> None:
    (candidate, *_) = split_candidates("float16", split=["workspace"], split_k=[5])
    split = build(candidate, folder, toolchain, processes)
    body = """
    a, b, c = T((40, 520), "float16"), T((30, 520), "float16"), T((40, 30), "float16")
    small = [T((8, 520), "float16"), b, T((8, 30), "float16")]
    short = [T((40, 64), "float16"), T((30, 64), "float16"), c]  # two steps of 32: no more slices than that
    answer = [
        attempt("workspace_bytes", a, b, c),
        attempt("workspace_bytes", *small),
        attempt("workspace_bytes", *short),
        attempt("run", a, b, c, T((25600,), "uint8")),
        attempt("run", *small, T((5120,), "uint8")),
        attempt("run", *short, T((10240,), "uint8")),
        attempt("run", a, b, c, T((25599,), "uint8")),
        attempt("run", a, b, c),
    ]
    """
    answer, log = child(calls(split.path, body), driver=fake_driver)
    assert answer[:3] == [5 * 40 * 128, 5 * 8 * 128, 2 * 40 * 128]
    assert answer[3:6] == [None] * 3
    assert answer[6] == ["ValueError", "the workspace has 25599 bytes; 25600 on cuda:0 are needed"]
    assert answer[7] == [
        "TypeError",
        "3 arguments were given; this call takes 3 tensors, the workspace, then 0 numbers",
    ]
    assert [launch["grid"][1] for launch in launches(log)] == [5, 1, 5, 1, 2, 1]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("limit", [0, 5119, 5120, 10_240, 25_600])
def test_a_cap_on_the_workspace_rejects_exactly_what_needs_more_and_says_how_much(dtype: str, limit: int) -> None:
    ways = {"split": ["none", "workspace", "atomic"], "split_k": [1, 2, 5]}
    own, problem = operator("matmul"), split_problem(dtype)
    search = Search.model_validate({"tunables": {"tile_k": [32], "fragments": [1], **ways}})
    every = lower(problem, SM_90A, search).candidates
    within = lower(problem, SM_90A, search, limit)
    needed = {each.id: own.cost(problem, each.schedule).workspace_bytes for each in every}
    assert {candidate.id for candidate in within.candidates} == {each for each, size in needed.items() if size <= limit}
    over = [size for size in needed.values() if size > limit]
    assert set(needed.values()) == {0, 5120, 10_240, 25_600}
    if not over:
        assert "workspace" not in within.rejections
        return
    found = within.rejections["workspace"]
    assert found.count == len(over)
    size = own.cost(problem, Schedule.of(found.example)).workspace_bytes
    assert found.message == f"needs {size} bytes of workspace, the limit is {limit}"


def test_a_request_for_equal_bits_rejects_exactly_the_atomic_splits() -> None:
    ways = {"split": ["none", "workspace", "atomic"], "split_k": [1, 2, 5]}
    search = Search.model_validate({"tunables": {"tile_k": [32], "fragments": [1], **ways}})
    for dtype, differing in (("float16", {"atomic"}), ("int8", set())):  # sums of integers are the same in any order
        every = lower(split_problem(dtype), SM_90A, search).candidates
        equal = lower(split_problem(dtype), SM_90A, search, deterministic=True)
        assert [c for c in every if c.schedule.get("split") not in differing] == list(equal.candidates)
        assert ("deterministic" in equal.rejections) == bool(differing)
        assert {c.schedule.get("split") for c in every} == {"none", "workspace", "atomic"}
