"""Every error that the service can answer: one stable `type` each, as application/problem+json (RFC 9457).

```
Refused(Exception)            a handler's way to answer with a problem
Fault                         one thing that is wrong: which kind, where, why, what is allowed
```
A fault names the field by its JSON path (`problems[0].m`), a query parameter by its name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cukiln.types import ProblemDetail

TYPE_PREFIX = "urn:cukiln:problem:"
MAX_FAULTS = 20  # a request of 10,000 wrong problems must not become a larger answer


@dataclass(frozen=True)
class Kind:
    """What a problem type means, whatever the request: its HTTP status and its title."""

    status: int
    title: str


KINDS: Mapping[str, Kind] = {
    "bad-request": Kind(400, "The request cannot be read"),
    "malformed-json": Kind(400, "The body is not JSON"),
    "not-utf-8": Kind(400, "The body is not UTF-8"),
    "duplicate-key": Kind(400, "An object of the body has a key twice"),
    "nested-too-deep": Kind(400, "The body is nested too deep"),
    "invalid-cursor": Kind(400, "The cursor is not one that this service gave"),
    "invalid-event-id": Kind(400, "Last-Event-ID is not an event id of this service"),
    "invalid-digest": Kind(400, "The digest is not 64 lower-case hexadecimal digits"),
    "unauthorized": Kind(401, "The API key is missing or wrong"),
    "forbidden": Kind(403, "The API key's scopes do not allow this call"),
    "not-found": Kind(404, "There is nothing at this path"),
    "job-not-found": Kind(404, "There is no such job"),
    "import-not-found": Kind(404, "There is no such import"),
    "group-not-found": Kind(404, "There is no such group"),
    "group-file-not-found": Kind(404, "The group has no such file"),
    "build-not-found": Kind(404, "There is no such build"),
    "candidate-not-found": Kind(404, "There is no such candidate"),
    "kernel-not-found": Kind(404, "There is no winner record under this key"),
    "blob-not-found": Kind(404, "There is no blob with this digest"),
    "method-not-allowed": Kind(405, "The path does not have this method"),
    "body-too-slow": Kind(408, "The body came too slowly"),
    "import-withdrawn": Kind(409, "The import was withdrawn while it was written"),
    "idempotency-key-reused": Kind(422, "Another request was sent under this Idempotency-Key"),
    "job-finished": Kind(409, "The job has already ended"),
    "job-unfinished": Kind(409, "The job has not ended yet"),
    "nothing-to-retry": Kind(409, "Nothing of the job is left to be tried again"),
    "build-in-use": Kind(409, "A job that has not ended needs the build"),
    "ambiguous-prefix": Kind(409, "Several ids begin with these digits"),
    "body-too-large": Kind(413, "The body is too large"),
    "too-many-values": Kind(413, "The body holds too many values"),
    "unsupported-media-type": Kind(415, "The body must be application/json"),
    "range-not-satisfiable": Kind(416, "The range lies outside the blob"),
    "head-too-large": Kind(431, "The request's line and headers are too large"),
    "wrong-host": Kind(421, "The Host header does not name this machine's loopback"),
    "invalid-value": Kind(422, "A value is not allowed"),
    "missing-field": Kind(422, "A required field is missing"),
    "unknown-field": Kind(422, "A field is unknown"),
    "unknown-operator": Kind(422, "The operator is unknown"),
    "unknown-target": Kind(422, "The architecture is unknown"),
    "unknown-tunable": Kind(422, "The operator has no such tunable"),
    "empty-search-space": Kind(422, "The search space is empty"),
    "search-space-too-large": Kind(422, "The search space is too large"),
    "extent-too-large": Kind(422, "The extents overflow an index"),
    "duplicate-name": Kind(422, "Two problems of the job have one name"),
    "too-many-device-classes": Kind(422, "Imports name too many device classes"),
    "too-many-jobs": Kind(429, "Too many jobs are waiting"),
    "too-many-wrong-keys": Kind(429, "Too many wrong API keys came from this address"),
    "internal": Kind(500, "The service failed"),
    "blob-corrupt": Kind(500, "The stored blob is damaged"),
    "busy": Kind(503, "The service does as much as it can at once"),
    "not-ready": Kind(503, "A part of the service is missing"),
    "database-unavailable": Kind(503, "The database does not answer"),
    "blobs-unavailable": Kind(503, "The blob store cannot be used now"),
    "storage-full": Kind(507, "The disk is full"),
}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a request. `kind` is a key of KINDS."""

    kind: str
    detail: str
    field: str | None = None
    allowed: Any = None

    def as_error(self) -> dict[str, Any]:
        parts = {"type": TYPE_PREFIX + self.kind, "detail": self.detail, "field": self.field, "allowed": self.allowed}
        return {name: value for name, value in parts.items() if value is not None}


@dataclass
class Refused(Exception):
    """Ends a request with a problem. The first fault names type and status; all are listed, up to MAX_FAULTS."""

    faults: Sequence[Fault]
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.faults[0].detail)

    @property
    def status(self) -> int:
        return KINDS[self.faults[0].kind].status


def refuse(
    kind: str,
    detail: str,
    *,
    field: str | None = None,
    allowed: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Refused:
    """A problem with one fault, to be raised."""
    return Refused((Fault(kind, detail, field, allowed),), headers or {})


def problem_detail(refused: Refused, instance: str | None = None, request_id: str | None = None) -> ProblemDetail:
    """The body of the answer; a list of errors only where there is more than one."""
    first, count = refused.faults[0], len(refused.faults)
    kind = KINDS[first.kind]
    detail = first.detail
    if count > 1:
        detail += f" ({count} errors in all)" if count <= MAX_FAULTS else f" (the first {MAX_FAULTS} errors are listed)"
    return ProblemDetail(
        type=TYPE_PREFIX + first.kind,
        title=kind.title,
        status=kind.status,
        detail=detail,
        instance=instance,
        request_id=request_id,
        field=first.field,
        allowed=first.allowed,
        errors=[fault.as_error() for fault in refused.faults[:MAX_FAULTS]] if count > 1 else None,
    )


def json_path(parts: Sequence[str | int]) -> str | None:
    """("problems", 0, "m") → "problems[0].m"; nothing for the body as a whole."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:200] or None
