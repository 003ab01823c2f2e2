"""Matmul's tunables and search spaces: those of the kernel that computes a problem on a target."""

from collections.abc import Callable
from dataclasses import replace

from codegen.errors import UnknownTunable
from codegen.fixed_point import over_ring
from codegen.operators.matmul import ring_space, simt_space, tensor_space
from codegen.operators.matmul.kernel_family import aligns, on_tensor_cores
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.joined_space import Kind
from codegen.search.rules import Accepted, Rejected, first_accepted
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable, build_space, union
from codegen.targets import Target

CUDA_CORES, TENSOR_CORES = "CUDA cores", "tensor cores"


def _together(simt: Tunable | None, tensor: Tunable | None) -> Tunable:
    """One tunable of either kernel, or of both: with the values that either takes."""
    if simt is not None and tensor is not None:
        if simt == tensor:
            return simt
        meaning = f"on {CUDA_CORES}: {simt.meaning}; on {TENSOR_CORES}: {tensor.meaning}"
        return replace(simt, allowed=union(simt.allowed, tensor.allowed), meaning=meaning)
    tunable, cores = (simt, CUDA_CORES) if simt is not None else (tensor, TENSOR_CORES)
    if tunable is None:
        raise ValueError("a tunable of neither kernel")
    return replace(tunable, meaning=f"on {cores} only: {tunable.meaning}")


def _every_tunable() -> tuple[Tunable, ...]:
    simt = {tunable.name: tunable for tunable in simt_space.TUNABLES}
    tensor = {tunable.name: tunable for tunable in tensor_space.TUNABLES}
    names = dict.fromkeys([*simt, *tensor])
    return tuple(_together(simt.get(name), tensor.get(name)) for name in names)


# The order of those chosen at launch is the launch ABI's: raster, split_k, stream_blocks.
TUNABLES = (*_every_tunable(), *ring_space.OWN)


def space(
    problem: MatmulProblem, target: Target, search: Search, admit: Callable[[Schedule], Accepted | Rejected]
) -> SearchSpace:
    """The schedules of a search. Raises InvalidSearch."""
    if over_ring(problem):
        return ring_space.space(problem, target, search, admit, stored=True)
    aligned = aligns(problem)[:2]
    kind = kind_of(problem, target, aligned)
    _require_own(search, problem, target, kind.tunables)
    first = default(problem, target, aligned, admit)
    return build_space(search, kind.tunables, kind.levels, first, kind.linked, kind.every_way)


def kind_of(
    problem: MatmulProblem, target: Target, aligns: tuple[int, int], slices: tuple[int, ...] | None = None
) -> Kind:
    """What searches try. `aligns` are elements per access of A and B, `slices` those of k that level 1 tries; None: the
    few that seem useful."""
    if on_tensor_cores(problem, target):
        return tensor_space.kind(problem, target, aligns, slices)
    return simt_space.kind(problem, target, slices)


def default(
    problem: MatmulProblem,
    target: Target,
    aligns: tuple[int, int],
    admit: Callable[[Schedule], Accepted | Rejected],
    stored_bytes: float | None = None,
    slices: tuple[int, ...] | None = None,
) -> Schedule:
    """The level-0 schedule: the first of level 1 in order of preference that breaks no rule. `stored_bytes`: of both
    operands, where they are not stored as the problem has them."""
    if on_tensor_cores(problem, target):
        schedules = tensor_space.preferred(problem, target, aligns, stored_bytes, slices)
    else:
        schedules = simt_space.schedules(problem, target, slices)
    return first_accepted(schedules, admit)


def _require_own(search: Search, problem: MatmulProblem, target: Target, own: tuple[Tunable, ...]) -> None:
    """Refuses tunables that exist, but for the other kernel; those that do not exist are `build_space`'s."""
    cores = TENSOR_CORES if on_tensor_cores(problem, target) else CUDA_CORES
    allowed = {tunable.name for tunable in own}
    foreign = {tunable.name for tunable in TUNABLES} - allowed
    named = {f"search.tunables.{name}": name for name in search.tunables or ()}
    for index, schedule in enumerate(search.schedules or ()):
        named |= {f"search.schedules.{index}.{name}": name for name in schedule}
    for field, name in named.items():
        if name in foreign:
            raise UnknownTunable(
                f"{name!r} is no tunable on {cores}, where {target.name} computes this {problem.dtype} matmul; "
                f"allowed: {', '.join(sorted(allowed))}",
                field=field,
                allowed=sorted(allowed),
            )
