"""Winograd in one launch, in fp32 and over rings, on the CUDA cores: tunables, levels, rules, kernels, what a schedule
does. `codegen/device/conv/winograd_fused.cuh` has the kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from codegen.alignment import needs_cuda_cores, round_up
from codegen.counts import LaunchCounts, Primitive, load, merged, store
from codegen.dtypes import dtype
from codegen.fixed_point import IMADS, RINGS, over_ring
from codegen.kernel import Kernel
from codegen.operator import Config, Cost, LaunchBounds, Work, constants
from codegen.operators.convolution import winograd
from codegen.operators.convolution.problem import WINOGRAD, AllowsWinograd, windows_inside
from codegen.operators.convolution.winograd_work import (
    FILTER_OPERATIONS,
    IMAGE_OPERATIONS,
    INVERSE_OPERATIONS,
    LOAD_INSTRUCTIONS,
    STORE_INSTRUCTIONS,
)
from codegen.operators.matmul import counts, ring_space
from codegen.operators.matmul.product import ring_fields
from codegen.operators.matmul.simt import TRUNCATION
from codegen.operators.matmul.traffic import node_seconds
from codegen.search.joined_space import Kind
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, residency_rules
from codegen.search.schedule import Value
from codegen.search.space import Tunable
from codegen.targets import Target

NAME = f"{winograd.NAME}_fused"
TUNABLES = (
    Tunable("algorithm", (NAME,), False, "how the convolution is computed", NAME, constant=False),
    winograd.OWN_TUNABLES[1],
    Tunable("tile_m", (16, 32), False, "rows of the output that a block computes", 16),
    Tunable("tile_n", (16, 32), False, "columns of the output that a block computes", 16),
    Tunable("tile_k", (8, 16), False, "depth of the tiles that are brought to shared memory at once", 8),
    Tunable("thread_m", (2, 4, 8), False, "rows of the output that a thread computes", 4),
    Tunable("thread_n", (2, 4, 8), False, "columns of the output that a thread computes", 4),
)
# Over rings elements of shared memory are two and four times as large, and so are tiles of a thread in registers.
_SMALLER: dict[str, tuple[int, ...]] = {
    "tile_m": (8, 16, 32), "tile_n": (8, 16, 32), "tile_k": (4, 8, 16), "thread_m": (2, 4), "thread_n": (2, 4),
}  # fmt: skip
RING_TUNABLES = (*(replace(t, allowed=_SMALLER.get(t.name, t.allowed)) for t in TUNABLES), ring_space.TRUNCATE)
Lists = dict[str, tuple[Value, ...]]
FUNCTIONS = ("run",)
OVERHEAD_REGISTERS = 40
WARP, WARPS = 32, 4  # threads of a warp; warps among which a multiprocessor's registers are divided
# CPU seconds of nvcc for a product of a thread in a step, and for transforms that take longer (nvcc 13.2, sm_90a: one
# more kernel of a group takes 0.16 s and 0.3 s of F(2 x 2), 0.29 s and 0.9 s of F(4 x 4), with 4 x 4 sums).
PRODUCT_SECONDS, LONG_TRANSFORMS = {"int40": 0.0005, "int72": 0.0018}, {("int72", 4): 0.7}
# Of threads of a block over a ring, at most this part may do nothing but transform.
MOST_IDLE = 1 / 8
# Of Z/2^64 three of four words are computed (`in_three_words`). nvcc 13.2 makes of a product and its sum, for sm_90a, 3
# IMAD.WIDE, which count twice, 2 IMAD, an IMAD.X and 3.5 additions.
WORDS, WORD_PRODUCTS, ADDITIONS = {"int72": 3}, {**IMADS, "int72": 9}, {"int72": 3.5}


def computes(tunables: Mapping[str, Any]) -> bool:
    return tunables.get("algorithm") == NAME


def threads(t: Mapping[str, Any]) -> int:
    """Of a block, in whole warps."""
    return round_up(_multiplying(t), WARP)


def _multiplying(t: Mapping[str, Any]) -> int:
    """Threads of a block that multiply: for each place as many as share its tiles and filters."""
    count: int = winograd.places(t["output_tile"]) * (t["tile_m"] // t["thread_m"]) * (t["tile_n"] // t["thread_n"])
    return count


def launch_bounds(t: Mapping[str, Any]) -> LaunchBounds:
    return LaunchBounds(threads(t))


def shared_bytes(t: Mapping[str, Any], element: str) -> int:
    """As `shared_bytes` in winograd_fused.cuh. `element`: the dtype of the problem."""
    size = _size(element)
    padding = 16 // size  # as `row_padding`
    rows = t["tile_m"] + t["tile_n"] + 2 * padding
    of_place: int = max(t["tile_k"] * rows, t["tile_m"] * (t["tile_n"] + padding))
    return size * winograd.places(t["output_tile"]) * of_place


def registers(t: Mapping[str, Any], element: str) -> int:
    """An estimate of a thread's: its sums, and a tile before and after a pass."""
    edge = int(t["output_tile"]) + 2
    return _words(element) * (int(t["thread_m"] * t["thread_n"]) + edge * edge + edge) + OVERHEAD_REGISTERS


def _words(element: str) -> int:
    operand = winograd.operand_dtype(element)
    return WORDS.get(operand, dtype(operand).bytes // 4)


def _size(element: str) -> int:
    """Bytes of everything in shared memory."""
    return dtype(winograd.operand_dtype(element)).bytes


# ---- levels and rules


def worth(problem: AllowsWinograd) -> bool:
    return over_ring(problem) or (problem.dtype == "float32" and needs_cuda_cores(problem.dtype, problem.allow_tf32))


def kind(problem: AllowsWinograd) -> Kind:
    sizes = WINOGRAD[problem.winograd] or (2,)
    own: Lists = {"algorithm": (NAME,), "output_tile": sizes}
    small: Lists = {**own, "tile_m": (16, 32), "tile_n": (16, 32), "tile_k": (8,), "thread_m": (4,), "thread_n": (4, 8)}
    full: Lists = {**small, "tile_k": (8, 16), "thread_m": (2, 4, 8), "thread_n": (2, 4, 8)}
    return Kind(TUNABLES, {1: small, 2: full})


def ring_kind() -> Kind:
    """Over a ring: both forms, which are exact."""
    own: Lists = {"algorithm": (NAME,), "output_tile": (2, 4), "truncate": ("once",)}
    small: Lists = {**own, "tile_m": (8, 16), "tile_n": (8, 16), "tile_k": (4,), "thread_m": (2, 4), "thread_n": (4,)}
    full: Lists = {**own, **_SMALLER, "tile_k": (4, 8)}
    return Kind(RING_TUNABLES, {1: small, 2: full})


def rules(problem: AllowsWinograd, t: Mapping[str, Any], target: Target) -> Accepted | Rejected:
    count, multiplying, outputs = threads(t), _multiplying(t), int(t["output_tile"])
    least, most_idle = (8, MOST_IDLE) if over_ring(problem) else (16, 0.0)
    return (
        check(
            worth(problem),
            "dtype",
            f"{NAME} is for float32 without allow_tf32 and for rings; {winograd.NAME} computes this problem",
        )
        or (winograd.truncation_rule(t) if over_ring(problem) else winograd.accuracy_rule(problem, outputs))
        or check(
            count - multiplying <= most_idle * count and count <= 1024,
            "threads",
            f"{winograd.places(outputs)} places of {multiplying // winograd.places(outputs)} threads each are "
            f"{multiplying}: whole warps, and at most 1024",
        )
        or residency_rules(
            1, round_up(count, WARPS * WARP), shared_bytes(t, problem.dtype), registers(t, problem.dtype), target
        )
        or check(
            winograd.tiles(problem, outputs) > t["tile_m"] // 2 or t["tile_m"] == least,
            "tile_m",
            f"tile_m = {t['tile_m']} is mostly padding for {winograd.tiles(problem, outputs)} tiles",
        )
        or check(
            problem.k > t["tile_n"] // 2 or t["tile_n"] == least,
            "tile_n",
            f"tile_n = {t['tile_n']} is mostly padding for k = {problem.k}",
        )
        or check(
            blocks(problem, t)[1] <= 65535, "grid", f"{blocks(problem, t)[1]} blocks along the filters; at most 65535"
        )
        or ACCEPTED
    )


# ---- kernels


def config(kernel: Kernel, flags: Sequence[str]) -> Config:
    """`flags`: of a signature, all false here."""
    s, t = kernel.signature_dict, kernel.tunables.as_dict()
    flagged = {"direct": False, "channels_last": s["layout"] == "nhwc", **dict.fromkeys(flags, False)}
    widths = dict.fromkeys(("align_a", "align_b", "align_c", "image_width", "out_width"), 1)
    own = {"tensor_cores": False, "fused": True, "threads": threads(t)}
    fields = {**flagged, **widths, **own, **constants(TUNABLES, t)}
    if s["dtype"] in RINGS:
        fields |= ring_fields(s, t)
    types = (("Input", s["dtype"]), ("Accumulator", s["acc_dtype"]), ("Output", s["out_dtype"]))
    return Config(fields, tuple(s["epilogue"]), types, s["out_dtype"])


def compile_seconds(kernel: Kernel) -> float:
    """CPU seconds of nvcc for one more kernel of a group: transforms as of Winograd in four launches, and products."""
    s, t = kernel.signature_dict, kernel.tunables.as_dict()
    element, outputs = winograd.operand_dtype(s["dtype"]), int(t["output_tile"])
    first = LONG_TRANSFORMS.get((element, outputs), winograd.TRANSFORM_SECONDS[outputs][0])
    products = PRODUCT_SECONDS.get(element, 0.0001) * int(t["thread_m"]) * int(t["thread_n"]) * int(t["tile_k"])
    return first + products + outputs**2 * node_seconds(tuple(s["epilogue"]))


# ---- what a schedule does


def blocks(problem: AllowsWinograd, t: Mapping[str, Any]) -> tuple[int, int]:
    """Along tiles and along filters."""
    return -(-winograd.tiles(problem, int(t["output_tile"])) // int(t["tile_m"])), -(-problem.k // int(t["tile_n"]))


def _executed(problem: AllowsWinograd, t: Mapping[str, Any]) -> int:
    """Multiplications of whole blocks."""
    across, down = blocks(problem, t)
    places, k = winograd.places(int(t["output_tile"])), round_up(problem.c, int(t["tile_k"]))
    return across * down * places * int(t["tile_m"]) * int(t["tile_n"]) * k


def work(problem: AllowsWinograd, t: Mapping[str, Any], least: Cost) -> Work:
    """Counts for the roofline. Every block reads, and transforms, what it multiplies."""
    p, outputs = problem, int(t["output_tile"])
    (across, down), places, steps = blocks(p, t), winograd.places(outputs), -(-p.c // int(t["tile_k"]))
    products, k = float(_executed(p, t)), steps * int(t["tile_k"])
    element, words = winograd.operand_dtype(p.dtype), _words(p.dtype)
    images, filters = float(across * down * t["tile_m"] * k), float(across * down * t["tile_n"] * k)
    results = float(across * t["tile_m"] * down * t["tile_n"])
    per_value = STORE_INSTRUCTIONS + 2.0 * len(p.epilogue)
    instructions = words * (
        images * (places * (LOAD_INSTRUCTIONS + 1) + IMAGE_OPERATIONS[outputs])
        + filters * (9 * LOAD_INSTRUCTIONS + places + FILTER_OPERATIONS[outputs])
        + results * (2 * places + INVERSE_OPERATIONS[outputs] + outputs**2 * per_value)
        + products * (1 / t["thread_m"] + 1 / t["thread_n"]) / 4
    )
    instructions += least.truncations * TRUNCATION * words + products * ADDITIONS.get(element, 0.0)
    shared = places * (images + filters + 2 * results) + products * (1 / t["thread_m"] + 1 / t["thread_n"])
    size = dtype(p.dtype).bytes
    stored = float(least.bytes_written + least.bytes_read - p.input_bytes)
    # Tiles overlap: what L1 has not kept of the neighbours comes from the L2, as for Winograd in four launches.
    return Work(
        blocks=across * down, threads=threads(t), fma=0.0 if over_ring(p) else products,
        imad=products * WORD_PRODUCTS[element] if over_ring(p) else 0.0, other_instructions=instructions,
        shared_bytes=_size(p.dtype) * shared,
        l2_bytes=size * (images * outputs**2 + 9 * filters) + stored,
        dram_bytes=float(least.bytes_read + least.bytes_written), dynamic_shared_bytes=shared_bytes(t, p.dtype),
        independent=int(t["thread_m"]) * int(t["thread_n"]), steps=steps, overlap=0.0, prefetched=1,
    )  # fmt: skip


def launches(problem: AllowsWinograd, t: Mapping[str, Any]) -> tuple[LaunchCounts, ...]:
    p, outputs = problem, int(t["output_tile"])
    (across, down), size, out = blocks(p, t), dtype(p.dtype).bytes, dtype(p.out_dtype).bytes
    rows, columns = (
        windows_inside(-(-extent // outputs), outputs, p.corner[axis], outputs + 2, 1, of_image)
        for axis, (extent, of_image) in enumerate(((p.p, p.h), (p.q, p.w)))
    )
    results, executed = p.pixels * p.k, _executed(p, t)
    ring = over_ring(p)
    parts = (
        Primitive("imad" if ring else "fma", executed, executed),
        load(size * down * p.n * rows * columns * p.c, size),
        load(size * across * p.k * p.taps, size),
        *counts.epilogue_reads(p.epilogue, p.out_dtype, results, 1),
        *counts.epilogue_products(p, results, truncated=results),
        store(out * results, out),
    )
    multiplied = winograd.places(outputs) * winograd.tiles(p, outputs) * p.k * p.c
    return (LaunchCounts(FUNCTIONS[0], merged(parts), multiplied),)
