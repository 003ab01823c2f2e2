"""One kernel's PTX under test on the CPU: the plan of `codegen.plan.ptx_plan` in the memory of any other test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy import uint8
from numpy.typing import NDArray

from codegen.plan.promised import digest_of, digest_of_inputs
from codegen.plan.ptx_plan import PromisedCase, PtxRun
from codegen.plan.verification_plan import Case, Run
from workers.cpu.cpu_check import KernelTest
from workers.cpu.library import CpuLibrary, Outcome, Tensor


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

    def _run(self, case: Case, run: Run, tensors: list[Tensor], workspace: NDArray[uint8] | None) -> Outcome:
        assert isinstance(self.library, PtxLibrary) and isinstance(run, PtxRun), "only ptx_plan makes cases of PTX"
        self.library.round_as(run)
        return super()._run(case, run, tensors, workspace)
