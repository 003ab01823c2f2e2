"""Kernels that are wrong without lacking a barrier or a check: confused extents and pitches, fragments in another
order, a lost element along k, kernel sources that overlap, a shuffled epilogue. The test plan catches each one, in
every Config that the change reaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.text import render_cpu
from codegen.text.render_group import header_text
from tests.operators.masked_activation.test_masked_activation import vectorised
from tests.support.kernels.cpu_helpers import matmul_kernel, tensor_kernel
from tests.support.kernels.mutant_runs import AS_IT_IS, MutantVerdict, judge_mutants
from tests.support.kernels.mutants import Site, changed, switched_matmul, with_switches
from tests.support.kernels.wrong_kernels import COMMON, CUDA_CORES, DIVIDED, EPILOGUES, SPECIAL_EPILOGUES, TENSOR_CORES

# Level 1's usual tile and its large one, of which the plan's larger problems have room for one only.
LARGE = {"tile_m": 128, "tile_n": 128, "tile_k": 16, "thread_m": 8, "thread_n": 8, "unroll_k": 8, "stages": 2}
SIMT: Mapping[str, dict[str, Any]] = {
    "simt nn, 1 element": {"layout": "nn", "align": 1, "stages": 2, "fragments": 2, "epilogue": ("bias.n", "residual")},
    "simt nn, large": {"layout": "nn", "align": 4, "fragments": 2, "epilogue": ("bias.n", "residual"), **LARGE},
    "simt nt, large": {"layout": "nt", "align": 1, "fragments": 2, "epilogue": ("bias.m", "mask"), **LARGE},
}
# Two pieces of 16 x 16 for each warp along both axes.
PIECES = {"tile_m": 64, "tile_n": 64, "warps_m": 2, "warps_n": 2}
REGISTERS, SHARED = {"copy": "registers"}, {"epilogue_path": "shared"}
TENSOR: Mapping[str, dict[str, Any]] = {
    "fp16 nn": {"layout": "nn", "epilogue": ("bias.n", "residual"), "out_dtype": "float32", **PIECES},
    "fp16 tt, read ahead": {"layout": "tt", "fragments": 2, "stages": 3, "epilogue": ("bias.m",), **PIECES, **SHARED},
    "fp16 nt, halves of mma": {"layout": "nt", "mma_k": 8, "align": (1, 1, 1), "stages": 1, **REGISTERS},
    "bf16 tn, workspace": {
        "layout": "tn",
        "dtype": "bfloat16",
        "split": "workspace",
        "epilogue": ("bias.n", "residual"),
        **SHARED,
    },
    "tf32 tn": {"layout": "tn", "dtype": "float32", "epilogue": ("mask",), **PIECES},
    "int8 nn": {"layout": "nn", "dtype": "int8", "epilogue": ("bias.n",), "out_dtype": "float16", **REGISTERS},
    # Four rows to a line of banks and neighbours along m and n: squares of bytes begin at each of their rows.
    "int8 tn, short rows": {
        "layout": "tn",
        "dtype": "int8",
        "tile_k": 32,
        "epilogue": ("bias.m",),
        "out_dtype": "float32",
        **PIECES,
        **REGISTERS,
    },
    "int8 nt, atomic": {"layout": "nt", "dtype": "int8", "split": "atomic", **PIECES},
    "fp16 nt, stream-K": {"layout": "nt", "split": "stream", "epilogue": ("bias.n",)},
}
KERNELS = {**COMMON, **CUDA_CORES, **TENSOR_CORES, **DIVIDED}


def kernels_of(name: str) -> dict[str, Kernel]:
    simt = {config: matmul_kernel(operator=name, **words) for config, words in SIMT.items()}
    return simt | {config: tensor_kernel(operator=name, **words) for config, words in TENSOR.items()}


def sites() -> list[Site]:
    texts = operator("matmul").kernel_texts
    return [changed(texts, wrong, change.file, change.old, change.new) for wrong, change in KERNELS.items()]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[MutantVerdict]:
    """Of every kernel as it is, and of every wrong one in the Configs that it reaches."""
    folder, name = tmp_path_factory.mktemp("wrong"), "matmul_wrong"
    with switched_matmul(folder / "operator", name, sites()):
        return judge_mutants(list(kernels_of(name).values()), folder / "build")


def test_the_kernels_are_right_as_they_are(verdicts: list[MutantVerdict]) -> None:
    verdict_pairs = [(verdict.verdict, verdict.message) for verdict in verdicts if verdict.number == AS_IT_IS]
    assert verdict_pairs == [("ok", "")] * len(kernels_of("matmul"))


@pytest.mark.parametrize("wrong", KERNELS)
def test_a_wrong_kernel_is_caught(wrong: str, verdicts: list[MutantVerdict]) -> None:
    configs = list(kernels_of("matmul"))
    by_config = {
        configs[verdict.kernel]: verdict for verdict in verdicts if verdict.number == list(KERNELS).index(wrong)
    }
    assert by_config.keys() - set(KERNELS[wrong].harmless), "no Config reaches it"
    survived = {config for config, one in by_config.items() if one.verdict == "ok"}
    assert survived == set(KERNELS[wrong].harmless)


@pytest.fixture(scope="module")
def epilogue_verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[MutantVerdict]:
    """Of a kernel per chain of nodes, and of every wrong epilogue in the kernels that it reaches."""
    texts = {"epilogue.cuh": header_text("epilogue.cuh")}
    wrong = [changed(texts, name, "epilogue.cuh", old, new) for name, (_, old, new) in EPILOGUES.items()]
    with header_changed("epilogue.cuh", with_switches(texts, wrong)["epilogue.cuh"]):
        return judge_mutants(
            [matmul_kernel(epilogue=chain) for chain in chains()], tmp_path_factory.mktemp("epilogues")
        )


def chains() -> list[tuple[str, ...]]:
    return list(dict.fromkeys(chain for chain, _, _ in EPILOGUES.values()))


@contextmanager
def header_changed(path: str, text: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render_cpu, "header_text", lambda one: text if one == path else header_text(one))
        yield


@pytest.mark.parametrize("wrong", EPILOGUES)
def test_a_wrong_epilogue_is_caught(wrong: str, epilogue_verdicts: list[MutantVerdict]) -> None:
    number, kernel = list(EPILOGUES).index(wrong), chains().index(EPILOGUES[wrong][0])
    by_number = {verdict.number: verdict.verdict for verdict in epilogue_verdicts if verdict.kernel == kernel}
    assert by_number[AS_IT_IS] == "ok"
    assert by_number[number] in ("incorrect", "runtime_error")


@pytest.fixture(scope="module")
def special_verdicts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, int], str]:
    """By kernel, and number among SPECIAL_EPILOGUES."""
    texts = {"epilogue.cuh": header_text("epilogue.cuh")}
    wrong = [changed(texts, name, "epilogue.cuh", old, new) for name, (_, old, new) in SPECIAL_EPILOGUES.items()]
    nodes = list(dict.fromkeys(node for node, _, _ in SPECIAL_EPILOGUES.values()))
    kernels = [vectorised(node) if isinstance(node, str) else matmul_kernel(epilogue=node) for node in nodes]
    with header_changed("epilogue.cuh", with_switches(texts, wrong)["epilogue.cuh"]):
        verdicts = judge_mutants(kernels, tmp_path_factory.mktemp("special"))
    return {(str(nodes[each.kernel]), each.number): each.verdict for each in verdicts}


@pytest.mark.parametrize("wrong", SPECIAL_EPILOGUES)
def test_an_epilogue_that_is_wrong_on_what_is_no_number_or_the_sign_of_a_zero_is_caught(
    wrong: str, special_verdicts: Mapping[tuple[str, int], str]
) -> None:
    node = str(SPECIAL_EPILOGUES[wrong][0])
    assert special_verdicts[node, AS_IT_IS] == "ok"
    assert special_verdicts[node, list(SPECIAL_EPILOGUES).index(wrong)] == "incorrect"
