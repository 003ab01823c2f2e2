"""Reduced problems of a kernel's signature: the real Config, alignment class and code path on extents a CPU can run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from codegen.alignment import classes, needs_cuda_cores, round_up, widest
from codegen.epilogue import AnyNode, Scale, node_of
from codegen.fixed_point import FIELDS, as_ring_node, largest_error, parts
from codegen.operators.matmul.inputs import FRACTION_BITS, LARGEST, TYPICAL, fraction_bits, needs_small_sums
from codegen.operators.matmul.kernel_family import is_limbs
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.split import SLICES
from codegen.problem import LARGEST_ELEMENTS
from codegen.run_once import FAR, long_steps

# Multiply-adds (1 to 2 ns each on the CPU, padding of tiles included) up to which the even and the tail problem get
# more tiles than they must have, and those of the problem of many tiles: a candidate stays well under 0.4 s. A kernel
# whose single tile costs more than MANY_BUDGET has no third and fourth problem.
BUDGET, TENSOR_BUDGET, MANY_BUDGET = 1_500_000, 4_000_000, 12_000_000
# Of products by limbs the CPU makes 10 to 36 of bytes.
LIMBS_BUDGET, LIMBS_MANY = 400_000, 1_000_000
# Of the long problem, which is run once: 0.1 s at most.
LONG_BUDGET = 140_000_000
# Rows and columns of tiles: 5 rows make a full and a broken band of 4.
WANTED = (("n", 2), ("m", 2), ("batch", 2), ("m", 3), ("n", 3), ("m", 5))
# Of the problem of many tiles: matrices, rows and columns of tiles; the first that the budget allows.
MANY = ((2, 5, 2), (1, 5, 2), (1, 3, 2), (1, 2, 2))
# k-steps that two and three slices divide into unequal shares of more than one.
UNEVEN_STEPS = 7
# That the even problem has beyond the stages of a pipeline, which must come round after it was filled once.
MORE_STEPS = 4
# Elements between rows and between matrices, times 1, 2, 3 in A, B and out, up to whole accesses.
GAP = 20


def reduced_problems(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> list[MatmulProblem]:
    """Even (whole tiles, more k-steps than stages by several), tail (no whole tile, padded rows), smallest, one of many
    tiles.

    Many steps along k and many tiles at once are too dear for large tiles; so the last one has a single short step.
    Where they can, m, n, k and all pitches differ: a kernel that takes one for another must not be right by chance.
    Where k is split there are steps for unequal slices; a kernel that was compiled for one k gets no other.
    """
    kernel = _Reduced(signature, tunables)
    if kernel.cost(1, 1, 1, kernel.short_k) > kernel.many_budget:
        return [kernel.even(), kernel.tail(matrices=2)]
    return [kernel.even(), kernel.tail(), kernel.smallest(), kernel.many()]


def long_problem(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> MatmulProblem | None:
    """One tile with so many steps along k that a pipeline has come round several times and, where k is split, as many
    slices as level 2 has; fewer as far as the budget goes, none where the even problem has as many."""
    kernel = _Reduced(signature, tunables)
    steps = long_steps(int(tunables.get("stages", 1)))
    if tunables.get("split") in ("workspace", "atomic"):
        steps = max(steps, SLICES[-1] + 1)
    steps = min(steps, kernel.long_budget // kernel.cost(1, 1, 1, 1))
    if kernel.static_k or steps * kernel.tile("k") <= kernel.even_k:
        return None
    return kernel.long(steps)


def far_problem(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> MatmulProblem | None:
    """Two tiles along m and n, as far as the budget goes, whose rows lie FAR apart; none where that cannot be."""
    return _Reduced(signature, tunables).far()


@dataclass(frozen=True)
class _Reduced:
    signature: Mapping[str, Any]
    tunables: Mapping[str, Any]

    def even(self) -> MatmulProblem:
        k, tiles = self.even_k, self._tiles(self.even_k)
        if self.tunables.get("split") == "stream" and tiles["m"] * tiles["n"] == 1:
            # The race-checked launch has two blocks. Each gets more steps than stages: a share of the one tile or,
            # where k cannot be longer, a tile of its own.
            if self.static_k:
                tiles["n"] = 2
            else:
                k = max(k, (2 * int(self.tunables["stages"]) + 3) * self.tile("k"))
        return self._problem(1, tiles["m"] * self.tile("m"), tiles["n"] * self.tile("n"), k, gap=0)

    def tail(self, matrices: int = 1) -> MatmulProblem:
        k = self.static_k or self._k_of(0) + self.tile("k") - 3 * self.least("k") % self.tile("k")
        tiles = self._tiles(k, matrices)
        return self._problem(tiles["batch"], self._broken("m", tiles["m"], 1), self._broken("n", tiles["n"], 2), k, GAP)

    def smallest(self) -> MatmulProblem:
        # Where k is split, two slices of a step each in several matrices.
        k = self.static_k or (self.tile("k") if self.splits else 0) + self.least("k")
        return self._problem(3, self.least("m"), self.least("n"), k, GAP)

    def many(self) -> MatmulProblem:
        fits = [many for many in MANY if self.cost(*many, self.short_k) <= self.many_budget]
        batch, rows, columns = fits[0] if fits else MANY[-1]
        # The last tiles are barely begun.
        m = (rows - 1) * self.tile("m") + self.least("m")
        n = (columns - 1) * self.tile("n") + min(2 * self.least("n"), self.tile("n"))
        return self._problem(batch, m, n, self.short_k, GAP)

    def long(self, steps: int) -> MatmulProblem:
        k = (steps - 1) * self.tile("k") + self.least("k")
        return self._problem(1, self._broken("m", 1, 1), self._broken("n", 1, 1), k, GAP)

    def far(self) -> MatmulProblem | None:
        k = self.static_k or self._k_of(0)
        rows, columns = (2, 2) if self.cost(1, 2, 2, k) <= self.many_budget else (1, 1)
        m, n = ((count - 1) * self.tile(axis) + self.least(axis) for axis, count in (("m", rows), ("n", columns)))
        longest = max(m, n, k) * (FAR + 4 * GAP)
        batch = 2 if 2 * longest <= LARGEST_ELEMENTS else 1
        if longest > LARGEST_ELEMENTS or any(
            node_of(structure).packed_mask for structure in self.signature["epilogue"]
        ):
            return None
        return self._problem(batch, m, n, k, GAP, FAR)

    @property
    def long_budget(self) -> int:
        return (
            LIMBS_BUDGET if is_limbs(self.tunables) else LONG_BUDGET if "mma_k" in self.tunables else LONG_BUDGET // 4
        )

    @property
    def splits(self) -> bool:
        return bool(self.tunables.get("split", "none") != "none")

    @property
    def static_k(self) -> int:
        """The one k that the kernel was compiled for; 0: any."""
        return int(self.tunables.get("static_k", 0))

    @property
    def short_k(self) -> int:
        return self.static_k or self.least("k")

    @property
    def even_k(self) -> int:
        return self._k_of(MORE_STEPS + (self.splits and int(self.tunables["stages"]) % 2 == 0))  # an odd number

    def _k_of(self, more: int) -> int:
        """So many steps more than stages at least."""
        steps = max(int(self.tunables["stages"]) + more, UNEVEN_STEPS if self.splits else 0)
        # Of carries there are two, and what comes behind them.
        chained = 2 * int(self.tunables.get("chain_k", 0))
        return self.static_k or chained + steps * self.tile("k")

    @property
    def many_budget(self) -> int:
        return LIMBS_MANY if is_limbs(self.tunables) else MANY_BUDGET

    def tile(self, extent: str) -> int:
        return int(self.tunables[f"tile_{extent}"])

    def least(self, extent: str) -> int:
        """The granularity of an extent: what the vectors of the operands that are contiguous along it demand."""
        along = _contiguous(self.signature["layout"])
        return max(int(self.signature[f"align_{operand}"]) if along[operand] == extent else 1 for operand in "abc")

    def cost(self, batch: int, rows: int, columns: int, k: int) -> int:
        """Multiply-adds of that many tiles: the kernel computes tiles and steps as a whole."""
        steps = -(-k // self.tile("k"))
        return batch * rows * self.tile("m") * columns * self.tile("n") * steps * self.tile("k")

    def _tiles(self, k: int, matrices: int = 1) -> dict[str, int]:
        """How many tiles along m and n and how many matrices, as far as the budget allows."""
        budget = LIMBS_BUDGET if is_limbs(self.tunables) else TENSOR_BUDGET if "mma_k" in self.tunables else BUDGET
        chosen = {"batch": matrices, "m": 1, "n": 1}
        for axis, count in WANTED:
            more = {**chosen, axis: count}
            if self.cost(more["batch"], more["m"], more["n"], k) <= budget:
                chosen = more
        return chosen

    def _broken(self, extent: str, tiles: int, missing: int) -> int:
        """An extent of that many tiles whose last lacks up to `missing` units, as far as that leaves a part of it."""
        tile, unit = self.tile(extent), self.least(extent)
        return tiles * tile - next((units * unit for units in range(missing, 0, -1) if units * unit < tile), 0)

    def _problem(self, batch: int, m: int, n: int, k: int, gap: int, apart: int = 0) -> MatmulProblem:
        """With `gap` and `apart` between rows and `gap` between matrices, all pitches and all strides different; else
        packed as far as the alignment classes allow. They are exactly the signature's."""
        s = self.signature
        packed = any(node_of(structure).packed_mask for structure in s["epilogue"])
        if packed:
            n = self._columns_of_class(n)
        extents = {"m": m, "n": n, "k": k}
        along = _contiguous(s["layout"])
        fields: dict[str, Any] = {name: s[name] for name in ("layout", "dtype", "acc_dtype", "out_dtype", "allow_tf32")}
        quads = needs_cuda_cores(s["dtype"], s["allow_tf32"])
        taken: set[int] = set()
        for number, operand in enumerate("abc", 1):
            if operand == "c" and packed:
                fields |= {"ldc": n, "stride_c": m * n}
                continue
            align = int(s[f"align_{operand}"])
            full = classes(s["out_dtype" if operand == "c" else "dtype"], quads=quads)[0]
            pitch = round_up(extents[along[operand]] + number * gap + apart, align)
            # A pitch that no wider access divides is what the narrower classes are for.
            while (align < full and pitch // align % 2 == 0) or (gap and pitch in taken):
                pitch += align
            stride = extents[_rows(operand, along[operand])] * pitch + round_up(number * gap, align)
            while gap and stride in taken:
                stride += align
            fields[f"ld{operand}"], fields[f"stride_{operand}"] = pitch, stride
            taken |= {pitch, stride}
        fields |= {name: s[name] for name in FIELDS if name in s}
        problem = MatmulProblem(batch=batch, m=m, n=n, k=k, epilogue=_chain(s, k), **fields)
        policy = needed_policy(problem, self.tunables)
        return MatmulProblem(**{**problem.canonical(), "truncation": policy}) if policy else problem

    def _columns_of_class(self, n: int) -> int:
        """The next n that gives a packed out the signature's class."""
        s = self.signature
        quads = needs_cuda_cores(s["dtype"], s["allow_tf32"])
        counts = range(n, n + classes(s["out_dtype"], quads=quads)[0] * self.least("n") + 1, self.least("n"))
        return next(count for count in counts if widest(s["out_dtype"], count, quads=quads) == s["align_c"])


def needed_policy(problem: MatmulProblem, tunables: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a schedule that truncates more than once: it must keep to the bound of its own parts, and no more."""
    if tunables.get("truncate", "once") == "once":
        return None
    error = largest_error(parts(problem.k, tunables), problem.rounding or "floor")
    return {"policy": "tolerance", "ulp": error}


def _chain(signature: Mapping[str, Any], k: int) -> tuple[AnyNode, ...]:
    """The signature's nodes. Sums of int8 products are large integers: the first scale, where it comes before nodes
    that would flatten them, brings them down to what the others are made for."""
    nodes = [node_of(structure) for structure in signature["epilogue"]]
    if "fraction_bits" in signature:
        return tuple(as_ring_node(node, signature["fraction_bits"]) for node in nodes)
    first = next((i for i, node in enumerate(nodes) if isinstance(node, Scale) or needs_small_sums(node)), None)
    if signature["dtype"] == "int8" and first is not None and isinstance(nodes[first], Scale):
        typical = LARGEST["int8"] ** 2 * math.sqrt(k) / 3.0
        bits = round(math.log2(max(2.0, typical / TYPICAL)))
        free = FRACTION_BITS - fraction_bits([*nodes[:first], *nodes[first + 1 :]])
        nodes[first] = Scale(value=2.0 ** -min(bits, free))
    return tuple(nodes)


def _contiguous(layout: str) -> dict[str, str]:
    """The extent along which each operand is contiguous."""
    return {"a": "m" if layout[0] == "t" else "k", "b": "k" if layout[1] == "t" else "n", "c": "n"}


def _rows(operand: str, columns: str) -> str:
    return {"a": "mk", "b": "kn", "c": "mn"}[operand].replace(columns, "")
