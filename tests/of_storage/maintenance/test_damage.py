"""A blob that is damaged or gone is set aside, and built anew by the next job; what is stored is deleted."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from cukiln.cli import main
from cukiln.types import StageSeconds
from service.winner_cache import FRESH_SECONDS
from storage.blobs import blob_store
from storage.database.session import Database
from storage.database.sql import core
from storage.database.tables import BuildRow, GroupRow, JobProblemRow, JobRow, MeasurementRow, VerdictRow
from storage.entities.groups import NewBuild
from storage.entities.jobs import problems_to_plan
from storage.entities.task_kinds import PLAN, plan_ref
from storage.entities.verdicts import CPU, GPU, NewVerdict, write_verdicts
from storage.entities.winners import get_winners, publish_winner, withdraw_winner
from storage.queue import tasks
from storage.queue.new_tasks import NewTask, add_tasks
from storage.transitions import take_work
from storage.transitions.apply_verdicts import Versions
from storage.transitions.pending_builds import NewCandidate, PlannedProblem, end_plan, record_candidates
from tests.support.fixtures.api import MATMUL, Api, publish
from tests.support.fixtures.storage import VERSIONS, EveryOperator, new_build, winner_record

LIBRARY = b"a library of a winner"
DIGEST = hashlib.sha256(LIBRARY).hexdigest()
PATH = f"/v1/blobs/sha256/{DIGEST}"


def flip_a_bit(api: Api, digest: str = DIGEST) -> None:
    path = api.blobs.path(digest)
    assert path is not None
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def quarantined(api: Api) -> list[Path]:
    return sorted((api.settings.data_dir / "blobs" / "quarantine").glob("*"))


@pytest.fixture
def winner(api: Api) -> str:
    """The key of a record that answers MATMUL with LIBRARY."""
    api.blobs.put(LIBRARY, "application/x-sharedlib")
    return publish(api.database, blob=DIGEST).key


def commanded(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str]:
    """Exit code and output of a command over the service's data."""
    monkeypatch.setenv("CUKILN_DATA", str(api.settings.data_dir))
    monkeypatch.setenv("CUKILN_URL", api.url)
    monkeypatch.setattr("sys.argv", ["cukiln", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0), capsys.readouterr().out


def test_a_damaged_blob_that_is_asked_for_is_built_anew_by_the_next_job(
    api: Api, winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_bit(api)
    assert api.submit().json()["cached"], "the damage is not seen without reading"
    answer = api.client.get(PATH)
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:cukiln:problem:blob-corrupt")
    assert "submit the problem again" in answer.json()["detail"]
    assert api.client.get(PATH).status_code == 404
    job = api.submit()
    assert (job.status_code, job.json()["cached"]) == (202, False)
    time.sleep(2 * FRESH_SECONDS)
    assert api.client.post("/v1/lookups", json={"problems": [MATMUL]}).json()["misses"] == 1
    assert api.client.get(f"/v1/kernels/{winner}").status_code == 404
    (aside,) = quarantined(api)
    assert aside.name.startswith(DIGEST)
    api.blobs.sweep(older_than_seconds=-60)
    assert quarantined(api) == [aside], "what is set aside is kept to be looked at"
    monkeypatch.setattr(blob_store, "ASIDE_SECONDS", -60.0)
    api.blobs.sweep()
    assert quarantined(api) == []


def test_a_kernel_stays_that_only_lost_a_file_that_describes_it(api: Api, winner: str) -> None:
    source = api.blobs.put(b"// a source", "text/x-cuda").digest
    with api.database.read() as session:
        record = get_winners(session, [winner])[winner]
    publish_with_source(api.database, winner, source)
    flip_a_bit(api, source)
    assert api.client.get(f"/v1/blobs/sha256/{source}").status_code == 500
    remaining = api.client.get(f"/v1/kernels/{winner}").json()
    assert [entry["so_sha256"] for entry in remaining["front"]] == [record.front[0].so_sha256]
    assert api.submit().status_code == 202, "it does not count as cached: the next job writes the source again"


def publish_with_source(database: Database, key: str, source: str) -> None:
    with database.write() as session:
        record = get_winners(session, [key])[key]
        entry = record.front[0].model_copy(update={"source_sha256": source})
        new = record.model_copy(update={"front": [entry]})
        publish_winner(session, new, attempt="another")


@pytest.mark.parametrize("fate", ["damaged", "gone"])
def test_verify_names_what_needs_a_blob_and_repair_takes_it_out_of_service(
    fate: str, api: Api, winner: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with api.database.write() as session:
        session.execute(
            core(GroupRow).insert().values(
                id="a" * 32, target="sm_80", state="compiled", kernels=[], created_at=0.0, library=DIGEST
            )
        )  # fmt: skip
    assert commanded(api, monkeypatch, capsys, "blobs", "verify")[0] == 0
    if fate == "damaged":
        flip_a_bit(api)
    else:
        path = api.blobs.path(DIGEST)
        assert path is not None
        path.unlink()
    code, out = commanded(api, monkeypatch, capsys, "blobs", "verify")
    assert code == 1
    for words in (DIGEST, f"needed by winner {winner}", f"needed by group {'a' * 32}", "1 damaged or gone"):
        assert words in out
    assert api.submit().json()["cached"] == (fate == "damaged"), "verifying changes nothing"
    code, out = commanded(api, monkeypatch, capsys, "blobs", "repair", "--json")
    assert (code, json.loads(out)["repaired"], len(json.loads(out)["damaged"])) == (0, True, 1)
    assert commanded(api, monkeypatch, capsys, "blobs", "verify")[0] == 0
    assert api.submit().status_code == 202
    assert len(quarantined(api)) == (fate == "damaged")
    assert api.client.get(f"/v1/groups/{'a' * 32}").json()["library_sha256"] is None


def test_commands_on_the_data_say_where_they_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUKILN_DATA", str(tmp_path / "none"))
    monkeypatch.setattr("sys.argv", ["cukiln", "blobs", "verify"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert f"there is no database {tmp_path}/none/cukiln.db" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


# ---- forgetting


def planned(api: Api, *builds: NewBuild) -> str:
    """A live job of MATMUL whose candidates name these builds."""
    job: str = api.submit({**MATMUL, "m": 96}).json()["job"]
    with api.database.write() as session:
        add_tasks(session, [NewTask(PLAN, plan_ref(job, 0, 0), jobs=(job,))])
        lease = take_work.take(session, ["plan"], None, "w", 60.0)
        assert lease is not None
        (problem,) = problems_to_plan(session, lease)
        pairs = [(problem.id, NewCandidate(f"{new.id:c>64}", {}, new.kernel, new.id)) for new in builds]
        record_candidates(session, lease, pairs, {build.id: build for build in builds}, Versions(**VERSIONS))
        planned = PlannedProblem(problem.id, len(builds), len(builds), {}, StageSeconds())
        end_plan(session, lease, planned)
        tasks.complete(session, lease)
    return job


def built(api: Api, job: str, verdict: str = "ok", **values: object) -> None:
    """As if all builds of the job had become this, and the job had failed."""
    with api.database.write() as session:
        code = {"code_digest": "d" * 64} if verdict == "ok" else {}
        session.execute(core(BuildRow).update().values(**{"state": verdict, **code, **values}))
        session.execute(
            core(JobProblemRow).update().where(JobProblemRow.job_id == job).values(state="failed", error="no")
        )
        session.execute(core(JobRow).update().where(JobRow.id == job).values(state="failed", finished_at=time.time()))
        items_of = core(tasks.TaskRow)
        session.execute(items_of.update().values(state="done", finished_at=time.time()))
        candidates = core(JobProblemRow).metadata.tables["candidates"]
        session.execute(candidates.update().values(verdict=verdict if verdict != "ok" else "run_timeout"))
        session.execute(core(JobProblemRow).metadata.tables["pending_builds"].delete())


BUILD = new_build("b" * 64)


def test_a_build_is_forgotten_with_its_verdicts_by_a_prefix_and_by_the_command(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built(api, planned(api, BUILD))
    with api.database.write() as session:
        write_verdicts(
            session,
            [NewVerdict("d" * 64, "matmul", "incorrect", "3 are wrong", {}, 0.0, 0.0)],
            GPU,
            EveryOperator("g1"),
        )
        write_verdicts(session, [NewVerdict(BUILD.slice, "matmul", "ok", None, {}, 0.0, 0.0)], CPU, EveryOperator("1"))
    assert commanded(api, monkeypatch, capsys, "forget", "b" * 7)[0] == 1, "too few digits"
    code, out = commanded(api, monkeypatch, capsys, "forget", "b" * 8)
    assert code == 0
    assert out == "Forgotten: 1 build, 2 verdicts, 0 measurements. The next job that asks tunes again.\n"
    with api.database.read() as session:
        assert session.scalars(select(BuildRow.id)).all() == session.scalars(select(VerdictRow.subject)).all() == []
    assert api.client.delete(f"/v1/builds/{'b' * 64}").json()["type"] == "urn:cukiln:problem:build-not-found"


def test_a_build_that_a_live_job_needs_stays(api: Api) -> None:
    planned(api, BUILD)
    answer = api.client.delete(f"/v1/builds/{BUILD.id}")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cukiln:problem:build-in-use")
    with api.database.read() as session:
        assert session.scalars(select(BuildRow.id)).all() == [BUILD.id]


def test_a_prefix_of_several_builds_is_refused_with_their_ids(api: Api) -> None:
    ids = [f"{'b' * 60}{number:04}" for number in range(2)]
    built(api, planned(api, *(new_build(row) for row in ids)))
    answer = api.client.delete(f"/v1/builds/{'b' * 8}")
    assert (answer.status_code, answer.json()["allowed"]) == (409, ids)


def test_a_winner_is_forgotten_with_what_answered_it(api: Api, winner: str) -> None:
    with api.database.write() as session:
        (entry,) = get_winners(session, [winner])[winner].front
        code = entry.code_digest
        values = {
            "id": "b" * 64, "kernel": entry.kernel, "slice": "s" * 64, "toolchain": "t" * 64, "target": "sm_80",
            "state": "ok", "code_digest": code, "created_at": 0.0,
        }  # fmt: skip
        session.execute(core(BuildRow).insert().values(**values))
        write_verdicts(session, [NewVerdict(code, "matmul", "ok", None, {}, 0.0, 0.0)], GPU, EveryOperator("g1"))
        session.execute(
            core(MeasurementRow).insert().values(
                code_digest=code, candidate=entry.candidate, device_class="d", driver="1", plan_version="g1",
                median_us=1.0, measurement={}, created_at=0.0,
            )
        )  # fmt: skip
    assert api.submit().json()["cached"]
    answer = api.client.delete(f"/v1/kernels/{winner[:12]}")
    assert answer.status_code == 200
    assert answer.json() == {
        "key": winner, "builds": ["b" * 64], "verdicts": 1, "measurements": 1, "libraries": 0, "in_use": [],
    }  # fmt: skip
    assert api.client.get(f"/v1/kernels/{winner}").status_code == 404
    assert api.submit().status_code == 202
    again = api.client.delete(f"/v1/kernels/{winner}")
    assert (again.status_code, again.json()["type"]) == (404, "urn:cukiln:problem:kernel-not-found")


def test_a_winner_is_found_by_a_prefix_beside_many_that_were_withdrawn(api: Api) -> None:
    keys = [f"{'b' * 62}{number:02}" for number in range(11)]
    with api.database.write() as session:
        for key in keys:
            publish_winner(session, winner_record(key, "c"), attempt=key[-32:])
        for key in keys[:-1]:
            withdraw_winner(session, key, "withdrawn")
    assert api.client.delete(f"/v1/kernels/{'b' * 8}").json()["key"] == keys[-1]


# ---- trying again


@pytest.mark.parametrize("limit", ["of the compile", "of the verification", "none"])
def test_a_retried_job_tries_again_what_a_limit_had_ended(api: Api, limit: str) -> None:
    job = planned(api, BUILD)
    if limit == "of the compile":
        built(api, job, "compile_error", reached={"memory_bytes": 100})
    else:
        built(api, job)
        with api.database.write() as session:
            verdict, details = (
                ("run_timeout", {"limit": {"wall_seconds": 1.0}}) if limit != "none" else ("incorrect", {})
            )
            write_verdicts(
                session, [NewVerdict(BUILD.slice, "matmul", verdict, None, details, 0.0, 0.0)], CPU, EveryOperator("1")
            )
    answer = api.client.post(f"/v1/jobs/{job}/retry")
    assert answer.status_code == 202
    new = answer.json()
    assert new["job"] != job
    assert answer.headers["location"] == f"/v1/jobs/{new['job']}"
    assert [(problem["key"], problem["state"]) for problem in new["problems"]] == [
        (problem["key"], "queued") for problem in api.client.get(f"/v1/jobs/{job}").json()["problems"]
    ]
    with api.database.read() as session:
        builds, verdicts = session.scalars(select(BuildRow.id)).all(), session.scalars(select(VerdictRow.verdict)).all()
    assert builds == ([] if limit == "of the compile" else [BUILD.id])
    assert verdicts == (["incorrect"] if limit == "none" else [])


def test_only_what_is_left_to_be_tried_of_an_ended_job_is_retried(api: Api, winner: str) -> None:
    live = api.submit({**MATMUL, "m": 96}, {**MATMUL, "m": 97}).json()["job"]
    answer = api.client.post(f"/v1/jobs/{live}/retry")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cukiln:problem:job-unfinished")
    cached = api.submit().json()["job"]
    answer = api.client.post(f"/v1/jobs/{cached}/retry")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cukiln:problem:nothing-to-retry")
    api.client.delete(f"/v1/jobs/{live}")
    assert len(api.client.post(f"/v1/jobs/{live}/retry").json()["problems"]) == 2
    assert api.client.post(f"/v1/jobs/{'0' * 32}/retry").status_code == 404
