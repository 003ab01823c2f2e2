"""What a wake-up does: lease the best waiting task, run its step, say in the database how it ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from storage.database.session import Session
from storage.entities import jobs
from storage.entities.heartbeats import drain_device
from storage.errors import LostLease
from storage.queue import tasks
from storage.transitions import end_attempt, take_work
from storage.transitions.pending_builds import pending_counts
from workers import wake_ups
from workers.gpu.measure_on_gpu import GpuGone
from workers.processes.cause import is_of_the_machine
from workers.processes.processes import InfrastructureError
from workers.steps.context import Cancel, Cancelled, GiveUp, HandBack, Step, StepContext, Workplace
from workers.worker.keep_lease import LeaseKeeper

log = logging.getLogger("cukiln.run_wake_up")


def run_wake_up(workplace: Workplace, steps: Mapping[str, Step], kind: str, target: str | None) -> bool:
    """Run one task of a worker kind in this process, which may be killed for it. Returns whether there was one.

    The wake-up's own target says only that something is waiting: a worker of several targets takes the best of all."""
    if (reason := workplace.why_paused()) is not None:
        log.warning("no work is taken: %s", reason)
        return False
    files = workplace.file_limits(str(target)) if kind == wake_ups.COMPILE else None
    seconds = workplace.settings.lease_seconds
    held_since = time.monotonic()
    with workplace.database.write() as session:
        lease = take_work.take(session, wake_ups.TASKS_OF[kind], workplace.targets, workplace.name, seconds, files)
    if lease is None:
        log.debug("a wake-up of %s %s found nothing to do", kind, target)
        return False
    if files is not None:  # what this worker left is for the next one that is free
        with workplace.database.read() as session:
            pending = pending_counts(session, 1, [str(lease.target)])
        for place in pending:
            wake_ups.ensure_wake_ups(workplace.redis, kind, place, 1)
    cancel = Cancel()
    with LeaseKeeper(workplace.database, lease, cancel, lease_seconds=seconds, held_since=held_since):
        run_step(StepContext(workplace, lease, cancel), steps)
    spent = time.monotonic() - held_since
    log.info("%s %s: attempt %d took %.3f s", lease.kind, lease.ref, lease.attempt, spent)
    return True


def run_step(context: StepContext, steps: Mapping[str, Step]) -> None:
    """Run the step of a leased task and end the attempt. Raises what the database raises: the lease then runs out."""
    lease, cancel = context.lease, context.cancel
    try:
        steps[lease.kind](context)
    except Cancelled as told:
        log.info("%s %s stopped: %s", lease.kind, lease.ref, told.reason)
        _stopped(context)
    except LostLease as lost:
        log.warning("%s", lost)
    except HandBack:
        _released(context, logging.WARNING)
    except GiveUp as error:
        _failed(context, str(error), retry=False)
    except Exception as error:
        if cancel.is_set():  # a tool that was killed under the step may show as any error
            log.info("%s %s stopped: %s (%s: %s)", lease.kind, lease.ref, cancel.reason, type(error).__name__, error)
            _stopped(context)
            return
        if isinstance(error, GpuGone):
            _drained(context, str(error))
            return
        if isinstance(error, InfrastructureError) or is_of_the_machine(error):
            why = str(error) or type(error).__name__
            log.warning("%s %s is lost: %s", lease.kind, lease.ref, why)
            context.workplace.in_doubt = True
            _ended(context, why, lambda session: end_attempt.lose(session, lease, why))
            return
        log.exception("%s %s failed in attempt %d", lease.kind, lease.ref, lease.attempt)
        _failed(context, f"{type(error).__name__}: {error}", retry=True)
    else:
        _completed(context)


def _completed(context: StepContext) -> None:
    """End the task, where the step has not done so in a transaction of its own."""
    try:
        with context.database.write() as session:
            tasks.complete(session, context.lease)
    except LostLease:
        log.debug("%s %s has been ended by its step", context.lease.kind, context.lease.ref)


def _stopped(context: StepContext) -> None:
    """A stopping worker hands its task back at once. So does one whose jobs have spent their budgets: another may come
    to need it before the reconciler ends it. Any other reason: the database has ended the task already."""
    if context.cancel.reason in ("stopping", "deadline"):
        # Of a spent budget the reconciler may have made an end already.
        _released(context, logging.WARNING if context.cancel.reason == "stopping" else logging.DEBUG)


def _drained(context: StepContext, reason: str) -> None:
    """The GPU is out of order, not the work: the attempt does not count, and the GPU gets no more."""
    log.error("%s %s is given back: %s", context.lease.kind, context.lease.ref, reason)
    with context.database.write() as session:
        drain_device(session, context.device.uuid, reason)
    _released(context, logging.WARNING)


def _released(context: StepContext, level: int) -> None:
    try:
        with context.database.write() as session:
            end_attempt.release(session, context.lease)
    except LostLease as lost:
        log.log(level, "%s", lost)
        return
    context.wake([(context.lease.kind, context.lease.target)])


def _failed(context: StepContext, error: str, *, retry: bool) -> None:
    most = context.settings.max_attempts
    _ended(
        context,
        error,
        lambda session: end_attempt.fail(session, context.lease, error, retry=retry, max_attempts=most),
    )


def _ended(context: StepContext, error: str, end: Callable[[Session], str]) -> None:
    """End the attempt by `end`, which returns how the task continues; wake or notify what that concerns."""
    lease = context.lease
    try:
        with context.database.write() as session:
            state = end(session)
            ended = [job for id in lease.jobs if (job := jobs.job_state(session, id)) and job.finished_at is not None]
    except LostLease as lost:
        log.warning("%s", lost)
        return
    if state == "waiting":
        context.wake([(lease.kind, lease.target)])
    elif state == "failed":
        context.publish("failed", {"kind": lease.kind, "ref": lease.ref, "error": error})
    for job in ended:
        context.publish("state", {"state": job.state}, job_id=job.id)
