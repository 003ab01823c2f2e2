"""Every barrier, wait, commit, bounds check, swizzle and stage of an operator's text is needed, and other wrong texts
are caught: the CPU execution notices.

`make test` draws some mutants of each operator, with a fresh seed each time (CUKILN_TEST_SEED repeats them), and runs
each in kernels up to the first that shows it. `make test-long` runs all, and that a missing barrier shows in every
kernel which reaches it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import pytest

from codegen.operators import operator
from tests.operators.harness.declarations import Declarations
from tests.support.kernels.mutant_runs import AS_IT_IS, MutantVerdict, judge_mutants
from tests.support.kernels.mutants import Mutant, Site, changed, find_sites, mutants, switched_operator
from tests.support.kernels.random_cases import seed_of_this_run

Verdicts = Mapping[str, list[MutantVerdict]]
# Of a missing barrier: it must show in every kernel that reaches it.
EVERYWHERE = ("barrier", "warp barrier", "commit", "wait")
# Calls that are mutated, how a line has them, and how many mutants each has.
CALLS = {
    "barrier": ("__syncthreads()", 1), "warp barrier": ("warp_barrier()", 1), "commit": ("cp_async_commit()", 1),
    "wait": ("cp_async_wait<", 2), "bounds": ("in_bounds(", 2), "swizzle": ("swizzle(", 1), "stage": ("stage_at", 1),
}  # fmt: skip


def sites_of(declared: Declarations) -> list[Site]:
    assert declared.mutations is not None
    texts = operator(declared.operator).kernel_texts
    wrong = [changed(texts, name, *words) for name, words in declared.mutations.wrong.items()]
    found = find_sites({file: texts[file] for file in declared.mutations.files})
    return [*found, *declared.mutations.more(texts), *wrong]


@cache
def _mutants(name: str, sites: tuple[Site, ...]) -> dict[str, Mutant]:
    every = mutants(sites)
    by_name = {mutant.name: mutant for mutant in every}
    assert len(by_name) == len(every), f"mutants of {name} share a name"
    return by_name


def mutants_of(declared: Declarations) -> dict[str, Mutant]:
    return _mutants(declared.operator, tuple(sites_of(declared)))


def mutants_by_name(declared: Declarations) -> Mapping[str, Mutant | None]:
    """Where a text is not as declared, that fails, and no other check of the operator."""
    try:
        return mutants_of(declared)
    except ValueError:
        return {"its text": None}


TABLES = {"mutant": mutants_by_name}
DRAWN = int(os.environ.get("CUKILN_TEST_MUTANTS") or 25)
"""Mutants of an operator in `make test`; with 0 all are `long`, as `make test-long` has it."""


def not_drawn(having: Sequence[Declarations]) -> set[tuple[str, str]]:
    """Operators and names of mutants that this run's seed leaves to `make test-long`."""
    left: set[tuple[str, str]] = set()
    for declared in having:
        names = list(mutants_by_name(declared))
        random.Random(f"{seed_of_this_run()} {declared.operator}").shuffle(names)
        left |= {(declared.operator, name) for name in names[DRAWN:]}
    return left


LONG = {"mutant": not_drawn}


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """By operator: of every kernel as it is, and of the mutants that this run's tests ask for in the kernels that reach
    them up to the first that shows it; of a missing barrier in each, where this run has the test of that."""
    selected = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    in_each = test_a_missing_barrier_wait_or_commit_is_caught_in_every_kernel_that_reaches_it.__name__
    everywhere = any(item.originalname == in_each for item in selected)
    asked = {
        item.callspec.params["mutant"] for item in selected if item.originalname == test_a_mutant_is_caught.__name__
    }
    by_name = {}
    for declared in request.module.DECLARED:
        if declared.mutations is not None:
            folder = tmp_path_factory.mktemp("mutants")
            name = f"{declared.operator}_{folder.name}"  # its own: a process reads an operator's text once
            class_name = type(declared.op).__name__
            with switched_operator(declared.operator, class_name, folder / "operator", name, sites_of(declared)):
                kernels = list(declared.mutations.kernels(name).values())
                in_all = {
                    mutant for mutant in mutants_of(declared).values() if everywhere and mutant.kind in EVERYWHERE
                }
                run = {
                    mutant.number: range(len(kernels)) for mutant in (asked | in_all) & {*mutants_of(declared).values()}
                }
                once = run.keys() - {mutant.number for mutant in in_all}
                by_name[declared.operator] = judge_mutants(kernels, folder / "build", once, run)
    return by_name


def survived(declared: Declarations, verdicts: Verdicts, number: int) -> dict[str, bool]:
    """By the kernels that reach the mutant and in which it was run."""
    assert declared.mutations is not None
    names = list(declared.mutations.kernels(declared.operator))
    return {
        names[verdict.kernel]: verdict.verdict == "ok"
        for verdict in verdicts[declared.operator]
        if verdict.number == number
    }


def test_the_kernels_pass_as_they_are(declared: Declarations, verdicts: Verdicts) -> None:
    assert declared.mutations is not None
    names = list(declared.mutations.kernels(declared.operator))
    unchanged = [verdict for verdict in verdicts[declared.operator] if verdict.number == AS_IT_IS]
    assert {names[verdict.kernel]: (verdict.verdict, verdict.message) for verdict in unchanged} == dict.fromkeys(
        names, ("ok", "")
    )


def test_a_mutant_is_caught(declared: Declarations, mutant: Mutant | None, verdicts: Verdicts) -> None:
    assert mutant is not None
    reached = survived(declared, verdicts, mutant.number)
    assert reached, f"no kernel reaches {mutant.name!r}: add one"
    assert not all(reached.values()), reached


@pytest.mark.long
def test_a_missing_barrier_wait_or_commit_is_caught_in_every_kernel_that_reaches_it(
    declared: Declarations, verdicts: Verdicts
) -> None:
    assert declared.mutations is not None
    for mutant in mutants_of(declared).values():
        if mutant.kind in EVERYWHERE:
            line = declared.op.kernel_texts[mutant.file].splitlines()[mutant.line - 1]
            excused = {
                kernel for words, kernels in declared.mutations.excused.items() if words in line for kernel in kernels
            }
            reached = survived(declared, verdicts, mutant.number)
            assert {kernel for kernel, lived in reached.items() if lived} <= excused, mutant.name


def test_every_place_has_its_mutants(declared: Declarations) -> None:
    """Counted by other means than the suite's own: a place that it overlooks shows here."""
    of = declared.mutations
    assert of is not None
    texts = declared.op.kernel_texts
    code = [line.partition("//")[0] for file in of.files for line in texts[file].splitlines()]
    result = Counter(mutant.kind for mutant in mutants_of(declared).values() if mutant.file in of.files)
    for kind, (call, each) in CALLS.items():
        calls = sum(line.count(call) for line in code) - of.definitions.get(kind, 0)
        assert result[kind] == each * calls, kind
    every = Counter(mutant.kind for mutant in mutants_of(declared).values())
    assert {kind: every[kind] for kind in of.counts} == of.counts
