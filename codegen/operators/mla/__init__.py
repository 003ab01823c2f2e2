"""Multi-head latent attention, absorbed, on tensor cores: heads share their keys, so rows of a tile are pairs of a
query and a head, and the bytes of a tile of keys are read as values too."""

from collections.abc import Mapping
from importlib.resources import files as packaged_files
from typing import Any

import numpy as np

from codegen.counts import LaunchCounts
from codegen.kernel import Kernel
from codegen.operand import packed_strides
from codegen.operator import (
    ATTENTION,
    Array,
    Config,
    Cost,
    EdgeCall,
    Float64,
    InputKind,
    LaunchBounds,
    Operand,
    Operator,
    ScalarBounds,
    Tables,
    Work,
    constants,
)
from codegen.operators.attention import split
from codegen.operators.attention.problem import LARGEST_SCALE, LONGEST, SMALLEST_SCALE, refuse_fields
from codegen.operators.attention.space import threads
from codegen.operators.mla import inputs, space, work
from codegen.operators.mla.problem import HEAD_DIM_CKV, TABLES, TENSORS, VECTOR, MlaProblem
from codegen.operators.mla.reduced import far_problem, long_problem, reduced_problems
from codegen.operators.mla.reference import reference
from codegen.operators.mla.seen import most_tiles
from codegen.problem import Problem
from codegen.run_once import RunOnce
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import Target


class Mla(Operator):
    """See MlaProblem."""

    name = "mla"
    problem_type = MlaProblem
    tunables = space.TUNABLES
    folder = packaged_files("codegen.operators.mla")
    shared = ATTENTION
    files = ("block.cuh", "kernel.cuh")
    extent_names = (
        "batch", "tokens", "heads_q", "listed_positions",
        *(f"{tensor}_{axis}_stride" for tensor in TENSORS for axis in ("outer", "inner")),
    )  # fmt: skip
    attribute_names = ("causal",)
    limited = extent_names[:3]

    def parse(self, fields: Mapping[str, Any]) -> Problem:
        """The problem; raises pydantic.ValidationError, also for a call's tables, by name."""
        why = {name: f"is a tensor of a call and no field: {of} asks for calls with it" for name, of in TABLES.items()}
        refuse_fields(self.problem_type, fields, "not_a_field", why)
        return super().parse(fields)

    def signature(self, problem: Problem) -> dict[str, Any]:
        p: MlaProblem = self.own(problem)
        return {"dtype": p.dtype, "lse": p.lse, "queries": p.queries, "page_size": p.page_size}

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        return space.space(self.own(problem), target, search)

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        return space.rules(self.own(problem), schedule, target, workspace_limit)

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        return split.functions(kernel.tunables.as_dict())

    def arguments(self, kernel: Kernel) -> str:
        return "SplitArguments" if split.splits(kernel.tunables.as_dict()) else "Arguments"

    def tables(self, kernel: Kernel) -> Tables:
        size, ragged = kernel.signature_dict["page_size"], kernel.signature_dict["queries"] == "ragged"
        names = [*TENSORS, *(["qo_indptr"] if ragged else []), "kv_indptr", "kv_indices"]
        return Tables.among([*names, *(["kv_last_page_len"] if size > 1 else [])], "ckv_cache", size)

    def config(self, kernel: Kernel) -> Config:
        s = kernel.signature_dict
        own = constants(self.tunables, kernel.tunables.as_dict())
        flags = {"lse": s["lse"], "ragged": s["queries"] == "ragged"}
        return Config({**own, "page_size": s["page_size"], "align": VECTOR, **flags}, (), (("Input", s["dtype"]),))

    def extents(self, problem: Problem) -> list[int]:
        """A stride of one index alone is 0."""
        p: MlaProblem = self.own(problem)
        strides = [
            stride if extent > 1 else 0
            for name in TENSORS
            for extent, stride in zip(p.shape(name), p.strides(name), strict=False)
        ]
        return [p.batch, p.total_q, p.heads_q, p.pages * p.page_size, *strides]

    def attributes(self, problem: Problem) -> list[int]:
        return [int(self.own(problem).causal)]

    def scalars(self, problem: Problem) -> list[float]:
        return [self.own(problem).scale]

    def scalar_bounds(self, problem: Problem) -> tuple[ScalarBounds, ...]:
        return (ScalarBounds("scale", SMALLEST_SCALE, LARGEST_SCALE),)

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Queries, caches, tables, out, then lse."""
        p: MlaProblem = self.own(problem)
        tensors = [Operand(name, p.dtype, "in", p.shape(name), (*p.strides(name), 1), VECTOR) for name in TENSORS]
        tables = [Operand(name, "int32", "in", (length,), (1,), 1) for name, length in p.tables.items()]
        of_out, rows = (p.total_q, p.heads_q, HEAD_DIM_CKV), (p.total_q, p.heads_q)
        out = Operand("out", p.dtype, "out", of_out, packed_strides(of_out), VECTOR)
        lse = [Operand("lse", "float32", "out", rows, packed_strides(rows), 1)] if p.lse else []
        return (*tensors, *tables, out, *lse)

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return list(reduced_problems(kernel.signature_dict, kernel.tunables.as_dict()))

    def run_once(self, kernel: Kernel) -> list[RunOnce]:
        """Many keys, in as many parts as there may be; what is no number, and rows beyond 32 bits, in the problem that
        has gaps in memory."""
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        long, some, far = long_problem(s, t), reduced_problems(s, t)[1], far_problem(s, t)
        return [
            RunOnce("long", long, tuple(self.test_launches(kernel, long)[-1])),
            RunOnce("special", some, tuple(self.test_launches(kernel, some)[0])),
            RunOnce("far", far, tuple(self.test_launches(kernel, far)[0]), far),
        ]

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        """Where keys are split, into few parts and many: the first launch, which is race-checked, has more than a tile
        in a part, and as many parts as tiles leave some empty where a block does not see all keys."""
        p, t = self.own(problem), kernel.tunables.as_dict()
        if not split.splits(t):
            return [[0]]
        tiles = max(1, most_tiles(p, int(t["tile_q"]), int(t["tile_kv"])))
        return [[count] for count in dict.fromkeys((min(2, tiles), 1, min(5, tiles), tiles))]

    def edge_calls(self, kernel: Kernel) -> list[EdgeCall]:
        """As many rows as may be, and more; strides that are no multiple of a vector."""
        tokens, heads = 2**20, LONGEST // 2**20
        sizes = {"batch": tokens, "tokens": tokens}
        strides = (f"{tensor}_{axis}_stride" for tensor in TENSORS for axis in ("outer", "inner"))
        return [
            *(EdgeCall({**sizes, "heads_q": number}, number == heads) for number in (heads, heads + 1)),
            *(EdgeCall({stride: VECTOR + 1}, False) for stride in strides),
        ]

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        return inputs.make_inputs(self.own(problem), kind, rng)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        return reference(self.own(problem), inputs, exact)

    def exact(self, kernel: Kernel) -> bool:
        """A logarithm approximates."""
        return not kernel.signature_dict["lse"]

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        return work.cost(self.own(problem), schedule.as_dict())

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        return work.work(self.own(problem), schedule.as_dict(), target)

    def launches(self, problem: Problem, schedule: Schedule, target: Target) -> tuple[LaunchCounts, ...]:
        return work.launches(self.own(problem), schedule.as_dict())

    def multiplications(self, problem: Problem) -> int:
        return work.products(self.own(problem))

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        return LaunchBounds(threads(kernel.tunables.as_dict()) if function == "run" else split.MERGE_THREADS)

    def estimated_registers(self, kernel: Kernel) -> int:
        return space.registers(kernel.tunables.as_dict())

    def shared_bytes(self, kernel: Kernel) -> int:
        return space.shared_bytes(kernel.tunables.as_dict())

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        """By what is unrolled."""
        t = kernel.tunables.as_dict()
        return 0.1 + space.pieces(t) * (0.004 * int(t["tile_kv"]) + 0.1)


OPERATOR = Mla()
