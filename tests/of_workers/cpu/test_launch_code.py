"""What launch code must say before anything runs is asked by the plan: how much workspace it takes, no to extents
beyond what it indexes, and where what it takes ends."""

from __future__ import annotations

import pytest

from codegen.kernel import Kernel
from tests.mutants.changes import Change, changes
from tests.mutants.emulation import runtime
from tests.mutants.verify import Bench
from tests.operators.rows.kernels import kernel as row_kernel
from tests.support.kernels.cpu_helpers import matmul_kernel
from tests.support.run.each_run import some_each_run

NORM, SPLIT = row_kernel("layer_norm", "registers, a warp"), matmul_kernel(split="workspace")
ONE_MORE = "a call with rows = 2147482624; it says: ok"
BEYOND = "= 4294967297, which it cannot index"
# Of a kernel a file's line, what becomes of what there, and what has to be said of it.
WRONG = {
    "rows in their last 32 bits": (NORM, "rows.cuh", "const bool fits =", "&&", "||", f"takes rows {BEYOND}"),
    "no rows refused": (NORM, "rows.cuh", "const bool fits =", ">=", ">", "must take a call with rows = 0;"),
    "the most refused": (NORM, "rows.cuh", "const bool fits =", "<=", "<", "must take a call with rows = 2147482623;"),
    "one more taken": (NORM, "rows.cuh", "const bool fits =", "largest_extent", "+ 1", f"must refuse {ONE_MORE}"),
    "all refused": (NORM, "rows.cuh", "const bool fits =", ">=", "<", "the number of launches is 0"),
    "workspace of no use": (NORM, "layer_norm/kernel.cuh", "return 0;", "0", "1", "asks for 1 bytes of workspace"),
    "k in its last 32 bits": (
        SPLIT,
        "gemm/launch.cuh",
        "as_extent(int64_t value)",
        "||",
        "&&",
        f"takes batch {BEYOND}",
    ),
    "one slice": (
        SPLIT,
        "gemm/launch.cuh",
        "const int64_t copies =",
        "kernel.split == split_atomic",
        "true",
        "bytes of workspace, its schedule for",
    ),
}


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bench]:
    folder = tmp_path_factory.mktemp("launch_code")
    of = runtime(folder)
    return {kernel.id: Bench(kernel.id, kernel, folder / str(n), 1, of) for n, kernel in enumerate((NORM, SPLIT))}


def wrong(kernel: Kernel, file: str, text: str, old: str, new: str) -> Change:
    of_line = (each for each in changes(kernel) if each.file == file and text in each.text)
    return next(each for each in of_line if old in each.old and new in each.new)


@pytest.mark.parametrize("name", some_each_run(list(WRONG), 4))
def test_wrong_launch_code_is_caught_before_it_runs(name: str, benches: dict[str, Bench]) -> None:
    kernel, *change, words = WRONG[name]
    result = benches[kernel.id].verify(wrong(kernel, *change))
    assert result.outcome == "caught" and words in result.how, result
