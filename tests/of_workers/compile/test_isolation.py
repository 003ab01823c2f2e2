"""Any number of bad kernels in a group: every innocent gets its library and every culprit its verdict, in few files."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from codegen.kernel import Kernel
from codegen.text.cubin import exported_symbols
from codegen.text.render_library import group_exports
from storage.config.limits import EndedBy
from tests.support.fixtures.compile import LIMITS, SM_90A, compiled_in_this_run, probe
from tests.support.kernels.compile_cache import CachingProcesses
from tests.support.kernels.compile_to_the_end import compile_to_the_end
from workers.compile.compile_file import CompileCancelled
from workers.compile.compile_group import GroupOutcome, KernelOutcome, compile_group
from workers.compile.toolchain import Toolchain
from workers.processes.process_stream import Finished
from workers.processes.processes import InfrastructureError, Limits, Processes

CRASH, HANG = "crash", "hang"
NAMED = ("front_end", "ptxas_line", "ptxas_symbol", "host")
STATUS = {HANG: "compile_timeout"}  # of all others: compile_error


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    Scripted.folder = compiled_in_this_run(tmp_path_factory)


def ended(returncode: int, stderr: str = "", ended_by: EndedBy | None = None) -> Finished:
    return Finished(("nvcc",), returncode, b"", stderr.encode(), 0.1, 0.2, 0, ended_by)


class Scripted(CachingProcesses):
    """The process interface, where nvcc may end as `fault` says of the text that it was given. `files`: how often it
    was started; `failed`: of the files that `fault` ended, the text. Equal files are compiled once."""

    folder: Path

    def __init__(self, fault: Callable[[str], Finished | None]) -> None:
        super().__init__(self.folder)
        self.fault = fault
        self.files = 0
        self.failed: list[str] = []

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        limits: Limits,
        **options: Any,
    ) -> Finished:
        answer = None
        if Path(argv[0]).name == "nvcc":
            self.files += 1
            text = (cwd / "group.cu").read_text()
            if answer := self.fault(text):
                self.failed.append(text)
        return answer or super().run(argv, cwd=cwd, limits=limits, **options)


def inside(text: str, kernels: Sequence[Kernel]) -> int:
    """How many of the kernels are in the text."""
    return sum(kernel.namespace in text for kernel in kernels)


def unnamed_faults(faults: Mapping[str, str]) -> Callable[[str], Finished | None]:
    """nvcc dies, or is ended, where a kernel with such a fault is in the file. By namespace."""

    def fault(text: str) -> Finished | None:
        kinds = [kind for namespace, kind in faults.items() if namespace in text]
        if CRASH in kinds:
            return ended(-signal.SIGSEGV, "nvcc error   : 'cicc' died due to signal 11")
        return ended(-signal.SIGKILL, ended_by="wall") if HANG in kinds else None

    return fault


def compiled(kernels: Sequence[Kernel], toolchain: Toolchain, processes: Processes) -> list[GroupOutcome]:
    return list(compile_to_the_end(kernels, SM_90A, toolchain, processes, LIMITS))


def found_of(outcomes: Sequence[GroupOutcome]) -> dict[str, KernelOutcome]:
    """Of each kernel, by id; none has two."""
    times = Counter(name for outcome in outcomes for name in outcome.outcomes)
    assert set(times.values()) <= {1}
    return {name: result for outcome in outcomes for name, result in outcome.outcomes.items()}


@settings(
    max_examples=2,
    phases=(Phase.explicit, Phase.generate),
)
@given(st.lists(st.sampled_from(["none", "none", CRASH, HANG, *NAMED]), min_size=1, max_size=5))
@example(["none", CRASH, "ptxas_line", HANG, "none"])
def test_every_innocent_gets_its_library_and_every_culprit_its_verdict(toolchain: Toolchain, kinds: list[str]) -> None:
    kernels = [
        probe(number, kind if kind in NAMED else "none", threads=32 * (number + 1)) for number, kind in enumerate(kinds)
    ]
    unnamed = {k.namespace: kind for k, kind in zip(kernels, kinds, strict=True) if kind in (CRASH, HANG)}
    outcomes = compiled(kernels, toolchain, Scripted(unnamed_faults(unnamed)))
    all_found = found_of(outcomes)
    assert all_found.keys() == {kernel.id for kernel in kernels}
    for kernel, kind in zip(kernels, kinds, strict=True):
        result = all_found[kernel.id]
        assert result.status == ("ok" if kind == "none" else STATUS.get(kind, "compile_error")), (kind, result.log)
        assert bool(result.log) == (kind != "none")
    by_id = {kernel.id: kernel for kernel in kernels}
    for outcome in outcomes:
        right = [name for name, result in outcome.outcomes.items() if result.status == "ok"]
        assert (outcome.artifact is None) == (right == [])
        if outcome.artifact is not None:
            assert outcome.artifact.kernels == tuple(right)
            exports = group_exports([by_id[name] for name in right])
            assert exported_symbols(outcome.artifact.library) == exports
        assert bool(outcome.left) == bool(outcome.why)
        assert not outcome.left or any(kernel.namespace in unnamed for kernel in outcome.left)


@pytest.mark.parametrize("k", [2, 8, *(pytest.param(k, marks=pytest.mark.long) for k in (0, 1, 7))])
def test_named_culprits_cost_at_most_one_more_compile_for_each_kind_of_tool(toolchain: Toolchain, k: int) -> None:
    kernels = [probe(number, "ptxas_line" if number < k else "none", threads=64) for number in range(8)]
    counting = Scripted(lambda text: None)
    outcome = compile_group(kernels, SM_90A, toolchain, counting, LIMITS)
    assert [outcome.outcomes[kernel.id].status for kernel in kernels] == ["compile_error"] * k + ["ok"] * (8 - k)
    assert (outcome.left, outcome.why) == ((), "")
    assert counting.files == (1 if k in (0, 8) else 2)


@pytest.mark.parametrize("kind", [CRASH, HANG])
def test_a_file_that_ends_its_compiler_is_compiled_once(toolchain: Toolchain, kind: str) -> None:
    """It is for the caller to try smaller ones: other workers may be idle."""
    kernels = [probe(number) for number in range(4)]
    scripted = Scripted(unnamed_faults({kernels[2].namespace: kind}))
    outcome = compile_group(kernels, SM_90A, toolchain, scripted, LIMITS)
    assert (outcome.outcomes, outcome.artifact, outcome.left) == ({}, None, tuple(kernels))
    assert ("died due to signal 11" if kind == CRASH else "it ran longer than 120 s") in outcome.why
    assert scripted.files == 1


@pytest.mark.parametrize(
    ("kind", "count", "bad", "failed"),
    [
        (CRASH, 1, 0, [1, 1]),
        (CRASH, 3, 0, [3, 2, 1, 1]),
        (HANG, 4, 1, [4, 1]),
        pytest.param(CRASH, 2, 1, [2, 1, 1], marks=pytest.mark.long),
        pytest.param(CRASH, 8, 7, [8, 4, 1, 1], marks=pytest.mark.long),
        pytest.param(CRASH, 9, 4, [9, 5, 1, 1], marks=pytest.mark.long),
        pytest.param(HANG, 9, 4, [9, 1], marks=pytest.mark.long),
    ],
)
def test_one_that_ends_the_compiler_is_tried_in_the_file_in_its_half_unless_it_hangs_and_alone(
    toolchain: Toolchain, kind: str, count: int, bad: int, failed: list[int]
) -> None:
    """Each may take a whole time limit; what crashes alone is run once more."""
    kernels = [probe(number) for number in range(count)]
    scripted = Scripted(unnamed_faults({kernels[bad].namespace: kind}))
    results = found_of(compiled(kernels, toolchain, scripted))
    assert [inside(text, kernels) for text in scripted.failed] == failed
    assert results.keys() == {kernel.id for kernel in kernels}
    assert {name: each.status for name, each in results.items() if each.status != "ok"} == {
        kernels[bad].id: STATUS.get(kind, "compile_error")
    }
    assert scripted.files <= 1 + (count if kind == HANG else 2 + 1 + (count + 1) // 2)


def test_kernels_that_only_crash_together_get_their_libraries(toolchain: Toolchain) -> None:
    kernels = [probe(number) for number in range(4)]
    crash = ended(-signal.SIGSEGV)
    scripted = Scripted(lambda text: crash if inside(text, kernels) > 2 else None)
    outcomes = compiled(kernels, toolchain, scripted)
    assert {name: each.status for name, each in found_of(outcomes).items()} == {kernel.id: "ok" for kernel in kernels}
    assert [len(outcome.left) for outcome in outcomes] == [4, 0, 0]
    assert scripted.files == 3


def test_a_cancel_ends_the_search_for_the_culprit(toolchain: Toolchain) -> None:
    kernels = [probe(number) for number in range(4)]
    cancel = threading.Event()

    def fault(text: str) -> Finished | None:
        if inside(text, kernels) == 4:
            return ended(-signal.SIGSEGV)
        cancel.set()
        return None  # the compiler is started, and ended by the cancel

    outcomes = compile_to_the_end(kernels, SM_90A, toolchain, scripted := Scripted(fault), LIMITS, cancel)
    assert next(outcomes).left == tuple(kernels)
    with pytest.raises(CompileCancelled):
        next(outcomes)
    assert scripted.files == 2


MACHINE = ended(-signal.SIGKILL, "nvcc error   : 'cicc' died due to signal 9 (Kill signal)")


@pytest.mark.parametrize("count", [1, 2])
def test_what_the_machine_ended_is_raised_at_once(toolchain: Toolchain, count: int) -> None:
    kernels = [probe(number) for number in range(count)]
    scripted = Scripted(lambda text: MACHINE)
    with pytest.raises(InfrastructureError, match="SIGKILL"):
        compile_group(kernels, SM_90A, toolchain, scripted, LIMITS)
    assert scripted.files == 1


def test_where_the_machine_fails_a_culprit_that_was_named_before_gets_no_verdict(toolchain: Toolchain) -> None:
    kernels = [probe(1), probe(2, "ptxas_line")]
    scripted = Scripted(lambda text: MACHINE if inside(text, kernels) == 1 else None)
    with pytest.raises(InfrastructureError):
        compile_group(kernels, SM_90A, toolchain, scripted, LIMITS)
    assert scripted.files == 2


def test_where_the_machine_fails_the_search_for_the_culprit_ends_without_a_verdict(toolchain: Toolchain) -> None:
    kernels = [probe(number) for number in range(4)]
    crash = ended(-signal.SIGSEGV)
    scripted = Scripted(lambda text: crash if inside(text, kernels) == 4 else MACHINE)
    outcomes = compile_to_the_end(kernels, SM_90A, toolchain, scripted, LIMITS)
    whole = next(outcomes)
    assert (whole.outcomes, whole.left) == ({}, tuple(kernels))
    with pytest.raises(InfrastructureError):
        next(outcomes)
    assert scripted.files == 2
