"""`cukiln keys`: the API keys of a service, made and revoked where its database is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from cukiln.cli.arguments import AsJson
from cukiln.cli.console import day, make_console
from cukiln.cli.server import load_settings, open_database, server_module
from cukiln.errors import UsageError

MOST_NAME = 64
_CLOSED = (
    "No key is good, and the service needs one all the same, on loopback too: what was closed does not open by itself. "
    "Make one by `cukiln keys create NAME --scope admin`, or start the service with CUKILN_API_KEY."
)

app = typer.Typer(
    help="Make, list and revoke the API keys of the service over this data folder (CUKILN_DATA, DATABASE_URL).",
    no_args_is_help=True,
)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is for; imports are labelled with it.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(help="What it may do: read, submit, import or admin; may be repeated. Default: read."),
    ] = None,
    overwrites: Annotated[
        bool,
        typer.Option("--overwrites", help="Its imports may stand beside what the service measured itself."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it: it is shown this once.

    submit and import include read, admin includes all. A service with a key answers nothing without one.
    """
    keys = server_module("storage.entities.keys")
    if not name.isprintable() or not 0 < len(name) <= MOST_NAME:
        raise UsageError(f"NAME is {name!r}; allowed: 1 to {MOST_NAME} printable characters")
    scopes = scope or ["read"]
    if wrong := [name for name in scopes if name not in keys.SCOPES]:
        raise UsageError(f"--scope is {wrong[0]!r}; allowed: {', '.join(keys.SCOPES)}")
    with open_database(load_settings({}), make=True) as database, database.write() as session:
        token: str = keys.create_key(session, name, set(scopes), overwrites=overwrites)
    if as_json:
        typer.echo(json.dumps({"key": token, "id": keys.parts_of(token)[0]}))
    else:
        typer.echo(token)
        typer.echo("This key is shown once. Give it to clients as CUKILN_API_KEY.", err=True)


@app.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """Show every key that was made, without its secret."""
    with open_database(load_settings({}), make=True) as database, database.read() as session:
        keys = server_module("storage.entities.keys").all_keys(session)
    if as_json:
        typer.echo(json.dumps({"keys": [_as_json(key) for key in keys], "needs_key": bool(keys)}))
        return
    table = Table("id", "name", "scopes", "made", "state", box=None, pad_edge=False)
    for key in keys:
        scopes = ", ".join(sorted(key.scopes)) + (", overwrites" if key.overwrites else "")
        state = "good" if key.revoked_at is None else f"revoked {day(key.revoked_at)}"
        table.add_row(*map(Text, (key.id, key.name, scopes, day(key.created_at), state)))
    if not keys:
        typer.echo("No key was made yet: without CUKILN_API_KEY the service answers loopback, and needs none.")
        return
    make_console().print(table)
    _say_if_closed(keys)


@app.command()
def revoke(key: Annotated[str, typer.Argument(metavar="ID", help="Its id, as `cukiln keys list` shows it.")]) -> None:
    """Revoke a key, within a second. What was done with it stays, and the service needs a key as before."""
    module = server_module("storage.entities.keys")
    with open_database(load_settings({}), make=True) as database, database.write() as session:
        revoked, keys = module.revoke_key(session, key), module.all_keys(session)
    if not revoked:
        raise UsageError(f"there is no good key with the id {key!r}; `cukiln keys list` shows them")
    typer.echo(f"{key} opens nothing any more")
    _say_if_closed(keys)


def _say_if_closed(keys: Sequence[Any]) -> None:
    if all(key.revoked_at is not None for key in keys):
        typer.echo(_CLOSED, err=True)


def _as_json(key: Any) -> dict[str, Any]:
    names = ("id", "name", "overwrites", "created_at", "revoked_at")
    return {**{name: getattr(key, name) for name in names}, "scopes": sorted(key.scopes)}
