"""What a kernel's PTX must show on the CPU: the plan of the CPU emulation, in each way that the PTX may be computed.

A shipped kernel has no exact build, so where it approximates (`Operator.exact`) integers are held to the bound, as on
a GPU. Approximate instructions come out at the lower end of their documented error in one run and at the upper end in
another, and products and sums that ptxas may fuse are fused in the one and not in the other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from codegen.kernel import Kernel
from codegen.operator import Operator
from codegen.plan.promised import PromisedInputs, promised_inputs
from codegen.plan.verification_plan import Case, Run, plan_cases

PLAN_SCHEMA = 3


@dataclass(frozen=True)
class Ways:
    """Of a kernel's PTX: whether ptxas may fuse some of its sums, and whether instructions of it approximate. `loose`:
    it has products and sums without a rounding in their names, wherever they stand: ptxas sees further than this does.
    `tensor`: tensor cores add its floats."""

    fusible: bool
    approximate: bool
    loose: bool = True
    tensor: bool = True

    @property
    def is_settled(self) -> bool:
        """Whether each of its roundings is one that the manual fixes; those of tensor cores aside."""
        return not (self.fusible or self.approximate or self.loose)


@dataclass(frozen=True)
class PromisedCase(Case):
    """A case whose output a GPU must give to the bit."""


@dataclass(frozen=True)
class PtxRun(Run):
    """`approximation`: -1, 0 or 1, the end of the documented error at which results are. `fuse`: products and sums."""

    approximation: int = 0
    fuse: bool = False


def ptx_cases(operator: Operator, kernel: Kernel, seed: int, ways: Ways) -> Iterator[Case]:
    """The cases, all runs of them `PtxRun`s; those of one case are computed in one way, and must give equal bits."""
    exact = operator.exact(kernel)
    for case in plan_cases(operator, kernel, seed):
        own = replace(case, exact=case.exact and exact)
        if own.exact:
            # Whole numbers come out exactly in whichever way.
            ends = (-1, 1) if ways.approximate else (0,)
            runs = (_run(run, ends[i % len(ends)], ways.fusible and i % 2 == 1) for i, run in enumerate(case.runs))
            yield replace(own, runs=tuple(runs))
            continue
        low, high = (-1, 1) if ways.approximate else (0, 0)
        yield from _by_launch(own, [_run(run, low, False) for run in case.runs])
        if ways.fusible or ways.approximate:
            yield replace(own, runs=(_run(case.runs[-1], high, ways.fusible),))
    if ways.is_settled:
        for inputs in promised_inputs(operator, kernel):
            # Tensor cores' rounding is the emulation's alone until a GPU has confirmed it; whole numbers need none.
            if inputs.kind == "integer" or not ways.tensor:
                yield _promised(inputs)


def _promised(inputs: PromisedInputs) -> PromisedCase:
    run = PtxRun("ascending", inputs.launch, inputs.seed)
    return PromisedCase(inputs.problem, inputs.kind, inputs.exact, inputs.seed, (run,))


def _by_launch(case: Case, runs: Iterable[PtxRun]) -> Iterator[Case]:
    """A case for each launch: another one adds in another order, and need not give the same bits."""
    launches: dict[tuple[int, ...], list[PtxRun]] = {}
    for run in runs:
        launches.setdefault(run.launch, []).append(run)
    return (replace(case, runs=tuple(own)) for own in launches.values())


def _run(run: Run, approximation: int, fuse: bool) -> PtxRun:
    return PtxRun(run.order, run.launch, run.seed, run.watch, approximation, fuse)
