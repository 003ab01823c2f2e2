"""What `cukiln tune` and `cukiln lookup` print when they are done."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cukiln.cli_progress import duration
from cukiln.types import FrontEntry, Job, LookupResult, ProblemReport, WinnerSummary

_VERIFIED = {
    "gpu": "verified gpu: the kernel's results were checked on a GPU",
    "cpu": "verified cpu: the kernel's own source, run on the CPU, gave the reference's results",
    "cpu-unconfirmed": "verified cpu-unconfirmed: right on the CPU, but it uses a GPU instruction whose CPU twin was "
    "never compared with a real GPU",
}
_ONE_TABLE_WIDTH = 125  # columns
_LONGEST_NAME = 20  # of a problem; the rest is cut
# Winners from which on what all of them have is said once, below the table.
_MANY_WINNERS = 4
_PREDICTED = (
    "predicted µs: an estimate for {targets} from the compiled kernel's registers and shared memory and the GPU's data "
    "sheet; nothing was measured"
)
_SECONDS = (
    "seconds: wall time, summed over the processes that worked; the time of a kernel that problems share is split "
    "between them"
)


def print_job(console: Console, job: Job) -> None:
    """One row per problem, then what the columns mean. A narrow terminal gets the seconds in a table of their own: rich
    drops columns that do not fit. What all schedules agree on stands below the table."""
    stages = ["lower", "codegen", "compile", "verify"]
    if any(problem.seconds.measure.wall for problem in job.problems):
        stages.append("measure")
    common = _common(job)
    typed = any("dtype" in problem.problem for problem in job.problems)
    winners = _table("problem", *(["dtype"] if typed else []), "winner's schedule", "verified", "ranked by")
    wide = console.width >= _ONE_TABLE_WIDTH
    seconds = winners if wide else _table("problem")
    for stage in stages:
        seconds.add_column(f"{stage} s", justify="right", no_wrap=True)
    for problem in job.problems:
        judged: list[str | Text] = [problem.name, *([_dtype(problem)] if typed else [])]
        judged += [_outcome(problem, common), *_judgement(problem)]
        spent = ["-" if problem.cached else f"{getattr(problem.seconds, stage).wall:.2f}" for stage in stages]
        if wide:
            winners.add_row(*judged, *spent)
        else:
            winners.add_row(*judged)
            seconds.add_row(problem.name, *spent)
    console.print(winners)
    if not wide and not job.cached:
        console.print()
        console.print(seconds)
    for note in notes(job):
        console.print(Text(note, style="dim"))


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        if heading == "winner's schedule":
            table.add_column(heading, ratio=1)
        else:
            table.add_column(heading, no_wrap=True, max_width=_LONGEST_NAME if heading == "problem" else None)
    return table


def _dtype(problem: ProblemReport) -> str:
    """Of the inputs."""
    dtype = str(problem.problem.get("dtype", "-"))
    return f"{dtype}, tf32" if problem.problem.get("allow_tf32") else dtype


def _common(job: Job) -> dict[str, Any]:
    """Tunables that have one value in all winners' schedules that have them; none in jobs of few winners."""
    schedules = [problem.winner.schedule for problem in job.problems if problem.winner is not None]
    if len(schedules) < _MANY_WINNERS:
        return {}
    merged = {name: value for schedule in schedules for name, value in schedule.items()}
    joined = {name for schedule in schedules for names in _by_stem(schedule) if len(names) > 1 for name in names}
    return {
        name: value
        for name, value in sorted(merged.items())
        if name not in joined and all(schedule.get(name, value) == value for schedule in schedules)
    }


def _outcome(problem: ProblemReport, common: Collection[str]) -> Text:
    """The winner's schedule, or why there is none."""
    if problem.winner is not None:
        return Text(_described(problem.winner, common))
    style = "red" if problem.state == "failed" else "yellow"
    return Text(f"{problem.state}: {problem.error or 'no winner'}", style=style)


def _judgement(problem: ProblemReport) -> tuple[str, str]:
    """How the winner was verified and ranked."""
    winner = problem.winner
    if winner is None:
        return "-", "-"
    time_us = winner.measured_us if winner.ranked_by == "measured" else winner.predicted_us
    return winner.verified, f"{winner.ranked_by} {microseconds(time_us)}"


def notes(job: Job) -> list[str]:
    """Explains each word that the table shows, and no other."""
    winners = [problem.winner for problem in job.problems if problem.winner is not None]
    common = schedule_text(_common(job))
    lines = [f"in every winner's schedule that has them: {common}"] if common else []
    lines += [_VERIFIED[name] for name in sorted({winner.verified for winner in winners})]
    if any(winner.ranked_by == "predicted" for winner in winners):
        lines.append(_PREDICTED.format(targets=", ".join(sorted({problem.target for problem in job.problems}))))
    if any(stage.wall for problem in job.problems for stage in dict(problem.seconds).values()):
        lines.append(_SECONDS)
    rejected = sum(sum(problem.rejected.values()) for problem in job.problems)
    if rejected:
        lines.append(f"{rejected} more schedules broke a rule of their operator and were not compiled")
    return lines


def summary(job: Job, seconds: float) -> str:
    """One line: what became of the job, in how long."""
    total = len(job.problems)
    solved = sum(problem.winner is not None for problem in job.problems)
    if job.cached:
        return f"{problems(total)} answered from the cache in {duration(seconds)}; nothing was compiled."
    candidates = sum(problem.candidates for problem in job.problems)
    verdicts: dict[str, int] = {}
    for problem in job.problems:
        for name, count in problem.verdicts.items():
            verdicts[name] = verdicts.get(name, 0) + count
    words = ", ".join(f"{count} {name}" for name, count in sorted(verdicts.items(), key=lambda item: item[0] != "ok"))
    head = {"done": "done", "partial": f"{total - solved} of {total} without a winner"}.get(job.state, job.state)
    judged = f"{candidates} candidates ({words or 'none judged'})"
    return f"Job {job.job}: {head}, {problems(total)}, {judged}, {duration(seconds)}."


def print_lookups(console: Console, results: Iterable[LookupResult]) -> None:
    """One row per problem, then the whole keys, which are too wide for a column: `cukiln fetch` and HTTP take them."""
    table = _table("problem", "winner's schedule", "verified", "ranked by", "device class")
    keys = Text("keys:")
    for result in results:
        name = result.name or result.key[:12]
        keys.append(f"\n{result.key}  {name}")
        if result.record is None:
            table.add_row(name, "no winner yet", "-", "-", "-")
            continue
        best = result.record.front[0]
        time_us = best.measured_us if result.record.ranked_by == "measured" else best.predicted_us
        rank = f"{result.record.ranked_by} {microseconds(time_us)}"
        table.add_row(name, _described(best), best.verified, rank, result.record.device_class)
    console.print(table)
    console.print(keys, soft_wrap=True)  # a key in two lines cannot be copied


def _described(winner: WinnerSummary | FrontEntry, common: Collection[str] = ()) -> str:
    """Its schedule but for what is `common`, and what a caller must know of it before calling it."""
    words = [schedule_text({name: value for name, value in winner.schedule.items() if name not in common})]
    if winner.workspace_bytes:
        words.append(f"{winner.workspace_bytes:,} bytes of workspace")
    if not winner.deterministic:
        words.append("bits differ from run to run")
    return "; ".join(words)


def schedule_text(schedule: Mapping[str, Any]) -> str:
    """A schedule in few characters: `tile 128×64×16, thread 8×4, stages 2`. Tunables that differ in their last letter,
    an axis, are written as one, and stand first."""
    joined, single = [], []
    for names in _by_stem(schedule):
        if len(names) > 1:
            joined.append((-len(names), f"{names[0][:-2]} {'×'.join(str(schedule[name]) for name in names)}"))
        else:
            single.append(f"{names[0]} {schedule[names[0]]}")
    return ", ".join([text for _, text in sorted(joined)] + single)


def _by_stem(schedule: Mapping[str, Any]) -> list[list[str]]:
    """Names that are written as one, along m, n and k; all others alone."""
    groups: dict[str, list[str]] = {}
    for name in sorted(schedule):
        stem = name[:-2] if name[-2:] in ("_m", "_n", "_k") else name
        groups.setdefault(stem, []).append(name)
    found: list[list[str]] = []
    for stem, names in groups.items():
        if len(names) > 1 and stem not in names:
            found.append(sorted(names, key=lambda name: "mnk".index(name[-1])))
        else:
            found += [[name] for name in names]
    return found


def problems(count: int) -> str:
    return "1 problem" if count == 1 else f"{count} problems"


def microseconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g} µs" if value < 1000 else f"{value:,.0f} µs"
