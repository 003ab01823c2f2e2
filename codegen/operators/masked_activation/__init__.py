"""One of two functions of each element, as a mask says: in one vectorised pass or, for comparison, by lists."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files as packaged_files
from itertools import product
from typing import Any

import numpy as np

from codegen.arrays import as_float64
from codegen.counts import TRUNCATE, LaunchCounts, Openings, Primitive, load, merged, store
from codegen.dtypes import dtype
from codegen.epilogue import Identity, node_of, words_of_mask
from codegen.epilogue import MaskedActivation as Node
from codegen.epilogue_reference import unpacked_masks
from codegen.fixed_point import IMADS, RINGS, over_ring, products, shift_of
from codegen.fixed_point_reference import applied, bounded
from codegen.kernel import Kernel
from codegen.operator import (
    Array,
    Config,
    Cost,
    EdgeCall,
    Float64,
    InputKind,
    LaunchBounds,
    Operand,
    Operator,
    Work,
    constants,
    shift_fields,
)
from codegen.operators.masked_activation.problem import MaskedActivationProblem, of_elements
from codegen.operators.matmul.ring_inputs import ring_numbers
from codegen.problem import Problem
from codegen.run_once import FAR, LastBlocks, RunOnce
from codegen.search.joined_space import Kind, build_joined, together
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, check_workspace, first_accepted, residency_rules
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable
from codegen.special_inputs import NO_NUMBERS, SMALLEST, ZEROS, with_special
from codegen.special_values import of_values, through_chain
from codegen.targets import Target

THREADS = (64, 128, 256, 512, 1024)


_MEANING = "one pass, or lists of the indices of set bits"
_THREADS = Tunable("threads", THREADS, False, "threads of a block", 256)


def _algorithm(name: str) -> Tunable:
    return Tunable("algorithm", (name,), False, _MEANING, name, constant=False)


VECTORISED = (
    _algorithm("vectorised"),
    _THREADS,
    Tunable("vector", (1, 2, 4, 8), False, "elements of one access, up to 16 bytes", 1),
    Tunable("loads", (1, 2, 4, 8), False, "vectors of a thread, all in flight at once", 4),
)
GATHER_SCATTER = (
    Tunable("algorithm", ("gather_scatter",), False, _MEANING, "gather_scatter", constant=False),
    _THREADS,
)
KNOBS: dict[Value, tuple[Tunable, ...]] = {"vectorised": VECTORISED, "gather_scatter": GATHER_SCATTER}
# What level 1 has of `gather_scatter`.
LISTS = Schedule.of({"algorithm": "gather_scatter", "threads": 256})
LARGEST_INDEX = 2**31 - 1
WORD_BITS = 32  # as in kernel.cuh
INDEX_BYTES = 4
# Of a gather or a scatter the L2 moves 32 bytes for each element, whatever its size (CUDA C++ Best Practices Guide,
# "Coalesced Access to Global Memory").
SECTOR_BYTES = 32
# An estimate, and of the instructions of a node per element.
OVERHEAD_REGISTERS = 24
_INSTRUCTIONS = {"gelu": 30.0, "silu": 20.0, "polynomial": 4.0}
# The largest random integer of inputs: polynomials of degree 3 stay inside of float16.
LARGEST_INTEGER = 30
# Above so many elements a block of random ones is repeated: a prime, so that no two tiles of a kernel agree.
LARGEST_RANDOM, BLOCK = 2**22, 3_999_971


class MaskedActivation(Operator):
    """See MaskedActivationProblem."""

    name = "masked_activation"
    problem_type = MaskedActivationProblem
    tunables = together(KNOBS.values(), "algorithm", _MEANING)
    folder = packaged_files("codegen.operators.masked_activation")
    shared = ("gemm/ring.cuh",)
    extent_names = ("elements",)

    def signature(self, problem: Problem) -> dict[str, Any]:
        p = self.own(problem)
        return {"dtype": p.dtype, "node": p.node.structure, **shift_of(p)}

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        widest = 16 // dtype(self.own(problem).dtype).bytes
        vectors = tuple(width for width in (1, 2, 4, 8) if width <= widest)
        small: dict[str, tuple[Value, ...]] = {
            "algorithm": ("vectorised",), "threads": (128, 256, 512), "vector": (widest,), "loads": (1, 2, 4),
        }  # fmt: skip
        full: dict[str, tuple[Value, ...]] = {**small, "threads": THREADS, "vector": vectors, "loads": (1, 2, 4, 8)}
        lists: dict[int, dict[str, tuple[Value, ...]]] = {
            1: {name: (value,) for name, value in LISTS.values},
            2: {"algorithm": ("gather_scatter",), "threads": THREADS},
        }
        kinds: dict[Value, Kind] = {
            "vectorised": Kind(VECTORISED, {1: small, 2: full}),
            "gather_scatter": Kind(GATHER_SCATTER, lists),
        }
        wanted = [
            Schedule.of({"algorithm": "vectorised", "threads": threads, "vector": vector, "loads": loads})
            for vector, loads, threads in product(reversed(vectors), (4, 2, 1), (256, 128, 64))
        ]
        default = first_accepted(wanted, lambda schedule: self.rules(problem, schedule, target))
        # In every sample, however small: the winner is compared with what it replaces.
        return replace(build_joined(search, "algorithm", KNOBS, kinds, default), compared=(LISTS,))

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        p, t = self.own(problem), _full(schedule.as_dict())
        n, threads, vector = p.elements, int(t["threads"]), int(t["vector"])
        if not _is_vectorised(t):
            places = _tiles(n, threads) * threads * WORD_BITS
            return (
                check(places <= LARGEST_INDEX, "index", f"indices of {places} elements; 32 bits count {LARGEST_INDEX}")
                or _padding(n, threads * WORD_BITS, 64 * WORD_BITS)
                or check_workspace(_workspace_bytes(p, t), workspace_limit)
                or ACCEPTED
            )
        bytes_, blocks = vector * dtype(p.dtype).bytes, _blocks(n, t)
        if bytes_ > 16:
            return Rejected("vector", f"vector = {vector} is {bytes_} bytes; one access moves at most 16")
        if broken := _padding(n, threads * vector * int(t["loads"]), 64 * vector):
            return broken
        if blocks > LARGEST_INDEX:
            return Rejected("grid", f"{blocks} blocks; a launch has at most {LARGEST_INDEX}")
        return residency_rules(1, threads, 0, _registers(t), target) or ACCEPTED

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        return ("run",) if _is_vectorised(kernel.tunables.as_dict()) else ("run", "compact", "scatter")

    def config(self, kernel: Kernel) -> Config:
        s, t = kernel.signature_dict, _full(kernel.tunables.as_dict())
        fields = {"gather_scatter": not _is_vectorised(t), **constants(self.tunables, t)}
        types: tuple[tuple[str, str], ...] = (("Element", s["dtype"]),)
        if s["dtype"] in RINGS:
            fields, types = {**fields, **shift_fields(s)}, (*types, ("Output", s["dtype"]))
        return Config(fields, (s["node"],), types, s["dtype"])

    def scalars(self, problem: Problem) -> list[float]:
        return list(self.own(problem).node.scalars)

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Vectors; accesses are of 16 bytes at most, of a byte mask as many as of elements."""
        p = self.own(problem)
        bits = p.mask == "bits"
        length, wide = words_of_mask(p.elements) if bits else p.elements, 16 // dtype(p.dtype).bytes
        return (
            Operand("x", p.dtype, "in", (p.elements,), (1,), align=wide),
            Operand("mask", p.mask_dtype, "in", (length,), (1,), align=1 if bits else wide),
            Operand("out", p.dtype, "out", (p.elements,), (1,), align=wide),
        )

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        """Two whole blocks; those and a part of a vector, in the middle of a word; two words; one element."""
        s, t = kernel.signature_dict, _full(kernel.tunables.as_dict())
        block, tail = _block(t), WORD_BITS + 2 * int(t["vector"]) - 1
        return [of_elements(s, elements) for elements in (2 * block, 2 * block + tail, 64, 1)]

    def run_once(self, kernel: Kernel) -> list[RunOnce]:
        """What is no number, zeros and a subnormal, which go through every function; parts of a vector in each copy of
        the loop over a thread's vectors that nvcc makes; far, the last block of many and a part of one: not of lists,
        which hold places of 32 bits and refuse more."""
        s, t, once = kernel.signature_dict, _full(kernel.tunables.as_dict()), list[RunOnce]()
        *_, problem = map(self.own, self.test_problems(kernel)[:2])
        if not over_ring(problem):
            once.append(RunOnce("special", problem, tuple(self.test_launches(kernel, problem)[0])))
        if _is_vectorised(t):
            block, vector = _block(t), int(t["vector"])
            at_once = int(t["threads"]) * vector
            ends = range(at_once + 2 * vector - 1, block, at_once) if vector > 1 else ()
            once += [RunOnce("long", of_elements(s, elements)) for elements in ends]
            # So many that the number of a vector is beyond 32 bits, too.
            elements, before = block + block // 2 + 3, -(-FAR * vector // block) * block
            part = of_elements(s, elements)
            once.append(RunOnce("far", of_elements(s, before + elements), part=part, last=(LastBlocks(2),)))
        return once

    def edge_calls(self, kernel: Kernel) -> list[EdgeCall]:
        """No elements; as many as there are blocks, or as indices of lists count, and one more."""
        t = _full(kernel.tunables.as_dict())
        tile = _block(t) if _is_vectorised(t) else int(t["threads"]) * WORD_BITS
        most = LARGEST_INDEX * tile if _is_vectorised(t) else LARGEST_INDEX // tile * tile
        return [EdgeCall({"elements": number}, number <= most) for number in (0, most, most + 1)]

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        """`integer`: over a ring of all of it, else integers of either sign, whose polynomials fp32 rounds once, if at
        all. Masks have words (or 32 bytes) of one kind among others, and random bits behind the last element."""
        p = self.own(problem)
        drawn = min(p.elements, LARGEST_RANDOM if p.elements <= LARGEST_RANDOM else BLOCK)
        if over_ring(p):
            x = ring_numbers(p, drawn, kind, rng)
        elif kind == "integer":
            x = rng.integers(-LARGEST_INTEGER, LARGEST_INTEGER, drawn, endpoint=True).astype(np.float32)
        else:
            x = 2.0 * rng.standard_normal(drawn, dtype=np.float32)
            if kind == "special":
                x = with_special(x, 0.25, (*NO_NUMBERS, *ZEROS, SMALLEST[p.dtype]), rng)
        words = rng.integers(-(2**31), 2**31 - 1, words_of_mask(drawn), dtype=np.int32, endpoint=True)
        words = np.where(rng.random(words.size) < 0.25, rng.choice(np.array([0, -1, 1], np.int32), words.size), words)
        if p.mask == "bits":
            mask = np.resize(words, words_of_mask(p.elements))
        else:
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:drawn]
            # Any byte but 0 is set: kernels that compare with 1 or look at one bit are wrong.
            mask = np.resize(bits * rng.choice(np.array([1, 2, 128, 255], np.uint8), drawn), p.elements)
        return {"x": np.resize(x.astype(dtype(p.dtype).numpy), p.elements), "mask": mask}

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        """In float64, with the bound of an epilogue (`codegen/epilogue_reference.py`)."""
        p = self.own(problem)
        masks = unpacked_masks((p.node,), inputs, (p.elements,))
        if over_ring(p):
            return bounded(p.dtype, applied(p, (p.node,), inputs["x"], masks))
        x = of_values(as_float64(inputs["x"], p.dtype))
        final = through_chain((p.node,), x, masks, p.dtype, exact)
        return final.value, final.error

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        """Any algorithm reads x and the mask and writes out, once."""
        p, t = self.own(problem), schedule.as_dict()
        n, size = p.elements, dtype(p.dtype).bytes
        mask = INDEX_BYTES * words_of_mask(n) if p.mask == "bits" else n
        launches = 1 if _is_vectorised(t) else 3
        counted = counted_launches(p, _full(t), n // 2) if p.fraction_bits else ()
        truncations = sum(launch.truncations for launch in counted)
        return Cost(
            round(n * _instructions(p)), n * size + mask, n * size, launches, _workspace_bytes(p, t), truncations
        )

    def multiplications(self, problem: Problem) -> int:
        """As a fused node has them."""
        p = self.own(problem)
        return int(p.elements * products((p.node,)))

    def imads(self, problem: Problem) -> int:
        return IMADS.get(self.own(problem).dtype, 0)

    def ring_bytes(self, problem: Problem, schedule: Schedule, openings: Openings) -> int | None:
        """As a node of an epilogue: a product opens its number, and is truncated."""
        p = self.own(problem)
        if not over_ring(p):
            return None
        launches = counted_launches(p, _full(schedule.as_dict()), p.elements // 2)
        opened = sum(launch.total.of_epilogue for launch in launches)
        return dtype(p.dtype).bytes * (opened + sum(launch.truncations for launch in launches))

    def launches(self, problem: Problem, schedule: Schedule, target: Target) -> tuple[LaunchCounts, ...]:
        """Of lists it is not known how long they are: half of the bits count as set."""
        p, t = self.own(problem), _full(schedule.as_dict())
        return counted_launches(p, t, p.elements // 2)

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        """Of lists it is not known how long they are: half of the bits count as set."""
        p, t, least = self.own(problem), _full(schedule.as_dict()), self.cost(problem, schedule)
        vectorised = _is_vectorised(t)
        n, size = float(p.elements), dtype(p.dtype).bytes
        read = n * size if not vectorised else float(least.bytes_read)
        return Work(
            blocks=_blocks(p.elements, t), threads=int(t["threads"]), fma=0.0,
            other_instructions=n * (4.0 + 12.0 / int(t["vector"]) + _instructions(p)), shared_bytes=0.0,
            l2_bytes=read + least.bytes_written, dram_bytes=read + least.bytes_written, dynamic_shared_bytes=0,
            independent=int(t["vector"]) * int(t["loads"]), steps=1, overlap=1.0 - 1.0 / (1.0 + int(t["loads"])),
            others=() if vectorised else _lists(p, int(t["threads"]), least),
        )  # fmt: skip

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        return LaunchBounds(int(kernel.tunables.get("threads")))

    def estimated_registers(self, kernel: Kernel) -> int:
        return _registers(_full(kernel.tunables.as_dict()))

    def shared_bytes(self, kernel: Kernel) -> int:
        """The sums of the warps, of `compact`."""
        t = kernel.tunables.as_dict()
        return 0 if _is_vectorised(t) else int(t["threads"]) // 32 * 4

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        t = _full(kernel.tunables.as_dict())
        per_element = 0.001 if node_of(kernel.signature_dict["node"]).exact else 0.003
        return 0.04 + per_element * int(t["vector"]) * int(t["loads"])


def counted_launches(p: MaskedActivationProblem, t: Mapping[str, Any], listed: int) -> tuple[LaunchCounts, ...]:
    """`listed`: bits that are set, of which `gather_scatter` has lists."""
    n, size, vector = p.elements, dtype(p.dtype).bytes, int(t["vector"])
    # The last elements are moved one by one. A word of bits is read for each access.
    accesses = n // vector + n % vector
    moved = (
        Primitive("load_global", accesses, bytes_read=n * size),
        Primitive("store_global", accesses, bytes_written=n * size),
    )
    of_bits = Primitive("load_global", accesses, bytes_read=INDEX_BYTES * accesses)
    if _is_vectorised(t):
        mask = of_bits if p.mask == "bits" else replace(moved[0], bytes_read=n)
        return (LaunchCounts("run", merged((*moved, mask, *_multiplied(p, n, p.node)))),)
    tiles, threads = _tiles(n, int(t["threads"])), int(t["threads"])
    mask = load(INDEX_BYTES * words_of_mask(n), INDEX_BYTES) if p.mask == "bits" else load(n, 1)
    compact = (mask, store(INDEX_BYTES * (listed + tiles), INDEX_BYTES))
    indices = load(INDEX_BYTES * (listed + tiles * threads), INDEX_BYTES)  # each thread reads how many there are
    scatter = (indices, load(listed * size, size), store(listed * size, size))
    of_all = _multiplied(p, n, p.node.model_copy(update={"where_set": Identity()}))
    of_listed = _multiplied(p, listed, p.node.model_copy(update={"where_clear": Identity()}))
    named = {"run": (*moved, *of_all), "compact": compact, "scatter": (*scatter, *of_listed)}
    return tuple(LaunchCounts(function, merged(parts)) for function, parts in named.items())


def _multiplied(p: MaskedActivationProblem, elements: int, node: Node) -> list[Primitive]:
    """Products, over a ring each truncated; of two functions the dearer one's, as if no bit were that of the other."""
    count = elements * products((node,))
    name, truncated = ("imad", bool(p.fraction_bits)) if over_ring(p) else ("fma", False)
    return [Primitive(name, count, count, of_epilogue=count), Primitive(TRUNCATE, count if truncated else 0)]


def _block(t: Mapping[str, Any]) -> int:
    """Elements of a block."""
    return int(t["threads"]) * (int(t["vector"]) * int(t["loads"]) if _is_vectorised(t) else WORD_BITS)


def _is_vectorised(tunables: Mapping[str, Any]) -> bool:
    return str(tunables["algorithm"]) == "vectorised"


def _full(tunables: Mapping[str, Any]) -> dict[str, Any]:
    """With what the first pass of `gather_scatter` takes where it has no knob for it."""
    return {"vector": 1, "loads": 4, **tunables}


def _tiles(elements: int, threads: int) -> int:
    """Of `gather_scatter`: blocks with a list of indices each."""
    return -(-elements // (threads * WORD_BITS))


def _blocks(elements: int, t: Mapping[str, Any]) -> int:
    return -(-elements // (int(t["threads"]) * int(t["vector"]) * int(t["loads"])))


def _workspace_bytes(problem: MaskedActivationProblem, t: Mapping[str, Any]) -> int:
    """As `workspace_bytes` in kernel.cuh."""
    if _is_vectorised(t):
        return 0
    count = _tiles(problem.elements, int(t["threads"]))
    return count * int(t["threads"]) * WORD_BITS * INDEX_BYTES + -(-count * INDEX_BYTES // 16) * 16


def _registers(t: Mapping[str, Any]) -> int:
    """An estimate of a thread's."""
    return OVERHEAD_REGISTERS + 2 * int(t["vector"]) * int(t["loads"])


def _padding(elements: int, per_block: int, least: int) -> Rejected | None:
    """`least`: elements of the smallest block of all."""
    return check(
        per_block <= max(least, 2 * elements),
        "padding",
        f"a block of {per_block} elements is mostly padding for {elements}",
    )


def _lists(problem: MaskedActivationProblem, threads: int, least: Cost) -> tuple[Work, ...]:
    """Making the lists, and what is done by them."""
    listed, size = problem.elements / 2.0, dtype(problem.dtype).bytes
    mask = least.bytes_read - problem.elements * size
    count = _tiles(problem.elements, threads)

    def launch(dram: float, scattered: float, instructions: float, shared_bytes: int) -> Work:
        return Work(
            blocks=count, threads=threads, fma=0.0, other_instructions=instructions, shared_bytes=0.0,
            l2_bytes=dram + scattered, dram_bytes=dram, dynamic_shared_bytes=shared_bytes,
            independent=1, steps=WORD_BITS // 2, overlap=0.0,
        )  # fmt: skip

    apart = listed * SECTOR_BYTES
    return (
        # A word's bits are looked at one by one, and each index is stored by itself.
        launch(mask + listed * INDEX_BYTES, apart, problem.elements * 12.0, threads // 32 * INDEX_BYTES),
        launch(listed * (INDEX_BYTES + 2 * size), 2.0 * apart, listed * (24.0 + _instructions(problem)), 0),
    )


def _instructions(problem: MaskedActivationProblem) -> float:
    """Per element: where functions differ within a warp both are computed."""

    return sum(_INSTRUCTIONS.get(node.op, 1.0) for node in (problem.where_set, problem.where_clear))


OPERATOR = MaskedActivation()
