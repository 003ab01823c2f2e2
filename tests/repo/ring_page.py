"""The table of predicted times in `docs/operators/ring.md`: `python -m tests.repo.ring_page` writes it, and a test
compares it."""

from __future__ import annotations

from codegen.lower import lower
from codegen.operators import operator
from codegen.predict.predict_uncompiled import predict_before
from codegen.search.search import Search
from codegen.targets import target
from tests.support.places import ROOT

PAGE = ROOT / "docs" / "operators" / "ring.md"
BEGIN, END = "<!-- predicted -->\n", "<!-- end of predicted -->\n"
TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
WAYS = [(algorithm, dtype) for dtype in ("int32", "int64") for algorithm in ("imad", "limbs")]
EXTENT = 4096


def best(algorithm: str, dtype: str, arch: str) -> float | None:
    """Milliseconds of the best at level 1; None where the target has no such schedule."""
    fields = {"operator": "matmul", "m": EXTENT, "n": EXTENT, "k": EXTENT, "dtype": dtype}
    candidates = lower(operator("matmul").parse(fields), target(arch), Search(level=1)).candidates
    times = [predict_before(c, target(arch)).us for c in candidates if c.schedule.get("algorithm") == algorithm]
    return min(times) / 1e3 if times else None


def table() -> str:
    """In Markdown."""
    rows = [
        f"| target | {' | '.join(f'`{algorithm}`, {dtype}' for algorithm, dtype in WAYS)} |",
        "|---|---|---|---|---|",
    ]
    for arch in TARGETS:
        cells = [best(algorithm, dtype, arch) for algorithm, dtype in WAYS]
        rows.append(f"| {arch} | {' | '.join('–' if ms is None else f'{ms:.3g}' for ms in cells)} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE} has no {BEGIN.strip()} … {END.strip()}"
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
