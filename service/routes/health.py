"""/healthz: the process answers. /readyz: everything that a job needs is there, or what is missing."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fastapi import APIRouter
from redis import Redis
from redis.exceptions import RedisError, ResponseError
from starlette.responses import Response

from cukiln.types import Health
from service.context import Service, ServiceDep
from service.http.answers import json_response
from service.http.errors import Fault, Refused
from service.openapi import problems
from storage.database.database_errors import DATABASE_ERRORS
from storage.entities.heartbeats import describe_pauses, pauses
from storage.errors import StorageError
from workers import wake_ups

PROBE_KEY = "cukiln:probe"
LEAST_FREE_BYTES = 16 << 20
"""Of the data folder's disk: below, SQLite and the blobs are about to fail."""

router = APIRouter(tags=["health"])


@router.get("/healthz", operation_id="get_health", response_model=Health)
async def get_health() -> Response:
    """Answers as long as the process does, also while all its threads are busy."""
    return json_response(Health(status="ok", checks={}))


@router.get("/readyz", operation_id="get_readiness", response_model=Health, responses=problems("not-ready"))
def get_ready(service: ServiceDep) -> Response:
    """200 when all that a job needs is there; 503 with what is missing and what to do."""
    outcomes = {name: _outcome(check, service) for name, check in CHECKS.items()}
    if outcomes["redis"] is None and service.redis is not None:  # else they would repeat its message
        try:
            outcomes |= {name: check(service.redis) for name, check in SEEN_IN_REDIS.items()}
        except RedisError as error:
            outcomes["redis"] = f"Redis does not answer: {type(error).__name__}."
    missing = [Fault("not-ready", what, field=name) for name, what in outcomes.items() if what is not None]
    if missing:
        raise Refused(missing, {"Retry-After": "5"})
    return json_response(Health(status="ok", checks=dict.fromkeys(outcomes, "ok")))


def _outcome(check: Callable[[Service], str | None], service: Service) -> str | None:
    try:
        return check(service)
    except DATABASE_ERRORS as error:
        return f"The database does not answer: {type(error).__name__}."


def _database(service: Service) -> str | None:
    try:
        service.database.check()
    except StorageError as error:
        return f"The database cannot be used: {error}."
    return None


def _blobs(service: Service) -> str | None:
    url = urlsplit(service.settings.blobs_url)
    if url.scheme != "file":
        return None  # asking a bucket would cost money at every probe; a failing one shows in its own calls
    folder = Path(unquote(url.path))
    if not folder.is_dir():
        return f"The blob folder {folder} does not exist."
    return None if os.access(folder, os.W_OK | os.X_OK) else f"The blob folder {folder} cannot be written."


def _disk(service: Service) -> str | None:
    folder = service.settings.data_dir
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"The data folder {folder} cannot be looked at: {error.strerror}."
    if free >= LEAST_FREE_BYTES:
        return None
    return f"The disk of the data folder {folder} has {free:,} bytes left: make room."


def _pauses(service: Service) -> str | None:
    with service.database.read() as session:
        paused = describe_pauses(pauses(session))
    return None if paused is None else f"Work waits, and continues by itself once this is fixed: {paused}."


def _redis(service: Service) -> str | None:
    if service.redis is None:
        return "No REDIS_URL is set: workers get no wake-ups."
    slow = "Jobs continue, but start seconds later: workers poll the database"
    try:
        service.redis.set(PROBE_KEY, "", px=1000)  # a write: one whose memory is full answers a ping
    except ResponseError as error:
        todo = "Make room in it, or raise its maxmemory; all that it holds may be lost."
        return f"Redis takes no writes, so it stores no heartbeats: {error}. {slow}. {todo}"
    except RedisError as error:
        return f"Redis does not answer: {type(error).__name__}. {slow}."
    return None


def _workers(service: Service) -> str | None:
    seconds = service.settings.toolchain_live_seconds
    if service.alive().toolchains:
        return None
    return f"No compile worker has sent a heartbeat within {seconds:g} seconds: {_start('compile')}"


def _planner(redis: Redis) -> str | None:
    queue = wake_ups.queue_name(wake_ups.PLAN, None)
    if wake_ups.live_workers(redis, queue):
        return None
    return f"No plan worker sends a heartbeat, so no job is started: {_start('plan')}"


def _reconciler(redis: Redis) -> str | None:
    if wake_ups.has_live_reconciler(redis):
        return None
    return f"No reconciler sends a heartbeat, so tasks of dead workers are not requeued: {_start('reconcile')}"


def _start(kind: str) -> str:
    return f"start one with `cukiln worker {kind}` (`cukiln serve` starts all that is needed)."


CHECKS: dict[str, Callable[[Service], str | None]] = {
    "database": _database,
    "blobs": _blobs,
    "disk": _disk,
    "pauses": _pauses,
    "redis": _redis,
    "workers": _workers,
}
SEEN_IN_REDIS: dict[str, Callable[[Redis], str | None]] = {"planner": _planner, "reconciler": _reconciler}
