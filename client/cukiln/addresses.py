"""Where the service is, and what keeps every connection to it from being made: wrong addresses, proxies, TLS files."""

import os

import httpx2

from cukiln.errors import ServiceUnreachable, UsageError

# Of httpx2 and the standard library, before anything is sent: a proxy of an unknown kind, a package that it needs, an
# address that is none, a name that is no host's (UnicodeError is a ValueError), a file that is not there.
UNUSABLE = (ImportError, OSError, OverflowError, ValueError, httpx2.InvalidURL)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_VARIABLES = (*_PROXIES, *(name.lower() for name in _PROXIES), "SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")
_LONGEST_LABEL = 63  # of a host's name (RFC 1035, 2.3.4)


def parse_url(url: str) -> httpx2.URL:
    """Raises `UsageError` for what cannot be a service's."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise UsageError(
            f"the service address {url!r} (--url, CUKILN_URL) is not a URL ({error}); expected http://host:port"
        ) from error
    labels = parsed.raw_host.removesuffix(b".").split(b".")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        wrong = "is not an http or https URL"
    elif not all(0 < len(label) <= _LONGEST_LABEL for label in labels):
        wrong = f"has a host with a part that is empty or longer than {_LONGEST_LABEL} characters"
    elif not 0 <= (parsed.port or 0) <= 65535:
        wrong = f"has the port {parsed.port}, and the last one is 65535"
    else:
        return parsed
    raise UsageError(f"the service address {url!r} (--url, CUKILN_URL) {wrong}; expected http://host:port")


def no_connection(url: str, method: str, path: str, error: Exception) -> ServiceUnreachable:
    """`error`: of `UNUSABLE`. Values of variables are not named: a proxy's may hold a password."""
    given = [name for name in _VARIABLES if os.environ.get(name)]
    variables = f"the variables {', '.join(given)}" if given else "the proxy of this machine, if it has one"
    return ServiceUnreachable(
        f"no connection to the cukiln service at {url} can be made ({str(error) or type(error).__name__}); "
        f"check {variables}, and --url or CUKILN_URL",
        method=method,
        url=url + path,
    )
