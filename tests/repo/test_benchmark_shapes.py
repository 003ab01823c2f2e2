"""The benchmarks run what they say: the public shapes, and candidates of every kind."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks import bench_kernels
from benchmarks.bench_verify_cpu import FAMILIES, sample
from benchmarks.shapes import GRADIENTS, SOURCES, every_shape, public_shape, shape_sets, shapes_of, stored_sets
from codegen.lower import lower
from codegen.operators import operator, operators
from codegen.search.search import Search
from codegen.targets import target


def test_a_public_shape_is_found_by_its_name_alone() -> None:
    names = [problem["name"] for problems in shape_sets().values() for problem in problems]
    assert len(names) == len(set(names))
    assert public_shape("bert_base/ffn1")["n"] == 3072
    with pytest.raises(KeyError):
        public_shape("bert_base/ffn3")


def test_kernels_of_every_public_shape_are_measured_gradients_too() -> None:
    names = [each["name"] for each in every_shape()]
    assert len(names) == len(set(names))
    measured = bench_kernels.matching_shapes("*")
    assert measured == [each for each in every_shape() if each["operator"] in operators()]
    assert {each["operator"] for each in measured} >= {
        *(operator for operator, _ in GRADIENTS.values()), "conv2d", "matmul", "reduce", "masked_activation",
    }  # fmt: skip
    found = {shape["operator"] for shape in bench_kernels.matching_shapes("resnet50/b256/*")}
    assert found == {"conv2d", "conv2d_dgrad", "conv2d_wgrad"}


def test_the_public_matmuls_are_those_of_three_sets() -> None:
    counts: dict[str, int] = {}
    for problem in shapes_of("matmul"):
        set_name = problem["name"].partition("/")[0]
        counts[set_name] = counts.get(set_name, 0) + 1
    assert counts == {"bert_base": 6, "llama3_8b": 24, "square": 12}


def test_every_public_convolution_has_its_gradient_of_the_image() -> None:
    forward, gradients = shapes_of("conv2d"), shapes_of("conv2d_dgrad")
    assert len(forward) == len(gradients) > 50
    shape = public_shape("resnet18/b8/s1_down3x3/dgrad")
    assert {**shape, "operator": "conv2d"} == public_shape("resnet18/b8/s1_down3x3")


@pytest.mark.parametrize("problem", shapes_of("matmul"), ids=lambda problem: problem["name"])
def test_a_public_matmul_has_schedules_at_level_1(problem: dict[str, Any]) -> None:
    fields = {name: value for name, value in problem.items() if name != "name"}
    assert lower(operator("matmul").parse(fields), target("sm_90a"), Search(level=1, limit=8)).why_empty is None


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_of_verifications_has_distinct_kernels_of_its_kind(name: str) -> None:
    family, kernels = FAMILIES[name], sample(FAMILIES[name], 6)
    assert len({kernel.id for kernel in kernels}) == 6
    on_tensor_cores = {kernel.operator == "attention" or "mma_k" in kernel.tunables.as_dict() for kernel in kernels}
    assert on_tensor_cores == {family.tensor_cores}
    if family.splits:
        assert {kernel.tunables.get("split") for kernel in kernels} == set(family.splits)


def test_every_public_convolution_has_the_gradient_of_its_filters_in_fp32_and_in_fp16() -> None:
    forward, gradients = shapes_of("conv2d"), shapes_of("conv2d_wgrad")
    assert 2 * len(forward) == len(gradients) > 100
    narrow = public_shape("resnet18/b8/s1_down3x3/wgrad_fp16")
    assert {**narrow, "operator": "conv2d"} == public_shape("resnet18/b8/s1_down3x3")
    shape = public_shape("resnet18/b8/s1_down3x3/wgrad")
    assert shape["out_dtype"] == "float32"
    assert {**shape, "operator": "conv2d", "out_dtype": "float16"} == public_shape("resnet18/b8/s1_down3x3")


ROWS_AND_MASKED = [*shape_sets()["rows"], *shape_sets()["masked"]]


@pytest.mark.parametrize("problem", ROWS_AND_MASKED, ids=lambda problem: problem["name"])
def test_public_rows_and_masked_activations_have_every_algorithm_of_level_1(problem: dict[str, Any]) -> None:
    own = operator(problem["operator"])
    candidates = lower(own.parse(public_shape(problem["name"])), target("sm_90a"), Search(level=1)).candidates
    algorithms = {each.schedule.get("algorithm") for each in candidates}
    if problem["operator"] == "masked_activation":
        assert algorithms == {"vectorised", "gather_scatter"}
    elif problem["name"] == "llama3_8b/vocabulary":  # longer than registers or shared memory hold
        assert algorithms == {"online"}
    else:
        assert algorithms == {"registers", "shared", "online"}


SERVED = stored_sets()["served_attention"]
OF_FLASHINFER = [entry for entry in SERVED if entry["name"].startswith("flashinfer/")]


@pytest.mark.parametrize("problem", [*shapes_of("attention"), *shapes_of("mla")], ids=lambda problem: problem["name"])
def test_a_public_attention_is_a_request_with_schedules_at_level_1(problem: dict[str, Any]) -> None:
    own = operator(problem["operator"])
    lowered = lower(own.parse(public_shape(problem["name"])), target("sm_90a"), Search(level=1, limit=8))
    assert lowered.why_empty is None


def test_every_operators_public_shapes_are_requests() -> None:
    for problem in every_shape():
        operator(problem["operator"]).parse(public_shape(problem["name"]))


def test_attention_of_servers_is_of_at_least_30_definitions_of_all_kinds() -> None:
    assert len({entry["source"] for entry in OF_FLASHINFER}) >= 30
    assert {lengths_of(entry) for entry in SERVED} == {"dense", "ragged", "paged", "mla_paged"}
    assert {entry["page_size"] for entry in SERVED if "page_size" in entry} == {1, 16, 64}
    dense = [entry for entry in SERVED if lengths_of(entry) == "dense"]
    assert {entry["seq_q"] == 1 for entry in dense} == {True, False}
    assert {entry["heads_q"] == entry["heads_kv"] for entry in dense} == {True, False}


def lengths_of(entry: dict[str, Any]) -> str:
    """How sequences lie in memory."""
    return "mla_paged" if entry["operator"] == "mla" else str(entry.get("lengths", "dense"))


def test_the_lengths_of_recorded_calls_add_up() -> None:
    recorded = {entry["name"]: entry for entry in SERVED}
    prompts = recorded["flashinfer/gqa_ragged_prefill_causal_h32_kv8_d128"]
    assert sum(prompts["q_lengths"]) == sum(prompts["kv_lengths"]) == 12_845
    assert sum(recorded["flashinfer/gqa_paged_decode_h32_kv8_d128_ps64"]["kv_lengths"]) == 58_966


@pytest.mark.parametrize("entry", SERVED, ids=lambda entry: entry["name"])
def test_the_attention_of_servers_is_that_of_its_source(entry: dict[str, Any]) -> None:
    origin, name, *_ = entry["name"].split("/")
    assert origin in SOURCES
    if origin == "flashinfer":
        assert entry["source"].endswith(f"/{name}.json"), "the definition's name is that of its file"
    # What a definition's name says, such as gqa_paged_prefill_causal_h32_kv8_d128_ps64.
    said = {key: int(number) for key, number in re.findall(r"_(h|kv|d|ckv|kpe|qk|vo|ps)(\d+)", name)}
    own = {"h": "heads_q", "kv": "heads_kv", "ckv": "head_dim_ckv", "kpe": "head_dim_kpe", "qk": "head_dim_qk",
           "vo": "head_dim_vo", "d": "head_dim_qk", "ps": "page_size"}  # fmt: skip
    lengths = lengths_of(entry)
    if lengths == "dense":
        said.pop("ps", None)
    assert {key: entry[own[key]] for key in said} == said
    assert "d" not in said or entry["head_dim_vo"] == said["d"]
    assert entry["causal"] is ("prefill" in name)
    assert lengths == "dense" or lengths in name
