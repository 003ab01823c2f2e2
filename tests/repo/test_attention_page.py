"""The page on attention has the predictions and the instruction counts of today, beside what was published."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.count_sass import Loop, counted, counted_of_mla, main_loop, read
from benchmarks.predict_attention import (
    COLUMNS,
    HEAD_DIMS,
    IMAGES,
    LENGTHS,
    PUBLISHED,
    TARGETS,
    TOKENS,
    best,
    fields_of,
    flops,
)
from codegen.operators import operator
from codegen.operators.attention.work import products
from codegen.targets import target
from tests.repo.attention_page import MLA_PAGE, OF_PAGES, PAGE, cells, of_kind, with_tables
from tests.support.run.each_run import some_each_run
from tests.support.run.places import ROOT
from workers.compile.toolchain import find_toolchain
from workers.processes.processes import Processes

# Of every target, size of head and mask, and every length; those of 4,096 are asked for by another test too.
SAMPLE = [
    ("sm_80", 64, False, 512), ("sm_80", 64, True, 16384), ("sm_80", 128, False, 4096), ("sm_80", 128, True, 4096),
    ("sm_90a", 64, False, 8192), ("sm_90a", 64, True, 1024), ("sm_90a", 128, False, 4096), ("sm_90a", 128, True, 2048),
]  # fmt: skip


def rows_of(table: str, page: Path = PAGE) -> list[list[str]]:
    text = page.read_text(encoding="utf-8").partition(f"<!-- {table} -->")[2].partition("<!-- end")[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize(("arch", "head_dim", "causal", "length"), some_each_run(SAMPLE, 3))
def test_a_sample_of_the_page_has_the_predictions_of_today(arch: str, head_dim: int, causal: bool, length: int) -> None:
    names, *rows = rows_of(f"predicted for {arch}")
    label = f"{head_dim}, {'causal' if causal else 'none'}: **predicted**, ours"
    (row,) = (row for row in rows if row[0] == label)
    assert row[names.index(str(length))] == f"{best(arch, head_dim, causal, length).tflops:.0f}"


def test_a_sample_of_the_page_has_the_counts_of_today() -> None:
    arch, head_dim = TARGETS[-1], HEAD_DIMS[0]
    with closing(Processes()) as processes:
        loop = counted(arch, head_dim, find_toolchain(processes), processes)
    assert list(map(str, cells(loop))) in rows_of("SASS")


def test_loops_inside_the_main_one_of_mla_are_counted_as_often_as_they_turn() -> None:
    """A warp's products are those of its rows and keys with 576 columns, and of its weights with its part of 512; a
    thread copies its share of a tile of keys."""
    with closing(Processes()) as processes:
        loop = counted_of_mla("sm_80", "one query", find_toolchain(processes), processes)
    assert list(map(str, cells(loop))) in rows_of("SASS", MLA_PAGE)
    t = loop["schedule"]
    rows, keys, columns = t["tile_q"] * t["warps_vo"] // t["warps"], t["tile_kv"] // t["warps_vo"], 512 // t["warps_vo"]
    products = rows // 16 * (keys // 8 * 576 // 16 + columns // 8 * t["tile_kv"] // 16)
    assert loop["hmma"] == products
    assert loop["instructions"]["LDGSTS"] == t["tile_kv"] * 576 // 8 // (32 * t["warps"])


@pytest.mark.parametrize(("table", "page"), [("SASS", PAGE), ("SASS of pages", PAGE), ("SASS", MLA_PAGE)])
def test_the_roofline_takes_about_the_instructions_that_sass_has(table: str, page: Path) -> None:
    """Addresses of paged copies among them, which are two thirds of a decode step's."""
    names, *rows = rows_of(table, page)
    read_, taken = names.index("other for each HMMA"), names.index("as predicted")
    assert [row[0] for row in rows if not 0.85 < float(row[taken]) / float(row[read_]) < 1.2] == []
    assert len(rows) >= 4


@pytest.mark.long
@pytest.mark.parametrize("page", OF_PAGES, ids=lambda page: page.name)
def test_the_page_has_the_predictions_and_the_counts_of_today(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_tables(text, OF_PAGES[page]) == text, "python -m tests.repo.attention_page writes the tables"


def test_the_script_says_that_its_figures_are_predictions() -> None:
    command = [sys.executable, "-m", "benchmarks.predict_attention", "--level", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["predicted_not_measured"]) == len(TARGETS) * len(HEAD_DIMS) * 2 * len(LENGTHS)
    assert all(entry["link"].startswith("https://") for entry in result["published"])
    assert result["predicted_not_measured"][0]["schedule"].keys() >= {"tile_q", "tile_kv", "warps"}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_problems_and_their_flops_are_those_of_the_published_figures(causal: bool, length: int) -> None:
    problem = operator("attention").parse(fields_of(128, causal, length))
    fields = problem.canonical()
    assert fields["batch"] * fields["seq_q"] == TOKENS
    assert fields["heads_q"] * fields["head_dim_qk"] == COLUMNS
    # The diagonal's scores are all computed, of which the half of the published count leaves out a half.
    exact = 2.0 * products(problem)  # type: ignore[arg-type]
    assert flops(causal, length) == pytest.approx(exact, rel=1.01 / length if causal else 0)


def test_no_prediction_is_above_the_products_alone_and_higher_levels_are_no_worse() -> None:
    for arch in TARGETS:
        sheet = target(arch)
        peak = 2e-6 * sheet.mma_macs("float16") * sheet.sm_count * sheet.clock_mhz
        for causal in (False, True):
            fastest = best(arch, 128, causal, 4096)
            assert 0.2 * peak < fastest.tflops < peak * (1.01 if causal else 1.0)
            assert best(arch, 128, causal, 4096, level=1).tflops <= fastest.tflops


def test_each_published_figure_has_a_number_for_each_length_and_a_source() -> None:
    for figure in PUBLISHED:
        assert len(figure.tflops) == len(LENGTHS)
        assert IMAGES[figure.source].startswith("https://")
        numbers = ["–" if value is None else str(value) for value in figure.tflops]
        label = f"{figure.head_dim}, {'causal' if figure.causal else 'none'}: measured, {figure.what}"
        assert [label, *numbers] in rows_of(f"predicted for {figure.target}")


SASS = """\
        /*0000*/                   MOV R1, c[0x0][0x28] ;   /* 0x0000 */
.L_x_1:
        /*0010*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0020*/                   BSSY B0, `(.L_x_3) ;
        /*0030*/               @P0 BRA `(.L_x_2) ;
        /*0040*/                   FSEL R4, R4, -INF , P1 ;
        /*0050*/                   FSEL R5, R5, -INF , P1 ;
.L_x_2:
        /*0060*/                   BSYNC B0 ;
.L_x_3:
        /*0070*/              @!P2 LDGSTS.E.BYPASS.128 [R2], desc[UR4][R6.64] ;
        /*0080*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0090*/              @!P3 BRA `(.L_x_1) ;
.L_x_4:
        /*00a0*/                   FADD R4, R4, R5 ;
        /*00b0*/               @P0 BRA `(.L_x_4) ;
        /*00c0*/                   EXIT ;
"""


def test_the_main_loop_is_the_one_that_multiplies_and_its_mask_is_counted_apart() -> None:
    loop = main_loop(SASS)
    assert loop == Loop({"HMMA": 2, "BSSY": 1, "BRA": 2, "BSYNC": 1, "LDGSTS": 1}, {"FSEL": 2})  # type: ignore[arg-type]
    assert loop.products == 2
    assert loop.other_per_product == 2.5
    assert of_kind(dict(loop.body)) == [0, 0, 1, 4]
    instructions, labels = read(SASS)
    assert [len(instructions), labels[".L_x_4"]] == [13, 10]


def test_a_branch_that_copies_is_no_mask() -> None:
    copies = SASS.replace("FSEL R5, R5, -INF , P1", "LDGSTS.E [R2], [R6.64]")
    assert main_loop(copies).body["FSEL"] == 1
    assert not main_loop(copies).mask


def test_a_loop_inside_counts_as_often_as_it_turns_and_is_named_where_that_is_not_said() -> None:
    inside = SASS.replace(".L_x_3:\n", ".L_x_3:\n.L_x_5:\n", 1).replace(
        "        /*0080*/", "        /*0078*/              @!P4 BRA `(.L_x_5) ;\n        /*0080*/"
    )
    body = main_loop(inside, {"HMMA": 3, "LDGSTS": 4}).body
    assert (body["LDGSTS"], body["HMMA"], body["BRA"]) == (4, 2, 1 + 4 + 1)
    with pytest.raises(ValueError, match="a loop inside the main one has none of HMMA"):
        main_loop(inside, {"HMMA": 3})


def test_without_products_there_is_no_main_loop() -> None:
    with pytest.raises(ValueError, match="no loop of this SASS has HMMA"):
        main_loop(SASS.replace("HMMA", "FFMA"))
