"""Whole jobs, step by step in this process: every point of a front is built and published, each job gets its own."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest

from codegen.operators import operator
from codegen.plan.generator import generator
from codegen.search.schedule import Schedule
from codegen.text.cubin import read_cubin
from cukiln.types import FrontEntry
from storage.entities.searches import search_entry
from tests.support.fixtures.line import SEARCH, Line, N
from tests.support.fixtures.queue import QueueWorld
from tests.support.kernels.compile_cache import CachingProcesses
from workers.steps.winner_library import WinnerNotBuilt

finish_step = import_module("workers.steps.finish")


@pytest.fixture
def without_ptx(line: Line) -> Line:
    """What winners' PTX shows is another test's."""
    line.workplace.settings = line.workplace.settings.model_copy(update={"verify_ptx": "none"})
    return line


def ways(front: Sequence[FrontEntry]) -> list[str]:
    return [entry.schedule["way"] for entry in front]


def entry_of(generated_for: dict[str, Any], **policy: Any) -> dict[str, Any]:
    return search_entry(generated_for, generator("probe"), policy.pop("limit", None), **policy)


def test_every_point_of_the_front_is_published_and_each_job_gets_what_its_policy_allows(line: Line) -> None:
    lean = line.job(workspace_limit_bytes=4 * N - 1)
    assert (lean.state, ways(line.record().front)) == ("done", ["copy"])
    assert line.rejected(lean)["workspace"] == (3, "needs 4000 bytes of workspace, the limit is 3999")

    equal = line.job(deterministic=True)
    assert ways(line.record().front) == ["workspace", "copy"]
    assert line.rejected(equal)["deterministic"][0] == 1
    assert "bits differ from run to run" in line.rejected(equal)["deterministic"][1]

    free = line.job()
    record = line.record()
    assert ways(record.front) == ["atomic", "workspace", "copy"]
    assert record.searches == [entry_of(SEARCH)]  # it did what the two before it had done, and more
    assert [(entry.workspace_bytes, entry.deterministic) for entry in record.front] == [
        (4 * N, False),
        (4 * N, True),
        (0, True),
    ]
    winners = [line.report(job.job).problems[0].winner for job in (lean, equal, free)]
    assert [winner and winner.schedule["way"] for winner in winners] == ["copy", "workspace", "atomic"]
    assert [winner and winner.workspace_bytes for winner in winners] == [0, 4 * N, 4 * N]

    for entry in record.front:
        check_entry(line, entry)
        assert entry.launch.launch == {"slices": 1}
    assert len({entry.so_sha256 for entry in record.front}) == 3


def check_entry(line: Line, entry: FrontEntry) -> None:
    """Its metadata is what its operator and its cubin say."""
    schedule, own = Schedule.of(entry.schedule), operator(line.problem.operator)
    kernel = own.candidate(line.problem, schedule).kernel
    cost = own.cost(line.problem, schedule)
    assert entry.workspace_bytes == entry.launch.workspace_bytes == cost.workspace_bytes
    assert len(entry.launch.functions) == cost.launches == len(own.functions(kernel))
    assert entry.deterministic == own.deterministic(kernel)
    in_cubin = read_cubin(line.blobs.get(entry.cubin_sha256)).symbols
    assert {function.symbol for function in entry.launch.functions} == in_cubin
    assert line.blobs.get(entry.so_sha256)[:4] == b"\x7fELF"


def test_a_job_whose_cap_nothing_meets_fails_with_the_number(line: Line) -> None:
    search = {"tunables": {"way": ["workspace", "atomic"]}}
    failed = line.job(search, workspace_limit_bytes=100)
    assert failed.state == "failed"
    assert "needs 4000 bytes of workspace, the limit is 100" in str(failed.problems[0].error)


def test_a_front_of_many_points_is_thinned_and_says_so(without_ptx: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish_step, "MOST_POINTS", 2)
    without_ptx.job()
    record = without_ptx.record()
    assert ways(record.front) == ["atomic", "copy"]
    assert record.searches == [entry_of(SEARCH, whole=False)]


def test_a_point_that_cannot_be_built_alone_gives_way_to_what_it_beat(
    without_ptx: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tried = finish_step.winner_library, []

    def library(context: Any, candidate: Any, target: Any) -> Any:
        tried.append((candidate.schedule.get("way"), candidate.schedule.get("slices")))
        if tried[-1] in (("atomic", 1), ("workspace", 1)):
            raise WinnerNotBuilt(candidate.id, "error: too bad")
        return real(context, candidate, target)

    monkeypatch.setattr(finish_step, "winner_library", library)
    without_ptx.job()
    assert tried == [("atomic", 1), ("workspace", 1), ("workspace", 2), ("copy", 1)]
    front = without_ptx.record().front
    assert [(entry.schedule["way"], entry.workspace_bytes) for entry in front] == [("workspace", 8 * N), ("copy", 0)]
    assert without_ptx.record().searches == [entry_of(SEARCH)]  # nothing better can be had


def test_once_there_is_a_winner_the_builds_are_bounded(without_ptx: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tried = finish_step.winner_library, []

    def library(context: Any, candidate: Any, target: Any) -> Any:
        tried.append(candidate.schedule.get("way"))
        if tried[-1] != "atomic":
            raise WinnerNotBuilt(candidate.id, "error: too bad")
        return real(context, candidate, target)

    monkeypatch.setattr(finish_step, "winner_library", library)
    monkeypatch.setattr(finish_step, "MOST_BUILDS", 2)
    without_ptx.job()
    assert tried == ["atomic", "workspace"]
    assert ways(without_ptx.record().front) == ["atomic"]
    assert without_ptx.record().searches == [entry_of(SEARCH, whole=False)]


def test_a_matmul_with_a_split_k_goes_the_whole_way(
    queue_world: QueueWorld, caching_processes: CachingProcesses
) -> None:
    fields = {"operator": "matmul", "dtype": "float16", "m": 64, "n": 60, "k": 1024, "layout": "nt"}
    problem = operator("matmul").parse({**fields, "epilogue": [{"op": "bias"}, {"op": "relu"}]})
    line = Line(queue_world, caching_processes, problem)
    # What winners' PTX shows is another test's.
    line.workplace.settings = queue_world.settings.model_copy(update={"verify_ptx": "none"})
    tile = {"tile_m": [32], "tile_n": [32], "tile_k": [64], "warps_m": [1], "warps_n": [2], "stages": [2]}
    ways = {"split": ["none", "workspace", "atomic"], "split_k": [1, 4]}
    job = line.job({"tunables": {**tile, **ways, "copy": ["cp_async"], "maxnreg": [0]}})
    assert (job.problems[0].verdicts, job.problems[0].error) == ({"ok": 3}, None)
    record = line.record()
    assert record.searches[0]["whole"]
    (plain,) = record.usable(workspace_limit_bytes=0)
    assert (plain.schedule["split"], len(plain.launch.functions)) == ("none", 1)
    assert len(record.front) > 1 and record.front[0].workspace_bytes > 0
    for entry in record.front:
        check_entry(line, entry)
        slices = {"none": 0, "workspace": entry.schedule["split_k"], "atomic": 1}[entry.schedule["split"]]
        assert entry.workspace_bytes == slices * 64 * 60 * 4
