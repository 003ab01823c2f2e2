"""One of two functions of each element, as a mask says: in one vectorised pass or, for comparison, by lists."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files as packaged_files
from typing import Any

import numpy as np

from codegen.arrays import as_float64, namespace_of
from codegen.dtypes import dtype
from codegen.epilogue import MaskedActivation as Node
from codegen.epilogue import node_of, words_of_mask
from codegen.epilogue_reference import Bounded, apply_chain, stored, unpacked_masks
from codegen.kernel import Kernel
from codegen.operator import (
    Array,
    Config,
    ConfigField,
    Cost,
    Float64,
    InputKind,
    LaunchBounds,
    Operand,
    Operator,
    Work,
    constants,
)
from codegen.operators.masked_activation import space as spaces
from codegen.operators.masked_activation.problem import MaskedActivationProblem
from codegen.problem import Problem, require
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import Target

# The largest random integer of inputs: polynomials of degree 3 stay inside of float16.
LARGEST_INTEGER = 30
# Above so many elements a block of random ones is repeated: a prime, so that no two tiles of a kernel agree.
LARGEST_DRAWN, BLOCK = 2**22, 3_999_971


class MaskedActivation(Operator):
    """See MaskedActivationProblem."""

    name = "masked_activation"
    problem_type = MaskedActivationProblem
    tunables = spaces.TUNABLES
    folder = packaged_files("codegen.operators.masked_activation")
    extent_names = ("elements",)

    def signature(self, problem: Problem) -> dict[str, Any]:
        p = _masked(problem)
        return {"dtype": p.dtype, "node": p.node.structure}

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        p = _masked(problem)
        return spaces.space(p, search, lambda schedule: self.rules(p, schedule, target))

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        return spaces.rules(_masked(problem), schedule, target, workspace_limit)

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        return ("run",) if _is_vectorised(kernel) else ("run", "compact", "scatter")

    def config(self, kernel: Kernel) -> Config:
        s, t = kernel.signature_dict, spaces.full_tunables(kernel.tunables.as_dict())
        fields = (
            ConfigField("bool", "gather_scatter", not _is_vectorised(kernel)),
            *constants(spaces.TUNABLES, t),
        )
        return Config(fields, (s["node"],), (("Element", s["dtype"]),), s["dtype"])

    def extents(self, problem: Problem) -> list[int]:
        return [_masked(problem).elements]

    def scalars(self, problem: Problem) -> list[float]:
        return list(_masked(problem).node.scalars)

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Vectors; accesses are of 16 bytes at most, of a byte mask as many as of elements."""
        p = _masked(problem)
        bits = p.mask == "bits"
        length, wide = words_of_mask(p.elements) if bits else p.elements, 16 // dtype(p.dtype).bytes
        return (
            Operand("x", p.dtype, "in", (p.elements,), (1,), align=wide),
            Operand("mask", p.mask_dtype, "in", (length,), (1,), align=1 if bits else wide),
            Operand("out", p.dtype, "out", (p.elements,), (1,), align=wide),
        )

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        """Two whole blocks; those and a part of a vector, in the middle of a word; two words; one element."""
        s, t = kernel.signature_dict, spaces.full_tunables(kernel.tunables.as_dict())
        node = node_of(s["node"])
        assert isinstance(node, Node)
        per_element = int(t["vector"]) * int(t["loads"]) if _is_vectorised(kernel) else spaces.WORD_BITS
        block = int(t["threads"]) * per_element
        return [
            MaskedActivationProblem(
                shape=(elements,),
                dtype=s["dtype"],
                where_set=node.where_set,
                where_clear=node.where_clear,
                mask=node.mask,
            )
            for elements in (2 * block, 2 * block + 37 + int(t["vector"]) - 1, 64, 1)
        ]

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        return [[]]

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        """`integer`: integers of either sign; polynomials of them fp32 rounds once, if at all. Masks have words (or 32
        bytes) of one kind among others, and random bits behind the last element."""
        p = _masked(problem)
        drawn = min(p.elements, LARGEST_DRAWN if p.elements <= LARGEST_DRAWN else BLOCK)
        x = (
            rng.integers(-LARGEST_INTEGER, LARGEST_INTEGER, drawn, endpoint=True).astype(np.float32)
            if kind == "integer"
            else 2.0 * rng.standard_normal(drawn, dtype=np.float32)
        )
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
        p = _masked(problem)
        x = as_float64(inputs["x"], p.dtype)
        masks = unpacked_masks((p.node,), inputs, (p.elements,))
        start = Bounded(x, namespace_of(x).zeros_like(x))
        final = stored(p.dtype, apply_chain((p.node,), start, masks, exact, p.dtype))
        return final.value, final.error

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        return spaces.cost(_masked(problem), schedule.as_dict())

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        return spaces.work(_masked(problem), schedule.as_dict())

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        return LaunchBounds(int(kernel.tunables.get("threads")))

    def estimated_registers(self, kernel: Kernel) -> int:
        return spaces.registers(kernel.tunables.as_dict())

    def shared_bytes(self, kernel: Kernel) -> int:
        """The sums of the warps, of `compact`."""
        return 0 if _is_vectorised(kernel) else int(kernel.tunables.get("threads")) // 32 * 4

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        t = spaces.full_tunables(kernel.tunables.as_dict())
        per_element = 0.001 if node_of(kernel.signature_dict["node"]).exact else 0.003
        return 0.04 + per_element * int(t["vector"]) * int(t["loads"])


def _is_vectorised(kernel: Kernel) -> bool:
    return kernel.tunables.get("algorithm") == "vectorised"


_masked = require(MaskedActivationProblem)

OPERATOR = MaskedActivation()
