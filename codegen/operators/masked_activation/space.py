"""Schedules: one vectorised pass, or lists of indices; their levels, rules, and what they do to the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from codegen.dtypes import dtype
from codegen.epilogue import Node, words_of_mask
from codegen.operator import Cost, Work
from codegen.operators.masked_activation.problem import MaskedActivationProblem
from codegen.search.joined_space import Kind, build_joined
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, check_workspace, first_accepted
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable
from codegen.targets import Target

THREADS = (64, 128, 256, 512, 1024)


def _algorithm(*names: str) -> Tunable:
    return Tunable("algorithm", names, False, "one pass, or lists of the indices of set bits", names[0], constant=False)


VECTORISED = (
    _algorithm("vectorised"),
    Tunable("threads", THREADS, False, "threads of a block", 256),
    Tunable("vector", (1, 2, 4, 8), False, "elements of one access, up to 16 bytes", 1),
    Tunable("loads", (1, 2, 4, 8), False, "vectors of a thread, all in flight at once", 4),
)
GATHER_SCATTER = (_algorithm("gather_scatter"), Tunable("threads", THREADS, False, "threads of a block", 256))
TUNABLES = (_algorithm("vectorised", "gather_scatter"), *VECTORISED[1:])
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


def full_tunables(tunables: Mapping[str, Any]) -> dict[str, Any]:
    """With what the first pass of `gather_scatter` takes where it has no knob for it."""
    return {"vector": 1, "loads": 4, **tunables}


def tiles(elements: int, threads: int) -> int:
    """Of `gather_scatter`: blocks with a list of indices each."""
    return -(-elements // (threads * WORD_BITS))


def blocks(elements: int, tunables: Mapping[str, Any]) -> int:
    t = full_tunables(tunables)
    return -(-elements // (int(t["threads"]) * int(t["vector"]) * int(t["loads"])))


def workspace_bytes(problem: MaskedActivationProblem, tunables: Mapping[str, Any]) -> int:
    """As `workspace_bytes` in kernel.cuh."""
    if tunables["algorithm"] == "vectorised":
        return 0
    count = tiles(problem.elements, int(tunables["threads"]))
    places = count * int(tunables["threads"]) * WORD_BITS
    return places * INDEX_BYTES + -(-count * INDEX_BYTES // 16) * 16


def registers(tunables: Mapping[str, Any]) -> int:
    """An estimate of a thread's."""
    t = full_tunables(tunables)
    return OVERHEAD_REGISTERS + 2 * int(t["vector"]) * int(t["loads"])


def space(
    problem: MaskedActivationProblem, search: Search, admit: Callable[[Schedule], Accepted | Rejected]
) -> SearchSpace:
    """The schedules of a search. Raises InvalidSearch."""
    widest = 16 // dtype(problem.dtype).bytes
    vectors = tuple(width for width in (1, 2, 4, 8) if width <= widest)
    small: dict[str, tuple[Value, ...]] = {
        "algorithm": ("vectorised",), "threads": (128, 256, 512), "vector": (widest,), "loads": (1, 2, 4),
    }  # fmt: skip
    full: dict[str, tuple[Value, ...]] = {**small, "threads": THREADS, "vector": vectors, "loads": (1, 2, 4, 8)}
    lists: dict[int, dict[str, tuple[Value, ...]]] = {
        1: {name: (value,) for name, value in LISTS.values},
        2: {"algorithm": ("gather_scatter",), "threads": THREADS},
    }
    every: dict[Value, tuple[Tunable, ...]] = {"vectorised": VECTORISED, "gather_scatter": GATHER_SCATTER}
    kinds: dict[Value, Kind] = {
        "vectorised": Kind(VECTORISED, {1: small, 2: full}),
        "gather_scatter": Kind(GATHER_SCATTER, lists),
    }
    wanted = [
        Schedule.of({"algorithm": "vectorised", "threads": threads, "vector": vector, "loads": loads})
        for vector, loads, threads in product(reversed(vectors), (4, 2, 1), (256, 128, 64))
    ]
    default = first_accepted(wanted, admit)
    # In every sample, however small: the winner is compared with what it replaces.
    return replace(build_joined(search, "algorithm", every, kinds, default), compared=(LISTS,))


def rules(
    problem: MaskedActivationProblem, schedule: Schedule, target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    """When a schedule cannot work or is not worth compiling."""
    t, n = schedule.as_dict(), problem.elements
    threads = int(t["threads"])
    if t["algorithm"] == "gather_scatter":
        places = tiles(n, threads) * threads * WORD_BITS
        return (
            check(places <= LARGEST_INDEX, "index", f"indices of {places} elements; 32 bits count {LARGEST_INDEX}")
            or _padding(n, threads * WORD_BITS, 64 * WORD_BITS)
            or check_workspace(workspace_bytes(problem, t), workspace_limit)
            or ACCEPTED
        )
    bytes_ = int(t["vector"]) * dtype(problem.dtype).bytes
    per_block, limit = threads * int(t["vector"]) * int(t["loads"]), target.registers_per_sm // threads
    return (
        check(bytes_ <= 16, "vector", f"vector = {t['vector']} is {bytes_} bytes; one access moves at most 16")
        or _padding(n, per_block, 64 * int(t["vector"]))
        or check(
            registers(t) <= min(limit, target.registers_per_thread),
            "registers",
            f"a thread needs about {registers(t)} registers; {threads} threads have {limit} each",
        )
        or check(blocks(n, t) <= LARGEST_INDEX, "grid", f"{blocks(n, t)} blocks; a launch has at most {LARGEST_INDEX}")
        or ACCEPTED
    )


def _padding(elements: int, per_block: int, least: int) -> Rejected | None:
    """`least`: elements of the smallest block of all."""
    return check(
        per_block <= max(least, 2 * elements),
        "padding",
        f"a block of {per_block} elements is mostly padding for {elements}",
    )


def cost(problem: MaskedActivationProblem, tunables: Mapping[str, Any]) -> Cost:
    """Any algorithm reads x and the mask and writes out, once."""
    n, size = problem.elements, dtype(problem.dtype).bytes
    mask = INDEX_BYTES * words_of_mask(n) if problem.mask == "bits" else n
    return Cost(
        flops=round(n * _instructions(problem)),
        bytes_read=n * size + mask,
        bytes_written=n * size,
        launches=1 if tunables["algorithm"] == "vectorised" else 3,
        workspace_bytes=workspace_bytes(problem, tunables),
    )


def work(problem: MaskedActivationProblem, tunables: Mapping[str, Any]) -> Work:
    """Counts for the roofline. Of lists it is not known how long they are: half of the bits count as set."""
    p, t = problem, full_tunables(tunables)
    least = cost(p, tunables)
    vectorised = t["algorithm"] == "vectorised"
    n, size = float(p.elements), dtype(p.dtype).bytes
    per_vector = 12.0 / int(t["vector"])
    read = n * size if not vectorised else float(least.bytes_read)
    return Work(
        blocks=blocks(p.elements, t), threads=int(t["threads"]), fma=0.0,
        other_instructions=n * (4.0 + per_vector + _instructions(p)), shared_bytes=0.0,
        l2_bytes=read + least.bytes_written, dram_bytes=read + least.bytes_written, dynamic_shared_bytes=0,
        independent=int(t["vector"]) * int(t["loads"]), steps=1, overlap=1.0 - 1.0 / (1.0 + int(t["loads"])),
        others=() if vectorised else _lists(p, int(t["threads"]), least),
    )  # fmt: skip


def _lists(problem: MaskedActivationProblem, threads: int, least: Cost) -> tuple[Work, ...]:
    """Making the lists, and what is done by them."""
    listed, size = problem.elements / 2.0, dtype(problem.dtype).bytes
    mask = least.bytes_read - problem.elements * size
    count = tiles(problem.elements, threads)

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

    def of(node: Node) -> float:
        return _INSTRUCTIONS.get(node.op, 1.0)

    return of(problem.where_set) + of(problem.where_clear)
