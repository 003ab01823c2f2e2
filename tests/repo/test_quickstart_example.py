"""The files in `examples/` are what their README says, and what `make run` promises."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from benchmarks.shapes import public_shape
from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operators import operator
from codegen.predict.compile_cost import WORTHWHILE_SECONDS, kernel_seconds
from codegen.search.search import Search
from codegen.targets import target
from tests.support.fixtures.client import ScriptedService, job_json, problem_json, record_json
from tests.support.run.places import ROOT

EXAMPLES = ROOT / "examples"
QUICKSTART = json.loads((EXAMPLES / "quickstart.json").read_text())
BERT_BASE = {  # Devlin et al. 2019: hidden size 768, 12 heads of 64, inner size 3072; here 8 sequences of 128 tokens
    "qkv": (1, 8 * 128, 3 * 768, 768, "nt"),
    "proj": (1, 8 * 128, 768, 768, "nt"),
    "ffn1": (1, 8 * 128, 4 * 768, 768, "nt"),
    "ffn2": (1, 8 * 128, 768, 4 * 768, "nt"),
    "qk": (8 * 12, 128, 128, 64, "nt"),
    "pv": (8 * 12, 128, 64, 128, "nn"),
}
LLAMA3_8B = {  # Llama Team 2024: hidden size 4096, 32 heads of 128 and 8 of keys and values, inner size 14336; m tokens
    "qkv": ((32 + 2 * 8) * 128, 4096),
    "o": (4096, 4096),
    "gate_up": (2 * 14336, 4096),
    "down": (4096, 14336),
}
EPILOGUES = {
    "float32": {"qkv": ["bias"], "proj": ["bias"], "ffn1": ["bias", "gelu"], "ffn2": ["bias"]},
    "float16": {
        "qkv": ["bias"], "proj": ["bias", "residual"], "ffn1": ["bias", "gelu"], "ffn2": ["bias", "residual"],
        "qk": ["scale"],
    },
    "bfloat16": {"o": ["residual"], "down": ["residual"]},
}  # fmt: skip


def candidates() -> dict[str, tuple[Candidate, ...]]:
    lowered = {}
    for problem in QUICKSTART["problems"]:
        fields = {name: value for name, value in problem.items() if name not in ("name", "search")}
        search = Search.model_validate(problem.get("search", QUICKSTART["search"]))
        found = lower(operator(problem["operator"]).parse(fields), target(QUICKSTART["target"]), search)
        lowered[problem["name"]] = tuple(found.candidates)
    return lowered


def described(dtype: str) -> dict[str, Any]:
    """Batch, extents, layout and epilogue of the problems of that dtype."""
    found = {}
    for problem in QUICKSTART["problems"]:
        if problem["operator"] == "matmul" and problem["dtype"] == dtype:
            extents = (problem.get("batch", 1), problem["m"], problem["n"], problem["k"], problem["layout"])
            found[problem["name"]] = (*extents, [node["op"] for node in problem.get("epilogue", [])])
    return found


@pytest.mark.parametrize(("dtype", "ending"), [("float32", ""), ("float16", "_fp16")])
def test_the_quickstart_has_bert_base(dtype: str, ending: str) -> None:
    wanted = {f"{name}{ending}": (*shape, EPILOGUES[dtype].get(name, [])) for name, shape in BERT_BASE.items()}
    assert described(dtype) == wanted


def test_the_quickstart_has_llama_3_8b_at_few_and_at_many_tokens() -> None:
    assert described("bfloat16") == {
        f"llama_{name}_m{m}": (1, m, n, k, "nt", EPILOGUES["bfloat16"].get(name, []))
        for m in (16, 512)
        for name, (n, k) in LLAMA3_8B.items()
    }


def test_the_quickstart_has_bert_bases_attention_and_llamas_of_a_prompt() -> None:
    found = [problem for problem in QUICKSTART["problems"] if problem["operator"] == "attention"]
    bert, llama = (
        operator("attention").parse({k: v for k, v in p.items() if k not in ("name", "search")}) for p in found
    )
    assert bert == operator("attention").parse(public_shape("bert_base/attn"))
    fields = llama.canonical()
    assert (fields["seq_q"], fields["seq_kv"], fields["causal"], fields["dtype"]) == (512, 512, True, "bfloat16")
    assert ((fields["heads_q"] + 2 * fields["heads_kv"]) * fields["head_dim_qk"], 4096) == LLAMA3_8B["qkv"]


def test_the_quickstart_has_64_candidates_per_fp32_problem_and_several_groups() -> None:
    lowered = candidates()
    assert all(len({candidate.id for candidate in lowered[name]}) >= 64 for name in BERT_BASE)
    kernels = {candidate.kernel.id: candidate.kernel for each in lowered.values() for candidate in each}
    assert sum(map(kernel_seconds, kernels.values())) > 2 * WORTHWHILE_SECONDS


def test_the_problems_on_tensor_cores_are_few_enough_for_a_first_look() -> None:
    assert {len(each) for name, each in candidates().items() if name not in BERT_BASE} == {8}


def test_problems_that_differ_in_extents_share_their_kernels_but_for_their_defaults() -> None:
    kernels = {name: {candidate.kernel.id for candidate in each} for name, each in candidates().items()}
    for name in ("proj", "ffn2"):
        assert len(kernels[name] - kernels["qkv"]) <= 1
    assert not kernels["qkv"] & kernels["ffn1"]


def test_the_readme_names_every_example() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file() and path.name != "README.md"}
    folders = {f"{path.name}/" for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert [name for name in sorted(names | folders) if f"`{name}`" not in listed] == []


def run(command: list[str], service: ScriptedService, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUKILN_URL": service.url, "XDG_CACHE_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "client"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def test_use_winner_without_a_winner_says_what_to_run(scripted: ScriptedService, tmp_path: Path) -> None:
    missed = {"name": "ffn1", "key": "a" * 64, "record": None}
    scripted.on("POST", "/v1/lookups", {"results": [missed], "hits": 0, "misses": 1})
    done = run([sys.executable, str(EXAMPLES / "use_winner.py")], scripted, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("No winner for ffn1 yet: run `cukiln tune examples/quickstart.json`")
    assert scripted.seen[0].json["problems"] == [p for p in QUICKSTART["problems"] if p["name"] == "ffn1"]


def test_use_winner_with_a_damaged_library_is_one_line(scripted: ScriptedService, tmp_path: Path) -> None:
    hit = {"name": "ffn1", "key": "a" * 64, "record": record_json()}
    scripted.on("POST", "/v1/lookups", {"results": [hit], "hits": 1, "misses": 0})
    scripted.on("GET", f"/v1/blobs/sha256/{'d' * 64}", {"not": "the library"})
    done = run([sys.executable, str(EXAMPLES / "use_winner.py")], scripted, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "does not have the promised content" in done.stderr


def test_use_winner_passes_the_operands_of_its_problem() -> None:
    (ffn1,) = (p for p in QUICKSTART["problems"] if p["name"] == "ffn1")
    fields = {name: value for name, value in ffn1.items() if name != "name"}
    operands = operator("matmul").operands(operator("matmul").parse(fields))
    tree = ast.parse((EXAMPLES / "use_winner.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "kernel"]
    assert [ast.unparse(argument) for argument in calls[0].args] == [operand.name for operand in operands]


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="submit.sh needs curl")


@needs_curl
@pytest.mark.parametrize("cached", [False, True])
def test_submit_sh_follows_a_job_to_its_winners(cached: bool, scripted: ScriptedService, tmp_path: Path) -> None:
    ended = job_json("done", cached=cached)
    scripted.on("POST", "/v1/jobs", ended if cached else job_json("queued"))
    stream = Response('event: end\ndata: {"state": "done"}\n\n', media_type="text/event-stream")
    scripted.on("GET", "/v1/jobs/job1/events", stream)
    scripted.on("GET", "/v1/jobs/job1", ended)
    done = run([str(EXAMPLES / "submit.sh")], scripted, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"job job1: {'done' if cached else 'queued'}"
    assert ("event: end" in lines) != cached
    assert lines[-1].startswith("ffn1 {'tile_m': 128")
    assert scripted.seen[0].json == QUICKSTART


@needs_curl
def test_submit_sh_sends_the_key_and_shows_a_refusal(
    scripted: ScriptedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUKILN_API_KEY", "secret")
    scripted.on("POST", "/v1/jobs", problem_json(422, "unknown-target", "sm_1 is unknown"))
    done = run([str(EXAMPLES / "submit.sh")], scripted, tmp_path)
    assert done.returncode == 1
    assert "sm_1 is unknown" in done.stderr
    assert scripted.seen[0].headers["authorization"] == "Bearer secret"
