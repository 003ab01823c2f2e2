"""What an operator's tests declare. Fields are those of a problem; a schedule is named by its tunables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.kernel import Candidate, Kernel
from codegen.operator import Operator
from codegen.operators import operator
from codegen.problem import Problem
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import target
from tests.support.kernels.mutants import Site
from tests.support.kernels.random_cases import EACH_RUN

Array = NDArray[Any]
Fields = Mapping[str, Any]
Inputs = Mapping[str, Array]
MakeCases = Callable[[int, int], list[tuple[str, Candidate]]]


@dataclass(frozen=True, kw_only=True)
class Problems:
    """`refused`: fields, the one field that is named, and words of its sentence. `defaults`: the canonical form.
    `alike`: what has one key. `aligned`: fields and the part of the signature that follows. `operands`: name, dtype,
    role, shape and, where it is not packed, strides, in the order of a call. `unspecialised`: two problems of one
    signature, with the second one's attributes and scalars."""

    refused: Sequence[tuple[Fields, str, str]]
    defaults: Sequence[tuple[Fields, Fields]] = ()
    alike: Sequence[tuple[Fields, Fields]] = ()
    aligned: Sequence[tuple[Fields, Fields]] = ()
    operands: Sequence[tuple[Fields, Sequence[tuple[Any, ...]]]] = ()
    unspecialised: Sequence[tuple[Fields, Fields, Sequence[float]]] = ()
    in_schema: Sequence[Fields] = ()
    out_of_schema: Sequence[Fields] = ()


@dataclass(frozen=True)
class Rejection:
    """A rule that rejects, and words of its message."""

    fields: Fields
    schedule: Fields
    rule: str
    said: str
    arch: str = "sm_90a"
    workspace_limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Searches:
    """`public`: problems of `benchmarks/`. `nested`: problems of which level 1 is a proper part of level 2. `tried`:
    the algorithms of level 1. `begun`: targets, problems, words of why there may be no schedule (empty: there is one).
    `capped`: a schedule and the bytes of its workspace. `meaningless`: a search, the field that is named, words."""

    rejected: Sequence[Rejection]
    accepted: Sequence[tuple[Fields, Fields]] = ()
    public: Sequence[Fields] = ()
    nested: Sequence[Fields] = ()
    tried: Sequence[tuple[Fields, set[str]]] = ()
    begun: Sequence[tuple[str, Fields, str]] = ()
    capped: Sequence[tuple[Fields, Fields, int]] = ()
    meaningless: Sequence[tuple[Fields, Fields, str, str]] = ()


@dataclass(frozen=True, kw_only=True)
class References:
    """`definition` computes a problem in another way. Of problems with `exact` sums, integers must give equal results
    and a bound of 0; of the others `rtol` and `atol` are numpy's. `in_fp32(problem, inputs, lost)` is what a kernel may
    make of it, or one that loses a part of a sum. `by_torch`: PyTorch's result. `on_device`: kind of inputs, fields."""

    definition: Callable[[Any, Inputs], Array] | None = None
    defined: Mapping[str, Fields] = field(default_factory=dict)
    exact: bool = True
    rtol: float = 0.0
    atol: float = 0.0
    in_fp32: Callable[[Any, Inputs, bool], Array] | None = None
    bounded: Mapping[str, Fields] = field(default_factory=dict)
    wrong: int = 0  # so many elements at least are outside of the bound; 0: one
    by_torch: Callable[[Any, Inputs], Array] | None = None
    on_device: Sequence[tuple[str, Fields]] = ()
    on_device_rtol: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Verifications:
    """`nearest`: the largest error must come so near to its bound, or the bound forgives everything."""

    kernels: Callable[[], Mapping[str, Kernel]]
    sanitized: Callable[[], Sequence[Kernel]]
    nearest: float = 0.02

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", cache(self.kernels))  # asked for by each of a module's tables


@dataclass(frozen=True, kw_only=True)
class Mutations:
    """`files` are mutated wherever `tests/support/kernels/mutants.py` finds a place and as `wrong` says: file, the text
    that stands there once, what is wrong in its place. `kernels(name)` reach all of them; the operator is called `name`
    then. `counts`: how many mutants there are of some kinds. `definitions`: how often the text defines what is called.
    `excused`: by the comment of the line, kernels in which a missing barrier is no fault."""

    kernels: Callable[[str], Mapping[str, Kernel]]
    files: Sequence[str]
    wrong: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    more: Callable[[Mapping[str, str]], Iterable[Site]] = lambda texts: ()
    counts: Mapping[str, int] = field(default_factory=dict)
    definitions: Mapping[str, int] = field(default_factory=dict)
    excused: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RandomCases:
    """`properties`: what a case is about; `spread`: of what there must be how many percent. `extents`: of the launch
    ABI's, how many tell problems apart. `each_run`: how many `make test` verifies, 25 of an operator in all its
    modules."""

    cases: MakeCases
    properties: Callable[[str, Candidate], Counter[str]]
    spread: Mapping[str, int]
    extents: int | None = None
    each_run: int = EACH_RUN
    in_5000: Mapping[str, int] = field(default_factory=dict)  # numbers, not percent


@dataclass(frozen=True, kw_only=True)
class MachineCode:
    """Kernels that are compiled together, and claims about what nvcc makes of each. `compared`: those that a test of
    the module's own compares."""

    kernels: Callable[[], Mapping[str, Kernel]]
    claims: Mapping[str, Sequence[Callable[[Kernel, Any], object]]]
    compared: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", cache(self.kernels))  # asked for by each of a module's tables


@dataclass(frozen=True, kw_only=True)
class Launches:
    """`planned`: candidates of which cost and work say what the launch code does, of the schedule that a call of
    theirs gets (`bound`). `counted`: how many launches."""

    planned: Mapping[str, Callable[[], Sequence[Candidate]]]
    counted: Mapping[str, tuple[Callable[[], Candidate], int]] = field(default_factory=dict)
    bound: Callable[[Candidate], Schedule] = lambda candidate: candidate.schedule


Change = Mapping[str | int, Any]
"""Of a call: an operand's name and the expression in its place (None: it is missing); the index and value of
one of attributes and scalars; "numbers" and all of these."""


class Whole(str):
    """All of a message, not words of it."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """A winner's library and its calls. A call has the record's own operands and numbers but for `operands` and the
    change. `refused`: exception and words. `taken`: how many launches, or the grid of each. `always`: each run builds
    it, for a test of the module's own."""

    candidate: Callable[[], Candidate]
    operands: Change = field(default_factory=dict)
    refused: Mapping[str, tuple[Change, str, str]] = field(default_factory=dict)
    taken: Mapping[str, tuple[Change, Any]] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    always: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """`problems` by name, all of which have a winner; `make test` has the one that `each_run` names (default: the
    first), whose seconds are the fewest. `failing`: fields, search, how often each rule rejected (None: at least once,
    maybe beside others) and words of the error."""

    problems: Mapping[str, Fields]
    each_run: str = ""
    failing: Sequence[tuple[Fields, Fields, Mapping[str, int | None], str]] = ()


@dataclass(frozen=True, kw_only=True)
class Declarations:
    operator: str
    problem: Fields  # what a test's problem has where nothing else is said
    problems: Problems | None = None
    searches: Searches | None = None
    references: References | None = None
    verifications: Verifications | None = None
    mutations: Mutations | None = None
    random_cases: RandomCases | None = None
    machine_code: MachineCode | None = None
    launches: Launches | None = None
    calls: Mapping[str, Library] | None = None
    job: Job | None = None
    without: Mapping[str, str] = field(default_factory=dict)

    @property
    def op(self) -> Operator:
        return operator(self.operator)

    def parse(self, fields: Fields) -> Problem:
        return self.op.parse({"operator": self.operator, **self.problem, **fields})


def inputs_of(declared: Declarations, problem: Problem, kind: Any, seed: int) -> dict[str, Array]:
    return declared.op.make_inputs(problem, kind, np.random.default_rng(seed))


SM_90A = target("sm_90a")
LEVEL_0, LEVEL_1, LEVEL_2 = (Search(level=level) for level in (0, 1, 2))
