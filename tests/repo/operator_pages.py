"""The tables of tunables in `docs/operators/`, from the operators' own: `python -m tests.repo.operator_pages` writes
them, and a test compares them."""

from __future__ import annotations

from pathlib import Path

from codegen.operators import operator
from codegen.search.space import Tunable, allowed_text
from tests.support.run.places import ROOT

PAGES = ROOT / "docs" / "operators"
OPERATORS = ("matmul", "conv2d", "conv2d_wgrad", "reduce", "softmax", "masked_activation", "attention", "mla")
"""Others have the tunables of one of these, to which their page leads."""
BEGIN, END = "<!-- tunables -->\n", "<!-- end of tunables -->\n"


def table(tunables: tuple[Tunable, ...]) -> str:
    """In Markdown."""
    rows = ["| tunable | allowed | default | meaning |", "|---|---|---|---|"]
    for tunable in tunables:
        meaning = f"{tunable.meaning}; chosen at launch" if tunable.launch_time else tunable.meaning
        rows.append(f"| `{tunable.name}` | {allowed_text(tunable.allowed)} | {tunable.default} | {meaning} |")
    return "\n".join(rows) + "\n"


def page(name: str) -> Path:
    return PAGES / f"{name}.md"


def with_table(name: str, text: str) -> str:
    """The page with the table that belongs there."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{page(name)} has no {BEGIN.strip()} … {END.strip()}"
    return f"{before}{BEGIN}\n{table(operator(name).tunables)}\n{END}{after}"


def main() -> None:
    for name in OPERATORS:
        text = page(name).read_text(encoding="utf-8")
        page(name).write_text(with_table(name, text), encoding="utf-8")


if __name__ == "__main__":
    main()
