"""A worker whose steps write a journal: run by the queue tests in place of `python -m workers.worker.main`.

What a step does stands in its task's ref, before the colon. Each attempt holds a lock file of its task: where another
attempt holds it, the task runs twice at once, and the journal says so.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import sys
import time
from pathlib import Path

from storage.config.logs import set_up_logging
from storage.config.settings import load_settings
from workers.gpu.measure_on_gpu import GpuGone
from workers.processes.processes import Limits
from workers.steps.context import GiveUp, StepContext
from workers.worker.main import prepare, run_gpu_worker, run_reconciler, run_worker
from workers.worker.queue_worker import MAX_GROWTH_BYTES

__all__ = ["main", "prepare"]  # what the fork server calls


def journal() -> Path:
    return Path(os.environ["TEST_JOURNAL"])


def write(word: str, context: StepContext) -> None:
    with journal().open("a") as lines:
        lines.write(f"{word} {context.lease.ref} {_attempt(context)} {os.getpid()} {time.time()}\n")


def _attempt(context: StepContext) -> int:
    """Those that were lost are counted, too."""
    return context.lease.attempt + math.ceil(context.lease.losses)


def step(context: StepContext) -> None:
    behaviour = context.lease.ref.partition(":")[0].partition("_")[0]
    with journal().with_name(context.lease.ref.replace(":", "_") + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            write("TWICE", context)
        write("start", context)
        if behaviour == "first" and _attempt(context) > 1:  # only the first attempt is long
            write("end", context)
            return
        act(behaviour, context)
        write("end", context)


def act(behaviour: str, context: StepContext) -> None:
    if behaviour in ("forever", "first"):
        # a compiler that runs and runs: its tree must die with the worker child
        limits = Limits(wall_seconds=300, cpu_seconds=300, memory_bytes=1 << 30, output_bytes=1 << 20)
        context.processes.run(["sleep", "300"], cwd=journal().parent, limits=limits, cancel=context.cancel)
        context.check()
    elif behaviour == "grow":
        grown = bytearray(MAX_GROWTH_BYTES)
        grown[:: mmap.PAGESIZE] = b"\1" * len(grown[:: mmap.PAGESIZE])  # touched
    elif behaviour == "brief":
        time.sleep(2.0)
    elif behaviour == "watchful":  # it ends as soon as it should
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            context.check()
            time.sleep(0.02)
    elif behaviour == "deaf":  # native code that keeps the interpreter for itself
        sum_of_a_huge_power = pow(3, 2**26)
        write(f"deaf-{sum_of_a_huge_power % 10}", context)
    elif behaviour == "gone":
        if not (flag := journal().with_name("gpu-is-back")).exists():
            raise GpuGone(f"the GPU does not answer before {flag.name} is there")
    elif behaviour == "broken":
        raise RuntimeError("the step is broken")
    elif behaviour == "hopeless":
        raise GiveUp("it cannot be done")


STEPS = dict.fromkeys(("plan", "compile", "verify", "measure", "compare", "finish"), step)


def main() -> int:
    set_up_logging()
    kind, *options = sys.argv[1:]
    if kind == "reconcile":
        run_reconciler(load_settings())
    elif kind == "gpu":
        return run_gpu_worker(load_settings(), STEPS, device=options[1] if options else "0")
    else:
        run_worker(kind, load_settings(), STEPS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
