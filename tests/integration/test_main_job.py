"""One job the whole way, over HTTP, with real valkey, nvcc, g++ and processes: right, wrong, hanging and cached."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from codegen.text.render_group import verified_label
from cukiln.client import Client
from cukiln.types import CandidatePage, GroupReport, Job, PhaseName, Rejections, WinnerRecord
from storage.config.settings import load_settings
from tests.support.fixtures.service import Started
from tests.support.kernels.cpu_helpers import loaded
from tests.support.run.places import FAULTY
from tests.support.service.chrome_traces import checked, covered, slices

RIGHT, UNWRITTEN, SPLIT_BARRIER, ENDLESS, DOES_NOT_COMPILE, HANGS_NVCC, REJECTED = 0, 14, 2, 12, 26, 31, 63
COMPILE_CPU_SECONDS = 2.0
PROBLEM = {"operator": "faulty", "rows": 8, "columns": 256, "pitch": 256}
MATMUL = {"operator": "matmul", "m": 40, "n": 48, "k": 36, "layout": "nt", "dtype": "float32"}


def schedules(*faults: int) -> dict[str, Any]:
    return {"schedules": [{"fault": fault} for fault in faults]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("main-job")


@pytest.fixture(scope="module")
def blobs(data: Path) -> Path:
    """The folder of the service's blobs."""
    return data / "blobs"


@pytest.fixture(scope="module")
def client(data: Path, soon_embedded: Started) -> Iterator[Client]:
    """A service that also has an operator whose schedules are wrong in one way each."""
    settings = load_settings(
        data_dir=data,
        port=0,
        workers=1,
        operator_path=str(FAULTY),
        compile_cpu_seconds=COMPILE_CPU_SECONDS,
        verify_cpu_seconds=2.0,
    )
    with soon_embedded(settings) as running, Client(running.url, cache_dir=data / "client") as found:
        yield found


@pytest.fixture(scope="module")
def job(client: Client) -> Job:
    return client.tune(
        [
            {
                **PROBLEM,
                "name": "mixed",
                "search": schedules(RIGHT, UNWRITTEN, SPLIT_BARRIER, ENDLESS, DOES_NOT_COMPILE, HANGS_NVCC, REJECTED),
            },
            {**PROBLEM, "rows": 16, "name": "hopeless", "search": schedules(UNWRITTEN, DOES_NOT_COMPILE)},
            {**PROBLEM, "rows": 24, "name": "emptied", "search": schedules(REJECTED)},
            {**MATMUL, "name": "healthy", "search": {"level": 1, "limit": 3}},
        ],
        target="sm_80",
    )


def report(job: Job, name: str) -> Any:
    return next(problem for problem in job.problems if problem.name == name)


def get(client: Client, path: str) -> Any:
    return httpx.get(f"{client.url}{path}", timeout=60).raise_for_status().json()


def test_each_fault_gets_its_own_verdict_and_the_right_candidate_wins(client: Client, job: Job) -> None:
    mixed = report(job, "mixed")
    assert mixed.state == "done"
    assert mixed.verdicts == {
        "ok": 1, "incorrect": 1, "runtime_error": 1, "run_timeout": 1, "compile_error": 1, "compile_timeout": 1
    }  # fmt: skip
    assert mixed.rejected == {"fault": 1}
    assert mixed.winner.schedule == {"fault": RIGHT}
    with loaded([FAULTY]):
        assert (mixed.winner.verified, mixed.winner.ranked_by) == (verified_label("faulty"), "predicted")
    assert mixed.winner.predicted_us > 0
    assert mixed.winner.measured_us is None


@pytest.mark.parametrize(
    ("fault", "verdict", "message"),
    [
        (UNWRITTEN, "incorrect", "elements are wrong"),
        (SPLIT_BARRIER, "runtime_error", "barrier"),
        (ENDLESS, "run_timeout", "s"),
        (DOES_NOT_COMPILE, "compile_error", "no_such_field"),
        (HANGS_NVCC, "compile_timeout", f"used more than {COMPILE_CPU_SECONDS:g} CPU seconds"),
    ],
)
def test_a_verdict_says_why(client: Client, job: Job, fault: int, verdict: str, message: str) -> None:
    page = CandidatePage.model_validate(get(client, f"/v1/jobs/{job.job}/candidates"))
    entry = next(
        candidate
        for candidate in page.candidates
        if candidate.problem == "mixed" and candidate.schedule == {"fault": fault}
    )
    assert entry.verdict == verdict
    assert message in (entry.message or "")


def test_a_problem_without_a_right_candidate_fails_and_says_what_became_of_them(job: Job) -> None:
    hopeless = report(job, "hopeless")
    assert hopeless.state == "failed"
    assert hopeless.winner is None
    assert "none of 2 candidates was verified as correct" in hopeless.error
    assert "1 incorrect" in hopeless.error
    assert "1 compile_error" in hopeless.error


def test_a_problem_whose_schedules_all_break_rules_fails_and_names_the_rule(client: Client, job: Job) -> None:
    emptied = report(job, "emptied")
    assert emptied.state == "failed"
    assert "fault rejected 1" in emptied.error
    rejections = Rejections.model_validate(get(client, f"/v1/jobs/{job.job}/rejections")).rejections
    assert any(
        rejection.problem == "emptied" and rejection.rule == "fault" and rejection.count == 1
        for rejection in rejections
    )


def test_a_job_with_failed_problems_is_partial_and_the_others_are_done(job: Job) -> None:
    assert job.state == "partial"
    healthy = report(job, "healthy")
    assert healthy.state == "done"
    assert healthy.verdicts == {"ok": 3}
    for stage in ("lower", "codegen", "compile", "verify"):
        assert getattr(healthy.seconds, stage).wall > 0, stage
        assert getattr(healthy.seconds, stage).cpu > 0, stage
    assert healthy.seconds.measure.wall == 0


def test_the_trace_shows_all_work_with_the_phases_of_each_compile(client: Client, job: Job) -> None:
    events = checked(client.trace(job.job))
    kinds = {kind: slices(events, kind) for kind in ("job", "plan", "compile", "verify", "finish")}
    assert [len(kinds[kind]) for kind in ("job", "finish")] == [1, len(job.problems)]
    assert all(kinds.values())
    assert not any(event["args"].get("open") for event in events)
    assert {event["args"]["problem"] for event in kinds["finish"]} == {problem.name for problem in job.problems}
    whole = kinds["job"][0]
    assert all(event["ts"] + event["dur"] <= whole["ts"] + whole["dur"] for kind in kinds for event in kinds[kind])
    linked: list[set[str]] = []
    # A compile that the machine ended, and not its compiler, has none: it was made again.
    compiled = [event for event in kinds["compile"] if event["args"].get("phases")]
    assert len(compiled) >= 2
    for event in compiled:
        inside = [
            phase
            for phase in slices(events, "phase")
            if phase["pid"] == event["pid"]
            and event["tid"] == phase["tid"]
            and event["ts"] <= phase["ts"] <= event["ts"] + event["dur"]
        ]
        names = {phase["name"] for phase in inside}
        assert {"render", "nvcc", "upload"} <= names
        if "link" in names:  # not in a file that hung the compiler
            linked.append(names)
        named = covered([(phase["ts"], phase["ts"] + phase["dur"]) for phase in inside])
        assert 0.5 * event["dur"] <= named <= event["dur"], "most of the time has a name"
    assert linked
    assert all({"preprocess", "cicc", "ptxas", "host", "link"} <= names for names in linked)


def test_a_winners_own_build_is_reported_separately(client: Client, job: Job) -> None:
    finished = {event["args"]["problem"]: event["args"] for event in slices(checked(client.trace(job.job)), "finish")}
    assert finished["healthy"]["phases"].keys() >= {"cicc", "ptxas", "host", "link", "upload"}
    assert "phases" not in finished["emptied"]


def test_a_groups_phases_are_within_its_time_and_those_of_a_second_file_name_their_kernels(
    client: Client, job: Job
) -> None:
    compiles = slices(checked(client.trace(job.job)), "compile")
    groups = {event["args"]["ref"] for event in compiles if event["args"].get("phases")}
    reports = [GroupReport.model_validate(get(client, f"/v1/groups/{group}")) for group in groups]
    for report in reports:
        assert report.phases[0].name == "queue"
        rest = report.phases[1:]
        assert {phase.name for phase in rest} <= set(get_args(PhaseName))
        assert [phase.start for phase in rest] == sorted(phase.start or 0.0 for phase in rest)
        spans = [(phase.name, (start := phase.start or 0.0, start + phase.seconds)) for phase in rest]
        tools = covered([span for name, span in spans if name not in ("render", "upload")])
        assert tools == pytest.approx(report.compile.wall, rel=1e-3), "what a tool was ended in has its time too"
        assert covered([span for name, span in spans if name != "upload"]) <= report.codegen.wall + report.compile.wall
        for name in ("cicc", "ptxas"):
            attributed = sum(kernel.seconds.phases.get(name, 0.0) for kernel in report.kernels if kernel.seconds)
            assert attributed == pytest.approx(sum(phase.seconds for phase in rest if phase.name == name))
    of_nvcc = [phase for report in reports for phase in report.phases if phase.name == "nvcc"]
    hung = max(of_nvcc, key=lambda phase: phase.seconds)
    assert hung.seconds > 0.8 * COMPILE_CPU_SECONDS, "nvcc hung on a file until its limit; the rest are steps before"
    assert any(phase.kernels for phase in of_nvcc), "a file was compiled again without the kernel that nvcc named"


def test_the_winners_record_names_blobs_that_are_what_they_say(client: Client, job: Job) -> None:
    record: WinnerRecord = client.kernel(report(job, "healthy").key)
    best = record.front[0]
    assert best.candidate == report(job, "healthy").winner.candidate
    for digest in (best.so_sha256, best.cubin_sha256, best.source_sha256):
        assert hashlib.sha256(client.blob(digest)).hexdigest() == digest
    assert best.launch.functions[0].symbol.encode() in client.blob(best.cubin_sha256)
    assert best.verdict["venue"] == "cpu"
    assert {case["kind"] for case in best.verdict["cases"]} == {"integer", "normal", "special"}
    assert all(case["max_error"] == 0 for case in best.verdict["cases"] if case["exact"])


def test_a_candidate_and_the_winner_s_record_say_where_shared_memory_was_accessed(client: Client, job: Job) -> None:
    best = client.kernel(report(job, "healthy").key).front[0]
    page = CandidatePage.model_validate(get(client, f"/v1/jobs/{job.job}/candidates"))
    listed = next(
        candidate
        for candidate in page.candidates
        if (candidate.problem, candidate.candidate) == ("healthy", best.candidate)
    )
    assert listed.shared_memory
    assert [site.model_dump() for site in listed.shared_memory] == best.verdict["shared_memory"]
    assert {site.kind for site in listed.shared_memory} == {"read", "write"}
    assert all(site.wavefronts >= site.ideal >= site.warp_accesses > 0 for site in listed.shared_memory)
    lost = [site.wavefronts - site.ideal for site in listed.shared_memory]
    assert lost == sorted(lost, reverse=True)
    uncompiled = next(candidate for candidate in page.candidates if candidate.verdict == "compile_error")
    assert uncompiled.shared_memory is None


def test_the_winner_built_alone_has_the_code_that_was_verified_in_its_group(client: Client) -> None:
    job = client.tune([{**PROBLEM, "name": "together", "search": schedules(60, 61)}], target="sm_80")
    best = client.kernel(job.problems[0].key).front[0]
    page = CandidatePage.model_validate(get(client, f"/v1/jobs/{job.job}/candidates"))
    group = next(candidate.group for candidate in page.candidates if candidate.candidate == best.candidate)
    shown = GroupReport.model_validate(get(client, f"/v1/groups/{group}"))
    profiled = next(kernel for kernel in shown.kernels if kernel.kernel == best.kernel)
    assert len(shown.kernels) > 1
    assert profiled.code_digest == best.code_digest


def test_the_same_request_again_is_answered_from_the_cache(client: Client, job: Job) -> None:
    request = {"target": "sm_80", "search": {"level": 1, "limit": 3}, "problems": [MATMUL]}
    response = httpx.post(f"{client.url}/v1/jobs", json=request, timeout=60)
    assert response.status_code == 200
    again = Job.model_validate(response.json())
    assert (again.state, again.cached) == ("done", True)
    assert again.problems[0].winner == report(job, "healthy").winner


def test_candidates_show_their_largest_error_beside_its_bound(client: Client, job: Job) -> None:
    page = CandidatePage.model_validate(get(client, f"/v1/jobs/{job.job}/candidates?problem=healthy"))
    assert len(page.candidates) == 3
    for candidate in page.candidates:
        assert candidate.max_error is not None and candidate.error_bound is not None
        assert 0 < candidate.max_error <= candidate.error_bound < 1


def test_a_winner_whose_bytes_were_lost_is_built_again(client: Client, job: Job, blobs: Path) -> None:
    before = client.kernel(report(job, "healthy").key).front[0]
    file = blobs / "sha256" / before.so_sha256[:2] / before.so_sha256
    file.unlink()
    request = {"target": "sm_80", "search": {"level": 1, "limit": 3}, "problems": [MATMUL]}
    again = client.submit(request)
    assert not again.cached
    ended = client.wait(again)
    assert ended.state == "done"
    winner = ended.problems[0].winner
    assert winner is not None and winner.candidate == before.candidate
    response = httpx.get(f"{client.url}/v1/blobs/sha256/{winner.so_sha256}", timeout=60)
    assert hashlib.sha256(response.content).hexdigest() == winner.so_sha256
    assert client.submit(request).cached


def test_a_smaller_search_is_covered_and_a_larger_one_is_not(client: Client, job: Job) -> None:
    smaller = client.submit({"target": "sm_80", "search": {"level": 1, "limit": 2}, "problems": [MATMUL]})
    assert smaller.cached
    larger = client.submit({"target": "sm_80", "search": {"level": 1, "limit": 4}, "problems": [MATMUL]})
    assert not larger.cached
    assert client.wait(larger).problems[0].verdicts == {"ok": 4}


def test_known_kernels_are_not_compiled_again_for_other_extents(client: Client, job: Job) -> None:
    other = client.tune([{**MATMUL, "m": 80}], target="sm_80", search={"level": 1, "limit": 3})
    page = CandidatePage.model_validate(get(client, f"/v1/jobs/{other.job}/candidates"))
    before = CandidatePage.model_validate(get(client, f"/v1/jobs/{job.job}/candidates"))
    groups = {candidate.kernel: candidate.group for candidate in before.candidates}
    shared = [candidate for candidate in page.candidates if candidate.kernel in groups]
    assert shared, "the two problems have kernels in common"
    assert all(each.group == groups[each.kernel] for each in shared)
