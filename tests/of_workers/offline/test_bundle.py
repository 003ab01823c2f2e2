"""A job in a folder: what `cukiln export-bundle` writes, what `workers.offline.measure_bundle` takes of it, what it
refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cukiln.cli.elsewhere import described, export_bundle
from cukiln.client import Client
from cukiln.errors import NotFound, UsageError
from cukiln.types import Job
from tests.support.fixtures.elsewhere import REQUEST
from workers.offline.work import Bundle, BundleError, library_path, read_bundle, work_of_bundle


@pytest.fixture
def client(compiling: Client) -> Client:
    return compiling


@pytest.fixture
def job(exported_job: Job) -> Job:
    return exported_job


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


def change(folder: Path, edit: Callable[[Any], None]) -> None:
    path = folder / "bundle.json"
    content = json.loads(path.read_bytes())
    edit(content)
    path.write_text(json.dumps(content))


def test_a_bundle_holds_every_candidate_with_its_library(exported: Path, job: Job) -> None:
    bundle = read_bundle(exported)
    assert [problem.name for problem in bundle.problems] == ["wide", "small"]
    assert bundle.job == job.job
    for problem in bundle.problems:
        assert len(problem.candidates) == 3
        for candidate in problem.candidates:
            assert candidate.kernel in bundle.kernels
            assert candidate.toolchain in bundle.toolchains
            assert candidate.library is not None
            assert library_path(exported, candidate.library).is_file()
            assert candidate.prediction is not None
            assert candidate.prediction["us"] > 0
    assert all(bundle.toolchains.values())


def test_what_is_read_is_what_was_lowered(exported: Path) -> None:
    work = work_of_bundle(read_bundle(exported), exported)
    assert {built.state for built in work.builds.values()} == {"ok"}
    for problem in work.problems:
        assert [
            problem.operator.candidate(problem.problem, candidate.schedule) for candidate in problem.candidates
        ] == list(problem.candidates)


def test_a_limit_takes_the_best_predicted_and_names_the_others(exported: Path) -> None:
    bundle = read_bundle(exported)
    work = work_of_bundle(bundle, exported, limit=1)
    for read, problem in zip(bundle.problems, work.problems, strict=True):
        us = {candidate.candidate: candidate.prediction["us"] for candidate in read.candidates if candidate.prediction}
        assert set(problem.left_out) == set(sorted(us, key=lambda name: (us[name], name))[1:])
        assert set(problem.left_out.values()) == {"left out by --limit"}


def test_the_file_comes_last(client: Client, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(digest: str, kind: str = "so") -> bytes:
        raise NotFound("gone", method="GET", url="", status=404, detail=None)

    monkeypatch.setattr(client, "blob", lost)
    with pytest.raises(NotFound):
        export_bundle(client, job.job, tmp_path / "half")
    assert not (tmp_path / "half" / "bundle.json").exists()
    with pytest.raises(BundleError, match="did not write"):
        read_bundle(tmp_path / "half")


def test_a_job_that_the_cache_answered_has_nothing_to_export(client: Client, job: Job, tmp_path: Path) -> None:
    cached = client.submit({"target": "sm_90a", **REQUEST})
    assert cached.cached
    with pytest.raises(UsageError, match="answered from the cache"):
        export_bundle(client, cached.job, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_there_is_no_bundle_of_a_job_that_is_not_there(client: Client, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        export_bundle(client, "0" * 32, tmp_path)


def test_it_is_described_in_a_few_words(exported: Path) -> None:
    content = json.loads((exported / "bundle.json").read_bytes())
    assert described(content) == "2 problems, 6 candidates to measure"
    content["problems"][0]["candidates"][0] |= {"library": None, "message": "it is gone"}
    content["problems"][1]["candidates"][0] |= {"library": None, "verdict": "compile_error"}
    assert described(content) == (
        "2 problems, 4 candidates to measure, 1 that do not compile; 1 are left out, for example: it is gone"
    )


def damage(folder: Path) -> None:
    (library, *_) = (folder / "lib").iterdir()
    library.write_bytes(library.read_bytes()[:-1] + b"?")


def lose(folder: Path) -> None:
    (library, *_) = (folder / "lib").iterdir()
    library.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damage, "the file is damaged"),
        (lose, "No such file"),
        (lambda folder: change(folder, lambda content: content.update(schema=2)), "not a bundle of schema 1: schema"),
        (lambda folder: change(folder, lambda content: content.update(colour=1)), "colour: Extra inputs"),
        (lambda folder: (folder / "bundle.json").write_text("{"), "not a bundle of schema 1"),
    ],
)
def test_a_damaged_bundle_is_not_measured(spoil: Callable[[Path], None], message: str, bundle: Path) -> None:
    spoil(bundle)
    with pytest.raises(BundleError, match=message):
        read_bundle(bundle)


def other_generator(content: Any) -> None:
    content["problems"][0]["generator"] = "0" * 64


def other_schedule(content: Any) -> None:
    first, second = content["problems"][0]["candidates"][:2]
    first["schedule"] = second["schedule"]


def other_problem(content: Any) -> None:
    content["problems"][0]["problem"]["m"] += 1


def lost_kernel(content: Any) -> None:
    content["kernels"].clear()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (other_generator, "another release of cukiln exported the bundle"),
        (other_schedule, "is not that of its problem and schedule"),
        (other_problem, "is not that of its problem and schedule"),
        (lost_kernel, "wide"),
    ],
)
def test_a_bundle_that_does_not_fit_together_is_refused(
    edit: Callable[[Any], None], message: str, bundle: Path
) -> None:
    change(bundle, edit)
    with pytest.raises(BundleError, match=message):
        work_of_bundle(read_bundle(bundle), bundle)


def test_a_candidate_without_a_library_is_left_out_with_its_reason(bundle: Path) -> None:
    def forget(content: Any) -> None:
        one = content["problems"][0]["candidates"][0]
        one |= {"library": None, "code_digest": None, "resources": None, "message": "it is gone"}

    change(bundle, forget)
    read: Bundle = read_bundle(bundle)
    work = work_of_bundle(read, bundle)
    assert work.problems[0].left_out == {read.problems[0].candidates[0].candidate: "it is gone"}
