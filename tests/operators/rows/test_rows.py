"""Softmax and the norms, which share the code of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from codegen.alignment import classes
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.problem import LARGEST_EXTENT
from codegen.rows.problem import RowProblem
from codegen.rows.reference import unit_of
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from tests.operators.harness import declarations as declare
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_0, LEVEL_1, SM_90A, Array, Inputs, Rejection
from tests.operators.harness.machine_code import Code
from tests.operators.rows.kernels import OPERATORS, SCHEDULES, kernel, problem
from tests.operators.rows.random_cases import random_cases
from tests.support.kernels.cpu_helpers import verify
from tests.support.kernels.mutants import Site, find_sites
from tests.support.run.each_run import some_each_run

NORMS = ("layer_norm", "rms_norm")

# ---- problems

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"shape": []}, "shape", "at least 1 item"),
    ({"shape": [2] * 9}, "shape", "at most 8 items"),
    ({"shape": [0, 4]}, "shape.0", "greater than or equal to 1"),
    ({"shape": [4, 0]}, "shape.1", "greater than or equal to 1"),
    ({"shape": [4, "5"]}, "shape.1", "valid integer"),
    ({"shape": [1, 2**31]}, "shape", f"2147483648 elements in a row (the last axis); at most {LARGEST_EXTENT}"),
    ({"shape": [2**16, 2**15, 4]}, "shape", f"2147483648 rows (all axes but the last); at most {LARGEST_EXTENT}"),
    ({"shape": [2**21, 2**20]}, "shape", f"x would span {2**41} elements"),
    ({"dtype": "int32"}, "dtype", "'float32', 'float16' or 'bfloat16'"),
    ({"out_dtype": "int32"}, "out_dtype", "'float32', 'float16' or 'bfloat16'"),
    ({"axis": 1}, "axis", "not permitted"),
]
REFUSED_BY_NORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"epsilon": -1e-5}, "epsilon", "greater than or equal to 0"),
    ({"epsilon": 1e39}, "epsilon", "must be finite and fit float32"),
    ({"scale": 1}, "scale", "valid boolean"),
]
ALIGNED = [(40, "float16", 8), (4, "float16", 4), (6, "bfloat16", 2), (7, "float16", 1), (40, "float32", 4),
           (6, "float32", 2)]  # fmt: skip
F32 = {"dtype": "float32", "out_dtype": "float32"}


def problems_of(name: str) -> declare.Problems:
    norm, x, out = name in NORMS, ("x", "float32", "in", (6, 40)), ("out", "float32", "out", (6, 40))
    gamma, beta = (("gamma", "float32", "in", (40,)), ("beta", "float32", "in", (40,)))
    own = {"scale": True, "shift": name == "layer_norm", "epsilon": 1e-5} if norm else {}
    vectors = {"scale": norm, "shift": name == "layer_norm"}
    shapes = [({"shape": (8, 4, 40)}, [32, 40]), ({"shape": (40,)}, [1, 40])]
    return declare.Problems(
        refused=[*REFUSED, *(REFUSED_BY_NORMS if norm else [])],
        defaults=[
            *((fields, {"shape": shape, **F32, **own}) for fields, shape in shapes),
            ({"dtype": "float16"}, {"shape": [6, 40], "dtype": "float16", "out_dtype": "float16", **own}),
        ],
        alike=[({"shape": (8, 4, 40)}, {"shape": (32, 40)})],
        aligned=[
            ({"shape": (3, columns), "dtype": dtype}, {"dtype": dtype, "out_dtype": dtype, "align": align, **vectors})
            for columns, dtype, align in ALIGNED
        ],
        operands=[
            ({"scale": True, "shift": True}, [x, gamma, beta, out]),
            ({"scale": False, "shift": True}, [x, beta, out]),
            ({"scale": False, "shift": False}, [x, out]),
        ] if norm else [({}, [x, out])],
        unspecialised=[({}, {"shape": (3, 80), "epsilon": 0.5}, [0.5])] if norm else [({}, {"shape": (3, 80)}, [])],
        in_schema=[{"shape": [4, 5], "dtype": "float16"}],
        out_of_schema=[{"shape": []}],
    )  # fmt: skip


# ---- rules, levels and costs

WARP: dict[str, int | str] = {"algorithm": "registers", "row_threads": 32, "rows": 4, "vector": 4, "steps": 8}
LONG = {"algorithm": "shared", "row_threads": 256, "rows": 1, "steps": 391, "loads": 2}
SEARCHES = declare.Searches(
    accepted=[({"shape": (100, 1000)}, WARP)],
    rejected=[
        Rejection({"shape": shape}, {**WARP, **change}, rule, said)
        for shape, change, rule, said in (
            ((100, 1000), {"rows": 64}, "threads", "64 rows of 32 threads are 2048; a block has 32 to 1024"),
            ((100, 1000), {"row_threads": 4, "rows": 4}, "threads", "4 rows of 4 threads are 16"),
            ((100, 1000), {"vector": 8}, "vector", "vector = 8 of 4 bytes; rows of 1000 elements allow up to 4"),
            ((100, 1001), {}, "vector", "rows of 1001 elements allow up to 1"),
            ((100, 40), {"steps": 1}, "row_threads", "32 threads for a row of 10 vectors are mostly idle"),
            ((2, 1000), {}, "rows", "4 rows of a block are mostly padding for 2"),
            ((100, 1000), {"steps": 7}, "steps", "room for 896 elements; a row has 1000 (8 steps)"),
            ((100, 1000), {"steps": 16}, "steps", "16 steps are mostly unused by 8"),
            ((100, 40000), {"steps": 313, "rows": 1}, "registers", "about 1284 registers per thread; at most 255"),
            ((100, 400_000), LONG, "shared_memory", "1601664 bytes"),
        )
    ],
)  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [1, 10, 31, 100, 768, 1001, 4096, 16384, 50257, 128256, 2**20, 2**26])
def test_every_length_of_rows_has_schedules_at_every_level(name: str, columns: int, dtype: str) -> None:
    asked = problem(name, 64, columns, dtype=dtype)
    (default,) = lower(asked, SM_90A, LEVEL_0).candidates
    candidates = lower(asked, SM_90A, LEVEL_1).candidates
    assert len(candidates) >= 2
    assert default.schedule in [candidate.schedule for candidate in candidates]
    assert len(lower(asked, SM_90A, Search(level=2, limit=8)).candidates) == 8 or columns < 32
    algorithms = {candidate.schedule.get("algorithm") for candidate in candidates}
    assert "registers" in algorithms or columns > 10_000
    assert "shared" in algorithms or columns < 32 or columns > 30_000
    assert "online" in algorithms or columns < 32


def test_rows_that_are_read_twice_are_predicted_slower_than_those_read_once() -> None:
    times: dict[Any, float] = {}
    for candidate in lower(problem("softmax", 32768, 8192, dtype="float16"), SM_90A, LEVEL_1).candidates:
        algorithm = candidate.schedule.get("algorithm")
        times[algorithm] = min(predict_uncompiled(candidate, SM_90A).us, times.get(algorithm, float("inf")))
    assert times["registers"] < times["online"]


def test_cost_is_one_read_and_one_write() -> None:
    asked = problem("layer_norm", 6, 40, dtype="float16", out_dtype="float32")
    cost = operator("layer_norm").cost(asked, Schedule.of({}))
    assert (cost.bytes_read, cost.bytes_written, cost.launches, cost.workspace_bytes) == (480 + 160, 960, 1, 0)


# ---- the reference


def definition(p: Any, inputs: Inputs) -> Array:
    x = inputs["x"].astype(np.longdouble)
    if p.operator == "softmax":
        power = np.exp(x - x.max(axis=1, keepdims=True))
        return power / power.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]
    distances = x - x.mean(axis=1, keepdims=True) if p.operator == "layer_norm" else x
    out = distances / np.sqrt((distances**2).mean(axis=1, keepdims=True) + np.float32(p.epsilon))
    out = out * inputs["gamma"].astype(np.longdouble) if p.scale else out
    return out + inputs["beta"].astype(np.longdouble) if p.shift else out  # type: ignore[no-any-return]


def in_fp32(p: Any, inputs: Inputs, lost: bool) -> Array:
    """Without the last element of each row in the sums, where that is `lost`."""
    x = inputs["x"]
    rest = x[:, : p.columns - lost]
    if p.operator == "softmax":
        greatest = x.max(axis=1, keepdims=True)
        sums = np.exp(rest - greatest).sum(axis=1, keepdims=True, dtype=np.float32)
        return np.exp(x - greatest) * (np.float32(1) / sums)  # type: ignore[no-any-return]
    mean = rest.sum(axis=1, keepdims=True) / np.float32(p.columns) if p.operator == "layer_norm" else np.float32(0)
    square = ((rest - mean) ** 2).sum(axis=1, keepdims=True) / np.float32(p.columns)
    out = (x - mean) * (np.float32(1) / np.sqrt(square + np.float32(p.epsilon))) * inputs["gamma"]
    return out + inputs["beta"] if p.shift else out  # type: ignore[no-any-return]


REFERENCES = declare.References(
    definition=definition,
    defined={f"{shape}": {"shape": shape} for shape in ((5, 1), (4, 3), (3, 40), (7, 101))},
    exact=False,
    rtol=1e-12,
    atol=1e-14,
    in_fp32=in_fp32,
    bounded={"rows": {"shape": (50, 300)}},
    on_device=[
        *((kind, {"shape": (5, 33), "dtype": "float16"}) for kind in ("integer", "normal")),
        *(("special", {"shape": (17, 33), "dtype": name}) for name in ("float32", "float16", "bfloat16")),
    ],
    on_device_rtol=1e-15,
)


@pytest.mark.parametrize("name", OPERATORS)
def test_only_a_row_of_one_element_is_exact(name: str) -> None:
    for fields in REFERENCES.defined.values():
        p = problem(name, *fields["shape"])
        _, bound = operator(name).reference(p, operator(name).make_inputs(p, "normal", np.random.default_rng(1)))
        assert (bound > 0.0).any() or p.columns == 1


@pytest.mark.parametrize(
    ("name", "dtype", "columns"),
    some_each_run([*product(OPERATORS, ("float32", "float16", "bfloat16"), (1, 2, 5, 64, 1001, 4096, 65537))], 21),
)
def test_integer_inputs_have_an_exact_result_that_differs_along_rows(name: str, dtype: str, columns: int) -> None:
    for epsilon in (12.0, 1e-5, 1e-6, 0.1):
        p = problem(name, 4, columns, dtype=dtype, **({} if name == "softmax" else {"epsilon": epsilon}))
        inputs = operator(name).make_inputs(p, "integer", np.random.default_rng(2))
        result, bound = operator(name).reference(p, inputs, exact=True)
        assert (bound == 0.0).all()
        if columns > 5:
            assert all(len(set(row)) > 1 for row in result.tolist())


def test_the_unit_of_exact_rows_makes_variance_and_epsilon_a_power_of_four() -> None:
    assert (unit_of(12.0), unit_of(0.0), unit_of(3.0), unit_of(1e-5)) == (1.0, 2.0**-8, 0.5, 8.0)
    assert unit_of(1e30) == 0.0


@pytest.mark.parametrize("place", [0, 500, 999])
def test_an_outlier_where_online_looks_for_an_origin_costs_no_precision(place: int) -> None:
    p = problem("layer_norm", 1, 1000, scale=False, shift=False)
    inputs = operator("layer_norm").make_inputs(p, "normal", np.random.default_rng(1))
    inputs["x"][0, place] = 1e4
    result, bound = operator("layer_norm").reference(p, inputs)
    assert result[0, place] > 30.0
    assert bound.max() < 1e-4 * result[0, place]


# ---- kernels on the CPU

TYPES = (
    ("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "float32"),
    ("float32", "bfloat16"), ("bfloat16", "float16"),
)  # fmt: skip
VECTORS = ((True, True), (True, False), (False, True), (False, False))  # gamma, beta


def verified(name: str) -> dict[str, Kernel]:
    by_name: dict[str, Kernel] = {}
    for number, schedule in enumerate(SCHEDULES):
        dtype, out_dtype = TYPES[number % len(TYPES)]
        scale, shift = VECTORS[number % 4]
        by_name[f"{schedule}, {dtype} to {out_dtype}"] = kernel(
            name, schedule, dtype, out_dtype, scale=scale, shift=shift
        )
    for number, ((dtype, out_dtype), align) in enumerate(product(TYPES, (8, 4, 2, 1))):
        if align in classes(dtype, quads=False):
            schedule = list(SCHEDULES)[number % len(SCHEDULES)]
            by_name[f"{schedule}, {dtype} to {out_dtype} by {align}"] = kernel(name, schedule, dtype, out_dtype, align)
    by_name["narrower than it could be"] = kernel(name, "registers, a warp", "float16", vector=2)
    return by_name


SANITIZED: Mapping[str, Callable[[], Kernel]] = {
    "softmax": lambda: kernel("softmax", "registers, a warp", "float16", align=1),
    "layer_norm": lambda: kernel("layer_norm", "online, a block"),
    "rms_norm": lambda: kernel("rms_norm", "shared, two warps of four", "bfloat16"),
}
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
VALUE, BY_GAMMA = "to_float(vector.data[i])", "values.data[i] *= gamma.data[i];"
WIDENED, OF_COLUMNS = f"values.data[i] = {VALUE};", "/ static_cast<float>(arguments.columns)"
POWER = "powers.data[i] = cukiln::exp(values.data[i] - greatest);"
# What operators share is mutated in one.
WRONG: dict[str, dict[str, tuple[str, str, str]]] = {
    "softmax": {
        "nothing is subtracted in the sum": (OWN, POWER, POWER.replace(" - greatest", "")),
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
        "the mean is the sum": (OWN, f"{SUM_OF_VALUES} / columns", SUM_OF_VALUES),
        "the squares about the origin": (OWN, f"cukiln::fma({ABOUT_ORIGIN})", "own.squares / columns"),
        "the mean without the origin": (OWN, "origin + distance", "distance"),
        "squares of other threads are lost": (OWN, "state.squares += other.squares;", "state.squares += 0.0f;"),
        "a NaN counts as 0": (ROWS, WIDENED, WIDENED.replace(";", f" == {VALUE} ? {VALUE} : 0.0f;")),
        "a NaN in gamma is left out": (ROWS, BY_GAMMA, f"if (gamma.data[i] == gamma.data[i]) {BY_GAMMA}"),
        "distances of other threads are lost": (OWN, "state.sum += other.sum;", "state.sum += 0.0f;"),
    },
    "rms_norm": {
        "the sum of the squares": (OWN, f"sum {OF_COLUMNS}", "sum"),
        "no root is infinite": (OWN, f"sum {OF_COLUMNS}", f"(sum < 3e38f || sum != sum ? sum : 3e38f) {OF_COLUMNS}"),
    },
}


def barrier_of_reductions(texts: Mapping[str, str]) -> list[Site]:
    """Of the reductions that others use, too, the one that rows have."""
    return [next(site for site in find_sites({REDUCE: texts[REDUCE]}) if site.kind == "barrier")]


def mutations_of(name: str) -> declare.Mutations:
    norm = name == "layer_norm"
    return declare.Mutations(
        kernels=lambda called: {
            words: kernel(name, operator_name=called, **config) for words, config in CONFIGS.items()
        },
        files=(ROWS, OWN) if norm else (OWN,),
        wrong=WRONG[name],
        more=barrier_of_reductions if norm else lambda texts: (),
        counts={"barrier": int(norm)},
        definitions={"bounds": 2} if norm else {},
    )


# ---- random cases


def properties(arch: str, candidate: Candidate) -> Counter[str]:
    p, t, s = candidate.problem, candidate.schedule.as_dict(), candidate.kernel.signature_dict
    assert isinstance(p, RowProblem)
    lanes = int(t["row_threads"])
    return Counter([
        f"target {arch}", f"x {p.dtype}", f"out {p.out_dtype}", f"algorithm {t['algorithm']}", f"vector {t['vector']}",
        "less than a warp" if lanes < 32 else "a warp" if lanes == 32 else "several warps",
        "one row of a block" if t["rows"] == 1 else "several rows of a block",
        "a part of a block's rows" if p.rows % int(t["rows"]) else "whole blocks",
        "whole steps" if p.columns % (lanes * int(t["vector"])) == 0 else "a part of a step",
        "narrower than the class" if int(t["vector"]) < int(s["align"]) else "as the class",
        "one row" if p.rows == 1 else "several rows",
        "over 1000 columns" if p.columns > 1000 else "up to 8 columns" if p.columns <= 8 else "columns",
    ])  # fmt: skip


# At about a third of how often it comes up.
SPREAD = {
    "target sm_80": 20, "target sm_90a": 20, "target sm_75": 20, "x float32": 25, "x float16": 25, "x bfloat16": 12,
    "out float32": 12, "out float16": 12, "out bfloat16": 10, "algorithm registers": 25, "algorithm shared": 25,
    "algorithm online": 25, "less than a warp": 10, "a warp": 3, "several warps": 8, "one row of a block": 5,
    "several rows of a block": 15, "a part of a block's rows": 10, "whole blocks": 10, "a part of a step": 20,
    "whole steps": 2, "vector 1": 15, "vector 2": 4, "vector 4": 3, "vector 8": 1, "narrower than the class": 5,
    "as the class": 15, "one row": 5, "several rows": 20, "over 1000 columns": 5, "up to 8 columns": 5,
}  # fmt: skip

# ---- winners


def by_algorithm(name: str, *shape: int, **fields: Any) -> dict[Any, Candidate]:
    """The first of level 1 of each."""
    candidates = lower(problem(name, *shape, **fields), SM_90A, LEVEL_1).candidates
    return {candidate.schedule.get("algorithm"): candidate for candidate in reversed(candidates)}


def planned(name: str) -> list[Candidate]:
    chosen = by_algorithm(name, 1000, 1024, dtype="float16")
    assert set(chosen) == {"registers", "shared", "online"}
    return list(chosen.values())


def moves_16_bytes_at_once(kernel: Kernel, code: Code) -> None:
    loads = {name.rpartition(".")[0] for name in code.instructions if name.startswith("ld.global")}
    # Three elements of a row are looked at before it is normalised online.
    looked_at = kernel.operator == "layer_norm" and kernel.tunables.get("algorithm") == "online"
    assert loads == {"ld.global.nc.v4", *(["ld.global.nc"] if looked_at else [])}
    assert code.count("st.global.v4") > 0


def compiled(name: str) -> dict[str, Kernel]:
    return {algorithm: c.kernel for algorithm, c in by_algorithm(name, 1000, 8192, dtype="bfloat16").items()}


def same_shape(rows: int, columns: int) -> dict[str, str]:
    """Of x and out in memory of their own, and vectors to go with them."""
    return {
        "x": f"H({rows}, {columns})", "out": f"H({rows}, {columns}, address=0x50000000)",
        "gamma": f"H({columns})", "beta": f"H({columns})",
    }  # fmt: skip


LAYER_NORM = declare.Library(
    candidate=lambda: by_algorithm("layer_norm", 15, 1024, dtype="float16")["registers"],
    operands={"x": "H(3, 5, 1024)", "out": "H(3, 5, 1024, address=0x50000000)"},
    record={"operands": ["x", "gamma", "beta", "out"], "extents": {"rows": 15, "columns": 1024}, "scalars": [1e-5]},
    taken={"no rows": (same_shape(0, 1024), 1), "no columns": (same_shape(4, 0), 1)},
    refused={
        "a tensor less": ({"beta": None}, "TypeError",
                          "3 tensors were given; this kernel takes 4: x, gamma, beta, out"),
        "no epsilon": ({"numbers": ()}, "TypeError", "this call takes 4 tensors, then 1 numbers"),
        "dtype": ({"out": "T((3, 5, 1024))"}, "TypeError", "out is float32; float16 is allowed"),
        "shape": ({"out": "H(15, 1024, address=0x50000000)"}, "ValueError", "out must have the shape of x"),
        "strides": ({"x": "H(3, 5, 1024, strides=(10000, 1024, 1))"}, "ValueError", "x has stride 10000"),
        "address": ({"x": "H(3, 5, 1024, address=0x70000008)"}, "ValueError", "a multiple of 16 bytes"),
        "vectors": (same_shape(4, 1020), "ValueError", "rows of x have 1020 elements; this kernel moves 8 at once"),
        "a longer row": (same_shape(4, 8192), "ValueError",
                         "rows of x have 8192 elements; this kernel holds rows of at most 1024"),
        "gamma": ({"gamma": "H(512)"}, "ValueError", "gamma must be a contiguous vector of 1024 elements"),
        "beta": ({"beta": "H(1024, 1)"}, "ValueError", "beta must be a contiguous vector of 1024 elements"),
        "in place": ({"out": "x"}, "ValueError", "out overlaps x"),
        "device": ({"gamma": "H(1024, device=1)"}, "ValueError", "gamma is on cuda:1, but x is on cuda:0"),
        "over gamma": ({"gamma": "H(1024, address=0x50000000)"}, "ValueError", "out overlaps gamma"),
        "a number for rows": ({"x": "T((), 'float16')", "out": "T((), 'float16')"}, "ValueError", "x has rank 0"),
    },
)  # fmt: skip
JOB = declare.Job(
    problems={
        "softmax": {"shape": [4, 8, 128], "dtype": "float16"},
        "layer_norm": {"operator": "layer_norm", "shape": [64, 768], "dtype": "bfloat16"},
        "rms_norm": {"operator": "rms_norm", "shape": [64, 1001], "out_dtype": "float16"},
        "online": {"shape": [2, 100000], "dtype": "float32"},
    },
)
WITHOUT = {"calls": "layer_norm's library has what the three share", "job": "softmax's job has problems of all three"}
LEFT_OUT = {"softmax": ["calls"], "layer_norm": ["job"], "rms_norm": ["calls", "job"]}


def declarations(name: str) -> declare.Declarations:
    return declare.Declarations(
        operator=name,
        problem={"shape": (6, 40)},
        problems=problems_of(name),
        searches=SEARCHES,
        references=REFERENCES,
        verifications=declare.Verifications(
            kernels=partial(verified, name), sanitized=lambda: [SANITIZED[name]()], nearest=0.3
        ),
        mutations=mutations_of(name),
        random_cases=declare.RandomCases(
            cases=partial(random_cases, name), properties=properties, spread=SPREAD, each_run=9
        ),
        machine_code=declare.MachineCode(
            kernels=partial(compiled, name),
            claims=dict.fromkeys(("registers", "shared", "online"), (moves_16_bytes_at_once,)),
        ),
        launches=declare.Launches(planned={"1000 rows": partial(planned, name)}),
        calls={"winner": LAYER_NORM} if name == "layer_norm" else None,
        job=JOB if name == "softmax" else None,
        without={kind: WITHOUT[kind] for kind in LEFT_OUT[name]},
    )


DECLARED = tuple(map(declarations, OPERATORS))
add_checks(globals())


@pytest.mark.parametrize("name", some_each_run(list(OPERATORS)))
def test_rows_whose_outputs_are_wider_than_an_access_are_stored_whole(name: str) -> None:
    """Eight halves are read at once, and written as eight floats: by two accesses."""
    (verdict,) = verify([kernel(name, "registers, a warp", "float16", "float32")])
    assert (verdict.verdict, verdict.message) == ("ok", "")


@pytest.mark.parametrize("seed", [4, 9])
def test_one_thread_sums_a_long_row_of_coarse_numbers_inside_the_bound(seed: int) -> None:
    """In one chain of 131,073 the roundings of bfloat16's distances lean to one side: 1.3 and 3.1 times the bound."""
    tall = {"row_threads": 1, "rows": 256, "vector": 1, "loads": 2}
    (verdict,) = verify(
        [kernel("layer_norm", "online, a warp", "bfloat16", align=1, scale=False, shift=False, **tall)], seed=seed
    )
    assert (verdict.verdict, verdict.message) == ("ok", "")
