"""Every operator of the package has declarations, and its job runs the whole way over HTTP."""

from __future__ import annotations

import random
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operators
from cukiln.client import Client
from tests.operators.harness.every_operator import DECLARED, FOLDER, declared_in
from tests.operators.harness.jobs import client, problem_of_each_run, problems_of, require_failures, require_winners
from tests.operators.harness.verifications import kernels_of, of_every_class, seconds, ways
from tests.support.kernels.cpu_helpers import verify
from tests.support.kernels.random_cases import seed_of_this_run
from tests.support.run.places import ROOT

__all__ = ["client"]
PACKAGED = sorted(name for name, op in operators().items() if str(op.folder).startswith(str(ROOT / "codegen")))


WITH_JOBS = [name for name, declared in DECLARED.items() if declared.job is not None]


@pytest.mark.parametrize("name", PACKAGED)
def test_an_operator_has_declarations(name: str) -> None:
    assert name in DECLARED, (
        f"write tests/operators/{name}/test_{name}.py with DECLARED, as tests/operators/harness says"
    )


def test_kernels_that_make_test_verifies_have_every_way_of_those_that_are_declared() -> None:
    for declared in DECLARED.values():
        if kernels := kernels_of([declared]):
            chosen = of_every_class(kernels, ways)
            assert set.union(*(ways(kernels[name]) for name in chosen)) == set.union(*map(ways, kernels.values()))
            assert chosen < kernels.keys(), declared.operator


# Of each row a run of `make test` has one, by its seed: a ring, a convolution, one of the others.
BY_TURNS = (
    ("reduce",),
    ("conv2d", "conv2d_dgrad", "conv2d_wgrad"),
    ("attention", "masked_activation", "mla", "softmax"),
)


def test_a_job_of_several_operators_ends_with_verified_winners_that_are_found_again(client: Client) -> None:
    rng = random.Random(seed_of_this_run())
    require_winners(client, [problem_of_each_run(DECLARED[rng.choice(names)]) for names in BY_TURNS])


def test_every_operator_with_a_job_has_its_turn() -> None:
    assert sorted(name for names in BY_TURNS for name in names) == sorted(WITH_JOBS)


@pytest.mark.long  # in `make test`: problems of some in one job, above
@pytest.mark.parametrize("name", WITH_JOBS)
def test_a_job_ends_with_verified_winners_that_are_found_again(name: str, client: Client) -> None:
    require_winners(client, problems_of(DECLARED[name]).values())


@pytest.mark.long  # in `make test`: sums over a ring in the job of several operators
def test_a_job_of_rings_and_of_winograd_ends_with_verified_winners(client: Client) -> None:
    layer = {"operator": "conv2d", "n": 1, "h": 8, "w": 8, "c": 8, "k": 8, "r": 3, "s": 3, "padding": 1}
    ring: dict[str, Any] = {"dtype": "int64", "fraction_bits": 12, "epilogue": [{"op": "bias"}, {"op": "relu"}]}
    winograd = {"tunables": {"algorithm": ["winograd"]}, "limit": 1}
    problems: list[dict[str, Any]] = [
        {"name": "product", "operator": "matmul", "m": 24, "n": 16, "k": 40, **ring},
        {"name": "layer", **layer, **ring},
        {"name": "exact", **layer, **ring, "search": {"tunables": {"algorithm": ["winograd_limbs"]}, "limit": 1}},
        {
            "name": "exact in one launch",
            **layer,
            "operator": "conv2d_dgrad",
            "dtype": "int32",
            "search": {"tunables": {"algorithm": ["winograd_fused"]}, "limit": 1},
        },
        {"name": "floats", **layer, "dtype": "float32", "winograd": "f2", "search": winograd},
        {
            "name": "gradient",
            **layer,
            "operator": "conv2d_dgrad",
            "dtype": "float16",
            "winograd": "f2",
            "search": winograd,
        },
    ]
    answer = client.tune(problems, target="sm_90a", search={"level": 1, "limit": 2})
    assert answer.state == "done"
    verdicts = {problem.name: problem.verdicts for problem in answer.problems}
    assert verdicts == {p["name"]: {"ok": p.get("search", {}).get("limit", 2)} for p in problems}


@pytest.mark.parametrize("name", [name for name in WITH_JOBS if DECLARED[name].job.failing])  # type: ignore[union-attr]
def test_a_search_without_a_schedule_says_the_numbers(name: str, client: Client) -> None:
    require_failures(client, DECLARED[name])


Asked = dict[tuple[str, int], Kernel]
"""Kernels for the sanitizers: their modules, and the places in what these declare."""


def for_the_sanitizers() -> Asked:
    """Of all modules, those that have a part of an operator too."""
    declarations = declared_in(sorted(FOLDER.glob("*/test_*.py")))
    verifications = [declared.verifications for declared in declarations if declared.verifications is not None]
    kernels = dict.fromkeys(kernel for each in verifications for kernel in each.sanitized())
    return {(kernel.operator, number): kernel for number, kernel in enumerate(kernels)}


def cheapest_of_each_operator(asked: Asked) -> Asked:
    """The kernel that g++ and the plan take fewest seconds for."""
    chosen: Asked = {}
    for name in dict.fromkeys(operator for operator, _ in asked):
        best = min((key for key in asked if key[0] == name), key=lambda key: (seconds(asked[key]), key))
        chosen[best] = asked[best]
    return chosen


def require_clean(asked: Asked) -> None:
    """All together: most of what g++ and Python take under the sanitizers depends on no kernel."""
    verdicts = verify(list(asked.values()), sanitize=True)
    got = {key: (verdict.verdict, verdict.message) for key, verdict in zip(asked, verdicts, strict=True)}
    assert got == dict.fromkeys(asked, ("ok", ""))


SANITIZED = 2
"""Operators of a run."""


def test_kernels_of_some_operators_are_clean_under_the_sanitizers() -> None:
    """Others each time, and of matmul always: most of what the sanitizers see is the text that operators share."""
    every = cheapest_of_each_operator(for_the_sanitizers())
    assert {name for name, _ in every} == {
        name for name, declared in DECLARED.items() if declared.verifications is not None
    }
    (first,) = (key for key in every if key[0] == "matmul")
    others = random.Random(seed_of_this_run()).sample(sorted(every.keys() - {first}), SANITIZED - 1)
    require_clean({key: every[key] for key in (first, *others)})


@pytest.mark.long
def test_all_kernels_that_are_declared_for_them_are_clean_under_the_sanitizers() -> None:
    require_clean(for_the_sanitizers())
