"""Sockets that keep to the limit of the call that they are read for: httpx2's timeouts begin again with each byte."""

import functools
import logging
import ssl
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpcore2
import httpx2

from cukiln.http.limit import Limit

LOG = logging.getLogger("cukiln")


class _OfThread(threading.local):
    limit: Limit | None = None


_OF_THREAD = _OfThread()


@contextmanager
def bounding(limit: Limit) -> Iterator[None]:
    """Meanwhile each read and write of this thread ends with the limit, as `httpx2.ReadTimeout` or `WriteTimeout`."""
    before, _OF_THREAD.limit = _OF_THREAD.limit, limit
    try:
        yield
    finally:
        _OF_THREAD.limit = before


def bound_network(client: httpx2.Client) -> None:
    """Have the client's connections keep to limits. httpx2 has no way for it but its own attributes; without these,
    which a warning says once, a call's thread ends with the connection."""
    wrapped = False
    for transport in (getattr(client, "_transport", None), *getattr(client, "_mounts", {}).values()):
        pool: Any = getattr(transport, "_pool", None)
        if isinstance(backend := getattr(pool, "_network_backend", None), httpcore2.NetworkBackend):
            pool._network_backend = _Backend(backend)
            wrapped = True
    if not wrapped:
        _warn_once()


@functools.cache
def _warn_once() -> None:
    LOG.warning(
        "httpx2 %s has no connections that a limit can be set for: a service that sends byte by byte holds a thread; "
        "2.16 has them",
        httpx2.__version__,
    )


def _seconds(timeout: float | None, late: type[Exception]) -> float | None:
    """Of one step, whose own is `timeout`. Raises `late` where the limit is over."""
    if (limit := _OF_THREAD.limit) is None:
        return timeout
    if (left := limit.left) == 0.0:
        raise late(f"no whole answer within {limit.seconds:g} s")
    return left if timeout is None else min(timeout, left)


class _Backend(httpcore2.NetworkBackend):
    def __init__(self, backend: httpcore2.NetworkBackend) -> None:
        self._backend = backend

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.NetworkStream:
        seconds = _seconds(timeout, httpcore2.ConnectTimeout)
        return _Stream(self._backend.connect_tcp(host, port, seconds, local_address, socket_options))

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore2.NetworkStream:
        seconds = _seconds(timeout, httpcore2.ConnectTimeout)
        return _Stream(self._backend.connect_unix_socket(path, seconds, socket_options))

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)


class _Stream(httpcore2.NetworkStream):
    def __init__(self, stream: httpcore2.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _seconds(timeout, httpcore2.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _seconds(timeout, httpcore2.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        return _Stream(
            self._stream.start_tls(ssl_context, server_hostname, _seconds(timeout, httpcore2.ConnectTimeout))
        )

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
