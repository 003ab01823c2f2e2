"""What operations are made of: calls with their paths, events to follow, pauses, lists in pages."""

import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

from cukiln.errors import UsageError
from cukiln.events import Event
from cukiln.http.transport import Call
from cukiln.operations.answers import parse, unexpected
from cukiln.types import CandidatePage, ImportPage, JobPage, OnMiss, Priority, ProfilePage

LARGEST_PAGE = 1_000  # candidates, or imports, in one answer

_Page = TypeVar("_Page", CandidatePage, ImportPage, JobPage, ProfilePage)
_Item = TypeVar("_Item")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Follow:
    """Read the events of a job to its end, or to a deadline (`time.monotonic()`), and report each."""

    path: str
    deadline: float | None
    report: Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """A problem with the options of its lookup, ready to be looked up many times: `Client.prepare`."""

    digest: str  # of what is sent, and where
    name: str | None
    problem: Mapping[str, Any]
    shared: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OnMissTerms:
    """What the service is to do about misses, and by which search."""

    on_miss: OnMiss = "none"
    search: Mapping[str, Any] | None = None
    priority: Priority | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Of the request."""
        if self.on_miss == "none":
            return {}
        given = {"on_miss": self.on_miss, "search": self.search, "priority": self.priority}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the service for the winners of problems, within a lookup's budget."""

    prepared: Sequence[Prepared]
    missed: OnMissTerms


Step = Call | Follow | Pause | Ask
# A generator of steps: a call is sent its response, any step's error is raised where it was yielded.
Operation = Generator[Step, Any, _T]


@dataclass(frozen=True)
class Listing(Generic[_Page, _Item]):
    """Something that the service answers in pages, which are read once."""

    path: str
    page: type[_Page]
    items: Callable[[_Page], Sequence[_Item]]
    options: Mapping[str, Any]
    _read: set[str] = field(default_factory=set, init=False, repr=False, compare=False)  # cursors

    def read(self, cursor: str | None) -> Operation[_Page]:
        """The page at `cursor`, None: the first."""
        parameters = {"limit": LARGEST_PAGE, **self.options, "cursor": cursor}
        query = urlencode({name: value for name, value in parameters.items() if value is not None}, doseq=True)
        response = yield Call("GET", f"{self.path}?{query}")
        page = parse(response, self.page)
        if cursor is not None:
            self._read.add(cursor)
        if page.next_cursor in self._read:
            raise unexpected(response, "a page is followed by itself, or by one before it")
        return page


def once() -> dict[str, str]:
    """Headers of a request that makes a job: sent again, it makes no second one."""
    return {"Idempotency-Key": uuid.uuid4().hex}


def job_path(job_id: str) -> str:
    return f"/v1/jobs/{part(job_id, 'the job')}"


def part(value: str, what: str) -> str:
    """An id as one part of a path. Raises `UsageError` for what can be none: without it, another address is asked."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise UsageError(f"{what} is {value!r}; expected an id: printable text that is not empty")
    quoted = quote(value, safe="")
    return (
        quoted.replace(".", "%2E") if value in (".", "..") else quoted
    )  # as it stands, it would be a step in the path
