"""A winner's own PTX, run on the CPU before it is published; what it showed is remembered beside its library."""

import json
from collections.abc import Mapping
from typing import Any

from codegen.kernel import Candidate, Kernel
from cukiln.types import PtxMark
from storage.entities.libraries import Library, PtxVerdict, ptx_verdict, write_ptx_verdict
from storage.entities.verdicts import GPU, Verdict
from storage.errors import BlobCorrupt, BlobMissing
from storage.maintenance.damage import repair
from workers.steps.context import HandBack
from workers.steps.ptx_runs import PtxRuns, promise
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


def mark_of(verdict: PtxVerdict | None, broken: str | None = None) -> PtxMark | None:
    """As the record has it, of a kernel that is published."""
    if verdict is None:
        return None
    return PtxMark.model_validate(
        {
            "verdict": verdict.verdict,
            "message": verdict.message or None,
            "cpu_seconds": verdict.cpu_seconds,
            "promised": verdict.promised,
            "broken": broken,
        }
    )


def broken_promise(verdict: PtxVerdict | None, proof: Verdict | None) -> str | None:
    """The first output of a GPU's verification that is not what the PTX gives on the same inputs; null where none is,
    or nothing is promised."""
    if verdict is None or proof is None or proof.venue != GPU:
        return None
    digests = {}
    for case in proof.details.get("cases", []):
        # Also of results that were imported: of a case that says less nothing is compared.
        launches = case.get("launches")
        if case.keys() >= _OF_PROMISE and isinstance(launches, list) and [type(of) for of in launches] == [list]:
            of = promise(case, launches[0])
            digests[_inputs(of)] = of["sha256"]
    for of in verdict.promised:
        got = digests.get(_inputs(of), of["sha256"])
        if got != of["sha256"]:
            where = f"{of['kind']} inputs, extents {of['extents']}, launch {of['launch']}, seed {of['seed']}"
            return f"its output on the GPU has SHA-256 {got}, its PTX promises {of['sha256']} [{where}]"
    return None


_OF_PROMISE = {"extents", "kind", "seed", "launches", "inputs_sha256", "sha256"}


def _inputs(of: Mapping[str, Any]) -> str:
    """Which they are: what else differs of a case, too, and whatever an import has in its place."""
    return json.dumps([of[name] for name in ("extents", "kind", "seed", "launch", "inputs_sha256")])
