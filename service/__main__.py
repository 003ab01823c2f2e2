"""`python -m service`: the API alone, with uvicorn. The settings come from the environment."""

from __future__ import annotations

import sys

import uvicorn

from service.app import create_app
from service.auth import is_loopback
from storage.database import Database
from storage.errors import SettingsError
from storage.settings import Settings, load_settings

CLOSE_SECONDS = 3  # how long open event streams may delay the end


def main() -> int:
    """Serve until a signal; 2 for settings that cannot be used."""
    try:
        settings = load_settings()
        refuse_exposed(settings)
        Database(settings.database_url).migrate()  # harmless beside others that migrate the same database
    except SettingsError as error:
        print(f"cukiln: {error}", file=sys.stderr)  # noqa: T201 - there is no log yet
        return 2
    server = server_of(settings)
    server.run()
    return 0 if server.started else 1


def refuse_exposed(settings: Settings) -> None:
    """Without an API key only this machine may reach the service. Raises SettingsError."""
    if settings.api_key is None and not is_loopback(settings.host):
        raise SettingsError(
            f"CUKILN_HOST is {settings.host}, which other machines can reach, and no API key is set. "
            "Set CUKILN_API_KEY, or serve on 127.0.0.1."
        )


def server_of(settings: Settings) -> uvicorn.Server:
    """The server, not yet started."""
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    return uvicorn.Server(config)


if __name__ == "__main__":
    sys.exit(main())
