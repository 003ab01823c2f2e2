"""Stored data: `cukiln forget` and `imports`, which ask the service; `keys`, `blobs`, `gc`, `backup`, `restore`, which
work on the data themselves, with or without a running service."""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from cukiln.cli.console import AsJson, Url, day, given, given_path, make_console
from cukiln.cli.exit_codes import FAILED
from cukiln.cli.server import Store, find_client, load_settings, open_database, open_store, server_module
from cukiln.counted import counted
from cukiln.errors import ServerFailed, UsageError

DAY_SECONDS = 86_400

keep_app = typer.Typer()
blobs_app = typer.Typer(help="Check the stored files, and repair damaged ones.", no_args_is_help=True)
keep_app.add_typer(blobs_app, name="blobs")


@keep_app.command()
def forget(
    what: Annotated[
        str,
        typer.Argument(
            metavar="KEY|BUILD", parser=given, help="A winner's key or a build's id, or the first 8 or more digits."
        ),
    ],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Forget a winner with its results, or a build's results, so that the next job tries it again."""
    with find_client(url) as client:
        forgotten = client.forget(what)
    if as_json:
        typer.echo(forgotten.model_dump_json())
        return
    winner = (
        f"winner {forgotten.key} with {counted(forgotten.libraries, 'library')},\n" if forgotten.key is not None else ""
    )
    typer.echo(
        f"Forgotten: {winner}{counted(len(forgotten.builds), 'build')}, {counted(forgotten.verdicts, 'verdict')}, "
        f"{counted(forgotten.measurements, 'measurement')}. The next job that asks tunes again."
    )
    for build in forgotten.in_use:
        typer.echo(f"Kept: build {build}, which a job needs that has not ended")


@blobs_app.command("verify")
def blobs_verify(as_json: AsJson = False) -> None:
    """Read every blob and compare its digest; print what is damaged or missing, and its users. Exit code 1 if any."""
    with open_store() as store:
        raise typer.Exit(_check(store, as_json, repair=False))


@blobs_app.command("repair")
def blobs_repair(as_json: AsJson = False) -> None:
    """Verify, and set aside what is damaged (`quarantine` beside the blobs): the next job builds it anew."""
    with open_store() as store:
        raise typer.Exit(_check(store, as_json, repair=True))


@keep_app.command()
def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Remove it. Default: print what would be removed.")] = False,
    keep_days: Annotated[float | None, typer.Option(min=0, help="Default: CUKILN_KEEP_DAYS, else 30.")] = None,
    keep_bytes: Annotated[
        int | None, typer.Option(min=1, help="Of blobs. Default: CUKILN_KEEP_BYTES, else any.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove jobs that ended long ago and what only they needed; winners and their files stay.

    The reconciler of a service does the same once a day.
    """
    with open_store() as store:
        days = store.settings.keep_days if keep_days is None else keep_days
        retention = server_module("storage.maintenance.retention")
        keep = retention.Keep(days * DAY_SECONDS, keep_bytes or store.settings.keep_bytes)
        if yes:
            removed = retention.Removed()
            for more in retention.collect(store.database, keep):
                removed += more
                store.database.pause()
            swept = store.blobs.sweep()
        else:
            removed, swept = retention.survey(store.database, keep), None
    if as_json:
        typer.echo(json.dumps({**asdict(removed), "removed": yes, "freed_bytes": swept.bytes if swept else 0}))
        return
    nouns = {name: "library" if name == "libraries" else name.removesuffix("s") for name in asdict(removed)}
    counts = [counted(count, nouns[name]) for name, count in asdict(removed).items() if name != "bytes" and count]
    what = f"{', '.join(counts) or 'nothing'}; {counted(removed.bytes, 'byte')} of blobs"
    if swept is None:
        ago = f"{days:g} day{'' if days == 1 else 's'}"
        typer.echo(f"Ended more than {ago} ago, and needed by nothing: {what}.")
        typer.echo("Nothing was removed: `cukiln gc --yes` does it.")
    else:
        typer.echo(f"Removed: {what}. Off the disk: {counted(swept.files, 'file')}, {counted(swept.bytes, 'byte')}.")


@keep_app.command()
def backup(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", parser=given_path, help="A new folder, or one with an earlier backup.")
    ],
    blobs_only: Annotated[
        bool, typer.Option("--blobs-only", help="Without the database, where that is PostgreSQL: see pg_dump.")
    ] = False,
) -> None:
    """Copy the database and the blobs of a service, which may run meanwhile. Exit code 1 where blobs of the service are
    damaged or missing: the backup lacks them."""
    backups = server_module("storage.maintenance.backup")
    with open_store() as store:
        try:
            made = backups.back_up(store.database, store.blobs, folder, blobs_only=blobs_only)
        except (OSError, sqlite3.Error) as error:
            raise ServerFailed(
                f"no backup was made in {folder} ({error}): name a new folder, or one with an earlier backup, where "
                "there is room and this user can write"
            ) from error
    manifest = made.manifest
    size = sum(manifest.blobs.values()) + (manifest.database.bytes if manifest.database else 0)
    typer.echo(
        f"{folder}: {'the database and ' if manifest.database else ''}{counted(len(manifest.blobs), 'blob')}, "
        f"{counted(size, 'byte')}; copied now: {counted(made.copied, 'blob')}."
    )
    for digest in manifest.missing:
        typer.echo(f"not in it: sha256:{digest}, which is damaged or gone in the service: `cukiln blobs verify`")
    raise typer.Exit(FAILED if manifest.missing else 0)


@keep_app.command()
def restore(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", parser=given_path, help="What `cukiln backup` has written.")
    ],
) -> None:
    """Fill the data folder (CUKILN_DATA), which must be empty or new, from a backup; every digest is checked."""
    backups, errors = server_module("storage.maintenance.backup"), server_module("storage.errors")
    settings = load_settings({})
    try:
        done = backups.restore(folder, settings)
    except errors.BackupUnusable as error:
        raise UsageError(str(error)) from error
    except errors.StorageError as error:
        raise ServerFailed(str(error)) from error
    except OSError as error:
        raise ServerFailed(
            f"{folder} was not restored into {settings.data_dir} ({error}): set CUKILN_DATA to an empty or new folder "
            "where this user can write"
        ) from error
    database = "the database and " if done.manifest.database else ""
    restored = len(done.manifest.blobs.keys() - set(done.lost))
    typer.echo(f"{settings.data_dir}: {database}{counted(restored, 'blob')} restored.")
    for digest in done.lost:
        typer.echo(f"lost: sha256:{digest}; the next job that needs it builds it anew")
    for key in done.keys:
        named = f"{key.id} ({', '.join([key.name, *sorted(key.scopes)])})"
        typer.echo(f"key {named} is good: `cukiln keys revoke {key.id}` if it was revoked since")
    raise typer.Exit(FAILED if done.lost else 0)


def _check(store: Store, as_json: bool, *, repair: bool) -> int:
    damage = server_module("storage.maintenance.damage")
    count = size = 0
    damaged: list[dict[str, Any]] = []
    for blob, why in damage.check_blobs(store.database, store.blobs):
        count, size = count + 1, size + blob.size
        if why is None:
            continue
        if repair:
            damage.repair(store.database, store.blobs, blob.digest)
        damaged.append(asdict(why))
        if not as_json:
            _print_damage(why, repair)
    if as_json:
        typer.echo(json.dumps({"blobs": count, "bytes": size, "repaired": repair, "damaged": damaged}))
    else:
        state = f"{len(damaged):,} damaged or gone" if damaged else "all whole"
        typer.echo(f"{counted(count, 'blob')}, {counted(size, 'byte')}: {state}.")
        if damaged and not repair:
            typer.echo("`cukiln blobs repair` sets them aside, so that the next job builds them anew.")
    return FAILED if damaged and not repair else 0


def _print_damage(damage: Any, repaired: bool) -> None:
    blob = damage.blob
    typer.echo(f"sha256:{blob.digest} ({counted(blob.size, 'byte')}, {blob.media_type}): {damage.why}")
    for name in ("winners", "builds", "groups"):
        for id in getattr(damage, name):
            typer.echo(f"  needed by {name[:-1]} {id}")
    if repaired:
        again = "the next job that asks builds it anew" if damage.winners or damage.builds else "no kernel needs it"
        typer.echo(f"  set aside; {again}")


imports_app = typer.Typer(help="List and withdraw imports.", no_args_is_help=True)
keep_app.add_typer(imports_app, name="imports")


@imports_app.command("list")
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


@imports_app.command()
def withdraw(
    import_id: Annotated[str, typer.Argument(metavar="ID", parser=given, help="Its id, which is that of its job.")],
    url: Url = None,
) -> None:
    """Withdraw an import as a whole: records become what they would be without it. A key withdraws its own."""
    with find_client(url) as client:
        client.withdraw_import(import_id)
    typer.echo(f"{import_id} is withdrawn from all records")


MOST_NAME = 64
_CLOSED = (
    "No key is good, and the service needs one all the same, on loopback too: what was closed does not open by itself. "
    "Make one by `cukiln keys create NAME --scope admin`, or start the service with CUKILN_API_KEY."
)

keys_app = typer.Typer(
    help="Make, list and revoke the API keys of the service over this data folder (CUKILN_DATA, DATABASE_URL).",
    no_args_is_help=True,
)
keep_app.add_typer(keys_app, name="keys")


@keys_app.command()
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


@keys_app.command("list")
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


@keys_app.command()
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
