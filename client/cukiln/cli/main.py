"""The command line: its commands are in the modules beside this one.

Exit codes: 0 done; 1 failed; 2 the command or its file is wrong; 3 some problems have no winner; 78 a worker
cannot start with its settings; 130 interrupted.
"""

import errno
import os
import sys
from typing import Annotated

import typer

from cukiln import __version__
from cukiln.cli.cache import cache_app
from cukiln.cli.candidates import candidates_app
from cukiln.cli.doctor import doctor_app
from cukiln.cli.elsewhere import elsewhere_app
from cukiln.cli.exit_codes import FAILED, WRONG_USE
from cukiln.cli.follow import follow_app
from cukiln.cli.jobs import jobs_app
from cukiln.cli.profile import profile_app
from cukiln.cli.prove import prove_app
from cukiln.cli.server import server_app
from cukiln.cli.stored_data import keep_app
from cukiln.cli.winners import winners_app
from cukiln.errors import BadRequest, CukilnError, UsageError
from cukiln.printable import printable

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
app = typer.Typer(
    name="cukiln",
    help="Compile, verify and rank CUDA kernels in batches, and look the winners up.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong use, 3 some problems have no winner, 78 a worker cannot start, "
    "130 interrupted.",
)
for commands in (
    follow_app, winners_app, candidates_app, profile_app, jobs_app, elsewhere_app, prove_app, doctor_app, server_app,
    keep_app,
):  # fmt: skip
    app.add_typer(commands)
app.add_typer(cache_app, name="cache")


def main() -> None:
    """Entry point: expected errors become one line, never a traceback. Typer exits with 130 after Ctrl-C."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # None where a shell has closed it
                sys.stdout.flush()  # what cannot be written is said here, not by the interpreter when it ends
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it is dropped
        sys.exit(_complain(CukilnError(f"the output cannot be written: {error.strerror}"), FAILED))
    except (UsageError, BadRequest) as error:
        sys.exit(_complain(error, WRONG_USE))
    except CukilnError as error:
        sys.exit(_complain(error, FAILED))


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"cukiln {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def _complain(error: CukilnError, code: int) -> int:
    typer.echo(printable(f"cukiln: {error}", lines=True), err=True)
    detail = getattr(error, "detail", None)
    for entry in (detail.errors or []) if detail is not None else []:
        line = f"  {entry.get('field', 'request')}: {entry.get('detail', entry)}"
        typer.echo(printable(line, lines=True), err=True)
    return code


__all__ = ["app", "main"]
