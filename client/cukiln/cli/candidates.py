"""`cukiln candidates`: what was tried for a job's problems; `cukiln accuracy`: the errors of its winners."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from cukiln.cli.console import (
    AsJson,
    JobId,
    ProblemName,
    Url,
    columns_of,
    make_console,
    percent,
    print_columns,
    shown,
)
from cukiln.cli.server import find_client
from cukiln.cli.table import microseconds, schedule_text
from cukiln.types import CandidateReport, Contender, VendorResult, WinnerRecord

_NOTES = {
    "verdict": "verdict: ok is verified correct; the reason for any other is in `--json`, as `message`",
    "PTX": "PTX: what nvcc made of the kernel, run on the CPU, where a job asks that of every candidate",
    "error": "error: the largest over the verification plan's random inputs, and what is allowed there",
    "measured": "measured: the median time of a run on the GPU; spread: the distance of the quartiles, as its share",
    "registers": "registers: of a thread; shared, spills: bytes of a block and of a thread; occupancy: the share of a "
    "multiprocessor's threads that are resident",
    "predicted": "predicted: an estimate from the compiled kernel and the GPU's data sheet",
}


candidates_app = typer.Typer()


@candidates_app.command("candidates")
def list_candidates(
    job: JobId,
    problem: ProblemName = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show what was tried for JOB, the fastest first: verdicts, errors, times, resources, schedules."""
    console = make_console()
    with find_client(url) as client:
        candidates = fastest_first(list(client.candidates(job, problem=problem)))
    if as_json:
        dumped = [candidate.model_dump(mode="json") for candidate in candidates]
        typer.echo(json.dumps({"job": job, "candidates": dumped}))
    elif candidates:
        print_candidates(console, candidates)
    else:
        typer.echo("No candidates: the job is not planned yet, or its problems were answered from the cache.")


@candidates_app.command()
def accuracy(
    job: JobId,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the errors of JOB's winners against float64, and those of the vendor's library."""
    console = make_console()
    with find_client(url) as client:
        won = [problem for problem in client.job(job).problems if problem.winner is not None]
        rows = [row for problem in won for row in accuracy_rows(problem.name, client.kernel(problem.key))]
    if as_json:
        typer.echo(json.dumps({"job": job, "accuracy": rows}))
    elif rows:
        print_accuracy(console, rows)
    else:
        typer.echo("No winners: the job is not done yet, or no candidate was correct.")


def fastest_first(candidates: Sequence[CandidateReport]) -> list[CandidateReport]:
    """Problems in the job's order; in each, correct candidates by measured time, else by predicted; then the rest."""

    def order(candidate: CandidateReport) -> tuple[bool, bool, float, str]:
        measured, predicted = candidate.measured_us, candidate.predicted_us
        us = measured if measured is not None else predicted
        time = us if us is not None else float("inf")
        return candidate.verdict != "ok", measured is None, time, candidate.candidate

    problems = {problem: place for place, problem in enumerate(dict.fromkeys(map(_problem, candidates)))}
    return sorted(candidates, key=lambda candidate: (problems[_problem(candidate)], order(candidate)))


def print_candidates(console: Console, candidates: Sequence[CandidateReport]) -> None:
    """A table for each problem; columns that do not fit the terminal follow in another one below. Then the legend."""
    headings: set[str] = set()
    for (name, device_class), of_problem in groupby(candidates, key=_problem):
        console.print(Text(f"{name} on {device_class}", style="bold"))
        key, *columns = columns_of(list(of_problem), _CELLS, left=("candidate", "verdict", "PTX"), wrapped="schedule")
        print_columns(console, key, columns)
        headings |= {column.heading for column in columns}
    for heading, note in _NOTES.items():
        if heading in headings:
            console.print(Text(note, style="dim"))


def _problem(candidate: CandidateReport) -> tuple[str, str]:
    return candidate.problem, candidate.device_class


_CELLS: dict[str, Callable[[CandidateReport], str]] = {
    "candidate": lambda c: c.candidate[:12],
    "verdict": lambda c: c.verdict or "-",
    "PTX": lambda c: c.ptx.verdict if c.ptx is not None else "-",
    "error": lambda c: shown(c.max_error, ".1e", "" if c.error_bound is None else f" of {c.error_bound:.1e}"),
    "measured": lambda c: _time(c.measured_us),
    "spread": lambda c: percent(c.spread),
    "TFLOP/s": lambda c: shown(c.tflops, ".3g"),
    "registers": lambda c: shown(c.registers, ","),
    "shared": lambda c: shown(c.shared_bytes, ","),
    "spills": lambda c: shown(c.spill_bytes, ","),
    "occupancy": lambda c: percent(c.occupancy),
    "predicted": lambda c: _time(c.predicted_us),
    "schedule": lambda c: schedule_text(c.schedule),
}


def _time(us: float | None) -> str:
    return "-" if us is None else microseconds(us)


_ACCURACY_NOTES = (
    "error, bound: the largest |result - float64| over all elements and runs on random normals, and what is allowed "
    "there; of bound: the most of its bound that any element used",
    "integers: whether inputs whose sums are exact gave the reference's bits; no rounding explains a difference there",
)
_VENDOR = "vendor: its library's largest error on the same inputs, and what ours may be off at that place"


def accuracy_rows(name: str, record: WinnerRecord) -> list[dict[str, Any]]:
    """Of the fastest kernel of the problem `name`, the shortest sums first: a row for each case of its verification,
    and one of its comparison on a GPU, which has a `vendor_error`. `sum_length`: products in each sum; `integers`:
    whether bits were equal on the same extents, null without such a case."""
    best, vendor = record.front[0], record.vendor
    cases = [case for case in best.verdict.get("cases", []) if case.get("max_error") is not None]
    exact = {tuple(case["extents"]): case["max_error"] == 0.0 for case in cases if case["kind"] == "integer"}
    lengths = {tuple(case["extents"]): case.get("sum_length") for case in cases}
    head = {"problem": name, "device_class": record.device_class, "operator": record.operator}
    dtypes = {field: str(record.problem.get(field, "-")) for field in ("dtype", "out_dtype")}

    def row(
        extents: list[int], error: float, bound: float | None, share: float | None, theirs: VendorResult | None = None
    ) -> dict[str, Any]:
        return {
            **head,
            **dtypes,
            "sum_length": lengths.get(tuple(extents)),
            "extents": extents,
            "max_error": error,
            "error_bound": bound,
            "share_of_bound": share,
            "integers": exact.get(tuple(extents)),
            "vendor_error": theirs.max_error if theirs else None,
            "vendor_bound": theirs.error_bound if theirs else None,
        }

    rows = [
        row(case["extents"], case["max_error"], case.get("error_bound"), case.get("max_ratio"))
        for case in cases
        if case["kind"] == "normal"
    ]
    compared = best.measurement
    if isinstance(compared, Contender) and compared.max_error is not None:  # on the vendor's inputs
        rows.append(row(list(best.launch.extents.values()), compared.max_error, compared.error_bound, None, vendor))
    return sorted(rows, key=lambda row: row["sum_length"] or 0)


def print_accuracy(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """A row for each case, then the legend."""
    with_vendor = any(row["vendor_error"] is not None for row in rows)
    cells = {name: cell for name, cell in _ACCURACY_CELLS.items() if name != "vendor" or with_vendor}
    key, *columns = columns_of(rows, cells, left=("problem", "operator", "dtype", "integers"))
    print_columns(console, key, columns)
    for note in [*_ACCURACY_NOTES, *([_VENDOR] if with_vendor else [])]:
        console.print(Text(note, style="dim"))


_ACCURACY_CELLS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "problem": lambda row: row["problem"],
    "operator": lambda row: row["operator"],
    "dtype": lambda row: " → ".join(dict.fromkeys([row["dtype"], row["out_dtype"]])),
    "sum of": lambda row: shown(row["sum_length"], ","),
    "error": lambda row: shown(row["max_error"], ".1e"),
    "bound": lambda row: shown(row["error_bound"], ".1e"),
    "of bound": lambda row: percent(row["share_of_bound"]),
    "integers": lambda row: {True: "equal", False: "differ", None: "-"}[row["integers"]],
    "vendor": lambda row: shown(row["vendor_error"], ".1e", f" of {shown(row['vendor_bound'], '.1e')}"),
}
