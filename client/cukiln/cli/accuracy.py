"""`cukiln accuracy`: the winners' errors against float64 in their verification, and the vendor's library's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text

from cukiln.cli.console import percent, plain_table, shown
from cukiln.types import Contender, WinnerRecord

_NOTES = (
    "error, bound: the largest |result - float64| over all elements and runs on random normals, and what is allowed "
    "there; of bound: the most of its bound that any element used",
    "integers: whether inputs whose sums are exact gave the reference's bits; no rounding explains a difference there",
)
_VENDOR = "vendor: its library's largest error on the same inputs, and what ours may be off at that place"


@dataclass(frozen=True)
class AccuracyRow:
    """One case of a winner's verification, or its comparison on a GPU. `sum_length`: products in each sum; `integers`:
    whether bits were equal on the same extents, null without such a case; `vendor_error`: of a comparison."""

    problem: str
    device_class: str
    operator: str
    dtype: str
    out_dtype: str
    sum_length: int | None
    extents: list[int]
    max_error: float
    error_bound: float | None
    share_of_bound: float | None
    integers: bool | None
    vendor_error: float | None = None
    vendor_bound: float | None = None


def accuracy_rows(name: str, record: WinnerRecord) -> list[AccuracyRow]:
    """Of the fastest kernel of the problem `name`, the shortest sums first."""
    best, vendor = record.front[0], record.vendor
    cases = [case for case in best.verdict.get("cases", []) if case.get("max_error") is not None]
    exact = {tuple(case["extents"]): case["max_error"] == 0.0 for case in cases if case["kind"] == "integer"}
    lengths = {tuple(case["extents"]): case.get("sum_length") for case in cases}

    def row(extents: list[int], max_error: float, bound: float | None, share: float | None) -> AccuracyRow:
        return AccuracyRow(
            problem=name,
            device_class=record.device_class,
            operator=record.operator,
            dtype=str(record.problem.get("dtype", "-")),
            out_dtype=str(record.problem.get("out_dtype", "-")),
            sum_length=lengths.get(tuple(extents)),
            extents=extents,
            max_error=max_error,
            error_bound=bound,
            share_of_bound=share,
            integers=exact.get(tuple(extents)),
        )

    rows = [
        row(case["extents"], case["max_error"], case.get("error_bound"), case.get("max_ratio"))
        for case in cases
        if case["kind"] == "normal"
    ]
    compared = best.measurement
    if isinstance(compared, Contender) and compared.max_error is not None:  # on the vendor's inputs
        beside = row(list(best.launch.extents.values()), compared.max_error, compared.error_bound, None)
        if vendor is not None:
            beside = replace(beside, vendor_error=vendor.max_error, vendor_bound=vendor.error_bound)
        rows.append(beside)
    return sorted(rows, key=lambda row: row.sum_length or 0)


def print_accuracy(console: Console, rows: Sequence[AccuracyRow]) -> None:
    """A row for each case, then the legend."""
    headings = ["problem", "operator", "dtype", "sum of", "error", "bound", "of bound", "integers"]
    with_vendor = any(row.vendor_error is not None for row in rows)
    table = plain_table()
    for heading in [*headings, *(["vendor"] if with_vendor else [])]:
        left = heading in ("problem", "operator", "dtype", "integers")
        table.add_column(heading, no_wrap=heading != "problem", justify="left" if left else "right")
    for row in rows:
        kind = row.dtype if row.dtype == row.out_dtype else f"{row.dtype} → {row.out_dtype}"
        cells = [
            row.problem,
            row.operator,
            kind,
            shown(row.sum_length, ","),
            shown(row.max_error, ".1e"),
            shown(row.error_bound, ".1e"),
            percent(row.share_of_bound),
            {True: "equal", False: "differ", None: "-"}[row.integers],
        ]
        if with_vendor:
            cells.append(shown(row.vendor_error, ".1e", f" of {shown(row.vendor_bound, '.1e')}"))
        table.add_row(*map(Text, cells))
    console.print(table)
    for note in [*_NOTES, *([_VENDOR] if with_vendor else [])]:
        console.print(Text(note, style="dim"))
