"""A winner's own PTX, run on the CPU before it is published; what it showed is remembered beside its library."""

from dataclasses import dataclass, field, replace

from codegen.kernel import Candidate, Kernel
from codegen.ptx.module import SOURCE
from codegen.targets import Target
from cukiln.types import PtxMark, StageSeconds
from storage.entities.libraries import PUBLISHED_AS, Library, PtxVerdict, ptx_verdict, write_ptx_verdict
from storage.errors import BlobCorrupt, BlobMissing
from storage.maintenance.damage import repair
from workers.cpu.ptx import verify
from workers.cpu.ptx.plans import ptx_plans
from workers.steps.context import HandBack, StepContext
from workers.steps.winner_library import once_at_a_time

OF_LIMITS = ("run_timeout",)


@dataclass
class WinnerPtx:
    """Judges the PTX of one problem's winners. `spent`: on that by this attempt, on what was refused too."""

    context: StepContext
    target: Target
    spent: StageSeconds = field(default_factory=StageSeconds)

    def judge(self, candidate: Candidate, library: Library) -> PtxVerdict | None:
        """None where its PTX is not run: an emulation's library is not made of it. Raises InfrastructureError where the
        machine failed, Cancelled, HandBack where the PTX was lost."""
        ptx, kernel = library.ptx, candidate.kernel
        if ptx is None or self.target.emulates is not None or self.context.settings.verify_ptx == "none":
            return None
        plan = ptx_plans(self.target.tensor_sums)[kernel.operator]

        def there() -> PtxVerdict | None:
            with self.context.database.read() as session:
                return ptx_verdict(session, ptx, plan)

        return once_at_a_time(self.context, ptx, there, lambda: self._judge(kernel, ptx, plan))

    def _judge(self, kernel: Kernel, ptx: str, plan: str) -> PtxVerdict:
        context = self.context
        try:
            text = context.blobs.get(ptx).decode("utf-8")
        except (BlobMissing, BlobCorrupt) as error:
            repair(context.database, context.blobs, ptx)  # the library goes too, and is built again
            raise HandBack from error
        request = verify.PtxRequest(self.target.name, context.fresh_seed(), self.target.tensor_sums)
        shown = self._run(kernel, request, text)
        if shown.verdict not in PUBLISHED_AS and SOURCE in shown.message:
            # What is published has no lines: compiled with them it is the same PTX, and shows the same fault by name.
            again = self._run(kernel, request, None)
            shown = replace(shown, message=again.message) if again.verdict == shown.verdict else shown
        verdict = PtxVerdict(
            verdict=shown.verdict,
            message=shown.message,
            plan_version=plan,
            seed=request.seed,
            wall_seconds=shown.wall_seconds,
            cpu_seconds=shown.cpu_seconds,
        )
        # What a limit ended may end by itself another time.
        if shown.verdict not in OF_LIMITS and "limit" not in shown.details:
            with context.database.write() as session:
                write_ptx_verdict(session, ptx, verdict)
        return verdict

    def _run(self, kernel: Kernel, request: verify.PtxRequest, ptx: str | None) -> verify.PtxVerdict:
        context = self.context
        tools = (context.toolchain, context.processes, context.settings.limits("verify"))
        verdicts = verify.verify_ptx([kernel], request, *tools, ptx=ptx, cancel=context.cancel)
        context.check()
        [verdict] = verdicts
        self.spent += StageSeconds(wall=verdict.wall_seconds, cpu=verdict.cpu_seconds)
        return verdict


def mark_of(verdict: PtxVerdict | None) -> PtxMark | None:
    """As the record has it, of a kernel that is published."""
    if verdict is None:
        return None
    return PtxMark.model_validate(
        {"verdict": verdict.verdict, "message": verdict.message or None, "cpu_seconds": verdict.cpu_seconds}
    )
