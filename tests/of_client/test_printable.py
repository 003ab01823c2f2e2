"""What others wrote, problems' names and tools' messages, is shown on terminals and pages and never obeyed by them."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cukiln.cli.console import SafeConsole
from cukiln.cli.table import print_job, print_lookups
from cukiln.cli.tune import show_progress
from cukiln.printable import printable
from cukiln.types import Job, LookupResult, Progress
from tests.support.fixtures.api import MATMUL, Api
from tests.support.fixtures.client import job_json

HOSTILE = "[/nope] [red]:bomb:\x9b2J\x1b]0;x \u202eevil"
SHOWN = r"[/nope] [red]:bomb:\x9b2J\x1b]0;x \u202eevil"


@given(st.text())
def test_no_character_that_moves_or_turns_a_text_is_left(text: str) -> None:
    shown = printable(text, lines=True)
    assert all(unicodedata.category(each) not in ("Cc", "Cs", "Zl", "Zp") or each in "\n\t" for each in shown)
    assert not {"RLO", "LRO", "RLE", "LRE", "PDF", "RLI", "LRI", "FSI", "PDI"} & set(
        map(unicodedata.bidirectional, shown)
    )
    assert printable(shown, lines=True) == shown
    assert "\n" not in printable(text)


@given(st.text(st.characters(categories=("L", "N", "P", "S"))))
def test_letters_of_every_script_stay(text: str) -> None:
    assert printable(text) == text


def hostile_job() -> Job:
    job = job_json("done")
    job["problems"][0]["name"] = HOSTILE
    job["problems"][0]["winner"] = None
    job["problems"][0]["error"] = HOSTILE
    return Job.model_validate(job)


def test_a_table_shows_a_name_as_it_is_written() -> None:
    console = SafeConsole(width=300, force_terminal=True)
    with console.capture() as captured:
        print_job(console, hostile_job())
        print_lookups(console, [LookupResult(name=HOSTILE, key="0" * 64, record=None)])
    assert_is_shown(captured.get())


def assert_is_shown(text: str) -> None:
    assert SHOWN in text
    assert "\x9b" not in text and "\u202e" not in text and "\x1b]" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_why_a_job_waits(terminal: bool) -> None:
    stage = {"done": 0, "total": 1}
    names = ("lower", "compile", "verify", "measure", "finish")
    progress = Progress.model_validate(
        {**dict.fromkeys(names, stage), "candidates_done": 0, "candidates_failed": 0, "eta_seconds": None}
        | {"waiting_for": HOSTILE}
    )
    console = SafeConsole(width=300, force_terminal=terminal)
    with console.capture() as captured, show_progress(console) as update:
        update(progress)
    assert_is_shown(captured.get())


def test_a_page_shows_a_name_as_it_is_written(api: Api) -> None:
    name = "\u202eevil <b>"
    job = api.submit({**MATMUL, "name": name}).json()["job"]
    page = api.client.get(f"/jobs/{job}").text
    assert r"\u202eevil &lt;b&gt;" in page
    assert "\u202e" not in page


def test_control_characters_of_both_sets_are_refused_in_names(api: Api) -> None:
    for character in ("\x1b", "\x7f", "\x80", "\x9b"):
        assert api.submit({**MATMUL, "name": f"a{character}"}).status_code == 422
    assert api.submit({**MATMUL, "name": "Öl é 矩阵"}).status_code == 202


def test_cukiln_watch_follows_a_job_whose_problem_has_a_hostile_name(api: Api, tmp_path: Path) -> None:
    job = api.submit({**MATMUL, "name": "[/nope]"}).json()["job"]
    assert api.client.delete(f"/v1/jobs/{job}").status_code == 200
    command = [sys.executable, "-m", "cukiln", "watch", job, "--url", api.url]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ), check=False)
    assert done.returncode == 1  # cancelled
    assert "[/nope]" in done.stdout and "Traceback" not in done.stderr, done.stderr
