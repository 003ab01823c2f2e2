"""Winograd's minimal filtering, F(2 x 2, 3 x 3) and F(4 x 4, 3 x 3), as products of matrices: tunables, levels, rules,
what a kernel is made of. `codegen/device/conv/winograd.cuh` has the four launches.

Of each tile of the output there are 16 or 36 places, and a product of matrices for each: tiles by channels, channels by
filters (channels first: filters by channels, channels by tiles). The extents of the matrices are multiples of 8.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from codegen.alignment import needs_cuda_cores, round_up, widest
from codegen.dtypes import dtype
from codegen.fixed_point import WINOGRAD_RINGS, bits_of, over_ring
from codegen.kernel import Kernel
from codegen.operator import Config
from codegen.operators.convolution import implicit
from codegen.operators.convolution.problem import WINOGRAD, AllowsWinograd
from codegen.operators.matmul import limb_planes, limbs, ring_space, simt_space, space, split, tensor_space
from codegen.operators.matmul.kernel_family import Stored, on_tensor_cores
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.product import family, product_fields, whole
from codegen.operators.matmul.traffic import node_seconds
from codegen.problem import LARGEST_EXTENT
from codegen.search.joined_space import Kind
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, check_workspace
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import Tunable
from codegen.targets import Target

NAME = "winograd"
# Over rings, by what its products are computed.
BY_IMAD, BY_LIMBS = f"{NAME}_imad", f"{NAME}_limbs"


def _algorithm(name: str) -> Tunable:
    return Tunable("algorithm", (name,), False, "how the convolution is computed", name, constant=False)


ALGORITHM, *_RING_ALGORITHMS = map(_algorithm, (NAME, BY_IMAD, BY_LIMBS))
OF_RINGS = (*_RING_ALGORITHMS, limb_planes.LIMB_SPLIT)
OWN_TUNABLES = (
    ALGORITHM,
    Tunable("output_tile", (2, 4), False, "outputs of a tile of Winograd along an axis: F(2 x 2) or F(4 x 4)", 2),
    Tunable(
        "transform_width", (1, 2, 4, 8), False,
        "neighbouring channels, or filters, that a thread of Winograd's transforms has at most", 2, constant=False,
    ),
)  # fmt: skip
# By what multiplies over a ring: the name of the algorithm, and its own tunables.
_RING_WAYS = {
    way: (str(algorithm.default), (algorithm, *OWN_TUNABLES[1:]))
    for way, algorithm in zip(("imad", "limbs"), _RING_ALGORITHMS, strict=True)
}
# The products are many already: nothing divides their sums, whose length is a run-time argument.
_UNDIVIDED: dict[str, Any] = {"split": "none", "split_k": 1, "stream_blocks": 0, "static_k": 0}
TENSOR_TUNABLES = (*OWN_TUNABLES, *(t for t in tensor_space.TUNABLES if t.name not in _UNDIVIDED))
SIMT_TUNABLES = (*OWN_TUNABLES, *(t for t in simt_space.TUNABLES if t.name not in _UNDIVIDED))
FUNCTIONS = ("transform_filters", "transform_image", "run", "inverse")
# What the first of them alone reads.
FILTERS = "w"

# As `unit` in winograd.cuh: what extents of the matrices are multiples of.
UNIT = 8
SUM = "float32"
MOST_WIDTH = 4  # channels of a thread that searches by level try
# Values of a tile that a thread of a transform has in registers, at most (36 of 4 channels).
MOST_VALUES = 144
# CPU seconds of nvcc for the three transforms, by output_tile: with one channel of a thread, and with each other (nvcc
# 13.2, sm_90a, fp16, beside the 1 x 1 convolution in the same tiles: 0.10, 0.13 and 0.16 with 1, 2 and 4 channels of
# F(2 x 2), 0.18, 0.21 and 0.35 of F(4 x 4)).
TRANSFORM_SECONDS = {2: (0.1, 0.02), 4: (0.18, 0.05)}


def is_winograd(kernel: Kernel) -> bool:
    return computes(kernel.tunables.as_dict())


def computes(tunables: Mapping[str, Any]) -> bool:
    """Whether these are tunables of Winograd."""
    return str(tunables.get("algorithm")).startswith(NAME)


def places(outputs: int) -> int:
    """Places of a tile, each with a product of its own. `outputs`: of a tile along an axis."""
    return (outputs + 2) ** 2


def tiles(problem: AllowsWinograd, outputs: int) -> int:
    """Tiles of all images."""
    return problem.n * -(-problem.p // outputs) * -(-problem.q // outputs)


@lru_cache(maxsize=1024)  # called for every schedule
def product(problem: AllowsWinograd, outputs: int) -> MatmulProblem:
    """The products of all places. Its operands and sums are in the workspace."""
    p = problem
    rows, k, n = round_up(tiles(p, outputs), UNIT), round_up(p.c, UNIT), round_up(p.k, UNIT)
    m, n, layout = (rows, n, "nt") if p.channels_last else (n, rows, "nn")
    element = operand_dtype(p.dtype)
    sums = element if over_ring(p) else SUM
    return MatmulProblem.model_construct(
        operator="matmul", batch=places(outputs), m=m, n=n, k=k, layout=layout, dtype=element, acc_dtype=sums,
        out_dtype=sums, allow_tf32=p.allow_tf32, epilogue=(), lda=k, ldb=k if layout == "nt" else n, ldc=n,
        stride_a=m * k, stride_b=n * k, stride_c=m * n,
    )  # fmt: skip


def operand_dtype(element: str) -> str:
    """What is multiplied: over a ring in a larger one, where the filters' scale has room."""
    return WINOGRAD_RINGS.get(element, element)


def as_matmul(tunables: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule as matmul's rules read it."""
    return {**whole(tunables), **_UNDIVIDED}


def product_aligns(element: str, allow_tf32: bool) -> tuple[int, int, int]:
    """Elements per access of the product's operands and of its sums, by the dtype of the problem."""
    if element in WINOGRAD_RINGS:
        return (widest(operand_dtype(element), UNIT, quads=False),) * 3
    quads = needs_cuda_cores(element, allow_tf32)
    return (*(widest(element, UNIT, quads=quads),) * 2, widest(SUM, UNIT, quads=quads))


def widths(
    channels_last: bool, x_and_out: tuple[int, int], transform_width: int, *, planes: bool = False
) -> tuple[int, int]:
    """Channels of a thread of the image's transform, and filters of one of the inverse. `planes`: whether limbs are
    written, which is done channel by channel."""
    if not channels_last:
        return 1, 1
    x, out = x_and_out
    return 1 if planes else min(x, transform_width), min(out, transform_width)


def row_bytes(problem: AllowsWinograd, t: Mapping[str, Any]) -> int:
    """Of the channels of a tile, or of a filter, at each place."""
    as_product = product(problem, int(t["output_tile"]))
    if limb_planes.ahead(t):
        return limb_planes.row_bytes(as_product)
    return dtype(as_product.dtype).bytes * as_product.k


def workspace_parts(problem: AllowsWinograd, t: Mapping[str, Any]) -> tuple[int, int, int]:
    """Bytes of the image's matrices, of the filters', and of the sums."""
    as_product, of_row = product(problem, int(t["output_tile"])), row_bytes(problem, t)
    a, b = (of_row * as_product.batch * extent for extent in (as_product.m, as_product.n))
    image, filters = (a, b) if problem.channels_last else (b, a)
    return image, filters, dtype(as_product.acc_dtype).bytes * as_product.batch * as_product.m * as_product.n


def workspace_bytes(problem: AllowsWinograd, t: Mapping[str, Any]) -> int:
    """As `workspace_bytes` in winograd.cuh."""
    return sum(workspace_parts(problem, t))


# ---- levels


def tunables(problem: AllowsWinograd, target: Target) -> tuple[Tunable, ...]:
    """Those of the kernel that computes the products on the target."""
    return TENSOR_TUNABLES if on_tensor_cores(product(problem, 2), target) else SIMT_TUNABLES


def worth(problem: AllowsWinograd, search: Search, name: str = NAME) -> bool:
    """Whether a search tries it, under this name of an algorithm: where the problem allows it; where it is asked for by
    name, the rules say what is missing."""
    named = name in (search.tunables or {}).get("algorithm", ())
    return problem.fits_winograd and (problem.winograd != "none" or named)


def kind(problem: AllowsWinograd, target: Target) -> Kind:
    """Matmul's levels of the product."""
    sizes = WINOGRAD[problem.winograd] or (2,)
    as_product, (a, b, _) = product(problem, sizes[0]), product_aligns(problem.dtype, problem.allow_tf32)
    levels = space.kind_of(as_product, target, (a, b), ()).levels
    most = max(_widths(problem, MOST_WIDTH))
    own: dict[str, tuple[Value, ...]] = {"algorithm": (NAME,), "output_tile": sizes}
    width: dict[int, tuple[Value, ...]] = {
        1: (min(2, most),),
        2: tuple(count for count in (1, 2, MOST_WIDTH) if count <= most),
    }
    return Kind(
        tunables(problem, target),
        {level: {**own, "transform_width": width[level], **_undivided(lists)} for level, lists in levels.items()},
    )


def ring_kinds(problem: AllowsWinograd, target: Target) -> dict[Value, Kind]:
    """Over a ring: both forms, which are exact."""
    most = max(_widths(problem, MOST_WIDTH))
    widths_tried = tuple(width for width in (1, 2) if width <= most)
    own = {
        way: (tunables, {"algorithm": (name,), "output_tile": (2, 4), "transform_width": widths_tried})
        for way, (name, tunables) in _RING_WAYS.items()
    }
    return ring_space.undivided_kinds([product(problem, outputs) for outputs in (2, 4)], target, own)


def ring_tunables(target: Target) -> dict[Value, tuple[Tunable, ...]]:
    """Of both, also where they do not compute a problem."""
    none: ring_space.Lists = {}
    own = {way: (tunables, none) for way, (_, tunables) in _RING_WAYS.items()}
    return {value: kind.tunables for value, kind in ring_space.undivided_kinds((), target, own).items()}


def _undivided(lists: Mapping[str, tuple[Value, ...]]) -> dict[str, tuple[Value, ...]]:
    return {name: values for name, values in lists.items() if name not in _UNDIVIDED}


def _widths(problem: AllowsWinograd, transform_width: int, *, planes: bool = False) -> tuple[int, int]:
    return widths(problem.channels_last, x_and_out(problem), transform_width, planes=planes)


def widths_of(problem: AllowsWinograd, t: Mapping[str, Any]) -> tuple[int, int]:
    """`widths` of a schedule."""
    return _widths(problem, int(t["transform_width"]), planes=limb_planes.ahead(t))


@lru_cache(maxsize=1024)  # called for every schedule
def x_and_out(problem: AllowsWinograd) -> tuple[int, int]:
    """Elements per access of the two with channels last: one group has all channels and filters."""
    x, _, out = implicit.widths(problem, problem.c, problem.taps, problem.k)
    return x, out


# ---- rules


def rules(
    problem: AllowsWinograd, t: Mapping[str, Any], target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    """What the problem allows, then matmul's rules for the product."""
    outputs = int(t["output_tile"])
    if broken := (truncation_rule(t) if over_ring(problem) else accuracy_rule(problem, outputs)):
        return broken
    if broken := _width_rule(problem, t):
        return broken
    as_product = product(problem, outputs)
    a, b, _ = product_aligns(problem.dtype, problem.allow_tf32)
    outcome = family(t).rules(as_product, (a, b), Schedule.of(as_matmul(t)), target, None)
    if isinstance(outcome, Rejected):
        return outcome
    return _grid_rule(problem, t) or check_workspace(workspace_bytes(problem, t), workspace_limit) or ACCEPTED


def _grid_rule(problem: AllowsWinograd, t: Mapping[str, Any]) -> Rejected | None:
    """Of the transforms, as `plan` in conv/winograd.cuh: a thread has a vector of a tile's channels or filters."""
    image, out = widths_of(problem, t)
    items = tiles(problem, int(t["output_tile"])) * max(problem.c // image, problem.k // out)
    blocks = -(-max(items, problem.c * problem.k) // split.REDUCE_THREADS)
    return check(
        blocks <= LARGEST_EXTENT, "grid", f"a transform has {blocks} blocks; a launch has at most {LARGEST_EXTENT}"
    )


def does_not_fit(problem: AllowsWinograd, outputs: int, others: Sequence[str]) -> Rejected:
    """`others`: the algorithms that compute the problem."""
    p = problem
    padding = "" if p.most_padding is None else f", a padding of at most {p.most_padding}"
    return Rejected(
        NAME,
        f"F({outputs} x {outputs}, 3 x 3) is for 3 x 3 filters with stride 1, dilation 1{padding} and one group; here "
        f"are {p.r} x {p.s}, stride {p.stride[0]} x {p.stride[1]}, dilation {p.dilation[0]} x {p.dilation[1]}, padding "
        f"{p.padding[0]} and {p.padding[1]} and {p.groups} groups: {' or '.join(others)} computes them",
    )


def accuracy_rule(problem: AllowsWinograd, outputs: int) -> Rejected | None:
    return check(
        outputs in WINOGRAD[problem.winograd],
        "accuracy",
        f"F({outputs} x {outputs}, 3 x 3) rounds more than the problem allows, whose winograd is {problem.winograd}: "
        f"f{outputs} would allow it",
    )


def truncation_rule(t: Mapping[str, Any]) -> Rejected | None:
    """The inverse transform would multiply the errors of what is truncated before it."""
    place = t["truncate"]
    return check(place == "once", "truncate", f"Winograd truncates its outputs, once, and has no truncate = {place}")


def _width_rule(problem: AllowsWinograd, t: Mapping[str, Any]) -> Rejected | None:
    width, most = int(t["transform_width"]), max(widths_of(problem, t))
    if width != most:
        return Rejected("transform_width", f"transform_width = {width} repeats {most}: no access has more elements")
    values, words = places(int(t["output_tile"])), -(-dtype(operand_dtype(problem.dtype)).bytes // 4)
    if width * values * words <= MOST_VALUES:
        return None
    message = f"{width} x {values} values of a thread{f', {words} words each' * (words > 1)}"
    return Rejected("transform_width", f"{message}; registers hold {MOST_VALUES}")


# ---- kernels


def config(kernel: Kernel, flags: Sequence[str]) -> Config:
    """What the code of winograd.cuh and of the product reads. `flags`: of a signature, all false here."""
    s, t = kernel.signature_dict, kernel.tunables.as_dict()
    last = s["layout"] == "nhwc"
    aligns, planes = (s["align_x"], s["align_out"]), limb_planes.ahead(t)
    image, out = widths(last, aligns, int(t["transform_width"]), planes=planes)
    own = {"output_tile": int(t["output_tile"]), "image_width": image, "out_width": out}
    aligned = product_aligns(s["dtype"], s["allow_tf32"])
    bools = {"direct": False, "channels_last": last, **dict.fromkeys(flags, False)}
    fields = {**bools, **own, **product_fields(s, as_matmul(t), "nt" if last else "nn", aligned)}
    types = (("Input", s["dtype"]), ("Accumulator", s["acc_dtype"]), ("Output", s["out_dtype"]))
    return Config(fields, tuple(s["epilogue"]), types, s["out_dtype"])


def stored(kernel: Kernel) -> Stored:
    """How the operands of the product lie in the workspace."""
    s = kernel.signature_dict
    a, b, _ = product_aligns(s["dtype"], s["allow_tf32"])
    element = operand_dtype(s["dtype"])
    count = bits_of(element) // 8 if s["dtype"] in WINOGRAD_RINGS else 0
    return Stored(dtype(element).bytes, (a, b), "nt" if s["layout"] == "nhwc" else "nn", count)


def registers(kernel: Kernel) -> int:
    """An estimate of those of a thread of the product."""
    t = as_matmul(kernel.tunables.as_dict())
    return family(t).registers(t, stored(kernel))


def shared_bytes(kernel: Kernel) -> int:
    t, lying = as_matmul(kernel.tunables.as_dict()), stored(kernel)
    return family(t).shared_bytes(t, limbs.staged_bytes(t, lying))


def compile_seconds(kernel: Kernel) -> float:
    """CPU seconds of nvcc for one more kernel of a group: the product, and the transforms with the epilogue."""
    s, t = kernel.signature_dict, as_matmul(kernel.tunables.as_dict())
    outputs = int(t["output_tile"])
    last, aligns, planes = s["layout"] == "nhwc", (s["align_x"], s["align_out"]), limb_planes.ahead(t)
    width = max(widths(last, aligns, int(t["transform_width"]), planes=planes))
    of_product = family(t).compile_seconds(t, (), stored(kernel))
    first, more = TRANSFORM_SECONDS[outputs]
    nodes = outputs**2 * width * node_seconds(tuple(s["epilogue"]))
    return of_product + first + more * (width - 1) + nodes
