"""Whether an address is this machine's alone: without an API key the service listens on no other."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=64)  # asked for each request
def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address, without port) is this machine's loopback."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
