"""
Every error that cukiln raises on purpose:

* CukilnError
  x UsageError                the call or the file is wrong; nothing was sent
  x ServiceError              a conversation with the service went wrong
    + ServiceUnreachable      no answer: nothing listens there, or the connection broke
    + UnexpectedAnswer        an answer that is not cukiln's
    + ProblemError            the service refused (RFC 9457 problem details)
      - BadRequest            400, 413, 415, 422, …: the request is wrong
      - NotAuthorised         401, 403
      - NotFound              404, 410
      - ServiceBusy           429, 503, 507: later; has Retry-After
      - ServiceFailed         any other 5xx
  x WaitTimeout               the job is not finished within the time the caller gave
  x LibraryError              a kernel library cannot be used
    + DigestMismatch          its bytes are not the ones that were promised; it was not loaded
    + NotLocked               the lock file does not pin it
    + NotLoadable             it is not a library that this process can load
    + DeviceError             the driver or the GPU refused
  x ServerMissing             the server packages are not installed here
  x ServerFailed              the service that was to be started here did not come up

All of them survive pickling, so that they can cross a process pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cukiln.types import ProblemDetail

__all__ = [
    "BadRequest",
    "CukilnError",
    "DeviceError",
    "DigestMismatch",
    "LibraryError",
    "NotAuthorised",
    "NotFound",
    "NotLoadable",
    "NotLocked",
    "ProblemError",
    "ServerFailed",
    "ServerMissing",
    "ServiceBusy",
    "ServiceError",
    "ServiceFailed",
    "ServiceUnreachable",
    "UnexpectedAnswer",
    "UsageError",
    "WaitTimeout",
]


class CukilnError(Exception):
    """Base of all errors; `str(error)` is one sentence a person can act on."""


class UsageError(CukilnError, ValueError):
    """The call or the file is wrong; nothing was sent."""


class ServiceError(CukilnError):
    """A conversation with the service went wrong. `method` and `url` say which."""

    def __init__(self, message: str, *, method: str = "", url: str = "") -> None:
        super().__init__(message)
        self.method = method
        self.url = url


class ServiceUnreachable(ServiceError):
    """No answer: nothing listens there, or the connection broke."""


class UnexpectedAnswer(ServiceError):
    """An answer that is not cukiln's: another server, a proxy, or a version that does not fit."""


class ProblemError(ServiceError):
    """The service refused. `detail` holds its problem details, `status` the HTTP status."""

    def __init__(
        self, message: str, *, method: str = "", url: str = "", status: int = 0, detail: ProblemDetail | None = None
    ) -> None:
        super().__init__(message, method=method, url=url)
        self.status = status
        self.detail = detail


class BadRequest(ProblemError):
    """The request is wrong: `detail.field` names the field, `detail.allowed` what may stand there."""


class NotAuthorised(ProblemError):
    """The service requires an API key, or another one."""


class NotFound(ProblemError):
    """The service has no such job, kernel or blob."""


class ServiceBusy(ProblemError):
    """The service is full or starting. `retry_after` is in seconds, None without a Retry-After."""

    def __init__(self, message: str, *, retry_after: float | None = None, **answer: Any) -> None:
        super().__init__(message, **answer)
        self.retry_after = retry_after


class ServiceFailed(ProblemError):
    """The service failed; see its log."""


class WaitTimeout(CukilnError, TimeoutError):
    """The job `job` is not finished within the time the caller gave; the service continues it."""

    def __init__(self, message: str, *, job: str = "") -> None:
        super().__init__(message)
        self.job = job


class LibraryError(CukilnError):
    """A kernel library cannot be used."""


class DigestMismatch(LibraryError):
    """The bytes are not the ones that were promised; they were neither loaded nor kept."""

    def __init__(self, message: str, *, expected: str = "", found: str = "") -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


class NotLocked(LibraryError):
    """The lock file does not pin the problem, the record or the library; nothing was loaded."""


class NotLoadable(LibraryError):
    """Not a library that this process can load, or one without cukiln's entry points."""


class DeviceError(LibraryError):
    """The CUDA driver or the GPU refused: no driver, another architecture, out of memory."""


class ServerMissing(CukilnError):
    """The server packages are not installed here."""


class ServerFailed(CukilnError):
    """The service that was to be started here did not come up; the message says what to change."""
