"""What matmul and the operators that are computed as a product of matrices have in common."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from codegen.counts import Openings
from codegen.dtypes import dtype
from codegen.fixed_point import IMADS, RINGS, over_ring, products, truncated_numbers
from codegen.kernel import Kernel
from codegen.operator import GEMM, Config, Constants, Cost, LaunchBounds, Operator, Work, constants, shift_fields
from codegen.operators.matmul import counts, limbs, ring_space, simt, simt_space, split, tensor, tensor_space
from codegen.operators.matmul.kernel_family import Stored, is_limbs, is_tensor
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.truncations import truncations
from codegen.problem import Problem
from codegen.run_once import Purpose, RunOnce
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule
from codegen.targets import Target

Fields = Mapping[str, Any]
# Products of a sum of positive numbers: cutting off tf32 operands costs 7e-4 of it, the bound is 2e-4.
POSITIVE_SUM = 256


class Family(Protocol):
    """A module of the kernels on one kind of cores, by their tunables `t`."""

    def threads(self, t: Fields, /) -> int: ...
    def launch_bounds(self, t: Fields, /) -> LaunchBounds: ...
    def registers(self, t: Fields, stored: Stored, /) -> int: ...
    def shared_bytes(self, t: Fields, size: int, /) -> int: ...
    def compile_seconds(self, t: Fields, epilogue: tuple[str, ...], stored: Stored, /) -> float: ...
    def rules(
        self, p: MatmulProblem, aligns: tuple[int, int], schedule: Schedule, target: Target, limit: int | None, /
    ) -> Accepted | Rejected: ...
    def work(
        self, p: MatmulProblem, t: Fields, aligns: tuple[int, int, int], least: Cost, target: Target, /
    ) -> Work: ...


def family(t: Fields) -> Family:
    """Of the kernel that has these tunables."""
    return limbs if is_limbs(t) else tensor if is_tensor(t) else simt


def whole(tunables: Fields) -> dict[str, Any]:
    """A schedule with what the code reads and limbs have no choice of."""
    return {**limbs.FIXED, **tunables} if is_limbs(tunables) else dict(tunables)


def rules(
    problem: MatmulProblem, aligns: tuple[int, int], schedule: Schedule, target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    """Whether a schedule of the product can work and is worth compiling. `aligns`: elements per access of A and B."""
    t = schedule.as_dict()
    if over_ring(problem) and (broken := ring_space.admitted(problem, t)):
        return broken
    return family(t).rules(problem, aligns, schedule, target, workspace_limit)


def product_fields(s: Fields, t: Fields, layout: str, aligns: tuple[int, int, int]) -> Constants:
    """What the code of `device/gemm` reads. `aligns`: elements per global access of A, B and out."""
    return {
        "tensor_cores": is_tensor(t),
        "a_transposed": layout[0] == "t",
        "b_transposed": layout[1] == "t",
        **{f"align_{operand}": align for operand, align in zip("abc", aligns, strict=True)},
        **constants(tensor_space.TUNABLES if is_tensor(t) else simt_space.TUNABLES, t),
        "threads": family(t).threads(t),
        **(ring_fields(s, t) if s["dtype"] in RINGS else {}),
    }


def ring_fields(s: Fields, t: Fields) -> Constants:
    """What the code of rings reads beside that: the shift, and where it is done."""
    return {**shift_fields(s), **constants((tunable for tunable in ring_space.OWN if tunable.name in t), t)}


class ProductOperator(Operator):
    """An operator says which product it is, and how its operands lie in memory."""

    shared: ClassVar[tuple[str, ...]] = GEMM
    # Whether one of the product's operands is filters, which a two-party evaluation may hold as public numbers.
    of_filters: ClassVar[bool] = True

    @staticmethod
    @abstractmethod
    def product(p: Any) -> MatmulProblem:
        """Tiles, splits, rules and costs are those of this product."""

    @abstractmethod
    def stored(self, s: Fields) -> Stored:
        """How the product's A and B lie in memory, by the kernel's signature."""

    @abstractmethod
    def fields(self, s: Fields, t: Fields) -> Constants:
        """Of the Config, by the kernel's signature and tunables."""

    def values(self, schedule: Schedule) -> dict[str, Any]:
        """A schedule as rules and code of the product read it."""
        return whole(schedule.as_dict())

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        return split.functions(kernel.tunables.as_dict())

    def deterministic(self, kernel: Kernel) -> bool:
        return split.deterministic(kernel.tunables.as_dict(), str(kernel.signature_dict["acc_dtype"]))

    def run_once(self, kernel: Kernel) -> list[RunOnce]:
        """Of kernels that round their operands positive numbers: the sums are neither so short nor so long that what
        adding loses hides it. Of floats what is no number, which goes through sums and epilogue."""
        s, problems, once = kernel.signature_dict, self.test_problems(kernel), list[RunOnce]()

        def once_of(purpose: Purpose, problem: Problem) -> RunOnce:
            return RunOnce(purpose, problem, tuple(self.test_launches(kernel, problem)[0]))

        if s["dtype"] == "float32" and is_tensor(kernel.tunables.as_dict()):
            near = min(problems, key=lambda problem: abs((problem.sum_length or 0) - POSITIVE_SUM))
            once.append(once_of("positive", near))
        if s["dtype"] in ("float32", "float16", "bfloat16"):
            once.append(once_of("special", problems[:2][-1]))
        return once

    def config(self, kernel: Kernel) -> Config:
        s = kernel.signature_dict
        types = (("Input", s["dtype"]), ("Accumulator", s["acc_dtype"]), ("Output", s["out_dtype"]))
        return Config(self.fields(s, self.values(kernel.tunables)), tuple(s["epilogue"]), types, s["out_dtype"])

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        t = self.values(kernel.tunables)
        return family(t).launch_bounds(t) if function == "run" else LaunchBounds(split.REDUCE_THREADS)

    def estimated_registers(self, kernel: Kernel) -> int:
        t = self.values(kernel.tunables)
        return family(t).registers(t, self.stored(kernel.signature_dict))

    def shared_bytes(self, kernel: Kernel) -> int:
        t = self.values(kernel.tunables)
        return family(t).shared_bytes(t, self.stored(kernel.signature_dict).size)

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        s, t = kernel.signature_dict, self.values(kernel.tunables)
        return family(t).compile_seconds(t, tuple(s["epilogue"]), self.stored(s))

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        return split.launches_to_test(kernel.tunables.as_dict(), self.product(self.own(problem)))

    # ---- what a schedule does

    def products(self, p: Any) -> list[tuple[int, MatmulProblem]]:
        """How many products of each kind a launch computes, and one of them."""
        return [(1, self.product(p))]

    @abstractmethod
    def opened(self, p: Any, schedule: Schedule, *, inputs: bool) -> tuple[int, int]:
        """Elements of the operands that a two-party evaluation opens: as they are multiplied, or of the raw inputs."""

    def multiplications(self, problem: Problem) -> int:
        p = self.own(problem)
        return sum(number * counts.multiplications(of) for number, of in self.products(p)) + self.epilogue_products(p)

    def epilogue_products(self, p: Any) -> int:
        """Multiplications of the epilogue."""
        return sum(number * of.batch * of.m * of.n * products(of.epilogue) for number, of in self.products(p))

    def imads(self, problem: Problem) -> int:
        return IMADS.get(self.own(problem).dtype, 0)

    def truncations(self, p: Any, t: Fields) -> int:
        """Of a run, in all products."""
        return sum(number * truncations(of, t) for number, of in self.products(p))

    def ring_bytes(self, problem: Problem, schedule: Schedule, openings: Openings) -> int | None:
        """A product of the epilogue opens its number, as those of matrices open their operands. What tiles add is not
        sent."""
        p, t = self.own(problem), schedule.as_dict()
        as_product = self.product(p)
        if not over_ring(as_product):
            return None
        secret = openings.filters == "secret" or not self.of_filters
        opened = sum(self.opened(p, schedule, inputs=openings.operands == "inputs")) if secret else 0
        opened += self.epilogue_products(p)
        truncated = sum(number * truncated_numbers(of, t) for number, of in self.products(p))
        return dtype(as_product.dtype).bytes * (opened + truncated)
