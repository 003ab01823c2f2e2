"""`python -m service`: the API alone, with uvicorn. The settings come from the environment.

`--bodies FD`: its own second process, for large bodies (`service.http.large_bodies`)."""

import gc
import os
import resource
import socket
import sys

import uvicorn
from fastapi import FastAPI

from codegen.operators import operators
from codegen.plan.generator import generator
from service.app import create_app
from service.http.connections import ConnectionLimits, Connections
from service.http.large_bodies import CONNECTIONS, ApiServer, BodyProcess, serve_bodies
from service.http.request_ids import NameRequests
from storage.blobs.blob_store import BlobStore
from storage.config.files import UMASK, raise_descriptor_limit
from storage.config.logs import set_up_logging
from storage.config.operator_path import load_operator_path
from storage.config.settings import Settings, load_settings
from storage.database.session import Database
from storage.errors import StorageError

CLOSE_SECONDS = 3  # how long open event streams may delay the end
OTHER_FILES = 256
"""Descriptors beside connections: the database's, event streams' connections to Redis, blobs that are sent."""
SWITCH_SECONDS = 0.0005
"""After which a thread gives way to another. With Python's own 5 ms one that parses a large body holds up the event
loop for as long at each call of the system, and a busy loop holds up each read of the database."""


def main() -> int:
    """Serve until a signal; 2 for settings or a database that cannot be used."""
    os.umask(UMASK)
    try:
        settings = load_settings()
        set_up_logging(settings.log_level, NameRequests())
        raise_descriptor_limit()
        load_operator_path(settings)
        database = Database(settings.database_url)
        database.migrate()  # safe beside other processes that migrate it
        BlobStore(database, settings.blobs_url).require()
        database.dispose()
    except StorageError as error:
        print(f"cukiln: {error}", file=sys.stderr)  # noqa: T201 - there is no log yet
        return 2
    app = ready_app(settings)
    gc.collect()
    gc.freeze()  # modules, routes and models are permanent: collecting them repeatedly delayed requests
    few = configuration(app, settings, ConnectionLimits(CONNECTIONS))
    if sys.argv[1:2] == ["--bodies"]:
        return serve_bodies(few, socket.socket(fileno=int(sys.argv[2])))
    bodies = BodyProcess(lambda channel: serve_bodies(few, channel))
    server = ApiServer(configuration(app, settings, bodies=bodies), bodies)
    server.run()
    return 0 if server.started else 1


def ready_app(settings: Settings) -> FastAPI:
    """The application, with all that a first request would make of routes, models and operators: 0.4 s of CPU."""
    app = create_app(settings)
    app.openapi()
    for name in operators():
        generator(name)
    return app


def connection_limits(settings: Settings) -> ConnectionLimits:
    """Of the settings, bounded by the process's descriptors."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = settings.max_connections if files == resource.RLIM_INFINITY else max(8, files - OTHER_FILES)
    return ConnectionLimits(min(settings.max_connections, possible))


def configuration(
    app: FastAPI, settings: Settings, limits: ConnectionLimits | None = None, *, bodies: BodyProcess | None = None
) -> uvicorn.Config:
    """Of a server. `bodies`: the process that large bodies go to."""
    sys.setswitchinterval(SWITCH_SECONDS)
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",  # named, so that one that is missing is an error and not a service of half the speed
        log_config=None,  # configured by us
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        http=Connections(limits or connection_limits(settings), bodies).protocol,  # type: ignore[arg-type]  # it is called, no more
    )


if __name__ == "__main__":
    sys.exit(main())
