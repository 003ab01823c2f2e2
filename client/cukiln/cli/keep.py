"""Stored data: `cukiln forget`, `blobs verify`, `blobs repair`, `gc`, `backup`, `restore`.

`forget` is a request to the service; the others work on the data themselves, where the server is installed, with or
without a running service.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cukiln.cli.arguments import AsJson, Url, given, given_path
from cukiln.cli.server import Store, find_client, load_settings, open_store, server_module
from cukiln.counted import counted
from cukiln.errors import ServerFailed, UsageError

FAILED = 1
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
    for checked in damage.check_blobs(store.database, store.blobs):
        count, size = count + 1, size + checked.blob.size
        if checked.damage is None:
            continue
        if repair:
            damage.repair(store.database, store.blobs, checked.blob.digest)
        damaged.append(asdict(checked.damage))
        if not as_json:
            _print_damage(checked.damage, repair)
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
