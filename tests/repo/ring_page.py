"""The tables of predicted times in `docs/operators/ring.md`: `python -m tests.repo.ring_page` writes them, and a test
compares them."""

from __future__ import annotations

from functools import partial

from codegen.fixed_point import IMADS, bits_of
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.matmul.limbs import limb_products
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.predict.roofline import IMAD_LANES
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
    times = [predict_uncompiled(c, target(arch)).us for c in candidates if c.schedule.get("algorithm") == algorithm]
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
    return min(predict_uncompiled(c, target(arch)).us for c in tried if c.schedule.get("algorithm") == algorithm)


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


# Multiply-adds of float64 per clock and multiprocessor: on CUDA cores (CUDA C++ Programming Guide 13.0, "Arithmetic
# Instructions"), on tensor cores (white papers: A100, 19.5 TFLOPS; H100, 67 TFLOPS).
FLOAT64 = {"sm_80": (32, 64), "sm_90a": (64, 128)}
SIGNIFICANT_BITS = 53
LENGTHS = (128, 4096, 65536)


def float64_limbs(bits: int, k: int) -> int:
    """The fewest limbs of a number whose products float64 adds up exactly: a diagonal has at most so many for each of
    k, and its sum must be below 2^53."""
    for count in range(1, bits + 1):
        largest = 2 ** -(-bits // count) - 1
        if count * k * largest**2 < 2**SIGNIFICANT_BITS:
            return count
    raise ValueError(f"float64 holds no sum of {k} products")


def rates() -> str:
    """Products of a ring per clock and multiprocessor where nothing but multiplying takes time, in Markdown."""
    heads = ["IMAD", "bytes, tensor cores"]
    heads += [f"float64, k = {k:,}: CUDA cores, tensor cores" for k in LENGTHS]
    rows = [f"| target | ring | {' | '.join(heads)} |", f"|---|---|{'---|' * len(heads)}"]
    for arch, lanes in FLOAT64.items():
        for dtype, ring in (("int32", "Z/2³²"), ("int64", "Z/2⁶⁴")):
            cells = [IMAD_LANES / IMADS[dtype], target(arch).mma_macs("int8") / limb_products(dtype)]
            text = [f"{cell:.3g}" for cell in cells]
            for k in LENGTHS:
                count = float64_limbs(bits_of(dtype), k)
                products = count * (count + 1) // 2
                text.append(", ".join(f"{each / products:.3g}" for each in lanes))
            rows.append(f"| {arch} | {ring} | {' | '.join(text)} |")
    return "\n".join(rows) + "\n"


TABLES = {
    "<!-- predicted of float64 -->\n": rates,
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
