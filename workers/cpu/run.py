"""Child process: runs the test plan of a library's kernels on the CPU and says what it saw, one line each
(`workers.processes.child_protocol`).

`python -m workers.cpu.run REQUEST` where REQUEST is a JSON file: `{"library": path, "kernels": [kernel], "operators":
{name: folder}, "seed": int, "cpu_seconds": float}`, and `part` (of `codegen.plan.verification_plan.Part`) where not the
whole plan is wanted, and `ptx` (of `codegen.plan.ptx_plan.Ways`) where the library runs the PTX of one kernel. Before a
kernel runs, `{"start": id}`; after it `{"kernel": id, "verdict": …, "message": …, "details": …, "wall_seconds": …,
"cpu_seconds": …}`. It stops early, with exit status 0, after a kernel that may have damaged this process; the parent
starts another child for the rest.
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
from codegen.plan.ptx_plan import Ways, ptx_cases
from codegen.plan.verification_plan import Part, plan_cases
from workers.cpu.cpu_check import KernelTest
from workers.cpu.launch_code import LaunchCode
from workers.cpu.library import CpuLibrary
from workers.cpu.ptx.ptx_check import PtxLibrary, PtxTest
from workers.processes.child_protocol import Saying
from workers.processes.stopwatch import Stopwatch


def plan_test(
    library: CpuLibrary,
    kernel: Kernel,
    seed: int,
    cpu_seconds: float,
    part: Part | None = None,
    ways: Ways | None = None,
) -> KernelTest:
    """The test of a kernel by its operator's plan, or by a part of it. `ways`: of a library that runs its PTX."""
    own = operator(kernel.operator)
    whole = plan_cases(own, kernel, seed) if ways is None else ptx_cases(own, kernel, seed, ways)
    test = KernelTest if ways is None else PtxTest
    cases, repeats = (part or Part()).of(whole), own.deterministic(kernel)
    launch_code = LaunchCode(kernel, own) if ways is None else None
    return test(library, kernel.namespace, own, cases, repeats, cpu_seconds, launch_code)


def run_kernels(
    request: dict[str, Any],
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Verifies the request's kernels one after the other, until one may have damaged this process."""
    unknown = [Path(folder) for name, folder in request["operators"].items() if name not in operators()]
    load_operators(unknown)
    ways = Ways(**request["ptx"]) if "ptx" in request else None
    library = (CpuLibrary if ways is None else PtxLibrary)(Path(request["library"]))
    part = Part(**request.get("part", {}))
    for data in request["kernels"]:
        kernel = Kernel.from_json(data)
        say({"start": kernel.id})
        began_at, stopwatch = time.time(), Stopwatch()
        test = plan_test(library, kernel, request["seed"], request["cpu_seconds"], part, ways)
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
