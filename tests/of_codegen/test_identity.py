"""Every identity: what it depends on, axis by axis, and what must not matter."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st

from codegen.canonical import LARGEST_INTEGER, canonical_json, digest
from codegen.errors import CannotKey
from codegen.identity import (
    build_id,
    candidate_id,
    kernel_id,
    library_id,
    signature_id,
    slice_id,
    under_cuda,
    winner_key,
)
from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.schedule import Schedule
from codegen.text import render_group
from codegen.text.render_group import DEVICE_HEADERS, headers_digest, slice_digest
from tests.support.fixtures.codegen import EVERY_NODE, default_candidate, kernels, matmul

BASE: dict[str, Any] = {
    "m": 64, "n": 96, "k": 32, "batch": 2, "layout": "nn",
    "epilogue": [{"op": "bias", "axis": "n"}, {"op": "scale", "value": 2.0}, {"op": "clip", "lo": 0.0, "hi": 6.0}],
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"m": 65}, {"n": 100}, {"k": 33}, {"batch": 3}, {"layout": "nt"}, {"lda": 36}, {"ldb": 100}, {"ldc": 100},
        {"stride_a": 4096}, {"stride_b": 0}, {"stride_c": 8192}, {"epilogue": []},
        {"epilogue": [{"op": "bias", "axis": "m"}, *BASE["epilogue"][1:]]},
        {"epilogue": [BASE["epilogue"][0], {"op": "scale", "value": 2.5}, BASE["epilogue"][2]]},
        {"epilogue": BASE["epilogue"][::-1]}, {"allow_tf32": True}, {"dtype": "float16"}, {"dtype": "bfloat16"},
        {"dtype": "int8", "out_dtype": "float32"}, {"out_dtype": "float16"}, {"out_dtype": "bfloat16"},
    ],
)  # fmt: skip
def test_problem_digest_differs_on(change: dict[str, Any]) -> None:
    assert matmul(**BASE).digest != matmul(**{**BASE, **change}).digest


@pytest.mark.parametrize(
    "same",
    [
        dict(reversed(BASE.items())),
        {**BASE, "m": 64.0, "batch": 2.0},
        {**BASE, "dtype": "float32", "allow_tf32": False, "acc_dtype": "float32", "out_dtype": "float32"},
        {**BASE, "lda": 32, "ldb": 96, "ldc": 96, "stride_a": 2048, "stride_b": 3072, "stride_c": 6144},
        {**BASE, "lda": None, "stride_c": None},
        {**BASE, "acc_dtype": None, "out_dtype": None},
        {**BASE, "epilogue": [{"op": "bias"}, {"value": 2, "op": "scale"}, {"hi": 6, "lo": 0, "op": "clip"}]},
    ],
)
def test_problem_digest_ignores_spelling(same: dict[str, Any]) -> None:
    assert matmul(**BASE).digest == matmul(**same).digest


@pytest.mark.parametrize(
    ("problem", "found"),
    [
        (matmul(), "24c5f8761490cd1b85b7dcedffcfc8548eb38afcdee102e04ba844c899868022"),
        (matmul(**BASE), "8c6ba77cc474c1723be7910925bcff63382903dd473b8ec6ad19ee42d53de860"),
    ],
)
def test_fp32_problems_keep_the_digests_under_which_they_were_recorded(problem: MatmulProblem, found: str) -> None:
    assert problem.digest == found


def test_batch_strides_of_a_single_matrix_do_not_matter() -> None:
    assert matmul(batch=1, stride_a=9999, stride_c=5).digest == matmul().digest


def test_canonical_problem_parses_to_itself() -> None:
    problem = matmul(**BASE)
    assert operator("matmul").parse(json.loads(json.dumps(problem.canonical()))) == problem


SIGNATURE = {"layout": "nn", "epilogue": ["bias.n"], "align_a": 4}
TUNABLES = {"tile_m": 64, "tile_n": 32}


@pytest.mark.parametrize(
    "other",
    [
        ("conv2d", SIGNATURE, TUNABLES),
        ("matmul", {**SIGNATURE, "align_a": 1}, TUNABLES),
        ("matmul", {**SIGNATURE, "epilogue": ["bias.m"]}, TUNABLES),
        ("matmul", SIGNATURE, {**TUNABLES, "tile_m": 32}),
        ("matmul", SIGNATURE, {"tile_m": 64}),
    ],
)
def test_kernel_id_differs_on(other: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    assert kernel_id("matmul", SIGNATURE, TUNABLES) != kernel_id(*other)


@pytest.mark.parametrize(
    "other",
    [("conv2d", SIGNATURE), ("matmul", {**SIGNATURE, "align_a": 1}), ("matmul", {**SIGNATURE, "epilogue": ["bias.m"]})],
)
def test_signature_id_differs_on(other: tuple[str, dict[str, Any]]) -> None:
    assert signature_id("matmul", SIGNATURE) != signature_id(*other)


@pytest.mark.parametrize(
    "fields",
    [
        {"m": 68}, {"n": 128}, {"k": 128}, {"batch": 5}, {"lda": 68}, {"stride_b": 0, "batch": 2},
    ],
)  # fmt: skip
def test_kernel_id_ignores_extents_of_one_class(fields: dict[str, Any]) -> None:
    schedule = default_candidate(matmul()).schedule
    assert operator("matmul").candidate(matmul(**fields), schedule).kernel.id == default_candidate(matmul()).kernel.id


@pytest.mark.parametrize(
    "fields",
    [
        {"k": 63}, {"n": 63}, {"lda": 65}, {"ldb": 65}, {"ldc": 65}, {"batch": 2, "stride_a": 4097}, {"layout": "nt"},
        *({"epilogue": [node]} for node in EVERY_NODE), {"allow_tf32": True}, {"out_dtype": "float16"},
    ],
)  # fmt: skip
def test_kernel_id_differs_on_class_and_structure(fields: dict[str, Any]) -> None:
    schedule = default_candidate(matmul()).schedule
    assert operator("matmul").candidate(matmul(**fields), schedule).kernel.id != default_candidate(matmul()).kernel.id


def test_kernel_ids_of_all_epilogue_nodes_differ() -> None:
    schedule = default_candidate(matmul()).schedule
    ids = {operator("matmul").candidate(matmul(epilogue=[node]), schedule).kernel.id for node in EVERY_NODE}
    assert len(ids) == len(EVERY_NODE)


def test_epilogue_scalars_and_raster_do_not_change_the_kernel() -> None:
    candidate = default_candidate(matmul(epilogue=[{"op": "scale", "value": 1.5}]))
    two = default_candidate(matmul(epilogue=[{"op": "scale", "value": 3.0}]), raster=8)
    assert candidate.kernel == two.kernel
    assert candidate.kernel.id == two.kernel.id


@pytest.mark.parametrize("name", ["tile_m", "tile_n", "tile_k", "thread_m", "thread_n", "warp_m", "stages",
                                  "fragments", "padding", "unroll_k", "min_blocks", "raster"])  # fmt: skip
def test_candidate_id_differs_on_every_tunable(name: str) -> None:
    base = default_candidate(matmul())
    value = int(base.schedule.get(name))
    assert default_candidate(matmul(), **{name: value + 1}).id != base.id


def test_candidate_id_differs_on_the_problem() -> None:
    assert candidate_id("a", TUNABLES) != candidate_id("b", TUNABLES)
    assert candidate_id("a", TUNABLES) == candidate_id("a", dict(reversed(TUNABLES.items())))


@pytest.mark.parametrize("axis", range(4))
def test_build_id_differs_on_each_part(axis: int) -> None:
    parts = ["kernel", "slice", "toolchain", "sm_90a"]
    changed = [*parts[:axis], "other", *parts[axis + 1 :]]
    assert build_id(*parts) == build_id(*parts)
    assert build_id(*parts) != build_id(*changed)


def test_parts_are_labelled_so_that_they_cannot_be_exchanged() -> None:
    assert build_id("x", "y", "t", "a") != build_id("y", "x", "t", "a")
    assert slice_id("x", "y") != slice_id("y", "x")
    assert digest("a", 1, part="x") != digest("b", 1, part="x") != digest("b", 2, part="x")


@pytest.mark.parametrize("axis", range(3))
def test_winner_key_differs_on_each_part(axis: int) -> None:
    parts = ["problem", "sm_90a", "NVIDIA H100 80GB HBM3"]
    assert winner_key(*parts) != winner_key(*[*parts[:axis], "other", *parts[axis + 1 :]])


def test_slice_digest_differs_per_kernel_and_not_per_group() -> None:
    several = kernels(5)
    assert len({slice_digest(kernel) for kernel in several}) == 5
    again = Kernel.from_json(json.loads(json.dumps(several[0].to_json())))
    assert slice_digest(again) == slice_digest(several[0])


@pytest.mark.parametrize("changed", [*DEVICE_HEADERS, "the operator's own"])
def test_slice_digest_differs_on_each_header(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels(1)[0]
    before = slice_digest(kernel)
    for remembered in (slice_digest, headers_digest):
        remembered.cache_clear()
    with monkeypatch.context() as patch:
        for name in ("header_text", "operator_text"):
            text_of = getattr(render_group, name)
            of = changed if name == "header_text" else kernel.operator
            more = "// more\n" if name == "header_text" or changed not in DEVICE_HEADERS else ""
            patch.setattr(render_group, name, lambda each, t=text_of, o=of, m=more: t(each) + (m if each == o else ""))
        assert slice_digest(kernel) != before
    for remembered in (slice_digest, headers_digest):
        remembered.cache_clear()
    assert slice_digest(kernel) == before


def test_kernels_survive_json() -> None:
    candidate = default_candidate(matmul(**BASE))
    again = Kernel.from_json(json.loads(json.dumps(candidate.kernel.to_json())))
    assert (again, again.id, hash(again)) == (candidate.kernel, candidate.kernel.id, hash(candidate.kernel))


def test_schedules_are_ordered_by_content() -> None:
    small, large = Schedule.of({"b": 1, "a": 1}), Schedule.of({"a": 1, "b": 2})
    assert small < large
    assert small.as_dict() == {"a": 1, "b": 1}
    assert small.only(frozenset({"b"})) == Schedule.of({"b": 1})
    with pytest.raises(KeyError, match="it has a, b"):
        small.get("c")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (math.nan, "nan"), (math.inf, "inf"), ({1, 2}, "set"), (object(), "object"), (b"x", "bytes"),
        (LARGEST_INTEGER + 1, str(LARGEST_INTEGER + 1)), ({1: 2}, "only strings"), ("\ud800", "surrogate"),
        ([[{"deep": math.nan}]], r"\$\.value\[0\]\[0\]\.deep"),
    ],
)  # fmt: skip
def test_what_cannot_be_keyed_is_refused(value: Any, named: str) -> None:
    with pytest.raises(CannotKey, match=named):
        canonical_json({"value": value})


def test_a_digest_of_nothing_is_refused() -> None:
    with pytest.raises(CannotKey, match="at least one part"):
        digest("empty", 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-LARGEST_INTEGER, LARGEST_INTEGER) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-LARGEST_INTEGER, LARGEST_INTEGER) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="ascii")), inner),
    max_leaves=8,
)


@given(JSON | PLAIN)
@example({'\x00\x1f\x7f\b\f\n\r\t"\\/': '\x00\x1f\x7f\b\f\n\r\t"\\/\u2028é\U0001f600'})
@example({"\U0001f600": 1, "\uffff": 2})  # in UTF-16, as RFC 8785 sorts, the first comes first
def test_canonical_json_is_rfc_8785_whichever_encoder_writes_it(value: Any) -> None:
    assert canonical_json(value) == rfc8785.dumps(value)


@given(JSON)
def test_canonical_json_is_a_fixed_point(value: Any) -> None:
    once = canonical_json(value)
    # Doubles beyond 2^53 come back as integers that have no canonical form of their own: read them as doubles.
    assert (
        canonical_json(
            json.loads(once, parse_int=lambda text: int(text) if abs(int(text)) <= LARGEST_INTEGER else float(text))
        )
        == once
    )


LIBRARY = {"slice_digest": "a" * 64, "host": "b" * 64, "toolchain": "c" * 64, "target": "sm_90a"}


@pytest.mark.parametrize("axis", LIBRARY)
def test_library_id_differs_on(axis: str) -> None:
    assert library_id(**LIBRARY) != library_id(**{**LIBRARY, axis: "d" * 64})


def test_winners_of_each_cuda_have_keys_of_their_own_and_those_of_13_the_keys_that_they_had() -> None:
    parts = ("0" * 64, "sm_90a", "predicted:sm_90a")
    assert winner_key(*parts) == winner_key(*parts, 13) == digest(
        "winner", 1, problem=parts[0], architecture=parts[1], device_class=parts[2]
    )  # fmt: skip
    assert winner_key(*parts, 12) != winner_key(*parts)
    assert under_cuda("1" * 64, 13) == "1" * 64 != under_cuda("1" * 64, 12) != under_cuda("2" * 64, 12)
