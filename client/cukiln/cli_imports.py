"""`cukiln imports`: what was measured elsewhere and sent to the service, and how it is taken back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from cukiln.cli_arguments import given
from cukiln.cli_console import day, make_console
from cukiln.cli_server import find_client
from cukiln.types import ImportReport

app = typer.Typer(help="List and withdraw imports.", no_args_is_help=True)
Url = Annotated[str | None, typer.Option("--url", help="The service, found as by `cukiln tune`.")]


@app.command("list")
def list_imports(
    url: Url = None, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Show every import, the newest first: what sent it, where it was measured, how many records have a part of it."""
    with find_client(url) as client:
        found = list(client.imports())
    if as_json:
        typer.echo(json.dumps({"imports": [one.model_dump(mode="json") for one in found]}))
    elif found:
        _print_imports(found)
    else:
        typer.echo("Nothing was imported yet.")


@app.command()
def withdraw(
    import_id: Annotated[str, typer.Argument(metavar="ID", parser=given, help="Its id, which is that of its job.")],
    url: Url = None,
) -> None:
    """Take an import back as a whole: records are what they would be without it. A key withdraws its own."""
    with find_client(url) as client:
        client.withdraw_import(import_id)
    typer.echo(f"{import_id} is in no record any more")


def _print_imports(found: Sequence[ImportReport]) -> None:
    table = Table("id", "by", "device", "GPU", "sent", "records", "state", box=None, pad_edge=False)
    for one in found:
        state = "withdrawn" if one.withdrawn_at is not None else "overwrites" if one.overwrites else "beside"
        words = (one.id, one.by, one.device_class, one.uuid, day(one.imported_at), str(one.records), state)
        table.add_row(*map(Text, words))
    make_console().print(table)
