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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.kernel import Kernel
from codegen.operators import load_operators, operator, operators
from codegen.plan.promised import digest_of, digest_of_inputs
from codegen.plan.ptx_plan import PromisedCase, PtxRun, Ways, ptx_cases
from codegen.plan.verification_plan import Case, Part, Run, plan_cases
from workers.cpu.cpu_check import KernelTest
from workers.cpu.launch_code import LaunchCode
from workers.cpu.library import CpuLibrary, Outcome, Tensor
from workers.processes.child_protocol import Saying
from workers.processes.stopwatch import Stopwatch


class PtxLibrary(CpuLibrary):
    """A library that runs PTX."""

    def round_as(self, run: PtxRun) -> None:
        """How the runs to come round."""
        self._library.cukiln_ptx_rounding(run.approximation, int(run.fuse))


@dataclass
class PtxTest(KernelTest):
    """All runs are `PtxRun`s, the library is one of PTX."""

    def _note_inputs(self, case: Case, inputs: Mapping[str, NDArray[Any]], described: dict[str, Any]) -> None:
        if isinstance(case, PromisedCase):
            described["inputs_sha256"] = digest_of_inputs(inputs)

    def _note(self, case: Case, outs: Sequence[Tensor], described: dict[str, Any]) -> None:
        if isinstance(case, PromisedCase):
            described["sha256"] = digest_of(out.view for out in outs)

    def _run(self, case: Case, run: Run, tensors: list[Tensor], workspace: NDArray[np.uint8] | None) -> Outcome:
        assert isinstance(self.library, PtxLibrary) and isinstance(run, PtxRun), "only ptx_plan makes cases of PTX"
        self.library.round_as(run)
        return super()._run(case, run, tensors, workspace)


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
