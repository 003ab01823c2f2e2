"""Seconds that a caller gives, checked where they are given: a wait refuses others only when it begins."""

from math import inf

from cukiln.errors import UsageError

MOST_WAITED = 2_147_483  # the system waits for a socket for 31 bits of milliseconds


def check_seconds(name: str, value: float, *, waited: bool = True) -> None:
    """Raises `UsageError` for what is no time. `waited`: by a thread or a socket."""
    most = MOST_WAITED if waited else inf
    if not isinstance(value, int | float) or not 0 <= value <= most:
        allowed = f"from 0 to {most}" if waited else "from 0 on"
        raise UsageError(f"{name} is {value!r}; expected seconds {allowed}")
