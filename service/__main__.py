"""`python -m service`: the API alone, with uvicorn. The settings come from the environment."""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI

from codegen.generator import generator
from codegen.operators import operators
from service.app import create_app
from storage.database import Database
from storage.errors import StorageError
from storage.logs import set_up_logging
from storage.operator_path import load_operator_path
from storage.settings import Settings, load_settings

CLOSE_SECONDS = 3  # how long open event streams may delay the end


def main() -> int:
    """Serve until a signal; 2 for settings or a database that cannot be used."""
    try:
        settings = load_settings()
        set_up_logging(settings.log_level)
        load_operator_path(settings)
        Database(settings.database_url).migrate()  # harmless beside others that migrate the same database
    except StorageError as error:
        print(f"cukiln: {error}", file=sys.stderr)  # noqa: T201 - there is no log yet
        return 2
    server = server_of(settings)
    server.run()
    return 0 if server.started else 1


def ready_app(settings: Settings) -> FastAPI:
    """The application, with all that its first request would else make: routes and models (FastAPI makes them when they
    are first asked for), operators, their generators' versions. 0.4 s of CPU that no job pays for."""
    app = create_app(settings)
    app.openapi()
    for name in operators():
        generator(name)
    return app


def server_of(settings: Settings) -> uvicorn.Server:
    """The server, not yet started."""
    config = uvicorn.Config(
        ready_app(settings),
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
