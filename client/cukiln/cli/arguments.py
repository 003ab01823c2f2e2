"""Arguments and options of several commands.

An empty argument, as a shell makes of a variable without a value, is refused: a path would be the current folder, and
an id a missing part of an address.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def given(text: str) -> str:
    """Raises `typer.BadParameter`."""
    if not text:
        raise typer.BadParameter("it is empty")
    return text


def given_path(text: str) -> Path:
    """Raises `typer.BadParameter`."""
    return Path(given(text))


RequestFile = Annotated[
    str, typer.Argument(metavar="FILE", parser=given, help="A job request in JSON; `-` reads standard input.")
]
JobId = Annotated[str, typer.Argument(metavar="JOB", parser=given, help="A job's id, as `cukiln tune` prints it.")]
ProblemName = Annotated[str | None, typer.Option(help="The name of the problem. Default: all.")]
Url = Annotated[
    str | None,
    typer.Option(
        "--url", help="The service. Default: CUKILN_URL, else a `cukiln serve` that runs over this data folder."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, as the last line.")]
