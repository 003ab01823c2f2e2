"""`cukiln import-results`: what of the files that were brought back no service takes, and why."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cukiln.cli.elsewhere import not_imported
from cukiln.cli.main import main
from tests.support.fixtures.client import ScriptedService, job_json

CONFIRMED = {"device": "NVIDIA H100", "primitives": {"ldmatrix": {}, "mma": {}}, "failed": {"vote_all": "votes: …"}}
CEILINGS = {"device": "NVIDIA H100", "uuid": "GPU-1", "driver": "580.1", "ceilings": {"copy_gb_s": 3000.0}}
PARTS = {"libraries": "exit status 0 after 2 s", "primitives": "not run: no compiler: no nvcc"}


@pytest.fixture
def back(tmp_path: Path) -> Path:
    folder = tmp_path / "back"
    folder.mkdir()
    for name, content in (("confirmed", CONFIRMED), ("ceilings", CEILINGS), ("report", {"parts": PARTS})):
        (folder / f"{name}.json").write_text(json.dumps(content))
    results = {"schema": 1, "problems": [{"name": "ffn1", "candidates": [{"verdict": "ok"}]}]}
    (folder / "results-1.json.gz").write_bytes(gzip.compress(json.dumps(results).encode()))
    return folder


def test_each_file_that_no_service_takes_is_named_with_what_it_holds_and_why(back: Path) -> None:
    confirmed, ceilings, part = not_imported(back)
    assert confirmed.startswith(
        "confirmed.json is not imported (2 primitives confirmed by NVIDIA H100, 1 that differ: vote_all): it decides "
    )
    assert f"confirm_primitives --take {back / 'confirmed.json'}`" in confirmed
    assert ceilings.startswith(
        "ceilings.json is not imported (of NVIDIA H100, GPU-1, driver 580.1): a service keeps none"
    )
    assert part == "primitives: not run: no compiler: no nvcc"


def test_a_folder_of_results_alone_has_nothing_to_say(tmp_path: Path) -> None:
    assert not_imported(tmp_path) == []


@pytest.mark.parametrize("text", ["{", "[]", "{}", "null"])
def test_a_damaged_file_is_named_too(text: str, back: Path) -> None:
    for name in ("confirmed.json", "ceilings.json", "report.json"):
        (back / name).write_text(text)
    lines = not_imported(back)
    assert [line.split()[0] for line in lines[:2]] == ["confirmed.json", "ceilings.json"]
    assert all("(and cannot be read: " in line for line in lines[:2])
    assert len(lines) == (2 if text == "{}" else 3)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_import_says_it_beside_its_job(
    as_json: bool, back: Path, scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    scripted.on("POST", "/v1/results", job_json("done"))
    scripted.on("GET", "/v1/jobs/job1", job_json("done"))
    words = ["cukiln", "import-results", str(back), "--url", scripted.url, *(["--json"] if as_json else [])]
    monkeypatch.setattr("sys.argv", words)
    run: Callable[[], None] = main
    with pytest.raises(SystemExit) as stopped:
        run()
    captured = capsys.readouterr()
    assert not stopped.value.code
    said = (captured.err if as_json else captured.out).replace("\n", " ")
    for line in not_imported(back):
        assert line in said
    if as_json:
        assert json.loads(captured.out)["state"] == "done"
