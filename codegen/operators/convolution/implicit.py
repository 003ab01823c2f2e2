"""A convolution as an implicit product: matmul's kernels with an operand, or two, gathered on the way."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from codegen.alignment import needs_cuda_cores, widest
from codegen.dtypes import dtype
from codegen.epilogue import Node
from codegen.operator import Cost, Work
from codegen.operators.convolution.problem import Convolution
from codegen.operators.matmul import simt_space, space, tensor, tensor_space, traffic
from codegen.operators.matmul.kernel_family import Stored, is_tensor, on_tensor_cores
from codegen.operators.matmul.problem import Layout, MatmulProblem
from codegen.operators.matmul.product import family
from codegen.search.joined_space import Kind
from codegen.search.rules import Accepted, Rejected, check
from codegen.search.schedule import Schedule
from codegen.search.space import Tunable
from codegen.targets import Target

T = TypeVar("T")
ALGORITHM = Tunable(
    "algorithm", ("implicit_gemm",), False, "how the convolution is computed", "implicit_gemm", constant=False
)
# The length of a sum is a run-time argument: its taps are counted, not unrolled.
TENSOR_TUNABLES = (ALGORITHM, *(tunable for tunable in tensor_space.TUNABLES if tunable.name != "static_k"))
SIMT_TUNABLES = (ALGORITHM, *simt_space.TUNABLES)

# Registers of a pixel's corner, and of the tap and the geometry; with channels first of all of them. Of 27 tensor-core
# kernels within 12 registers of what they may take (ptxas 13.2, sm_90a, all types, 2 to 16 bytes at once) none spills.
CORNER_REGISTERS, TAP_REGISTERS, COLUMN_REGISTERS = 2, 2, 15
# Instructions for a gathered vector beside those of a copy: its corner, two checks, its address.
GATHER_INSTRUCTIONS = 9


def product_of(
    problem: Convolution, batch: int, m: int, n: int, k: int, layout: Layout, epilogue: tuple[Node, ...]
) -> MatmulProblem:
    """Its gathered operands are never stored, so they may be larger than any matmul's."""
    p = problem
    return MatmulProblem.model_construct(
        operator="matmul", batch=batch, m=m, n=n, k=k, layout=layout, dtype=p.dtype, acc_dtype=p.acc_dtype,
        out_dtype=p.out_dtype, allow_tf32=p.allow_tf32, epilogue=epilogue, lda=m if layout == "tn" else k,
        ldb=k if layout == "nt" else n, ldc=n, stride_a=m * k, stride_b=n * k, stride_c=m * n,
        fraction_bits=p.fraction_bits, rounding=p.rounding, truncation=p.truncation,
    )  # fmt: skip


def image_product(problem: Convolution, layout: Layout, epilogue: tuple[Node, ...], copies: int = 1) -> MatmulProblem:
    """Channels last: image x filters, a matrix for each group. Channels first: filters x image, a matrix for each image
    and group. A sum has one product at least."""
    p = problem
    batch, m, n = p.n * p.groups, p.group_filters, p.p * p.q
    if p.channels_last:
        batch, m, n = p.groups, p.pixels, p.group_filters
    return product_of(p, batch * copies, m, n, max(1, p.taps), layout, epilogue)


def widths(problem: Convolution, *rows: int) -> tuple[int, int, int]:
    """Elements per access of the two tensors that are read, and of the one that is written, by the length of rows."""
    p = problem
    width = partial(widest, quads=needs_cuda_cores(p.dtype, p.allow_tf32))
    first, second, written = rows
    return width(p.dtype, first), width(p.dtype, second), width(p.out_dtype, written)


def _implicit(tunables: Mapping[str, T], algorithm: T) -> dict[str, T]:
    """Values, or lists of values, of matmul's as those of an implicit product."""
    return {"algorithm": algorithm, **{name: value for name, value in tunables.items() if name != "static_k"}}


def tunables_of(as_matmul: MatmulProblem, target: Target) -> tuple[Tunable, ...]:
    """Those of the kernel that computes the product on the target."""
    return TENSOR_TUNABLES if on_tensor_cores(as_matmul, target) else SIMT_TUNABLES


def kind(
    as_matmul: MatmulProblem, aligned: tuple[int, int], target: Target, slices: tuple[int, ...] | None = None
) -> Kind:
    """Matmul's. `aligned`: elements per access of A and B; `slices`: of k, the few that seem useful where that is
    None."""
    made = space.kind_of(as_matmul, target, aligned, slices)
    levels = {level: _implicit(lists, ("implicit_gemm",)) for level, lists in made.levels.items()}
    return replace(made, tunables=tunables_of(as_matmul, target), levels=levels)


def default(
    as_matmul: MatmulProblem,
    aligned: tuple[int, int],
    stored_bytes: float,
    target: Target,
    admit: Callable[[Schedule], Accepted | Rejected],
    slices: tuple[int, ...] | None = None,
) -> Schedule:
    """Level 1's first schedule that breaks no rule, in matmul's order of preference. `stored_bytes`: of the
    convolution's operands; `slices`: of k, the few that seem useful where that is None."""

    def implicit(schedule: Schedule) -> Schedule:
        return Schedule.of(_implicit(schedule.as_dict(), "implicit_gemm"))

    def admit_product(schedule: Schedule) -> Accepted | Rejected:
        constant = schedule.as_dict().get("static_k", 0) != 0
        return check(not constant, "static_k", "k is no constant here") or admit(implicit(schedule))

    return implicit(space.default(as_matmul, target, aligned, admit_product, stored_bytes, slices))


def image_registers(s: Mapping[str, Any], t: Mapping[str, Any]) -> int:
    """An estimate of those of a thread that a gathered image takes."""
    if s["layout"] != "nhwc":
        return COLUMN_REGISTERS
    corners: int = -(-t["tile_m"] * t["tile_k"] // (family(t).threads(t) * s["align_x"]))
    return CORNER_REGISTERS * corners + TAP_REGISTERS


def register_rule(gathering: int, t: Mapping[str, Any], stored: Stored, target: Target) -> Rejected | None:
    """Whether a thread may take as many registers as the product and the gather need; of the product that is the least
    where the launch bounds limit its registers."""
    limited = is_tensor(t) and (t["maxnreg"] or t["min_blocks"] > 1)
    wanted = tensor.least_registers(t, stored) if limited else family(t).registers(t, stored)
    wanted += gathering
    allowed = family(t).launch_bounds(t).registers(target) if is_tensor(t) else target.registers_per_thread
    limit = min(allowed, target.registers_per_sm // (family(t).threads(t) * t["min_blocks"]))
    return check(
        wanted <= limit, "registers", f"about {wanted} registers per thread with the gather; {limit} are allowed"
    )


def work(
    as_matmul: MatmulProblem,
    t: Mapping[str, Any],
    aligned: tuple[int, int, int],
    least: Cost,
    target: Target,
    stored_bytes: int,
    per_element: float,
) -> Work:
    """Matmul's counts for the product: every tap comes from L2, the image from DRAM once. `stored_bytes`: of the
    convolution's operands; `per_element`: instructions of the gather beside those of a copy."""
    expanded = replace(least, bytes_read=least.bytes_read - stored_bytes + int(traffic.input_bytes(as_matmul)))
    counts = family(t).work(as_matmul, t, aligned, expanded, target)
    tiles = traffic.tile_bytes(as_matmul, t) / dtype(as_matmul.dtype).bytes
    return replace(
        counts,
        dram_bytes=counts.dram_bytes - traffic.input_traffic(as_matmul, t, target) + stored_bytes,
        other_instructions=counts.other_instructions + per_element * tiles / 2.0,
    )
