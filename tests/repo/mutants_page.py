"""The tables of `docs/mutants.md`: `python -m tests.repo.mutants_page RESULT…` sums up what `tests.mutants.run` wrote,
a file for each subject, and writes them; without RESULT they are those of the last summary. A test compares them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.mutants.summary import COLUMNS, operator_of, summarised
from tests.support.run.places import ROOT

PAGE = ROOT / "docs" / "mutants.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured -->\n", "<!-- end of measured -->\n"


def last_summary() -> Path:
    return max(RESULTS.glob("mutants-*.json"))


def tables(summary: Mapping[str, Any]) -> str:
    """In Markdown."""
    subjects, rules = summary["subjects"], summary["rules"]
    whole = _added(subjects.values())
    operators = {operator_of(name): None for name in subjects}
    of_operators = {
        name: _added(row for own, row in subjects.items() if operator_of(own) == name) for name in operators
    }
    parts = [
        f"{summary['date']}, seed {', '.join(map(str, summary['seeds']))}, {summary['cpu_seconds']} CPU seconds: "
        f"{whole['mutants']} mutants ({summary['refused']} more texts were refused by a compiler, and "
        f"{summary['same_code']} were compiled to the same code: these are none), {whole['caught']} caught, "
        f"{whole['equivalent']} equivalent ({100 * whole['equivalent'] / whole['mutants']:.1f} %), "
        f"{whole['survived']} survived, and {whole['of 32-bit offsets']} of offsets of 32 bits. Another "
        f"kernel of the operator than a mutant's own was the first to show {summary['by_another_kernel']}.\n",
        _table("operator", {**of_operators, "all": whole}),
        _table("kernels", subjects),
        _table("rule", rules),
        "| caught by | mutants |\n|---|---|\n"
        + "".join(f"| {way} | {n} |\n" for way, n in sorted(summary["caught_by"].items(), key=lambda row: -row[1])),
        "**Equivalent** (`tests/mutants/arguments.py`):\n",
        _list(summary["argued"]),
        "**Survived**, with the kernels that were asked, and what it would take:\n",
        _list(summary["survived"], survived=True),
    ]
    return "\n".join(parts)


def with_tables(text: str, summary: Mapping[str, Any]) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE} has no {BEGIN.strip()} … {END.strip()}"
    return f"{before}{BEGIN}\n{tables(summary)}\n{END}{after}"


def _added(rows: Iterable[Mapping[str, int]]) -> dict[str, int]:
    every = list(rows)
    return {column: sum(row[column] for row in every) for column in COLUMNS}


def _table(first: str, rows: Mapping[str, Mapping[str, int]]) -> str:
    lines = [f"| {first} | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    lines += [f"| {name} | {' | '.join(str(row[column]) for column in COLUMNS)} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def _list(rows: Sequence[Mapping[str, Any]], *, survived: bool = False) -> str:
    return "".join(
        f"- `{row['file']}:{row['line']}`, {row['rule']}: `{row['old']}` → `{row['new'] or ' '}` in `{row['text']}` "
        f"({', '.join(row['of'])}{': ' + '; '.join(row['kernels']) if survived else ''}): "
        f"{row['takes'] or 'not explained yet' if survived else row['how']}\n"
        for row in rows
    )


def main() -> None:
    if sys.argv[1:]:
        date = time.strftime("%Y-%m-%d", time.gmtime())
        summary = summarised([json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]], date)
        (RESULTS / f"mutants-{date}.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    summary = json.loads(last_summary().read_text(encoding="utf-8"))
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), summary), encoding="utf-8")


if __name__ == "__main__":
    main()
