"""Every barrier and bounds check of the code of rows is needed, and other wrong kernels are caught: the CPU execution
notices. Mutated are `codegen/device/rows.cuh` and the text of softmax and of the norms; that of `reduce.cuh` where it
has a barrier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from tests.mutant_runs import AS_IT_IS, MutantVerdict, judge_mutants
from tests.mutants import Site, changed, find_sites, mutants, switched_operator
from tests.row_kernels import OPERATORS, kernel

CLASSES = {"softmax": "Softmax", "layer_norm": "LayerNorm", "rms_norm": "RmsNorm"}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "registers": {"schedule": "registers, a warp", "dtype": "float16", "align": 4},
    "shared": {"schedule": "shared, two warps of four", "dtype": "float32", "out_dtype": "float16"},
    "online": {"schedule": "online, a block", "dtype": "bfloat16", "out_dtype": "float32", "align": 1},
}
REDUCE, ROWS, OWN = "reduce.cuh", "rows.cuh", "kernel.cuh"
SUM_OF_VALUES = "rows::sum_of<C>(part, 0, [](const Values& values) { return values; })"
LAST_POWER = "C::algorithm == rows::in_registers ? values.data[i] : cukiln::exp(values.data[i]"
ABOUT_ORIGIN = "-distance, distance, own.squares / columns"
VECTOR, OF_ROWS = "static_cast<const typename C::Input*>(vector)", "shared_by_rows<C>"
FOLLOWING = "static_cast<unsigned>(step) * C::row_threads"
# By operator and file: what stands in the text, and what is wrong in its place. What operators share is mutated in one.
WRONG: dict[str, dict[str, tuple[str, str, str]]] = {
    "softmax": {
        "nothing is subtracted in the sum": (
            OWN,
            "powers.data[i] = cukiln::exp(values.data[i] - greatest);",
            "powers.data[i] = cukiln::exp(values.data[i]);",
        ),
        "nothing is subtracted at last": (OWN, f"{LAST_POWER} - greatest)", f"{LAST_POWER})"),
        "weights are not divided": (OWN, "1.0f / sum", "1.0f"),
    },
    "layer_norm": {
        "every row is the first": (ROWS, "row * given.columns", "0 * row"),
        "the vectors of a thread lie together": (ROWS, FOLLOWING, "static_cast<unsigned>(step > 0 ? step - 1 : 0)"),
        "results one vector further": (ROWS, "offset + at + i", "offset + (at ^ C::vector) + i"),
        "all reductions by the same words": (ROWS, "which * state_words<C>", "0 * which"),
        "epsilon is forgotten": (ROWS, "square + arguments.epsilon", "square"),
        "gamma and beta of the first columns": (ROWS, f"{VECTOR} + column", VECTOR),
        "gamma for beta": (ROWS, f"{OF_ROWS}(arguments.beta, column)", f"{OF_ROWS}(arguments.gamma, column)"),
        "the mean is the sum": (OWN, f"{SUM_OF_VALUES} / columns", SUM_OF_VALUES),
        "the squares about the origin": (OWN, f"cukiln::fma({ABOUT_ORIGIN})", "own.squares / columns"),
        "the mean without the origin": (OWN, "origin + distance", "distance"),
        "squares of other threads are lost": (OWN, "state.squares += other.squares;", "state.squares += 0.0f;"),
        "distances of other threads are lost": (OWN, "state.sum += other.sum;", "state.sum += 0.0f;"),
    },
    "rms_norm": {"the sum of the squares": (OWN, "sum / static_cast<float>(arguments.columns)", "sum")},
}


def kernels_of(name: str, as_operator: str) -> dict[str, Kernel]:
    return {config: kernel(name, operator_name=as_operator, **words) for config, words in CONFIGS.items()}


def own_sites(name: str) -> list[Site]:
    texts = operator(name).kernel_texts
    files = (ROWS, OWN) if name == "layer_norm" else (OWN,)
    found = find_sites({file: texts[file] for file in files})
    if name == "layer_norm":
        # Of the reductions that others use, too, the one that rows have.
        found.append(next(site for site in find_sites({REDUCE: texts[REDUCE]}) if site.kind == "barrier"))
    return [*found, *(changed(texts, one, file, old, new) for one, (file, old, new) in WRONG[name].items())]


EVERY = [(name, one.name) for name in OPERATORS for one in mutants(own_sites(name))]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[MutantVerdict]]:
    """By operator: of every kernel as it is, and of every mutant in the kernels that reach it."""
    found = {}
    for name in OPERATORS:
        folder, switched = tmp_path_factory.mktemp(name), f"{name}_mutants"
        with switched_operator(name, CLASSES[name], folder / "operator", switched, own_sites(name)):
            found[name] = judge_mutants(list(kernels_of(name, switched).values()), folder / "build")
    return found


@pytest.mark.parametrize("name", OPERATORS)
def test_the_kernels_pass_as_they_are(name: str, verdicts: dict[str, list[MutantVerdict]]) -> None:
    found = [(one.verdict, one.message) for one in verdicts[name] if one.number == AS_IT_IS]
    assert found == [("ok", "")] * len(CONFIGS)


@pytest.mark.parametrize(("name", "mutant"), EVERY)
def test_a_mutant_is_caught(name: str, mutant: str, verdicts: dict[str, list[MutantVerdict]]) -> None:
    number = [one.name for one in mutants(own_sites(name))].index(mutant)
    found = [one for one in verdicts[name] if one.number == number]
    assert found, f"no config reaches {mutant!r}: add one"
    assert any(one.verdict != "ok" for one in found), found


def test_a_missing_barrier_is_caught_in_every_config_that_reaches_it(verdicts: dict[str, list[MutantVerdict]]) -> None:
    barriers = [number for number, one in enumerate(mutants(own_sites("layer_norm"))) if one.kind == "barrier"]
    assert len(barriers) == 1
    assert all(one.verdict != "ok" for one in verdicts["layer_norm"] if one.number in barriers)
