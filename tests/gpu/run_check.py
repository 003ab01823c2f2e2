"""Runs a check and says what it came to, whatever it raised: the checks behind it are run all the same."""

from __future__ import annotations

from collections.abc import Callable

Errors = tuple[type[Exception], ...]


class NotRight(Exception):
    """A check failed; the message says how."""


class NotChecked(Exception):
    """This machine lacks what is checked; the message says what."""


def failure_of(name: str, check: Callable[[], str], *, sentences: Errors = (), raises: Errors = ()) -> Exception | None:
    """What the check raised, said in a line; None where nothing is wrong, or nothing could be checked. `sentences`:
    errors that say all in their message, beside NotRight; `raises`: those that end all checks."""
    try:
        words = check()
    except raises:
        raise
    except NotChecked as error:
        words = f"not checked: {error}"
    except Exception as error:  # noqa: BLE001 - a library of another's machine raises what it likes
        print(f"{name}: WRONG: {described(error, sentences)}", flush=True)
        return error
    print(f"{name}: {words}", flush=True)
    return None


def described(error: Exception, sentences: Errors = ()) -> str:
    """Its message; of an error that was not foreseen with its type."""
    if isinstance(error, (NotRight, *sentences)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
