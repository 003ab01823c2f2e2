"""Child process: owns a GPU for one task, and may die of it. Says what it saw, one JSON line each.

`python -m workers.gpu.run_on_gpu TASK` where TASK is a JSON file with a `workers.gpu.task.GpuTask`; what it says stands
there too. The key that its lines are marked with is read from stdin. `python -m workers.gpu.run_on_gpu --list MODULE`
says `{"devices": [Device]}` or `{"gone": message}`. What kernels and libraries print goes to stderr. It stops early,
with exit status 0, after a candidate that may have damaged this process; the parent starts another child for the rest.
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from codegen.operators import load_operators, operators
from cukiln.counted import counted
from workers.gpu.compare import ComparisonTask, Harmed
from workers.gpu.interface import DriverTooOld, Gpu, GpuError, GpuFault, LoadFailed, list_devices, open_gpu, warm_up
from workers.gpu.lease import take_lease
from workers.gpu.leftovers import thread_names
from workers.gpu.measure import MeasureTask, Say, candidates_of, libraries_of
from workers.gpu.task import VENDOR, CandidateResult, GpuTask
from workers.processes.child_protocol import Saying

_HEALTH_ELEMENTS = 1 << 16
FAULTED = 3  # exit status: the context was lost while no code ran but the vendor's or this project's own
LEASE_CLOSED = 4  # exit status: what holds the GPU's lease was closed, and not by us


def run_task(task: GpuTask, say: Say) -> None:
    """From the wait for the lease to the last line."""
    load_operators([Path(folder) for name, folder in task.operators.items() if name not in operators()])
    purpose = f"cukiln {task.kind}: {counted(len(task.candidates), 'candidate')}"
    lease = take_lease(Path(task.lease), purpose, lambda holder: say({"waiting": holder}))
    try:
        gpu = open_gpu(task.gpu, task.device)
        warm_up(gpu, lambda what: say({"beat": what}))
        _check_health(gpu)
        # Not to stderr: the last lines there become the message of a candidate that the process dies of.
        say({"ready": {"device": gpu.device.as_dict(), "state": gpu.state(), "threads": thread_names()}})
    except GpuError as error:
        say({"gone": str(error)})
        return

    def say_while_leased(message: dict[str, Any]) -> None:
        # Code under test that closes our files gives the GPU away: what was measured since is worth nothing.
        if not lease.held():
            with contextlib.suppress(OSError):  # stderr may be closed as well
                os.write(2, b"the GPU's lease was closed\n")
            os._exit(LEASE_CLOSED)
        say(message)

    if task.kind == "measure":
        MeasureTask(gpu, task, say_while_leased).run()
    else:
        _compare(gpu, task, say_while_leased)


def _check_health(gpu: Gpu) -> None:
    """A round trip through its memory, a sum, and a kernel of ours. Raises GpuError."""
    sent = np.arange(_HEALTH_ELEMENTS, dtype=np.uint32) * np.uint32(2654435761)
    array = gpu.arrays.asarray(sent)
    gpu.poison_shared()
    gpu.synchronize()
    total = int(gpu.to_host((array & 0xFFFF).astype(np.int64).sum()))
    if not np.array_equal(gpu.to_host(array), sent) or total != int((sent & 0xFFFF).astype(np.int64).sum()):
        raise GpuError(f"{gpu.device.name} {gpu.device.uuid} gives back something else than it was sent")


def _compare(gpu: Gpu, task: GpuTask, say: Say) -> None:
    """Problem by problem, until one may have damaged this process."""
    libraries = libraries_of(gpu, task, candidates_of(task))
    for key in task.problems:
        own = task.of_problem(key)
        if own.candidates and not _compared(ComparisonTask(gpu, own, libraries, say), key, say):
            return


def _compared(comparing: ComparisonTask, key: str, say: Say) -> bool:
    """Compare a problem's candidates; whether this process may continue with the next problem."""
    gpu = comparing.gpu
    wrong: Sequence[CandidateResult]
    last: list[dict[str, Any]] = []
    try:
        try:
            last = [{"comparison": {"problem": key, "result": comparing.run()}}]
        except (GpuError, Harmed):
            raise
        except Exception:
            gpu.synchronize()  # where the context is lost, that is the reason, wherever it showed first
            raise
        wrong = comparing.wrong
    except GpuFault as error:
        if comparing.touched == VENDOR:
            raise
        # The parent continues without this candidate, in a new child.
        wrong = [CandidateResult(comparing.touched, "runtime_error", str(error), tainted=True)]
    except Harmed as error:
        wrong = error.wrong
    for message in [*({"candidate": asdict(result)} for result in wrong), *last]:
        say(message)
    return bool(last)


def prepare() -> None:
    """Where this module is forked: import the operators once, which takes as long as all other imports."""
    operators()


def main() -> NoReturn:
    arguments, say = sys.argv[1:], Saying()
    status = 0
    try:
        if arguments[0] == "--list":
            try:
                say({"devices": [device.as_dict() for device in list_devices(arguments[1])]})
            except GpuError as error:
                say({"gone": str(error), "too_old": isinstance(error, DriverTooOld)})
        else:
            run_task(GpuTask.from_json(json.loads(Path(arguments[0]).read_text(encoding="utf-8"))), say)
    except GpuFault as error:
        sys.stderr.write(f"{error}\n")
        status = FAULTED
    except LoadFailed as error:
        say({"failed": str(error)})
        status = 1
    except Exception:  # noqa: BLE001 - the last frame: the parent gets the message, whatever it was
        say({"failed": traceback.format_exc()})
        status = 1
    # Threads that a library left behind, or a context that is lost, must not be met on the way out.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
