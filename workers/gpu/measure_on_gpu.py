"""Have candidates verified and timed by a child that owns the GPU and may die: each gets a verdict, the one that a
child dies of too, and another child takes up the rest. Only a GPU that does not answer the next child either stops the
work."""

import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from storage.config.own_modules import CHILD
from workers.cpu.verify import CHILD_ENVIRONMENT, MAX_MESSAGE_CHARACTERS
from workers.gpu.interface import Device
from workers.gpu.lease import LeaseRefused, make_folder
from workers.gpu.task import VENDOR, CandidateResult, GpuTask
from workers.processes.cause import MACHINE_SIGNALS
from workers.processes.child_protocol import Hearing, new_key
from workers.processes.job_files import write_text
from workers.processes.processes import Finished, InfrastructureError, Limits, Processes

# What a driver, CuPy and the loader need of the worker's environment. Nothing else is inherited: no credentials.
INHERITED = ("LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
INHERITED_PREFIX = "NVIDIA_"
# It would turn tf32 off, or on, in the vendor's libraries alone (cuBLAS, "NVIDIA_TF32_OVERRIDE").
NOT_INHERITED = ("NVIDIA_TF32_OVERRIDE",)
# How often a candidate is looked at whose child was killed, as a machine without memory does; or reached a limit.
KILLS, LATE = 3, 2


class GpuGone(InfrastructureError):
    """The GPU does not answer, not even to a new child: nothing can be measured on it until a person has looked."""


@dataclass(frozen=True)
class Outcome:
    """What a task came to. `results`: of a measure task one per candidate, in the task's order; of a compare task those
    of candidates that were found wrong. `comparisons`: of a compare task, by problem, `cukiln.types.Comparison` as
    JSON; None where no candidate was left. All hold what was done so far where `cancel` was set. Seconds are of all
    children, the wait for the lease included."""

    device: Device | None
    results: list[CandidateResult]
    comparisons: dict[str, dict[str, Any] | None]
    wall_seconds: float
    cpu_seconds: float


def run_gpu_task(
    task: GpuTask,
    processes: Processes,
    limits: Limits,
    *,
    cache: Path,
    cancel: threading.Event | None = None,
    on_result: Callable[[CandidateResult], None] | None = None,
    on_comparison: Callable[[str, dict[str, Any] | None], None] | None = None,
    silence_seconds: float = 60.0,
) -> Outcome:
    """One verdict for every candidate of a measure task; of a compare task, for each problem the comparison of its
    candidates that are still right.

    `limits` hold for each child, from when it has the GPU. `cache`: what the GPU's own kernels compile to. `on_result`
    is called as soon as a result is there, and again where it turns out to be forged; `on_comparison` with a problem
    and its comparison, once nothing can show it to be forged. A child that says nothing for `silence_seconds` hangs.
    Raises GpuGone where the GPU does not answer a new child either, InfrastructureError where the machine failed.
    """
    with processes.private_folder("gpu") as folder:
        heard = (on_result, on_comparison)
        children = _GpuChildren(task, processes, limits, folder, cache, cancel, *heard, silence_seconds)
        began = time.monotonic()
        children.run()
        wall = time.monotonic() - began
    done = [children.results[entry.candidate] for entry in task.candidates if entry.candidate in children.results]
    return Outcome(children.device, done, children.comparisons, wall, children.cpu_seconds)


def child_environment(cache: Path | None = None) -> dict[str, str]:
    """Our own PYTHONPATH's folders too: without a network packages are installed beside Python's own."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    further = [str(Path(folder).resolve()) for folder in folders if folder]
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in INHERITED or (name.startswith(INHERITED_PREFIX) and name not in NOT_INHERITED)
    }
    return {
        **inherited,
        **CHILD_ENVIRONMENT,  # a thread of a BLAS would count as one that a candidate started
        "PYTHONPATH": os.pathsep.join((CHILD_ENVIRONMENT["PYTHONPATH"], *further)),
        **({"CUPY_CACHE_DIR": str(cache)} if cache is not None else {}),
    }


def shared_folders(task: GpuTask, *more: Path) -> list[Path]:
    """What a child writes into beside its own folder, made here: it may make none beside what is kept from it."""
    for folder in more:
        folder.mkdir(parents=True, exist_ok=True)
    lease = Path(task.lease).parent
    with contextlib.suppress(LeaseRefused):  # the child says it again, of its task
        make_folder(lease)
    return [*more, lease]


@dataclass
class Life:
    """What one child has done. `running`: what it touches now, for `problem`. `doing`: what it said last of what takes
    long. `failed`: its own message where Python failed. `garbage`: a line that is not the child's own. `forger`: the
    candidate whose result may be forged as well; `compared`: the problem whose comparison came last, which may be
    forged, too."""

    ready: bool = False
    running: str | None = None
    running_since: float = 0.0
    doing: str = ""
    problem: str = ""
    reported: list[str] = field(default_factory=list)
    compared: str | None = None
    has_compared: bool = False
    gone: str | None = None
    failed: str | None = None
    garbage: str | None = None
    forger: str | None = None
    heard: float = field(default_factory=time.monotonic)
    reported_cpu: float = 0.0


def describe_end(finished: Finished, stderr: str) -> str:
    cause = f": {stderr}" if stderr else ""
    if finished.ended_by is not None:
        return f"it was silent, or reached its limit on {finished.ended_by}, after {finished.wall_seconds:.1f} s{cause}"
    if finished.returncode < 0:
        return f"the process ended with signal {-finished.returncode}{cause}"
    return f"the process ended with exit status {finished.returncode}{cause}"


def ended_early(life: Life, finished: Finished, stderr: str) -> InfrastructureError:
    """Of a child that ran no code under test."""
    doing = f" while {life.doing}" if life.doing else ""
    end = describe_end(finished, stderr)
    return InfrastructureError(f"the child that uses the GPU ended before its task{doing}: {end}")


@dataclass
class _GpuChildren:
    """Runs one child after the other until the task is done."""

    task: GpuTask
    processes: Processes
    limits: Limits
    folder: Path
    cache: Path
    cancel: threading.Event | None
    on_result: Callable[[CandidateResult], None] | None
    on_comparison: Callable[[str, dict[str, Any] | None], None] | None
    silence_seconds: float

    def __post_init__(self) -> None:
        self._environment = child_environment(self.cache)
        self._writes = shared_folders(self.task, self.cache)
        self._waiting = {entry.candidate: entry for entry in self.task.candidates}
        self._vendor_missing: dict[str, str] = {}  # by problem
        self._again: Counter[str] = Counter()  # whose child ended for no reason that is surely theirs
        self._in_doubt = False  # the last child ended badly: the next one must find the GPU in order
        self.device: Device | None = None
        self.results: dict[str, CandidateResult] = {}
        self.comparisons: dict[str, dict[str, Any] | None] = {}
        self.cpu_seconds = 0.0

    def run(self) -> None:
        while self._waiting and not (self.cancel and self.cancel.is_set()):
            life, finished = self._one_child()
            self.cpu_seconds += finished.cpu_seconds
            if self.cancel and self.cancel.is_set():
                if life.garbage is None:
                    self._report_compared(life)
                return
            if life.garbage is None and finished.ended_by == "cancelled":
                return
            self._settle(life, finished)

    def _one_child(self) -> tuple[Life, Finished]:
        life, key = Life(), new_key()
        hear = Hearing(key)
        argv = [sys.executable, "-m", CHILD, self._request()]
        with self.processes.stream(
            argv,
            cwd=self.folder,
            limits=self.limits,
            env=self._environment,
            cancel=self.cancel,
            device=True,
            writes=self._writes,
            stdin=key,
        ) as stream:
            for line in stream.lines(self.silence_seconds):
                life.heard = time.monotonic()
                try:
                    if self._receive(hear(line), life) in ("waiting", "ready"):
                        # Another process's time on the GPU is not this task's.
                        stream.restart_wall()
                except (KeyError, TypeError, ValueError):
                    if life.garbage is None:
                        self._suspect(line, life)
                    stream.kill()
            finished = stream.finished
        assert finished is not None, "lines() ends only when the child has"
        return life, finished

    def _request(self) -> str:
        rest = replace(
            self.task,
            candidates=tuple(self._waiting.values()),
            best_us=self._best(),
            without_vendor=tuple(self._vendor_missing),
        )
        path = self.folder / "task.json"
        write_text(path, json.dumps(rest.to_json()))
        return str(path)

    def _best(self) -> dict[str, float]:
        """The best time so far by problem."""
        best = dict(self.task.best_us)
        for entry in self.task.candidates:
            result = self.results.get(entry.candidate)
            if result is not None and result.measurement is not None:
                median = float(result.measurement["median_us"])
                best[entry.problem] = min(median, best.get(entry.problem, median))
        return best

    def _receive(self, answer: Mapping[str, Any], life: Life) -> str:
        """The kind of an answer. Raises KeyError, TypeError or ValueError where it is none of the child's."""
        ((kind, value),) = answer.items()
        if life.garbage is not None:
            return str(kind)
        if kind == "ready":
            self.device = Device.from_dict(value["device"])
            life.ready = True
            self._in_doubt = False
        elif kind == "start":
            if value not in self._waiting and value != VENDOR:
                raise ValueError(value)
            self._report_compared(life)
            life.running, life.running_since = value, time.monotonic()
            if value != VENDOR:
                life.problem = self._waiting[value].problem
        elif kind == "candidate":
            result = CandidateResult(**value)
            if result.candidate in life.reported:
                life.forger = result.candidate
            # Of a comparison, those that are wrong come together at its end.
            is_in_turn = self.task.kind == "compare" or result.candidate == life.running
            if result.candidate not in self._waiting or not is_in_turn:
                raise ValueError(result.candidate)
            life.running = None
            life.reported.append(result.candidate)
            life.reported_cpu += result.verify_cpu + result.measure_cpu
            self._keep(result)
        elif kind == "comparison":
            self._take_comparison(value["problem"], value["result"], life)
        elif kind == "gone":
            life.gone = str(value)
        elif kind == "failed":
            life.failed = str(value)
        elif kind == "beat":
            life.doing = str(value)
        elif kind != "waiting":
            raise ValueError(kind)
        return str(kind)

    def _take_comparison(self, problem: str, comparison: dict[str, Any] | None, life: Life) -> None:
        own = [entry.candidate for entry in self._waiting.values() if entry.problem == problem]
        if self.task.kind != "compare" or not (own or problem == life.problem) or problem in self.comparisons:
            raise ValueError(problem)
        if comparison is not None and problem in self._vendor_missing:
            comparison = {**comparison, "vendor_missing": self._vendor_missing[problem]}
        life.running, life.compared, life.has_compared = None, problem, True
        self.comparisons[problem] = comparison
        for candidate in own:
            del self._waiting[candidate]

    def _report_compared(self, life: Life) -> None:
        """The last comparison was the child's own: what came after it makes sense."""
        problem, life.compared = life.compared, None
        if problem is not None and self.on_comparison is not None:
            self.on_comparison(problem, self.comparisons[problem])

    def _suspect(self, line: bytes, life: Life) -> None:
        """Code under test has written a line. Where no candidate is running, that of the last result is suspected, and
        it may well be the forged one, since the child's own lines make no sense after it."""
        life.garbage = line[:200].decode("utf-8", "replace")
        if life.forger is None and life.running is None and life.reported and self.task.kind == "measure":
            life.forger = life.reported[-1]

    def _keep(self, result: CandidateResult) -> None:
        self._waiting.pop(result.candidate)
        self._report(result)

    def _report(self, result: CandidateResult) -> None:
        self.results[result.candidate] = result
        if self.on_result is not None:
            self.on_result(result)

    def _settle(self, life: Life, finished: Finished) -> None:
        """What the end of a child says. Raises GpuGone and InfrastructureError."""
        stderr = finished.stderr.decode("utf-8", "replace").strip()[-MAX_MESSAGE_CHARACTERS:]
        if life.failed is not None:
            raise InfrastructureError(f"the child that uses the GPU failed: {life.failed[-MAX_MESSAGE_CHARACTERS:]}")
        if not life.ready:
            self._never_ready(life, finished, stderr)
            return
        if finished.ok and life.running is None:
            if not life.reported and not life.has_compared:
                raise ended_early(life, finished, stderr)
            self._report_compared(life)
            return
        self._in_doubt = True
        if life.compared is not None and life.garbage is not None:
            raise InfrastructureError(f"code under test wrote into the pipe of the comparison: {life.garbage!r}")
        self._report_compared(life)
        if life.forger is not None:
            forged, why = self.results[life.forger], f"wrote into the pipe to its parent: {life.garbage!r}"
            self._report(replace(forged, verdict="runtime_error", message=why, measurement=None, tainted=True))
            return  # a candidate that runs now is tried again
        silent = time.monotonic() - life.heard >= self.silence_seconds
        if self.task.kind == "compare" and finished.ended_by is not None and life.garbage is None and not silent:
            if life.has_compared:
                return
            raise InfrastructureError(f"the comparison reached its limit on {finished.ended_by}")
        # A child that used up its limits over many candidates says nothing about the last one: it is tried again,
        # unless the child fell silent over it.
        if finished.ended_by is not None and life.garbage is None and life.reported and not silent:
            return
        if life.running is None:
            if life.has_compared or life.reported:
                return
            raise ended_early(life, finished, stderr)
        # Killed by the machine? Late for its own time, or for that of what came before it? Look again.
        killed = finished.ended_by is None and -finished.returncode in MACHINE_SIGNALS
        late = finished.ended_by in ("wall", "cpu") and life.garbage is None and not silent
        self._again[life.running] += 1
        if (killed or late) and self._again[life.running] < (KILLS if killed else LATE):
            return
        verdict, message = self._death(life, finished, stderr)
        if killed and life.garbage is None:
            verdict = "skipped"  # and not remembered
        if life.running == VENDOR:
            self._vendor_missing[life.problem] = f"the vendor's library did not survive: {message}"
            return
        wall = time.monotonic() - life.running_since
        cpu = max(0.0, finished.cpu_seconds - life.reported_cpu)
        details = self.limits.as_details(finished.ended_by)
        self._keep(CandidateResult(life.running, verdict, message, details, None, wall, cpu, tainted=True))

    def _never_ready(self, life: Life, finished: Finished, stderr: str) -> None:
        """Not ready is bad luck once, and a GPU that is gone where the child before had ended badly too."""
        silent = time.monotonic() - life.heard >= self.silence_seconds
        if life.gone is None and finished.ended_by is not None and not silent:
            return  # the limits were reached while another process had the GPU
        if self._in_doubt:
            reason = life.gone or describe_end(finished, stderr)
            name = f"{self.device.name} {self.device.uuid}" if self.device else self.task.device
            raise GpuGone(
                f"the GPU {name} does not answer a new process: {reason}; look at nvidia-smi and the kernel log"
            )
        self._in_doubt = True

    def _death(self, life: Life, finished: Finished, stderr: str) -> tuple[str, str]:
        """The verdict of what a child died of, and its message."""
        if life.garbage is not None:
            return "runtime_error", f"wrote into the pipe to its parent: {life.garbage!r}"
        if finished.ended_by in ("wall", "cpu"):
            return "run_timeout", f"still running after {time.monotonic() - life.running_since:.1f} s"
        if finished.ended_by is not None:
            return "runtime_error", f"reached the limit on {finished.ended_by}"
        return "runtime_error", describe_end(finished, stderr)
