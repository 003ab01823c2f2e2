"""The client's types of problems are those of the operators, and a type checker refuses what the service would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.repo.problem_types import FILE, problem_types
from tests.support.run.places import ROOT

SNIPPET = """
import cukiln

client = cukiln.Client()
problem: cukiln.Problem = {"operator": "matmul", "m": 4, "n": 4, "k": 4, "epilogue": [{"op": "relu"}], "name": "a"}
client.tune([problem, {"operator": "softmax", "shape": [4, 4]}], target="sm_90a", priority="high")
client.lookup([client.prepare(problem), problem])
found: cukiln.LookedUp = client.lookup([problem], on_miss="nearest", search={"level": 0})[0]
winner: bool = found.is_winner
name: str = client.job("a").job
keys: list[str] = [job.job for job in client.jobs(state="done")]


async def ask(other: cukiln.AsyncClient) -> cukiln.Job:
    return await other.tune([problem])


client.tune([{"mm": 3}])  # wrong
client.tune([{"operator": "matmul", "m": 4, "n": 4}])  # wrong
client.tune([{"operator": "matmul", "m": 4, "n": 4, "k": "4"}])  # wrong
client.tune([problem], priority="hgih")  # wrong
client.lookup([problem], on_miss="nearst")  # wrong
client.lookup_fields([problem], fields=7)  # wrong
client.jobs(state="finished")  # wrong
client.job(5)  # wrong
"""


def test_the_types_are_made_of_the_operators_schemas(tmp_path: Path) -> None:
    made = tmp_path / "problems.py"
    made.write_text(problem_types(), encoding="utf-8")
    config = ["--config", str(ROOT / "pyproject.toml")]
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", *config, str(made)], check=True)
    assert FILE.read_text() == made.read_text(), "run: python -m tests.repo.problem_types, then ruff format"


def test_wrong_problems_and_priorities_fail_a_strict_type_check(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPET)
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nstrict = True\nmypy_path = {ROOT / 'client'}\nfollow_imports = silent\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", ".cache", "snippet.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    refused = {int(number) for number in re.findall(r"snippet\.py:(\d+): error", done.stdout)}
    wrong = {number for number, line in enumerate(SNIPPET.splitlines(), 1) if line.endswith("# wrong")}
    assert refused == wrong, done.stdout + done.stderr
