"""The tables of predictions and of SASS in `docs/operators/attention.md`, and of SASS in `mla.md`:
`python -m tests.repo.attention_page` writes them, and a test compares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import predict_attention
from benchmarks.count_sass import MLA, PAGED, counted, counted_of_mla, counted_of_pages
from benchmarks.predict_attention import HEAD_DIMS, TARGETS
from tests.support.run.places import ROOT
from workers.compile.toolchain import find_toolchain
from workers.processes.processes import Processes

PAGE = ROOT / "docs" / "operators" / "attention.md"
MLA_PAGE = PAGE.with_name("mla.md")
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
    with closing(Processes()) as processes:
        toolchain = find_toolchain(processes)
        loops = [counted(arch, head_dim, toolchain, processes) for arch in TARGETS for head_dim in HEAD_DIMS]
    return _table("target, head", loops)


def sass_of_pages() -> str:
    """By target and problem, in Markdown."""
    with closing(Processes()) as processes:
        toolchain = find_toolchain(processes)
        loops = [counted_of_pages(arch, what, toolchain, processes) for arch in TARGETS for what in PAGED]
    return _table("target", loops)


def sass_of_mla() -> str:
    """By target and problem, in Markdown."""
    with closing(Processes()) as processes:
        toolchain = find_toolchain(processes)
        loops = [counted_of_mla(arch, what, toolchain, processes) for arch in TARGETS for what in MLA]
    return _table("target", loops)


def _table(about: str, loops: Sequence[dict[str, Any]]) -> str:
    heads = [about, "tile_q × tile_kv, warps, stages", "registers", "HMMA", *KINDS, "addresses, checks",
             "other for each HMMA", "as predicted", "where a mask is computed, more"]  # fmt: skip
    rows = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    rows += [f"| {' | '.join(map(str, cells(loop)))} |" for loop in loops]
    return "\n".join(rows) + "\n"


def cells(loop: dict[str, Any]) -> list[Any]:
    """Of one row."""
    t = loop["schedule"]
    tiles = f"{t['tile_q']} × {t['tile_kv']}, {t['warps']}, {t['stages']}"
    spilled = f", {loop['spilled_bytes']} bytes spilled" if loop["spilled_bytes"] else ""
    about = loop.get("head_dim") or loop["what"]
    return [f"{loop['target']}, {about}", tiles, f"{loop['registers']}{spilled}", loop["hmma"],
            *of_kind(loop["instructions"]), f"{loop['other_per_hmma']:.2f}", f"{loop['predicted_other_per_hmma']:.2f}",
            f"{loop['mask_per_hmma']:.2f}"]  # fmt: skip


Tables = Mapping[str, Callable[[], str]]
TABLES: Tables = {
    **{f"predicted for {arch}": partial(predict_attention.table, arch) for arch in TARGETS},
    "SASS": sass,
    "SASS of pages": sass_of_pages,
}
OF_PAGES: Mapping[Path, Tables] = {PAGE: TABLES, MLA_PAGE: {"SASS": sass_of_mla}}


def with_tables(text: str, tables: Tables = TABLES) -> str:
    for name, table in tables.items():
        begin, stop = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        _, end, after = rest.partition(stop)
        assert end, f"the page has no {begin.strip()} … {stop.strip()}"
        text = f"{before}{begin}\n{table()}\n{stop}{after}"
    return text


if __name__ == "__main__":
    for page, tables in OF_PAGES.items():
        page.write_text(with_tables(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
