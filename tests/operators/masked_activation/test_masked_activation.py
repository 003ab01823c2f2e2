"""Masked activations, alone and behind a matmul."""

from __future__ import annotations

from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators.masked_activation.problem import MaskedActivationProblem
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.problem import LARGEST_ELEMENTS
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from tests.operators.harness import declarations as declare
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_0, LEVEL_1, SM_90A, Array, Inputs, Rejection
from tests.operators.harness.machine_code import Code
from tests.operators.masked_activation.kernels import (
    DEFAULT,
    FLOATS,
    FUNCTIONS,
    NAME,
    OP,
    RINGS,
    kernel_of,
    masked,
    vectorised,
)
from tests.operators.masked_activation.random_cases import CUBIC, SPREAD, properties, random_cases
from tests.support.fixtures.codegen import matmul
from tests.support.kernels.ring_integers import epilogue_of

POLYNOMIAL = {"op": "polynomial", "coefficients": [0.5, -1.0, 0.25, 0.125]}


def gather_scatter(node: str, dtype: str = "float32", name: str = NAME, threads: int = 64) -> Kernel:
    return kernel_of(node, dtype, name, {"algorithm": "gather_scatter", "threads": threads})


# ---- problems

OF_SET = "where_set.polynomial.coefficients"


def polynomial(*coefficients: float) -> dict[str, Any]:
    return {"where_set": {"op": "polynomial", "coefficients": list(coefficients)}}


PROBLEMS = declare.Problems(
    refused=[
        ({"shape": []}, "shape", "at least 1 item"),
        ({"shape": [2] * 9}, "shape", "at most 8 items"),
        ({"shape": [4, 0]}, "shape.1", "greater than or equal to 1"),
        ({"shape": [0]}, "shape.0", "greater than or equal to 1"),
        ({"shape": ["4"]}, "shape.0", "valid integer"),
        ({"shape": [4, 1.5]}, "shape.1", "valid integer"),
        ({"shape": [2**30, 2**30]}, "shape", f"x would span {2**60} elements; at most {LARGEST_ELEMENTS} are allowed"),
        ({"dtype": "int8"}, "dtype", "'bfloat16', 'int32' or 'int64'"),
        ({"fraction_bits": 9}, "fraction_bits", "is 9, but float32 is no fixed point: dtype int32 or int64 is"),
        ({"rounding": "nearest"}, "rounding", "is nearest, but float32 is no fixed point"),
        ({"dtype": "int32", "fraction_bits": 32}, "fraction_bits", "Z/2^32 leaves a bit: 0 to 31 are allowed"),
        ({"dtype": "int64", "truncation": {"policy": "exact_once"}}, "truncation", "not permitted"),
        ({"dtype": "int64", "where_clear": {"op": "gelu"}}, "where_clear", "is gelu; Z/2^64 computes identity, poly"),
        ({"dtype": "int64", "where_set": POLYNOMIAL}, "where_set", "numbers of Z/2^64 with 0 fraction bits are"),
        ({"dtype": "int32", "fraction_bits": 31, "where_set": POLYNOMIAL, "where_clear": CUBIC}, "where_clear",
         "has the coefficients -2.0, 0.25, 1.5, -0.125; numbers of Z/2^32 with 31 fraction bits are allowed"),
        ({"dtype": "int64", "fraction_bits": 40, **polynomial(0.1, 1, 1)}, "where_set", "as far as float32 holds them"),
        ({"mask": "words"}, "mask", "'bits' or 'bytes'"),
        ({"mask_dtype": "uint8"}, "mask_dtype", "is uint8, but a mask of bits is int32"),
        ({"mask": "bytes", "mask_dtype": "int32"}, "mask_dtype", "is int32, but a mask of bytes is uint8"),
        ({"mask_dtype": "float32"}, "mask_dtype", "'int32' or 'uint8'"),
        ({"mask_length": 31}, "mask_length", "is 31, but 1000 elements need 32 words of 32 bits"),
        ({"mask": "bytes", "mask_length": 32}, "mask_length", "is 32, but 1000 elements need 1000 bytes"),
        ({"mask_length": 0}, "mask_length", "is 0, but 1000 elements need 32"),
        ({"mask_length": "32"}, "mask_length", "valid integer"),
        ({"where_set": {"op": "tanh"}}, "where_set", "does not match any of the expected tags"),
        (polynomial(1, 2), OF_SET, "at least 3"),
        (polynomial(1, 2, 3, 4, 5), OF_SET, "4"),
        (polynomial(1, 2, 3, 1e39), f"{OF_SET}.3", "float32"),
        ({"layout": "nhwc"}, "layout", "not permitted"),
    ],
    defaults=[
        (
            {"shape": (10, 5, 20)},
            {"shape": [1000], "dtype": "float32", "where_set": {"op": "relu"}, "where_clear": {"op": "identity"},
             "mask": "bits", "mask_dtype": "int32", "mask_length": 32},
        ),
        (
            {"mask": "bytes"},
            {"shape": [1000], "dtype": "float32", "where_set": {"op": "relu"}, "where_clear": {"op": "identity"},
             "mask": "bytes", "mask_dtype": "uint8", "mask_length": 1000},
        ),
        (
            {"dtype": "int64", "fraction_bits": 18},
            {"shape": [1000], "dtype": "int64", "fraction_bits": 18, "rounding": "floor", "where_set": {"op": "relu"},
             "where_clear": {"op": "identity"}, "mask": "bits", "mask_dtype": "int32", "mask_length": 32},
        ),
    ],
    alike=[({"shape": (10, 100)}, {"mask_length": 32})],
    aligned=[
        (
            {"where_clear": {**POLYNOMIAL, "coefficients": [5, 1, 2]}},
            {"dtype": "float32", "node": "masked_activation.bits.relu.polynomial2"},
        )
    ],
    unspecialised=[
        (
            {"shape": (5,), "where_clear": {**POLYNOMIAL, "coefficients": [5, 1, 2]}},
            {"shape": (70,), "where_clear": {**POLYNOMIAL, "coefficients": [70, 1, 2]}},
            [70.0, 1.0, 2.0],
        )
    ],
    operands=[
        (
            {"dtype": "float16"},
            [("x", "float16", "in", (1000,)), ("mask", "int32", "in", (32,)), ("out", "float16", "out", (1000,))],
        ),
        (
            {"mask": "bytes"},
            [("x", "float32", "in", (1000,)), ("mask", "uint8", "in", (1000,)), ("out", "float32", "out", (1000,))],
        ),
    ],
    in_schema=[{"shape": [4, 5], "where_set": POLYNOMIAL, "mask": "bytes"}],
    out_of_schema=[{"shape": [], "where_set": {"op": "relu"}}],
)  # fmt: skip

# ---- rules, levels and costs

VECTORISED = {"algorithm": "vectorised", "threads": 256, "vector": 8, "loads": 4}
LISTS = {"algorithm": "gather_scatter", "threads": 256}
SMALLEST, LARGEST = {"threads": 64, "vector": 1, "loads": 1}, {"threads": 1024, "vector": 4, "loads": 8}
HALF = {"dtype": "float16"}
SEARCHES = declare.Searches(
    rejected=[
        Rejection({}, VECTORISED, "vector", "vector = 8 is 32 bytes; one access moves at most 16"),
        Rejection(HALF, VECTORISED, "padding", "a block of 8192 elements is mostly padding for 1000"),
        Rejection({**HALF, "shape": [2**40]}, {**VECTORISED, **SMALLEST}, "grid", "17179869184 blocks"),
        Rejection({"shape": [2**20]}, {**VECTORISED, **LARGEST}, "registers",
                  "1024 threads of about 88 registers; sm_90a has"),
        Rejection({"shape": [2**31]}, LISTS, "index", "indices of 2147483648 elements; 32 bits count 2147483647"),
        Rejection({"shape": [1000]}, LISTS, "padding", "a block of 8192 elements"),
        Rejection({"shape": [2**20]}, LISTS, "workspace", "needs 4194816 bytes of workspace, the limit is 4096",
                  workspace_limit=4096),
    ],
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("elements", [1, 31, 32, 63, 64, 255, 256, 511, 1000, 2**20])
def test_every_level_has_schedules_and_that_of_level_0(elements: int, dtype: str) -> None:
    problem = masked(elements, dtype=dtype)
    zero, first, two = (
        {candidate.schedule for candidate in lower(problem, SM_90A, Search(level=level)).candidates}
        for level in (0, 1, 2)
    )
    assert len(zero) == 1
    assert zero <= first <= two


def test_a_sample_has_the_lists_to_compare_with() -> None:
    large = masked(2**24, dtype="float16")
    for level in (1, 2):
        sample = lower(large, SM_90A, Search(level=level, limit=2)).candidates
        assert [candidate.schedule.get("algorithm") for candidate in sample] == ["vectorised", "gather_scatter"]


def test_level_1_tries_one_pass_and_lists_and_predicts_that_lists_are_slow() -> None:
    candidates = lower(masked(2**24, dtype="float16", where_set={"op": "gelu"}), SM_90A, LEVEL_1).candidates
    times: dict[Any, list[float]] = {}
    for candidate in candidates:
        times.setdefault(candidate.schedule.get("algorithm"), []).append(predict_uncompiled(candidate, SM_90A).us)
    assert min(times["gather_scatter"]) > 2 * max(times["vectorised"])


@pytest.mark.parametrize("elements", [1, 100, 5000, 2**30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_level_0_is_one_pass_that_breaks_no_rule(elements: int, dtype: str) -> None:
    (candidate,) = lower(masked(elements, dtype=dtype), SM_90A, LEVEL_0).candidates
    assert candidate.schedule.get("algorithm") == "vectorised"


def test_cost_is_one_read_of_x_and_of_the_mask_and_one_write() -> None:
    problem = masked(dtype="float16")
    cost, other = OP.cost(problem, Schedule.of(VECTORISED)), OP.cost(problem, Schedule.of(LISTS))
    assert (cost.bytes_read, cost.bytes_written, cost.launches, cost.workspace_bytes) == (2000 + 128, 2000, 1, 0)
    assert (other.bytes_read, other.bytes_written, other.launches) == (2128, 2000, 3)
    assert OP.cost(masked(mask="bytes"), Schedule.of(VECTORISED)).bytes_read == 5000


def test_products_are_truncated_where_there_is_a_shift() -> None:
    """One of a square, one for each power of a polynomial, of which an element has one; of the others none. Lists have
    the polynomial of all, and squares of the half that counts as set."""
    fields = {"dtype": "int64", "where_set": {"op": "square"}, "where_clear": POLYNOMIAL}
    for bits in (18, 3):
        problem = masked(**fields, fraction_bits=bits)
        assert OP.cost(problem, Schedule.of(VECTORISED)).truncations == 3000
        assert OP.cost(problem, Schedule.of(LISTS)).truncations == 3500
    whole = masked(dtype="int64", where_set={"op": "square"}, where_clear={"op": "relu"})
    assert OP.cost(whole, Schedule.of(VECTORISED)).truncations == 0


def test_inputs_of_large_problems_are_repeated_blocks() -> None:
    inputs = OP.make_inputs(masked(2**23), "normal", np.random.default_rng(3))
    assert (inputs["x"].shape, inputs["mask"].shape) == ((2**23,), (2**18,))
    assert not np.array_equal(inputs["x"][: 2**20], inputs["x"][2**22 : 2**22 + 2**20])


# ---- the reference


def definition(problem: MaskedActivationProblem, inputs: Inputs) -> Array:
    if problem.dtype in RINGS:
        place = np.arange(problem.elements)
        bits = inputs["mask"][place // 32] >> place % 32 & 1 if problem.mask == "bits" else inputs["mask"]
        alone = SimpleNamespace(
            dtype=problem.dtype,
            fraction_bits=problem.fraction_bits,
            rounding=problem.rounding,
            epilogue=(problem.node,),
        )
        return epilogue_of(alone, inputs["x"].astype(object), {"mask": bits})
    out = []
    for i, x in enumerate(inputs["x"].astype(float)):
        word = inputs["mask"][i // 32 if problem.mask == "bits" else i]
        is_set = int(word) >> (i % 32) & 1 if problem.mask == "bits" else word != 0
        out.append(0.5 - x + 0.25 * x**2 + 0.125 * x**3 if is_set else x * x)
    return np.array(out)


# ---- kernels on the CPU


def verified() -> dict[str, Kernel]:
    by_name: dict[str, Kernel] = {}
    for number, (mask, function) in enumerate(product(("bits", "bytes"), FUNCTIONS)):
        dtype, other = FLOATS[number % 3], FUNCTIONS[(3 * number + 1) % 7]
        node = f"{mask}.{function}.{other}"
        by_name[f"{node}, {dtype}"] = vectorised(node, dtype, loads=(1, 2, 4, 8)[number % 4])
        by_name[f"{node}, {dtype}, by lists"] = gather_scatter(node, dtype, threads=(64, 128)[number % 2])
    for dtype, (number, node) in product(RINGS, enumerate(("square.polynomial3", "polynomial2.relu"))):
        mask = ("bits", "bytes")[number]
        by_name[f"{mask}.{node}, {dtype}"] = vectorised(f"{mask}.{node}", dtype, loads=4 - 2 * number)
        by_name[f"{mask}.{node}, {dtype}, by lists"] = gather_scatter(f"{mask}.{node}", dtype)
    for dtype, width in product(FLOATS, (1, 2, 4)):
        by_name[f"{dtype} by {width}"] = vectorised("bits.square.relu", dtype, vector=width)
        by_name[f"{dtype} by {width}, bytes"] = vectorised("bytes.square.relu", dtype, vector=width)
    return by_name


def mutated(name: str) -> dict[str, Kernel]:
    return {
        "bits": vectorised("bits.polynomial2.polynomial3", "float16", name, loads=2),
        "bytes": vectorised("bytes.square.relu", "float32", name, vector=2, loads=1),
        "bits, by lists": gather_scatter("bits.polynomial2.polynomial3", "float32", name),
        "bytes, by lists": gather_scatter("bytes.square.relu", "bfloat16", name),
    }


OWN = "kernel.cuh"
BYTE = "load_global<1>(static_cast<const unsigned char*>(arguments.epilogue.tensors[0]) + first + i).data[0]"
PLACE, CLEAR = "int64_t(blockIdx.x) * (C::threads * C::loads)", "arguments.epilogue.scalars + Own::Set::scalars"
MASK = "Parts<typename C::Epilogue>::Node::template read_mask<N>(arguments.epilogue.tensors[0]"
OF_WARPS = "load_shared<1>(of_warps + other).data[0];"
# The choice between the two functions is that of an epilogue: tests/of_workers/cpu/test_wrong_kernels.py.
MUTATIONS = declare.Mutations(
    kernels=mutated,
    files=tuple(OP.kernel_texts),
    wrong={
        "every block is the first": (OWN, PLACE, f"0 * {PLACE}"),
        "the functions of the wrong place": (OWN, f"{MASK}, first)", f"{MASK}, first + N)"),
        "scalars of the other function": (OWN, CLEAR, "arguments.epilogue.scalars"),
        "words of the lane before": (OWN, "first / word_bits", "first / word_bits / 2"),
        "one bit of a byte": (OWN, f"{BYTE} != 0 ? 1u : 0u", f"{BYTE} & 1u"),
        "lanes do not add up": (OWN, "if (lane >= distance) before += other;", "if (lane >= distance) before += 0;"),
        "warps do not add up": (OWN, f"before += {OF_WARPS}", f"before += 0 * {OF_WARPS}"),
        "the last element of a list is lost": (OWN, "before + own", "before + own - 1"),
        "indices within the word": (OWN, "static_cast<int>(first + i)", "i"),
    },
    counts={"barrier": 1},
    definitions={"bounds": 1},
)

# ---- winners


def level_0(*shape: int, **fields: Any) -> Candidate:
    (candidate,) = lower(masked(*shape, **fields), SM_90A, LEVEL_0).candidates
    return candidate


def planned(mask: str) -> list[Candidate]:
    """The first of level 1 of each algorithm."""
    candidates = lower(masked(100_000, mask=mask, dtype="float16"), SM_90A, LEVEL_1).candidates
    return list({candidate.schedule.get("algorithm"): candidate for candidate in reversed(candidates)}.values())


def moves_16_bytes_at_once(kernel: Kernel, code: Code) -> None:
    loads = int(kernel.tunables.get("loads"))
    assert code.count("ld.global.nc.v4") == code.count("st.global.v4") == loads


def loads_before_a_function_that_branches(kernel: Kernel, code: Code) -> None:
    before, *_ = code.body.partition("ex2.")
    assert before.count("ld.global.nc.v4") == 4  # x
    assert before.count("ld.global.nc") == 8
    assert "st.global" not in before


GAPS = "out has gaps between its rows or matrices"


def with_matmul() -> Candidate:
    node = {"op": "masked_activation", "where_set": {"op": "relu"}}
    (candidate,) = lower(matmul(m=64, n=96, k=64, epilogue=[node]), SM_90A, LEVEL_0).candidates
    return candidate


CALLS = {
    "winner": declare.Library(
        candidate=lambda: level_0(dtype="float16", where_clear=POLYNOMIAL),
        operands={"x": "H(10, 100)", "out": "H(10, 100, address=0x50000000)"},
        record={"operands": ["x", "mask", "out"]},
        taken={"empty": ({"x": "H(4, 0)", "out": "H(4, 0)", "mask": "T((0,), 'int32')"}, [(1, 1, 1)])},
        refused={
            "a tensor less": ({"mask": None, "numbers": ()}, "TypeError",
                              "2 tensors were given; this kernel takes 3: x, mask, out"),
            "no coefficients": ({"numbers": (0.5,)}, "TypeError", "this call takes 3 tensors, then 4 numbers"),
            "dtype": ({"x": "T((10, 100))"}, "TypeError", "x is float32; float16 is allowed"),
            "shape": ({"out": "H(100, 10, address=0x50000000)"}, "ValueError", "out must have the shape of x"),
            "strides": ({"x": "H(10, 100, strides=(200, 1))"}, "ValueError", "x has stride 200 along axis 0"),
            "address": ({"x": "H(10, 100, address=0x70000008)"}, "ValueError", "a multiple of 16 bytes"),
            "a short mask": ({"mask": "T((31,), 'int32')"}, "ValueError",
                             "mask has 31 elements; 1000 elements of x need 32 words of 32 bits"),
            "bytes for bits": ({"mask": "T((10, 100), 'uint8')"}, "TypeError", "mask is uint8; int32 is allowed"),
            "mask over out": ({"mask": "T((32,), 'int32', address=0x50000000)"}, "ValueError", "out overlaps mask"),
            "device": ({"mask": "T((32,), 'int32', device=1)"}, "ValueError", "mask is on cuda:1, but x is on cuda:0"),
            "in place": ({"out": "x"}, "ValueError", "out overlaps x"),
            "rank": ({"x": "H(*[1] * 9)"}, "ValueError", "operand 0 has rank 9; at most 8 is allowed"),
        },
    ),
    "matmul": declare.Library(
        candidate=with_matmul,
        refused={
            "a short mask": ({"mask": "T((191,), 'int32')"}, "ValueError",
                             declare.Whole("mask must be a contiguous vector of 192 elements")),
            "gaps": ({"out": "T((64, 96), strides=(100, 1), address=0x50000000)"}, "ValueError",
                     declare.Whole(f"{GAPS}; a packed mask counts its outputs without any")),
            "bytes for bits": ({"mask": "T((64, 96), 'uint8')"}, "TypeError",
                               declare.Whole("mask is uint8; int32 is allowed")),
        },
    ),
}  # fmt: skip
OF_JOB: dict[str, Any] = {"shape": [8, 16, 100], "where_set": {"op": "gelu"}}
BEHIND = {"op": "masked_activation", "where_set": {"op": "square"}, "where_clear": {"op": "relu"}}

DECLARED = (
    declare.Declarations(
        operator=NAME,
        problem=DEFAULT,
        problems=PROBLEMS,
        searches=SEARCHES,
        references=declare.References(
            definition=definition,
            defined={
                mask: {"shape": (70,), "mask": mask, "where_set": POLYNOMIAL, "where_clear": {"op": "square"}}
                for mask in ("bits", "bytes")
            }
            | {
                f"{mask}, {ring}": {
                    "shape": (70,),
                    "mask": mask,
                    "where_set": POLYNOMIAL,
                    "where_clear": {"op": "square"},
                    "dtype": ring,
                    "fraction_bits": 18,
                    "rounding": rounding,
                }
                for mask, ring, rounding in (("bits", "int64", "floor"), ("bytes", "int32", "nearest"))
            },
            on_device=[("normal", {"shape": (70,), "where_set": {"op": "gelu"}, "where_clear": POLYNOMIAL})],
        ),
        verifications=declare.Verifications(
            kernels=verified,
            sanitized=lambda: [vectorised("bits.gelu.square", "float16"), gather_scatter("bytes.relu.identity")],
            nearest=0.5,
        ),
        mutations=MUTATIONS,
        random_cases=declare.RandomCases(cases=random_cases, properties=properties, spread=SPREAD),
        machine_code=declare.MachineCode(
            kernels=lambda: {
                "level 0": level_0(2**22, dtype="float16").kernel,
                "bits": vectorised("bits.gelu.silu", "float16", loads=4),
                "bytes": vectorised("bytes.gelu.silu", "float16", loads=4),
            },
            claims={
                "level 0": [moves_16_bytes_at_once],
                "bits": [loads_before_a_function_that_branches],
                "bytes": [loads_before_a_function_that_branches],
            },
        ),
        launches=declare.Launches(planned={mask: partial(planned, mask) for mask in ("bits", "bytes")}),
        calls=CALLS,
        job=declare.Job(
            each_run="ring",
            problems={
                "bits": {**OF_JOB, "dtype": "float16"},
                "bytes": {**OF_JOB, "mask": "bytes", "where_clear": POLYNOMIAL},
                "ring": {"shape": [1000], "dtype": "int64", "fraction_bits": 18, "where_set": {"op": "square"}},
                "matmul": {"operator": "matmul", "m": 64, "n": 64, "k": 64, "epilogue": [BEHIND]},
            },
        ),
    ),
)
add_checks(globals())
