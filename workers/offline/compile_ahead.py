"""Compile a stand-alone run's kernels while others are measured: those of the first problems first."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import chain

from codegen.kernel import Kernel
from codegen.predict.compile_cost import FIXED_SECONDS, MAX_KERNELS, MAX_SECONDS, files_that_pay, kernel_seconds
from codegen.targets import Target
from codegen.text.ptxas_report import telling_line
from cukiln.counted import counted
from storage.config.limits import COMPILE_LIMITS
from workers.compile.compile_file import CompileCancelled
from workers.compile.compile_group import GroupOutcome, compile_to_the_end, stored_resources
from workers.compile.toolchain import Toolchain
from workers.offline.measured import CompiledHere
from workers.offline.work import Built, Work, WorkProblem
from workers.processes.processes import InfrastructureError, Processes

# Of each compiler, before the kernels of the next problems come: so long nothing can be measured. A group's own start
# (codegen.predict.compile_cost.FIXED_SECONDS) is little beside it.
WAVE_SECONDS = 4.0
_ASK_SECONDS = 0.2

Group = tuple[tuple[Kernel, ...], Target]


class CompileAhead:
    """By `workers` compilers side by side. What they made is on the disk before `until` gives it to `work`."""

    def __init__(
        self,
        work: Work,
        problems: Sequence[WorkProblem],
        compiled: CompiledHere,
        *,
        toolchain: Toolchain | None,
        processes: Processes,
        workers: int,
        cancel: threading.Event,
        say: Callable[[str], None],
    ) -> None:
        self._work, self._compiled, self._processes = work, compiled, processes
        self._cancel, self._say = cancel, say
        self._writing = threading.Lock()
        self._build_of = {(kernel, target.name): build for build, (kernel, target) in work.waiting.items()}
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="compile")
        self._running: set[Future[dict[str, Built]]] = set()
        self._done = self._groups = 0
        if work.waiting:
            assert toolchain is not None, "only a run with a toolchain has something to compile"
            waves = list(waves_of(work, problems, workers))
            self._groups = sum(map(len, waves))
            for kernels, target in (group for wave in waves for group in wave):
                self._running.add(self._pool.submit(self._one, kernels, target, toolchain))

    def until(self, builds: Iterable[str]) -> bool:
        """Wait until none of these is being compiled; false where the run was ended. Raises what a compile does."""
        wanted = set(builds)
        while not self._cancel.is_set():
            missing = not wanted.isdisjoint(self._work.waiting)
            ended, self._running = wait(
                self._running, timeout=_ASK_SECONDS if missing else 0, return_when=FIRST_COMPLETED
            )
            for future in ended:
                self._take(future)
            if not ended and not missing:
                return True
        return False

    def close(self) -> None:
        """End the compilers that still run: `cancel` is set by then."""
        self._pool.shutdown(cancel_futures=True)

    def _take(self, future: Future[dict[str, Built]]) -> None:
        try:
            builds = future.result()
        except CompileCancelled:
            return
        self._work.builds |= builds
        for build in builds:
            del self._work.waiting[build]
        self._done += 1
        self._say(
            f"{self._done} of {counted(self._groups, 'group')} compiled, {counted(len(builds), 'kernel')} in this one"
        )

    def _one(self, kernels: Sequence[Kernel], target: Target, toolchain: Toolchain) -> dict[str, Built]:
        made: dict[Kernel, Built] = {}
        for outcome in self._outcomes(kernels, target, toolchain):
            with self._writing:
                some = self._made(outcome, kernels, toolchain)
                self._compiled.add({self._build_of[kernel, target.name]: built for kernel, built in some.items()})
            made |= some
        return {self._build_of[kernel, target.name]: built for kernel, built in made.items()}

    def _outcomes(self, kernels: Sequence[Kernel], target: Target, toolchain: Toolchain) -> Iterator[GroupOutcome]:
        """Until each kernel has one. Where the machine fails a file of several, halves of it are tried."""
        left = {kernel.id: kernel for kernel in kernels}
        limits = (self._processes, COMPILE_LIMITS, self._cancel)
        try:
            for outcome in compile_to_the_end(kernels, target, toolchain, *limits):
                left = {name: kernel for name, kernel in left.items() if name not in outcome.outcomes}
                yield outcome
        except InfrastructureError:
            rest = tuple(left.values())
            if len(rest) == 1:
                raise
            for half in (rest[::2], rest[1::2]):
                yield from self._outcomes(half, target, toolchain)

    def _made(self, outcome: GroupOutcome, kernels: Iterable[Kernel], toolchain: Toolchain) -> dict[Kernel, Built]:
        library = self._compiled.keep_library(outcome.artifact.library) if outcome.artifact else None
        outcomes = {kernel: outcome.outcomes[kernel.id] for kernel in kernels if kernel.id in outcome.outcomes}
        return {
            kernel: Built(
                state=kernel_outcome.status,
                message=telling_line(kernel_outcome.log),
                code_digest=kernel_outcome.code_digest,
                resources=stored_resources(kernel, kernel_outcome.resources) if kernel_outcome.resources else None,
                library=library if kernel_outcome.status == "ok" else None,
                toolchain=toolchain.digest,
            )
            for kernel, kernel_outcome in outcomes.items()
        }


def waves_of(work: Work, problems: Sequence[WorkProblem], workers: int) -> Iterator[list[Group]]:
    """What waits, in groups: those of a wave compile side by side, and hold the kernels of the next whole problems."""
    left = dict(work.waiting)
    wave: dict[Target, list[Kernel]] = {}
    for problem in problems:
        for build in dict.fromkeys(problem.builds.values()):
            if build in left:
                kernel, target = left.pop(build)
                wave.setdefault(target, []).append(kernel)
        is_last = problem is problems[-1]
        if wave and (is_last or sum(map(kernel_seconds, chain(*wave.values()))) >= WAVE_SECONDS * workers):
            yield [(members, target) for target, kernels in wave.items() for members in in_files(kernels, workers)]
            wave = {}


def in_files(kernels: Iterable[Kernel], workers: int) -> list[tuple[Kernel, ...]]:
    """Each kernel once, dealt out by length. As many files as pay for idle `workers`, or a multiple of that."""
    longest_first = sorted(set(kernels), key=lambda kernel: (-kernel_seconds(kernel), kernel.id))
    step = count = files_that_pay(sum(map(kernel_seconds, longest_first)), workers)
    while len(part := longest_first[::count]) > 1:  # no other has more kernels or more seconds
        if len(part) <= MAX_KERNELS and FIXED_SECONDS + sum(map(kernel_seconds, part)) <= MAX_SECONDS:
            break
        count += step
    return [tuple(longest_first[first::count]) for first in range(min(count, len(longest_first)))]
