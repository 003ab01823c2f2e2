"""What a kernel must show on a GPU before its time counts: the CPU plan's cases, then its own problem at full extents.

A case is a set of inputs and the launches made with it, whose outputs are compared by
`codegen.plan.verification_plan.check_output`:

1. `reduced_cases`: the problems of the CPU's plan (even, tail tiles, smallest, many tiles), every launch, integers with
   exact sums and random normals, positive numbers and special values where the CPU's plan has them; no orders of warps:
   the GPU's scheduler chooses them;
2. `full_cases`: the candidate's own problem and launch, integers and random normals;
3. `fresh_case`: random normals from another seed, for the check after timing;
4. `promised_cases`: the inputs of `codegen.plan.promised`, of whose outputs the SHA-256 is kept.

Every launch runs `repeats` times on the same inputs; each output is compared, and all have equal bits with `same_bits`:
a race does not show in every run.

A shipped kernel has no exact build, as the CPU has. So where a kernel approximates (`Operator.exact`), and at full
extents, where a request's own scalars make the epilogue round, the integer case takes the reference as it is: its sums
are exact, so the bound is the epilogue's own, and a wrong sum shows wherever the activation lets it through.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from codegen.kernel import Candidate, Kernel
from codegen.operator import Operator
from codegen.plan.promised import promised_inputs
from codegen.plan.verification_plan import Inputs, Kind
from codegen.run_once import Purpose, of_purpose

# Raised when the cases change: old verdicts then no longer count.
PLAN_SCHEMA = 5
REPEATS = 2

# Of the seeds that one seed gives: what they are for.
_REDUCED, _FULL, _FRESH = range(3)
_ONCE: dict[Purpose, int] = {"long": 3, "positive": 4, "special": 5}


@dataclass(frozen=True)
class GpuCase(Inputs):
    """One set of inputs and the launches made with it. `launches`: the launch ABI's int32 values. Each runs `repeats`
    times; with `same_bits` the outputs of one launch must not differ in a bit.
    """

    launches: tuple[tuple[int, ...], ...]
    repeats: int
    same_bits: bool

    @property
    def inputs(self) -> tuple[str, Kind, int]:
        """Equal for cases with the same inputs, which then need to be made only once."""
        return self.problem.digest, self.kind, self.seed

    def describe(self, extents: Sequence[int]) -> dict[str, Any]:
        return self.described(extents, launches=[list(launch) for launch in self.launches], repeats=self.repeats)


@dataclass(frozen=True)
class PromisedGpuCase(GpuCase):
    """A case whose output's digest is kept: the PTX of the kernel gives it on the CPU, where it promises one."""


def promised_cases(operator: Operator, kernel: Kernel) -> Iterator[PromisedGpuCase]:
    same_bits = operator.deterministic(kernel)
    for own in promised_inputs(operator, kernel):
        yield PromisedGpuCase(own.problem, own.kind, own.exact, own.seed, (own.launch,), 1, same_bits)


def reduced_cases(operator: Operator, kernel: Kernel, seed: int) -> Iterator[GpuCase]:
    """The cases of a kernel, whatever problem it is for; `seed` decides all inputs."""
    problems = operator.test_problems(kernel)
    seeds = _seeds(seed, _REDUCED, 2 * len(problems))
    exact, same_bits = operator.exact(kernel), operator.deterministic(kernel)
    for number, problem in enumerate(problems):
        launches = tuple(tuple(values) for values in operator.test_launches(kernel, problem))
        yield GpuCase(problem, "integer", exact, seeds[2 * number], launches, REPEATS, same_bits)
        yield GpuCase(problem, "normal", False, seeds[2 * number + 1], launches, REPEATS, same_bits)
    every = operator.run_once(kernel)
    for purpose, number in _ONCE.items():
        once = of_purpose(every, purpose)
        for each, own in zip(once, _seeds(seed, number, len(once)), strict=True):
            exactly = exact and each.kind == "integer"
            yield GpuCase(each.problem, each.kind, exactly, own, (each.launch,), 1, same_bits)


def full_cases(operator: Operator, candidate: Candidate, seed: int) -> Iterator[GpuCase]:
    """A candidate's own problem with its own launch. All candidates of a problem get the same inputs of a seed."""
    launch = tuple(operator.launch_values(candidate.schedule))
    integer_seed, normal_seed = _seeds(seed, _FULL, 2)
    same_bits = operator.deterministic(candidate.kernel)
    yield GpuCase(candidate.problem, "integer", False, integer_seed, (launch,), 1, same_bits)
    yield GpuCase(candidate.problem, "normal", False, normal_seed, (launch,), REPEATS, same_bits)


def fresh_case(operator: Operator, candidate: Candidate, seed: int) -> GpuCase:
    """The candidate's own problem once more, on inputs that no case of `full_cases` with this seed has."""
    launch = tuple(operator.launch_values(candidate.schedule))
    (normal_seed,) = _seeds(seed, _FRESH, 1)
    return GpuCase(
        candidate.problem, "normal", False, normal_seed, (launch,), 1, operator.deterministic(candidate.kernel)
    )


def _seeds(seed: int, purpose: int, count: int) -> list[int]:
    drawn = np.random.SeedSequence([seed, purpose]).generate_state(count, np.uint32)
    return [int(value) for value in drawn]
