"""What attention looks up in tables, as the prediction takes it."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.attention.lookups import Tables, of_run
from codegen.operators.attention.problem import PAGE_SIZES
from codegen.operators.attention.work import steps
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.search.schedule import Schedule
from codegen.search.space import completed
from tests.operators.attention.kernels import DECODE, OP, attention
from tests.operators.harness.declarations import LEVEL_0, SM_90A
from tests.operators.mla.kernels import mla

DECODES: dict[str, dict[str, Any]] = {
    "dense": {"lengths": "dense"},
    "ragged": {"lengths": "ragged"},
    **{f"pages of {size}": {"lengths": "paged", "page_size": size} for size in reversed(PAGE_SIZES)},
}
SCHEDULE = completed(
    {"tile_q": 16, "tile_kv": 64, "warps": 1, "stages": 2, "split": "workspace", "split_kv": 8, "packing": "group"},
    OP.tunables,
)
OF_MLA = {"tile_q": 16, "tile_kv": 32, "warps": 4, "warps_vo": 4, "stages": 2, "split": "none"}


@pytest.mark.parametrize("batch", [1, 64])
def test_a_decode_step_is_predicted_to_take_longer_with_tables_and_longest_with_pages(batch: int) -> None:
    """Of the same keys by the same schedule. Pages of one key are looked up most, but a key's place in its page, which
    takes more instructions, does not come to it."""
    problems = {name: attention(**{**DECODE, "batch": batch, **fields}) for name, fields in DECODES.items()}
    times = {name: predict_uncompiled(OP.candidate(p, SCHEDULE), SM_90A).us for name, p in problems.items()}
    works = {name: OP.work(p, SCHEDULE, SM_90A) for name, p in problems.items()}
    assert times["dense"] < times["ragged"] < times["pages of 1"] < times["pages of 64"] <= times["pages of 16"]
    assert sorted(works, key=lambda name: works[name].l2_bytes) == list(DECODES)
    assert works["pages of 1"].other_instructions > 1.5 * works["ragged"].other_instructions


def test_pages_of_a_latent_cache_take_time_too() -> None:
    own = operator("mla")
    works = [
        own.work(problem, Schedule.of(OF_MLA), SM_90A)
        for problem in (mla(batch=64, seq_kv=2048, page_size=size, heads_q=16) for size in (64, 16, 1))
    ]
    bytes_ = [work.l2_bytes for work in works]
    assert bytes_[0] == bytes_[1] and bytes_[2] - bytes_[1] > 0.7 * 4 * 64 * 2048
    assert [work.looked_up for work in works] == [3, 3, 2]


@pytest.mark.parametrize("lengths", DECODES)
def test_entries_are_those_that_a_run_on_the_cpu_counts(lengths: str) -> None:
    """Of whole tiles, where counts and the prediction have the same ones; blocks without a query, which
    the prediction takes for others, read less."""
    problem = attention(**{**DECODE, "batch": 4, "seq_kv": 1024, **DECODES[lengths]})
    run, *_ = OP.launches(problem, SCHEDULE, SM_90A)
    counted = sum(part.bytes_read for part in run.primitives if part.name == "load_global")
    t = SCHEDULE.as_dict()
    predicted = sum(table.entries for table in of_run(problem, t, steps(problem, t), align=8))
    assert counted <= 4 * predicted <= 1.25 * counted


LOADS: list[tuple[Tables, int]] = [
    (Tables(1, searched=True), 2),
    (Tables(64, searched=True), 8),
    (Tables(64, searched=True, listed=True), 9),
    (Tables(64, searched=True, listed=True, ends_within=True), 10),
    (Tables(64, searched=False, listed=True), 2),
    (Tables(64, searched=False, listed=True, ends_within=True), 3),
]


@pytest.mark.parametrize(("tables", "loads"), LOADS)
def test_each_look_up_ahead_of_a_copy_is_a_trip_to_the_l2(tables: Tables, loads: int) -> None:
    """Bisecting 64 sequences is 6 of them; then both ends, of queries and of keys; the last page's length; a page."""
    assert tables.in_a_row == loads


HUGE: dict[str, dict[str, Any]] = {
    "ragged": {"lengths": "ragged"},
    "pages of a key": {"lengths": "paged", "page_size": 1},
}


@pytest.mark.parametrize("name", [*HUGE, "mla"])
def test_a_batch_of_a_hundred_million_sequences_of_one_length_is_no_list(name: str) -> None:
    """A request has a batch alone, and so may ask for any number of them."""
    one: dict[str, Any] = {"batch": 10**8, "seq_q": 1, "seq_kv": 1, "heads_q": 2}
    own = operator("mla" if name == "mla" else "attention")
    problem = mla(**one, page_size=1) if name == "mla" else attention(**one, heads_kv=1, head_dim_qk=64, **HUGE[name])
    (candidate,) = lower(problem, SM_90A, LEVEL_0).candidates
    assert problem.by_lengths == {(1, 1): 10**8}
    assert predict_uncompiled(candidate, SM_90A).us > 0 and own.launches(problem, candidate.schedule, SM_90A)


def test_sequences_of_equal_lengths_are_counted() -> None:
    problem = attention(**{**DECODE, "lengths": "ragged", "batch": 3, "seq_q": 9, "kv_lengths": [5, 7, 5]})
    assert problem.by_lengths == {(9, 5): 2, (9, 7): 1} and len(problem.sequences) == 3
