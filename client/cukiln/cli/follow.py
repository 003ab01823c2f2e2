"""`cukiln tune`, `watch`, `retry` and `quickstart`: jobs that are followed to their end."""

from typing import Annotated

import typer

from cukiln.cli.console import AsJson, JobId, OfTarget, RequestFile, Url
from cukiln.cli.server import PRIVATE, find_service, open_client, quickstart_file
from cukiln.cli.tune import Tuning
from cukiln.errors import ServiceUnreachable
from cukiln.job_request import read_request
from cukiln.settings import BY_DEFAULT, ClientSettings
from cukiln.types import PtxAsked

LOSSES = 8  # services of other commands that may end during one `tune`

follow_app = typer.Typer()


@follow_app.command()
def tune(
    file: RequestFile,
    target: OfTarget = None,
    url: Url = None,
    as_json: AsJson = False,
    again: Annotated[bool, typer.Option("--again", help="Then send it again, and report the cache's time.")] = False,
    cancel_on_interrupt: Annotated[
        bool, typer.Option("--cancel-on-interrupt", help="Ctrl-C cancels the job in a service that keeps running.")
    ] = False,
    ptx: Annotated[
        PtxAsked | None,
        typer.Option(
            help="Which candidates are run from their PTX, 1 to 3 CPU seconds each: all, or winners, the default."
        ),
    ] = None,
) -> None:
    """Find the best kernel for each problem in FILE.

    `--url private`: by a service of the data folder (CUKILN_DATA, default .cukiln), which runs for this command where
    none does; its results stay there.
    """
    request = read_request(file, target)
    tuning = Tuning({**request, "ptx": ptx} if ptx else request, as_json=as_json, again=again)
    raise typer.Exit(_follow(tuning, url, cancel_on_interrupt))


@follow_app.command()
def watch(
    job: JobId,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Follow JOB to its end and show its winners, as `cukiln tune` does. Ctrl-C leaves it running."""
    raise typer.Exit(_follow(Tuning({}, followed=job, as_json=as_json), url))


@follow_app.command()
def retry(
    job: JobId,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Try again what failed, was cancelled or lost candidates of JOB, as a new job, and follow that as `tune` does.

    Candidates that reached a limit of time or memory are tried again too; incorrect kernels are not (see
    `cukiln forget`).
    """
    raise typer.Exit(_follow(Tuning({}, retried=job, as_json=as_json), url))


@follow_app.command()
def quickstart() -> None:
    """Tune examples/quickstart.json (products and attention of BERT-base and Llama) twice: what `make run` does.

    On a GPU of another architecture than the file's, for that architecture.
    """
    url = PRIVATE if ClientSettings.from_environment().url_from == BY_DEFAULT else None
    raise typer.Exit(_follow(Tuning(read_request(str(quickstart_file())), again=True, on_any_gpu=True), url))


def _follow(tuning: Tuning, url: str | None = None, cancel: bool = False) -> int:
    """The exit code of a job that may outlive the services that it was sent to."""
    for losses in range(LOSSES + 1):
        with find_service(url, tuning.progress) as service, open_client(service) as client:
            try:
                return tuning.run(client, cancel=cancel or service.embedded)
            except ServiceUnreachable:
                # The data folder holds all that a service of our own needs to continue the job.
                if not service.borrowed or losses == LOSSES:
                    tuning.unreachable()
                    raise
                tuning.lost(service.url)
    raise AssertionError("the last loss is raised")
