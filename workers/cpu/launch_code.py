"""What the launch code of a kernel must say of a call before anything runs: how much workspace it takes, and which
calls it takes and refuses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codegen.kernel import Kernel
from codegen.operator import Operator
from codegen.plan.verification_plan import Case
from codegen.problem import Problem
from codegen.run_once import LastBlocks
from codegen.search.schedule import Schedule
from workers.cpu.library import CpuLibrary, Tensor

# Beyond what launch code indexes; its last 32 bits are 1, and products with it do not overflow 64.
BEYOND = 2**32 + 1
# How the emulation says that there is nothing to launch.
REFUSED = "invalid launch: the number of launches is 0,"
# Of more blocks than a launch has: it is checked, and nothing of it runs.
LAST_BLOCK, NO_BLOCKS = LastBlocks(1), LastBlocks(1, 2**62)
CPU_SECONDS = 1.0  # of a block of what should have been refused


@dataclass(frozen=True)
class LaunchCode:
    kernel: Kernel
    operator: Operator

    def wrong_workspace(self, problem: Problem, asked: Mapping[tuple[int, ...], int]) -> str:
        """What is wrong with the bytes that it asks for, by launch values; nothing where they are those of the
        schedule's cost, by which searches keep to a limit."""
        for launch, size in asked.items():
            chosen = dict(zip(self.operator.launch_tunables, launch, strict=False))
            schedule = Schedule.of({**self.kernel.tunables.as_dict(), **chosen})
            if size != (needed := self.operator.cost(problem, schedule).workspace_bytes):
                where = f"extents {self.operator.extents(problem)}, launch {list(launch)}"
                return f"asks for {size} bytes of workspace, its schedule for {needed} [{where}]"
        return ""

    def taken(self, library: CpuLibrary, case: Case, tensors: Sequence[Tensor]) -> str:
        """What it takes and must refuse, or the other way round; nothing where each number of a call that is too large
        is refused, and calls at the edges are as the operator says."""
        names = (*self.operator.extent_names, *self.operator.attribute_names)
        if unknown := sorted(set(self.operator.limited) - set(names)):
            return f"its operator's `limited` names {unknown}, which no call has; allowed: {', '.join(names)}"
        for name in self.operator.limited:
            answer = self.answer_to(library, case, tensors, {name: BEYOND})
            if not answer.startswith(REFUSED):
                return f"its launch code takes {name} = {BEYOND}, which it cannot index; then: {answer}"
        for call in self.operator.edge_calls(self.kernel):
            answer = self.answer_to(library, case, tensors, call.numbers, NO_BLOCKS, call.launch)
            if not (answer == "ok" if call.taken else answer.startswith(REFUSED)):
                numbers = ", ".join(f"{name} = {number}" for name, number in {**call.numbers, **call.launch}.items())
                must = "take" if call.taken else "refuse"
                return f"its launch code must {must} a call with {numbers}; it says: {answer}"
        return ""

    def answer_to(
        self,
        library: CpuLibrary,
        case: Case,
        tensors: Sequence[Tensor],
        changed: Mapping[str, int],
        blocks: LastBlocks = LAST_BLOCK,
        chosen: Mapping[str, int] = {},
    ) -> str:
        """What becomes of those blocks of each launch of a call with these numbers."""
        names = (*self.operator.extent_names, *self.operator.attribute_names)
        numbers = zip(names, self.operator.integers(case.problem), strict=True)
        launch = zip(self.operator.launch_tunables, case.runs[0].launch, strict=False)
        outcome = library.run(
            self.kernel.namespace, tensors, None,
            integers=[changed.get(name, own) for name, own in numbers],
            launch=[chosen.get(name, own) for name, own in launch],
            scalars=self.operator.scalars(case.problem), order="ascending", seed=0,
            exact=case.exact, cpu_seconds=CPU_SECONDS, last=(blocks,),
        )  # fmt: skip
        return outcome.message or outcome.status
