"""`python -m tests.mutants.run`: makes mutants of the operators' kernels, and writes down what became of each, a file
for each subject."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context

from tests.mutants.rules import WIDE
from tests.mutants.subjects import SUBJECTS
from tests.mutants.verify import MutantResult, verify_mutants
from tests.support.run.places import ARTIFACTS

FOLDER = ARTIFACTS / "rule-mutants"
EACH, LEAST, KERNELS = 42, 14, 3
"""Mutants of an operator, of each of its subjects at least, and the kernels that they are mutants of."""


def share(name: str, each: int = EACH) -> int:
    """How many mutants of its operator's are a subject's."""
    (operator,) = [subject.operator for subject in SUBJECTS if subject.name == name]
    subjects = [subject for subject in SUBJECTS if subject.operator == operator]
    return max(min(LEAST, each), -(-each // len(subjects)))


def mutants_with_outcomes(name: str, mutants: int, kernels: int, seed: int) -> list[MutantResult]:
    """Of a subject; they are an artifact, too."""
    (subject,) = [each for each in SUBJECTS if each.name == name]
    results = list(verify_mutants(subject.sample(kernels, seed), mutants, seed))
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = {"subject": name, "seed": seed, "mutants": [asdict(each) for each in results]}
    (FOLDER / f"{name.replace(' ', '-').replace(',', '')}.json").write_text(json.dumps(rows, indent=1) + "\n")
    return results


def survivors(results: Sequence[MutantResult]) -> list[str]:
    return [
        f"{each.kernel}: {each.change.words()} ({each.how})"
        for each in results
        if each.outcome == "survived" and each.change.rule != WIDE
    ]


def _said(name: str, each: int, kernels: int, seed: int) -> None:
    results = mutants_with_outcomes(name, share(name, each), kernels, seed)
    counts = Counter(result.outcome for result in results)
    words = [
        f"{name}: {dict(counts)}, {sum(result.seconds for result in results):.0f} CPU seconds",
        *survivors(results),
    ]
    sys.stdout.write("\n  ".join(words) + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    names = [subject.name for subject in SUBJECTS]
    parser.add_argument("--subject", action="append", choices=names, help="all where none is named")
    parser.add_argument("--mutants", type=int, default=EACH, help="of each operator")
    parser.add_argument("--kernels", type=int, default=KERNELS, help="of each subject")
    parser.add_argument("--seed", type=int, default=None, help="another one each time where it is not named")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else secrets.randbelow(2**31)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("fork")) as pool:
        of_one = partial(_said, each=options.mutants, kernels=options.kernels, seed=seed)
        list(pool.map(of_one, options.subject or names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
