"""How many files the API may have open: connections count, and the usual soft limit is 1,024.

It starts no programs. Workers keep the usual limit, for which the programs that they start are written."""

from __future__ import annotations

import resource

ENOUGH = 65_536


def raise_descriptor_limit() -> int:
    """Up to the hard limit, where that is sensible; returns how many there may be now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft > 0 else ENOUGH
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
