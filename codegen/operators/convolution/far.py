"""The last images of so many that their elements lie beyond 32 bits, and the blocks that compute them.

There is no such problem of a kernel that splits limbs ahead, that transforms images for Winograd ahead with channels
first, or that divides sums of groups or phases: what the last images take are not the last blocks of a launch. Nor of
one that gathers whole images by 32 bits (`index_rule`) and writes no more than it gathers."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from codegen.operators.convolution import winograd
from codegen.operators.convolution.problem import Convolution
from codegen.operators.matmul import far
from codegen.operators.matmul.grid import tiles
from codegen.operators.matmul.problem import MatmulProblem
from codegen.problem import LARGEST_EXTENT, indexable
from codegen.run_once import FAR, LastBlocks, RunOnce

# Of images: words of a packed mask then begin with the first of the last ones.
IMAGES, WORD = 2, 32
# Odd numbers of channels of what is written for each that there was: alignment classes stay.
WIDER = (1, 3, 5, 9, 17)
Fields = Mapping[str, Any]
# Of each launch the blocks that compute a few images of many.
Last = Callable[[Any, Any], tuple[LastBlocks, ...]]


@dataclass(frozen=True)
class Reach:
    """What a kernel reaches of a problem. `stored`: by 64 bits, whatever there is; else `within`, and of all images
    together where `whole`, or of one alone."""

    stored: bool
    whole: bool
    within: Callable[[Any], bool]


def last_images(
    problems: Iterable[Any], reach: Reach, last: Last, launch: Callable[[Any], tuple[int, ...]]
) -> list[RunOnce]:
    """`last`: of each launch, by the last images and all of them, the blocks (none: they are not the last ones of a
    launch); `launch`: its values, by all of them."""
    for problem in problems:
        for few, many in _pairs(problem, reach):
            if blocks := last(few, many):
                return [RunOnce("far", many, launch(many), few, blocks)]
    return []


def of_product(t: Fields, product: Callable[[Any], MatmulProblem], phases: Callable[[Any], int], width: int) -> Last:
    """Of an implicit product, of phases one behind the other: with channels last tiles follow each other along the
    pixels of all images, of each group, with channels first along the images. Partial sums of groups, or of phases, lie
    one behind the other with all images of each: the last images are at several places then. `width`: elements of a
    store."""

    def last(few: Any, many: Any) -> tuple[LastBlocks, ...]:
        part, whole = product(few), product(many)
        apart = t["split"] != "none" and (part.batch if few.channels_last else phases(few)) > 1
        if apart or not far.has_slots(t, whole):
            return ()
        if few.channels_last:
            return far.of_rows(t, part, whole, width)
        down, across = tiles(part, int(t["tile_m"]), int(t["tile_n"]))
        images, all_images = part.batch // phases(few), whole.batch // phases(many)
        run = LastBlocks(images * down * across, all_images * down * across)
        return far.of_launches(t, part, run, (part.batch * part.m, part.batch * down * across), width)

    return last


def of_blocks(blocks: Callable[[Any], int]) -> Last:
    """Of one launch whose blocks along x follow the pixels of all images, of phases one behind the other."""

    def last(few: Any, many: Any) -> tuple[LastBlocks, ...]:
        return (LastBlocks(blocks(few) + 1, blocks(many)),)

    return last


def of_winograd(t: Fields, layer: Callable[[Any], Any]) -> Last:
    """Of its four launches with channels last: all filters, then tiles one behind the other, in the products of each
    place, too."""

    def last(few: Any, many: Any) -> tuple[LastBlocks, ...]:
        outputs, as_product = int(t["output_tile"]), winograd.as_matmul(t)
        part, whole = (winograd.product(layer(p), outputs) for p in (few, many))
        down, all_down = (-(-p.m // int(as_product["tile_m"])) for p in (part, whole))
        across, rows = -(-part.n // int(as_product["tile_n"])), part.m + winograd.UNIT
        run = LastBlocks((down + 1) * across, all_down * across)
        return LastBlocks(0), far.of_items(rows * 2 * part.k), run, far.of_items(rows * part.n)

    return last


def with_nodes(last: Last, nodes: int) -> Last:
    """With so many launches of nodes behind it, each of all outputs."""

    def with_them(few: Any, many: Any) -> tuple[LastBlocks, ...]:
        blocks = last(few, many)
        return blocks and (*blocks, *[far.of_items(math.prod(few.shape_of(few.writes)))] * nodes)

    return with_them


def _pairs(p: Convolution, reach: Reach) -> Iterator[tuple[Convolution, Convolution]]:
    """A few images and many. Where images are gathered whole, only what is written may lie beyond 32 bits: it has more
    channels then."""
    written = "k" if p.gathered == "x" else "c"
    for factor in WIDER if p.groups == 1 else (1,):
        changed = {written: getattr(p, written) * factor}
        if written == "c":  # so that all phases have as many pixels
            changed |= {name: -(-getattr(p, name) // step) * step for name, step in zip("hw", p.stride, strict=True)}
        wide = indexable(type(p), {**p.canonical(), **changed})
        if wide is None:
            continue
        sizes = {"x": wide.h * wide.w * wide.c, "dy": wide.p * wide.q * wide.k}
        least = sizes["dy" if written == "k" else "x"] if reach.whole and not reach.stored else min(sizes.values())
        images = -(-FAR // (least * WORD)) * WORD + IMAGES
        if images * max(wide.h * wide.w, wide.p * wide.q) * wide.groups > LARGEST_EXTENT:
            continue
        few, many = (indexable(type(p), {**wide.canonical(), "n": count}) for count in (IMAGES, images))
        if few and many and (reach.stored or reach.within(many)):
            yield few, many
