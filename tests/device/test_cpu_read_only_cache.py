"""The read-only cache need not see what the same launch wrote, so load_global may not read that; a later launch may."""

from __future__ import annotations

import re
from typing import get_args

import numpy as np
import pytest

from codegen.plan.verification_plan import Order
from tests.support.kernels.small_kernels import Small, SmallKernels

OWN = "show(out + thread, 3.0f);\n"
READ = "show(out + 64 + thread, load_global<1>(out + (thread ^ 1)).data[0]);"

WRONG = {
    "stored": Small(OWN + "__syncthreads();\n" + READ),
    "added": Small("atomic_add(out + thread, 1.0f);\n__syncthreads();\n" + READ),
    "by_another_block": Small("if (blockIdx.x == 0) " + OWN + "else " + READ, blocks=2),
    "between": Small(
        "if (thread % 2) show(out + thread, 3.0f);\n__syncthreads();\n"
        "show(out + 64 + thread, load_global<1>(out + thread / 2 * 2).data[0]);"
    ),
    "in_the_second_launch": Small(OWN, then=OWN + "__syncthreads();\n" + READ),
}
RIGHT = {
    "in_a_later_launch": Small(
        OWN, then="const Vec<float, 1> read = load_global<1>(out + (thread ^ 1));\n__syncthreads();\n"
        "show(out + 64 + thread, read.data[0]);"
    ),
    "another_part": Small(
        OWN, then="show(out + 64 + thread, 0.0f);\n__syncthreads();\n"
        "show(out + 64 + thread, load_global<1>(out + thread).data[0]);"
    ),
    "an_input": Small(OWN + "__syncthreads();\nshow(out + 64 + thread, load_global<1>(in + 3).data[0]);"),
    # Neither goes through that cache.
    "plainly": Small(OWN + "__syncthreads();\nshow(out + 64 + thread, out[thread ^ 1]);"),
    "copied": Small(
        OWN + "__syncthreads();\ncp_async<4>(shared + 4 * thread, out + (thread ^ 1), true);\ncp_async_commit();\n"
        "cp_async_wait<0>();\nshow(out + 64 + thread, read(shared + 4 * thread));"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallKernels:
    return SmallKernels({**WRONG, **RIGHT}, tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("name", WRONG)
def test_what_this_launch_wrote_is_not_read_through_the_read_only_cache(name: str, small: SmallKernels) -> None:
    outcome = small.run(name)
    assert outcome.outcome.status == "runtime_error"
    assert re.match(
        rf"{name}.cuh:\d: read of 4 bytes at offset \d+ of out \(4096 bytes\): this launch wrote to it; load_global "
        r"reads through the read-only cache",
        outcome.message,
    ), outcome.message
    assert not outcome.outcome.tainted


@pytest.mark.parametrize("name", RIGHT)
def test_what_an_earlier_launch_wrote_or_none_may_be_read(name: str, small: SmallKernels) -> None:
    for order in get_args(Order):
        outcome = small.run(name, order, watch=True)
        assert (outcome.outcome.status, outcome.message) == ("ok", "")
        np.testing.assert_array_equal(outcome.out[64:128], 3.0)
