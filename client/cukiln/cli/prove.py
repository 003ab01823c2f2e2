"""`cukiln prove` and `reproduce`: kernels that are verified here, on the CPU, without a service."""

import re
from pathlib import Path
from typing import Annotated

import typer

from cukiln.cli.console import JOB_ID, AsJson, ProblemName, RequestFile, Url, given, given_path
from cukiln.cli.server import find_client, server_module
from cukiln.errors import NotFound, UsageError
from cukiln.job_request import read_request

REMOVED = (
    "Jobs that ended long ago are removed with their candidates, a winner's too: to have one again, send its problem "
    "with a wider search, or after `cukiln forget` of the winner"
)

prove_app = typer.Typer()


@prove_app.command()
def prove(
    file: RequestFile,
    problem: ProblemName = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Candidates of each problem. Default: the first one.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of inputs and of seeded orders.")] = 1,
    case: Annotated[int | None, typer.Option(min=0, help="Run this case of the verification plan only.")] = None,
    order: Annotated[
        str | None, typer.Option(help="Run warps in this order only: ascending, descending or seeded.")
    ] = None,
    watch: Annotated[
        bool | None,
        typer.Option(help="Check for races and count bank conflicts in every run, or in none. Default: in some."),
    ] = None,
    sanitize: Annotated[bool, typer.Option("--sanitize", help="Build with g++'s sanitizers.")] = False,
    ptx: Annotated[
        bool, typer.Option("--ptx", help="Run the PTX that nvcc makes of them, not the emulation of their primitives.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify FILE's first candidates on the CPU, without a service, and print the report.

    Output of kernels (printf) is shown. Exit code 1 when a kernel is incorrect, 4 when none is but --ptx cannot
    translate one. See docs/writing-a-kernel.md.
    """
    request, module = read_request(file), server_module("workers.cpu.prove")
    if order not in (None, *module.ORDERS):
        raise UsageError(f"--order is {order!r}; allowed: {', '.join(module.ORDERS)}")
    part = module.Part(case=case, order=order, watch=watch)
    options = module.Options(
        problem=problem, limit=limit, seed=seed, part=part, sanitize=sanitize, as_json=as_json, ptx=ptx
    )
    raise typer.Exit(module.prove(request, options))


@prove_app.command()
def reproduce(
    candidate: Annotated[
        str, typer.Argument(metavar="CANDIDATE", parser=given, help="Its id, or the first 8 or more digits.")
    ],
    job: Annotated[str | None, typer.Option(help="As this job has it. Default: the latest facts.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=given_path, help="The folder to write. Default: candidate-<id> in the current one."),
    ] = None,
    url: Url = None,
) -> None:
    """Write one candidate as a folder that builds it and compares code and verdict with its record.

    `python FOLDER/run.py` does so without cukiln; see docs/reproducing.md.
    """
    if job is not None and not re.fullmatch(JOB_ID, job):
        raise UsageError(
            f"there is no job {job!r}: a job's id is 32 lower-case hexadecimal digits, as `cukiln tune` prints it, or "
            "the first 8 or more of them"
        )
    with find_client(url) as client:
        job = client.job(job).job if job is not None else None
        write_folder = server_module("workers.reproduce.write_folder")
        try:
            facts = client.candidate(candidate, job=job)
        except NotFound as error:
            error.args = (f"{error}. {REMOVED}",)
            raise
        raise typer.Exit(write_folder.reproduce(facts, out or Path(f"candidate-{facts.candidate[:16]}")))
