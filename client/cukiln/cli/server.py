"""`serve`, `worker`, and the service that `tune` starts for itself. The wheel holds the client alone: modules
of the server, which runs from a checkout or an image, are imported by name when they are needed."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from cukiln.cli.console import given_path, make_console
from cukiln.client import Client
from cukiln.errors import CukilnError, ServerFailed, ServerMissing, ServiceFailed, UsageError
from cukiln.http.transport import CALL_SECONDS, Call, Transport
from cukiln.settings import ClientSettings
from cukiln.variables import warn_of_misspelt

# Another command may be starting or stopping its service over the same data folder: a cold start takes the longest.
BUSY_FOLDER_SECONDS = 60.0
_LOOK_SECONDS = 0.2

SERVER_PACKAGES = ("codegen", "storage", "workers", "service")


@dataclass(frozen=True)
class Service:
    """`embedded`: it runs for this command only. `borrowed`: it was found over the data folder, may end any time."""

    url: str
    embedded: bool
    api_key: str | None = None
    borrowed: bool = False


@dataclass(frozen=True)
class Store:
    """The `Settings`, the `Database` and the `BlobStore` of a service."""

    settings: Any
    database: Any
    blobs: Any


def server_module(name: str) -> Any:
    """Import a module of the server; raises `ServerMissing` where it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing.partition(".")[0] in SERVER_PACKAGES:
            raise ServerMissing(
                "the cukiln server is not installed here: this is the client alone. Give the address of a running "
                "service with --url or CUKILN_URL, or run this in a checkout of cukiln after `make run`"
            ) from error
        raise ServerMissing(
            f"the cukiln server is here, but the package {missing!r} that it needs is not; `make run` in the checkout "
            "installs it"
        ) from error


PRIVATE = "private"  # in place of an address: the service of the data folder, for this command where none runs


@contextmanager
def find_service(url: str | None, console: Any) -> Iterator[Service]:
    """The service at `url`, else that of `CUKILN_URL`, of the configuration file, or of the default port: the same from
    every folder. `private`: the one that runs over the data folder, else one that is started here and stopped, with
    all that it started, at the end of the block."""
    environment = ClientSettings.from_environment()
    url = url or environment.url
    if url != PRIVATE:
        yield Service(url, embedded=False)
        return
    settings = load_settings({})
    with ExitStack() as stack:
        service = _borrow_or_start(settings.data_dir, environment.api_key, console, stack)
        try:
            yield service
        except ServiceFailed as error:
            if not service.embedded:
                raise
            raise ServerFailed(f"{error}: {settings.data_dir / 'logs' / 'api.log'}") from error


@contextmanager
def find_client(url: str | None) -> Iterator[Client]:
    """Of `find_service`, which reports on standard error what it starts. A person waits for an answer: no budget is
    shorter than a call's."""
    with find_service(url, make_console(stderr=True)) as service, open_client(service) as client:
        yield client


@contextmanager
def own_client(folder: Path) -> Iterator[Client]:
    """Of a service over a data folder of its own, which uses no GPU and ends with the block."""
    serve, checks = server_module("workers.supervisor.serve"), server_module("workers.supervisor.start_checks")
    own = {"data_dir": folder, "port": 0, "host": "127.0.0.1", "gpus": "none"}
    elsewhere = {"database_url": None, "redis_url": None, "blobs_url": None, "api_key": None, "default_target": None}
    try:
        with serve.embedded(load_settings({**own, **elsewhere})) as started, Client(started.url) as client:
            yield client
    except checks.ServeError as error:
        raise ServerFailed(f"the service for this command did not start: {error}") from error


def open_client(service: Service) -> Client:
    return Client(service.url, service.api_key, connect_seconds=CALL_SECONDS, lookup_budget=CALL_SECONDS)


def _borrow_or_start(data_dir: Path, api_key: str | None, console: Any, stack: ExitStack) -> Service:
    """The service that runs over the data folder, else one of our own, which ends with `stack`."""
    serve, checks = server_module("workers.supervisor.serve"), server_module("workers.supervisor.start_checks")
    deadline = time.monotonic() + BUSY_FOLDER_SECONDS
    printed = ""
    while True:
        running = running_service(data_dir)
        if running is not None:
            return Service(running, embedded=False, borrowed=True)
        if not printed:
            printed = f"Starting a service for this command; its data stay in {data_dir}"
            console.print(printed, soft_wrap=True)
        try:
            started = stack.enter_context(serve.embedded(load_settings({"port": 0})))
            return Service(started.url, embedded=True, api_key=api_key)
        except checks.FolderBusy as error:
            if time.monotonic() > deadline:
                raise ServerFailed(f"the service for this command did not start: {error}") from error
            if "waiting" not in printed:
                printed = "Another service is starting or stopping over these data; waiting for it"
                console.print(printed, soft_wrap=True)
            time.sleep(_LOOK_SECONDS)
        except checks.ServeError as error:
            raise ServerFailed(f"the service for this command did not start: {error}") from error


def running_service(data_dir: Path) -> str | None:
    """The URL of the `cukiln serve` over this data folder, from the file that `serve` locks, if one answers there."""
    try:
        match = re.search(r"https?://\S+", (data_dir / "serve.lock").read_text())
    except (OSError, ValueError):
        return None
    return match[0] if match and _answers(match[0]) else None


def quickstart_file() -> Path:
    """`examples/quickstart.json` of the current folder, else of this file's checkout."""
    for folder in (Path.cwd(), Path(__file__).resolve().parents[3]):
        path = folder / "examples" / "quickstart.json"
        if path.is_file():
            return path
    raise UsageError("examples/quickstart.json is not here; run this in a checkout of cukiln")


server_app = typer.Typer()


@server_app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: CUKILN_HOST, else loopback.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. Default: CUKILN_PORT, else 8765.")] = None,
    workers: Annotated[int | None, typer.Option(help="Compile workers. Default: one per core.")] = None,
    data: Annotated[
        Path | None, typer.Option(parser=given_path, help="Data folder. Default: CUKILN_DATA, else .cukiln.")
    ] = None,
) -> None:
    """Run the service with its queue, database and workers, until Ctrl-C."""
    options = {"host": host, "port": port, "workers": workers, "data_dir": data}
    settings = load_settings({name: value for name, value in options.items() if value is not None})
    raise typer.Exit(server_module("workers.supervisor.serve").serve(settings))


@server_app.command()
def worker(
    kind: Annotated[str, typer.Argument(help="plan, compile, gpu or reconcile.")],
    target: Annotated[list[str] | None, typer.Option(help="compile: for this target only; may be repeated.")] = None,
    device: Annotated[
        str | None, typer.Option(help="gpu: its UUID, or its number in the driver's order. Default: 0.")
    ] = None,
) -> None:
    """Run one worker beside a service.

    plan: problems become candidates. compile: groups, verification and winners. gpu: measuring on one GPU; exit code 69
    when it stopped answering. reconcile: tasks of dead workers and missing wake-ups.
    """
    options = [*(f"--target={name}" for name in target or ()), *([] if device is None else [f"--device={device}"])]
    raise typer.Exit(server_module("workers.worker.main").main([kind, *options]))


@contextmanager
def open_store() -> Iterator[Store]:
    """The database and the blobs that the settings name. Raises as `open_database`."""
    settings = load_settings({})
    with open_database(settings) as database:
        yield Store(
            settings, database, server_module("storage.blobs.blob_store").BlobStore(database, settings.blobs_url)
        )


@contextmanager
def open_database(settings: Any, *, make: bool = False) -> Iterator[Any]:
    """The database that the settings name; `make`: where there is none, or one of an older release. Raises
    `UsageError` where there is none, `ServerFailed` for what the storage refuses."""
    errors = server_module("storage.errors")
    database = server_module("storage.database.session").Database(settings.database_url)
    try:
        if not make and database.is_sqlite and not Path(str(database.url.database)).is_file():
            raise UsageError(
                f"there is no database {database.url.database}: set CUKILN_DATA to a service's data folder"
            )
        database.migrate() if make else database.check()
        yield database
    except errors.StorageError as error:
        raise ServerFailed(str(error)) from error
    except BrokenPipeError:  # the command's own output is not read on
        raise
    except (OSError, *server_module("storage.database.database_errors").DATABASE_ERRORS) as error:
        where = database.url.set(query={}).render_as_string()  # without a password
        why = str(getattr(error, "orig", error)).partition("\n")[0]
        raise ServerFailed(
            f"the data of {where} cannot be used ({why}): run this as a user that can read and write them, or set "
            "CUKILN_DATA or DATABASE_URL to others"
        ) from error
    finally:
        database.dispose()


def load_settings(overrides: dict[str, Any]) -> Any:
    """The server's settings. Raises `UsageError` for a value that cannot be used, `ServerMissing`."""
    settings = server_module("storage.config.settings")
    warn_of_misspelt(os.environ)
    try:
        return settings.load_settings(**overrides)
    except server_module("storage.errors").SettingsError as error:
        raise UsageError(str(error)) from error


def _answers(url: str) -> bool:
    try:
        Transport(url, None, 2.0, attempts=1).send(Call("GET", "/healthz"))
    except CukilnError:
        return False
    return True
