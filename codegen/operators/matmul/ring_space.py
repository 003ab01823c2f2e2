"""Tunables and search levels of matmuls over rings: on the CUDA cores (`imad`), and on tensor cores by limbs (`limbs`),
which compete in one search."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from codegen.alignment import power_of_two
from codegen.errors import InvalidSearch
from codegen.fixed_point import (
    PLACES,
    Place,
    Tolerance,
    allowed_ulp,
    largest_error,
    parts,
    ring_name,
)
from codegen.operators.matmul import limbs, simt_space, tensor_space
from codegen.operators.matmul.grid import blocks
from codegen.operators.matmul.kernel_family import AMPERE
from codegen.operators.matmul.limb_planes import LIMB_SPLIT
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.split import SLICES, SPLIT_OF_RING, linked, useful_slices, ways
from codegen.search.joined_space import Kind, build_joined
from codegen.search.rules import Accepted, Rejected, check, first_accepted
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable, build_space, union
from codegen.targets import Target

Lists = dict[str, tuple[Value, ...]]

ALGORITHM = Tunable(
    "algorithm", ("imad", "limbs"), False,
    "over rings only: by integer multiply-adds on the CUDA cores, or byte by byte on tensor cores", "imad",
    constant=False,
)  # fmt: skip
TRUNCATE = Tunable(
    "truncate", PLACES, False,
    "over rings only: sums are truncated once, after each tile of k, or product by product (imad), where the problem's "
    "policy allows it", "once",
)  # fmt: skip
CHAIN_K = Tunable(
    "chain_k", (0, 512, 2048, 8192, 16384), False,
    "over rings only, by limbs of int64: elements of k between two carries of the accumulators; 0: none", 0,
)  # fmt: skip
OWN = (ALGORITHM, TRUNCATE, CHAIN_K, LIMB_SPLIT)


def _of_limbs(tunable: Tunable) -> Tunable:
    return SPLIT_OF_RING if tunable.name == "split" else tunable


IMAD = (ALGORITHM, *map(_of_limbs, simt_space.TUNABLES), TRUNCATE)
LIMBS = (
    ALGORITHM,
    *(_of_limbs(t) for t in tensor_space.TUNABLES if t.name not in {*limbs.FIXED, "stream_blocks"}),
    TRUNCATE,
    CHAIN_K,
)
EVERY_WAY = linked(ways(SLICES, atomic=False), with_stream=False)
# Elements of k between carries that level 1 tries: few enough for a test on the CPU, and 16 k-steps of 36 products.
USUAL_CHAIN = 512
# The tensor cores add up products before any could be truncated.
LACKING = ("limbs", "product")
# As levels split that try both.
EITHER_WAY: Lists = {"limb_split": ("fused", "ahead")}
# Of a tile along k, the most that a schedule of either kind has.
DEEPEST_TILE = 64


def admitted(problem: MatmulProblem, t: Mapping[str, Any]) -> Rejected | None:
    """Whether the problem's policy lets a schedule truncate where it does."""
    if t["truncate"] == "once":
        return None
    count = parts(problem.k, t)
    error = largest_error(count, problem.rounding or "floor")
    return (
        check(problem.fraction_bits > 0, "truncate", f"truncate = {t['truncate']}: fraction_bits = 0 truncates nothing")
        or check(count > 1, "truncate", f"truncate = {t['truncate']} has one part, as once does: k = {problem.k}")
        or check(
            error <= allowed_ulp(problem),
            "truncate",
            f"{count} truncated parts are off by up to {error} units of the last bit; {_policy(problem)}",
        )
    )


def _policy(problem: MatmulProblem) -> str:
    allowed = allowed_ulp(problem)
    return f"the problem allows {allowed}" if allowed else "the problem allows none"


def space(
    problem: MatmulProblem,
    target: Target,
    search: Search,
    admit: Callable[[Schedule], Accepted | Rejected],
    others: Mapping[Value, Kind] | None = None,
    lacking: Mapping[Value, Sequence[Tunable]] | None = None,
    *,
    stored: bool = False,
) -> SearchSpace:
    """The schedules of a search; `others`: of a convolution, those that are no implicit products; `lacking`: those that
    compute other problems of the operator; `stored`: whether both operands lie in memory as matrices, which are then
    split into limbs ahead too. Raises InvalidSearch, also where it names what no schedule of the problem may do."""
    every: dict[Value, tuple[Tunable, ...]] = {"imad": IMAD, "limbs": limb_tunables(stored=stored)}
    every |= {value: kind.tunables for value, kind in (others or {}).items()}
    _require_meaning(search, problem, every)
    kinds: dict[Value, Kind] = {"imad": _imad(problem, target, search)}
    if target.capability >= AMPERE:
        kinds["limbs"] = _limbs(problem, target, search, stored=stored)
    default = _default(problem, target, admit)
    joined = build_joined(search, "algorithm", {**every, **(lacking or {})}, {**kinds, **(others or {})}, default)
    if search.level != 2:
        return joined
    return replace(joined, parts=(*joined.parts, *_early(problem, kinds, default)))


def _early(problem: MatmulProblem, kinds: Mapping[Value, Kind], default: Schedule) -> Iterator[SearchSpace]:
    """What level 2 has of schedules that truncate parts of a sum: they cost more than others, so level 1's suffice."""
    for value, kind in kinds.items():
        places = tuple(place for place in PLACES[1:] if _possible(problem, place) and (value, place) != LACKING)
        lists = {**kind.levels[1], "truncate": places}
        if value == "limbs":
            lists["chain_k"] = (0,)
        if places:
            yield build_space(Search(level=1), kind.tunables, {1: lists}, default, kind.linked)


def _require_meaning(search: Search, problem: MatmulProblem, every: Mapping[Value, Sequence[Tunable]]) -> None:
    """Refuses places of truncation that the policy allows no schedule, and accumulators that k does not fit; those of
    other algorithms than `limbs` are of other products, and their rules'."""
    allowed, named = [place for place in PLACES if _possible(problem, place)], search.tunables or {}
    for place in named.get("truncate", ()):
        _require_place(problem, place, allowed, "search.tunables.truncate")
    if set(named.get("chain_k", ())) == {0} and _that_have(named, every) == ["limbs"]:
        places = named.get("truncate", ("once",))
        _require_chain(problem, [{"chain_k": 0, "truncate": place} for place in places], "search.tunables.chain_k")
    for index, schedule in enumerate(search.schedules or ()):
        where = f"search.schedules.{index}"
        _require_place(problem, schedule.get("truncate", "once"), allowed, f"{where}.truncate")
        if schedule.get("algorithm") == "limbs":
            _require_chain(problem, [{"chain_k": 0, "truncate": "once", **schedule}], f"{where}.chain_k")


def _that_have(named: Mapping[str, Sequence[Value]], every: Mapping[Value, Sequence[Tunable]]) -> list[Value]:
    """The algorithms that a search's tunables leave: those that have all of them."""
    algorithms = named.get("algorithm", list(every))
    return [value for value, own in every.items() if value in algorithms and named.keys() <= {t.name for t in own}]


def _possible(problem: MatmulProblem, place: Place) -> bool:
    """Whether some schedule may truncate there, if with tiles as deep as there are."""
    if place == "once":
        return True
    error = largest_error(parts(problem.k, {"truncate": place, "tile_k": DEEPEST_TILE}), problem.rounding or "floor")
    return problem.fraction_bits > 0 and 0 < allowed_ulp(problem) >= error


def _require_place(problem: MatmulProblem, place: Value, allowed: Sequence[Place], where: str) -> None:
    if place not in PLACES or place in allowed:
        return
    count = parts(problem.k, {"truncate": place, "tile_k": DEEPEST_TILE})
    error = largest_error(count, problem.rounding or "floor")
    if problem.fraction_bits == 0:
        why = "truncates nothing with fraction_bits = 0"
    elif error == 0 or not isinstance(problem.truncation, Tolerance):
        why = "truncates parts of a sum, and the problem's policy the whole sum alone"
    else:
        why = f"is off by up to {error} units of the last bit at k = {problem.k}; {_policy(problem)}"
    raise InvalidSearch(
        f"truncate = {place!r} {why}; allowed: {', '.join(allowed)}", field=where, allowed=list(allowed)
    )


def _require_chain(problem: MatmulProblem, ways: Sequence[Mapping[str, Any]], where: str) -> None:
    if any(limbs.holds(problem, t) for t in ways):
        return
    most = limbs.unchained_k(problem.dtype) or 0
    allowed = [value for value in CHAIN_K.allowed if 0 < int(value) <= most]
    raise InvalidSearch(
        f"without carries (chain_k = 0) the accumulators of {ring_name(problem.dtype)} hold a k of {most}, "
        f"not {problem.k}; allowed: {', '.join(map(str, allowed))}",
        field=where,
        allowed=allowed,
    )


def undivided_kinds(
    problems: Sequence[MatmulProblem], target: Target, own: Mapping[str, tuple[tuple[Tunable, ...], Lists]]
) -> dict[Value, Kind]:
    """Of products that are never divided, as a part of another algorithm with any of these: by each of `imad` and
    `limbs`, the tunables and lists that come before matmul's (`own`), which begin with the algorithm. Level 1 splits
    limbs ahead, too: without a launch of its own that is predicted faster but for the smallest products."""
    ways: dict[str, tuple[tuple[Tunable, ...], Callable[[MatmulProblem], tuple[Lists, Lists]]]] = {
        "imad": (IMAD, lambda p: (_few(_small_imad(p, target)[0]), simt_space.levels(p, target)[2][0])),
    }
    if target.capability >= AMPERE:
        either = limb_tunables(stored=True)
        ways["limbs"] = either, lambda p: (_small_limbs(p, target)[0] | EITHER_WAY, _full_limbs(p) | EITHER_WAY)
    kinds: dict[Value, Kind] = {}
    for way, (tunables, lists_of) in ways.items():
        rest = tuple(t for t in tunables if t.name not in ("algorithm", "split", "split_k"))
        first, lists = own[way]
        small: Lists = {t.name: () for t in rest}
        full: Lists = {t.name: () for t in rest}
        for problem in problems:
            for level, given in zip((small, full), lists_of(problem), strict=True):
                level |= {name: union(level[name], given.get(name, ())) for name in level}
        both = {name: union(values, small[name]) for name, values in full.items()}
        kinds[first[0].default] = Kind((*first, *rest), {1: {**lists, **small}, 2: {**lists, **both}})
    return kinds


def _few(lists: Lists) -> Lists:
    """Tiles of a block and of a thread; of the rest one value each."""
    of_tiles = ("tile_m", "tile_n", "thread_m", "thread_n")
    return {name: values if name in of_tiles else values[-1:] for name, values in lists.items()}


def _kind(tunables: tuple[Tunable, ...], small: Lists, full: Lists, search: Search, slices: tuple[int, ...]) -> Kind:
    """Level 2 divides k where level 1 does, in every way, and where a search names that."""
    few, none = (linked(ways(counts, atomic=False), with_stream=False) for counts in (slices, ()))
    named = not set(EVERY_WAY.names).isdisjoint(search.tunables or ())
    both = {name: union(full.get(name, ()), values) for name, values in small.items()}
    # Level 1 often divides k in one way only, with which a list of slices would leave nothing.
    division = {1: EVERY_WAY if named else few, 2: EVERY_WAY if named or len(few.choices) > 1 else none}
    return Kind(tunables, {1: small, 2: both}, division)


def _imad(problem: MatmulProblem, target: Target, search: Search) -> Kind:
    small, slices = _small_imad(problem, target)
    return _kind(IMAD, small, simt_space.levels(problem, target)[2][0], search, slices)


def _small_imad(problem: MatmulProblem, target: Target) -> tuple[Lists, tuple[int, ...]]:
    """Level 1 as of fp32; a thread has registers for fewer sums of two words."""
    small, division = simt_space.levels(problem, target)[1]
    narrow: Lists = {"thread_m": (2, 4), "thread_n": (2, 4)} if problem.dtype != "int32" else {}
    slices = tuple(int(count) for count in division.lists["split_k"])
    return {**small, **narrow, "algorithm": ("imad",), "truncate": ("once",)}, slices


def limb_tunables(*, stored: bool) -> tuple[Tunable, ...]:
    """`stored`: of products whose operands may be split ahead."""
    return (*LIMBS, LIMB_SPLIT) if stored else LIMBS


def _limbs(problem: MatmulProblem, target: Target, search: Search, *, stored: bool) -> Kind:
    small, slices = _small_limbs(problem, target)
    full = _full_limbs(problem)
    if "tile" in (search.tunables or {}).get("truncate", ()):  # tiles that are truncated carry nothing
        small["chain_k"] = union((0,), small["chain_k"])
    if stored:
        small, full = small | {"limb_split": ("fused",)}, full | EITHER_WAY
    return _kind(limb_tunables(stored=stored), small, full, search, slices)


def _full_limbs(problem: MatmulProblem) -> Lists:
    return {
        "tile_m": _sizes(problem.m, (16, 32, 64, 128)), "tile_n": _sizes(problem.n, (16, 32, 64, 128)),
        "tile_k": (32, 64), "warps_m": (1, 2, 4), "warps_n": (1, 2, 4), "stages": (2, 3, 4),
        "chain_k": (0, *(c for c in (2048, 16384) if c <= (limbs.unchained_k(problem.dtype) or 0))),
    }  # fmt: skip


def _small_limbs(problem: MatmulProblem, target: Target) -> tuple[Lists, tuple[int, ...]]:
    tiles_m, tiles_n = (_sizes(extent, (32, 64)) for extent in (problem.m, problem.n))
    slices = useful_slices(problem, (tiles_m[0], tiles_n[0]), (tiles_m[-1], tiles_n[-1]), 64, target.sm_count)
    chained = problem.k > (limbs.unchained_k(problem.dtype) or problem.k)
    steps = -(-problem.k // limbs.STEP)
    lists: Lists = {
        "algorithm": ("limbs",), "tile_m": tiles_m, "tile_n": tiles_n, "tile_k": (32,),
        "warps_m": _warps(problem, tiles_m), "warps_n": _warps(problem, tiles_n),
        "stages": tuple(count for count in (2, 3) if count <= steps) or (2,), "copy": ("cp_async",),
        "truncate": ("once",), "chain_k": (USUAL_CHAIN,) if chained else (0,), "raster": (0,),
    }  # fmt: skip
    return lists, slices


def _warps(problem: MatmulProblem, sizes: Sequence[int]) -> tuple[int, ...]:
    """Warps have registers for 16 x 16 sums of int64, and for 32 x 32 of int32."""
    each = (16,) if problem.dtype != "int32" else (16, 32)
    return tuple(sorted({max(1, size // rows) for size in sizes for rows in each}))


def _sizes(extent: int, sizes: Sequence[int]) -> tuple[int, ...]:
    most = max(16, power_of_two(extent))
    return tuple(size for size in sizes if size <= most) or (most,)


def _default(problem: MatmulProblem, target: Target, admit: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """The level-0 schedule: by limbs where there are any, else on the CUDA cores, each in an order of preference."""
    by_limbs = _preferred_limbs(problem, target) if target.capability >= AMPERE else iter(())
    return first_accepted((*by_limbs, *_preferred_imad(problem, target)), admit)


def _preferred_limbs(problem: MatmulProblem, target: Target) -> Iterator[Schedule]:
    """Tiles as large as still give every multiprocessor one, with as few slices of k as that takes."""
    lists, slices = _small_limbs(problem, target)
    most = slices[-1] if slices else 1
    pairs = sorted(product(lists["tile_m"], lists["tile_n"]), key=lambda pair: -int(pair[0]) * int(pair[1]))
    fill = [pair for pair in pairs if most * blocks(problem, int(pair[0]), int(pair[1])) >= target.sm_count]
    rest = [name for name in lists if name not in ("tile_m", "tile_n")]
    for tile_m, tile_n in [*fill, *reversed([pair for pair in pairs if pair not in fill])]:
        tiles = blocks(problem, int(tile_m), int(tile_n))
        enough = next((count for count in (1, *slices) if count * tiles >= target.sm_count), most)
        for split_k, *values in product(dict.fromkeys((enough, 1)), *(reversed(lists[name]) for name in rest)):
            chosen = dict(zip(rest, values, strict=True)) | {"tile_m": tile_m, "tile_n": tile_n, "split_k": split_k}
            yield Schedule.of({**chosen, "split": "workspace" if split_k > 1 else "none"})


def _preferred_imad(problem: MatmulProblem, target: Target) -> Iterator[Schedule]:
    lists, slices = _small_imad(problem, target)
    division = linked(ways(slices, atomic=False), with_stream=False)
    own = {"algorithm": "imad", "truncate": "once"}
    for values in simt_space.preferred(problem, target, lists, division, slices[-1] if slices else 1):
        yield Schedule.of({**values, **own})
