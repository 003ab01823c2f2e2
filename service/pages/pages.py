"""/ and /jobs/{id}: where the time goes, as tables that need no script; charts are drawn over them from the same JSON.
/jobs/{id}/profile: what a run of each winner does.
/docs: the OpenAPI document as one plain page. /static/…: scripts and styles, under the digest of their content. Without
a key that is needed, a page holds a form for it alone, and a script asks for the page again with it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Query, Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from codegen.counts import Openings
from cukiln.counted import counted
from cukiln.printable import printable
from cukiln.types import Filters, JobSummary, Opened, Progress, StageName, TimingRow
from cukiln.vendor_text import vendor_of
from service.auth import CHALLENGE, caller_of
from service.context import Service, ServiceDep
from service.http.answers import PROBLEM_JSON
from service.http.errors import KINDS, TYPE_PREFIX, refuse
from service.keyring import ANYONE
from service.pages import page_filters
from service.routes.jobs import Cursor, LabelsWanted, ReportTurn, is_job_id, labels_of
from storage.database.session import Session
from storage.database.tables import LIVE
from storage.entities.jobs import list_jobs
from storage.entities.stage_times import sums
from storage.reports.job import job_report
from storage.reports.profile import profile_page
from storage.reports.progress import job_progress
from storage.reports.times import timeline, timings

router = APIRouter(include_in_schema=False)
FOLDER = Path(__file__).parent / "static"
MEDIA_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}


@dataclass(frozen=True)
class StaticFile:
    content: bytes
    media_type: str
    digest: str  # the first 16 digits of its SHA-256


@lru_cache
def static_files() -> dict[str, StaticFile]:
    """By path below the folder. Nothing else can be asked for, whatever a path says."""
    files = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:16]
            files[path.relative_to(FOLDER).as_posix()] = StaticFile(content, MEDIA_TYPES[path.suffix], digest)
    return files


def static_url(name: str) -> str:
    """Where a page finds the file as it is now."""
    return f"/static/{name}?v={static_files()[name].digest}"


@router.get("/static/{name:path}", response_class=Response)
def get_static(name: str, v: str | None = None) -> Response:
    """The file. Under another digest than its own, as during an upgrade, it is sent as it is, and not kept."""
    file = static_files().get(name)
    if file is None:
        raise refuse("not-found", "There is nothing at this path; /docs lists what there is.")
    keep = "public, max-age=31536000, immutable" if v == file.digest else "no-cache"
    headers = {"Cache-Control": keep, "X-Content-Type-Options": "nosniff"}
    return Response(file.content, media_type=file.media_type, headers=headers)


JOBS_SHOWN = 25
PROBLEMS_SHOWN = 200
POLL_LIVE_MS, POLL_IDLE_MS = 1000, 10_000
PROFILE_SUMS = (
    ("launches", "launches"), ("multiplications", "multiplications"), ("executed", "executed"),
    ("limb_products", "limb products"), ("truncations", "truncations"), ("bytes_read", "bytes read"),
    ("bytes_written", "bytes written"), ("ring_bytes", "ring bytes"),
)  # fmt: skip
"""Counts of a profile that are added up by operator, with their headings."""
OF_RINGS = ("limb_products", "truncations", "ring_bytes")
"""Of these a page has no column where no winner has any."""
MANY_PROBLEMS = 1000
"""Reports of larger jobs, and sums over ten times as many problems, take so long that not every page asks for them."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Vary": "Authorization",
}


@router.get("/", response_class=HTMLResponse)
def get_overview(
    request: Request, service: ServiceDep, cursor: Cursor = None, label: LabelsWanted = None
) -> HTMLResponse:
    """Jobs, all or those with labels, stage seconds by operator and by day, the compilers' phases."""
    if caller_of(request) is None:
        return _page("key.html", status=401)
    with service.database.read() as session:
        page = list_jobs(session, limit=JOBS_SHOWN, cursor=cursor, labels=labels_of(label))
        live = {job.job: _progress(session, service, job) for job in page.jobs if job.state in LIVE}
        by_operator, by_day = timings(session, "operator"), timings(session, "day")
    problems = sum(row.problems for row in by_operator.timings)
    return _page(
        "overview.html",
        jobs=page.jobs,
        next_cursor=page.next_cursor,
        first_page=cursor is None,
        labels=label or [],
        progress=live,
        by_operator=by_operator.timings,
        by_day=by_day.timings,
        **_phases(by_operator.timings),
        poll_ms=POLL_LIVE_MS if live and problems <= 10 * MANY_PROBLEMS else POLL_IDLE_MS,
    )


@router.get("/jobs/{job}", response_class=HTMLResponse, dependencies=[ReportTurn])
def get_job_page(job: str, request: Request, service: ServiceDep) -> HTMLResponse:
    """One job: its progress, its problems, its work on a time axis."""
    if caller_of(request) is None:
        return _page("key.html", status=401)
    report = lanes = None
    if is_job_id(job):
        with service.database.read() as session:
            report = job_report(session, job, service.settings.toolchain_live_seconds)
            lanes = timeline(session, job)
            spent = timings(session, "job", job)
    if report is None or lanes is None:
        return _page("no_job.html", status=404, job=job[:64])
    poll_ms = POLL_LIVE_MS if len(report.problems) <= MANY_PROBLEMS else POLL_IDLE_MS
    return _page(
        "job.html",
        job=report,
        shown=report.problems[:PROBLEMS_SHOWN],
        timeline=lanes,
        **_phases(spent.timings),
        poll_ms=poll_ms if report.state in LIVE else 0,
        linked=caller_of(request) is ANYONE,  # a link sends no key
    )


@router.get("/jobs/{job}/profile", response_class=HTMLResponse, dependencies=[ReportTurn])
def get_profile_page(
    job: str,
    request: Request,
    service: ServiceDep,
    filters: Filters = "secret",
    opened: Opened = "multiplied",
    cursor: Annotated[str | None, Query(max_length=512)] = None,
) -> HTMLResponse:
    """What a run of each of a job's winners does, by operator, kernel and primitive."""
    if caller_of(request) is None:
        return _page("key.html", status=401)
    page = None
    if is_job_id(job):
        with service.database.read() as session:
            page = profile_page(session, job, Openings(filters, opened), limit=PROBLEMS_SHOWN, cursor=cursor)
    if page is None:
        return _page("no_job.html", status=404, job=job[:64])
    without = {name for name in OF_RINGS if not any(getattr(row.counts, name) for row in page.operators)}
    sums = [(name, label) for name, label in PROFILE_SUMS if name not in without]
    return _page("profile.html", job=job, page=page, sums=sums, without=without, first_page=cursor is None, live=LIVE)


def _progress(session: Session, service: Service, job: JobSummary) -> Progress | None:
    progress = job_progress(session, job.job, service.settings.toolchain_live_seconds)
    return progress.progress if progress else None


def _phases(rows: Sequence[TimingRow]) -> dict[str, Any]:
    """Seconds of each phase of compiling, the longest first, and those that all work waited for a worker."""
    whole = sums(phase for row in rows for phase in row.phases.items())
    waited = whole.pop("queue", 0.0)
    phases = sorted(
        ((name, seconds) for name, seconds in whole.items() if seconds), key=lambda phase: (-phase[1], phase[0])
    )
    return {"phases": phases, "waited": waited}


def _page(template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    text = environment().get_template(template).render(**values)
    return HTMLResponse(text, status_code=status, headers=_headers(status))


def _headers(status: int) -> Mapping[str, str]:
    return {**_HEADERS, **CHALLENGE} if status == 401 else _HEADERS


def _shown(value: Any) -> Any:
    """Of a template's values: a name that turns the text after it around is no name. Markup is a subclass of str."""
    return printable(value, lines=True) if type(value) is str else value


@lru_cache
def environment() -> Environment:
    """The templates, with what they call."""
    folder = Path(__file__).parent / "templates"
    made = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("seconds", "duration", "moment", "count", "share", "microseconds", "prose"):
        made.filters[name] = getattr(page_filters, name)
    made.filters |= {"json": json.dumps, "counted": counted, "vendor": vendor_of}
    made.globals.update(static=static_url, stages=get_args(StageName), parts=("wall", "cpu"), live_states=LIVE)
    return made


_DOCS_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/docs", response_class=HTMLResponse)
def get_docs(request: Request) -> HTMLResponse:
    """Every call with its parameters, body and answers, every problem type, every schema."""
    text = (
        environment()
        .get_template("docs.html")
        .render(document=request.app.openapi(), kinds=KINDS, prefix=TYPE_PREFIX, problem_json=PROBLEM_JSON)
    )
    return HTMLResponse(text, headers=_DOCS_HEADERS)
