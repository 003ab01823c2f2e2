"""Kernels that are right only on tame numbers or short sums are caught, in every dtype and algorithm: without a
maximum, with variances that cancel, without an epsilon, without the NaN that an operator's page promises, with few
slices or few steps, with offsets in 32 bits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.plan.verification_plan import check_output
from codegen.run_once import of_purpose
from codegen.search.schedule import Schedule
from tests.mutants.subjects import SUBJECTS
from tests.operators.attention import kernels as attentions
from tests.operators.harness.every_operator import DECLARED
from tests.operators.harness.verifications import seconds
from tests.operators.mla import kernels as latents
from tests.operators.rows.kernels import kernel as row_kernel
from tests.support.kernels.cpu_helpers import matmul_kernel, tensor_kernel
from tests.support.kernels.mutant_runs import AS_IT_IS, verify_mutants
from tests.support.kernels.mutants import changed, mutants, switched_operator
from tests.support.kernels.random_cases import seed_of_this_run
from tests.support.run.each_run import SOME_ROWS, rows_using

OWN, ROWS, FOLDS = "kernel.cuh", "rows.cuh", "reduce.cuh"
ELEMENTS = "static_cast<const typename C::Element*>(arguments.x)"
DTYPES = ("float32", "float16", "bfloat16")
IN_TWO_PASSES = ("registers, a warp", "registers, a thread", "shared, two warps of four")
ONLINE = ("online, a warp", "online, a block")


@dataclass(frozen=True)
class Unstable:
    """`text`: file, what stands there, what is wrong in its place. Each of `kernels` must show it."""

    operator: str
    text: tuple[str, str, str]
    kernels: Mapping[str, Kernel] = field(hash=False)


def rows_of(name: str, schedules: tuple[str, ...], dtypes: tuple[str, ...] = DTYPES) -> dict[str, Kernel]:
    return {
        f"{schedule}, {dtype}": row_kernel(name, schedule, dtype, scale=False, shift=False)
        for schedule in schedules
        for dtype in dtypes
    }


def reductions(fn: str, **changes: Any) -> dict[str, Kernel]:
    """By rows and by columns, whole and in slices."""
    kernels = {}
    for dtype in DTYPES:
        for inner, tunables in (
            ("reduced", {"algorithm": "row", "lanes": 32, "vector": 1, "threads": 64}),
            ("kept", {"algorithm": "column", "lanes": 8, "vector": 1, "threads": 64}),
        ):
            for split in ("none", "workspace"):
                signature = {
                    "dtype": dtype, "out_dtype": dtype, "fn": fn, "map": "identity", "write_map": False, "epilogue": [],
                    "inner": inner, "align": 1, "scattered": False, "kept_axes": 1, "reduced_axes": 1, **changes,
                }  # fmt: skip
                schedule = Schedule.of({**tunables, "unroll": 2, "split": split})
                kernels[f"{inner}, {split}, {dtype}"] = Kernel.of("reduce", signature, schedule)
    return kernels


def a_block_for_a_row(fn: str, dtypes: tuple[str, ...] = DTYPES) -> dict[str, Kernel]:
    """Whose plans would have few outputs by the numbers of their threads."""
    return {
        f"{name}, a block for a row": Kernel.of(
            "reduce", kernel.signature_dict, Schedule.of({**kernel.tunables.as_dict(), "lanes": 64})
        )
        for name, kernel in reductions(fn).items()
        if name.startswith("reduced") and name.endswith(dtypes)
    }


def reaching_far(name: str, most: int, words: str = "") -> dict[str, Kernel]:
    """So many of the declared kernels whose plan reaches beyond 32 bits, with `words` in their names."""
    declared, own = DECLARED[name].verifications, operator(name)
    assert declared is not None
    kernels = {called: kernel for called, kernel in declared.kernels().items() if words in called}
    far = {called: kernel for called, kernel in kernels.items() if of_purpose(own.run_once(kernel), "far")}
    return dict(list(far.items())[:: -(-len(far) // most)])


def strided(most: int) -> dict[str, Kernel]:
    """So many of the declared gradients of images with a stride, all of whose outputs a kernel computes."""
    declared = DECLARED["conv2d_dgrad"].verifications
    assert declared is not None
    kernels = {called: kernel for called, kernel in declared.kernels().items() if kernel.signature_dict["strided"]}
    return dict(list(kernels.items())[:: -(-len(kernels) // most)])


(WINOGRAD,) = [subject.kernels() for subject in SUBJECTS if subject.name == "conv2d by Winograd"]
CASES = {
    "softmax subtracts no maximum": Unstable(
        "softmax",
        (OWN, "greatest = rows::of_row<C, Greatest>(own, 0).value;", "greatest = 0.0f;"),
        rows_of("softmax", IN_TWO_PASSES),
    ),
    "softmax makes no NaN of an infinity": Unstable(
        "softmax", (OWN, "own.sum + (greatest - greatest)", "own.sum"), rows_of("softmax", ONLINE)
    ),
    "layer_norm is content with an outlier for an origin": Unstable(
        # Of bfloat16's 8 bits it loses one, and not with every seed.
        "layer_norm",
        (OWN, "furthest * variance", "3e38f * variance"),
        rows_of("layer_norm", ONLINE, ("float32", "float16")),
    ),
    "layer_norm cancels its squares": Unstable(
        "layer_norm",
        (OWN, "(values.data[i] - mean) * (values.data[i] - mean)", "values.data[i] * values.data[i] - mean * mean"),
        rows_of("layer_norm", IN_TWO_PASSES[:1], ("float32",)),
    ),
    "layer_norm forgets epsilon": Unstable(
        "layer_norm", (ROWS, "square + arguments.epsilon", "square"), rows_of("layer_norm", (*IN_TWO_PASSES, *ONLINE))
    ),
    "rms_norm forgets epsilon": Unstable(
        "rms_norm", (ROWS, "square + arguments.epsilon", "square"), rows_of("rms_norm", (*IN_TWO_PASSES, *ONLINE))
    ),
    **{
        f"{name} rounds what lies halfway away from 0": Unstable(
            name,
            (ROWS, "from_float<Out>(values.data[i + j])", "from_float<Out>(values.data[i + j] * 1.00000012f)"),
            {
                f"{schedule}, {dtype}": row_kernel(name, schedule, dtype)
                for schedule, dtype in (("registers, a warp", "bfloat16"), ("online, a block", "float16"))
            },
        )
        for name in ("layer_norm", "rms_norm")
    },
    "max loses NaN": Unstable(
        "reduce", (FOLDS, "beyond || is_nan(other.value)", "beyond"), reductions("max")
    ),
    "min loses NaN": Unstable(
        "reduce", (FOLDS, "beyond || is_nan(other.value)", "beyond"), reductions("min")
    ),
    "max begins at -1,000": Unstable(
        "reduce",
        (
            FOLDS,
            "return {greatest ? Ends<T>::least() : Ends<T>::greatest()};",
            "return {greatest ? static_cast<T>(-1000) : Ends<T>::greatest()};",
        ),
        reductions("max"),
    ),
    "max begins at a number": Unstable(
        "reduce",
        (
            FOLDS,
            "return {greatest ? Ends<T>::least() : Ends<T>::greatest()};",
            "return {greatest ? static_cast<T>(-3.0e38f) : Ends<T>::greatest()};",
        ),
        a_block_for_a_row("max", ("float32", "bfloat16")),
    ),
    "min begins at a number": Unstable(
        "reduce",
        (
            FOLDS,
            "return {greatest ? Ends<T>::least() : Ends<T>::greatest()};",
            "return {greatest ? Ends<T>::least() : static_cast<T>(3.0e38f)};",
        ),
        a_block_for_a_row("min", ("float32", "bfloat16")),
    ),
    "logsumexp makes NaN of an infinity": Unstable(
        "reduce",
        (FOLDS, "power(distance(values.data[i], greatest))", "power(values.data[i] - greatest)"),
        a_block_for_a_row("logsumexp"),
    ),
    "softmax's small weights are 0": Unstable(
        "softmax",
        (
            OWN,
            "values.data[i] = power * share;",
            "values.data[i] = power > 0.0f && power < 1e-26f ? 0.0f : power * share;",
        ),
        rows_of("softmax", (*IN_TWO_PASSES, *ONLINE), ("float32", "bfloat16")),
    ),
    "relu's gradient is a product": Unstable(
        "reduce",
        (OWN, "x <= 0.0f ? 0.0f : value", "(x <= 0.0f ? 0.0f : 1.0f) * value"),
        {
            **reductions("sum", map="relu_grad"),
            **{f"{name}, dx": kernel for name, kernel in reductions("max", map="relu_grad", write_map=True).items()},
        },
    ),
    "relu's gradient takes NaN for 0": Unstable(
        "reduce", (OWN, "x <= 0.0f", "!(x > 0.0f)"), reductions("sum", map="relu_grad")
    ),
    "matmul adds 8 slices": Unstable(
        "matmul",
        ("gemm/split.cuh", "slice < slices", "slice < (slices < 8 ? slices : 8)"),
        {
            "fp16": tensor_kernel(split="workspace"),
            "bfloat16": tensor_kernel("nn", "bfloat16", split="workspace"),
        },
    ),
    "matmul loses the tenth step": Unstable(
        "matmul",
        (
            "gemm/tensor.cuh",
            "warp.accumulate(stage_at<Feed>(shared, reading));",
            "if (step != 9) warp.accumulate(stage_at<Feed>(shared, reading));",
        ),
        {
            f"{dtype}, {stages} stages": tensor_kernel(dtype=dtype, stages=stages, fragments=1)
            for dtype in ("float16", "float32")
            for stages in (2, 4)
        },
    ),
    "attention weighs six tiles": Unstable(
        "attention",
        (OWN, "warp.weigh(arguments);", "if (tile < 6) warp.weigh(arguments);"),
        {
            "dense": attentions.kernel("bfloat16"),
            "ragged": attentions.kernel(ragged=True),
            "pages, three stages": attentions.kernel(page_size=16, tile_kv=16, stages=3),
        },
    ),
    "mla weighs six tiles": Unstable(
        "mla",
        (OWN, "warp.weigh(arguments, exchange, weights);", "if (tile < 6) warp.weigh(arguments, exchange, weights);"),
        {"one query": latents.kernel(page_size=1), "ragged": latents.kernel("bfloat16", ragged=True)},
    ),
    **{
        f"{name} merges a hundred splits": Unstable(
            name,
            (
                "attention/merge_rows.cuh",
                "total = cukiln::fma(factor, own.data[1], total);",
                "total = split < 100 ? cukiln::fma(factor, own.data[1], total) : total;",
            ),
            {
                called: kernel(ragged=called == "ragged", split="workspace")
                for called in ("one query" if name == "mla" else "dense", "ragged")
            },
        )
        for name, kernel in (("attention", attentions.kernel), ("mla", latents.kernel))
    },
    "a phase of the first tap alone begins with the first row": Unstable(
        "conv2d_dgrad",
        (
            "phases.cuh",
            "(last * along.dilation - along.padding - phase) / along.stride",
            "(last == 0 ? 0 : (last * along.dilation - along.padding - phase) / along.stride)",
        ),
        strided(3),
    ),
    "matmul cuts off what it multiplies as tf32": Unstable(
        "matmul",
        ("gemm/tensor.cuh", "fragments.a[i][r] = round_to_tf32(fragments.a[i][r]);", "fragments.a[i][r] += 0;"),
        {
            layout: tensor_kernel(layout, "float32", split=split)
            for layout, split in (("nt", "none"), ("nn", "workspace"), ("tn", "none"))
        },
    ),
    **{
        f"the offset of a row of {name} has 32 bits": Unstable(
            name,
            (ROWS, "row * given.columns", "static_cast<int>(row * given.columns)"),
            rows_of(name, schedules, (dtype,)),
        )
        for name, schedules, dtype in (
            ("softmax", (*IN_TWO_PASSES, *ONLINE), "float16"), ("layer_norm", IN_TWO_PASSES, "float32"),
            ("rms_norm", ONLINE, "bfloat16"),
        )
    },
    "offsets of reduce's outer axes have 32 bits": Unstable(
        "reduce",
        (OWN, "int64_t(index) * along.stride[0]", "static_cast<int>(int64_t(index) * along.stride[0])"),
        reductions("sum"),
    ),
    "offsets of masked elements have 32 bits": Unstable(
        "masked_activation",
        (OWN, f"{ELEMENTS} + first", f"{ELEMENTS} + static_cast<int>(first)"),
        reaching_far("masked_activation", 4),
    ),
    **{
        f"{name}'s {product} has 32 bits": Unstable(
            name, (file, product, f"static_cast<int>({product})"), reaching_far(name, 3, words)
        )
        for name, file, product, words in (
            ("conv2d", "gather.cuh", "row * ldc", "tensor nhwc"),
            ("conv2d", "gather.cuh", "int64_t(pixel) * filters", "direct nhwc"),
            ("conv2d", "gemm/split.cuh", "row * pitch", "tensor nhwc, w"),
            ("conv2d_dgrad", "phases.cuh", "row * ldc + column", "tensor nhwc float16"),
            ("conv2d_dgrad", "phases.cuh", "pixel_of(row) + matrix * stride_c", "tensor nhwc (2, 2, 2), strided"),
            ("conv2d_wgrad", "gather.cuh", "row * ldc", "simt nhwc 1"),
            ("conv2d_wgrad", "gemm/split.cuh", "row * pitch", "simt nchw 1, split"),
            ("conv2d", "conv/gather.cuh", "tile.matrix * given.stride_b", "tensor nchw bfloat16"),
            ("attention", "block.cuh", "before * pitch", " by 8"),
            ("mla", "block.cuh", "page * strides.outer", ""),
        )
    },
    "offsets of Winograd's outputs have 32 bits": Unstable(
        "conv2d",
        ("conv/winograd.cuh", "pixel * layer.filters + filter", "static_cast<int>(pixel * layer.filters + filter)"),
        {name: WINOGRAD[name] for name in ("F(4) nhwc, one launch", "F(2) nhwc bfloat16")},
    ),
    **{
        f"matmul's {product} has 32 bits on {cores}": Unstable(
            "matmul", (f"gemm/{cores}.cuh", product, f"static_cast<int>({product})"), kernels
        )
        for cores, product, kernels in (
            ("simt", "first_row * arguments.lda", {"nn": matmul_kernel("nn"), "nt": matmul_kernel("nt")}),
            (
                "tensor", "column * ldb",
                {dtype: tensor_kernel("nt", dtype) for dtype in ("float16", "float32", "int8")},
            ),
        )
    },
    "max begins at the least number": Unstable(
        "reduce",
        (
            FOLDS,
            "return {greatest ? Ends<T>::least() : Ends<T>::greatest()};",
            "return {greatest ? static_cast<T>(-3.40282347e38f) : Ends<T>::greatest()};",
        ),
        {name: kernel for name, kernel in reductions("max").items() if "float32" in name},
    ),
    "argmax begins at the least number": Unstable(
        "reduce",
        (FOLDS, "return {Ends<T>::least(), 2147483647};", "return {static_cast<T>(-3.40282347e38f), 2147483647};"),
        reductions("argmax", out_dtype="int32"),
    ),
    "logsumexp has no weight for infinities": Unstable(
        "reduce", (FOLDS, "value == from ? 0.0f : value - from", "value - from"), reductions("logsumexp")
    ),
    "reduce merges 128 slices": Unstable(
        "reduce",
        (OWN, "first < arguments.slices", "first < (arguments.slices < 128 ? arguments.slices : 128)"),
        {name: kernel for name, kernel in reductions("sum").items() if "workspace" in name},
    ),
}  # fmt: skip


FAR = 8
"""Of the offsets in 32 bits, in a run of `make test`."""


def in_turn() -> dict[str, Unstable]:
    far = [words for words in CASES if "32 bits" in words]
    some = random.Random(seed_of_this_run()).sample(far, FAR)
    return {words: case for words, case in CASES.items() if words not in far or words in some}


def few(name: str) -> list[Kernel]:
    """Of an operator's cases in turn some kernels of which each has one: again and again one that is in most of them,
    of those that are cheap by this run's seed, so that runs have all dtypes."""
    rng = random.Random(f"{seed_of_this_run()} {name}")
    missing = {words: case for words, case in in_turn().items() if case.operator == name}
    chosen: list[Kernel] = []
    while missing:
        cases = Counter(kernel for case in missing.values() for kernel in dict.fromkeys(case.kernels.values()))
        often = [kernel for kernel in cases if cases[kernel] == max(cases.values())]
        chosen.append(rng.choice([each for each in often if seconds(each) <= 1.5 * min(map(seconds, often))]))
        missing = {words: case for words, case in missing.items() if chosen[-1] not in case.kernels.values()}
    return chosen


def marked() -> list[Any]:
    """Cases with the names of their kernels; `make test` has each case in turn in few."""
    turn = in_turn() if SOME_ROWS else {}
    chosen = {kernel for name in dict.fromkeys(case.operator for case in turn.values()) for kernel in few(name)}
    return [
        pytest.param(words, called, marks=() if words in turn and kernel in chosen else pytest.mark.long)
        for words, case in CASES.items()
        for called, kernel in case.kernels.items()
    ]


def selected_in(request: pytest.FixtureRequest) -> dict[str, list[Kernel]]:
    """By case, of the tests of this run."""
    selected: dict[str, list[Kernel]] = {}
    for row in rows_using("verdicts_of", request):
        selected.setdefault(row["words"], []).append(CASES[row["words"]].kernels[row["called"]])
    return selected


@pytest.fixture(scope="module")
def verdicts_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Mapping[tuple[Kernel, str], str]]:
    """By an operator's kernels and what is wrong with them ("": nothing). All of an operator that this run's tests ask
    for are built together."""
    selected = selected_in(request)

    @cache
    def messages_of(base: str) -> Mapping[tuple[Kernel, str], str]:
        folder = tmp_path_factory.mktemp(base)
        name = f"{base}_{folder.name}"
        class_name, texts = type(operator(base)).__name__, operator(base).kernel_texts
        cases = {words: case for words, case in CASES.items() if case.operator == base and words in selected}
        sites = [changed(texts, words, *case.text) for words, case in cases.items()]
        kernels = list(dict.fromkeys(kernel for words in cases for kernel in selected[words]))
        asked = {
            mutant.number: [kernels.index(kernel) for kernel in selected[mutant.name]] for mutant in mutants(sites)
        }
        with switched_operator(base, class_name, folder / "operator", name, sites):
            own = [Kernel(name, kernel.signature, kernel.tunables) for kernel in kernels]
            verdicts = verify_mutants(own, folder / "build", asked=asked)
        names = {AS_IT_IS: "", **{mutant.number: mutant.name for mutant in mutants(sites)}}
        return {(kernels[each.kernel], names[each.number]): each.verdict for each in verdicts}

    return messages_of


@pytest.mark.parametrize(("words", "called"), marked())
def test_it_is_caught(words: str, called: str, verdicts_of: Callable[[str], Mapping[tuple[Kernel, str], str]]) -> None:
    kernel, verdicts = CASES[words].kernels[called], verdicts_of(CASES[words].operator)
    assert verdicts[kernel, ""] == "ok"
    assert verdicts.get((kernel, words), "not reached") in ("incorrect", "runtime_error")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("count", [40, 300])
def test_a_variance_of_squares_less_the_square_of_the_mean_is_outside_of_the_bound(dtype: str, count: int) -> None:
    """In fp32, added in pairs. A variance about the mean is inside."""
    own = operator("reduce")
    problem = own.parse(
        {
            "operator": "reduce",
            "shape": (16, count),
            "axes": (1,),
            "fn": "variance",
            "dtype": dtype,
            "out_dtype": "float32",
        }
    )
    x = own.make_inputs(problem, "normal", np.random.default_rng(1))["x"].astype(np.float32)
    expected, bound = own.reference(problem, {"x": x.astype(dtype)})
    mean = x.mean(axis=1, dtype=np.float32)
    cancelled = (x * x).mean(axis=1, dtype=np.float32) - mean * mean
    apart = x - mean[:, None]
    stable = (apart * apart).mean(axis=1, dtype=np.float32)
    assert check_output(stable, expected, bound, exact=False).ok
    assert check_output(cancelled, expected, bound, exact=False).wrong >= 4
    assert (bound < expected).all()
