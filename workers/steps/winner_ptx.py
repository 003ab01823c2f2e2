"""A winner's own PTX, run on the CPU before it is published; what it showed is remembered beside its library."""

from codegen.kernel import Candidate, Kernel
from cukiln.types import PtxMark
from storage.entities.libraries import Library, PtxVerdict, ptx_verdict, write_ptx_verdict
from storage.errors import BlobCorrupt, BlobMissing
from storage.maintenance.damage import repair
from workers.steps.context import HandBack
from workers.steps.ptx_runs import PtxRuns
from workers.steps.winner_library import once_at_a_time


def judge_winner(runs: PtxRuns, candidate: Candidate, library: Library) -> PtxVerdict | None:
    """None where its PTX is not run: an emulation's library is not made of it. Raises InfrastructureError where the
    machine failed, Cancelled, HandBack where the PTX was lost."""
    ptx, kernel = library.ptx, candidate.kernel
    if ptx is None or runs.target.emulates is not None or runs.are_off:
        return None
    plan = runs.plan(kernel.operator)

    def there() -> PtxVerdict | None:
        with runs.context.database.read() as session:
            return ptx_verdict(session, ptx, plan)

    return once_at_a_time(runs.context, ptx, there, lambda: _judge(runs, kernel, ptx))


def _judge(runs: PtxRuns, kernel: Kernel, ptx: str) -> PtxVerdict:
    context = runs.context
    try:
        text = context.blobs.get(ptx).decode("utf-8")
    except (BlobMissing, BlobCorrupt) as error:
        repair(context.database, context.blobs, ptx)  # the library goes too, and is built again
        raise HandBack from error
    [judged] = runs.judge([kernel], text)
    if judged.lasting:
        with context.database.write() as session:
            write_ptx_verdict(session, ptx, judged.verdict)
    return judged.verdict


def mark_of(verdict: PtxVerdict | None) -> PtxMark | None:
    """As the record has it, of a kernel that is published."""
    if verdict is None:
        return None
    return PtxMark.model_validate(
        {"verdict": verdict.verdict, "message": verdict.message or None, "cpu_seconds": verdict.cpu_seconds}
    )
