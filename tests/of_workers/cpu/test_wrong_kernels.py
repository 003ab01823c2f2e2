"""Kernels that are wrong without lacking a barrier or a check: confused extents and pitches, fragments in another
order, a lost element along k, kernel sources that overlap, a shuffled epilogue. The test plan catches each one, in
every Config that the change reaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.text import render_cpu
from codegen.text.render_group import header_text
from tests.operators.masked_activation.kernels import vectorised
from tests.support.kernels.cpu_helpers import matmul_kernel, tensor_kernel
from tests.support.kernels.mutant_runs import AS_IT_IS, MutantVerdict, verify_mutants
from tests.support.kernels.mutants import Site, changed, switched_matmul, with_switches
from tests.support.kernels.wrong_kernels import COMMON, CUDA_CORES, DIVIDED, EPILOGUES, SPECIAL_EPILOGUES, TENSOR_CORES
from tests.support.run.each_run import rows_using, some_each_run

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


# No fewer show every wrong kernel.
FEW = (
    "simt nn, large",
    "fp16 tt, read ahead",
    "bf16 tn, workspace",
    "tf32 tn",
    "int8 tn, short rows",
    "fp16 nt, stream-K",
)
ALL = (*SIMT, *TENSOR)


def results_of(folder: Path, configs: Sequence[str], once: Sequence[int] = ()) -> dict[str, list[MutantVerdict]]:
    """By Config, of its kernel as it is, and of every wrong one that it reaches; `once`: of these up to the first that
    shows it."""
    name = "matmul_wrong"
    with switched_matmul(folder / "operator", name, sites()):
        kernels = kernels_of(name)
        found = verify_mutants([kernels[config] for config in configs], folder / "build", once)
    return {config: [of for of in found if of.kernel == number] for number, config in enumerate(configs)}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[MutantVerdict]]:
    return results_of(tmp_path_factory.mktemp("wrong"), FEW, range(len(KERNELS)))


@pytest.fixture(scope="module")
def all_verdicts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[MutantVerdict]]:
    return results_of(tmp_path_factory.mktemp("all_wrong"), ALL)


def in_configs(verdicts: Mapping[str, list[MutantVerdict]], number: int) -> dict[str, MutantVerdict]:
    return {config: result for config, results in verdicts.items() for result in results if result.number == number}


def assert_right(verdicts: Mapping[str, list[MutantVerdict]]) -> None:
    as_they_are = in_configs(verdicts, AS_IT_IS)
    assert as_they_are.keys() == verdicts.keys()
    assert {(each.verdict, each.message) for each in as_they_are.values()} == {("ok", "")}


def test_the_kernels_are_right_as_they_are(verdicts: Mapping[str, list[MutantVerdict]]) -> None:
    assert_right(verdicts)


@pytest.mark.parametrize("wrong", KERNELS)
def test_a_wrong_kernel_is_caught(wrong: str, verdicts: Mapping[str, list[MutantVerdict]]) -> None:
    by_config = in_configs(verdicts, list(KERNELS).index(wrong))
    survived = {config for config, each in by_config.items() if each.verdict == "ok"}
    assert by_config.keys() - survived, "no Config shows it"
    assert survived <= set(KERNELS[wrong].harmless)


@pytest.mark.long
def test_the_kernels_of_all_configs_are_right_as_they_are(all_verdicts: Mapping[str, list[MutantVerdict]]) -> None:
    assert_right(all_verdicts)


@pytest.mark.long
@pytest.mark.parametrize("wrong", KERNELS)
def test_a_wrong_kernel_is_caught_in_every_config(wrong: str, all_verdicts: Mapping[str, list[MutantVerdict]]) -> None:
    by_config = in_configs(all_verdicts, list(KERNELS).index(wrong))
    assert by_config.keys() - set(KERNELS[wrong].harmless), "no Config reaches it"
    survived = {config for config, each in by_config.items() if each.verdict == "ok"}
    assert survived == set(KERNELS[wrong].harmless)


@pytest.fixture(scope="module")
def epilogue_verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[tuple[str, ...], int], str]:
    """By chain of nodes, and number among EPILOGUES: of those that this run has."""
    texts = {"epilogue.cuh": header_text("epilogue.cuh")}
    wrong = [changed(texts, name, "epilogue.cuh", old, new) for name, (_, old, new) in EPILOGUES.items()]
    with header_changed("epilogue.cuh", with_switches(texts, wrong)["epilogue.cuh"]):
        chain_of = {
            list(EPILOGUES).index(row["wrong"]): EPILOGUES[row["wrong"]][0]
            for row in rows_using("epilogue_verdicts", request)
        }
        chains = list(dict.fromkeys(chain_of.values()))
        verdicts = verify_mutants(
            [matmul_kernel(epilogue=chain) for chain in chains],
            tmp_path_factory.mktemp("epilogues"),
            asked={number: [chains.index(chain)] for number, chain in chain_of.items()},
        )
    return {(chains[each.kernel], each.number): each.verdict for each in verdicts}


@contextmanager
def header_changed(path: str, text: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render_cpu, "header_text", lambda each: text if each == path else header_text(each))
        yield


@pytest.mark.parametrize("wrong", some_each_run(list(EPILOGUES), 9))
def test_a_wrong_epilogue_is_caught(wrong: str, epilogue_verdicts: Mapping[tuple[tuple[str, ...], int], str]) -> None:
    chain = EPILOGUES[wrong][0]
    assert epilogue_verdicts[chain, AS_IT_IS] == "ok"
    assert epilogue_verdicts[chain, list(EPILOGUES).index(wrong)] in ("incorrect", "runtime_error")


@pytest.fixture(scope="module")
def special_verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[str, int], str]:
    """By kernel, and number among SPECIAL_EPILOGUES: of those that this run has."""
    texts = {"epilogue.cuh": header_text("epilogue.cuh")}
    wrong = [changed(texts, name, "epilogue.cuh", old, new) for name, (_, old, new) in SPECIAL_EPILOGUES.items()]
    node_of = {
        list(SPECIAL_EPILOGUES).index(row["wrong"]): SPECIAL_EPILOGUES[row["wrong"]][0]
        for row in rows_using("special_verdicts", request)
    }
    nodes = list(dict.fromkeys(node_of.values()))
    kernels = [vectorised(node) if isinstance(node, str) else matmul_kernel(epilogue=node) for node in nodes]
    with header_changed("epilogue.cuh", with_switches(texts, wrong)["epilogue.cuh"]):
        asked = {number: [nodes.index(node)] for number, node in node_of.items()}
        verdicts = verify_mutants(kernels, tmp_path_factory.mktemp("special"), asked=asked)
    return {(str(nodes[each.kernel]), each.number): each.verdict for each in verdicts}


@pytest.mark.parametrize("wrong", some_each_run(list(SPECIAL_EPILOGUES), 7))
def test_an_epilogue_that_is_wrong_on_what_is_no_number_or_the_sign_of_a_zero_is_caught(
    wrong: str, special_verdicts: Mapping[tuple[str, int], str]
) -> None:
    node = str(SPECIAL_EPILOGUES[wrong][0])
    assert special_verdicts[node, AS_IT_IS] == "ok"
    assert special_verdicts[node, list(SPECIAL_EPILOGUES).index(wrong)] == "incorrect"
