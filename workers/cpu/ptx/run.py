"""Child process: runs the test plan on a kernel's PTX and says what it saw (`workers.processes.child_protocol`).

`python -m workers.cpu.ptx.run REQUEST`: as `workers.cpu.run`, whose requests it takes, with `ways` beside: what of the
kernel's PTX has more than one way to be computed.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy import uint8
from numpy.typing import NDArray

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.plan.ptx_plan import PtxRun, Ways, ptx_cases
from codegen.plan.verification_plan import Case, Part, Run
from workers.cpu import run as twins
from workers.cpu.cpu_check import KernelTest
from workers.cpu.library import CpuLibrary, Outcome, Tensor
from workers.processes.child_protocol import Saying


class PtxLibrary(CpuLibrary):
    """A library that runs PTX."""

    def round_as(self, run: PtxRun) -> None:
        """How the runs to come round."""
        self._library.cukiln_ptx_rounding(run.approximation, int(run.fuse))


@dataclass
class PtxTest(KernelTest):
    """One kernel's PTX under test; all runs are `PtxRun`s."""

    def _run(self, case: Case, run: Run, tensors: list[Tensor], workspace: NDArray[uint8] | None) -> Outcome:
        assert isinstance(self.library, PtxLibrary) and isinstance(run, PtxRun), "only ptx_plan makes cases of PTX"
        self.library.round_as(run)
        return super()._run(case, run, tensors, workspace)


def ptx_test(
    library: PtxLibrary, kernel: Kernel, seed: int, cpu_seconds: float, ways: Ways, part: Part | None = None
) -> KernelTest:
    """The test of a kernel's PTX by the plan, or by a part of it."""
    own = operator(kernel.operator)
    cases = (part or Part()).of(ptx_cases(own, kernel, seed, ways))
    return PtxTest(library, kernel.namespace, own, cases, repeats=own.deterministic(kernel), cpu_seconds=cpu_seconds)


def main() -> None:
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    ways = Ways(**request["ways"])
    twins.run_kernels(
        request,
        Saying(),
        load=PtxLibrary,
        make=lambda library, kernel, seed, seconds, part: ptx_test(library, kernel, seed, seconds, ways, part),
    )


if __name__ == "__main__":
    main()
