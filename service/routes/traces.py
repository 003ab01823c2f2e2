"""GET /v1/jobs/{id}/trace: a job's time, in the format that Perfetto and chrome://tracing open: the "JSON object
format" of Chrome's Trace Event Format (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).

One process per worker, its tasks as slices with a compile's phases inside; a process of the job's own, with the job
from its arrival to its end, the waits for a worker (asynchronous: any number at once) and the numbers of waiting and
running tasks (a counter). Whole microseconds since the trace's beginning, so that nested slices stay inside.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from cukiln.types import TimelineStep
from service.context import ServiceDep
from service.openapi import problems
from service.routes.jobs import JOB_PROBLEMS, KnownJob, ReportTurn, found
from storage.entities.stage_times import sums
from storage.entities.task_kinds import COMPARE, COMPILE, MEASURE, PLAN, VERIFY
from storage.reports.times import JobTrace, TracedTask, job_trace

Event = dict[str, Any]

JOB_PID = 1
JOB_TID, QUEUE_TID = 1, 2
SHOWN_DIGITS = 8  # of a group's id
_RANK = {"M": 0, "X": 1, "b": 2, "e": 3, "C": 4}  # at one time: a wait of no length begins before it ends

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get(
    "/{job}/trace",
    operation_id="get_job_trace",
    responses={
        **problems(*JOB_PROBLEMS, "database-unavailable"),
        200: {
            "content": {"application/json": {"schema": {"type": "object"}}},
            "description": "Chrome's Trace Event Format, as a JSON object",
        },
    },
    response_class=Response,
    dependencies=[ReportTurn],
)
def get_trace(job: KnownJob, service: ServiceDep) -> Response:
    """The job's work so far, by worker and time: a process per worker, its tasks as slices with a compile's phases
    inside, and the waits. Open it in ui.perfetto.dev or chrome://tracing."""
    with service.database.read() as session:
        trace = found(job, job_trace(session, job))
    body = json.dumps(chrome_trace(trace), separators=(",", ":"), allow_nan=False).encode()
    return Response(body, media_type="application/json")


@dataclass(frozen=True)
class _Slice:
    """An attempt that a worker has begun, in microseconds."""

    task: TracedTask
    attempt: TimelineStep
    begin: int
    end: int


def chrome_trace(trace: JobTrace) -> dict[str, Any]:
    """The whole document. What has not ended ends now, and has `open` among its arguments."""
    times = _Times(trace)
    events = [_job(trace, times), *_waits(trace, times), *_counters(trace, times)]
    workers = _by_worker(trace, times)
    for pid, (worker, slices) in enumerate(sorted(workers.items()), JOB_PID + 1):
        events += _worker(trace, times, pid, worker, slices)
    events += _named(JOB_PID, f"job {trace.job.id}", {JOB_TID: "job", QUEUE_TID: "queue"})
    # Stable: of one worker, at one time, outer slices come before inner ones, and ends before beginnings.
    events.sort(key=lambda event: (event["ph"] != "M", event["ts"], _RANK[event["ph"]]))
    other = {"job": trace.job.id, "state": trace.job.state, "origin": times.origin}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


class _Times:
    """Seconds since the epoch become microseconds since the first thing that happened."""

    def __init__(self, trace: JobTrace) -> None:
        attempts = [attempt for task in trace.tasks for attempt in task.attempts]
        begun = [attempt.started_at for attempt in attempts if attempt.started_at is not None]
        self.origin: float = min([trace.job.created_at, *begun, *(attempt.queued_at for attempt in attempts)])
        self._now = trace.now

    def at(self, seconds: float) -> int:
        return round((seconds - self.origin) * 1e6)

    def end(self, seconds: float | None, begin: int) -> int:
        """Of what began at `begin`; never before it, also with the clocks of two machines."""
        return max(begin, self.at(self._now if seconds is None else seconds))

    def wait(self, attempt: TimelineStep) -> tuple[int, int]:
        begin = self.at(attempt.queued_at)
        return begin, self.end(attempt.finished_at if attempt.started_at is None else attempt.started_at, begin)


def _job(trace: JobTrace, times: _Times) -> Event:
    job = trace.job
    begin = times.at(job.created_at)
    args = {"state": job.state, "seconds": trace.seconds.model_dump(mode="json"), **_open(job.finished_at is None)}
    end = times.end(job.finished_at, begin)
    return _slice("job", f"job {job.id}", JOB_PID, JOB_TID, (begin, end), args)


def _waits(trace: JobTrace, times: _Times) -> Iterator[Event]:
    numbers = count(1)
    for task in trace.tasks:
        for attempt in task.attempts:
            begin, end = times.wait(attempt)
            shared = {
                "name": f"wait: {_name(task)}",
                "cat": "queue",
                "id": f"0x{next(numbers):x}",
                "pid": JOB_PID,
                "tid": QUEUE_TID,
            }
            still = _open(attempt.started_at is None and attempt.finished_at is None)
            yield {"ph": "b", "ts": begin, **shared, "args": {**_whose(task, attempt), **still}}
            yield {"ph": "e", "ts": end, **shared, "args": {}}


def _counters(trace: JobTrace, times: _Times) -> Iterator[Event]:
    """The numbers of waiting and running tasks, at each change."""
    changes: dict[int, list[int]] = {}

    def span(place: int, begin: int, end: int) -> None:
        changes.setdefault(begin, [0, 0])[place] += 1
        changes.setdefault(end, [0, 0])[place] -= 1

    for task in trace.tasks:
        for attempt in task.attempts:
            span(0, *times.wait(attempt))
            if attempt.started_at is not None:
                begin = times.at(attempt.started_at)
                span(1, begin, times.end(attempt.finished_at, begin))
    waiting = working = 0
    for at, (more_waiting, more_working) in sorted(changes.items()):
        waiting, working = waiting + more_waiting, working + more_working
        args = {"waiting": waiting, "working": working}
        yield {"ph": "C", "name": "tasks", "pid": JOB_PID, "tid": JOB_TID, "ts": at, "args": args}


def _by_worker(trace: JobTrace, times: _Times) -> dict[str, list[_Slice]]:
    """The attempts of each worker, by time. Of tasks older than the records of attempts the worker is unknown."""
    workers: dict[str, list[_Slice]] = {}
    for task in trace.tasks:
        for attempt in task.attempts:
            if attempt.started_at is not None:
                begin = times.at(attempt.started_at)
                piece = _Slice(task, attempt, begin, times.end(attempt.finished_at, begin))
                workers.setdefault(attempt.worker or "unknown", []).append(piece)
    return {worker: sorted(slices, key=lambda piece: (piece.begin, piece.end)) for worker, slices in workers.items()}


def _worker(trace: JobTrace, times: _Times, pid: int, worker: str, slices: list[_Slice]) -> Iterator[Event]:
    """Attempts that overlap (a lost lease, with times of two machines' clocks) get lanes of their own."""
    lanes: list[int] = []
    named: dict[int, str] = {}
    for piece in slices:
        lane = next((lane for lane, end in enumerate(lanes) if end <= piece.begin), len(lanes))
        lanes[lane : lane + 1] = [piece.end]
        tid = lane + 1
        named[tid] = "tasks" if lane == 0 else f"tasks {tid}"
        yield _slice(piece.task.kind, _name(piece.task), pid, tid, (piece.begin, piece.end), _arguments(piece))
        for name, span, args in _phases(times, piece):
            yield _slice("phase", name, pid, tid, span, args)
    kinds = {piece.task.kind for piece in slices}
    kind = "gpu" if kinds & {MEASURE, COMPARE} else "plan" if kinds <= {PLAN} else "compile"
    yield from _named(pid, f"{kind} worker {worker}", named)


def _phases(times: _Times, piece: _Slice) -> Iterator[tuple[str, tuple[int, int], dict[str, Any]]]:
    """Name, span and arguments of the phases of a completed attempt, within it, one after the other."""
    if piece.attempt is not piece.task.attempts[-1] or piece.attempt.state != "done":
        return
    assert piece.attempt.started_at is not None, "a slice has begun"
    last = piece.begin
    for phase in piece.task.phases:
        if phase["name"] == "queue" or phase.get("start") is None:
            continue
        begin = min(max(last, times.at(piece.attempt.started_at + phase["start"])), piece.end)
        last = min(max(begin, times.at(piece.attempt.started_at + phase["start"] + phase["seconds"])), piece.end)
        kernels = {"kernels": phase["kernels"]} if phase.get("kernels") is not None else {}
        yield phase["name"], (begin, last), {"seconds": phase["seconds"], **kernels}


def _arguments(piece: _Slice) -> dict[str, Any]:
    task, attempt = piece.task, piece.attempt
    args = {
        **_whose(task, attempt),
        "how": attempt.state,
        "predicted_seconds": task.predicted_seconds,
        **_open(attempt.finished_at is None),
    }
    if task.group is not None:
        args["kernels"] = task.group.kernels
        if task.kind == COMPILE:
            args["seconds"] = {"codegen": task.group.codegen_seconds, "compile": task.group.compile_seconds}
        elif task.kind == VERIFY:
            args["seconds"] = {"verify": task.group.verify_seconds}
    if task.phases and attempt is task.attempts[-1]:
        args["phases"] = sums((phase["name"], phase["seconds"]) for phase in task.phases)
    return args


def _whose(task: TracedTask, attempt: TimelineStep) -> dict[str, Any]:
    args: dict[str, Any] = {"task": task.id, "kind": task.kind, "ref": task.ref, "target": task.target}
    args["attempt"] = attempt.attempt
    if task.problem is not None:
        args |= {"problem": task.problem.name, "operator": task.problem.operator}
    if task.jobs:
        args["jobs"] = task.jobs
    return args


def _name(task: TracedTask) -> str:
    if task.problem is not None:
        return f"{task.kind} {task.problem.name}"
    if task.kind == PLAN:
        return f"plan {task.ref.rpartition(':')[2]}"
    return f"{task.kind} {task.ref[:SHOWN_DIGITS]}"


def _open(is_open: bool) -> dict[str, bool]:
    return {"open": True} if is_open else {}


def _slice(category: str, name: str, pid: int, tid: int, span: tuple[int, int], args: Mapping[str, Any]) -> Event:
    begin, end = span
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": begin,
        "dur": end - begin,
        "args": dict(args),
    }


def _named(pid: int, process: str, threads: Mapping[int, str]) -> Iterator[Event]:
    """Metadata: what viewers show instead of numbers."""
    head = {"ph": "M", "ts": 0, "pid": pid}
    yield {**head, "tid": 0, "name": "process_name", "args": {"name": process}}
    yield {**head, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, thread in threads.items():
        yield {**head, "tid": tid, "name": "thread_name", "args": {"name": thread}}
