"""Every barrier, wait, commit, bounds check, swizzle and stage of matmul's text is needed: the CPU execution notices
when one is gone or off by one.

The verdict of every mutant is written to `mutants.json` in the folder of test artifacts (CONTRIBUTING.md).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from tests.cpu_helpers import matmul_kernel, tensor_kernel
from tests.mutant_runs import AS_IT_IS, MutantVerdict, judge_mutants
from tests.mutants import KINDS, Mutant, Site, find_sites, mutants, switched_matmul

ROOT = Path(__file__).resolve().parent.parent
ARTIFACTS = Path(os.environ.get("CUKILN_TEST_ARTIFACTS") or ROOT / ".test-artifacts")
# Here the vectors of a tile are not a multiple of the threads, so that some threads have nothing to bring.
UNEVEN = {"tile_m": 16, "tile_n": 64, "thread_m": 2, "thread_n": 4, "padding": 4}
ATOMIC, WORKSPACE, STREAM = {"split": "atomic"}, {"split": "workspace"}, {"split": "stream"}
# Layouts, alignment classes, stages and fragment buffers of the kernel on CUDA cores.
SIMT: Mapping[str, dict[str, Any]] = {
    "simt nn": {"layout": "nn", "align": 4, "stages": 1, "fragments": 1},
    "simt nt, 1 element": {"layout": "nt", "align": 1, "stages": 2, "fragments": 2, "epilogue": ("bias.n",), **UNEVEN},
    "simt tn, split": {"layout": "tn", "align": 4, "stages": 2, "fragments": 2, "epilogue": ("bias.m",), **WORKSPACE},
    "simt tt": {"layout": "tt", "align": 4, "stages": 1, "fragments": 2, **UNEVEN},
}
REGISTERS, SHARED = {"copy": "registers"}, {"epilogue_path": "shared"}
# More threads than vectors, of A in the first and of B in the second.
WIDE = {"tile_m": 16, "tile_n": 128, "warps_m": 1, "warps_n": 4}
TALL = {"tile_m": 128, "tile_n": 16, "warps_m": 8, "warps_n": 1}
# Each way of copying with each number of stages and fragment buffers, of computing, of writing and of splitting; each
# element type; tiles of which rows lie along k, along the other axis (by ldmatrix.trans, by words), and turned bytes.
TENSOR: Mapping[str, dict[str, Any]] = {
    "fp16 nt": {"layout": "nt", "stages": 2},
    "fp16 nn, read ahead": {"layout": "nn", "stages": 3, "fragments": 2, "epilogue": ("bias.n", "relu"), **SHARED},
    "bf16 tn, 4 bytes": {"layout": "tn", "dtype": "bfloat16", "align": (2, 2, 2), "stages": 4, **WIDE, **WORKSPACE},
    "bf16 tt, read ahead": {"layout": "tt", "dtype": "bfloat16", "stages": 2, "fragments": 2, "tile_m": 64, **SHARED},
    "fp16 nn, 1 element": {"layout": "nn", "align": (1, 1, 1), "stages": 1, **REGISTERS},
    "fp16 tt, registers": {"layout": "tt", "stages": 2, "fragments": 2, "mma_k": 8, **REGISTERS, **TALL, **SHARED},
    "int8 nt, atomic": {"layout": "nt", "dtype": "int8", "stages": 3, "fragments": 2, **ATOMIC},
    "int8 nn": {"layout": "nn", "dtype": "int8", "stages": 1, **REGISTERS, **SHARED},
    "int8 tt, 4 bytes": {"layout": "tt", "dtype": "int8", "align": (4, 4, 2), "stages": 2, **REGISTERS, **TALL},
    "tf32 tn": {"layout": "tn", "dtype": "float32", "stages": 3, **WORKSPACE},
    "fp16 nt, stream-K": {"layout": "nt", "stages": 3, **STREAM},
    "bf16 nn, stream-K": {"layout": "nn", "dtype": "bfloat16", "fragments": 2, **STREAM, **SHARED},
    "tf32 nt": {"layout": "nt", "dtype": "float32", "stages": 2, **WIDE, **SHARED},
}
# Of single configs, by the comment of the line: with fragments read ahead, what a warp reads behind the last barrier of
# the main loop is never used, so that nothing is lost with it.
EXCUSED = {"every warp has read the last stage": ("fp16 nn, read ahead", "bf16 tt, read ahead", "bf16 nn, stream-K")}


def kernels_of(name: str) -> dict[str, Kernel]:
    simt = {config: matmul_kernel(operator=name, **words) for config, words in SIMT.items()}
    return simt | {config: tensor_kernel(operator=name, **words) for config, words in TENSOR.items()}


def all_sites() -> list[Site]:
    return find_sites(operator("matmul").kernel_texts)


def all_mutants() -> list[Mutant]:
    return mutants(all_sites())


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[MutantVerdict]:
    """Of every kernel as it is, and of every mutant in the kernels that reach it."""
    folder, name = tmp_path_factory.mktemp("mutants"), "matmul_mutants"
    with switched_matmul(folder / "operator", name, all_sites()):
        return judge_mutants(list(kernels_of(name).values()), folder / "build")


def of_mutant(verdicts: list[MutantVerdict], number: int) -> list[MutantVerdict]:
    return [one for one in verdicts if one.number == number]


def is_caught(verdicts: list[MutantVerdict], number: int) -> bool:
    return any(one.verdict != "ok" for one in of_mutant(verdicts, number))


def records(verdicts: list[MutantVerdict]) -> Iterator[dict[str, Any]]:
    """What the artifact says of each mutant."""
    configs = list(kernels_of("matmul"))
    for mutant in all_mutants():
        runs = [
            {"config": configs[one.kernel], "verdict": one.verdict, "message": one.message}
            for one in of_mutant(verdicts, mutant.number)
        ]
        yield {
            "site": mutant.name,
            "kind": mutant.kind,
            "file": mutant.file,
            "line": mutant.line,
            "text": mutant.old,
            "becomes": mutant.new,
            "caught": is_caught(verdicts, mutant.number),
            "runs": runs,
        }


def test_the_kernels_pass_as_they_are(verdicts: list[MutantVerdict]) -> None:
    configs = list(kernels_of("matmul"))
    found = {configs[one.kernel]: (one.verdict, one.message) for one in of_mutant(verdicts, AS_IT_IS)}
    assert found == dict.fromkeys(configs, ("ok", ""))


@pytest.mark.parametrize("name", [mutant.name for mutant in all_mutants()])
def test_a_mutant_is_caught(name: str, verdicts: list[MutantVerdict]) -> None:
    (number,) = [mutant.number for mutant in all_mutants() if mutant.name == name]
    assert of_mutant(verdicts, number), f"no config reaches {name!r}: add one"
    assert is_caught(verdicts, number), of_mutant(verdicts, number)


def test_the_artifact_lists_every_mutant(verdicts: list[MutantVerdict]) -> None:
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    path = ARTIFACTS / "mutants.json"
    configs = {config: kernel.to_json() for config, kernel in kernels_of("matmul").items()}
    path.write_text(json.dumps({"configs": configs, "mutants": list(records(verdicts))}, indent=1) + "\n")
    sys.stdout.write(f"mutants and their verdicts: {path}\n")
    written = json.loads(path.read_text())["mutants"]
    assert [one["site"] for one in written] == [mutant.name for mutant in all_mutants()]
    assert all(one["runs"] and one["line"] > 0 and one["caught"] for one in written)


def test_a_missing_barrier_wait_or_commit_is_caught_in_every_config_that_reaches_it(
    verdicts: list[MutantVerdict],
) -> None:
    configs, texts = list(kernels_of("matmul")), operator("matmul").kernel_texts
    for mutant in all_mutants():
        if mutant.kind not in ("barrier", "warp barrier", "commit", "wait"):
            continue
        line = texts[mutant.file].splitlines()[mutant.line - 1]
        excused = {config for comment, named in EXCUSED.items() if comment in line for config in named}
        survived = {configs[one.kernel] for one in of_mutant(verdicts, mutant.number) if one.verdict == "ok"}
        assert survived <= excused, mutant.name


def test_every_place_has_its_mutants() -> None:
    """Counted by other means than the suite's own: a place that it overlooks shows here."""
    texts = operator("matmul").kernel_texts.values()
    code = [line.partition("//")[0] for text in texts for line in text.splitlines()]
    found = Counter(mutant.kind for mutant in all_mutants())
    calls = {"barrier": "__syncthreads()", "warp barrier": "warp_barrier()", "commit": "cp_async_commit()"}
    for kind, call in calls.items():
        assert found[kind] == sum(line.count(call) for line in code) >= 1, kind
    assert found["wait"] == 2 * sum(line.count("cp_async_wait<") for line in code) >= 6
    definitions = {"bounds": ("in_bounds(", 2), "swizzle": ("swizzle(", 1), "stage": ("stage_at", 1)}
    for kind, (call, defined) in definitions.items():
        per_site = 2 if kind == "bounds" else 1
        assert found[kind] == per_site * (sum(line.count(call) for line in code) - defined) >= per_site, kind
    assert set(found) == set(KINDS)


@pytest.mark.parametrize(
    "line",
    [
        "if (in_bounds(i, n)) {",
        "if (i < n) {  // bounds: row",
        "const int at = Tile::swizzle(row);  // bounds: row",
        "feed.start(stage_at<Feed>(shared, 1));",
    ],
)
def test_a_call_without_a_mark_and_a_mark_without_a_call_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="belong on one line"):
        find_sites({"kernel.cuh": line})
