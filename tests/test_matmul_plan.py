"""What Python says of a matmul's launches is what its launch code does: functions, grids, shared memory, workspace."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.operators.matmul.grid import k_steps
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.split import CODES, all_steps, grid_blocks
from codegen.render_group import HOST_HEADERS, header_text, operator_text, render_config
from codegen.schedule import Schedule
from codegen.targets import target
from tests.cpu_helpers import toolchain
from tests.fixtures_codegen import default_candidate, matmul

OP = operator("matmul")
SIMT: dict[str, Any] = {
    "tile_m": 32, "tile_n": 64, "tile_k": 8, "thread_m": 4, "thread_n": 4, "warp_m": 4, "stages": 2, "fragments": 1,
    "padding": 4, "unroll_k": 4, "min_blocks": 1, "raster": 0, "split": "none", "split_k": 1,
}  # fmt: skip
TENSOR: dict[str, Any] = {
    "tile_m": 32, "tile_n": 64, "tile_k": 32, "warps_m": 2, "warps_n": 2, "stages": 2, "fragments": 1, "mma_k": 16,
    "copy": "cp_async", "epilogue_path": "shared", "static_k": 0, "min_blocks": 1, "maxnreg": 0, "raster": 0,
    "split": "none", "split_k": 1, "stream_blocks": 0,
}  # fmt: skip
WAYS: list[dict[str, Any]] = [
    {},
    {"split": "workspace", "split_k": 5},
    {"split": "atomic", "split_k": 3},
    # More slices than steps: bound to what there is, as the exact number of the workspace says.
    {"split": "workspace", "split_k": 64},
]
EXTENTS = [
    {"m": 100, "n": 136, "k": 320},
    {"m": 33, "n": 65, "k": 300, "batch": 3},
    {"m": 32, "n": 64, "k": 160, "batch": 2, "ldc": 100},
]
INT8 = {"dtype": "int8", "layout": "nt"}


def cases() -> list[Candidate]:
    found = []
    for extents in EXTENTS:
        for way in WAYS:
            found.append(candidate(extents, {**SIMT, **way}))
            found.append(candidate({**extents, "dtype": "float16"}, {**TENSOR, **copied(extents), **way}))
        stream = {"split": "stream", "stream_blocks": 7, "tile_k": 64, "mma_k": 32, "stages": 2, "copy": "registers"}
        found.append(candidate({**extents, **INT8}, {**TENSOR, **stream}))
        # A ring of bytes is smaller than what the epilogue exchanges.
        small = {"tile_k": 32, "mma_k": 32, "copy": "registers", "stages": 1}
        found.append(candidate({**extents, **INT8}, {**TENSOR, **small}))
    return found


def copied(extents: dict[str, int]) -> dict[str, Any]:
    return {} if extents["n"] % 2 == 0 else {"copy": "registers"}


def candidate(fields: dict[str, Any], schedule: dict[str, Any]) -> Candidate:
    return OP.candidate(matmul(**fields), Schedule.of(schedule))


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Of each case: the workspace, then function, blocks along x and y, threads and shared bytes of each launch."""
    folder = tmp_path_factory.mktemp("plans")
    every = cases()
    kernels = {one.kernel.id: one.kernel for one in every}
    parts = ["#define CUKILN_HOST 1\n#include <cstdio>\n", *map(header_text, HOST_HEADERS), operator_text("matmul")]
    parts += [f"namespace {one.namespace} {{\n{render_config(one)}}}\n" for one in kernels.values()]
    parts += [
        "template <class C> void show(const int64_t* extents, const int32_t* launch) {\n"
        "  using namespace cukiln::matmul;\n"
        "  void* pointers[16] = {};\n  const double scalars[16] = {};\n  cukiln::Launch launches[4];\n"
        "  const int count = plan<C>(bind<C>(pointers, extents, launch, scalars, nullptr), launches);\n"
        '  std::printf("%lld", static_cast<long long>(workspace_bytes<C>(extents, launch)));\n'
        "  for (int i = 0; i < count; ++i)\n"
        '    std::printf(" %d %u %u %u %u", launches[i].function, launches[i].grid[0], launches[i].grid[1],\n'
        "                launches[i].block[0], launches[i].shared_bytes);\n"
        '  std::printf("\\n");\n}\nint main() {\n'
    ]
    for one in every:
        extents = ", ".join(map(str, OP.extents(one.problem)))
        launch = ", ".join(map(str, OP.launch_values(one.schedule)))
        parts.append(f"  {{ const int64_t extents[] = {{{extents}}}; const int32_t launch[] = {{{launch}}};\n")
        parts.append(f"    show<{one.kernel.namespace}::Config>(extents, launch); }}\n")
    (folder / "plans.cpp").write_text("".join([*parts, "}\n"]))
    command = [str(toolchain().host_compiler), "-std=c++17", "-O0", "-o", "plans", "plans.cpp"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    shown = subprocess.run([str(folder / "plans")], capture_output=True, text=True, timeout=60, check=True)
    return [list(map(int, line.split())) for line in shown.stdout.splitlines()]


def bound(one: Candidate) -> Schedule:
    """The schedule with as many slices or blocks as a call with so few steps gets; the rules allow no more."""
    t = one.schedule.as_dict()
    assert isinstance(one.problem, MatmulProblem)
    t["split_k"] = min(int(t["split_k"]), k_steps(one.problem.k, int(t["tile_k"])))
    if t["split"] == "stream":
        t["stream_blocks"] = min(int(t["stream_blocks"]), all_steps(one.problem, t))
    return Schedule.of(t)


def test_every_plan_is_what_cost_and_work_say(plans: list[list[int]]) -> None:
    every = cases()
    assert len(plans) == len(every) == 30
    for one, (workspace, *numbers) in zip(every, plans, strict=True):
        assert isinstance(one.problem, MatmulProblem)
        schedule, kernel = bound(one), one.kernel
        cost = OP.cost(one.problem, schedule)
        launches = [numbers[first : first + 5] for first in range(0, len(numbers), 5)]
        names = OP.functions(kernel)
        assert workspace == cost.workspace_bytes, schedule
        assert [launch[0] for launch in launches] == list(range(cost.launches)), schedule
        assert [launch[3] for launch in launches] == [OP.launch_bounds(kernel, name).threads for name in names]
        for name, (_, x, y, _, shared) in zip(names, launches, strict=True):
            assert shared == (OP.shared_bytes(kernel) if name == "run" else 0)
            if name == "run":
                assert x * y == grid_blocks(one.problem, schedule.as_dict())


def test_the_work_of_the_other_launches_has_their_blocks(plans: list[list[int]]) -> None:
    for one, (_, *numbers) in zip(cases(), plans, strict=True):
        work = OP.work(one.problem, bound(one), target("sm_90a"))
        names = OP.functions(one.kernel)
        blocks = {name: numbers[5 * i + 1] * numbers[5 * i + 2] for i, name in enumerate(names)}
        assert work.blocks == blocks.pop("run")
        assert [other.blocks for other in work.others] == list(blocks.values())


def test_the_codes_of_the_ways_are_those_of_the_kernel() -> None:
    text = operator_text("matmul")
    assert all(f"split_{name} = {code}" in text for name, code in CODES.items())
    assert default_candidate(matmul()).schedule.get("split") in CODES
