"""The tables of predicted times in `docs/operators/ring.md`: `python -m tests.repo.ring_page` writes them, and a test
compares them."""

from __future__ import annotations

from functools import partial

from codegen.lower import lower
from codegen.operators import operator
from codegen.predict.predict_uncompiled import predict_before
from codegen.search.search import Search
from codegen.targets import target
from tests.support.run.places import ROOT

PAGE = ROOT / "docs" / "operators" / "ring.md"
END = "<!-- end of predicted -->\n"
TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
WAYS = [(algorithm, dtype) for dtype in ("int32", "int64") for algorithm in ("imad", "limbs")]
EXTENT = 4096


# Layers of 3 x 3: images, pixels along an axis, channels and filters.
LAYERS = ((1, 32, 64), (16, 32, 64), (16, 8, 256))
SPLITS = ("fused", "ahead")


def best(algorithm: str, dtype: str, arch: str) -> float | None:
    """Milliseconds of the best at level 1; None where the target has no such schedule."""
    fields = {"operator": "matmul", "m": EXTENT, "n": EXTENT, "k": EXTENT, "dtype": dtype}
    candidates = lower(operator("matmul").parse(fields), target(arch), Search(level=1)).candidates
    times = [predict_before(c, target(arch)).us for c in candidates if c.schedule.get("algorithm") == algorithm]
    return min(times) / 1e3 if times else None


def products() -> str:
    """Of matmul, by ring and algorithm, in Markdown."""
    rows = [
        f"| target | {' | '.join(f'`{algorithm}`, {dtype}' for algorithm, dtype in WAYS)} |",
        "|---|---|---|---|---|",
    ]
    for arch in TARGETS:
        cells = [best(algorithm, dtype, arch) for algorithm, dtype in WAYS]
        rows.append(f"| {arch} | {' | '.join('–' if ms is None else f'{ms:.3g}' for ms in cells)} |")
    return "\n".join(rows) + "\n"


Way = tuple[str, str, str, str]
"""Operator, ring, layout and algorithm."""


def best_of_layer(layer: tuple[int, int, int], way: Way, limb_split: str, arch: str) -> float:
    """Microseconds of the best with level 1's values of other tunables."""
    (images, pixels, channels), (name, dtype, layout, algorithm) = layer, way
    fields = {
        "operator": name, "n": images, "h": pixels, "w": pixels, "c": channels, "k": channels, "r": 3, "s": 3,
        "padding": 1, "dtype": dtype, "layout": layout, "fraction_bits": 18,
    }  # fmt: skip
    search = Search(tunables={"algorithm": [algorithm], "limb_split": [limb_split]})
    candidates = lower(operator(name).parse(fields), target(arch), search).candidates
    tried = (c for c in candidates if c.schedule.as_dict().get("limb_split", "fused") == limb_split)
    return min(predict_before(c, target(arch)).us for c in tried if c.schedule.get("algorithm") == algorithm)


def layers(way: Way) -> str:
    """By layer and by where limbs are split, in Markdown."""
    heads = [
        f"{channels} → {channels} @ {pixels}², {images} image{'s' * (images > 1)}, `{limb_split}`"
        for images, pixels, channels in LAYERS
        for limb_split in SPLITS
    ]
    rows = [f"| target | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    for arch in TARGETS[1:]:  # the first has no such tensor cores
        cells = [f"{best_of_layer(layer, way, limb_split, arch):.3g}" for layer in LAYERS for limb_split in SPLITS]
        rows.append(f"| {arch} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


TABLES = {
    "<!-- predicted -->\n": products,
    "<!-- predicted of Winograd -->\n": partial(layers, ("conv2d", "int64", "nhwc", "winograd_limbs")),
    "<!-- predicted of gradients -->\n": partial(layers, ("conv2d_dgrad", "int32", "nchw", "limbs")),
}


def with_tables(text: str) -> str:
    for begin, table in TABLES.items():
        before, _, rest = text.partition(begin)
        _, end, after = rest.partition(END)
        assert end, f"{PAGE} has no {begin.strip()} … {END.strip()}"
        text = f"{before}{begin}\n{table()}\n{END}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
