"""`cukiln jobs`, `cancel` and `trace`; `operators` and `targets`: what the service has."""

import json
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from cukiln.cli.console import AsJson, JobId, Url, day, duration, given_path, make_console, plain_table, write_output
from cukiln.cli.server import find_client
from cukiln.counted import counted
from cukiln.errors import UsageError
from cukiln.printable import printable
from cukiln.types import ENDED, JobState, JobSummary, OperatorReport, Targets

SHOWN_DIGITS = 8  # of an id: as few as name it

jobs_app = typer.Typer()


@jobs_app.command("jobs")
def list_jobs(
    state: Annotated[JobState | None, typer.Option(help="Of this state only.")] = None,
    name: Annotated[str | None, typer.Option(help="Of this name only.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="With this label only; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="So many at most.")] = 20,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show jobs, the newest first. Other commands take the digits that are shown of an id."""
    with find_client(url) as client:
        jobs = list(islice(client.jobs(state=state, name=name, labels=_labels(label or ())), limit))
    if as_json:
        typer.echo(json.dumps({"jobs": [job.model_dump(mode="json") for job in jobs]}))
        return
    if not jobs:
        typer.echo("No jobs.")
        return
    table = plain_table()
    for heading in ("job", "state", "problems", "made", "took"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in ("problems", "took") else "left")
    named = any(job.name for job in jobs)
    if named:
        table.add_column("name", overflow="fold")
    for job in jobs:
        cells = [job.job[:SHOWN_DIGITS], job.state, f"{job.problem_count:,}", day(job.created_at), _took(job)]
        table.add_row(*map(Text, [*cells, *([job.name or "-"] if named else [])]))
    make_console().print(table)


def _labels(given: Sequence[str]) -> dict[str, str]:
    """Of `key=value` each. Raises `UsageError`."""
    labels: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not (key and equals and value) or labels.get(key, value) != value:
            raise UsageError(f"--label {text!r} is none that a job may have; expected KEY=VALUE, one value of each key")
        labels[key] = value
    return labels


def _took(job: JobSummary) -> str:
    if job.cached:
        return "cached"
    if job.finished_at is None:
        return f"{duration(max(0.0, time.time() - job.created_at))} so far"
    return duration(max(0.0, job.finished_at - job.created_at))


@jobs_app.command()
def cancel(job: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Cancel JOB: finished work stays, nothing new is started."""
    with find_client(url) as client:
        was_over = client.job(job).state in ENDED
        ended = client.cancel(job)
    if as_json:
        typer.echo(json.dumps({"job": ended.job, "state": ended.state}))
    elif was_over:
        typer.echo(f"Job {ended.job} was {ended.state} already.")
    else:
        typer.echo(f"Job {ended.job} is {ended.state}; what was finished is kept.")


@jobs_app.command()
def trace(
    job: JobId,
    out: Annotated[
        Path | None, typer.Option("--out", parser=given_path, help="The file. Default: JOB-trace.json.")
    ] = None,
    url: Url = None,
) -> None:
    """Write JOB's work by worker and time in Chrome's Trace Event Format, for ui.perfetto.dev or chrome://tracing."""
    with find_client(url) as client:
        events = client.trace(job)
    path = out or Path(f"{job}-trace.json")
    write_output(path, json.dumps(events).encode())
    typer.echo(f"{path}: {counted(len(events.get('traceEvents', [])), 'event')}; open it in ui.perfetto.dev")


@jobs_app.command()
def operators(
    name: Annotated[str | None, typer.Argument(metavar="OPERATOR", help="Its fields and tunables in full.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the operators of the service: the fields of their problems, and their tunables."""
    with find_client(url) as client:
        reports = client.operators()
    if name is not None:
        chosen = [report for report in reports if report.operator == name]
        if not chosen:
            allowed = ", ".join(report.operator for report in reports)
            raise UsageError(f"there is no operator {name!r}; allowed: {allowed}")
        reports = chosen
    if as_json:
        typer.echo(json.dumps({"operators": [report.model_dump(mode="json") for report in reports]}))
        return
    for report in reports:
        _print_operator(report, full=name is not None)


def _print_operator(report: OperatorReport, *, full: bool) -> None:
    console, schema = make_console(), report.schema_
    console.print(Text(report.operator, style="bold"))
    required = schema.get("required", [])
    optional = [field for field in schema.get("properties", {}) if field not in (*required, "operator")]
    console.print(Text(f"  needs {', '.join(required)}; takes {', '.join(optional)}"))
    if not full:
        return
    if text := schema.get("description"):
        console.print(Text(text))
    table = plain_table()
    for heading in ("tunable", "default", "allowed", "meaning"):
        table.add_column(heading, ratio=1 if heading == "meaning" else None)
    for tunable, facts in report.tunables.items():
        allowed = facts["allowed"]
        choices = ", ".join(map(str, allowed)) if isinstance(allowed, list) else json.dumps(allowed)
        table.add_row(*map(Text, (tunable, str(facts["default"]), choices, str(facts["meaning"]))))
    console.print(table)


@jobs_app.command()
def targets(url: Url = None, as_json: AsJson = False) -> None:
    """Show the architectures of the service, whether it compiles for them now, and the GPUs that measure."""
    with find_client(url) as client:
        report = client.targets()
    if as_json:
        typer.echo(report.model_dump_json())
    else:
        _print_targets(report)


def _print_targets(report: Targets) -> None:
    console, table = make_console(), plain_table()
    for heading in ("target", "GPU", "compiled", "device classes"):
        table.add_column(heading, no_wrap=heading != "device classes")
    for target in report.targets:
        compiled = "now" if target.toolchains else "no worker"
        table.add_row(*map(Text, (target.target, target.name, compiled, ", ".join(target.device_classes))))
    console.print(table)
    for device in report.devices:
        drained = f"; drained: {device.drained}" if device.drained else ""
        console.print(Text(f"{device.device_class} ({device.uuid}), driver {device.driver}{drained}"))
    for why, workers in report.paused.items():
        console.print(Text(printable(f"{counted(len(workers), 'worker')} paused: {why}")))
