"""Lowering: every schedule is a candidate or counted under its rule, and an empty space says why."""

from __future__ import annotations

from codegen.lower import lower
from codegen.operators import operator
from codegen.rules import Accepted
from codegen.search import Search
from codegen.targets import target
from tests.fixtures_codegen import default_candidate, matmul

LARGE = {"m": 1024, "n": 1024, "k": 1024}


def test_every_schedule_is_accepted_or_counted_once() -> None:
    found = lower(matmul(m=40, n=1024, k=64), target("sm_90a"), Search(level=2))
    assert found.space_size == len(found.candidates) + sum(one.count for one in found.rejections.values())
    assert found.rejections["tile_m"].example["tile_m"] == 128
    assert "m = 40" in found.rejections["tile_m"].message
    assert found.rejections["tile_m"].to_json().keys() == {"count", "example", "message"}


def test_candidates_break_no_rule() -> None:
    problem = matmul(m=100, n=300, k=50, layout="tn")
    found = lower(problem, target("sm_75"), Search(level=1))
    verdicts = [operator("matmul").rules(problem, one.schedule, target("sm_75")) for one in found.candidates]
    assert verdicts
    assert all(isinstance(verdict, Accepted) for verdict in verdicts)


def test_candidates_that_differ_only_at_launch_share_a_kernel() -> None:
    schedule = default_candidate(matmul(**LARGE)).schedule.as_dict()
    search = Search(schedules=[{**schedule, "raster": raster} for raster in (0, 1, 4)])
    found = lower(matmul(**LARGE), target("sm_90a"), search)
    assert len(found.candidates) == 3
    assert len({one.id for one in found.candidates}) == 3
    assert len({one.kernel.id for one in found.candidates}) == 1
    assert "raster" not in found.candidates[0].kernel.tunables.as_dict()


def test_an_empty_space_names_the_rules_that_emptied_it() -> None:
    found = lower(
        matmul(**LARGE), target("sm_90a"), Search(tunables={"thread_m": [1], "thread_n": [1], "tile_m": [128, 256]})
    )
    assert found.candidates == ()
    assert found.why_empty is not None
    assert "threads rejected" in found.why_empty
    assert "threads; 32 to 1024" in found.why_empty
    assert lower(matmul(**LARGE), target("sm_90a"), Search(level=0)).why_empty is None


def test_a_workspace_limit_reaches_the_rules() -> None:
    found = lower(matmul(**LARGE), target("sm_90a"), Search(level=0), workspace_limit=-1)
    assert found.rejections["workspace"].count == 1


def test_lowering_is_deterministic() -> None:
    search = Search(level=2, limit=50, seed=3)
    assert lower(matmul(**LARGE), target("sm_80"), search) == lower(matmul(**LARGE), target("sm_80"), search)


def test_launch_values_follow_the_launch_abi() -> None:
    op = operator("matmul")
    assert op.launch_tunables == ("raster", "split_k", "stream_blocks")
    assert op.launch_values(default_candidate(matmul(**LARGE), raster=4).schedule) == [4, 1, 0]
    assert [0, 1, 0] in op.test_launches(default_candidate(matmul()).kernel, matmul())
