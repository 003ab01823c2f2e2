"""`cukiln cache`: the records and libraries that are kept on this machine."""

import json
import time
from dataclasses import asdict
from math import inf
from typing import Annotated

import typer
from rich.text import Text

from cukiln.cli.console import AsJson, duration, make_console, plain_table
from cukiln.cli.exit_codes import FAILED
from cukiln.counted import counted
from cukiln.local_cache import LocalCache, Usage
from cukiln.settings import ClientSettings

cache_app = typer.Typer(help="Look after the local cache of records and libraries.", no_args_is_help=True)


def _cache() -> LocalCache:
    settings = ClientSettings.from_environment()
    return LocalCache(settings.cache_dir, settings.cache_bytes)


@cache_app.command("ls")
def list_cache(as_json: AsJson = False) -> None:
    """Show the winners that are kept, the newest first, and how much room the cache takes."""
    cache = _cache()
    usage, answers = cache.usage(), sorted(cache.answers(), key=lambda answer: -answer.at)
    if as_json:
        kept = [asdict(answer) for answer in answers]
        typer.echo(json.dumps({"folder": str(cache.folder), "limit": cache.most_bytes, **asdict(usage), "kept": kept}))
        return
    if answers:
        table = plain_table()
        for heading in ("key", "revision", "age", "service"):
            table.add_column(heading, no_wrap=True, justify="right" if heading in ("revision", "age") else "left")
        for answer in answers:
            age = duration(max(0.0, time.time() - answer.at))
            table.add_row(*map(Text, (answer.key[:12], str(answer.revision), age, answer.url)))
        make_console().print(table)
    typer.echo(f"{cache.folder}: {_described(usage)}, of {counted(cache.most_bytes, 'byte')} at most")


@cache_app.command()
def prune(
    most_bytes: Annotated[
        int | None, typer.Option("--bytes", min=0, help="Down to so many. Default: CUKILN_CACHE_BYTES, else 4 GiB.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of it, what is in use too.")] = False,
) -> None:
    """Remove what was not used for the longest time; what was used within ten minutes stays."""
    cache = _cache()
    removed = cache.prune(0, unused_seconds=-inf) if everything else cache.prune(most_bytes)
    typer.echo(f"Removed: {_described(removed)}. Left: {_described(cache.usage())}.")


@cache_app.command("verify")
def verify_cache(as_json: AsJson = False) -> None:
    """Compare every file with its digest, and remove the damaged ones. Exit code 1 if there were any."""
    cache = _cache()
    damaged = cache.verify()
    if as_json:
        typer.echo(json.dumps({"damaged": [str(path) for path in damaged]}))
    else:
        for path in damaged:
            typer.echo(f"damaged, and removed: {path}")
        typer.echo(f"{cache.folder}: {_described(cache.usage())}; {len(damaged)} damaged")
    raise typer.Exit(FAILED if damaged else 0)


def _described(usage: Usage) -> str:
    parts = [counted(usage.records, "record"), counted(usage.libraries, "library"), counted(usage.other, "other file")]
    return f"{', '.join(parts)}, {counted(usage.bytes, 'byte')}"
