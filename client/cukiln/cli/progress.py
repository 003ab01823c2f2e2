"""The progress of a running job: a bar per stage on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from cukiln.client import ProgressCallback
from cukiln.types import Progress, StageProgress

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


def duration(seconds: float) -> str:
    """Seconds in words: `9 ms`, `4.2 s`, `48 s`, `3 min 5 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 or seconds == 0 else "under 1 ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
