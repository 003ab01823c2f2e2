"""The tables of predictions and of SASS in `docs/operators/attention.md`: `python -m tests.repo.attention_page` writes
them, and a test compares them."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

from benchmarks import predict_attention
from benchmarks.count_sass import counted
from benchmarks.predict_attention import HEAD_DIMS, TARGETS
from tests.support.run.places import ROOT
from workers.compile.toolchain import find_toolchain
from workers.processes.processes import Processes

PAGE = ROOT / "docs" / "operators" / "attention.md"
# By what a warp does with them; any other name counts as addresses, checks and branches.
KINDS = {
    "softmax": ("FMNMX", "FMUL", "FFMA", "FADD", "MUFU", "FSEL", "FSETP", "SHFL", "F2FP"),
    "shared memory": ("LDSM", "LDS"),
    "copies and barriers": ("LDGSTS", "LDGDEPBAR", "DEPBAR", "BAR"),
}


def of_kind(instructions: dict[str, int]) -> list[int]:
    """Those of each of KINDS, then all others but products."""
    known = [sum(instructions.get(name, 0) for name in names) for names in KINDS.values()]
    return [*known, sum(instructions.values()) - instructions["HMMA"] - sum(known)]


def sass() -> str:
    """By target and size of head, in Markdown."""
    heads = ["target, head", "tile_q × tile_kv, warps, stages", "registers", "HMMA", *KINDS, "addresses, checks",
             "other for each HMMA", "as predicted", "where a mask is computed, more"]  # fmt: skip
    rows = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    with closing(Processes()) as processes:
        toolchain = find_toolchain(processes)
        loops = [counted(arch, head_dim, toolchain, processes) for arch in TARGETS for head_dim in HEAD_DIMS]
    for loop in loops:
        rows.append(f"| {' | '.join(map(str, cells(loop)))} |")
    return "\n".join(rows) + "\n"


def cells(loop: dict[str, Any]) -> list[Any]:
    """Of one row."""
    t = loop["schedule"]
    tiles = f"{t['tile_q']} × {t['tile_kv']}, {t['warps']}, {t['stages']}"
    spilled = f", {loop['spilled_bytes']} bytes spilled" if loop["spilled_bytes"] else ""
    return [f"{loop['target']}, {loop['head_dim']}", tiles, f"{loop['registers']}{spilled}", loop["hmma"],
            *of_kind(loop["instructions"]), f"{loop['other_per_hmma']:.2f}", f"{loop['predicted_other_per_hmma']:.2f}",
            f"{loop['mask_per_hmma']:.2f}"]  # fmt: skip


TABLES = {
    **{f"predicted for {arch}": partial(predict_attention.table, arch) for arch in TARGETS},
    "SASS": sass,
}


def with_tables(text: str) -> str:
    for name, table in TABLES.items():
        begin, stop = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        _, end, after = rest.partition(stop)
        assert end, f"{PAGE} has no {begin.strip()} … {stop.strip()}"
        text = f"{before}{begin}\n{table()}\n{stop}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
