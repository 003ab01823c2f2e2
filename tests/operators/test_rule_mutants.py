"""Mutants that rules make of the operators' texts are caught by the plan that every candidate goes through, or are the
same kernel; what became of each is an artifact (`rule-mutants/`). `make test` has a few of one of three kernels, always
the same; `make test-long` some of every operator and algorithm, others each time."""

from __future__ import annotations

import pytest

from tests.mutants.run import KERNELS, mutants_with_outcomes, share, survivors
from tests.mutants.subjects import SUBJECTS
from tests.support.kernels.random_cases import seed_of_this_run
from tests.support.run.each_run import some_each_run

FEW = {"matmul": 3, "reduce": 4, "softmax": 4}
SEED = 3
# Of the survivors of a run with a seed that is new, so many of a hundred at most are not explained yet: those that a
# run shows are closed in a plan, or their equality is argued (tests/mutants/arguments.py).
UNEXPLAINED = 8


@pytest.mark.parametrize("name", some_each_run(list(FEW)))
def test_a_mutant_is_caught_or_the_same_kernel(name: str) -> None:
    results = mutants_with_outcomes(name, FEW[name], 1, SEED)
    assert survivors(results) == []
    assert any(each.outcome == "caught" for each in results)


@pytest.mark.long
@pytest.mark.parametrize("name", [subject.name for subject in SUBJECTS])
def test_few_mutants_of_any_seed_survive(name: str) -> None:
    results = mutants_with_outcomes(name, 2 * share(name), 2 * KERNELS, seed_of_this_run())
    mutants = [each for each in results if each.outcome != "no mutant"]
    assert 100 * len(survivors(results)) <= UNEXPLAINED * len(mutants), survivors(results)
