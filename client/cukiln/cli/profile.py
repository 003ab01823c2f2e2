"""`cukiln profile`: what a run of each winner does, by operator, kernel and primitive."""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from cukiln.cli.console import AsJson, Column, Url, columns_of, given, is_id, make_console, print_columns
from cukiln.cli.exit_codes import PARTIAL
from cukiln.cli.server import find_client, server_module
from cukiln.cli.table import microseconds, schedule_text
from cukiln.errors import UsageError
from cukiln.job_request import read_request
from cukiln.types import Filters, Opened, ProfileCounts, ProfileOperator, ProfilePage, RingForm

_NOTES = {
    "times": "times: of a primitive by lanes, or by warps where a warp executes it together",
    "time": "time: (p) is predicted, no measurement; a primitive's is that of its roof alone: they do not add up",
    "products": "products: multiplications of the problem, with zeros of the padding; executed: those of whole tiles",
    "limbs": "limbs: products of bytes on tensor cores, over a ring",
    "read": "read, written: bytes that lanes ask for; what a cache answers counts each time",
    "ring bytes": "ring bytes: what one party of a two-party evaluation sends, with {filters} filters, where {opened}; "
    "comparisons are not in it",
}
_OPENED = {"multiplied": "what is multiplied is opened", "inputs": "the raw inputs are opened"}
FORMS_NOTE = "forms of other systems multiply by public filters, ours by {filters} ones: compare where they are alike"
INDENT = "  "


profile_app = typer.Typer()


@profile_app.command()
def profile(
    what: Annotated[
        str,
        typer.Argument(
            metavar="JOB|FILE",
            parser=given,
            help="A job's id, or its first 8 or more digits; or a job request in JSON.",
        ),
    ],
    filters: Annotated[
        Filters, typer.Option(help="Of two-party evaluation: whether the filters are shared, too.")
    ] = "secret",
    opened: Annotated[
        Opened, typer.Option(help="What it opens: the matrices that are multiplied, or the raw inputs.")
    ] = "multiplied",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run does, by operator, kernel and primitive: of JOB's winners, or of FILE's problems, predicted.

    Of FILE nothing is compiled or run: each problem has the schedule of its search that is predicted fastest.
    """
    console = make_console()
    of_job = is_id(what, "job", 32, "32 lower-case hexadecimal digits")
    if of_job:
        with find_client(url) as client:
            pages = list(client.profile_pages(what, filters=filters, opened=opened))
    else:
        pages = [estimated(read_request(what), filters, opened)]
    operators = [row for page in pages for row in page.operators]
    left_out = [problem for page in pages for problem in page.left_out]
    if as_json:
        rows, others = ([row.model_dump(mode="json") for row in rows] for rows in (operators, left_out))
        typer.echo(json.dumps({"filters": filters, "opened": opened, "operators": rows, "left_out": others}))
    elif operators:
        print_profile(console, operators, filters, opened)
    else:
        typer.echo("No winners: the job is not done yet, or no candidate was correct.")
    if not as_json:
        for problem in left_out:
            console.print(Text(f"{problem.problem} ({problem.operator}) has no profile: {problem.why}"))
    if left_out and not of_job:
        raise typer.Exit(PARTIAL)


def estimated(request: dict[str, Any], filters: str, opened: str) -> ProfilePage:
    """Of a request, without a service. Raises UsageError."""
    module = server_module("service.requests.estimate")
    try:
        page: ProfilePage = module.estimate(request, module.Openings(filters, opened))
    except module.Refused as refused:
        faults = [f"{fault.field}: {fault.detail}" if fault.field else fault.detail for fault in refused.faults]
        raise UsageError("\n  ".join(faults)) from refused
    return page


def print_profile(console: Console, operators: Sequence[ProfileOperator], filters: str, opened: str) -> None:
    """A table for each problem: the operator, below it its kernels, below each its primitives; then sums and legend."""
    headings: set[str] = set()
    for row in operators:
        console.print(Text(f"{row.problem} on {row.device_class}: {row.operator}", style="bold"))
        console.print(Text(f"{INDENT}{schedule_text(row.schedule)}", style="dim"))
        levels = [(0, row.counts)]
        for kernel in row.kernels:
            levels += [(1, kernel.counts), *((2, part) for part in kernel.primitives)]
        columns = columns_of([counts for _, counts in levels], _CELLS)
        names = Column("", [f"{INDENT * level}{_name(counts)}" for level, counts in levels], left=True)
        print_columns(console, names, columns)
        headings |= {column.heading for column in columns}
        if row.ring_forms:
            console.print(Text("the same layer in other forms", style="dim"))
            form, *counts = columns_of(row.ring_forms, _FORM_CELLS, left=("form", "filters"))
            print_columns(console, form, counts)
    if any(row.ring_forms for row in operators):
        console.print(Text(FORMS_NOTE.format(filters=filters), style="dim"))
    for heading, note in _NOTES.items():
        if heading in headings:
            console.print(Text(note.format(filters=filters, opened=_OPENED[opened]), style="dim"))


_CELLS: dict[str, Callable[[ProfileCounts], str]] = {
    "times": lambda c: f"{c.times:,}",
    "time": lambda c: _time(c),
    "products": lambda c: _count(c.multiplications),
    "executed": lambda c: _count(c.executed),
    "limbs": lambda c: _count(c.limb_products),
    "truncations": lambda c: _count(c.truncations),
    "read": lambda c: _count(c.bytes_read),
    "written": lambda c: _count(c.bytes_written),
    "launches": lambda c: _count(c.launches),
    "workspace": lambda c: _count(c.workspace_bytes),
    "ring bytes": lambda c: _count(c.ring_bytes),
}


_FORM_CELLS: dict[str, Callable[[RingForm], str]] = {
    "form": lambda form: f"{form.name}{'' if form.ours else ' (of other systems)'}",
    "filters": lambda form: form.filters,
    "ring bytes": lambda form: f"{form.ring_bytes:,}",
    "truncations": lambda form: f"{form.truncations:,}",
    "products": lambda form: f"{form.multiplications:,}",
}


def _name(counts: ProfileCounts) -> str:
    return f"{counts.name} (once for {counts.once_for})" if counts.once_for else counts.name


def _time(counts: ProfileCounts) -> str:
    if counts.seconds is None:
        return "-"
    return f"{microseconds(counts.seconds * 1e6)}{' (p)' if counts.seconds_from == 'predicted' else ''}"


def _count(value: int | None) -> str:
    return f"{value:,}" if value else "-"
