"""What must hold before `cukiln serve` starts anything: an address of its own, a data folder of its own, a
queue that answers, the GPUs that were asked for. The first two are checked before the supervisor's large imports."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from storage.config.files import close_tree
from storage.config.settings import RESTORING, Settings
from workers.processes.processes import InfrastructureError, Processes

if TYPE_CHECKING:
    from workers.gpu.interface import Device

log = logging.getLogger("cukiln.start")

REDIS_SECONDS = 5.0


class ServeError(Exception):
    """The service cannot be started; the message says what to change."""


class FolderBusy(ServeError):
    """Another service runs over the data folder, is starting, or is stopping."""


def lock_folder(folder: Path) -> int:
    """Hold the data folder, whose valkey log two would ruin; returns the open file. Raises ServeError, FolderBusy."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_shared(folder)
        lock = os.open(folder / "serve.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 200).decode(errors="replace") or "still starting"
        os.close(lock)
        raise FolderBusy(
            f"another cukiln serve ({holder}) uses the data folder {folder}: stop it, or set CUKILN_DATA to another"
        ) from None
    close_tree(folder)
    return lock


def _refuse_shared(folder: Path) -> None:
    """A data folder is closed to other users: `/` and those such as /tmp are theirs too. Raises ServeError."""
    if folder.stat().st_mode & stat.S_ISVTX or folder.resolve() == Path("/"):
        raise ServeError(f"{folder} is for all users, and a data folder for one: set CUKILN_DATA to a folder in it")


def refuse_half_restored(folder: Path) -> None:
    """Raises ServeError where `cukiln restore` into the data folder was interrupted."""
    try:
        half_restored = (folder / RESTORING).exists()
    except OSError as error:
        raise _unusable(folder, error) from None
    if half_restored:
        raise ServeError(
            f"{folder} holds half of a backup: run `cukiln restore` once more, or remove {folder / RESTORING}"
        )


def refuse_busy_port(host: str, port: int) -> None:
    """Raises ServeError where something else listens there."""
    try:
        _bind(host, port).close()
    except OSError as error:
        raise ServeError(
            f"cannot listen on {host} port {port} ({error.strerror}): set CUKILN_PORT to a free port, or to 0 for any"
        ) from None


def free_port(host: str) -> int:
    """A port that is free now."""
    with _bind(host, 0) as probe:
        port: int = probe.getsockname()[1]
        return port


def refuse_silent_redis(url: str) -> None:
    """Raises ServeError where REDIS_URL names no server that answers. Asked once: workers would try for a minute."""
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        with Redis.from_url(url, socket_connect_timeout=REDIS_SECONDS, socket_timeout=REDIS_SECONDS) as client:
            client.ping()
    except (RedisError, OSError, ValueError) as error:
        parts = urlsplit(url)  # no password, and no query either, which may name one
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ServeError(
            f"REDIS_URL names {shown}, which does not answer ({error}): start that server, correct "
            "REDIS_URL, or unset it for a queue that cukiln runs itself"
        ) from None


def gpus_to_use(settings: Settings, processes: Processes) -> list[Device]:
    """Those that CUKILN_GPUS allows. Raises ServeError where one that is named, or the locks' folder, is missing."""
    if settings.gpus == "none":
        return []
    from workers.gpu.interface import DriverTooOld, GpuMissing, choose_device
    from workers.worker.gpu_worker import find_gpus

    try:
        devices = find_gpus(settings, processes)
        if settings.gpus != "auto":
            devices = [choose_device(devices, name) for name in dict.fromkeys(settings.gpus.split(","))]
    except (GpuMissing, InfrastructureError) as error:
        if settings.gpus == "auto":
            if isinstance(error, DriverTooOld):
                log.warning("no GPU is used: %s", error)
            return []
        raise ServeError(
            f"CUKILN_GPUS={settings.gpus}: {error}. Correct CUKILN_GPUS, or set it to none to run without a GPU"
        ) from None
    folder = settings.gpu_lock_dir
    if devices and folder.exists() and not folder.is_dir():
        raise ServeError(f"CUKILN_GPU_LOCKS names {folder}, which is not a folder: set it to one that can be written")
    return list(dict.fromkeys(devices))


def _unusable(folder: Path, error: OSError) -> ServeError:
    return ServeError(
        f"{folder} cannot be used as the data folder ({error.strerror}): set CUKILN_DATA to a folder that can be "
        "written"
    )


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    probe = socket.socket(family, kind, protocol)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does: TIME_WAIT is not "in use"
        probe.bind(address)
    except BaseException:
        probe.close()
        raise
    return probe
