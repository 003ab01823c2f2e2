"""What commands share: arguments (an empty one is refused), consoles (control characters escaped), tables, numbers."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from cukiln.errors import UsageError
from cukiln.local_cache import write_atomically
from cukiln.printable import printable

_PLAIN_WIDTH = 100  # columns of a table in a file or a pipe
GAP = 2  # characters between columns
JOB_ID = r"[0-9a-f]{8,32}"  # whole, or as many of its first digits as name it


class SafeConsole(Console):
    """No markup, no emoji codes, and no control characters but its own: a problem's name may be `[/b]`."""

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


def plain_table() -> Table:
    """Without borders; its columns are added by the caller."""
    return Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))


_WIDEST = 40  # characters that a wrapped column gets at least, where it is so long


@dataclass(frozen=True)
class Column:
    """A heading with its cells; `-` in one without a value."""

    heading: str
    cells: Sequence[str]
    left: bool = False
    wrapped: bool = False

    @property
    def width(self) -> int:
        needed = max(cell_len(text) for text in [self.heading, *self.cells]) + GAP
        return min(needed, _WIDEST + GAP) if self.wrapped else needed


def columns_of(
    rows: Sequence[Any], cells: Mapping[str, Callable[[Any], str]], left: Sequence[str] = (), wrapped: str = ""
) -> list[Column]:
    """One for each heading, of what its function makes of each row; without those that are empty."""
    columns = [Column(name, [cell(row) for row in rows], name in left, name == wrapped) for name, cell in cells.items()]
    return [column for column in columns if any(cell != "-" for cell in column.cells)]


def print_columns(console: Console, key: Column, columns: Sequence[Column]) -> None:
    """A table that begins with `key`; columns that do not fit the terminal follow in another one below."""
    # The last column of a table needs no gap behind it.
    for part in fitting([column.width for column in columns], console.width + GAP, taken=key.width):
        table = plain_table()
        shown_columns = [key, *(columns[number] for number in part)]
        for column in shown_columns:
            if column.wrapped:
                table.add_column(column.heading, ratio=1)
            else:
                table.add_column(column.heading, no_wrap=True, justify="left" if column.left else "right")
        for row in zip(*(column.cells for column in shown_columns), strict=True):
            table.add_row(*map(Text, row))
        console.print(table)
        console.print()


def shown(value: float | None, form: str, unit: str = "") -> str:
    """A number in this format, such as `.1e`; `-` for None."""
    return "-" if value is None else f"{value:{form}}{unit}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g} %"


def duration(seconds: float) -> str:
    """Seconds in words: `9 ms`, `4.2 s`, `48 s`, `3 min 5 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 or seconds == 0 else "under 1 ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def fitting(widths: Sequence[int], width: int, taken: int = 0) -> list[list[int]]:
    """Which parts stand side by side, from left to right: as many as fit into `width` beside `taken`."""
    rows: list[list[int]] = []
    for number, needed in enumerate(widths):
        if rows and taken + needed + sum(widths[other] for other in rows[-1]) <= width:
            rows[-1].append(number)
        else:
            rows.append([number])
    return rows


def given(text: str) -> str:
    """Raises `typer.BadParameter`."""
    if not text:
        raise typer.BadParameter("it is empty")
    return text


def given_path(text: str) -> Path:
    """Raises `typer.BadParameter`."""
    return Path(given(text))


def write_output(path: Path, data: bytes) -> None:
    """A file that a command was asked for, complete or absent. Raises `UsageError`."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


RequestFile = Annotated[
    str, typer.Argument(metavar="FILE", parser=given, help="A job request in JSON; `-` reads standard input.")
]
JobId = Annotated[
    str, typer.Argument(metavar="JOB", parser=given, help="A job's id, as `cukiln jobs` shows it: 8 digits or more.")
]
ProblemName = Annotated[str | None, typer.Option(help="The name of the problem. Default: all.")]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="The service's address; `private`: one of the data folder, for this command. Default: CUKILN_URL, `url` "
        "in ~/.config/cukiln/config.toml, else http://127.0.0.1:8765.",
    ),
]
OfTarget = Annotated[
    str | None,
    typer.Option(
        "--target", help="An architecture, or `cpu`, for all problems. Default: FILE's, else that of the GPU here."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, as the last line.")]


def is_id(what: str, of: str, digits: int, expected: str) -> bool:
    """Whether it is an id, or the first 8 of its digits or more, and no file. Raises `UsageError` for fewer."""
    if not re.fullmatch(rf"[0-9a-f]{{1,{digits}}}", what) or Path(what).exists():
        return False
    if len(what) < 8:
        raise UsageError(f"{what!r} is neither a file nor a {of}: give {expected}, or the first 8 or more")
    return True
