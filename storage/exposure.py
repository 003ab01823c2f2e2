"""Who can reach an address: without an API key the service is for this machine alone."""

from __future__ import annotations

import ipaddress

from storage.errors import SettingsError
from storage.settings import Settings


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address, without port) is this machine's loopback."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def refuse_exposed(settings: Settings) -> None:
    """Raises SettingsError where other machines could reach a service without a key."""
    if settings.api_key is None and not is_loopback(settings.host):
        raise SettingsError(
            f"CUKILN_HOST is {settings.host}, which other machines can reach, and no API key is set. "
            "Set CUKILN_API_KEY, or serve on 127.0.0.1."
        )
