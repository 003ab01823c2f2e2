"""The interface of an operator. An operator is one folder: adding one touches that folder and nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files as packaged_files
from importlib.resources.abc import Traversable
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from codegen.call_limits import EdgeCall as EdgeCall  # re-exported for operators
from codegen.call_limits import ScalarBounds as ScalarBounds
from codegen.counts import LaunchCounts, Openings, Primitive, RingForm, load, merged, store
from codegen.epilogue import node_of, scalars
from codegen.kernel import Candidate, Kernel
from codegen.operand import Operand as Operand
from codegen.problem import Problem
from codegen.run_once import RunOnce
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable
from codegen.targets import Target

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
InputKind = Literal["integer", "normal", "positive", "special"]
# Of a kernel without an estimate: half of a multiprocessor's threads can have them.
TYPICAL_REGISTERS = 64
WIDEST_ACCESS = 16  # bytes that one thread moves with one instruction
# Of `codegen/device`: sums of products in tiles, on the CUDA cores and on tensor cores.
GEMM = (
    "gemm/ring.cuh", "gemm/tile.cuh", "gemm/simt.cuh", "gemm/tensor.cuh", "gemm/limbs.cuh", "gemm/split.cuh",
    "gemm/limb_planes.cuh", "gemm/multiply.cuh", "gemm/launch.cuh",
)  # fmt: skip
# Convolutions: operands gathered and fed, planes, sums without a product, launch code. After GEMM, which they use.
CONV = (
    "conv/gather.cuh", "conv/feed.cuh", "conv/channel_planes.cuh", "conv/direct.cuh", "conv/window.cuh",
    "conv/launch.cuh",
)  # fmt: skip

# Attention: tiles of queries, keys and values; partial results that are merged.
ATTENTION = ("attention/tile.cuh", "attention/merge_rows.cuh")


Constants = Mapping[str, int | bool]


@dataclass(frozen=True)
class Config:
    """A kernel's Config: constants, element types, and the type that its epilogue makes (from typed nodes, never from
    text).

    `fields`: `static constexpr` members, int or bool as their values are. `epilogue`: structures of the nodes. `types`:
    (name, dtype) of element types, rendered as `using Input = …`. `operand_dtype`: of the epilogue's biases and
    residuals in memory.
    """

    fields: Constants
    epilogue: tuple[str, ...]
    types: tuple[tuple[str, str], ...] = ()
    operand_dtype: str = "float32"


def constants(tunables: Iterable[Tunable], values: Mapping[str, Value]) -> Constants:
    """The Config's members of the tunables that code depends on."""
    own = (tunable for tunable in tunables if tunable.constant and not tunable.launch_time)
    return {tunable.name: tunable.number(values) for tunable in own}


def shift_fields(signature: Mapping[str, Any]) -> Constants:
    """The Config's members of a ring's truncation (gemm/ring.cuh)."""
    return {"fraction_bits": signature["fraction_bits"], "nearest": signature["rounding"] == "nearest"}


@dataclass(frozen=True)
class LaunchBounds:
    """What a kernel function promises of its launches, and the limits of the register allocator.

    `threads` per block at most, `min_blocks` resident blocks; or `max_registers` per thread, where that is not 0. CUDA
    takes one of the two (CUDA C++ Programming Guide, "Maximum Number of Registers per Thread"): with `max_registers`
    the compiler does not see `threads` and `min_blocks`.
    """

    threads: int
    min_blocks: int = 1
    max_registers: int = 0

    def registers(self, target: Target) -> int:
        """How many a thread gets at most."""
        if self.max_registers:
            return self.max_registers
        if self.min_blocks == 1:
            return target.registers_per_thread
        return min(target.registers_per_thread, target.registers_per_sm // (self.threads * self.min_blocks))


@dataclass(frozen=True)
class Cost:
    """Of one run of a candidate; bytes are those that any algorithm must move between DRAM and chip. `launches` and
    `workspace_bytes` are those of the schedule, exactly as the launch code has them; `truncations`: how often
    a run truncates a number of fixed point, what tiles add to the matrices too."""

    flops: int
    bytes_read: int
    bytes_written: int
    launches: int
    workspace_bytes: int
    truncations: int = 0


@dataclass(frozen=True)
class Tables:
    """Operands of a kernel that say where sequences lie, by their number, and the tensor of keys, or of their pages, of
    `page_size` keys (0: none). As `Tables` in binding/check_tables.h."""

    qo_indptr: int
    kv_indptr: int
    kv_indices: int
    kv_last_page_len: int
    keys: int
    page_size: int

    @classmethod
    def among(cls, operands: Sequence[str], keys: str, page_size: int) -> "Tables":
        """By the names of all operands; -1 for a table that is not there."""
        places = {name: number for number, name in enumerate(operands)}
        of_queries, of_keys = places.get("qo_indptr", -1), places.get("kv_indptr", -1)
        indices, last = places.get("kv_indices", -1), places.get("kv_last_page_len", -1)
        return cls(of_queries, of_keys, indices, last, places[keys], page_size)


@dataclass(frozen=True)
class Work:
    """What a schedule does to the machine, for the roofline of `predict`. All counts are of the whole launch.

    `blocks` thread blocks of `threads`; `fma` multiply-adds issued, padding included; `imad` integer ones, of 32 bits;
    `other_instructions` per-lane instructions beside them; `shared_bytes` moved between shared memory and registers;
    `l2_bytes` requested of the L2,
    `dram_bytes` of the DRAM; `independent` FMA chains a thread has in flight; `steps` serial load-use round trips of a
    block and `overlap` in 0..1, how much of such a trip the schedule hides behind arithmetic. Where blocks differ,
    `steps` is their mean and `longest` what the longest of them has, which start first.

    On tensor cores: `mma` multiply-adds of the whole launch, `mma_type` which of the target's rates they run at,
    `mma_macs` of one instruction, of which `independent` are then a warp's chains. `prefetched` steps whose loads a
    block has in flight, where that is fixed (0: `overlap` has it). `special`: exponentials for the special-function
    units; each is one of `other_instructions` too. `looked_up`: loads from tables, each of which needs the one before,
    ahead of a block's first copy. `others` are the launches before and after this one.
    """

    blocks: int
    threads: int
    fma: float
    other_instructions: float
    shared_bytes: float
    l2_bytes: float
    dram_bytes: float
    dynamic_shared_bytes: int
    independent: int
    steps: int
    overlap: float
    longest: int = 0
    mma: float = 0.0
    mma_type: str = ""
    mma_macs: int = 0
    prefetched: int = 0
    imad: float = 0.0
    special: float = 0.0
    looked_up: int = 0
    others: "tuple[Work, ...]" = ()


class Operator(ABC):
    """One kind of computation. Methods are pure: the same arguments give the same result."""

    name: ClassVar[str]
    problem_type: ClassVar[type[Problem]]
    # Every knob that a schedule of some problem has. Where kernels of two kinds share a name, `allowed` is the union;
    # `space` has those of a problem's own schedules.
    tunables: ClassVar[tuple[Tunable, ...]]
    # The kernel's text, in the order in which the files are inlined: first those of `codegen/device` that it is made of
    # beside the primitives, which several operators of a group have once, then the operator's own.
    shared: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[tuple[str, ...]] = ("kernel.cuh",)
    # Of the launch ABI's integers: extents, and what no tensor shows, such as stride and padding.
    extent_names: ClassVar[tuple[str, ...]]
    attribute_names: ClassVar[tuple[str, ...]] = ()
    # Of these, what launch code refuses where it is too large to index.
    limited: ClassVar[tuple[str, ...]] = ()
    # Where the files lie: the folder of a packaged operator, or one from outside.
    folder: ClassVar[Traversable]

    @property
    def namespace(self) -> str:
        return f"cukiln::{self.name}"

    @cached_property
    def kernel_texts(self) -> Mapping[str, str]:
        """The text of each of `shared` and `files`, in their order."""
        device = packaged_files("codegen") / "device"
        places = [
            *((name, device / name) for name in self.shared),
            *((name, self.folder / name) for name in self.files),
        ]
        return {name: place.read_text(encoding="utf-8") for name, place in places}

    @cached_property
    def kernel_tunables(self) -> frozenset[str]:
        return frozenset(tunable.name for tunable in self.tunables if not tunable.launch_time)

    @cached_property
    def launch_tunables(self) -> tuple[str, ...]:
        """Names in the order of the launch ABI's array."""
        return tuple(tunable.name for tunable in self.tunables if tunable.launch_time)

    def parse(self, fields: Mapping[str, Any]) -> Problem:
        """The problem; raises pydantic.ValidationError, which names each field and what is allowed."""
        return self.problem_type.model_validate(dict(fields))

    def own(self, problem: Problem) -> Any:
        """The problem, which must be of this operator; raises TypeError."""
        if not isinstance(problem, self.problem_type):
            raise TypeError(f"{self.name} got a problem of operator {problem.operator!r}")
        return problem

    def candidate(self, problem: Problem, schedule: Schedule) -> Candidate:
        return Candidate(
            problem, schedule, Kernel.of(self.name, self.signature(problem), schedule.only(self.kernel_tunables))
        )

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        """The __global__ functions of the kernel's namespace, in the order that `Launch.function` indexes. The entry of
        each calls the operator's device function of that name."""
        return ("run",)

    def arguments(self, kernel: Kernel) -> str:
        """The plain struct of the operator's text that the kernel's functions take and `bind` makes: another than
        `Arguments` where some kernels take more than the others, whose machine code depends on its size."""
        return "Arguments"

    def transformed(self, kernel: Kernel) -> str | None:
        """The operand that the first of the kernel's functions alone reads, where a caller may have that function run
        once for many calls: the library exports it (`binding/transform.h`), and the operator's text has
        `transformed_bytes` and `use_transformed`."""
        return None

    def tables(self, kernel: Kernel) -> Tables | None:
        """Those of a call, whose contents a library of target cpu checks; a GPU reads them on the device alone."""
        return None

    def transformed_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """Of what it writes, exactly as the launch code has it."""
        return 0

    def deterministic(self, kernel: Kernel) -> bool:
        """Whether two runs on the same inputs give the same bits. A kernel that adds by atomics does not."""
        return True

    def launch_values(self, schedule: Schedule) -> list[int]:
        """The int32 array of the launch ABI; 0 for a tunable that kernels of the schedule's kind do not have."""
        values = schedule.as_dict()
        return [int(values.get(name, 0)) for name in self.launch_tunables]

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the problem."""
        model: type[BaseModel] = self.problem_type
        return model.model_json_schema()

    @abstractmethod
    def signature(self, problem: Problem) -> Mapping[str, Any]:
        """The problem without its extents: dtypes, layout, epilogue structure, specialisation class."""

    @abstractmethod
    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        """The schedules of a search; raises InvalidSearch."""

    @abstractmethod
    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        """Whether a schedule can work and is worth compiling."""

    @abstractmethod
    def config(self, kernel: Kernel) -> Config:
        """What the kernel's Config holds, from the kernel alone."""

    def extents(self, problem: Problem) -> list[int]:
        """What a call's tensors show, in the order of `extent_names`."""
        return [int(getattr(problem, name)) for name in self.extent_names]

    def attributes(self, problem: Problem) -> list[int]:
        """In the order of `attribute_names`."""
        return []

    def integers(self, problem: Problem) -> list[int]:
        """The int64 array of the launch ABI: extents, then attributes."""
        return [*self.extents(problem), *self.attributes(problem)]

    def scalars(self, problem: Problem) -> list[float]:
        """The double array of the launch ABI: those of the epilogue."""
        return scalars(getattr(problem, "epilogue", ()))

    def scalar_bounds(self, problem: Problem) -> tuple[ScalarBounds, ...]:
        """Of the first scalars, what a call may give: another number is refused, NaN too."""
        return ()

    @abstractmethod
    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """The tensors in launch ABI pointer order: inputs, then outputs."""

    @abstractmethod
    def test_problems(self, kernel: Kernel) -> list[Problem]:
        """Reduced problems of the kernel's own signature: even, tail tiles, smallest."""

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        """Distinct arrays of launch-time values for one of the kernel's test problems; all of them must be right."""
        return [[]]

    def run_once(self, kernel: Kernel) -> list[RunOnce]:
        """Further problems, for one run each."""
        return []

    def edge_calls(self, kernel: Kernel) -> list[EdgeCall]:
        """Where what its launch code takes ends, beside `limited`: asked of it with its first problem."""
        return []

    @abstractmethod
    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        """Arrays of the logical shapes of the `in` operands. `integer`: the exact result is representable;
        `positive`, `special`: of `run_once` alone."""

    @abstractmethod
    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        """The result in float64 and a bound on |kernel - result| per element; 0: equal, inf: unchecked. Of
        several `out` operands all elements as one vector, one operand behind the other.

        `exact` makes activations that fp32 only approximates the identity, as the kernel's exact CPU build does.
        At full extents the inputs are arrays of a GPU (`codegen.arrays`): so are then the two results.
        """

    def exact(self, kernel: Kernel) -> bool:
        """Whether the kernel computes whole numbers without approximation where its inputs are `integer`, so that the
        shipped code must give the reference's result of an exact run."""
        return all(node_of(structure).exact for structure in self.config(kernel).epilogue)

    @abstractmethod
    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        """FLOPs, bytes, launches and workspace of one run."""

    @abstractmethod
    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        """What a schedule does to the machine."""

    def launches(self, problem: Problem, schedule: Schedule, target: Target) -> tuple[LaunchCounts, ...]:
        """What a run does, by launch and primitive, in the order of launches. Where an operator says no more: what any
        algorithm must move, and multiplications as the roofline has them."""
        cost, multiplications = self.cost(problem, schedule), self.multiplications(problem)
        executed = round(self.work(problem, schedule, target).fma) if multiplications else 0
        moved = [load(cost.bytes_read, WIDEST_ACCESS), store(cost.bytes_written, WIDEST_ACCESS)]
        parts = merged([Primitive("fma", executed, executed), *moved])
        return (LaunchCounts("run", parts, multiplications, cost.launches),)

    def multiplications(self, problem: Problem) -> int:
        """Of two numbers, as the problem has them, with zeros of a padding; over a ring with those of the epilogue."""
        return 0

    def imads(self, problem: Problem) -> int:
        """Integer multiply-adds of 32 bits that a product of two of the problem's numbers takes; 0: they are floats."""
        return 0

    def ring_bytes(self, problem: Problem, schedule: Schedule, openings: Openings) -> int | None:
        """Bytes that one party of a two-party evaluation sends: of operands that are opened, and of numbers that are
        truncated. None where the problem is over no ring; comparisons are not in it."""
        return None

    def ring_forms(self, problem: Problem, schedule: Schedule, openings: Openings) -> tuple[RingForm, ...]:
        """What forms of a problem over a ring send, to compare: the schedule's own one, and others."""
        return ()

    @abstractmethod
    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        """Of one of the kernel's `functions`."""

    def estimated_registers(self, kernel: Kernel) -> int:
        """Of a thread of `run` without a limit, before it is compiled. Without an estimate the ranking rests on the
        other counts."""
        return TYPICAL_REGISTERS

    @abstractmethod
    def shared_bytes(self, kernel: Kernel) -> int:
        """Dynamic shared memory of a block, the most that any of the kernel's functions takes."""

    @abstractmethod
    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        """Of nvcc, for one more kernel of a group, in CPU seconds."""
