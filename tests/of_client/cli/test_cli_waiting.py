"""`cukiln tune` says why nothing goes on."""

from __future__ import annotations

import io

from rich.console import Console

from cukiln.cli.tune import PlainLines, counts
from cukiln.types import Progress, StageProgress

WORDS = "no live worker measures on NVIDIA H200: GPU-1 was drained: it fell off the bus"


def progress(waiting_for: str | None) -> Progress:
    stage = StageProgress(done=1, total=4)
    return Progress(
        lower=stage, compile=stage, verify=stage, measure=stage, finish=stage, candidates_done=1, candidates_failed=0,
        eta_seconds=7.0, waiting_for=waiting_for,
    )  # fmt: skip


def test_what_a_job_waits_for_stands_where_else_its_time_does() -> None:
    assert counts(progress(WORDS)).endswith(f"; waiting: {WORDS}")
    assert counts(progress(None)).endswith("about 7.0 s left")


def test_a_log_says_once_what_a_job_waits_for_and_once_that_it_continues() -> None:
    output = io.StringIO()
    lines = PlainLines(Console(file=output, width=300))
    for words in (None, WORDS, WORDS, None, None):
        lines.update(progress(words))
    assert [WORDS in line for line in output.getvalue().splitlines()] == [False, True, False]
