"""What one party of a two-party evaluation of a convolution over a ring sends where it is computed as systems do that
truncate each product or each stage of Winograd's F(2 x 2, 3 x 3), with public filters, so that products are local.

Bytes are of numbers that are truncated, and of those that the epilogue multiplies.
"""

from codegen.counts import RingForm
from codegen.dtypes import dtype
from codegen.fixed_point import products as epilogue_products
from codegen.operators.convolution import winograd
from codegen.operators.convolution.problem import AllowsWinograd

OUTPUTS = 2  # of a tile along an axis


def forms_of_others(layer: AllowsWinograd) -> tuple[RingForm, ...]:
    """None without fraction bits, where nothing is truncated."""
    p = layer
    if p.fraction_bits == 0:
        return ()
    tiles, places = winograd.tiles(p, OUTPUTS), winograd.places(OUTPUTS)
    on_tiles, products, sums = places * tiles * p.c, places * tiles * p.c * p.k, places * tiles * p.k
    # A^T m, then (A^T m) A, of whole tiles.
    inverse = tiles * p.k * OUTPUTS * (OUTPUTS + 2) + tiles * p.k * OUTPUTS**2
    of_epilogue = p.pixels * p.k * epilogue_products(p.epilogue)
    truncated = {
        "winograd, each product truncated": products,
        "winograd, each stage truncated": on_tiles + 2 * on_tiles + sums + inverse,
        "winograd, the inverse truncated": inverse,
    }
    size = dtype(p.dtype).bytes
    return tuple(
        RingForm(
            name, "public", ours=False, ring_bytes=size * (count + 2 * of_epilogue), truncations=count + of_epilogue,
            multiplications=products + of_epilogue,
        )
        for name, count in truncated.items()
    )  # fmt: skip
