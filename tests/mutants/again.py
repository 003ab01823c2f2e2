"""`python -m tests.mutants.again RESULT…`: verifies again, by the plan as it is now, the mutants that survived a run of
`tests.mutants.run` or were argued away, and writes each result where it was read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.mutants.changes import Change, changes_of, sections
from tests.mutants.emulation import runtime
from tests.mutants.run import KERNELS
from tests.mutants.subjects import SUBJECTS
from tests.mutants.verify import ARGUED, Bench, MutantResult, settled


def undecided(row: Mapping[str, Any]) -> bool:
    return row["outcome"] == "survived" or row["how"].startswith(ARGUED)


class Benches:
    """Kernels of a subject, built when a mutant is of them."""

    def __init__(self, subject: str, seed: int, folder: Path) -> None:
        (of,) = [each for each in SUBJECTS if each.name == subject]
        self._all, self._sample, self._seed, self._folder = of.kernels(), of.sample(KERNELS, seed), seed, folder
        self._built = dict[str, Bench]()

    def of(self, name: str) -> Bench:
        if name not in self._built:
            place = self._folder / f"{self._seed}-{len(self._built)}"
            self._built[name] = Bench(name, self._all[name], place, self._seed, runtime(self._folder))
        return self._built[name]

    def others(self, name: str) -> Iterator[Bench]:
        return (self.of(other) for other in self._sample if other != name)


def as_it_stands(bench: Bench, row: Mapping[str, Any]) -> Change | None:
    """A change by its text, whose line may have moved; null where the text is no more."""
    was = Change(**row)
    text = sections(bench.kernel).get(was.file)
    same = [
        each
        for each in (changes_of(was.file, text) if text is not None else ())
        if (each.rule, each.text, each.column, each.old, each.new) == (was.rule, was.text, was.column, was.old, was.new)
    ]
    return min(same, key=lambda change: abs(change.line - was.line), default=None)


def verified_again(result: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The rows of a result; of a mutant whose line is no more there is none."""
    benches, rows = Benches(result["subject"], result["seed"], folder), list[dict[str, Any]]()
    for row in result["mutants"]:
        if not undecided(row):
            rows.append(row)
            continue
        name = row["first"] or row["kernel"]
        change = as_it_stands(benches.of(name), row["change"])
        if change is None:
            sys.stdout.write(f"{name}: no such line any more: {row['change']['text'].strip()}\n")
            continue
        settled_again = settled(benches.of(name), change, benches.others(name))
        rows.append(asdict(replace(settled_again, seconds=settled_again.seconds + row["seconds"])))
        _say(settled_again)
    return rows


def _say(result: MutantResult) -> None:
    sys.stdout.write(f"{result.kernel}: {result.change.words()} => {result.outcome}: {result.how[:160]}\n")
    sys.stdout.flush()


def main() -> None:
    for name in sys.argv[1:]:
        result = json.loads(Path(name).read_text(encoding="utf-8"))
        with TemporaryDirectory(prefix="mutants_") as folder:
            result["mutants"] = verified_again(result, Path(folder))
        Path(name).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
