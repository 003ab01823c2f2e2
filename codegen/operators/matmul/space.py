"""Matmul's tunables and search spaces: those of the kernel that computes a problem on a target."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from codegen.errors import UnknownTunable
from codegen.operators.matmul import ring_space, simt_space, tensor_space
from codegen.operators.matmul.fixed_point import over_ring
from codegen.operators.matmul.kernel_family import on_tensor_cores
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import Linked, SearchSpace, Tunable, build_space, union
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
    problem: MatmulProblem,
    target: Target,
    aligns: tuple[int, int],
    search: Search,
    admit: Callable[[Schedule], Accepted | Rejected],
) -> SearchSpace:
    """The schedules of a search; `aligns` are elements per access of A and B. Raises InvalidSearch."""
    if over_ring(problem):
        return ring_space.space(problem, target, search, admit)
    if on_tensor_cores(problem, target):
        _require_own(search, problem, target, tensor_space.TUNABLES, TENSOR_CORES)
        default = tensor_space.default(problem, target, aligns, admit)
        levels = tensor_space.levels(problem, target, aligns)
        return _space(search, tensor_space.TUNABLES, levels, tensor_space.every_way(target), default)
    _require_own(search, problem, target, simt_space.TUNABLES, CUDA_CORES)
    default = simt_space.default(problem, target, admit)
    return _space(search, simt_space.TUNABLES, simt_space.levels(problem, target), simt_space.EVERY_WAY, default)


def _space(
    search: Search,
    own: tuple[Tunable, ...],
    levels: Mapping[int, tuple[simt_space.Lists, Linked]],
    every_way: Linked,
    default: Schedule,
) -> SearchSpace:
    lists = {level: values for level, (values, _) in levels.items()}
    division = {level: ways for level, (_, ways) in levels.items()}
    if not set(every_way.names).isdisjoint(search.tunables or ()):
        # Level 1 often divides k in one way only, with which a list of slices would leave nothing.
        division[1] = every_way
    return build_space(search, own, lists, default, division)


def _require_own(search: Search, problem: MatmulProblem, target: Target, own: tuple[Tunable, ...], cores: str) -> None:
    """Refuses tunables that exist, but for the other kernel; those that do not exist are `build_space`'s."""
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
