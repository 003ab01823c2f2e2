"""One kernel's test on the CPU: the cases of the plan in guarded, poisoned memory, and what each run must show."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from codegen.arrays import compared
from codegen.operand import Operand
from codegen.plan.verification_plan import Case, FarCase, Kind, OutputCheck, Run, check_output, differing
from workers.cpu.library import CpuLibrary, Outcome, SharedAccess, Tensor

if TYPE_CHECKING:  # a recorded kernel is checked where no operator is known
    from workers.cpu.launch_code import LaunchCode

# Bytes of a workspace. A larger one is that of a problem beyond 32 bits, of which little is touched.
MOST_POISONED = 2**30


@dataclass(frozen=True)
class Failure:
    """Why a kernel is not ok. `tainted`: it may have damaged this process."""

    verdict: str
    message: str
    tainted: bool = False


class Tested(Protocol):
    """What is needed of an operator to test a kernel of it."""

    def extents(self, problem: Any, /) -> list[int]: ...

    def integers(self, problem: Any, /) -> list[int]: ...

    def scalars(self, problem: Any, /) -> list[float]: ...

    def operands(self, problem: Any, /) -> tuple[Operand, ...]: ...

    def make_inputs(self, problem: Any, kind: Kind, rng: np.random.Generator, /) -> Mapping[str, Any]: ...

    def reference(
        self, problem: Any, inputs: Mapping[str, Any], /, exact: bool = False
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...


@dataclass
class KernelTest:
    """One kernel under test. `described` grow case by case, so that a failure keeps what was right before it.
    `repeats`: two runs on the same inputs must give the same bits. `launch_code`: what is asked of it."""

    library: CpuLibrary
    namespace: str
    tested: Tested
    cases: Iterable[Case]
    repeats: bool
    cpu_seconds: float
    launch_code: "LaunchCode | None" = None

    def __post_init__(self) -> None:
        self._deadline = time.process_time() + self.cpu_seconds
        self.described: list[dict[str, Any]] = []
        self._shared: dict[tuple[str, str, int], SharedAccess] = {}

    def failure(self) -> Failure | None:
        """Runs the cases; the first thing that is wrong, or null."""
        for case in self.cases:
            failure = self._run_case(case)
            if failure is not None:
                return failure
        return None

    def shared_memory(self) -> list[dict[str, Any]]:
        """What the race-checked runs counted, by place; those with the most lost wavefronts first."""

        def rank(access: SharedAccess) -> tuple[int, str, int, str]:
            file, _, line = access.site.rpartition(":")
            return access.ideal - access.wavefronts, file, int(line), access.kind

        return [asdict(access) for access in sorted(self._shared.values(), key=rank)]

    def _run_case(self, case: Case) -> Failure | None:
        integers = self.tested.integers(case.problem)
        described = case.describe(self.tested.extents(case.problem))
        self.described.append(described)
        inputs = self.tested.make_inputs(case.shown, case.kind, np.random.default_rng(case.seed))
        expected, bound = self.tested.reference(case.shown, inputs, exact=case.exact)
        self._note_inputs(case, inputs, described)
        try:
            operands = self.tested.operands(case.problem)
            try:
                tensors = self._allocate(case, operands)
                # How much a call needs depends on its launch; each gets exactly that, so that a byte more is noticed.
                workspaces = {
                    launch: self.library.workspace(self.namespace, integers, launch)
                    for launch in dict.fromkeys(run.launch for run in case.runs)
                }
            except MemoryError as error:
                if not isinstance(case, FarCase):
                    raise
                described["not_run"] = str(error)  # a machine may grant no address space that is not touched
                return None
            for tensor in tensors:
                if tensor.operand.role == "in":
                    tensor.fill(inputs[tensor.operand.name])
            return self._wrong_launch_code(case, tensors, workspaces) or self._run_all(
                case, tensors, workspaces, expected, bound, described
            )
        finally:
            tensors, workspaces = [], {}
            self.library.free()

    def _wrong_launch_code(
        self, case: Case, tensors: Sequence[Tensor], workspaces: Mapping[tuple[int, ...], NDArray[np.uint8] | None]
    ) -> Failure | None:
        """Of all cases how much workspace they ask for; of the first what is refused."""
        if self.launch_code is None:
            return None
        sizes = {launch: 0 if workspace is None else workspace.size for launch, workspace in workspaces.items()}
        wrong = self.launch_code.wrong_workspace(case.problem, sizes)
        if not wrong and len(self.described) == 1:
            wrong = self.launch_code.taken(self.library, case, tensors)
        return Failure("incorrect", wrong, tainted=True) if wrong else None

    def _allocate(self, case: Case, operands: Sequence[Operand]) -> list[Tensor]:
        touched = self.tested.operands(case.shown) if isinstance(case, FarCase) else None
        return self.library.allocate(operands, touched)

    def _run_all(
        self,
        case: Case,
        tensors: list[Tensor],
        workspaces: Mapping[tuple[int, ...], NDArray[np.uint8] | None],
        expected: NDArray[np.float64],
        bound: NDArray[np.float64],
        described: dict[str, Any],
    ) -> Failure | None:
        first: list[NDArray[Any]] = []
        repeats = not case.exact and self.repeats
        outs = [tensor for tensor in tensors if tensor.operand.role == "out"]
        for run in case.runs:
            for out in outs:
                out.poison()
            workspace = workspaces[run.launch]
            if workspace is not None and workspace.size <= MOST_POISONED:
                workspace[...] = 0xFF
            outcome = self._run(case, run, tensors, workspace)
            self._count(outcome.shared_memory)
            if outcome.status != "ok":
                return Failure(outcome.status, f"{outcome.message} [{_where(described, run)}]", outcome.tainted)
            got = compared([(out.view, out.operand.dtype) for out in outs])
            output_check = check_output(got, expected, bound, exact=case.exact, signed=case.signed)
            keep_worst(described, output_check)
            if not output_check.ok:
                return Failure("incorrect", f"{output_check.sentence()} [{_where(described, run)}]")
            for out in outs:
                if (gap := out.broken_gap()) is not None:
                    message = f"wrote between the rows of {out.operand.name}, at element {gap}"
                    return Failure("incorrect", f"{message} [{_where(described, run)}]")
            self._note(case, outs, described)
            bits = [out.view.copy() for out in outs]
            first = first or bits
            if repeats and (changed := sum(map(differing, first, bits))):
                message = f"{changed} of {sum(map(np.size, bits))} elements differ between two runs on the same inputs"
                return Failure("incorrect", f"{message} [{_where(described, run)}]")
        return None

    def _note_inputs(self, case: Case, inputs: Mapping[str, NDArray[Any]], described: dict[str, Any]) -> None:
        """What the inputs of a case are to leave in its description."""

    def _note(self, case: Case, outs: Sequence[Tensor], described: dict[str, Any]) -> None:
        """What else a right run of a case is to leave in its description."""

    def _count(self, accesses: Iterable[SharedAccess]) -> None:
        for access in accesses:
            place = (access.site, access.kind, access.bytes)
            before = self._shared.get(place, replace(access, warp_accesses=0, wavefronts=0, ideal=0))
            self._shared[place] = replace(
                access,
                warp_accesses=before.warp_accesses + access.warp_accesses,
                wavefronts=before.wavefronts + access.wavefronts,
                ideal=before.ideal + access.ideal,
            )

    def _run(self, case: Case, run: Run, tensors: list[Tensor], workspace: NDArray[np.uint8] | None) -> Outcome:
        return self.library.run(
            self.namespace,
            tensors,
            workspace,
            integers=self.tested.integers(case.problem),
            launch=run.launch,
            scalars=self.tested.scalars(case.problem),
            order=run.order,
            seed=run.seed,
            exact=case.exact,
            watch=run.watch,
            last=case.last if isinstance(case, FarCase) else (),
            # A run that gets no time at all would never end: the timer of 0 seconds is no timer.
            cpu_seconds=max(0.05, self._deadline - time.process_time()),
        )


def _where(described: dict[str, Any], run: Run) -> str:
    return f"{described['kind']} inputs, extents {described['extents']}, launch {list(run.launch)}, {run.order} warps"


def keep_worst(described: dict[str, Any], output_check: OutputCheck) -> None:
    """Into the case's description: its largest error so far with the bound there, and the first wrong element."""
    # JSON has no NaN and no infinity: null stands for an error that is no number.
    if not math.isfinite(output_check.max_error) or output_check.max_error >= (described.get("max_error") or 0.0):
        described["error_bound"] = number(output_check.error_bound)
    for name, value in (("max_error", output_check.max_error), ("max_ratio", output_check.max_ratio)):
        if not math.isfinite(value):
            described[name] = None
        elif described.get(name, 0.0) is not None:
            described[name] = max(described.get(name, 0.0), value)
    if not output_check.ok:
        described["wrong"] = output_check.wrong
        described["first_wrong"] = {
            "index": list(output_check.index or ()),
            "got": number(output_check.got),
            "expected": number(output_check.expected),
            "bound": number(output_check.bound),
        }


def number(value: float | None) -> float | None:
    """The value, where JSON has it."""
    return value if value is not None and math.isfinite(value) else None
