"""Where the service is, and what keeps every connection to it from being made: wrong addresses, proxies, TLS files."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from cukiln.errors import ServiceUnreachable, UsageError

# Of httpx2 and the standard library, before anything is sent: a proxy of an unknown kind, a package that it needs, an
# address that is none, a name that is no host's (UnicodeError is a ValueError), a file that is not there. A group
# of them is of a host's addresses, which are tried side by side where they are awaited.
_UNUSABLE = (ExceptionGroup, ImportError, OSError, OverflowError, ValueError, httpx2.InvalidURL)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_VARIABLES = (*_PROXIES, *(name.lower() for name in _PROXIES), "SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")
_GIVEN_BY = "--url, CUKILN_URL, or `url` in the configuration file"
_SHOWN = 80  # characters of a path that is too long
_LONGEST_LABEL = 63  # of a host's name (RFC 1035, 2.3.4)


def parse_url(url: str) -> httpx2.URL:
    """Raises `UsageError` for what cannot be a service's."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        # What it says may be a part of a password.
        why = "the likes of / in a password are written as %2F" if "@" in url else str(error)
        raise UsageError(
            f"the service address {_shown(url)} ({_GIVEN_BY}) is not a URL ({why}); expected http://host:port"
        ) from (None if "@" in url else error)
    labels = parsed.raw_host.removesuffix(b".").split(b".")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        wrong = "is not an http or https URL"
    elif not all(0 < len(label) <= _LONGEST_LABEL for label in labels):
        wrong = f"has a host with a part that is empty or longer than {_LONGEST_LABEL} characters"
    elif not 0 <= (parsed.port or 0) <= 65535:
        wrong = f"has the port {parsed.port}, and the last one is 65535"
    else:
        return parsed
    raise UsageError(f"the service address {_shown(url)} ({_GIVEN_BY}) {wrong}; expected http://host:port")


def _shown(url: str) -> str:
    """Without what may be a password."""
    return repr(re.sub(r"^((?:\w+:/+)?/*).*@", r"\1...@", url, flags=re.DOTALL))


def build_request(
    client: httpx2.Client | httpx2.AsyncClient, method: str, path: str, options: Mapping[str, Any]
) -> httpx2.Request:
    """What is sent. Raises `UsageError` for what an address or a header cannot hold."""
    try:
        return client.build_request(method, path, **options)
    except (ValueError, httpx2.InvalidURL) as error:
        shown = path if len(path) <= _SHOWN else f"{path[:_SHOWN]}… ({len(path)} characters)"
        raise UsageError(
            f"nothing was sent: {method} {shown} can be no request ({error}); check the id or name that it has"
        ) from error


@contextmanager
def connecting(url: str, method: str, path: str) -> Iterator[None]:
    """Raises `ServiceUnreachable` where no connection can be made meanwhile, now or later. Values of variables are not
    named: a proxy's may hold a password."""
    try:
        yield
    except _UNUSABLE as error:
        reason: Exception = error
        while isinstance(reason, ExceptionGroup):
            reason = reason.exceptions[0]
        given = [name for name in _VARIABLES if os.environ.get(name)]
        variables = f"the variables {', '.join(given)}" if given else "the proxy of this machine, if it has one"
        raise ServiceUnreachable(
            f"no connection to the cukiln service at {url} can be made ({str(reason) or type(reason).__name__}); "
            f"check {variables}, and --url or CUKILN_URL",
            method=method,
            url=url + path,
        ) from error
