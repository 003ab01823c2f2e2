"""What a wake-up does: lease the best waiting task, keep the lease, run its step, say in the database how it ended."""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType

from storage.database.database_errors import DATABASE_AWAY
from storage.database.session import Database, Session
from storage.entities import jobs
from storage.entities.heartbeats import drain_device
from storage.entities.task_kinds import grace_seconds
from storage.errors import LostLease
from storage.queue import tasks
from storage.transitions import end_attempt, take_work
from storage.transitions.pending_builds import pending_counts
from workers import wake_ups
from workers.gpu.measure_on_gpu import GpuGone
from workers.processes.cause import is_of_the_machine
from workers.processes.processes import InfrastructureError
from workers.steps.context import Cancel, Cancelled, GiveUp, HandBack, Step, StepContext, StopReason, Workplace

log = logging.getLogger("cukiln.run_wake_up")


RENEW_SECONDS = 1.0
UNWIND_SECONDS = 10.0  # for a step whose job was cancelled or has spent its budget, until it is killed
AFTER_LOSS_SECONDS = 2.0
_RETRY_SECONDS = 0.1
_REASONS: dict[tasks.Renewal, StopReason] = {
    tasks.Renewal.LOST: "lost",
    tasks.Renewal.CANCELLED: "cancelled",
    tasks.Renewal.DEADLINE: "deadline",
}


def run_wake_up(workplace: Workplace, steps: Mapping[str, Step], kind: str, target: str | None) -> bool:
    """Run the best task of a worker kind in this process, which may be killed for it; whether there was one."""
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
    except Cancelled as error:
        log.info("%s %s stopped: %s", lease.kind, lease.ref, error.reason)
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
        if isinstance(error, GpuGone):  # the GPU is out of order, not the work: the attempt does not count
            log.error("%s %s is given back: %s", lease.kind, lease.ref, error)
            with context.database.write() as session:
                drain_device(session, context.device.uuid, str(error))
            _released(context, logging.WARNING)
            return
        if isinstance(error, InfrastructureError) or is_of_the_machine(error):
            why = str(error) or type(error).__name__
            log.warning("%s %s is lost: %s", lease.kind, lease.ref, why)
            context.workplace.in_doubt = True
            stalled = isinstance(error, InfrastructureError) and error.stalled
            _ended(context, why, lambda session: end_attempt.lose(session, lease, why, stalled=stalled))
            return
        log.exception("%s %s failed in attempt %d", lease.kind, lease.ref, lease.attempt)
        _failed(context, f"{type(error).__name__}: {error}", retry=True)
    else:
        try:
            with context.database.write() as session:
                tasks.complete(session, lease)
        except LostLease:
            log.debug("%s %s has been ended by its step in a transaction of its own", lease.kind, lease.ref)


def _stopped(context: StepContext) -> None:
    """A stopping worker hands its task back at once, and so does one whose jobs have spent their budgets."""
    if context.cancel.reason in ("stopping", "deadline"):
        # Of a spent budget the reconciler may have made an end already.
        _released(context, logging.WARNING if context.cancel.reason == "stopping" else logging.DEBUG)


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


class LeaseKeeper:
    """Ends this process before anyone else may take its task: two things count from *before* the last renewal that
    succeeded. A thread that renews ends it shortly before the lease is over; the kernel's alarm clock kills it a little
    later, also where the interpreter hangs in native code. A machine that sleeps beyond the lease wakes into both; what
    it then still writes is refused by its old token.

    `held_since` is `time.monotonic()` from before the lease. SIGTERM, while inside, sets `cancel` with "stopping".
    """

    def __init__(
        self, database: Database, lease: tasks.Lease, cancel: Cancel, *, lease_seconds: float, held_since: float
    ) -> None:
        self._database = database
        self._lease = lease
        self._cancel = cancel
        self._seconds = lease_seconds
        self._every = min(RENEW_SECONDS, lease_seconds / 5)
        self._margin = min(1.0, lease_seconds / 5)
        self._held_since = held_since
        self._wake = os.eventfd(0)
        self._stopping = self._ended = False
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> "LeaseKeeper":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, self._asked_to_stop)
        self._set_alarm()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(self._wake)

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        # It runs in the middle of what the main thread does, perhaps inside a lock of `cancel`: the thread sets it.
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def _keep(self) -> None:
        renew_at = self._held_since + self._every
        while not self._ended:
            if select.select([self._wake], [], [], max(0.0, renew_at - time.monotonic()))[0]:
                os.eventfd_read(self._wake)
                if self._stopping and not self._ended:
                    self._cancel.because("stopping")
                continue
            before = time.monotonic()
            try:
                with self._database.write() as session:
                    renewal = tasks.renew(session, self._lease, self._seconds, grace_seconds(self._lease.kind))
            except DATABASE_AWAY as error:
                log.warning("lease of %s %s not renewed: %s", self._lease.kind, self._lease.ref, error)
                if time.monotonic() > self._held_since + self._seconds - 2 * self._margin:
                    why = "its lease could not be renewed in time"
                    log.error("%s %s is abandoned: %s", self._lease.kind, self._lease.ref, why)
                    os._exit(1)  # what it started ends with it, and its cleaner after that
                renew_at = time.monotonic() + _RETRY_SECONDS
                continue
            if renewal is not tasks.Renewal.HELD:
                self._lose(_REASONS[renewal])
                return
            self._held_since, renew_at = before, before + self._every
            self._set_alarm()

    def _lose(self, reason: StopReason) -> None:
        """The step has a moment to unwind, then the alarm ends this process. "lost" is also what a lease looks like
        whose task the step has just ended itself; it then has the moment to write its wake-ups."""
        self._cancel.because(reason)
        signal.setitimer(signal.ITIMER_REAL, AFTER_LOSS_SECONDS if reason == "lost" else UNWIND_SECONDS)

    def _set_alarm(self) -> None:
        left = self._held_since + self._seconds - self._margin - time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(0.001, left))
