"""Jobs over HTTP: accepted durably, answered from the cache, listed, cancelled."""

from __future__ import annotations

from pathlib import Path

import pytest

from cukiln.types import Job, JobPage
from service.routes import accept_job
from storage.database.tables import JobRow
from storage.entities.jobs import job_state
from tests.support.fixtures.api import MATMUL, Api, publish, serving
from tests.support.fixtures.storage import SITES, compile_next, plan_next, verify_next


def test_a_job_is_in_the_database_before_the_202(api: Api) -> None:
    answer = api.submit(MATMUL, {**MATMUL, "m": 65, "name": "ragged"}, priority="high", budget={"seconds": 60})
    assert answer.status_code == 202
    job = Job.model_validate_json(answer.content)
    assert answer.headers["location"] == f"/v1/jobs/{job.job}"
    assert float(answer.headers["retry-after"]) >= 1
    assert (job.state, job.cached, job.priority, job.budget_seconds) == ("queued", False, "high", 60)
    assert [problem.name for problem in job.problems] == ["problem0", "ragged"]
    assert [problem.device_class for problem in job.problems] == ["predicted:sm_80"] * 2
    with api.database.read() as session:
        assert job_state(session, job.job) is not None
    assert Job.model_validate_json(api.client.get(answer.headers["location"]).content).job == job.job
    assert api.rows()["tasks"] == 1


def test_target_and_search_may_stand_per_problem(api: Api) -> None:
    answer = api.submit(
        MATMUL,
        {**MATMUL, "target": "sm_90a", "search": {"level": 0}, "device_class": "predicted:sm_90a"},
        target="sm_75",
        search={"level": 2, "limit": 10, "seed": 7},
    )
    assert answer.status_code == 202
    job = answer.json()
    assert [problem["target"] for problem in job["problems"]] == ["sm_75", "sm_90a"]
    with api.database.read() as session:
        from storage.database.tables import JobProblemRow

        searches = [row.search for row in session.query(JobProblemRow).order_by(JobProblemRow.position)]
    assert searches == [{"level": 2, "limit": 10, "seed": 7}, {"level": 0}]


def test_equal_problems_written_differently_share_a_key(api: Api) -> None:
    spelled = {"k": 32.0, "n": 48, "m": 64.0, "operator": "matmul", "layout": "nn", "epilogue": []}
    problems = api.submit(MATMUL, spelled).json()["problems"]
    assert problems[0]["key"] == problems[1]["key"]
    assert problems[0]["problem"] == problems[1]["problem"]


def test_a_cached_job_is_a_200_and_queues_nothing(api: Api) -> None:
    record = publish(api.database)
    answer = api.submit()
    assert answer.status_code == 200
    job = answer.json()
    assert (job["state"], job["cached"]) == ("done", True)
    assert job["problems"][0]["key"] == record.key
    assert job["problems"][0]["winner"]["candidate"] == record.front[0].candidate
    assert job["problems"][0]["cached"] is True
    assert "retry-after" not in answer.headers
    assert api.rows()["tasks"] == 0


def test_a_cached_problem_is_done_at_once_beside_one_that_is_not(api: Api) -> None:
    publish(api.database)
    answer = api.submit(MATMUL, {**MATMUL, "m": 65})
    assert answer.status_code == 202
    assert [problem["state"] for problem in answer.json()["problems"]] == ["done", "queued"]
    assert answer.json()["cached"] is False


@pytest.mark.parametrize(
    ("stored", "asked", "cached"),
    [
        ({"search": {"level": 2}}, {"search": {"level": 1}}, True),
        ({"search": {"level": 1}}, {"search": {"level": 2}}, False),
        ({"made_by": "0" * 64}, {}, False),
        ({"target": "sm_75"}, {}, False),
        ({"workspace": (4096, 0)}, {"workspace_limit_bytes": 1024}, True),
        ({"workspace": (4096,)}, {"workspace_limit_bytes": 1024}, False),
        ({"workspace": (4096,)}, {}, True),
        ({"workspace_limit_bytes": 1024}, {}, False),
        ({"workspace_limit_bytes": 1024}, {"workspace_limit_bytes": 1025}, False),
        ({"workspace_limit_bytes": 1024}, {"workspace_limit_bytes": 1024}, True),
        ({"workspace_limit_bytes": 1024}, {"workspace_limit_bytes": 512}, True),
        ({}, {"deterministic": True}, True),
        ({"deterministic": True}, {"deterministic": True}, True),
        ({"deterministic": True}, {}, False),
        ({}, {"ptx": "winners"}, True),
        ({}, {"ptx": "all"}, False),
        ({"every_ptx": True}, {"ptx": "all"}, True),
        ({"every_ptx": True}, {}, True),
        # Of a front that was not published whole only the fastest point is known to be there.
        ({"whole": False}, {}, True),
        ({"whole": False}, {"workspace_limit_bytes": 1024}, False),
        ({"whole": False}, {"deterministic": True}, False),
        ({"whole": False, "workspace_limit_bytes": 1024}, {"workspace_limit_bytes": 1024}, True),
    ],
)
def test_only_a_record_that_covers_the_request_counts_as_cached(
    api: Api, stored: dict[str, object], asked: dict[str, object], cached: bool
) -> None:
    publish(api.database, **stored)  # type: ignore[arg-type]
    assert api.submit(**asked).status_code == (200 if cached else 202)


PICKS = [({}, 0), ({"deterministic": True}, 0), ({"workspace_limit_bytes": 100}, 1), ({"workspace_limit_bytes": 0}, 2)]


@pytest.mark.parametrize(("policy", "point"), PICKS)
def test_a_cached_job_names_the_winner_that_its_policy_allows(api: Api, policy: dict[str, object], point: int) -> None:
    record = publish(api.database, workspace=(4096, 64, 0))
    (problem,) = api.submit(**policy).json()["problems"]
    winner = problem["winner"]
    assert winner["candidate"] == record.front[point].candidate
    assert (winner["workspace_bytes"], winner["deterministic"]) == ((4096, 64, 0)[point], point == 0)


@pytest.mark.parametrize("harm", ["deleted", "cut short", "never stored"])
def test_a_winner_whose_library_is_gone_is_not_called_cached(api: Api, harm: str) -> None:
    record = publish(api.database, blob="5" * 64 if harm == "never stored" else None)
    if harm != "never stored":
        file = api.blobs.path(record.front[0].so_sha256)
        assert file is not None and api.submit().status_code == 200
        file.write_bytes(file.read_bytes()[:-1]) if harm == "cut short" else file.unlink()
    answer = api.submit()
    assert (answer.status_code, answer.json()["state"]) == (202, "queued")
    assert api.rows()["tasks"] == 1
    api.blobs.put(b"a library", "application/x-sharedlib")
    if harm != "never stored":
        assert api.submit().status_code == 200


def test_jobs_are_listed_newest_first_page_by_page(api: Api) -> None:
    sent = [api.submit({**MATMUL, "m": m}).json()["job"] for m in (10, 11, 12)]
    first = JobPage.model_validate_json(api.client.get("/v1/jobs", params={"limit": 2}).content)
    assert first.next_cursor is not None
    rest = api.client.get("/v1/jobs", params={"limit": 2, "cursor": first.next_cursor}).json()
    assert [job.job for job in first.jobs] + [job["job"] for job in rest["jobs"]] == sent[::-1]
    assert rest["next_cursor"] is None
    assert api.client.get("/v1/jobs", params={"state": "done"}).json()["jobs"] == []


def test_cancelling_twice_is_cancelling_once(api: Api) -> None:
    path = api.submit().headers["location"]
    first = api.client.delete(path)
    assert (first.status_code, first.json()["state"]) == (200, "cancelled")
    second = api.client.delete(path)
    assert (second.status_code, second.json()["state"]) == (200, "cancelled")
    assert second.json()["finished_at"] == first.json()["finished_at"]


def test_an_ended_job_cannot_be_cancelled(api: Api) -> None:
    publish(api.database)
    answer = api.client.delete(api.submit().headers["location"])
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:cukiln:problem:job-finished"


def test_a_full_queue_refuses_new_work_and_still_answers_from_the_cache(tmp_path: Path) -> None:
    with serving(tmp_path, max_queued_jobs=1) as api:
        assert api.submit().status_code == 202
        refused = api.submit({**MATMUL, "m": 65})
        assert (refused.status_code, refused.json()["type"]) == (429, "urn:cukiln:problem:too-many-jobs")
        assert int(refused.headers["retry-after"]) > 0
        assert api.rows()["jobs"] == 1
        publish(api.database, {**MATMUL, "m": 66})
        assert api.submit({**MATMUL, "m": 66}).status_code == 200


def test_a_retry_that_finds_the_queue_full_forgets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[str] = []
    monkeypatch.setattr(accept_job, "forget_limited", lambda database, job: forgotten.append(job))
    with serving(tmp_path, max_queued_jobs=1) as api:
        path = api.submit().headers["location"]
        api.client.delete(path)
        other = api.submit({**MATMUL, "m": 65}).headers["location"]
        assert api.client.post(f"{path}/retry").json()["type"] == "urn:cukiln:problem:too-many-jobs"
        assert forgotten == []
        api.client.delete(other)
        assert api.client.post(f"{path}/retry").status_code == 202
    assert forgotten == [path.rpartition("/")[2]]


def test_a_service_may_take_fewer_problems_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, max_problems=2) as api:
        assert api.submit(MATMUL, MATMUL).status_code == 202
        refused = api.submit(MATMUL, MATMUL, MATMUL)
        assert (refused.status_code, refused.json()["field"]) == (422, "problems")
        assert refused.json()["allowed"] == {"maxItems": 2}


def test_a_new_job_has_no_candidates_and_no_rejections(api: Api) -> None:
    path = api.submit().headers["location"]
    assert api.client.get(f"{path}/candidates").json() == {"candidates": [], "next_cursor": None}
    assert api.client.get(f"{path}/rejections").json() == {"rejections": []}


def test_a_candidate_is_listed_with_its_resources_and_its_bank_conflicts(api: Api) -> None:
    path = api.submit().headers["location"]
    plan_next(api.database, "a")
    compile_next(api.database)
    (compiled,) = api.client.get(f"{path}/candidates").json()["candidates"]
    assert (compiled["registers"], compiled["shared_memory"]) == (32, None)
    verify_next(api.database)
    (verified,) = api.client.get(f"{path}/candidates").json()["candidates"]
    assert (verified["verdict"], verified["registers"], verified["shared_bytes"]) == ("ok", 32, 64)
    assert verified["shared_memory"] == SITES


def test_candidates_of_a_problem_that_the_job_lacks_are_refused(api: Api) -> None:
    """An empty page would read as: nothing was tried."""
    job = api.submit({**MATMUL, "name": "ffn1"}).json()["job"]
    assert api.client.get(f"/v1/jobs/{job}/candidates?problem=ffn1").json() == {"candidates": [], "next_cursor": None}
    refused = api.client.get(f"/v1/jobs/{job}/candidates?problem=fnf1")
    assert (refused.status_code, refused.json()["field"]) == (422, "problem")
    assert "'fnf1'" in refused.json()["detail"]


def test_a_job_is_named_by_its_first_digits_where_no_other_begins_so(api: Api) -> None:
    job = api.submit().json()["job"]
    for path in ("", "/candidates", "/rejections", "/timeline", "/trace"):
        answer = api.client.get(f"/v1/jobs/{job[:8]}{path}")
        assert answer.status_code == 200, path
    assert api.client.get(f"/v1/jobs/{job[:8]}").json()["job"] == job
    alike = job[:-1] + ("0" if job[-1] != "0" else "1")
    with api.database.write() as session:
        row = session.get(JobRow, job)
        assert row is not None
        copy = {column.key: getattr(row, column.key) for column in JobRow.__table__.columns}
        session.add(JobRow(**{**copy, "id": alike}))
    several = api.client.get(f"/v1/jobs/{job[:8]}")
    assert (several.status_code, several.json()["allowed"]) == (409, sorted([job, alike]))
    assert api.client.get(f"/v1/jobs/{job}").status_code == 200
    for wrong in (job[:7], job[:8].upper() + "g", "z" * 8, "0" * 31):
        assert api.client.get(f"/v1/jobs/{wrong}").status_code == 404, wrong
    assert api.client.delete(f"/v1/jobs/{job[:31]}").status_code == 409  # two begin so
