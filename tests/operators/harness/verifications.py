"""Kernels pass the whole verification plan on the CPU, all of a module built together.

In a third of the runs, by the seed, `make test` verifies a part of a module's kernels that has every way and every
dtype, layout and split of the whole, and takes the fewest seconds; the rest is `long`. Each run has random cases of the
module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from tests.operators.harness.declarations import Declarations
from tests.support.kernels.cpu_helpers import verify
from tests.support.run.each_run import turn
from workers.cpu.verify import CpuVerdict

TABLES = {"kernel": lambda declared: declared.verifications.kernels()}
TURNS = 3
PATH = ("algorithm", "limb_split")
NUMBERED = ("output_tile",)  # tunables whose numbers name ways through the text, as words do
TOGETHER = ("layout", "dtype", "out_dtype", "align", "split")
SHARED = ("fraction_bits", "rounding")  # of the text that all paths share, as nodes of an epilogue are
Classes = set[tuple[object, ...]]


def classes(kernel: Kernel) -> Classes:
    """What a kernel is one of: each value of a tunable on the path of its algorithm; of its operator each value of the
    signature on that path, and any two of layout, dtypes, alignments and split; of the text that all paths share, each
    value and each node of an epilogue."""
    tunables, signature = kernel.tunables.as_dict(), dict(kernel.signature_dict)
    nodes = signature.pop("epilogue", [])
    shared = [(name, str(signature.pop(name))) for name in SHARED if name in signature]
    signature["has an epilogue"] = bool(nodes)
    values = sorted((name, str(value)) for name, value in {**signature, **tunables}.items())
    path = (*sorted(tunables), *(tunables.get(name) for name in PATH))
    return {
        *shared,
        *(("node", str(node)) for node in nodes),
        *((path, *value) for value in values if value[0] in tunables),
        *((kernel.operator, path, *value) for value in values if value[0] in signature),
        *((kernel.operator, *two) for two in combinations([v for v in values if v[0].startswith(TOGETHER)], 2)),
    }


def ways(kernel: Kernel) -> Classes:
    """Of its classes those that each run has: the path of its algorithm, with each way of splitting a sum; each tunable
    that names a way through the text; of its operator each value of the signature, alignments and epilogue apart."""
    tunables, signature = kernel.tunables.as_dict(), dict(kernel.signature_dict)
    names, split = tuple(sorted(tunables)), str(tunables.get("split"))
    apart = {"epilogue", *SHARED, *(name for name in signature if name.startswith("align"))}
    return {
        (*names, *(tunables.get(name) for name in PATH), split),
        *((names, name, value) for name, value in tunables.items() if isinstance(value, str) or name in NUMBERED),
        *((kernel.operator, name, str(value)) for name, value in signature.items() if name not in apart),
    }


Names = set[tuple[str, str]]
"""Of kernels: their operators, and what their declarations call them."""


def kernels_of(declarations: Iterable[Declarations]) -> dict[tuple[str, str], Kernel]:
    verifications = {
        declared.operator: declared.verifications for declared in declarations if declared.verifications is not None
    }
    return {(operator, name): kernel for operator, of in verifications.items() for name, kernel in of.kernels().items()}


def of_every_class(
    kernels: Mapping[tuple[str, str], Kernel], classes_of: Callable[[Kernel], Classes] = classes
) -> Names:
    """A part of the kernels that has all their classes."""
    return covering({name: classes_of(kernel) for name, kernel in kernels.items()}, kernels, seconds)


def seconds(kernel: Kernel) -> float:
    """About what a plan takes: g++ as long as nvcc, by what is predicted, and kernels as the square of it."""
    compiling = operator(kernel.operator).predicted_compile_seconds(kernel)
    return compiling + 10 * compiling**2


def covering(
    having: Mapping[tuple[str, str], Classes],
    kernels: Mapping[tuple[str, str], Kernel],
    seconds_of: Callable[[Kernel], float],
) -> Names:
    """A part that has the classes of all: again and again the one that adds most for its seconds, then without those
    whose classes the others have."""
    took = {name: seconds_of(kernels[name]) for name in having}
    missing, chosen = Classes().union(*having.values()), Names()
    while missing:
        best = max(having, key=lambda name: len(having[name] & missing) / took[name])
        chosen.add(best)
        missing -= having[best]
    for name in sorted(chosen, key=lambda name: (-took[name], name)):
        others = chosen - {name}
        chosen = others if having[name] <= Classes().union(*(having[other] for other in others)) else chosen
    return chosen


def repeats(having: Iterable[Declarations]) -> Names:
    """Of a module's kernels those that `make test-long` verifies."""
    kernels = kernels_of(having)
    return kernels.keys() - of_every_class(kernels, ways) if in_turn(kernels) else {*kernels}


def in_turn(kernels: Iterable[tuple[str, str]]) -> bool:
    """Whether this run verifies the module of these kernels."""
    return turn(f"{sorted(kernels)}", TURNS) == 0


def out_of_turn(having: Sequence[Declarations]) -> Names:
    return set() if in_turn(kernels_of(having)) else {(declared.operator, "") for declared in having}


LONG = {
    "kernel": repeats,
    "test_exact_cases_are_exact_and_approximate_ones_inside_their_bound": out_of_turn,
}


@pytest.fixture(scope="module")
def cpu_verdicts(request: pytest.FixtureRequest) -> Mapping[Kernel, CpuVerdict]:
    """Of the kernels that this run's selection of tests asks for; where it has none, those of every way."""
    asked = [
        item.callspec.params["kernel"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
        and item.originalname == test_a_kernel_passes_the_whole_plan.__name__
    ]  # fmt: skip
    kernels = kernels_of(request.module.DECLARED)
    asked = list(dict.fromkeys(asked or [kernels[name] for name in sorted(of_every_class(kernels, ways))]))
    return dict(zip(asked, verify(asked, seed=20_26), strict=True))


def test_a_kernel_passes_the_whole_plan(
    declared: Declarations, kernel: Kernel, cpu_verdicts: Mapping[Kernel, CpuVerdict]
) -> None:
    assert (cpu_verdicts[kernel].verdict, cpu_verdicts[kernel].message) == ("ok", "")


def cases_of(declared: Declarations, cpu_verdicts: Mapping[Kernel, CpuVerdict]) -> dict[str, list[dict[str, Any]]]:
    """Of the kernels that were verified."""
    assert declared.verifications is not None
    kernels = declared.verifications.kernels()
    return {name: cpu_verdicts[kernel].details["cases"] for name, kernel in kernels.items() if kernel in cpu_verdicts}


def test_exact_cases_are_exact_and_approximate_ones_inside_their_bound(
    declared: Declarations, cpu_verdicts: Mapping[Kernel, CpuVerdict]
) -> None:
    by_kernel = cases_of(declared, cpu_verdicts)
    for name, cases in by_kernel.items():
        assert {case["kind"] for case in cases} - {"positive", "special"} == {"integer", "normal"}, name
        assert all(case["max_error"] == 0.0 for case in cases if case["exact"]), name
        assert all(case["max_ratio"] <= 1.0 for case in cases), name
    # The bound is one that real rounding comes near to, not one that forgives everything: of some of an operator's
    # kernels alone, which may all be exact, those of the module's other operators count, too.
    assert declared.verifications is not None
    whole = len(by_kernel) == len(declared.verifications.kernels())
    verified = by_kernel.values() if whole else (verdict.details["cases"] for verdict in cpu_verdicts.values())
    assert max(case["max_ratio"] for cases in verified for case in cases) > declared.verifications.nearest


def test_kernels_and_their_test_problems_have_the_signature_of_a_problem(declared: Declarations) -> None:
    assert declared.verifications is not None
    for name, kernel in declared.verifications.kernels().items():
        dtype = kernel.signature_dict.get("dtype")
        problem = declared.parse({"dtype": dtype} if dtype in ("int32", "int64") else {})  # a ring's has further names
        assert set(declared.op.signature(problem)) == set(kernel.signature_dict), name
        for reduced in declared.op.test_problems(kernel):
            assert declared.op.signature(reduced) == kernel.signature_dict, name
