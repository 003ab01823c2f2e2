"""`cukiln tune` and `cukiln watch`: submit a request or take up a job, watch it, show the winners."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from cukiln.cli.console import duration, make_console
from cukiln.cli.exit_codes import OF_STATE
from cukiln.cli.table import print_job, summary
from cukiln.client import Client, ProgressCallback
from cukiln.counted import counted
from cukiln.errors import ServiceError
from cukiln.types import ENDED, Job, Progress, StageProgress, Targets


class Tuning:
    """One run of `cukiln tune`, `watch` or `retry`. The job outlives the service that took it: `run` may be called
    again with another client over the same data, and continues with the job that was sent.

    `again`: send the request a second time and report how that was answered. `on_any_gpu`: tune for the service's GPU
    where that is of another architecture than the request's. `followed`: a job that was sent before; it is never
    cancelled. `retried`: a job whose failures are sent as a new one.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        *,
        as_json: bool = False,
        again: bool = False,
        on_any_gpu: bool = False,
        followed: str | None = None,
        retried: str | None = None,
    ) -> None:
        self.out, self.progress = make_console(), make_console(stderr=True)
        self._request, self._as_json, self._again, self._on_any_gpu = request, as_json, again, on_any_gpu
        self._start = time.perf_counter()
        self._sent, self._watching, self._retried = followed, followed is not None, retried

    def run(self, client: Client, *, cancel: bool) -> int:
        """Follow the job to its end and print it; returns the exit code. `cancel`: an interrupt cancels the job."""
        job = self._finished_job(client, cancel)
        if self._watching and job.finished_at is not None:
            seconds = job.finished_at - job.created_at
        else:
            seconds = time.perf_counter() - self._start
        repeated = _repeat(client, self._request) if self._again else None
        out = self.out
        if self._as_json:
            answer = job_json(job)
            if repeated is not None:
                answer["again"] = {"cached": repeated[0].cached, "milliseconds": round(repeated[1] * 1000, 3)}
            # One line, so that the last line is the object.
            out.file.write(json.dumps(answer) + "\n")
            return OF_STATE[job.state]
        print_job(out, job)
        _say(out, "")
        _say(out, summary(job, seconds))
        if repeated is not None:
            _say(out, _repeated_sentence(*repeated))
        return OF_STATE[job.state]

    def lost(self, url: str) -> None:
        """Report that the service at `url` has ended, and what follows."""
        next_step = f"job {self._sent} is kept and continues" if self._sent else "the request is sent again"
        _say(self.progress, f"The service at {url}, which another command had started, has ended: {next_step}.")

    def unreachable(self) -> None:
        """Report how to find a job whose service does not answer."""
        if self._sent:
            _say(self.progress, f"Job {self._sent} is kept, and continues when its service runs: {_watch(self._sent)}.")

    def _finished_job(self, client: Client, cancel: bool) -> Job:
        if self._sent is None:
            if self._on_any_gpu:
                self._request = for_the_gpu(self._request, client.targets(), self.progress)
            self._start = time.perf_counter()
            job = client.submit(self._request) if self._retried is None else client.retry(self._retried)
            self._sent = job.job
        else:
            job = client.job(self._sent)
        if job.state in ENDED:
            return job
        console, count = self.progress, len(job.problems)
        _say(console, f"Job {job.job}: {counted(count, 'problem')} at {client.url}")
        with _cancelling(client, job, console, cancel and not self._watching), show_progress(console) as update:
            return client.wait(job, progress=update)


def for_the_gpu(request: Mapping[str, Any], targets: Targets, console: Console) -> Mapping[str, Any]:
    """The request with the architecture of the service's GPU, where it has one, but none of the request's own."""
    measured = [report for report in targets.targets if report.toolchains and len(report.device_classes) > 1]
    if not measured or request.get("target") in {report.target for report in measured}:
        return request
    best = max(measured, key=lambda report: (_number_of(report.target), report.target))
    _say(console, f"There is a GPU here, {best.device_classes[0]}: kernels are tuned for it ({best.target}).")
    return {**request, "target": best.target}


def _number_of(target: str) -> int:
    """100 of `sm_100a`, which has all of the architecture and comes after `sm_100`."""
    return int("".join(filter(str.isdecimal, target)) or 0)


def job_json(job: Job) -> dict[str, Any]:
    """The object that `--json` prints; a problem has `error` only where it failed, `ptx` only where
    all its candidates were run from theirs."""
    fields = ("name", "key", "winner", "verdicts", "rejected", "seconds")
    problems = []
    for problem in job.problems:
        entry = problem.model_dump(mode="json")
        shown = (*fields, *(name for name in ("ptx", "error") if entry[name] is not None))
        problems.append({name: entry[name] for name in shown})
    return {"job": job.job, "state": job.state, "cached": job.cached, "problems": problems}


@contextmanager
def _cancelling(client: Client, job: Job, console: Console, cancel: bool) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if not cancel:
            _say(console, f"Interrupted. Job {job.job} is kept, and continues while a service runs: {_watch(job.job)}.")
            raise
        try:
            client.cancel(job.job)
        except ServiceError as error:
            _say(console, f"Interrupted. Job {job.job} could not be cancelled: {error}")
        else:
            _say(console, f"Interrupted. Job {job.job} is cancelled; what was finished is kept.")
        raise


def _repeat(client: Client, request: Mapping[str, Any]) -> tuple[Job, float]:
    start = time.perf_counter()
    job = client.submit(request)
    seconds = time.perf_counter() - start
    if job.state not in ENDED:  # not answered from the cache: do not leave it running
        job = client.cancel(job.job)
    return job, seconds


def _repeated_sentence(job: Job, seconds: float) -> str:
    if job.cached:
        return f"The same request again was answered from the cache in {duration(seconds)}."
    return "The same request again was not answered from the cache: some of its problems have no winner."


def _watch(job: str) -> str:
    return f"`cukiln watch {job}` follows it"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


# What each stage counts. Codegen has no bar: it takes milliseconds and happens inside `lower`'s step. `verify` counts
# candidates on the CPU, `measure` those on a GPU.
STAGES = {
    "lower": "problems",
    "compile": "kernels",
    "verify": "candidates",
    "measure": "candidates",
    "finish": "problems",
}
_LINES = 20  # plain lines per job at most, besides the last


@contextmanager
def show_progress(console: Console) -> Iterator[ProgressCallback]:
    """Yield the callback to give to `Client.wait`; the display ends with the block."""
    if not console.is_terminal:
        yield PlainLines(console).update
        return
    display = LiveBars()
    with Live(display.render(), console=console, refresh_per_second=8, transient=True) as live:

        def update(progress: Progress) -> None:
            display.update(progress)
            live.update(display.render())

        yield update


class LiveBars:
    """A bar for each stage of the job, and a line with the counts."""

    def __init__(self) -> None:
        self._bars = Bars(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
        )
        self._tasks = {
            name: self._bars.add_task(name, total=None, unit=unit, visible=name != "measure")
            for name, unit in STAGES.items()
        }
        self._counts = Text("waiting for a worker")

    def update(self, progress: Progress) -> None:
        for name, task in self._tasks.items():
            stage: StageProgress = getattr(progress, name)
            shown = name in stages_of(progress)
            self._bars.update(task, completed=stage.done, total=stage.total or None, visible=shown)
        self._counts = Text(counts(progress))

    def render(self) -> RenderableType:
        return Group(self._bars.get_renderable(), self._counts)


class PlainLines:
    """A line whenever the job has come a twentieth further: a log of it stays short, whatever the job's size."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._step = -1
        self._waiting_for: str | None = None

    def update(self, progress: Progress) -> None:
        step = int(fraction(progress) * _LINES)
        if step > self._step or progress.waiting_for != self._waiting_for:
            self._step, self._waiting_for = step, progress.waiting_for
            stages: dict[str, StageProgress] = {name: getattr(progress, name) for name in stages_of(progress)}
            parts = ", ".join(f"{name} {stage.done}/{stage.total}" for name, stage in stages.items())
            self._console.print(f"{parts}; {counts(progress)}", highlight=False, soft_wrap=True)


def stages_of(progress: Progress) -> list[str]:
    """The stages that the job has: it measures problems on a GPU, and verifies the others on the CPU."""
    if not progress.measure.total:
        return [name for name in STAGES if name != "measure"]
    return [name for name in STAGES if name != "verify" or progress.verify.total]


def fraction(progress: Progress) -> float:
    """How far the job is, 0 to 1: the mean of its stages. A stage whose size is not known yet counts as not begun."""
    stages: list[StageProgress] = [getattr(progress, name) for name in stages_of(progress)]
    done = [min(1.0, stage.done / stage.total) if stage.total else 0.0 for stage in stages]
    return sum(done) / len(done)


def counts(progress: Progress) -> str:
    """Candidates and the time left, or why work waits."""
    text = f"candidates: {progress.candidates_done} done, {progress.candidates_failed} failed"
    if progress.waiting_for is not None:
        return f"{text}; waiting: {progress.waiting_for}"
    if progress.eta_seconds is None:
        return text
    left = f"about {duration(progress.eta_seconds)}" if progress.eta_seconds >= 1 else "under 1 s"
    return f"{text}; {left} left"
