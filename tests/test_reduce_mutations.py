"""Every barrier and bounds check of reduce's text is needed, and other wrong reductions are caught: the CPU execution
notices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from tests.mutant_runs import AS_IT_IS, MutantVerdict, judge_mutants
from tests.mutants import Site, changed, find_sites, mutants, switched_operator
from tests.reduce_kernels import kernel

ROW = {"inner": "reduced"}
COLUMN = {"inner": "kept", "align": 4}
BY_COLUMNS = {"algorithm": "column", "lanes": 8, "vector": 4, "threads": 64}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "rows of a warp": {"words": {**ROW, "align": 4, "fn": "mean"}, "vector": 4, "threads": 128},
    "rows of warps, in slices": {"words": {**ROW, "fn": "variance"}, "lanes": 64, "threads": 128, "split": "workspace"},
    "short rows": {"words": {**ROW, "fn": "logsumexp", "kept_axes": 2}, "lanes": 4},
    "argmax of rows": {"words": {**ROW, "fn": "argmax", "align": 8, "dtype": "float16"}, "lanes": 64, "vector": 8},
    "argmax of columns": {"words": {**COLUMN, "fn": "argmax", "reduced_axes": 2}, **BY_COLUMNS, "split": "workspace"},
    "columns": {"words": {**COLUMN, "epilogue": ["scale", "residual"]}, **BY_COLUMNS},
    "logsumexp of columns": {"words": {**COLUMN, "fn": "logsumexp"}, **BY_COLUMNS, "split": "workspace"},
    "variance of columns": {"words": {**COLUMN, "fn": "variance", "kept_axes": 3}, **BY_COLUMNS},
    "scattered columns": {
        "words": {**COLUMN, "kept_axes": 3, "scattered": True, "epilogue": ["scale", "residual"]}, **BY_COLUMNS,
    },
    "scattered rows, in slices": {
        "words": {**ROW, "kept_axes": 2, "scattered": True, "dtype": "float16"}, "lanes": 4, "split": "workspace",
    },
    "whole numbers": {"words": {**COLUMN, "dtype": "int32"}, **BY_COLUMNS, "split": "workspace"},
    "gelu's gradient": {"words": {**COLUMN, "map": "gelu_grad", "write_map": True}, **BY_COLUMNS, "split": "workspace"},
    "silu's gradient": {"words": {**ROW, "map": "silu_grad"}},
    "tanh's gradient": {"words": {**ROW, "map": "tanh_grad"}},
    "relu's gradient": {"words": {**ROW, "map": "relu_grad", "write_map": True, "dtype": "bfloat16"}},
}  # fmt: skip
OWN, SHARED = "kernel.cuh", "reduce.cuh"
_STATE = "(int64_t(i) * arguments.slices + slice)"
_MAPPED = "static_cast<Input*>(arguments.mapped) + batch.offset[u]"
_TAKE = "Fold<C>::take(states[i], column, first, depth);"
# What stands in the text, and what is wrong in its place.
WRONG: dict[str, tuple[str, str, str]] = {
    "an index that is not divided": (OWN, "(index - rest * along.extent[i])", "index"),
    "every slice is the first": (OWN, "static_cast<int>(blockIdx.y) * arguments.chunk", "0"),
    "a slice too long": (OWN, "begin + arguments.chunk", "begin + arguments.chunk + 1"),
    "the mean is a sum": (OWN, "C::fn == fn_mean ? divided(state.sum, arguments.count) : state.sum", "state.sum"),
    "nothing is divided by the count": (OWN, "sum / count", "sum"),
    "an index that counts vectors": (OWN, "(first + u * C::lanes) * C::vector", "(first + u * C::lanes)"),
    "a column's index that counts trips": (OWN, _TAKE, _TAKE.replace("depth", "1")),
    "states of the first slice": (OWN, _STATE, _STATE.replace("slice)", "y)")),
    "relu's gradient at 0": (OWN, "x <= 0.0f", "x < 0.0f"),
    "half of gelu's gradient": (OWN, "0.39894228040143268f", "0.0f"),
    "silu's gradient is sigmoid's": (OWN, "(1.0f + x * (1.0f - y))", "(1.0f - y)"),
    "tanh's gradient is not squared": (OWN, "1.0f - y * y", "1.0f - y"),
    "mapped values over the first vector": (OWN, _MAPPED, _MAPPED.replace("[u]", "[0]")),
    "axes merged whatever their strides": (OWN, "found.stride[merged] == found.extent[i] * found.stride[i]", "true"),
    "axes merged whatever their places": (OWN, "found.placed[merged] == found.extent[i] * found.placed[i]", "true"),
    "outputs in the order of the input": (OWN, "offset_along<C::kept_axes>(arguments.placed, first)", "first"),
    "scattered outputs side by side": (OWN, "arguments.placed.stride[C::kept_axes - 1]", "1"),
    "of equal values the last": (SHARED, "other.index < state.index", "other.index > state.index"),
    "a NaN is no maximum": (SHARED, "(is_nan(other.value) && !is_nan(state.value))", "false"),
    "a merged count is lost": (SHARED, "state.count = count;", "state.count = other.count;"),
    "distances of means do not count": (SHARED, "distance * distance * (state.count * share)", "0.0f"),
    "the mean does not move": (SHARED, "state.mean += distance * share;", "state.mean += 0.0f;"),
    "powers are not rescaled": (SHARED, "state.sum * power(-ahead)", "state.sum"),
    "smaller powers are not scaled": (SHARED, "other.sum * power(ahead)", "other.sum"),
    "the first warps' states": (SHARED, "warp / together * together", "0 * together"),
    "a column's own state twice": (SHARED, "half + thread", "thread"),
}  # fmt: skip


def kernels_of(name: str) -> dict[str, Kernel]:
    return {config: kernel(operator=name, **words) for config, words in CONFIGS.items()}


def sites() -> list[Site]:
    texts = operator("reduce").kernel_texts
    wrong = [changed(texts, name, file, old, new) for name, (file, old, new) in WRONG.items()]
    return [*find_sites(texts), *wrong]


def names() -> list[str]:
    return [one.name for one in mutants(sites())]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[MutantVerdict]:
    """Of every kernel as it is, and of every mutant in the kernels that reach it."""
    folder, name = tmp_path_factory.mktemp("mutants"), "reduce_mutants"
    with switched_operator("reduce", "Reduce", folder / "operator", name, sites()):
        return judge_mutants(list(kernels_of(name).values()), folder / "build")


def test_the_kernels_pass_as_they_are(verdicts: list[MutantVerdict]) -> None:
    configs = list(CONFIGS)
    found = {configs[one.kernel]: (one.verdict, one.message) for one in verdicts if one.number == AS_IT_IS}
    assert found == dict.fromkeys(configs, ("ok", ""))


@pytest.mark.parametrize("name", names())
def test_a_mutant_is_caught(name: str, verdicts: list[MutantVerdict]) -> None:
    number = names().index(name)
    found = [one for one in verdicts if one.number == number]
    assert found, f"no config reaches {name!r}: add one"
    assert any(one.verdict != "ok" for one in found), found


def test_a_missing_barrier_is_caught_in_every_config_that_reaches_it(verdicts: list[MutantVerdict]) -> None:
    barriers = [number for number, one in enumerate(mutants(sites())) if one.kind == "barrier"]
    assert len(barriers) == 2
    assert all(one.verdict != "ok" for one in verdicts if one.number in barriers)


def test_every_place_has_its_mutants() -> None:
    texts = operator("reduce").kernel_texts
    code = [line.partition("//")[0] for text in texts.values() for line in text.splitlines()]
    found = [one.kind for one in mutants(sites())]
    calls = sum(line.count("in_bounds(") for line in code if "__forceinline__" not in line)
    assert found.count("bounds") == 2 * calls == 12
    assert found.count("barrier") == sum(line.count("__syncthreads()") for line in code)
