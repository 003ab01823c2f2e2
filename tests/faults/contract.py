"""schemathesis over the whole API: whether it keeps to its OpenAPI document, asked for both sides of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from storage.database.tables import LIVE
from tests.support.run.places import ROOT

CONFIG = Path(__file__).parent / "schemathesis.toml"
CANCEL_SECONDS = 0.2
ALL = "examples,coverage,fuzzing,stateful"


@dataclass(frozen=True)
class Contract:
    """`mismatches`: kinds of answers that break it; `report`: what schemathesis printed."""

    requests: int
    mismatches: int
    report: str


def check_contract(url: str, folder: Path, *, examples: int, seed: int, phases: str = ALL) -> Contract:
    """`examples`: how many, of each call. `phases`: schemathesis's, of which `coverage` goes through the
    parameters one by one, with thousands of requests. `folder`: for what it writes. The jobs that it sends are
    cancelled."""
    result = folder / "contract.json"
    words = [f"--max-examples={examples}", f"--seed={seed}", "--continue-on-failure", "--no-color"]
    words += [f"--phases={phases}", "--report=json", f"--report-json-path={result}"]
    with _jobs_end(url):
        run = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", f"--config-file={CONFIG}", "run", f"{url}/openapi.json", *words],
            cwd=folder,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.faults.typed_problems", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    cases = json.loads(result.read_text())["test_cases"]
    mismatches = cases["unique_failures"] + cases["errored"]
    assert (run.returncode == 0) == (mismatches == 0), run.stdout
    return Contract(requests=cases["generated"], mismatches=mismatches, report=run.stdout)


@contextmanager
def _jobs_end(url: str) -> Iterator[None]:
    """Cancel the jobs that come, so that their events come to an end."""
    over = threading.Event()

    def cancel_all() -> None:
        with httpx.Client(base_url=url, trust_env=False) as client:
            while not over.wait(CANCEL_SECONDS):
                for state in LIVE:
                    for job in client.get("/v1/jobs", params={"state": state}).json()["jobs"]:
                        client.delete(f"/v1/jobs/{job['job']}")

    thread = threading.Thread(target=cancel_all)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
