"""Lowering: every schedule is a candidate or counted under its rule, and an empty space says why."""

from __future__ import annotations

from codegen.lower import lower
from codegen.operators import operator
from codegen.search.rules import Accepted
from codegen.search.search import Search
from codegen.targets import target
from tests.support.fixtures.codegen import default_candidate, matmul

LARGE = {"m": 1024, "n": 1024, "k": 1024}


def test_every_schedule_is_accepted_or_counted_once() -> None:
    lowered = lower(matmul(m=40, n=1024, k=64), target("sm_90a"), Search(level=2))
    assert lowered.space_size == len(lowered.candidates) + sum(
        rejection.count for rejection in lowered.rejections.values()
    )
    assert lowered.rejections["tile_m"].example["tile_m"] == 128
    assert "m = 40" in lowered.rejections["tile_m"].message
    assert lowered.rejections["tile_m"].to_json().keys() == {"count", "example", "message"}


def test_candidates_break_no_rule() -> None:
    problem = matmul(m=100, n=300, k=50, layout="tn")
    lowered = lower(problem, target("sm_75"), Search(level=1))
    verdicts = [
        operator("matmul").rules(problem, candidate.schedule, target("sm_75")) for candidate in lowered.candidates
    ]
    assert verdicts
    assert all(isinstance(verdict, Accepted) for verdict in verdicts)


def test_candidates_that_differ_only_at_launch_share_a_kernel() -> None:
    schedule = default_candidate(matmul(**LARGE)).schedule.as_dict()
    search = Search(schedules=[{**schedule, "raster": raster} for raster in (0, 1, 4)])
    lowered = lower(matmul(**LARGE), target("sm_90a"), search)
    assert len(lowered.candidates) == 3
    assert len({candidate.id for candidate in lowered.candidates}) == 3
    assert len({candidate.kernel.id for candidate in lowered.candidates}) == 1
    assert "raster" not in lowered.candidates[0].kernel.tunables.as_dict()


def test_an_empty_space_names_the_rules_that_emptied_it() -> None:
    lowered = lower(
        matmul(**LARGE), target("sm_90a"), Search(tunables={"thread_m": [1], "thread_n": [1], "tile_m": [128, 256]})
    )
    assert lowered.candidates == ()
    assert lowered.why_empty is not None
    assert "threads rejected" in lowered.why_empty
    assert "threads; 32 to 1024" in lowered.why_empty
    assert lower(matmul(**LARGE), target("sm_90a"), Search(level=0)).why_empty is None


def test_a_workspace_limit_reaches_the_rules() -> None:
    lowered = lower(matmul(**LARGE), target("sm_90a"), Search(level=0), workspace_limit=-1)
    assert lowered.rejections["workspace"].count == 1


def test_lowering_is_deterministic() -> None:
    search = Search(level=2, limit=50, seed=3)
    assert lower(matmul(**LARGE), target("sm_80"), search) == lower(matmul(**LARGE), target("sm_80"), search)


def test_launch_values_follow_the_launch_abi() -> None:
    op = operator("matmul")
    assert op.launch_tunables == ("raster", "split_k", "stream_blocks")
    assert op.launch_values(default_candidate(matmul(**LARGE), raster=4).schedule) == [4, 1, 0]
    assert [0, 1, 0] in op.test_launches(default_candidate(matmul()).kernel, matmul())
