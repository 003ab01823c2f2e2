"""`cukiln imports`: results that were measured elsewhere and sent to the service; withdrawing them."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from cukiln.cli.arguments import AsJson, Url, given
from cukiln.cli.console import day, make_console
from cukiln.cli.server import find_client

app = typer.Typer(help="List and withdraw imports.", no_args_is_help=True)


@app.command("list")
def list_imports(url: Url = None, as_json: AsJson = False) -> None:
    """Show every import, the newest first: its sender, where it was measured, how many records have a part of it."""
    with find_client(url) as client:
        reports = list(client.imports())
    if as_json:
        typer.echo(json.dumps({"imports": [report.model_dump(mode="json") for report in reports]}))
        return
    if not reports:
        typer.echo("Nothing was imported yet.")
        return
    table = Table("id", "by", "device", "GPU", "sent", "records", "state", box=None, pad_edge=False)
    for report in reports:
        state = "withdrawn" if report.withdrawn_at is not None else "overwrites" if report.overwrites else "beside"
        source = (report.id, report.by, report.device_class, report.uuid)
        table.add_row(*map(Text, (*source, day(report.imported_at), str(report.records), state)))
    make_console().print(table)


@app.command()
def withdraw(
    import_id: Annotated[str, typer.Argument(metavar="ID", parser=given, help="Its id, which is that of its job.")],
    url: Url = None,
) -> None:
    """Withdraw an import as a whole: records become what they would be without it. A key withdraws its own."""
    with find_client(url) as client:
        client.withdraw_import(import_id)
    typer.echo(f"{import_id} is withdrawn from all records")
