"""What one party of a two-party evaluation of a convolution over a ring sends, by the form in which it is computed: as
our schedules do, and as systems do that truncate each product or each stage.

Bytes are of operands that are opened and of numbers that are truncated. Of public filters products are local: forms
compare where their filters are alike.
"""

from codegen.counts import Filters, RingForm
from codegen.operators.convolution import winograd
from codegen.operators.convolution.problem import AllowsWinograd


def ring_forms(problem: AllowsWinograd, size: int, outputs: int = 2) -> tuple[RingForm, ...]:
    """`size`: bytes of an element; `outputs`: of a tile of Winograd along an axis."""
    p, results = problem, problem.pixels * problem.k
    image, filters = p.pixels * p.taps * p.groups, p.k * p.taps

    def form(name: str, of: Filters, truncated: int, products: int, opened: int = 0, *, ours: bool = False) -> RingForm:
        return RingForm(name, of, ours, size * (opened + truncated), truncated, products)

    direct = form("product", "secret", results, results * p.taps, image + filters, ours=True)
    if not p.fits_winograd:
        return (direct,)
    tiles, places = winograd.tiles(p, outputs), winograd.places(outputs)
    on_tiles, of_filters = places * tiles * p.c, places * p.k * p.c
    products, sums = on_tiles * p.k, places * tiles * p.k
    # A^T m, then (A^T m) A, of whole tiles.
    inverse = tiles * p.k * outputs * (outputs + 2) + tiles * p.k * outputs**2
    return (
        direct,
        form("winograd, each product truncated", "public", products, products),
        form("winograd, each stage truncated", "public", on_tiles + 2 * on_tiles + sums + inverse, products),
        form("winograd, the inverse truncated", "public", inverse, products),
        form("winograd, truncated once", "secret", results, products, on_tiles + of_filters, ours=True),
    )
