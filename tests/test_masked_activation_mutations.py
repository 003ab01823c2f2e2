"""Every barrier and bounds check of masked_activation is needed, and other wrong kernels are caught: the CPU execution
notices. The choice between the two functions is that of an epilogue: tests/test_wrong_kernels.py."""

from __future__ import annotations

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from tests.masked_kernels import gather_scatter, vectorised
from tests.mutant_runs import AS_IT_IS, MutantVerdict, judge_mutants
from tests.mutants import Site, changed, find_sites, mutants, switched_operator

FILE = "kernel.cuh"
BYTE = "load_global<1>(static_cast<const unsigned char*>(arguments.epilogue.tensors[0]) + first + i).data[0]"
PLACE, CLEAR = "int64_t(blockIdx.x) * (C::threads * C::loads)", "arguments.epilogue.scalars + Own::Set::scalars"
MASK = "Parts<typename C::Epilogue>::Node::template read_mask<N>(arguments.epilogue.tensors[0]"
# What stands in the text, and what is wrong in its place.
WRONG: dict[str, tuple[str, str]] = {
    "every block is the first": (PLACE, f"0 * {PLACE}"),
    "the functions of the wrong place": (f"{MASK}, first)", f"{MASK}, first + N)"),
    "scalars of the other function": (CLEAR, "arguments.epilogue.scalars"),
    "words of the lane before": ("first / word_bits", "first / word_bits / 2"),
    "one bit of a byte": (f"{BYTE} != 0 ? 1u : 0u", f"{BYTE} & 1u"),
    "lanes do not add up": ("if (lane >= distance) before += other;", "if (lane >= distance) before += 0;"),
    "warps do not add up": (
        "before += load_shared<1>(of_warps + other).data[0];", "before += 0 * load_shared<1>(of_warps + other).data[0];"
    ),
    "the last element of a list is lost": ("before + own", "before + own - 1"),
    "indices within the word": ("static_cast<int>(first + i)", "i"),
}  # fmt: skip


def kernels_of(name: str) -> list[Kernel]:
    return [
        vectorised("bits.polynomial2.polynomial3", "float16", name, loads=2),
        vectorised("bytes.square.relu", "float32", name, vector=2, loads=1),
        gather_scatter("bits.polynomial2.polynomial3", "float32", name),
        gather_scatter("bytes.square.relu", "bfloat16", name),
    ]


def own_sites() -> list[Site]:
    texts = operator("masked_activation").kernel_texts
    wrong = [changed(texts, name, FILE, old, new) for name, (old, new) in WRONG.items()]
    return [*find_sites(texts), *wrong]


def names() -> list[str]:
    return [one.name for one in mutants(own_sites())]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[MutantVerdict]:
    """Of every kernel as it is, and of every mutant in the kernels that reach it."""
    folder, name = tmp_path_factory.mktemp("mutants"), "masked_mutants"
    with switched_operator("masked_activation", "MaskedActivation", folder / "operator", name, own_sites()):
        return judge_mutants(kernels_of(name), folder / "build")


def test_the_kernels_pass_as_they_are(verdicts: list[MutantVerdict]) -> None:
    found = [(one.verdict, one.message) for one in verdicts if one.number == AS_IT_IS]
    assert found == [("ok", "")] * len(kernels_of("masked_activation"))


@pytest.mark.parametrize("name", names())
def test_a_mutant_is_caught(name: str, verdicts: list[MutantVerdict]) -> None:
    found = [one for one in verdicts if one.number == names().index(name)]
    assert found, f"no config reaches {name!r}: add one"
    assert any(one.verdict != "ok" for one in found), found


def test_a_missing_barrier_is_caught_in_every_config_that_reaches_it(verdicts: list[MutantVerdict]) -> None:
    barriers = [number for number, one in enumerate(mutants(own_sites())) if one.kind == "barrier"]
    assert len(barriers) == 1
    assert all(one.verdict != "ok" for one in verdicts if one.number in barriers)
