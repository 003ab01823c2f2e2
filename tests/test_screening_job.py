"""A job that screens its candidates, whole, over HTTP, with real valkey, nvcc, g++ and processes."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cukiln.cli_bundle import export_bundle
from cukiln.client import Client
from cukiln.errors import CukilnError
from cukiln.types import CandidateFacts, CandidatePage, CandidateReport, Job, Targets, Timeline, WinnerRecord
from storage.settings import load_settings
from tests.chrome_traces import checked, slices
from workers.reproduce.write_folder import write_folder
from workers.serve import embedded
from workers.toolchain import find_toolchain

MATMUL = {"operator": "matmul", "m": 128, "n": 128, "k": 64, "dtype": "float16", "name": "one"}
SEARCH = {"level": 1, "limit": 8, "screening": 2}
# Says in COMPILED how many kernels each file had that was compiled to a cubin, and whether fast.
NVCC = """#!/bin/sh
case " $* " in
  *" -cubin "*)
    case " $* " in *" --Ofast-compile=mid "*) how=fast ;; *) how=full ;; esac
    echo "$how $(grep -c '^namespace kernel_[0-9a-f]* {' group.cu)" >> COMPILED ;;
esac
exec NVCC "$@"
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled") / "files"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Iterator[Client]:
    data = tmp_path_factory.mktemp("screening")
    nvcc = data / "nvcc"
    nvcc.write_text(NVCC.replace("COMPILED", str(compiled)).replace("exec NVCC", f"exec {find_toolchain().nvcc}"))
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    settings = load_settings(data_dir=data / "data", port=0, workers=1, gpus="none", nvcc=os.fspath(nvcc))
    with embedded(settings) as running, Client(running.url, cache_dir=data / "client") as found:
        yield found


def submit(client: Client, **search: Any) -> Job:
    return client.submit({"target": "sm_90a", "search": {**SEARCH, **search}, "problems": [MATMUL]})


@pytest.fixture(scope="module")
def job(client: Client) -> Job:
    return client.wait(submit(client))


def get(client: Client, path: str) -> Any:
    return client._transport.request("GET", path, repeatable=True).json()


def candidates(client: Client, job: Job) -> list[CandidateReport]:
    return CandidatePage.model_validate(get(client, f"/v1/jobs/{job.job}/candidates")).candidates


@pytest.fixture(scope="module")
def record(client: Client, job: Job) -> WinnerRecord:
    return client.kernel(job.problems[0].key)


def toolchain(client: Client) -> dict[str, Any]:
    (alive,) = Targets.model_validate(get(client, "/v1/targets")).toolchains
    return alive


def test_eight_are_compiled_fast_and_two_of_them_in_full(job: Job, record: WinnerRecord, compiled: Path) -> None:
    assert job.state == "done", job.error
    problem = job.problems[0]
    assert (problem.candidates, problem.screened, problem.verdicts) == (8, 6, {"ok": 8})
    kernels: Counter[str] = Counter()
    for line in compiled.read_text().splitlines():
        how, count = line.split()
        kernels[how] += int(count)
    # Each point of the front is then built alone, as in any job.
    assert kernels == {"fast": 8, "full": 2 + len(record.front)}


def test_the_winner_is_of_the_toolchain_that_compiles_in_full(client: Client, job: Job, record: WinnerRecord) -> None:
    own = toolchain(client)
    assert {entry.toolchain for entry in record.front} == {own["digest"]}
    assert not any("Ofast" in flag for flag in own["description"]["flags"]["device"])
    in_full = {one.candidate for one in candidates(client, job) if not one.screening}
    assert len(in_full) == 2
    assert {entry.candidate for entry in record.front} <= in_full
    assert record.searches[0]["search"] == {"level": 1, "limit": 8, "seed": 0, "screening": 2}


def test_the_counts_and_seconds_are_those_of_both_rounds(job: Job) -> None:
    progress = job.progress
    assert [(one.done, one.total) for one in (progress.compile, progress.verify)] == [(10, 10), (10, 10)]
    for stage in ("lower", "codegen", "compile", "verify"):
        assert getattr(job.seconds, stage).wall > 0, stage


def test_trace_timeline_and_page_show_the_choice(client: Client, job: Job) -> None:
    events = checked(client.trace(job.job))
    assert [event["args"]["problem"] for event in slices(events, "refine")] == ["one"]
    assert len(slices(events, "compile")) >= 2
    (refined,) = slices(events, "refine")
    compiles = sorted(slices(events, "compile"), key=lambda event: event["ts"])
    assert compiles[0]["ts"] + compiles[0]["dur"] <= refined["ts"] < compiles[-1]["ts"]
    timeline = Timeline.model_validate(get(client, f"/v1/jobs/{job.job}/timeline"))
    (lane,) = [lane for lane in timeline.lanes if lane.name == "problem one"]
    assert [(step.kind, step.state) for step in lane.steps] == [("refine", "done"), ("finish", "done")]
    page = client._transport.request("GET", f"/jobs/{job.job}", repeatable=True).text
    assert 'data-kind="refine"' in page
    assert "6 only screened" in page


def test_the_same_request_again_is_answered_from_the_cache_and_one_without_screening_is_not(
    client: Client, job: Job
) -> None:
    for search in ({}, {"screening": 1}):
        again = submit(client, **search)
        assert (again.state, again.cached) == ("done", True)
        assert again.problems[0].winner == job.problems[0].winner
    larger = submit(client, screening=3)
    assert not larger.cached
    assert client.wait(larger).state == "done"
    whole = submit(client, screening=None)
    assert not whole.cached
    ended = client.wait(whole)
    assert (ended.problems[0].screened, ended.problems[0].verdicts) == (0, {"ok": 8})
    assert submit(client).cached, "what looked at everything in full has done what screening does"


def test_what_was_only_screened_says_how_it_was_compiled_and_is_reproduced_so(
    client: Client, job: Job, tmp_path: Path
) -> None:
    fast, full = (next(one for one in candidates(client, job) if one.screening is which) for which in (True, False))
    for one in (fast, full):
        found = CandidateFacts.model_validate(get(client, f"/v1/candidates/{one.candidate}?job={job.job}"))
        assert found.screening is one.screening
        assert found.toolchain is not None
        assert ("--Ofast-compile=mid" in found.toolchain["flags"]["device"]) is one.screening
        write_folder(found, tmp_path / one.candidate)
        assert ("--Ofast-compile=mid" in (tmp_path / one.candidate / "build.sh").read_text()) is one.screening


def test_it_is_not_exported(client: Client, job: Job, tmp_path: Path) -> None:
    with pytest.raises(CukilnError, match=r"'one' is searched with search.screening.*submit it without"):
        export_bundle(client, job.job, tmp_path / "folder")
