"""How arguments of the command line are read: an empty one, as a shell makes of a variable without a value, is refused.

Else a path would be the current folder, and an id a part of an address that is not there.
"""

from __future__ import annotations

from pathlib import Path

import typer


def given(text: str) -> str:
    """Raises `typer.BadParameter`."""
    if not text:
        raise typer.BadParameter("it is empty")
    return text


def given_path(text: str) -> Path:
    """Raises `typer.BadParameter`."""
    return Path(given(text))
