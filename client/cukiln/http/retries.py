"""What is sent again, and how long later."""

import random

import httpx2

_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0  # seconds

# The request never left this machine, so it is safe to send again.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


def may_repeat(error: httpx2.TransportError, repeatable: bool) -> bool:
    """Whether sending again after `error` is safe, and can help."""
    if isinstance(error, httpx2.UnsupportedProtocol | httpx2.LocalProtocolError | httpx2.ProxyError):
        return False
    return repeatable or isinstance(error, _NOT_SENT)


def delay(attempt: int) -> float:
    """Seconds before the attempt after `attempt`: doubling; jittered, so that many clients do not come back at once."""
    longest = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)
