"""Kernels run from their PTX on the CPU for a problem: the verdicts, and what they took."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from codegen.kernel import Kernel
from codegen.ptx.module import SOURCE
from codegen.targets import Target
from cukiln.types import StageSeconds
from storage.entities.libraries import PUBLISHED_AS, PtxVerdict
from workers.cpu.ptx import verify
from workers.cpu.ptx.plans import ptx_plans
from workers.steps.context import StepContext

OF_LIMITS = ("run_timeout",)


@dataclass(frozen=True)
class Judged:
    """`lasting`: another time shows the same. What a limit ended may end by itself then."""

    verdict: PtxVerdict
    lasting: bool


@dataclass
class PtxRuns:
    """Of one attempt at a problem. `spent`: on all kernels, on what was refused too, as far as it is not stored."""

    context: StepContext
    target: Target
    spent: StageSeconds = field(default_factory=StageSeconds)

    @property
    def are_off(self) -> bool:
        return self.context.settings.verify_ptx == "none"

    def plan(self, operator: str) -> str:
        """The version of what judges."""
        return ptx_plans(self.target.tensor_sums)[operator]

    def take_spent(self) -> dict[str, StageSeconds]:
        """To be stored now: runs from PTX are of `verify`, and counted by themselves beside it."""
        spent, self.spent = self.spent, StageSeconds()
        return {"verify": spent, "ptx": spent}

    def judge(self, kernels: Sequence[Kernel], text: str | None) -> list[Judged]:
        """Distinct kernels of one operator. `text`: the PTX that holds them all; None: nvcc is asked for it. Raises
        InfrastructureError where the machine failed, Cancelled."""
        request = verify.PtxRequest(self.target.name, self.context.fresh_seed(), self.target.tensor_sums)
        shown = self._run(kernels, request, text)
        lacking = {each.kernel_id for each in shown if each.verdict not in PUBLISHED_AS and SOURCE in each.message}
        if lacking and text is not None:
            # What is stored has no lines: compiled with them it is the same PTX, and shows the same fault by name.
            wrong = [kernel for kernel in kernels if kernel.id in lacking]
            named = {each.kernel_id: each for each in self._run(wrong, request, None)}
            shown = [_named(each, named.get(each.kernel_id)) for each in shown]
        plan = self.plan(kernels[0].operator)
        return [_judged(each, plan, request.seed) for each in shown]

    def _run(self, kernels: Sequence[Kernel], request: verify.PtxRequest, text: str | None) -> list[verify.PtxVerdict]:
        context = self.context
        tools = (context.toolchain, context.processes, context.settings.limits("verify"))
        verdicts = verify.verify_ptx(kernels, request, *tools, ptx=text, cancel=context.cancel)
        context.check()
        for verdict in verdicts:
            self.spent += StageSeconds(wall=verdict.wall_seconds, cpu=verdict.cpu_seconds)
        return verdicts


def _named(shown: verify.PtxVerdict, again: verify.PtxVerdict | None) -> verify.PtxVerdict:
    same = again is not None and again.verdict == shown.verdict
    return replace(shown, message=again.message) if again is not None and same else shown


def _judged(shown: verify.PtxVerdict, plan: str, seed: int) -> Judged:
    verdict = PtxVerdict(
        verdict=shown.verdict,
        message=shown.message,
        plan_version=plan,
        seed=seed,
        wall_seconds=shown.wall_seconds,
        cpu_seconds=shown.cpu_seconds,
        promised=[
            promise(case, case["runs"][0]["launch"]) for case in shown.details.get("cases", []) if "sha256" in case
        ],
    )
    return Judged(verdict, shown.verdict not in OF_LIMITS and "limit" not in shown.details)


def promise(case: Mapping[str, Any], launch: Sequence[int]) -> dict[str, Any]:
    """`cukiln.types.PromisedOutput` of a verdict's case that has a digest of its output."""
    names = ("extents", "kind", "seed", "inputs_sha256", "sha256")
    return {**{name: case[name] for name in names}, "launch": list(launch)}
