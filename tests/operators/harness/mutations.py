"""Every barrier, wait, commit, bounds check, swizzle and stage of an operator's text is needed, and other wrong texts
are caught: the CPU execution notices.

`make test` takes of each operator a kernel and some of the mutants that it reaches, with a fresh seed each time
(CUKILN_TEST_SEED repeats them), and of the operators with more kernels some. `make test-long` runs all mutants, each in
kernels up to the first that shows it, and that a missing barrier shows in every kernel which reaches it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from tests.operators.harness.declarations import Declarations
from tests.support.kernels.mutant_runs import AS_IT_IS, MutantVerdict, verify_mutants
from tests.support.kernels.mutants import Mutant, Site, changed, find_sites, mutants, switched_operator
from tests.support.kernels.random_cases import seed_of_this_run
from tests.support.run.each_run import SOME_ROWS

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
    sites = find_sites({file: texts[file] for file in declared.mutations.files})
    return [*sites, *declared.mutations.more(texts), *wrong]


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


TABLES = {"mutant": mutants_by_name, "run_seed": lambda declared: {"some": seed_of_this_run()}}
MUTANTS = 6
"""Mutants of a kernel in `make test`."""
TURNS = 3
"""Of so many runs of `make test`, one on average has those of a set of declarations."""


def every_mutant(having: Sequence[Declarations]) -> set[tuple[str, str]]:
    return {(declared.operator, name) for declared in having for name in mutants_by_name(declared)}


def not_in_turn(having: Sequence[Declarations]) -> set[tuple[str, str]]:
    """Of the operators whose mutants this run's seed leaves to others. Reductions are there each time: they have all
    kinds, and compile fastest."""
    turns = {declared.operator: _random(declared, "turn").randrange(TURNS) for declared in having}
    return {(name, "some") for name, turn in turns.items() if not SOME_ROWS or (turn and name != "reduce")}


def _random(declared: Declarations, purpose: str) -> random.Random:
    """By this run's seed; of modules of one operator by what they mutate."""
    assert declared.mutations is not None
    return random.Random(f"{seed_of_this_run()} {purpose} {declared.operator} {sorted(declared.mutations.files)}")


LONG = {"mutant": every_mutant, "run_seed": not_in_turn}


@contextmanager
def kernels_with_mutants(declared: Declarations, folder: Path) -> Iterator[Mapping[str, Kernel]]:
    """By the names that they are declared with; whatever runs them ends with the block."""
    assert declared.mutations is not None
    name = f"{declared.operator}_{folder.name}"  # its own: a process reads an operator's text once
    class_name = type(declared.op).__name__
    with switched_operator(declared.operator, class_name, folder / "operator", name, sites_of(declared)):
        yield declared.mutations.kernels(name)


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
            with kernels_with_mutants(declared, folder) as named:
                kernels = list(named.values())
                in_all = {
                    mutant for mutant in mutants_of(declared).values() if everywhere and mutant.kind in EVERYWHERE
                }
                run = {
                    mutant.number: range(len(kernels)) for mutant in (asked | in_all) & {*mutants_of(declared).values()}
                }
                once = run.keys() - {mutant.number for mutant in in_all}
                by_name[declared.operator] = verify_mutants(kernels, folder / "build", once, run)
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


def excused(declared: Declarations, mutant: Mutant) -> set[str]:
    """Names of kernels in which a missing barrier is no fault."""
    assert declared.mutations is not None
    line = declared.op.kernel_texts[mutant.file].splitlines()[mutant.line - 1]
    return {kernel for words, kernels in declared.mutations.excused.items() if words in line for kernel in kernels}


def in_turn_of_kinds(every: Sequence[Mutant], rng: random.Random) -> list[Mutant]:
    """Shuffled; missing barriers and other mutants by turns."""
    shuffled = rng.sample(every, len(every))
    missing = [mutant for mutant in shuffled if mutant.kind in EVERYWHERE]
    others = [mutant for mutant in shuffled if mutant.kind not in EVERYWHERE]
    return [mutant for pair in zip_longest(missing, others) for mutant in pair if mutant is not None]


def test_some_mutants_are_caught(declared: Declarations, run_seed: int, tmp_path: Path) -> None:
    """In a kernel that passes as it is: each barrier, wait and commit that is missing, and some of the others, of which
    a kernel need not show every one."""
    by_number = {mutant.number: mutant for mutant in mutants_of(declared).values()}
    rng = _random(declared, "rng")
    with kernels_with_mutants(declared, tmp_path) as named:
        called = rng.choice(list(named))
        asked = {mutant.number: (0,) for mutant in in_turn_of_kinds(list(by_number.values()), rng)}
        as_it_is, *ran = verify_mutants([named[called]], tmp_path / "build", asked=asked, most=MUTANTS)
    assert (as_it_is.verdict, as_it_is.message) == ("ok", ""), called
    survived = [by_number[verdict.number] for verdict in ran if verdict.verdict == "ok"]
    assert len(survived) < len(ran), (called, survived)
    due = [mutant for mutant in survived if mutant.kind in EVERYWHERE and called not in excused(declared, mutant)]
    assert not due, (called, due)


@pytest.mark.long
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
            reached = survived(declared, verdicts, mutant.number)
            assert {kernel for kernel, lived in reached.items() if lived} <= excused(declared, mutant), mutant.name


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
