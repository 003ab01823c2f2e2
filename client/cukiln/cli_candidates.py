"""`cukiln candidates`: what was tried for a job's problems, the fastest first, with the figures of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cukiln.cli_table import microseconds, schedule_text
from cukiln.types import CandidateReport

_GAP = 2  # characters between columns
_SCHEDULE_WIDTH = 40  # that a schedule gets at least, where it is so long: it is wrapped
_NOTES = {
    "verdict": "verdict: ok is proved right; why another one fell stands in `--json`, as `message`",
    "error": "error: the largest over the test plan's random inputs, and what is allowed there",
    "measured": "measured: the median time of a run on the GPU; spread: the distance of the quartiles, as its share",
    "registers": "registers: of a thread; shared, spills: bytes of a block and of a thread; occupancy: the share of a "
    "multiprocessor's threads that are resident",
    "predicted": "predicted: an estimate from the compiled kernel and the GPU's data sheet",
}


@dataclass(frozen=True)
class _Column:
    """A heading with a cell for each candidate; `-` where there is nothing to say."""

    heading: str
    cells: Sequence[str]

    @property
    def is_schedule(self) -> bool:
        return self.heading == "schedule"

    @property
    def width(self) -> int:
        needed = max(cell_len(text) for text in [self.heading, *self.cells])
        return min(needed, _SCHEDULE_WIDTH) if self.is_schedule else needed


def fastest_first(candidates: Sequence[CandidateReport]) -> list[CandidateReport]:
    """Problems in the order of the job; in each, what is right by measured time, else by predicted; then the rest."""

    def order(candidate: CandidateReport) -> tuple[bool, bool, float, str]:
        measured, predicted = candidate.measured_us, candidate.predicted_us
        us = measured if measured is not None else predicted
        time = us if us is not None else float("inf")
        return candidate.verdict != "ok", measured is None, time, candidate.candidate

    problems = {problem: place for place, problem in enumerate(dict.fromkeys(map(_problem, candidates)))}
    return sorted(candidates, key=lambda one: (problems[_problem(one)], order(one)))


def print_candidates(console: Console, candidates: Sequence[CandidateReport]) -> None:
    """A table for each problem, as wide as the terminal: columns that do not fit follow in another one below, beside
    the candidates' names. Columns without a figure are left out. Then what the words mean."""
    shown: dict[str, None] = {}
    for (name, device_class), of_problem in groupby(candidates, key=_problem):
        console.print(Text(f"{name} on {device_class}", style="bold"))
        key, *columns = _columns(list(of_problem))
        for together in _side_by_side(key, columns, console.width):
            console.print(_table([key, *together]))
            console.print()
        shown |= dict.fromkeys(column.heading for column in columns)
    for heading, note in _NOTES.items():
        if heading in shown:
            console.print(Text(note, style="dim"))


def _problem(candidate: CandidateReport) -> tuple[str, str]:
    return candidate.problem, candidate.device_class


def _columns(candidates: Sequence[CandidateReport]) -> list[_Column]:
    columns = [
        _Column("candidate", [one.candidate[:12] for one in candidates]),
        _Column("verdict", [one.verdict or "-" for one in candidates]),
        _Column("error", [_error(one) for one in candidates]),
        _Column("measured", [_time(one.measured_us) for one in candidates]),
        _Column("spread", [_share(one.spread) for one in candidates]),
        _Column("TFLOP/s", ["-" if one.tflops is None else f"{one.tflops:.3g}" for one in candidates]),
        _Column("registers", [_count(one.registers) for one in candidates]),
        _Column("shared", [_count(one.shared_bytes) for one in candidates]),
        _Column("spills", [_count(one.spill_bytes) for one in candidates]),
        _Column("occupancy", [_share(one.occupancy) for one in candidates]),
        _Column("predicted", [_time(one.predicted_us) for one in candidates]),
        _Column("schedule", [schedule_text(one.schedule) for one in candidates]),
    ]
    return [column for column in columns if any(cell != "-" for cell in column.cells)]


def _side_by_side(key: _Column, columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """The columns of each table, from left to right: as many as fit beside the key."""
    tables: list[list[_Column]] = []
    for column in columns:
        if tables and sum(one.width + _GAP for one in [key, *tables[-1], column]) - _GAP <= width:
            tables[-1].append(column)
        else:
            tables.append([column])
    return tables


def _table(columns: Sequence[_Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for column in columns:
        if column.is_schedule:
            table.add_column(column.heading, ratio=1)
        else:
            left = column.heading in ("candidate", "verdict")
            table.add_column(column.heading, no_wrap=True, justify="left" if left else "right")
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def _error(candidate: CandidateReport) -> str:
    if candidate.max_error is None:
        return "-"
    if candidate.error_bound is None:
        return f"{candidate.max_error:.1e}"
    return f"{candidate.max_error:.1e} of {candidate.error_bound:.1e}"


def _time(us: float | None) -> str:
    return "-" if us is None else microseconds(us)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
