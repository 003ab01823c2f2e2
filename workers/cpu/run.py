"""Child process: runs the test plan of a library's kernels on the CPU and says what it saw, one line each
(`workers.processes.child_protocol`).

`python -m workers.cpu.run REQUEST` where REQUEST is a JSON file: `{"library": path, "kernels": [kernel], "operators":
{name: folder}, "seed": int, "cpu_seconds": float}`, and `part` (of `codegen.plan.verification_plan.Part`) where not the
whole plan is wanted. Before a kernel runs, `{"start": id}`; after it `{"kernel": id, "verdict": …, "message": …,
"details": …, "wall_seconds": …, "cpu_seconds": …}`. It stops early, with exit status 0, after a kernel that may have
damaged this process; the parent starts another child for the rest.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from codegen.kernel import Kernel
from codegen.operators import load_operators, operator, operators
from codegen.plan.verification_plan import Part, plan_cases
from workers.cpu.cpu_check import KernelTest
from workers.cpu.library import CpuLibrary
from workers.processes.child_protocol import Saying
from workers.processes.stopwatch import Stopwatch


def plan_test(
    library: CpuLibrary, kernel: Kernel, seed: int, cpu_seconds: float, part: Part | None = None
) -> KernelTest:
    """The test of a kernel by its operator's plan, or by a part of it."""
    own = operator(kernel.operator)
    cases = (part or Part()).of(plan_cases(own, kernel, seed))
    return KernelTest(library, kernel.namespace, own, cases, repeats=own.deterministic(kernel), cpu_seconds=cpu_seconds)


def run_kernels(
    request: dict[str, Any],
    say: Callable[[dict[str, Any]], None],
    load: Callable[[Path], CpuLibrary] = CpuLibrary,
    make: Callable[..., KernelTest] = plan_test,
) -> None:
    """Verifies the request's kernels one after the other, until one may have damaged this process. `load` and `make`:
    of other libraries another test, called as `plan_test` is."""
    unknown = [Path(folder) for name, folder in request["operators"].items() if name not in operators()]
    load_operators(unknown)
    library = load(Path(request["library"]))
    part = Part(**request.get("part", {}))
    for data in request["kernels"]:
        kernel = Kernel.from_json(data)
        say({"start": kernel.id})
        began_at, stopwatch = time.time(), Stopwatch()
        test = make(library, kernel, request["seed"], request["cpu_seconds"], part)
        failure = test.failure()
        spent = stopwatch.read()
        say(
            {
                "kernel": kernel.id,
                "verdict": failure.verdict if failure else "ok",
                "message": failure.message if failure else "",
                "details": {
                    "seed": request["seed"],
                    "began_at": began_at,
                    "cases": test.described,
                    "shared_memory": test.shared_memory(),
                },
                "wall_seconds": spent.wall,
                "cpu_seconds": spent.cpu,
            }
        )
        if failure and failure.tainted:
            return


def prepare() -> None:
    """Where this module is forked: import the operators once, and no fork collects them again."""
    operators()
    gc.freeze()


def main() -> None:
    run_kernels(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Saying())


if __name__ == "__main__":
    main()
