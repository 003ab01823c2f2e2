"""The command line against a scripted service: what it prints, where, and its exit codes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cukiln.errors import ServiceUnreachable
from cukiln.kernels import load_kernel
from tests.support.fixtures.client import ScriptedService, exit_code, job_json, problem_json, progress_json, record_json

REQUEST = {"target": "sm_90a", "problems": [{"name": "ffn1", "operator": "matmul", "m": 4, "n": 4, "k": 4}]}
ISSUE_KEYS = ["name", "key", "winner", "verdicts", "rejected", "seconds"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cukiln(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in an empty folder; returns its exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUKILN_URL", raising=False)
    Path("request.json").write_text(json.dumps(REQUEST))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = exit_code(monkeypatch, *arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def events(*messages: dict[str, Any]) -> Response:
    text = "".join(f"id: {i}-0\nevent: {m.pop('type')}\ndata: {json.dumps(m)}\n\n" for i, m in enumerate(messages, 1))
    return Response(text, media_type="text/event-stream")


def finishing(service: ScriptedService, job: dict[str, Any]) -> None:
    """The service accepts a job, makes progress, and ends it as `job`."""
    service.on("POST", "/v1/jobs", job_json("queued"))
    steps = [{"type": "progress", "state": "running", "progress": progress_json(i)} for i in (1, 2)]
    service.on("GET", "/v1/jobs/job1/events", events(*steps, {"type": "end", "state": job["state"]}))
    service.on("GET", "/v1/jobs/job1", job)


def with_problem(job: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**job, "problems": [{**job["problems"][0], **changes}]}


def test_tune_shows_progress_on_stderr_and_the_winners_on_stdout(cukiln: Run, scripted: ScriptedService) -> None:
    finishing(scripted, job_json("done"))
    code, out, err = cukiln("tune", "request.json", "--url", scripted.url)
    assert code == 0
    row = next(line for line in out.splitlines() if line.startswith("ffn1"))
    assert "  tile 128×64×16, stages 2  " in row
    assert "cpu" in row
    assert "predicted 812 µs" in row
    assert any(line.split() == ["ffn1", "0.00", "0.00", "4.20", "0.00"] for line in out.splitlines())  # below
    assert "predicted µs: an estimate for sm_90a" in out
    assert "verified cpu: the kernel's own source, run on the CPU" in out
    assert "Job job1: done, 1 problem, 64 candidates (64 ok)" in out
    assert "lower 1/4, compile 1/4, verify 1/4, finish 1/4; candidates: 1 done, 0 failed; about 3.0 s left" in err
    assert scripted.calls("POST", "/v1/jobs")[0].json == REQUEST


def test_tune_asks_for_every_candidates_ptx_and_says_what_it_took(cukiln: Run, scripted: ScriptedService) -> None:
    cost = {"kernels": {"incorrect": 1, "ok": 23}, "cpu_seconds": 38.24}
    finishing(scripted, with_problem(job_json("done"), ptx=cost))
    code, out, _ = cukiln("tune", "request.json", "--ptx", "all", "--url", scripted.url)
    assert code == 0 and "From their PTX: 24 kernels (23 ok, 1 incorrect), 38.2 CPU s." in out
    assert scripted.calls("POST", "/v1/jobs")[0].json == {**REQUEST, "ptx": "all"}
    code, out, _ = cukiln("tune", "request.json", "--ptx", "all", "--json", "--url", scripted.url)
    assert json.loads(out)["problems"][0]["ptx"] == cost
    code, _, err = cukiln("tune", "request.json", "--ptx", "some", "--url", scripted.url)
    assert code == 2 and "winners" in err


def rows_of(out: str) -> list[str]:
    """The lines of the table's only problem: its cells are wrapped."""
    return "\n".join(out.splitlines()[1:]).split("\n\n")[0].split("\nverified ")[0].splitlines()


def test_tune_says_what_a_winner_needs_of_its_caller(cukiln: Run, scripted: ScriptedService) -> None:
    job = job_json("done")
    winner = {**job["problems"][0]["winner"], "workspace_bytes": 4_194_304, "deterministic": False}
    finishing(scripted, with_problem(job, winner=winner))
    _, out, _ = cukiln("tune", "request.json", "--url", scripted.url)
    described = " ".join(line[len("problem") :].split("cpu")[0].strip() for line in rows_of(out))
    assert described.endswith("stages 2; 4,194,304 bytes of workspace; bits differ from run to run")


def test_tune_json_ends_with_one_object_of_the_promised_form(cukiln: Run, scripted: ScriptedService) -> None:
    finishing(scripted, job_json("done"))
    code, out, _ = cukiln("tune", "request.json", "--json", "--url", scripted.url)
    assert code == 0
    assert len(out.splitlines()) == 1
    answer = json.loads(out)
    assert list(answer) == ["job", "state", "cached", "problems"]
    (problem,) = answer["problems"]
    assert list(problem) == ISSUE_KEYS
    assert list(problem["winner"]) == [
        "candidate",
        "schedule",
        "verified",
        "ptx",
        "ranked_by",
        "predicted_us",
        "measured_us",
        "vendor_us",
        "vendor_library",
        "vendor_max_error",
        "vendor_error_bound",
        "vendor_ratio",
        "vendor_missing",
        "unsteady",
        "limited_by",
        "runner_up",
        "so_sha256",
        "workspace_bytes",
        "deterministic",
    ]
    assert problem["winner"]["measured_us"] is None
    assert list(problem["seconds"]) == ["lower", "codegen", "compile", "verify", "measure"]
    assert problem["seconds"]["compile"] == {"wall": 4.2, "cpu": 8.0}


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("partial", 3), ("failed", 1), ("cancelled", 1)])
def test_the_exit_code_says_how_the_job_ended(state: str, code: int, cukiln: Run, scripted: ScriptedService) -> None:
    job = job_json(state)
    if state != "done":
        job = with_problem(job, state="failed", winner=None, error="no candidate is left: 64 incorrect")
    finishing(scripted, job)
    ended, out, _ = cukiln("tune", "request.json", "--url", scripted.url)
    assert ended == code
    assert ("failed: no candidate is left: 64 incorrect" in out) == (state != "done")


def test_a_failed_problem_says_why_in_json(cukiln: Run, scripted: ScriptedService) -> None:
    finishing(scripted, with_problem(job_json("failed"), state="failed", winner=None, error="no candidate is left"))
    code, out, _ = cukiln("tune", "request.json", "--json", "--url", scripted.url)
    assert code == 1
    assert json.loads(out)["problems"][0]["winner"] is None
    assert json.loads(out)["problems"][0]["error"] == "no candidate is left"


def test_a_cached_answer_says_so(cukiln: Run, scripted: ScriptedService) -> None:
    scripted.on("POST", "/v1/jobs", job_json("done", cached=True))
    code, out, _ = cukiln("tune", "request.json", "--url", scripted.url)
    assert code == 0
    assert "1 problem answered from the cache in " in out
    assert "nothing was compiled" in out


@pytest.mark.parametrize("as_json", [False, True])
def test_again_says_how_the_second_request_was_answered(as_json: bool, cukiln: Run, scripted: ScriptedService) -> None:
    scripted.on("POST", "/v1/jobs", job_json("done"), job_json("done", job="job2", cached=True))
    code, out, _ = cukiln("tune", "request.json", "--again", *["--json"] * as_json, "--url", scripted.url)
    assert code == 0
    assert len(scripted.calls("POST", "/v1/jobs")) == 2
    if as_json:
        assert json.loads(out)["job"] == "job1"
        assert json.loads(out)["again"]["cached"] is True
    else:
        assert "The same request again was answered from the cache in " in out


def test_again_leaves_no_second_job_running(cukiln: Run, scripted: ScriptedService) -> None:
    scripted.on("POST", "/v1/jobs", job_json("partial"), job_json("queued", job="job2"))
    scripted.on("DELETE", "/v1/jobs/job2", job_json("cancelled", job="job2"))
    scripted.on("GET", "/v1/jobs/job2", job_json("cancelled", job="job2"))
    code, out, _ = cukiln("tune", "request.json", "--again", "--url", scripted.url)
    assert code == 3
    assert "not answered from the cache" in out
    assert len(scripted.calls("DELETE", "/v1/jobs/job2")) == 1


@pytest.mark.parametrize("cancel", [False, True])
def test_ctrl_c_cancels_the_job_only_when_asked_to(
    cancel: bool, cukiln: Run, scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    scripted.on("POST", "/v1/jobs", job_json("queued"))
    scripted.on("DELETE", "/v1/jobs/job1", job_json("cancelled"))
    scripted.on("GET", "/v1/jobs/job1", job_json("cancelled"))
    monkeypatch.setattr("cukiln.client.Client.wait", interrupted)
    option = ["--cancel-on-interrupt"] if cancel else []
    code, out, err = cukiln("tune", "request.json", *option, "--url", scripted.url)
    assert code == 130
    assert out == ""
    assert len(scripted.calls("DELETE", "/v1/jobs/job1")) == cancel
    assert ("Job job1 is cancelled" in err) == cancel
    assert ("Job job1 is kept" in err and "`cukiln watch job1` follows it" in err) != cancel


def test_watch_takes_up_a_job_and_says_how_long_it_took(cukiln: Run, scripted: ScriptedService) -> None:
    ended = {**job_json("done"), "created_at": 1000.0, "finished_at": 1185.0}
    scripted.on("GET", "/v1/jobs/job1", ended)
    code, out, _ = cukiln("watch", "job1", "--url", scripted.url)
    assert code == 0
    assert "Job job1: done" in out
    assert "3 min 5 s." in out
    assert scripted.calls("POST", "/v1/jobs") == []
    code, out, _ = cukiln("watch", "job1", "--json", "--url", scripted.url)
    assert (code, json.loads(out)["job"]) == (0, "job1")


def test_watch_never_cancels(cukiln: Run, scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    scripted.on("GET", "/v1/jobs/job1", job_json("running"))
    monkeypatch.setattr("cukiln.client.Client.wait", interrupted)
    code, _, err = cukiln("watch", "job1", "--url", scripted.url)
    assert code == 130
    assert "Job job1 is kept" in err
    assert scripted.calls("DELETE", "/v1/jobs/job1") == []


def test_a_lost_service_says_how_its_job_is_found_again(
    cukiln: Run, scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise ServiceUnreachable("no answer from the cukiln service", method="GET", url=scripted.url)

    scripted.on("POST", "/v1/jobs", job_json("queued"))
    monkeypatch.setattr("cukiln.client.Client.wait", lost)
    code, _, err = cukiln("tune", "request.json", "--url", scripted.url)
    assert code == 1
    assert "Job job1 is kept" in err
    assert "`cukiln watch job1` follows it" in err
    assert "no answer from the cukiln service" in err


def targets_json(**classes: list[str]) -> dict[str, Any]:
    """Architectures that the service compiles for, with the classes of their GPUs."""
    targets = [
        {
            "target": target,
            "name": target,
            "data_sheet": {},
            "toolchains": ["t"],
            "device_classes": [*each, f"predicted:{target}"],
        }
        for target, each in classes.items()
    ]
    return {"targets": targets, "toolchains": []}


@pytest.mark.checkout
@pytest.mark.parametrize(
    ("classes", "target"),
    [
        ({"sm_80": [], "sm_90": [], "sm_90a": []}, "sm_90a"),
        ({"sm_80": [], "sm_90": ["NVIDIA H200"], "sm_90a": ["NVIDIA H200"]}, "sm_90a"),
        ({"sm_80": ["NVIDIA A100"], "sm_90": ["NVIDIA H200"], "sm_90a": ["NVIDIA H200"]}, "sm_90a"),
        ({"sm_80": ["NVIDIA A100"], "sm_90": [], "sm_90a": []}, "sm_80"),
        ({"sm_80": ["NVIDIA A100"]}, "sm_80"),
        ({"sm_90a": ["NVIDIA H200"], "sm_99": ["of a newer release"]}, "sm_90a"),
        ({"sm_80": ["NVIDIA A100"], "sm_89": ["NVIDIA L4"], "sm_100a": ["NVIDIA B200"]}, "sm_100a"),
        ({"sm_100": ["NVIDIA B200"], "sm_100a": ["NVIDIA B200"], "sm_89": ["NVIDIA L4"]}, "sm_100a"),
    ],
)
def test_the_quickstart_is_tuned_for_the_gpu_that_is_there(
    classes: dict[str, list[str]], target: str, cukiln: Run, scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUKILN_URL", scripted.url)
    scripted.on("GET", "/v1/targets", targets_json(**classes))
    scripted.on("POST", "/v1/jobs", job_json("done", cached=True))
    code, out, err = cukiln("quickstart")
    assert code == 0
    sent = [call.json["target"] for call in scripted.calls("POST", "/v1/jobs")]
    assert sent == [target, target]  # the second is the question whether it is cached
    assert ("There is a GPU here, NVIDIA A100: kernels are tuned for it (sm_80)." in err) == (target == "sm_80")
    assert "answered from the cache" in out


def test_a_refused_request_is_one_line_per_fault_and_no_traceback(cukiln: Run, scripted: ScriptedService) -> None:
    fault = {"field": "problems[0].m", "detail": "is -1; at least 1 is allowed"}
    answer = problem_json(422, "invalid-value", "problems[0].m is -1; at least 1 is allowed", errors=[fault, fault])
    scripted.on("POST", "/v1/jobs", answer)
    code, out, err = cukiln("tune", "request.json", "--url", scripted.url)
    assert code == 2
    assert out == ""
    line = "  problems[0].m: is -1; at least 1 is allowed"
    assert err.splitlines() == ["cukiln: problems[0].m is -1; at least 1 is allowed", line, line]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON: Expecting property name"),
        (b"\xff", "is not UTF-8 text (byte 0)"),
        (b"[]", "is not a job request"),
        (b'{"problems": {}}', "is not a job request"),
        (b'{"problems": []}', "has no problem"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (None, "cannot read request.json: No such file or directory"),
    ],
)
def test_a_file_that_is_no_request_is_refused_before_anything_starts(
    content: bytes | None, message: str, cukiln: Run
) -> None:
    if content is None:
        Path("request.json").unlink()
    else:
        Path("request.json").write_bytes(content)
    code, _, err = cukiln("tune", "request.json")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert message in err


def test_no_service_at_the_address_is_one_line(cukiln: Run) -> None:
    code, _, err = cukiln("lookup", "request.json", "--url", "http://127.0.0.1:9")
    assert code == 1
    assert err.startswith("cukiln: no answer from the cukiln service at http://127.0.0.1:9")
    assert len(err.splitlines()) == 1


def test_an_unknown_option_is_wrong_use(cukiln: Run) -> None:
    assert cukiln("tune", "request.json", "--nonsense")[0] == 2


# lookup and fetch

BLOBS = {"so": b"library", "cubin": b"cubin", "source": b"source"}
DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, data in BLOBS.items()}


@pytest.fixture
def with_winner(scripted: ScriptedService) -> ScriptedService:
    """Knows one winner (ffn1), and its blobs."""
    record = record_json(**DIGESTS)

    def answer(request: Request) -> Response:
        asked = request.state.seen.json["problems"]
        results = [
            {"name": p["name"], "key": "a" * 64, "record": record if p["name"] == "ffn1" else None} for p in asked
        ]
        return JSONResponse({"results": results, "hits": 1, "misses": len(results) - 1})

    scripted.on("POST", "/v1/lookups", answer)
    scripted.on("GET", f"/v1/kernels/{'a' * 64}", record)
    for name, data in BLOBS.items():
        scripted.on("GET", f"/v1/blobs/sha256/{DIGESTS[name]}", Response(data))
    return scripted


def two_problems() -> None:
    problems = [REQUEST["problems"][0], {**REQUEST["problems"][0], "name": "other/../x", "m": 8}]  # type: ignore[index, dict-item]
    Path("request.json").write_text(json.dumps({**REQUEST, "problems": problems}))


def test_lookup_shows_hits_and_misses(cukiln: Run, with_winner: ScriptedService) -> None:
    code, out, _ = cukiln("lookup", "request.json", "--url", with_winner.url)
    assert code == 0
    assert "predicted 12.5 µs" in out
    two_problems()
    code, out, _ = cukiln("lookup", "request.json", "--url", with_winner.url)
    assert code == 3
    assert "no winner yet" in out
    assert [line.split() for line in out.splitlines() if "a" * 64 in line] == [
        ["a" * 64, "ffn1"],
        ["a" * 64, "other/../x"],
    ]
    code, out, _ = cukiln("lookup", "request.json", "--json", "--url", with_winner.url)
    answer = json.loads(out)
    assert (code, answer["hits"], answer["misses"]) == (3, 1, 1)


def test_a_lookup_shows_what_a_neighbour_lends_as_no_winner(cukiln: Run, scripted: ScriptedService) -> None:
    lent = {"key": "b" * 64, "revision": 3, "device_class": "H100", "problem": {"m": 96}, "distance": 1.5}
    result = {"name": "ffn1", "key": "a" * 64, "record": record_json(tuned_for=lent)}
    scripted.on("POST", "/v1/lookups", {"results": [result], "hits": 0, "misses": 1})
    Path("request.json").write_text(json.dumps({**REQUEST, "search": {"level": 0}}))
    code, out, _ = cukiln("lookup", "request.json", "--on-miss", "nearest", "--url", scripted.url)
    assert code == 3 and "no winner yet; a neighbour's:" in " ".join(out.split())
    sent = scripted.calls("POST", "/v1/lookups")[0].json
    assert (sent["on_miss"], sent["search"]) == ("nearest", {"level": 0})
    code, _, err = cukiln("lookup", "request.json", "--on-miss", "near", "--url", scripted.url)
    assert code == 2 and "nearest" in err


def test_a_lookup_keeps_to_the_policy_of_the_request(cukiln: Run, with_winner: ScriptedService) -> None:
    policy = {"workspace_limit_bytes": 1024, "deterministic": True}
    Path("request.json").write_text(json.dumps({**REQUEST, **policy}))
    cukiln("lookup", "request.json", "--url", with_winner.url)
    sent = with_winner.calls("POST", "/v1/lookups")[0].json
    assert {name: sent.get(name) for name in policy} == policy


def test_a_job_that_cannot_be_one_is_said_before_anything_is_asked(cukiln: Run, scripted: ScriptedService) -> None:
    code, out, err = cukiln("reproduce", "c" * 8, "--job", "nope", "--url", scripted.url)
    assert (code, out) == (2, "")
    assert err.startswith("cukiln: there is no job 'nope': a job's id is 32 lower-case hexadecimal digits")
    assert scripted.calls("GET", f"/v1/candidates/{'c' * 8}") == []


@pytest.mark.checkout
def test_a_candidate_whose_job_was_removed_is_said_with_what_to_do(cukiln: Run, scripted: ScriptedService) -> None:
    path = f"/v1/candidates/{'c' * 8}"
    scripted.on("GET", path, problem_json(404, "candidate-not-found", "There is no candidate 'cccccccc'."))
    code, _, err = cukiln("reproduce", "c" * 8, "--url", scripted.url)
    assert code != 0
    assert "There is no candidate 'cccccccc'. Jobs" in err
    assert "Jobs that ended long ago are removed with their candidates" in err


def test_fetch_by_file_writes_a_folder_that_load_reads(cukiln: Run, with_winner: ScriptedService) -> None:
    two_problems()
    code, out, err = cukiln("fetch", "request.json", "--out", "out", "--url", with_winner.url)
    assert code == 3
    assert out.splitlines() == ["out/ffn1/record.json"]
    assert err.startswith("other/../x: no winner yet")
    names = {DIGESTS["so"] + ".so", DIGESTS["cubin"] + ".cubin", DIGESTS["source"] + ".cu", "record.json"}
    assert {path.name for path in Path("out/ffn1").iterdir()} == names
    assert load_kernel.read_record(Path("out/ffn1")).front[0].so_sha256 == DIGESTS["so"]


def test_fetch_by_key_uses_the_key_as_the_folders_name(cukiln: Run, with_winner: ScriptedService) -> None:
    code, out, _ = cukiln("fetch", "a" * 64, "--out", "out", "--url", with_winner.url)
    assert (code, out) == (0, f"out/{'a' * 16}/record.json\n")


def test_an_interrupted_fetch_leaves_the_old_record_whole(cukiln: Run, with_winner: ScriptedService) -> None:
    cukiln("fetch", "a" * 64, "--out", "out", "--url", with_winner.url)
    folder = Path("out") / ("a" * 16)
    before = (folder / "record.json").read_bytes()
    newer = record_json(so="9" * 64, cubin=DIGESTS["cubin"], source=DIGESTS["source"], revision=2)
    with_winner.on("GET", f"/v1/kernels/{'a' * 64}", newer)
    with_winner.on("GET", f"/v1/blobs/sha256/{'9' * 64}", Response(b"something else"))
    code, _, err = cukiln("fetch", "a" * 64, "--out", "out", "--url", with_winner.url)
    assert code == 1
    assert "does not have the promised content" in err
    assert (folder / "record.json").read_bytes() == before
    assert not any(path.name.startswith(("9", ".")) for path in folder.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(cukiln: Run, with_winner: ScriptedService) -> None:
    Path("out").touch()
    code, out, err = cukiln("fetch", "a" * 64, "--out", "out", "--url", with_winner.url)
    assert (code, out) == (2, "")
    assert err.startswith(f"cukiln: cannot write out/{'a' * 16}/") and err.endswith(": Not a directory\n")


def test_an_unknown_key_is_one_line(cukiln: Run, scripted: ScriptedService) -> None:
    scripted.on("GET", f"/v1/kernels/{'a' * 64}", problem_json(404, "kernel-not-found", "There is no winner record"))
    code, _, err = cukiln("fetch", "a" * 64, "--out", "out", "--url", scripted.url)
    assert (code, err) == (1, "cukiln: There is no winner record\n")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["tune"], "FILE"),
        (["watch"], "JOB"),
        (["retry"], "JOB"),
        (["candidates"], "JOB"),
        (["accuracy"], "JOB"),
        (["export-bundle"], "JOB|FILE"),
        (["fetch", "--out", "out"], "KEY|FILE"),
        (["fetch", "key", "--out"], "--out"),
        (["import-results"], "FOLDER|FILE"),
        (["reproduce"], "CANDIDATE"),
        (["forget"], "KEY|BUILD"),
        (["imports", "withdraw"], "ID"),
        (["backup"], "FOLDER"),
        (["restore"], "FOLDER"),
        (["serve", "--data"], "--data"),
    ],
)
def test_an_empty_argument_is_refused_by_its_name(
    command: list[str], name: str, cukiln: Run, scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUKILN_URL", scripted.url)
    monkeypatch.setattr("cukiln.cli.server.load_settings", lambda given: pytest.fail("the service starts"))
    code, _, err = cukiln(*command, "")
    assert code == 2
    assert f"Invalid value for '{name}': it is empty" in err
    assert not scripted.seen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fetch", "e28f", "--out", "out"], "'e28f' is neither a file nor a key: give 64 hexadecimal digits, or"),
        (["profile", "d92468d"], "'d92468d' is neither a file nor a job: give 32 lower-case hexadecimal digits, or"),
    ],
)
def test_too_few_digits_are_answered_with_how_many_are_enough(
    cukiln: Run, scripted: ScriptedService, arguments: list[str], message: str
) -> None:
    code, _, err = cukiln(*arguments, "--url", scripted.url)
    assert code == 2 and message in err and not scripted.seen


@pytest.mark.parametrize("command", ["lookup", "lock"])
def test_a_problem_of_a_file_that_is_none_is_named(cukiln: Run, scripted: ScriptedService, command: str) -> None:
    Path("request.json").write_text('{"target": "cpu", "problems": [{"operator": "matmul"}, 1]}')
    code, _, err = cukiln(command, "request.json", "--url", scripted.url)
    assert code == 2 and "problems[1] is 1; expected an object such as" in err and not scripted.seen


def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cukiln", "cache", "ls"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "cukiln: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    ("command", "closed", "status"),
    [("--version", ">&-", 0), ("cache ls", ">&-", 0), ("lookup missing.json", "2>&-", 2)],
)
def test_a_closed_output_is_no_error(command: str, closed: str, status: int) -> None:
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m cukiln {command} {closed}"], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, b"", b"")
