"""What becomes of a kernel's mutants: each is compiled for the CPU as the product compiles a candidate, and run through
the product's own plan in a fork, because a wrong kernel may damage its process."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import resource
import select
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TextIO

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.plan.verification_plan import plan_cases
from tests.mutants.arguments import argument_of
from tests.mutants.changes import Change, changes
from tests.mutants.emulation import compiled, lines_of, runtime
from tests.mutants.equivalence import launch_code, ptx
from tests.mutants.rules import RULES
from tests.support.kernels.mutant_runs import Remembered
from workers.cpu.launch_code import REFUSED, LaunchCode
from workers.cpu.library import CpuLibrary, Outcome, Tensor
from workers.cpu.run import plan_test

# What a survivor's outputs are.
SAME, RIGHT, OTHER = "the bits of the kernel as it is", "other bits, all of them right", "other bits"
ARGUED = "argument: "
# Of texts that are no mutants, because they are compiled to what the kernel as it is is.
SAME_LIBRARY, SAME_PTX = "the same machine code", "the same PTX and launch code"
FURTHER_SEEDS = 2
Became = Literal["no mutant", "caught", "equivalent", "survived"]
MEMORY_BYTES = 4 << 30  # resident, of a child that runs kernels in the product
NO_MEMORY = "no memory: "  # in the product a fault of the machine, which is no verdict
LEAST_SECONDS = 2.0
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class MutantResult:
    """`how`: which compiler refused it, what the plan said, what is the same, or nothing. No mutant is a text that is
    refused or is compiled to the same code. `kernel`: that which showed it; `first`: that whose text it is, where
    another one showed it."""

    kernel: str
    change: Change
    outcome: Became
    how: str
    seconds: float
    first: str = ""


def verify_mutants(kernels: Mapping[str, Kernel], wanted: int, seed: int) -> Iterator[MutantResult]:
    """Of `wanted` mutants, an even part of each kernel, what became of them; and of texts that were none. Where its
    own kernel does not show one, the others that have the line are asked. Raises where a kernel as it is fails."""
    with TemporaryDirectory(prefix="mutants_") as made:
        of = runtime(Path(made))
        benches = [
            Bench(name, kernel, Path(made) / str(n), seed, of) for n, (name, kernel) in enumerate(kernels.items())
        ]
        tried = set[Change]()
        for place, bench in enumerate(benches):
            share = wanted * (place + 1) // len(benches) - wanted * place // len(benches)
            rules = [*RULES]
            random.Random(f"{seed} {bench.name}").shuffle(rules)
            for change in in_turn(
                [each for each in bench.candidates() if each not in tried], rules, f"{seed} {bench.name}"
            ):
                if not share:
                    break
                tried.add(change)
                result = settled(bench, change, (each for each in benches if each is not bench))
                share -= result.outcome != "no mutant"
                yield result


def settled(own: Bench, change: Change, others: Iterable[Bench]) -> MutantResult:
    """A survivor is asked of the other kernels that have its line, then for an argument."""
    result = own.verify(change)
    if result.outcome != "survived":
        return result
    for bench in others:
        if bench.has(result.change) and (elsewhere := bench.verify(result.change)).outcome == "caught":
            return replace(elsewhere, first=result.kernel)
    argument = argument_of(change)
    holds = argument is not None and (argument.refuses is None or own.refuses(argument.refuses))
    if argument and holds and (result.how == SAME or (result.how == RIGHT and argument.rounds)):
        return replace(result, outcome="equivalent", how=f"{ARGUED}{argument.reason}")
    return result


def in_turn(candidates: Sequence[Change], rules: Sequence[str], seed: str) -> list[Change]:
    """One of each rule, then the next; one of a line and rule before a second one; of three, two of the device's
    text."""
    ordered = sorted(candidates, key=lambda change: change.rank(seed))
    seen, turns = Counter[tuple[str, str, int]](), Counter[tuple[str, bool, int]]()
    places: dict[Change, tuple[int, float, int]] = {}
    for change in ordered:
        again = seen[change.rule, change.file, change.line]
        seen[change.rule, change.file, change.line] += 1
        turn = turns[change.rule, change.on_host, again]
        turns[change.rule, change.on_host, again] += 1
        places[change] = (again, 2 * turn + 0.5 if change.on_host else turn, rules.index(change.rule))
    return sorted(ordered, key=places.__getitem__)


class Recording(CpuLibrary):
    """A library that keeps a digest of what its kernels wrote."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.outputs = hashlib.sha256()

    def run(self, namespace: str, tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> Outcome:
        outcome = super().run(namespace, tensors, *arguments, **options)
        for tensor in tensors:
            if tensor.operand.role == "out":
                self.outputs.update(tensor.view.tobytes())
        return outcome


class Bench:
    """A kernel as it is: its library, the lines that it is made of, the inputs and references of its plan."""

    def __init__(self, name: str, kernel: Kernel, folder: Path, seed: int, of: Path) -> None:
        self.name, self.kernel, self.folder, self.seed = name, kernel, folder, seed
        folder.mkdir(parents=True, exist_ok=True)
        self.runtime = of
        self.lines = lines_of(kernel, folder)
        library = compiled(kernel, None, folder / "as_it_is", self.runtime)
        assert library is not None, f"g++ refuses {name}"
        self.library = library.read_bytes()
        self.tested = Remembered(operator(kernel.operator), kernel, seed)
        gc.freeze()
        self.limit = 60.0
        began = time.process_time() + _of_children()
        assert (said := self._run(library)) == "", f"{name} as it is: {said}"
        self.limit = max(LEAST_SECONDS, 8 * (time.process_time() + _of_children() - began))
        self._same: tuple[str, bytes] | None = None
        self._known: dict[int, str] = {}

    def candidates(self) -> list[Change]:
        return [change for change in changes(self.kernel) if self.has(change)]

    def has(self, change: Change) -> bool:
        return change.line in self.lines.get(change.file, ())

    def verify(self, change: Change) -> MutantResult:
        began = time.process_time() + _of_children()
        outcome, how = self._outcome(change)
        return MutantResult(self.name, change, outcome, how, time.process_time() + _of_children() - began)

    def _outcome(self, change: Change) -> tuple[Became, str]:
        library = compiled(self.kernel, change, self.folder / "mutant", self.runtime)
        if library is None:
            return "no mutant", "g++ refuses it"
        if library.read_bytes() == self.library:
            return "no mutant", SAME_LIBRARY
        if said := self._run(library):
            return ("survived" if said.startswith(NO_MEMORY) else "caught"), said
        try:
            made = self._made(change)
        except AssertionError as refusal:
            return "no mutant", f"a compiler refuses it: {str(refusal)[-300:]}"
        if self._same is None:
            self._same = self._made(None)
        if made == self._same:
            return "no mutant", SAME_PTX
        seeds = [self.seed + further for further in range(FURTHER_SEEDS + 1)]
        if all(self._bits(library, at) == self._bits_as_it_is(at) for at in seeds):
            return "survived", SAME
        return "survived", RIGHT if all(self._run(library, at) == "" for at in seeds) else OTHER

    def refuses(self, numbers: Callable[[Any], Mapping[str, int]]) -> bool:
        """Whether the kernel as it is refuses a call of its first problem with other numbers."""
        case = next(iter(plan_cases(operator(self.kernel.operator), self.kernel, self.seed)))
        library = CpuLibrary(self.folder / "as_it_is" / "mutant.so")
        asked = LaunchCode(self.kernel, operator(self.kernel.operator))
        tensors = library.allocate(asked.operator.operands(case.problem))
        said = asked.answer_to(library, case, tensors, numbers(case.problem))
        tensors.clear()
        library.free()
        return said.startswith(REFUSED)

    def _bits_as_it_is(self, seed: int) -> str:
        if seed not in self._known:
            self._known[seed] = self._bits(self.folder / "as_it_is" / "mutant.so", seed)
        return self._known[seed]

    def _bits(self, library: Path, seed: int) -> str:
        """A digest of all outputs of a plan, or what it says."""
        return self._run(library, seed, recorded=True)

    def _made(self, change: Change | None) -> tuple[str, bytes]:
        return ptx(self.kernel, change, self.folder / "ptx"), launch_code(self.kernel, change, self.folder / "host")

    def _run(self, library: Path, seed: int | None = None, recorded: bool = False) -> str:
        """What the plan says of it; where nothing is wrong nothing, or where it is `recorded`, a digest of its
        outputs."""
        receiving, sending = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receiving)
            answer: dict[str, Any] = {}
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (int(3 * self.limit), int(3 * self.limit)))
                loaded = Recording(library)
                test = plan_test(loaded, self.kernel, self.seed if seed is None else seed, self.limit)
                if seed in (None, self.seed):
                    test.tested = self.tested
                failure = test.failure()
                right = loaded.outputs.hexdigest() if recorded else ""
                answer = {"said": f"{failure.verdict}: {failure.message}" if failure else right}
            except MemoryError as error:
                answer = {"said": f"{NO_MEMORY}{error}"}
            except BaseException:  # noqa: BLE001  # the parent raises it
                answer = {"raised": traceback.format_exc()}
            with os.fdopen(sending, "w") as pipe:
                json.dump(answer, pipe)
            os._exit(0)
        os.close(sending)
        with os.fdopen(receiving) as pipe:
            watched = _ends_within_its_memory(child, pipe)
            words = pipe.read()
        _, status = os.waitpid(child, 0)
        if not watched:
            return "runtime_error: reached the limit on memory"
        if not words:
            ended = os.waitstatus_to_exitcode(status)
            return f"runtime_error: the process ended with {signal.Signals(-ended).name}"
        answer = json.loads(words)
        assert "raised" not in answer, answer["raised"]
        return str(answer["said"])


def _ends_within_its_memory(child: int, pipe: TextIO) -> bool:
    """Waits for its answer or its end. One with too much memory is killed."""
    while not select.select([pipe], [], [], LOOK_SECONDS)[0]:
        resident = int(Path(f"/proc/{child}/statm").read_text().split()[1]) * resource.getpagesize()
        if resident > MEMORY_BYTES:
            os.kill(child, signal.SIGKILL)
            return False
    return True


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
