"""The tables of `docs/profile.md`: `python -m tests.repo.profile_page` writes them, and a test compares them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.counts import Openings, Operands, RingForm
from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.conv2d.problem import Conv2dProblem
from codegen.operators.convolution.winograd_operator import AS_PRODUCT
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.predict.roofline import LAUNCH_US
from codegen.search.search import Search
from codegen.targets import target
from tests.support.kernels.counted_runs import Counted, count_runs
from tests.support.kernels.cpu_helpers import LIMITS, processes, toolchain
from tests.support.run.places import ROOT
from workers.steps.winner_library import build_winner

PAGE = ROOT / "docs" / "profile.md"
TARGET = target("sm_80")
# Of ResNet-18 for CIFAR-10: channels, filters, rows.
LAYERS = ((3, 64, 32), (64, 64, 32), (128, 128, 16), (256, 256, 8), (512, 512, 4))
# Of an access of SASS.
BYTES = {"U8": 1, "U16": 2, "": 4, "64": 8, "128": 16}
ELEMENTS, KEPT, SEED = 491_520, 50_000, 1


def layer(channels: int, filters: int, rows: int) -> Conv2dProblem:
    """3 x 3 with a padding of 1, over Z/2^64."""
    fields = {"n": 1, "h": rows, "w": rows, "c": channels, "k": filters, "r": 3, "s": 3, "padding": 1}
    problem = operator("conv2d").parse({"operator": "conv2d", **fields, "dtype": "int64", "fraction_bits": 18})
    assert isinstance(problem, Conv2dProblem)
    return problem


def forms(problem: Conv2dProblem, opened: Operands = "multiplied") -> tuple[RingForm, ...]:
    """With secret filters; of other systems with public ones."""
    return operator("conv2d").ring_forms(problem, AS_PRODUCT, Openings("secret", opened))


def first_layer() -> str:
    rows = [
        [
            form.name,
            form.filters,
            "ours" if form.ours else "others",
            form.ring_bytes,
            form.truncations,
            form.multiplications,
        ]
        for form in forms(layer(*LAYERS[0]))
    ]
    return markdown(("form", "filters", "of", "ring bytes", "truncations", "multiplications"), rows)


def dense() -> int:
    """Ring bytes of the layer 512 to 100."""
    op = operator("matmul")
    fields = {"operator": "matmul", "m": 1, "n": 100, "k": 512, "dtype": "int64", "fraction_bits": 18}
    (candidate,) = lower(op.parse(fields), TARGET, Search(level=0)).candidates
    sent = op.ring_bytes(candidate.problem, candidate.schedule, Openings())
    assert sent is not None
    return sent


def by_depth() -> str:
    """With secret filters and one truncation for each output; the last column opens raw inputs for Winograd."""
    rows = []
    for channels, filters, extent in LAYERS:
        problem = layer(channels, filters, extent)
        product, *_, once = forms(problem)
        inputs = forms(problem, "inputs")[-1].ring_bytes
        saved = (f"{product.ring_bytes / sent:.2f}" for sent in (once.ring_bytes, inputs))
        rows.append([f"{channels} → {filters} @ {extent}²", product.ring_bytes, once.ring_bytes, inputs, *saved])
    names = ("layer", "product", "F(2), tiles opened", "F(2), inputs opened", "product / tiles", "product / inputs")
    return markdown(names, rows)


# ---- ReLUs of which some are kept


def mask() -> NDArray[np.bool_]:
    """Which elements keep their ReLU: as many as are kept, anywhere."""
    kept = np.zeros(ELEMENTS, np.bool_)
    kept[np.random.default_rng(SEED).choice(ELEMENTS, KEPT, replace=False)] = True
    return kept


def words(kept: NDArray[np.bool_]) -> NDArray[np.int32]:
    return np.packbits(kept, bitorder="little").view(np.int32)


def regions(kept: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First and end of each run of kept elements."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], kept, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def relus() -> dict[str, Candidate]:
    """`masked`: one pass; `lists`: gather and scatter, whose first launch is the dense pass."""
    op = operator("masked_activation")
    problem = op.parse(
        {"operator": "masked_activation", "shape": [ELEMENTS], "dtype": "float16", "where_set": {"op": "relu"}}
    )
    made = lower(problem, TARGET, Search(level=1)).candidates
    best: dict[str, Candidate] = {}
    for candidate in sorted(made, key=lambda each: (predict_uncompiled(each, TARGET).us, each.id)):
        best.setdefault(str(candidate.schedule.get("algorithm")), candidate)
    return {"masked": best["vectorised"], "lists": best["gather_scatter"]}


def counted_relus(folder: Path) -> dict[str, Counted]:
    packed = words(mask())
    return count_runs(relus(), folder, dict.fromkeys(("masked", "lists"), packed))


def sass(candidate: Candidate) -> str:
    """As nvdisasm writes it, of all functions."""
    build = build_winner(candidate, TARGET, toolchain(), processes(), LIMITS)
    assert build.sass is not None, "there is no disassembler"
    return build.sass.decode()


def global_accesses(text: str) -> dict[str, int]:
    """Loads and stores of global memory in SASS, by instruction and bytes of a lane."""
    found: dict[str, int] = {}
    for instruction, size in re.findall(r"\b(LDG|STG)\.E(?:\.CONSTANT)?(?:\.(U8|U16|64|128))?", text):
        name = f"{instruction} {BYTES[size]}"
        found[name] = found.get(name, 0) + 1
    return found


def instructions(text: str) -> int:
    """Of SASS, without what fills a function's text up."""
    return len([line for line in text.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/", line) and " NOP" not in line])


def by_function(text: str) -> dict[str, str]:
    """The SASS of each function of masked_activation."""
    parts = re.split(r"\.section\s+\.text\._ZN\d+kernel_[0-9a-f]{16}\d+([a-z]+)E\S*", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def relu_table(runs: dict[str, Counted]) -> str:
    """Lanes' accesses and bytes as the CPU build counts them. A kernel for each region is a form: a launch that copies,
    then one for each run of kept elements."""
    candidates, code = relus(), {name: by_function(sass(candidate)) for name, candidate in relus().items()}
    us = {name: f"{predict_uncompiled(candidate, TARGET).us:.3g}" for name, candidate in candidates.items()}
    dense = _counted(runs["lists"], "run")
    of_lists = sum(map(instructions, code["lists"].values()))
    rows = [
        ["dense pass, no mask", 1, *dense, instructions(code["lists"]["run"]), "–"],
        ["masked pass", 1, *_counted(runs["masked"]), instructions(code["masked"]["run"]), us["masked"]],
        ["lists, gather and scatter", 3, *_counted(runs["lists"]), of_lists, us["lists"]],
    ]
    found, moved = regions(mask()), 2 * KEPT
    sectors = 32 * sum((2 * end - 1) // 32 - 2 * first // 32 + 1 for first, end in found)
    alone = f"{(1 + len(found)) * LAUNCH_US:,.0f}, launches alone"
    added = (2 * KEPT, moved, moved, sectors, sectors)
    by_region = [of_copy + more for of_copy, more in zip(dense, added, strict=True)]
    rows.append(["a kernel for each region", 1 + len(found), *by_region, "–", alone])
    names = (
        "way", "launches", "accesses of lanes", "bytes read", "written", "of sectors read", "written",
        "SASS instructions", "predicted µs",
    )  # fmt: skip
    return markdown(names, rows)


def _counted(run: Counted, function: str | None = None) -> list[int]:
    accesses = sum(count.times for name, count in run.of(function).items() if name in ("load_global", "store_global"))
    return [accesses, *run.moved(function), *run.sectors(function)]


# ---- the page


def markdown(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    written = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    lines = [f"| {' | '.join(cells)} |" for cells in (names, *written)]
    return "\n".join([lines[0], "|---" * len(names) + "|", *lines[1:]]) + "\n"


def with_table(text: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, found, rest = text.partition(begin)
    _, ends, after = rest.partition(end)
    assert found and ends, f"{PAGE} has no table {name!r}"
    return f"{before}{begin}\n{table}\n{end}{after}"


TABLES: dict[str, Callable[[], str]] = {"first layer": first_layer, "depth": by_depth}

if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        page = with_table(page, name, make())
    with tempfile.TemporaryDirectory() as folder:
        page = with_table(page, "relus", relu_table(counted_relus(Path(folder))))
    PAGE.write_text(page, encoding="utf-8")
