"""The last images of so many that their elements lie beyond 32 bits, and the blocks that compute them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from codegen.operators.convolution.problem import Convolution
from codegen.operators.matmul.problem import MatmulProblem
from codegen.problem import LARGEST_EXTENT
from codegen.run_once import FAR, RunOnce

IMAGES = 2
# Odd numbers of channels of what is written for each that there was: alignment classes stay.
WIDER = (1, 3, 5, 9, 17)


def last_images(
    problems: Iterable[Any],
    t: Mapping[str, Any],
    product: Callable[[Any], MatmulProblem],
    within: Callable[[Any], bool],
) -> list[RunOnce]:
    """Of implicit products in one launch: with channels last tiles follow each other along the pixels of all images,
    with channels first along the images. `within`: whether a kernel reaches all that it gathers of them."""
    for problem in problems:
        if any(node.packed_mask for node in problem.epilogue):
            return []  # bits of a word are of several images
        for few, many in _pairs(problem, within):
            m, n = product(few).m, product(few).n
            down, across = -(-m // int(t["tile_m"])), -(-n // int(t["tile_n"]))
            blocks = (down + 1) * across if few.channels_last else product(few).batch * down * across
            return [RunOnce("far", many, (0, 1, 0), few, blocks)]
    return []


def _pairs(p: Convolution, within: Callable[[Any], bool]) -> Iterator[tuple[Convolution, Convolution]]:
    """A few images and many. Of an image with channels last only what is written may lie beyond 32 bits, but for the
    pointwise: that has more channels then."""
    written = "k" if p.gathered == "x" else "c"
    for factor in WIDER if p.groups == 1 else (1,):
        wide = type(p).model_validate({**p.canonical(), written: getattr(p, written) * factor})
        sizes = {"x": wide.h * wide.w * wide.c, "dy": wide.p * wide.q * wide.k}
        least = min(sizes.values()) if p.pointwise or not p.channels_last else sizes["dy" if written == "k" else "x"]
        images = -(-FAR // least) + IMAGES
        if images * max(p.h * p.w, p.p * p.q) * p.groups > LARGEST_EXTENT or (p.channels_last and p.groups > 1):
            continue
        few, many = (type(p).model_validate({**wide.canonical(), "n": count}) for count in (IMAGES, images))
        if p.pointwise or within(many):
            yield few, many
