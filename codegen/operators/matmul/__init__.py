"""Matrix multiplication, on the CUDA cores (simt_*.py) and on tensor cores (tensor_*.py)."""

from collections.abc import Mapping
from importlib.resources import files as packaged_files
from typing import Any

import numpy as np

from codegen.dtypes import dtype
from codegen.epilogue import scalars, structures, tensor_nodes, words_of_mask
from codegen.kernel import Kernel
from codegen.operator import (
    GEMM,
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
from codegen.operators.matmul import (
    inputs,
    limbs_rules,
    limbs_work,
    ring_inputs,
    ring_reference,
    ring_space,
    simt_rules,
    simt_space,
    simt_work,
    split,
    tensor_rules,
    tensor_space,
    tensor_work,
    traffic,
)
from codegen.operators.matmul import space as spaces
from codegen.operators.matmul.alignment import aligns
from codegen.operators.matmul.fixed_point import RINGS, over_ring
from codegen.operators.matmul.kernel_family import is_limbs, is_tensor, on_tensor_cores
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.reduced import reduced_problems
from codegen.operators.matmul.reference import reference
from codegen.problem import Problem, require
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import Target

EXTENT_NAMES = ("batch", "m", "n", "k", "lda", "ldb", "ldc", "stride_a", "stride_b", "stride_c")


class Matmul(Operator):
    """out = epilogue(A B), batched; see MatmulProblem for shapes and strides."""

    name = "matmul"
    problem_type = MatmulProblem
    tunables = spaces.TUNABLES
    folder = packaged_files("codegen.operators.matmul")
    shared = GEMM
    extent_names = EXTENT_NAMES

    def signature(self, problem: Problem) -> dict[str, Any]:
        p = _matmul(problem)
        a, b, c = aligns(p)
        shift = {"fraction_bits": p.fraction_bits, "rounding": p.rounding} if over_ring(p) else {}
        return {
            "layout": p.layout, "dtype": p.dtype, "acc_dtype": p.acc_dtype, "out_dtype": p.out_dtype,
            "allow_tf32": p.allow_tf32, "epilogue": structures(p.epilogue), "align_a": a, "align_b": b, "align_c": c,
            **shift,
        }  # fmt: skip

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        p = _matmul(problem)
        return spaces.space(p, target, aligns(p)[:2], search, lambda schedule: self.rules(p, schedule, target))

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        p = _matmul(problem)
        if over_ring(p):
            return _ring_rules(p, schedule, target, workspace_limit)
        admit = tensor_rules.rules if on_tensor_cores(p, target) else simt_rules.rules
        return admit(p, aligns(p)[:2], schedule, target, workspace_limit)

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        return split.functions(kernel.tunables.as_dict())

    def deterministic(self, kernel: Kernel) -> bool:
        return split.deterministic(kernel.tunables.as_dict(), str(kernel.signature_dict["acc_dtype"]))

    def config(self, kernel: Kernel) -> Config:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        aligned = (s["align_a"], s["align_b"], s["align_c"])
        if s["dtype"] in RINGS:
            fields = (*config_fields(ring_space.whole(t), s["layout"], aligned), *_ring_fields(s, t))
        else:
            fields = config_fields(t, s["layout"], aligned)
        types = (("Input", s["dtype"]), ("Accumulator", s["acc_dtype"]), ("Output", s["out_dtype"]))
        return Config(fields, tuple(s["epilogue"]), types, s["out_dtype"])

    def extents(self, problem: Problem) -> list[int]:
        return [int(getattr(problem, name)) for name in EXTENT_NAMES]

    def scalars(self, problem: Problem) -> list[float]:
        return scalars(_matmul(problem).epilogue)

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Rank 2, or 3 with the batch first where there is more than one matrix. Bias is a vector."""
        p = _matmul(problem)
        a = _matrix("a", p.dtype, "in", p.batch, p.stored("a"), p.lda, p.stride_a)
        b = _matrix("b", p.dtype, "in", p.batch, p.stored("b"), p.ldb, p.stride_b)
        out = _matrix("out", p.out_dtype, "out", p.batch, p.stored("c"), p.ldc, p.stride_c)
        extra = []
        for node, name, element in tensor_nodes(p.epilogue, p.out_dtype):
            if node.op == "bias":
                extra.append(Operand(name, element, "in", (p.m if node.structure == "bias.m" else p.n,), (1,)))
            elif node.packed_mask:
                extra.append(Operand(name, element, "in", (words_of_mask(p.batch * p.m * p.n),), (1,), align=1))
            else:
                extra.append(Operand(name, element, "in", out.shape, out.strides))
        return (a, b, *extra, out)

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return list(reduced_problems(kernel.signature_dict, kernel.tunables.as_dict()))

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        return split.launches_to_test(kernel.tunables.as_dict(), _matmul(problem))

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        p = _matmul(problem)
        make = ring_inputs.make_inputs if over_ring(p) else inputs.make_inputs
        return make(p, self.operands(p), kind, rng)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        p = _matmul(problem)
        return ring_reference.reference(p, inputs) if over_ring(p) else reference(p, inputs, exact)

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        return traffic.cost(_matmul(problem), schedule.as_dict(), self.operands(problem))

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        p, t = _matmul(problem), schedule.as_dict()
        count = limbs_work.work if is_limbs(t) else tensor_work.work if is_tensor(t) else simt_work.work
        return count(p, t, aligns(p), self.cost(p, schedule), target)

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        t = kernel.tunables.as_dict()
        if function != "run":
            return LaunchBounds(split.REDUCE_THREADS)
        if is_limbs(t):
            return LaunchBounds(tensor_rules.threads(t))
        return tensor_rules.launch_bounds(t) if is_tensor(t) else LaunchBounds(_threads(t), int(t["min_blocks"]))

    def estimated_registers(self, kernel: Kernel) -> int:
        t, size = kernel.tunables.as_dict(), _stored(kernel).size
        if is_limbs(t):
            return limbs_rules.registers(t, size)
        return tensor_rules.registers(t, _stored(kernel)) if is_tensor(t) else simt_rules.registers(t, size)

    def shared_bytes(self, kernel: Kernel) -> int:
        t, size = kernel.tunables.as_dict(), _stored(kernel).size
        if is_limbs(t):
            return limbs_rules.shared_bytes(t, size)
        return tensor_rules.shared_bytes(t, size) if is_tensor(t) else simt_rules.shared_bytes(t, size)

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        t, epilogue = kernel.tunables.as_dict(), tuple(kernel.signature_dict["epilogue"])
        if is_limbs(t):
            return limbs_work.compile_seconds(t, epilogue, _stored(kernel).size)
        if is_tensor(t):
            return tensor_work.compile_seconds(t, epilogue, _stored(kernel))
        return simt_work.compile_seconds(t, epilogue, _stored(kernel).size)


def config_fields(tunables: Mapping[str, Any], layout: str, aligns: tuple[int, int, int]) -> tuple[ConfigField, ...]:
    """What the code of `device/gemm` reads. `aligns`: elements per global access of A, B and out."""
    t = tunables
    return (
        ConfigField("bool", "tensor_cores", is_tensor(t)),
        ConfigField("bool", "a_transposed", layout[0] == "t"),
        ConfigField("bool", "b_transposed", layout[1] == "t"),
        *(ConfigField("int", f"align_{operand}", align) for operand, align in zip("abc", aligns, strict=True)),
        *constants(tensor_space.TUNABLES if is_tensor(t) else simt_space.TUNABLES, t),
        ConfigField("int", "threads", _threads(t)),
    )


def _ring_rules(
    problem: MatmulProblem, schedule: Schedule, target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    t = schedule.as_dict()
    if broken := ring_space.admitted(problem, t):
        return broken
    if is_limbs(t):
        return limbs_rules.rules(problem, schedule, target, workspace_limit)
    return simt_rules.rules(problem, aligns(problem)[:2], schedule, target, workspace_limit)


def _ring_fields(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> tuple[ConfigField, ...]:
    """What the code of rings reads beside that: the shift, and where it is done."""
    own = (tunable for tunable in ring_space.OWN if tunable.name in tunables)
    return (
        ConfigField("int", "fraction_bits", signature["fraction_bits"]),
        ConfigField("bool", "nearest", signature["rounding"] == "nearest"),
        *constants(own, tunables),
    )


def _threads(tunables: Mapping[str, Any]) -> int:
    return tensor_rules.threads(tunables) if is_tensor(tunables) else simt_rules.threads(tunables)


def _stored(kernel: Kernel) -> tensor_rules.Stored:
    s = kernel.signature_dict
    return tensor_rules.Stored(dtype(s["dtype"]).bytes, (s["align_a"], s["align_b"]), s["layout"])


def _matrix(name: str, dtype: str, role: Any, batch: int, shape: tuple[int, int], pitch: int, stride: int) -> Operand:
    if batch == 1:
        return Operand(name, dtype, role, shape, (pitch, 1))
    return Operand(name, dtype, role, (batch, *shape), (stride, pitch, 1))


_matmul = require(MatmulProblem)

OPERATOR = Matmul()
