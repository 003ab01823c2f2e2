"""Winograd beside a convolution as others measured them, each by its own schedules: TVM's templates on a T4, fp16,
3 x 3, 14 x 14 pixels, 256 channels and filters (RFC 6543, https://discuss.tvm.ai/t/6543, table 1).

Ours are other kernels (split k, several stages, tiles of pixels), so a rank of theirs can be asked of the roofline for
theirs alone. Both templates are those of apache/tvm#5099 and #5485: `conv2d_nhwc_tensorcore.py` and
`conv2d_nhwc_winograd.py`. What was measured is the best of their knobs; what is predicted, the best predicted of them.
Pure; no figure here is fitted to what was measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from codegen.operator import Work
from codegen.operators.convolution import winograd_work
from codegen.operators.convolution.implicit import GATHER_INSTRUCTIONS
from codegen.operators.matmul import traffic
from codegen.operators.matmul.tensor import OVERHEAD_REGISTERS
from codegen.predict.roofline import predict_work
from codegen.targets import Target, target
from codegen.text.ptxas_report import Resources

# Milliseconds by images: Winograd on tensor cores, the convolution on tensor cores.
MEASURED = {8: (0.1829, 0.2968), 16: (0.264, 0.3495), 32: (0.4506, 0.4852), 256: (3.9432, 2.8367)}
PIXELS, CHANNELS, TAPS = 14, 256, 9
OUTPUT_TILE, PLACES = 2, 16
T4 = target("sm_75")
HALF = 2  # bytes
# wmma's shapes of fp16 by their rows (PTX ISA, "wmma.mma"): columns; k is 16. A lane has 16 elements of a and of b.
WMMA_COLUMNS, WMMA_K, WMMA_MACS, FRAGMENT_BYTES = {8: 32, 16: 16, 32: 8}, 16, 4096, 1024
# On Turing a wmma is four HMMA.1688, of which two columns' are independent; a fragment is two loads of 16 bytes.
HMMA_MACS, HMMAS, CHAINS, FRAGMENT_LOADS = 16 * 8 * 8, 4, 2, 2
COUNTS, CHUNKS = (1, 2, 4), (1, 2, 4, 8)
STATIC_SHARED, VECTOR = 48 << 10, 8
PER_COPY, PER_STEP, PER_OUTPUT = 7.0, 20.0, 3.5  # as `codegen/operators/matmul/tensor.py` takes them


@dataclass(frozen=True)
class Knobs:
    """Of both templates: a wmma's rows; warps of a block and wmma tiles of a warp, along rows and columns; wmmas of k
    in a step. Vectors of 8 are taken, as the fastest."""

    wmma_rows: int
    warps: tuple[int, int]
    tiles: tuple[int, int]
    chunk: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        rows, columns = self.wmma_rows, WMMA_COLUMNS[self.wmma_rows]
        return rows * self.tiles[0] * self.warps[0], columns * self.tiles[1] * self.warps[1]


@dataclass(frozen=True)
class Product:
    """`matrices` products of rows x columns, k long each. `gathered`: a convolution's, whose rows are the images of one
    pixel; its template reads a column's fragments again for each row of wmmas."""

    matrices: int
    rows: int
    columns: int
    k: int
    dram_bytes: float
    gathered: bool


def work_of(p: Product, knobs: Knobs) -> tuple[Work, Resources] | None:
    """None where a kernel would not compile. One stage: a block copies, waits, multiplies, waits."""
    (tile_m, tile_n), tile_k = knobs.tile, WMMA_K * knobs.chunk
    along_m, along_n = knobs.tiles
    shared = HALF * max(tile_k * (tile_m + tile_n), tile_m * tile_n)
    registers = 8 * (along_m * along_n + along_m + along_n) + OVERHEAD_REGISTERS
    mostly_padding = tile_m >= 2 * max(p.rows, knobs.wmma_rows) or tile_n >= 2 * p.columns
    if p.k % tile_k or mostly_padding or shared > STATIC_SHARED or registers > T4.registers_per_thread:
        return None
    blocks = p.matrices * -(-p.rows // tile_m) * -(-p.columns // tile_n)
    steps, threads = p.k // tile_k, 32 * knobs.warps[0] * knobs.warps[1]
    macs, outputs = float(blocks) * tile_m * tile_n * p.k, float(blocks) * tile_m * tile_n
    products = macs / WMMA_MACS
    per_warp = along_m + along_n * (along_m if p.gathered else 1)
    fragments = products * per_warp / (along_m * along_n)
    copies, filled = float(blocks) * (tile_m + tile_n) * p.k / VECTOR, float(HALF * blocks) * (tile_m + tile_n) * p.k
    gathers = GATHER_INSTRUCTIONS * float(blocks) * tile_m * p.k / VECTOR if p.gathered else 0.0
    written = float(HALF) * p.matrices * p.rows * p.columns
    instructions = (
        32 * (HMMAS * products + FRAGMENT_LOADS * fragments) + PER_COPY * copies + gathers
        + PER_STEP * blocks * threads * steps + PER_OUTPUT * outputs
    )  # fmt: skip
    work = Work(
        blocks=blocks, threads=threads, fma=0.0, other_instructions=instructions,
        shared_bytes=filled + FRAGMENT_BYTES * fragments + 2.0 * HALF * outputs, l2_bytes=filled + written,
        dram_bytes=p.dram_bytes, dynamic_shared_bytes=shared, independent=CHAINS * along_m * along_n, steps=steps,
        overlap=0.0, mma=macs, mma_type="float16", mma_macs=HMMA_MACS,
    )  # fmt: skip
    return work, Resources(registers, 0, spill_load_bytes=0, spill_store_bytes=0, stack_bytes=0, barriers=0)


def best(p: Product, tiles: tuple[int, ...], others: tuple[Work, ...] = ()) -> float:
    """Microseconds of the knobs that are predicted fastest."""
    works = (work_of(p, knobs) for knobs in _knobs(tiles) if knobs.wmma_rows <= p.rows)
    return min(predict_work(replace(made[0], others=others), made[1], T4).us for made in works if made)


def _knobs(tiles: tuple[int, ...]) -> Iterator[Knobs]:
    for rows, down, across, m, n, chunk in product(WMMA_COLUMNS, COUNTS, COUNTS, tiles, tiles, CHUNKS):
        yield Knobs(rows, (down, across), (m, n), chunk)


def convolution_us(images: int) -> float:
    """By the template of #5099: a block has one pixel of some images, and some filters."""
    pixels = PIXELS**2
    stored = HALF * (2 * images * pixels * CHANNELS + TAPS * CHANNELS**2)
    return best(Product(pixels, images, CHANNELS, TAPS * CHANNELS, float(stored), gathered=True), COUNTS)


def winograd_us(images: int, filters_ahead: bool) -> float:
    """By the template of #5485: a thread transforms one channel of a tile. AutoTVM and a whole network have the filters
    transformed ahead, a single operator does not."""
    tiles, x = images * (PIXELS // OUTPUT_TILE) ** 2, float(HALF * images * PIXELS**2 * CHANNELS)
    image = sums = float(HALF * PLACES * tiles * CHANNELS)
    filters, items = float(HALF * PLACES * CHANNELS**2), float(tiles * CHANNELS)
    load, store = winograd_work.LOAD_INSTRUCTIONS, winograd_work.STORE_INSTRUCTIONS
    forward, back = winograd_work.IMAGE_OPERATIONS[OUTPUT_TILE], winograd_work.INVERSE_OPERATIONS[OUTPUT_TILE]
    of_filter = TAPS * load + PLACES * store + winograd_work.FILTER_OPERATIONS[OUTPUT_TILE]
    of_image = traffic.items(
        items, instructions=items * (PLACES * (load + store + 1) + forward), l2_bytes=2.0 * image,
        dram_bytes=x + beyond_l2(image, T4), steps=1,
    )  # fmt: skip
    inverse = traffic.items(
        items, instructions=items * (PLACES * load + back + OUTPUT_TILE**2 * store), l2_bytes=sums + x,
        dram_bytes=beyond_l2(sums, T4) + x, steps=1,
    )  # fmt: skip
    of_filters = traffic.items(
        float(CHANNELS**2), instructions=CHANNELS**2 * of_filter, l2_bytes=filters * 25 / 16,
        dram_bytes=filters * 9 / 16 + beyond_l2(filters, T4), steps=1,
    )  # fmt: skip
    from_dram = beyond_l2(image, T4) + filters + beyond_l2(sums, T4)
    products = Product(PLACES, tiles, CHANNELS, CHANNELS, from_dram, gathered=False)
    return best(products, (*COUNTS, 8), (of_image, inverse, *(() if filters_ahead else (of_filters,))))


def beyond_l2(moved: float, on: Target) -> float:
    """Bytes that one launch leaves to the next, and the L2 does not hold."""
    return 0.0 if moved <= traffic.L2_SHARE * on.l2_bytes else moved
