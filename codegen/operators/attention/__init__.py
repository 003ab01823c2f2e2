"""Attention forward, FlashAttention-2's way on tensor cores: of the scores no more exists than those of some queries
and one tile of keys, in registers."""

import math
from collections.abc import Mapping
from importlib.resources import files as packaged_files
from typing import Any

import numpy as np

from codegen.alignment import widest
from codegen.counts import LaunchCounts
from codegen.kernel import Kernel
from codegen.operand import packed_strides
from codegen.operator import (
    ATTENTION,
    Array,
    Config,
    Cost,
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
from codegen.operators.attention import inputs, space, split, walk, work
from codegen.operators.attention.problem import (
    DENSE,
    LARGEST_SCALE,
    NOT_COMPUTED,
    SMALLEST_SCALE,
    TABLES,
    AttentionProblem,
    Tensor,
    refuse_fields,
)
from codegen.operators.attention.reduced import far_problem, long_problems, reduced_problems, special_problem
from codegen.operators.attention.reference import reference
from codegen.problem import Problem
from codegen.run_once import RunOnce
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import Target

INPUTS: tuple[Tensor, ...] = ("q", "k", "v")
TENSORS: tuple[Tensor, ...] = (*INPUTS, "out")
SCALE, SOFTCAP = (ScalarBounds(name, SMALLEST_SCALE, LARGEST_SCALE) for name in ("scale", "softcap"))
WITHOUT_END = -1  # of a window, as an attribute


class Attention(Operator):
    """See AttentionProblem."""

    name = "attention"
    problem_type = AttentionProblem
    tunables = space.TUNABLES
    folder = packaged_files("codegen.operators.attention")
    shared = ATTENTION
    files = ("block.cuh", "sequence.cuh", "pages.cuh", "merge.cuh", "walk.cuh", "kernel.cuh")
    extent_names = (
        "batch", "seq_q", "seq_kv", "heads_q", "heads_kv", "head_dim_qk", "head_dim_vo",
        *(f"{tensor}_{axis}_stride" for tensor in TENSORS for axis in ("batch", "position", "head")),
    )  # fmt: skip
    attribute_names = ("window_left", "window_right")
    limited = extent_names[:7]

    def parse(self, fields: Mapping[str, Any]) -> Problem:
        """The problem; raises pydantic.ValidationError, also for what other definitions have, by name."""
        refuse_fields(
            self.problem_type, fields, "not_computed", {name: _why_not(name) for name in (*NOT_COMPUTED, *TABLES)}
        )
        return super().parse(fields)

    def signature(self, problem: Problem) -> dict[str, Any]:
        p: AttentionProblem = self.own(problem)
        align, align_out = aligns(p)
        return {
            "dtype": p.dtype, "layout": p.layout, "softcap": p.softcap is not None, "lse": p.lse,
            "columns_qk": space.padded(p.head_dim_qk), "columns_vo": space.padded(p.head_dim_vo),
            "align": align, "align_out": align_out, **({"lengths": p.lengths} if p.ragged else {}),
            **({"page_size": p.page_size} if p.page_size else {}),
        }  # fmt: skip

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        return space.space(self.own(problem), target, search)

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        return space.rules(self.own(problem), schedule, target, workspace_limit)

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        return work.functions(kernel.tunables.as_dict())

    def arguments(self, kernel: Kernel) -> str:
        of = {"dense": "", "ragged": "Table", "paged": "Page"}[kernel.signature_dict.get("lengths", "dense")]
        t = kernel.tunables.as_dict()
        return f"{'Split' if split.splits(t) else 'Walk' if walk.walks(t) else ''}{of}Arguments"

    def tables(self, kernel: Kernel) -> Tables | None:
        s = kernel.signature_dict
        names = ["q", "k", "v", *(["qo_indptr", "kv_indptr"] if _ragged(s) else [])]
        names += ["kv_indices", "kv_last_page_len"] if s.get("page_size") else []
        return Tables.among(names, "k", s.get("page_size", 0)) if _ragged(s) else None

    def config(self, kernel: Kernel) -> Config:
        s = kernel.signature_dict
        numbers = {name: s[name] for name in ("columns_qk", "columns_vo", "align", "align_out")}
        numbers["page_size"] = s.get("page_size", 0)
        flags = {"softcap": s["softcap"], "lse": s["lse"], "heads_first": s["layout"] == "bhsd", "ragged": _ragged(s)}
        own = constants(self.tunables, kernel.tunables.as_dict())
        return Config({**own, **numbers, **flags}, (), (("Input", s["dtype"]),))

    def extents(self, problem: Problem) -> list[int]:
        """A stride of one index alone is 0. Of ragged batches seq_q and seq_kv are the positions of all sequences, and
        seq_kv is those of all pages that are listed."""
        p: AttentionProblem = self.own(problem)
        positions = [p.total_q, p.listed_kv] if p.ragged else [p.seq_q, p.seq_kv]
        sizes = [p.batch, *positions, p.heads_q, p.heads_kv, p.head_dim_qk, p.head_dim_vo]
        return [*sizes, *(stride for tensor in TENSORS for stride in p.by_name(tensor))]

    def attributes(self, problem: Problem) -> list[int]:
        p: AttentionProblem = self.own(problem)
        return [WITHOUT_END if window is None else window for window in (p.window_left, p.window_right)]

    def scalars(self, problem: Problem) -> list[float]:
        p: AttentionProblem = self.own(problem)
        return [p.scale] if p.softcap is None else [p.scale, p.softcap]

    def scalar_bounds(self, problem: Problem) -> tuple[ScalarBounds, ...]:
        p: AttentionProblem = self.own(problem)
        return (SCALE,) if p.softcap is None else (SCALE, SOFTCAP)

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """q, k, v, the tables of a ragged batch, out in the layout's order of axes, then lse."""
        p: AttentionProblem = self.own(problem)
        align, align_out = aligns(p)
        first = {name: int(p.ragged and not p.cached(name)) for name in TENSORS}  # without the axis of the batch
        tensors = [
            Operand(name, p.dtype, "in" if name in INPUTS else "out", p.shape(name)[first[name] :],
                    (*p.strides(name), 1)[first[name] :], align if name in INPUTS else align_out)
            for name in TENSORS
        ]  # fmt: skip
        tables = [Operand(name, "int32", "in", (length,), (1,), 1) for name, length in p.tables.items()]
        rows = (p.total_q, p.heads_q) if p.ragged else (p.batch, p.heads_q, p.seq_q)
        lse = [Operand("lse", "float32", "out", rows, packed_strides(rows), 1)] if p.lse else []
        return (*tensors[:-1], *tables, tensors[-1], *lse)

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return list(reduced_problems(kernel.signature_dict, kernel.tunables.as_dict()))

    def run_once(self, kernel: Kernel) -> list[RunOnce]:
        """Many keys, in as many parts as there may be, and many queries of a ragged batch; what is no number, where
        masks hide some of it from some queries; far, rows beyond 32 bits."""
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        some, far = special_problem(s, t), far_problem(s, t)
        return [
            *(RunOnce("long", long, tuple(self.test_launches(kernel, long)[-1])) for long in long_problems(s, t)),
            RunOnce("special", some, tuple(self.test_launches(kernel, some)[0])),
            RunOnce("far", far, tuple(self.test_launches(kernel, far)[0]), far),
        ]

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        """All heads side by side, one after the other, and some; where keys are split, into few parts and many."""
        t = kernel.tunables.as_dict()
        if walk.walks(t):
            return [[0, 1, count] for count in walk.WALKERS_TO_TEST]
        return [[*launch, 1] for launch in split.launches_to_test(t, self.own(problem))]

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        return inputs.make_inputs(self.own(problem), kind, rng)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        return reference(self.own(problem), inputs, exact)

    def exact(self, kernel: Kernel) -> bool:
        """A logarithm and a cap's tanh approximate."""
        s = kernel.signature_dict
        return not s["lse"] and not s["softcap"]

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        return work.cost(self.own(problem), schedule.as_dict())

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        p: AttentionProblem = self.own(problem)
        return work.work(p, schedule.as_dict(), aligns(p), target)

    def launches(self, problem: Problem, schedule: Schedule, target: Target) -> tuple[LaunchCounts, ...]:
        p: AttentionProblem = self.own(problem)
        return work.launches(p, schedule.as_dict(), aligns(p))

    def multiplications(self, problem: Problem) -> int:
        return work.products(self.own(problem))

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        others = {"merge": split.MERGE_THREADS, "list_tiles": walk.LIST_THREADS}
        return LaunchBounds(others[function] if function in others else space.threads(kernel.tunables.as_dict()))

    def estimated_registers(self, kernel: Kernel) -> int:
        page_size = kernel.signature_dict.get("page_size")
        return space.registers(kernel.tunables.as_dict(), *_columns(kernel), page_size=page_size)

    def shared_bytes(self, kernel: Kernel) -> int:
        return space.shared_bytes(kernel.tunables.as_dict(), *_columns(kernel))

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        """By what is unrolled: scores with their exponentials, and what a head's elements take. Fitted to nvcc 13.2 on
        24 kernels for sm_90a: 0.15 to 0.43 seconds each."""
        t, columns = kernel.tunables.as_dict(), _columns(kernel)
        scores = int(t["tile_kv"]) / 8
        per_score = 0.0145 if kernel.signature_dict["softcap"] else 0.0087
        return 0.1 + space.pieces(t) * (scores * per_score + 0.00044 * sum(columns))


def aligns(p: AttentionProblem) -> tuple[int, int]:
    """Elements of an access to q, k and v, and of one to out: the widest of which heads and strides are multiples."""
    of_inputs = math.gcd(p.head_dim_qk, p.head_dim_vo, *(stride for name in INPUTS for stride in p.by_name(name)))
    of_out = math.gcd(p.head_dim_vo, *p.by_name("out"))
    return widest(p.dtype, of_inputs, quads=False), widest(p.dtype, of_out, quads=False)


def _why_not(name: str) -> str:
    if name in TABLES:
        return f"is a tensor of a call and no field: lengths {TABLES[name]} asks for calls with it"
    return f"asks for {NOT_COMPUTED[name]}, which attention does not compute: {DENSE}"


def _ragged(signature: Mapping[str, Any]) -> bool:
    return "lengths" in signature


def _columns(kernel: Kernel) -> tuple[int, int]:
    s = kernel.signature_dict
    return s["columns_qk"], s["columns_vo"]


OPERATOR = Attention()
