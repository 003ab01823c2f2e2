"""The verification plan of a kernel on the CPU; the same for every operator.

An operator contributes problems of reduced extents (even, tail tiles, smallest), inputs and a reference; this module
says what is run with them and checks what comes back:

1. integers whose exact result is representable: equal, once per order of warps, inexact activations as identity;
2. random normals against float64 within the operator's bound, the shipped activations;
3. case 2 again in another order of warps: the same bits, because every element has one order of summation;
4. integers on a few long problems, once: with as many parts as candidates have, with many steps;
5. positive numbers, once, of kernels that round their operands: a rounding in one direction adds up there;
6. normals with some NaN and infinities, zeros of either sign and subnormals, once, where the operator says what becomes
   of them: there a zero whose bound is 0 has its sign;
7. integers once where elements lie more than 2^31 apart, in address space that is hardly touched.

Buffers, shared memory and padding are poisoned with NaN before a case runs, so that what was never written shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from codegen.arrays import Array, Float64, namespace_of
from codegen.run_once import LastBlocks, Purpose, RunOnce, of_purpose

if TYPE_CHECKING:  # the plan of a recorded kernel is checked where no operator is known
    from codegen.kernel import Kernel
    from codegen.operator import Operator
    from codegen.problem import Problem

Kind = Literal["integer", "normal", "positive", "special"]
Order = Literal["ascending", "descending", "seeded"]

# Raised when the cases or the check of outputs change: old verdicts then no longer count.
PLAN_SCHEMA = 6
# What is run once, in the order of the plan: which of the seeds that one seed gives it has.
ONCE: dict[Purpose, int] = {"long": 1, "positive": 2, "special": 4, "far": 3}
EXACT_ORDERS: tuple[Order, ...] = ("ascending", "descending", "seeded")
# The second run must give the bits of the first.
NORMAL_ORDERS: tuple[Order, ...] = ("descending", "seeded")


@dataclass(frozen=True)
class Run:
    """One execution of a case's launches. `launch` are the launch ABI's int32 values. `watch`: it looks for races on
    shared memory and counts bank conflicts."""

    order: Order
    launch: tuple[int, ...]
    seed: int
    watch: bool = False


@dataclass(frozen=True)
class Inputs:
    """One set of inputs (`Operator.make_inputs(problem, kind, default_rng(seed))`), and how outputs are compared.
    `exact`: both `Operator.reference` and `check_output` are called with it."""

    problem: Problem
    kind: Kind
    exact: bool
    seed: int

    @property
    def shown(self) -> Problem:
        """That inputs and reference are of."""
        return self.problem

    @property
    def signed(self) -> bool:
        """Whether zeros whose bound is 0 must have their sign."""
        return self.kind == "special"

    def described(self, extents: Sequence[int], **more: Any) -> dict[str, Any]:
        """What the verdict's details keep of a case: enough to run it again."""
        return {
            "extents": list(extents),
            "sum_length": self.problem.sum_length,
            "kind": self.kind,
            "exact": self.exact,
            "seed": self.seed,
            **more,
        }


@dataclass(frozen=True)
class Case(Inputs):
    """One set of inputs and the runs made with it."""

    runs: tuple[Run, ...]

    def describe(self, extents: Sequence[int]) -> dict[str, Any]:
        return self.described(extents, runs=[asdict(run) for run in self.runs])


@dataclass(frozen=True)
class FarCase(Case):
    """A case whose elements lie 2^31 and more apart, in memory of which hardly anything is touched. `part`: the last
    elements of each axis of each operand, as a problem of its own, which the `last` blocks of each launch compute; all
    blocks where there are none."""

    part: Problem
    last: tuple[LastBlocks, ...]

    @property
    def shown(self) -> Problem:
        return self.part


@dataclass(frozen=True)
class Part:
    """A part of the plan, for finding a fault: one case by its number, every launch once in one order of
    warps, every run or none race-checked. `near`: no case beyond 32 bits. Whatever its outcome, only the whole plan is
    a verification."""

    case: int | None = None
    order: Order | None = None
    watch: bool | None = None
    near: bool = False

    def of(self, cases: Iterable[Case]) -> Iterator[Case]:
        """What is left of the plan's cases."""
        for number, case in enumerate(cases):
            if self.case in (None, number) and not (self.near and isinstance(case, FarCase)):
                yield replace(case, runs=self._runs(case.runs))

    def _runs(self, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        if self.order is not None:
            each_launch = {run.launch: run for run in reversed(runs)}
            runs = tuple(replace(run, order=self.order) for run in reversed(each_launch.values()))
        return runs if self.watch is None else tuple(replace(run, watch=self.watch) for run in runs)


@dataclass(frozen=True)
class OutputCheck:
    """How an output compares with the reference. `index` is the first wrong element, null where none is wrong.

    `max_error` is the largest |got - expected|, `error_bound` the bound at its place, `max_ratio` the largest share of
    its bound that an error took (0 to 1 where nothing is wrong; of exact runs: 0 or infinity). A NaN that is not
    expected counts as wrong.
    """

    wrong: int
    size: int
    max_error: float
    error_bound: float
    max_ratio: float
    index: tuple[int, ...] | None = None
    got: float | None = None  # of int64, as expected: a whole number
    expected: float | None = None
    bound: float | None = None

    @property
    def ok(self) -> bool:
        return self.wrong == 0

    def sentence(self) -> str:
        """What a person reads of a wrong output."""
        if self.index is None:
            return "every element is right"
        where = ", ".join(map(str, self.index))
        never = " (NaN: never written, or computed from unwritten memory)" if math.isnan(self.got or 0.0) else ""
        return (
            f"{self.wrong} of {self.size} elements are wrong; the first is out[{where}] = {self.got!r}{never}, "
            f"expected {self.expected!r} within {self.bound!r}"
        )


def plan_cases(operator: Operator, kernel: Kernel, seed: int) -> Iterator[Case]:
    """The cases of a kernel: for each problem first the exact one, then the approximate one; then long ones, exact, and
    those of positive numbers, with NaN and beyond 32 bits.

    Exact runs use every combination of launch-time tunables and every order of warps. `seed` decides all inputs and all
    seeded orders.
    """
    problems = operator.test_problems(kernel)
    seeds = [int(value) for value in np.random.SeedSequence(seed).generate_state(2 * len(problems), np.uint32)]
    for number, problem in enumerate(problems):
        launches = [tuple(values) for values in operator.test_launches(kernel, problem)]
        exact_seed, normal_seed = seeds[2 * number : 2 * number + 2]
        runs = tuple(
            # Starting at another launch for every problem brings each launch together with other orders.
            # A race does not depend on the order, so it is looked for once.
            Run(EXACT_ORDERS[i % len(EXACT_ORDERS)], launches[(i + number) % len(launches)], exact_seed + i, i == 0)
            for i in range(max(len(EXACT_ORDERS), len(launches)))
        )
        yield Case(problem, "integer", True, exact_seed, runs)
        launch = launches[number % len(launches)]
        repeats = tuple(Run(order, launch, normal_seed + i) for i, order in enumerate(NORMAL_ORDERS))
        yield Case(problem, "normal", False, normal_seed, repeats)
    every = operator.run_once(kernel)
    for purpose, of_seed in ONCE.items():
        for number, once in enumerate(of_purpose(every, purpose)):
            yield _case_of(once, _seed(seed, of_seed, number))


def _case_of(once: RunOnce, seed: int) -> Case:
    runs = (Run("seeded", once.launch, seed),)
    if once.part is not None:
        return FarCase(once.problem, once.kind, True, seed, runs, once.part, once.last)
    return Case(once.problem, once.kind, once.kind == "integer", seed, runs)


def _seed(seed: int, purpose: int, number: int) -> int:
    return int(np.random.SeedSequence([seed, purpose, number]).generate_state(1, np.uint32)[0])


def check_output(got: Array, expected: Float64, bound: Float64, *, exact: bool, signed: bool = False) -> OutputCheck:
    """Compare an output with float64 `expected`; `bound` is absolute, per element, infinite where anything is allowed
    (an overflow of fp32, say). Exact: equal values (the sign of a zero aside) wherever the bound is finite. Where
    NaN is expected, NaN is right. `signed`: a zero whose bound is 0 must have its sign, as in `special` inputs.

    All three are of one namespace, whichever; of a namespace without bfloat16 `got` is what `as_float64` makes of it.
    Where `expected` is int64, all are: then the distance is that on the ring Z/2^64, whose ends meet.
    """
    xp = namespace_of(expected)
    if expected.dtype == np.int64:
        return _check_integers(got, expected, xp.broadcast_to(bound, expected.shape), exact)
    values = got.astype(np.float64)
    allowed = xp.broadcast_to(bound, expected.shape)
    if exact:
        allowed = xp.where(xp.isposinf(allowed), allowed, 0.0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = xp.abs(values - expected)
        # Infinities that agree have no difference; a NaN compares false and stays wrong.
        free = xp.isposinf(allowed)
        agrees = (values == expected) | ((values != values) & (expected != expected))
        right = agrees | (error <= allowed) | free
        if signed:
            zero = (values == 0.0) & (expected == 0.0) & (allowed == 0.0)
            right = right & ~(zero & (xp.signbit(values) != xp.signbit(expected)))
        error = xp.where(agrees | free, 0.0, error)
        ratio = xp.where(error == 0.0, 0.0, error / allowed)
    return _summary(right, error, allowed, ratio, lambda at: (float(values[at]), float(expected[at])))


def _check_integers(got: Array, expected: Array, bound: Array, exact: bool) -> OutputCheck:
    xp = namespace_of(expected)
    # As unsigned numbers differences wrap around: the smaller of the two ways from one to the other.
    above, below = got.view(np.uint64) - expected.view(np.uint64), expected.view(np.uint64) - got.view(np.uint64)
    error = xp.minimum(above, below)
    allowed = xp.zeros_like(error) if exact else bound.astype(np.uint64)
    distance, limit = error.astype(np.float64), allowed.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = xp.where(error == 0, 0.0, distance / limit)
    return _summary(error <= allowed, distance, limit, ratio, lambda at: (int(got[at]), int(expected[at])))


def _summary(
    right: Array, error: Float64, allowed: Float64, ratio: Float64, at: Callable[[Any], tuple[float, float]]
) -> OutputCheck:
    """Of each element whether it is right, its error, the bound, and the share that it took; `at`: got and expected."""
    xp, shape, size = namespace_of(error), tuple(error.shape), int(error.size)
    wrong = size - int(xp.count_nonzero(right))
    if not size:
        return OutputCheck(wrong, size, 0.0, 0.0, 0.0)
    worst = _place(xp.argmax(error), shape)  # of a NaN, where there is one
    max_error, error_bound, max_ratio = float(error[worst]), float(allowed[worst]), float(xp.max(ratio))
    if not wrong:
        return OutputCheck(wrong, size, max_error, error_bound, max_ratio)
    first = _place(xp.argmin(right), shape)
    got, expected = at(first)
    return OutputCheck(
        wrong,
        size,
        max_error,
        error_bound,
        max_ratio,
        index=first,
        got=got,
        expected=expected,
        bound=float(allowed[first]),
    )


def _place(number: Array, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element by its number in row-major order."""
    return tuple(int(index) for index in np.unravel_index(int(number), shape))


def differing(first: Array, second: Array) -> int:
    """How many elements of two outputs of one namespace differ in their bits; those of a NaN say nothing."""
    unsigned = np.dtype(f"u{first.dtype.itemsize}")
    differ = first.view(unsigned) != second.view(unsigned)
    if np.dtype(first.dtype).kind not in "iub":
        differ = differ & ((first == first) | (second == second))
    return int(namespace_of(first).count_nonzero(differ))
