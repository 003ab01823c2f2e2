"""Which heads have schedules, whatever the batch: those of served models, and others or a refusal that says why."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from codegen.lower import lower
from codegen.operators.attention.space import TUNABLES
from codegen.search.rules import ACCEPTED, Rejected
from codegen.search.space import completed
from codegen.targets import target
from tests.operators.attention.kernels import OP, attention
from tests.operators.harness.declarations import LEVEL_0, LEVEL_1
from tests.support.run.each_run import some_each_run

BATCHES: dict[str, dict[str, Any]] = {
    "dense": {},
    "ragged": {"lengths": "ragged"},
    **{f"pages of {size}": {"lengths": "paged", "page_size": size} for size in (1, 16, 64)},
}
COLUMNS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)]
DECODE, FEW, PREFILL = ((64, 1, 922), (16, 8, 922), (8, 512, 512))  # sequences, queries and keys of each
SHARED = ((8, 8), (24, 8), (8, 1), (16, 1))  # heads of q and of k
TARGETS = ("sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a")
# The same names as in a schedule, with their values, as a refusal has them.
NAMED = re.compile(r"(\w+) = (\w+)")


def problem_of(batches: str, work: tuple[int, int, int], heads: tuple[int, int], **fields: Any) -> Any:
    sizes = dict(zip(("batch", "seq_q", "seq_kv"), work, strict=True))
    return attention(**BATCHES[batches], **sizes, heads_q=heads[0], heads_kv=heads[1], **fields)


@pytest.mark.parametrize(("batches", "columns"), some_each_run([*product(BATCHES, COLUMNS)], 8), ids=str)
def test_every_batch_of_served_heads_has_candidates_at_levels_0_and_1(batches: str, columns: tuple[int, int]) -> None:
    fields = {"head_dim_qk": columns[0], "head_dim_vo": columns[1], "dtype": "bfloat16", "lse": True}
    for work, heads, arch in product((DECODE, FEW, PREFILL), SHARED, TARGETS):
        problem = problem_of(batches, work, heads, **fields)
        for level in (LEVEL_0, LEVEL_1):
            assert lower(problem, target(arch), level).why_empty is None, (work, heads, arch, level)


@pytest.mark.parametrize("batches", BATCHES)
def test_heads_of_any_size_have_a_candidate_or_no_schedule_of_the_fewest_registers(batches: str) -> None:
    """One query, where a small block is the hardest to fit, and many."""
    largest = 0
    for columns, (work, heads) in product(range(16, 513, 16), ((DECODE, (8, 1)), (DECODE, (8, 8)), (PREFILL, (8, 8)))):
        lowered = lower(problem_of(batches, work, heads, head_dim_qk=columns), target("sm_90a"), LEVEL_0)
        if lowered.candidates:
            largest = max(largest, columns)
            continue
        assert "No schedule fits: 16 queries of a warp and tile_kv = 16 need" in str(lowered.why_empty)
        assert columns > largest, "a smaller head has a schedule, whatever the queries are"
        assert columns >= 272
    assert largest >= 256


@pytest.mark.parametrize(("size", "tiles"), [(1, {32}), (16, {16, 32}), (64, {16, 32})])
def test_decoding_with_heads_of_256_has_blocks_whose_copies_fit_their_threads(size: int, tiles: set[int]) -> None:
    for heads, arch in product(SHARED, TARGETS):
        candidates = lower(
            problem_of(f"pages of {size}", DECODE, heads, head_dim_qk=256), target(arch), LEVEL_1
        ).candidates
        assert {candidate.schedule.get("tile_q") for candidate in candidates} == tiles


@pytest.mark.parametrize("batches", BATCHES)
def test_the_schedule_that_a_refusal_names_is_accepted(batches: str) -> None:
    named = 0
    asked = {"tile_q": 128, "tile_kv": 128, "warps": 1, "stages": 3, "q_in": "registers"}
    ways: tuple[dict[str, Any], ...] = ({}, {"packing": "group"}, {"walk": "longest_first", "walkers": 2})
    for columns, work, heads, own in product((96, 128, 256, 272, 320), (DECODE, FEW, PREFILL), SHARED, ways):
        problem = problem_of(batches, work, heads, head_dim_qk=columns)
        refused = OP.rules(problem, completed({**asked, **own}, TUNABLES), target("sm_90a"))
        if not isinstance(refused, Rejected) or refused.rule != "registers":
            continue
        sentence = refused.message.rsplit(". ", 1)[1]
        assert sentence.startswith("No schedule fits") is (columns > 256 and not lower_one(problem)), sentence
        if not sentence.startswith("No schedule fits"):
            values = {name: int(value) if value.isdigit() else value for name, value in NAMED.findall(sentence)}
            assert OP.rules(problem, completed(values, TUNABLES), target("sm_90a")) == ACCEPTED, sentence
            named += 1
    assert named >= 30


def lower_one(problem: Any) -> bool:
    return bool(lower(problem, target("sm_90a"), LEVEL_0).candidates)
