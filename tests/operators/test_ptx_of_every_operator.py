"""The PTX of every operator's kernels passes the plan on the CPU, and mutants of it do not.

Each run has a random kernel of a third of the operators; `make test-long` one of each, every class of those that are
verified, and every operator, dtype and algorithm. What else `make test` runs of PTX stands in
tests/of_workers/cpu/test_ptx.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from tests.operators.harness.every_form import WITH_DECLARATIONS, declarations_of, forms
from tests.operators.harness.every_operator import DECLARED
from tests.operators.harness.verifications import kernels_of, of_every_class, seconds
from tests.operators.reduce import random_cases as reductions
from tests.support.kernels.ptx_mutants import Mutant, mutants_of, ptx_of, sample, verdict_of
from tests.support.kernels.random_cases import seed_of_this_run
from tests.support.run.each_run import some_each_run
from tests.support.run.places import ARTIFACTS

TOGETHER = 8  # kernels of one call of nvcc
MUTANTS, CAUGHT = 60, 30
OF_A_PLAN = 60.0  # CPU seconds of a kernel's run: Winograd with sums in 64 bits takes more than 5


def many(test: Callable[..., None]) -> Callable[..., None]:
    """Tens of kernels, a second or more each."""
    return pytest.mark.long(pytest.mark.timeout(3600)(test))


@cache
def kernels(name: str) -> tuple[Kernel, ...]:
    """Of every class; of reduce, whose declarations have no verifications, those of random cases."""
    of = kernels_of([DECLARED[name]])
    if of:
        return tuple(dict.fromkeys(of[each] for each in sorted(of_every_class(of))))
    return tuple(dict.fromkeys(candidate.kernel for _, candidate in reductions.random_cases(40, seed=7)))


def kernel_of_this_run(name: str) -> Kernel:
    """The one of three that compiles fastest."""
    seed = seed_of_this_run()
    having = [declared.random_cases for declared in declarations_of(name) if declared.random_cases is not None]
    cases = random.Random(seed).choice(having).cases(3, seed)
    return min((candidate.kernel for _, candidate in cases), key=seconds)


@pytest.mark.parametrize("name", some_each_run(list(DECLARED), 3))
def test_the_ptx_of_a_random_kernel_passes_the_plan(name: str) -> None:
    kernel = kernel_of_this_run(name)
    verdict = verdict_of(kernel, ptx_of((kernel,)), cpu_seconds=OF_A_PLAN)
    assert (verdict.verdict, verdict.message) == ("ok", ""), kernel


def chunks(of: Sequence[Kernel]) -> list[tuple[Kernel, ...]]:
    return [tuple(of[first : first + TOGETHER]) for first in range(0, len(of), TOGETHER)]


@many
@pytest.mark.parametrize("name", DECLARED)
def test_the_ptx_of_every_class_of_kernels_passes_the_plan(name: str) -> None:
    for chunk in chunks(kernels(name)):
        ptx = ptx_of.__wrapped__(chunk)
        for kernel in chunk:
            verdict = verdict_of(kernel, ptx)
            assert (verdict.verdict, verdict.message) == ("ok", ""), kernel


@many
@pytest.mark.parametrize("module", WITH_DECLARATIONS, ids=lambda module: module.stem)
def test_the_ptx_of_every_dtype_and_algorithm_passes_the_plan(module: Path) -> None:
    for chunk in chunks(forms(module)):
        ptx = ptx_of.__wrapped__(chunk)
        for kernel in chunk:
            verdict = verdict_of(kernel, ptx, cpu_seconds=OF_A_PLAN)
            assert (verdict.verdict, verdict.message) == ("ok", ""), kernel


@many
@pytest.mark.parametrize("target", ["sm_75", "sm_90a"])
@pytest.mark.parametrize("name", DECLARED)
def test_the_ptx_for_other_targets_passes_the_plan(name: str, target: str) -> None:
    chunk = tuple(islice(kernels(name), 4))
    ptx = ptx_of.__wrapped__(chunk, target)
    for kernel in chunk:
        verdict = verdict_of(kernel, ptx, target)
        assert (verdict.verdict, verdict.message) == ("ok", ""), kernel


def with_enough_mutants(of: Sequence[Kernel], seed: int) -> tuple[Kernel, str, list[Mutant]]:
    """The first kernel from a place on that has so many, its PTX and them."""
    start = seed % len(of)
    for kernel in (*of[start:], *of[:start]):
        ptx = ptx_of((kernel,))
        mutants = list(mutants_of(kernel, ptx))
        if len(mutants) >= MUTANTS:
            return kernel, ptx, mutants
    raise AssertionError(f"none of {len(of)} kernels has {MUTANTS} mutants")


@many
@pytest.mark.parametrize("name", DECLARED)
def test_mutants_of_the_ptx_are_caught(name: str) -> None:
    seed = seed_of_this_run()
    # A chain of sigmoids hides what comes before it: PTX has no build in which activations are the identity.
    plain = [kernel for kernel in kernels(name) if operator(name).exact(kernel)] or kernels(name)
    kernel, ptx, mutants = with_enough_mutants(plain, seed)
    chosen = sample(mutants, MUTANTS, seed)
    verified = [(mutant, verdict_of(kernel, mutant.of(ptx))) for mutant in chosen]
    assert len(verified) == MUTANTS
    survived = [mutant for mutant, verdict in verified if verdict.verdict == "ok"]
    rows = [
        {"rule": mutant.rule, "line": mutant.line, "before": mutant.before.strip(), "after": mutant.after.strip()}
        | {"verdict": verdict.verdict, "message": verdict.message[:200]}
        for mutant, verdict in verified
    ]
    ARTIFACTS.mkdir(exist_ok=True)
    (ARTIFACTS / f"ptx_mutants_{name}.json").write_text(json.dumps({"kernel": kernel.to_json(), "mutants": rows}))
    # What is left are mostly equivalent ones: a bound that the plan's extents do not come to, a comparison with an end
    # that is never met.
    caught = [verdict for _, verdict in verified if verdict.verdict in ("incorrect", "runtime_error", "run_timeout")]
    assert len(caught) >= CAUGHT, [(mutant.rule, mutant.before) for mutant in survived]
