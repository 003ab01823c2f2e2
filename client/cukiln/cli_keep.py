"""What is kept: `cukiln forget`, `blobs verify`, `blobs repair`, `gc`, `backup`, `restore`.

`forget` asks the service; the others work on the data themselves, where the server is installed, beside a service that
runs or without one.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cukiln.cli_arguments import given, given_path
from cukiln.cli_server import Store, find_client, load_settings, open_store, server_module
from cukiln.errors import ServerFailed, UsageError

FAILED = 1
DAY_SECONDS = 86_400

keep_app = typer.Typer()
blobs_app = typer.Typer(help="Look whether the stored files are whole, and mend what is not.", no_args_is_help=True)
keep_app.add_typer(blobs_app, name="blobs")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@keep_app.command()
def forget(
    what: Annotated[
        str,
        typer.Argument(
            metavar="KEY|BUILD", parser=given, help="A winner's key or a build's id, or the first 8 or more digits."
        ),
    ],
    url: Annotated[str | None, typer.Option("--url", help="The service, as of `cukiln tune`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Forget a winner with what answered it, or what is known of a build, so that the next job tries it again."""
    with find_client(url) as client:
        forgotten = client.forget(what)
    if as_json:
        typer.echo(forgotten.model_dump_json())
        return
    if forgotten.key is not None:
        typer.echo(f"Forgotten: winner {forgotten.key} with {forgotten.libraries} libraries,")
    typer.echo(
        f"{'Forgotten: ' if forgotten.key is None else ''}{len(forgotten.builds)} builds, {forgotten.verdicts} "
        f"verdicts, {forgotten.measurements} measurements. The next job that asks tunes again."
    )
    for build in forgotten.in_use:
        typer.echo(f"Kept: build {build}, which a job needs that has not ended")


@blobs_app.command("verify")
def blobs_verify(as_json: AsJson = False) -> None:
    """Read every blob and compare its digest; print what is damaged or gone, and what needs it. Exit code 1 if any."""
    with open_store() as store:
        raise typer.Exit(_check(store, as_json, mend=False))


@blobs_app.command("repair")
def blobs_repair(as_json: AsJson = False) -> None:
    """Verify, and set aside what is damaged (`quarantine` beside the blobs): the next job builds it anew."""
    with open_store() as store:
        raise typer.Exit(_check(store, as_json, mend=True))


@keep_app.command()
def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Remove it. Default: only say what would be removed.")] = False,
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
        retention = server_module("storage.retention")
        keep = retention.Keep(days * DAY_SECONDS, keep_bytes or store.settings.keep_bytes)
        if yes:
            removed = _sum(store, retention.Removed(), retention.collect(store.database, keep))
            swept = store.blobs.sweep()
        else:
            removed, swept = retention.survey(store.database, keep), None
    if as_json:
        typer.echo(json.dumps({**asdict(removed), "removed": yes, "freed_bytes": swept.bytes if swept else 0}))
        return
    counts = ", ".join(f"{count:,} {name}" for name, count in asdict(removed).items() if name != "bytes" and count)
    what = f"{counts or 'nothing'}; {removed.bytes:,} bytes of blobs"
    if swept is None:
        typer.echo(f"Ended more than {days:g} days ago, and needed by nothing: {what}.")
        typer.echo("Nothing was removed: `cukiln gc --yes` does it.")
    else:
        typer.echo(f"Removed: {what}. {swept.files:,} files with {swept.bytes:,} bytes are off the disk.")


@keep_app.command()
def backup(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", parser=given_path, help="A new folder, or one with an earlier backup.")
    ],
    blobs_only: Annotated[
        bool, typer.Option("--blobs-only", help="Without the database, where that is PostgreSQL: see pg_dump.")
    ] = False,
) -> None:
    """Copy the database and the blobs of a service, which may run meanwhile. Exit code 1 where the service has lost
    some of its blobs: the backup is whole without them."""
    backups = server_module("storage.backup")
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
        f"{folder}: {'the database and ' if manifest.database else ''}{len(manifest.blobs):,} blobs, {size:,} bytes; "
        f"{made.copied:,} blobs were copied now."
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
    backups, errors = server_module("storage.backup"), server_module("storage.errors")
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
    typer.echo(f"{settings.data_dir}: {database}{len(done.manifest.blobs) - _of(done):,} blobs are restored.")
    for digest in done.lost:
        typer.echo(f"lost: sha256:{digest}; the next job that needs it builds it anew")
    for key in done.keys:
        named = f"{key.id} ({', '.join([key.name, *sorted(key.scopes)])})"
        typer.echo(f"key {named} is good: `cukiln keys revoke {key.id}` if it was revoked since")
    raise typer.Exit(FAILED if done.lost else 0)


def _of(done: Any) -> int:
    """Blobs that the manifest names and that were damaged in the backup."""
    return len(set(done.lost) & done.manifest.blobs.keys())


def _sum(store: Store, removed: Any, some: Iterator[Any]) -> Any:
    for more in some:
        removed += more
        store.database.pause()
    return removed


def _check(store: Store, as_json: bool, *, mend: bool) -> int:
    damage = server_module("storage.damage")
    count = size = 0
    found: list[dict[str, Any]] = []
    for checked in damage.check_blobs(store.database, store.blobs):
        count, size = count + 1, size + checked.blob.size
        if checked.damage is None:
            continue
        if mend:
            damage.repair(store.database, store.blobs, checked.blob.digest)
        found.append(asdict(checked.damage))
        if not as_json:
            _print_damage(checked.damage, mend)
    if as_json:
        typer.echo(json.dumps({"blobs": count, "bytes": size, "repaired": mend, "damaged": found}))
    else:
        typer.echo(f"{count:,} blobs, {size:,} bytes: {f'{len(found):,} damaged or gone' if found else 'all whole'}.")
        if found and not mend:
            typer.echo("`cukiln blobs repair` sets them aside, so that the next job builds them anew.")
    return FAILED if found and not mend else 0


def _print_damage(damage: Any, mended: bool) -> None:
    blob = damage.blob
    typer.echo(f"sha256:{blob.digest} ({blob.size:,} bytes, {blob.media_type}): {damage.why}")
    for name in ("winners", "builds", "groups"):
        for one in getattr(damage, name):
            typer.echo(f"  needed by {name[:-1]} {one}")
    if mended:
        again = "the next job that asks builds it anew" if damage.winners or damage.builds else "no kernel needs it"
        typer.echo(f"  set aside; {again}")
