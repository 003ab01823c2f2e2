"""The console that every command prints with: text of others is shown, never obeyed."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from cukiln.printable import printable

_PLAIN_WIDTH = 140  # columns of a table that goes into a file or a pipe


class SafeConsole(Console):
    """No markup, no emoji codes, and no control characters but its own: a problem may be named `[/b]`."""

    def __init__(self, *, stderr: bool = False, width: int | None = None, force_terminal: bool | None = None) -> None:
        super().__init__(
            stderr=stderr, width=width, force_terminal=force_terminal, highlight=False, markup=False, emoji=False
        )

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable(segment.text, lines=True))


def make_console(*, stderr: bool = False) -> SafeConsole:
    """For standard output, or standard error."""
    console = SafeConsole(stderr=stderr)
    return console if console.is_terminal else SafeConsole(stderr=stderr, width=_PLAIN_WIDTH)


def day(seconds: float) -> str:
    """Seconds since 1970 as a day and a minute, UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
