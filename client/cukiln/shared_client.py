"""Clients that cukiln makes itself, for a call that was given none: connections and breaker are the process's."""

import functools
from pathlib import Path

from cukiln.client import Client
from cukiln.http.transport import Transport
from cukiln.settings import ClientSettings

MOST_TRANSPORTS = 64


def shared_client(url: str | None = None, *, cache_dir: Path | str | None = None) -> Client:
    """As `Client(url, cache_dir=…)`; a service that was found dead by one of them is dead for all. It is not closed."""
    settings = ClientSettings.from_environment()
    return Client(
        transport=shared_transport(url or settings.url, settings.api_key, settings.offline), cache_dir=cache_dir
    )


@functools.lru_cache(maxsize=MOST_TRANSPORTS)  # one that is dropped is closed with the last client that has it
def shared_transport(url: str, api_key: str | None, offline: bool) -> Transport:
    return Transport(url, api_key, offline=offline)
