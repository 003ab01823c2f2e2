"""Any number of bad kernels in a group: every innocent gets its library, every culprit is named, nobody waits long."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from codegen.elf import exported_symbols
from codegen.kernel import Kernel
from codegen.render_library import group_exports
from tests.fixtures_compile import *  # noqa: F403
from tests.fixtures_compile import LIMITS, SM_90A, probe
from workers.compile_file import CompileCancelled
from workers.compile_group import GroupOutcome, compile_group
from workers.processes import InfrastructureError, Limits, Processes
from workers.running import EndedBy, Finished
from workers.toolchain import Toolchain

CRASH, HANG = "crash", "hang"
NAMED = ("front_end", "ptxas_line", "ptxas_symbol", "host")
STATUS = {HANG: "compile_timeout"}  # of all others: compile_error


def ended(returncode: int, stderr: str = "", ended_by: EndedBy | None = None) -> Finished:
    return Finished(("nvcc",), returncode, b"", stderr.encode(), 0.1, 0.2, 0, ended_by)


class Scripted(Processes):
    """The process seam, where nvcc may end as `fault` says of the text that it was given."""

    def __init__(self, fault: Callable[[str], Finished | None]) -> None:
        super().__init__()
        self.fault = fault
        self.nvccs = self.now = self.most = 0
        self.guard = threading.Lock()

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        limits: Limits,
        env: Mapping[str, str] | None = None,
        cancel: threading.Event | None = None,
    ) -> Finished:
        if Path(argv[0]).name != "nvcc":
            return super().run(argv, cwd=cwd, limits=limits, env=env, cancel=cancel)
        with self.guard:
            self.nvccs += 1
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            answer = self.fault((cwd / "group.cu").read_text())
            return answer or super().run(argv, cwd=cwd, limits=limits, env=env, cancel=cancel)
        finally:
            with self.guard:
                self.now -= 1


def unnamed_faults(faults: Mapping[str, str]) -> Callable[[str], Finished | None]:
    """nvcc dies, or is ended, where a kernel with such a fault is in the file. By namespace."""

    def fault(text: str) -> Finished | None:
        found = [kind for namespace, kind in faults.items() if namespace in text]
        if CRASH in found:
            return ended(-signal.SIGSEGV, "nvcc error   : 'cicc' died due to signal 11")
        return ended(-signal.SIGKILL, ended_by="wall") if HANG in found else None

    return fault


def compiled(kernels: Sequence[Kernel], toolchain: Toolchain, processes: Processes) -> GroupOutcome:
    return compile_group(kernels, SM_90A, toolchain, processes, LIMITS)


@settings(
    deadline=None,
    max_examples=8,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.sampled_from(["none", "none", CRASH, HANG, *NAMED]), min_size=1, max_size=5))
def test_every_innocent_gets_its_library_and_every_culprit_is_named(toolchain: Toolchain, kinds: list[str]) -> None:
    kernels = [
        probe(number, kind if kind in NAMED else "none", threads=32 * (number + 1)) for number, kind in enumerate(kinds)
    ]
    unnamed = {k.namespace: kind for k, kind in zip(kernels, kinds, strict=True) if kind in (CRASH, HANG)}
    outcome = compiled(kernels, toolchain, Scripted(unnamed_faults(unnamed)))
    good = [kernel for kernel, kind in zip(kernels, kinds, strict=True) if kind == "none"]
    for kernel, kind in zip(kernels, kinds, strict=True):
        found = outcome.outcomes[kernel.id]
        assert found.status == ("ok" if kind == "none" else STATUS.get(kind, "compile_error")), (kind, found.log)
        assert bool(found.log) == (kind != "none")
        if kind == "none":
            assert found.artifact is not None
            assert kernel.id in outcome.artifacts[found.artifact].kernels
    by_id = {kernel.id: kernel for kernel in kernels}
    for artifact in outcome.artifacts:
        assert exported_symbols(artifact.library) == group_exports([by_id[name] for name in artifact.kernels])
    assert sorted(name for one in outcome.artifacts for name in one.kernels) == sorted(k.id for k in good)
    firsts = [[k.id for k in kernels].index(one.kernels[0]) for one in outcome.artifacts]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("k", [0, 1, 2, 7, 8])
def test_named_culprits_cost_at_most_one_more_compile_for_each_kind_of_tool(toolchain: Toolchain, k: int) -> None:
    kernels = [probe(number, "ptxas_line" if number < k else "none", threads=64) for number in range(8)]
    counting = Scripted(lambda text: None)
    outcome = compiled(kernels, toolchain, counting)
    assert [outcome.outcomes[one.id].status for one in kernels] == ["compile_error"] * k + ["ok"] * (8 - k)
    assert counting.nvccs == (1 if k in (0, 8) else 2)


def test_seconds_that_two_files_spend_at_once_count_once(toolchain: Toolchain) -> None:
    kernels = [probe(number) for number in range(3)]
    outcome = compiled(kernels, toolchain, Scripted(unnamed_faults({kernels[0].namespace: CRASH})))
    assert [phase.start for phase in outcome.phases] == sorted(phase.start for phase in outcome.phases)
    for kernel in kernels[1:]:
        mine = [phase for phase in outcome.phases if phase.kernels == (kernel.id,)]
        ends = [phase.start + phase.seconds for phase in mine]
        assert all(phase.start >= end - 1e-6 for phase, end in zip(mine[1:], ends[:-1], strict=True))
    tools = [phase.seconds for phase in outcome.phases if phase.name != "render"]
    assert max(tools) < outcome.wall_seconds < sum(tools)


def test_parts_are_compiled_side_by_side(toolchain: Toolchain) -> None:
    kernels = [probe(number) for number in range(4)]
    both = threading.Barrier(2)

    def fault(text: str) -> Finished | None:
        inside = sum(kernel.namespace in text for kernel in kernels)
        if inside == 1:
            both.wait(30)  # each part waits for the other: one after the other, neither would come
        return ended(-signal.SIGSEGV) if inside == 4 else None

    outcome = compiled(kernels, toolchain, scripted := Scripted(fault))
    assert {found.status for found in outcome.outcomes.values()} == {"ok"}
    assert scripted.most == 2


def test_a_cancel_in_one_part_ends_the_others(toolchain: Toolchain) -> None:
    kernels = [probe(number) for number in range(4)]
    cancel, hanging = threading.Event(), threading.Event()

    def fault(text: str) -> Finished | None:
        if all(kernel.namespace in text for kernel in kernels):
            return ended(-signal.SIGSEGV)
        if kernels[0].namespace in text:
            hanging.set()
            return None
        assert hanging.wait(30)
        cancel.set()
        return ended(-signal.SIGKILL, ended_by="cancelled")

    started = time.monotonic()
    with pytest.raises(CompileCancelled):
        compile_group(kernels, SM_90A, toolchain, Scripted(fault), replace(LIMITS, wall_seconds=60), cancel)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("kind", [CRASH, HANG])
def test_one_that_ends_the_compiler_ends_it_three_times(toolchain: Toolchain, kind: str) -> None:
    """In the whole group, in its part, and alone: each may take a whole time limit."""
    kernels = [probe(number) for number in range(9)]
    times: list[int] = []

    def fault(text: str) -> Finished | None:
        answer = unnamed_faults({kernels[4].namespace: kind})(text)
        times.extend([sum(kernel.namespace in text for kernel in kernels)] if answer else [])
        return answer

    outcome = compiled(kernels, toolchain, Scripted(fault))
    assert times == [9, 3, 1]
    assert [one.id for one in kernels if outcome.outcomes[one.id].status != "ok"] == [kernels[4].id]


MACHINE = ended(-signal.SIGKILL, "nvcc error   : 'cicc' died due to signal 9 (Kill signal)")


def test_what_the_machine_ended_once_is_tried_again_at_once(toolchain: Toolchain) -> None:
    answers = [MACHINE]
    kernel = probe()
    outcome = compiled([kernel], toolchain, scripted := Scripted(lambda text: answers.pop() if answers else None))
    assert outcome.outcomes[kernel.id].status == "ok"
    assert scripted.nvccs == 2


def test_what_the_machine_ended_beside_another_part_is_tried_again_alone(toolchain: Toolchain) -> None:
    kernels = [probe(number) for number in range(4)]
    lost: list[int] = []

    def fault(text: str) -> Finished | None:
        inside = [kernel.namespace in text for kernel in kernels]
        if all(inside):
            return ended(-signal.SIGSEGV)
        if inside[0]:
            lost.append(scripted.now)
            return MACHINE if len(lost) == 1 else None
        return None

    outcome = compiled(kernels, toolchain, scripted := Scripted(fault))
    assert {found.status for found in outcome.outcomes.values()} == {"ok"}
    assert len(lost) == 2 and lost[1] == 1  # alone


def test_what_the_machine_ended_twice_is_nobodys_verdict(toolchain: Toolchain) -> None:
    with pytest.raises(InfrastructureError):
        compiled([probe(1), probe(2)], toolchain, scripted := Scripted(lambda text: MACHINE))
    assert scripted.nvccs == 5  # together twice, each alone, and one of them again


def test_a_group_that_needs_more_memory_than_there_is_is_compiled_in_parts(toolchain: Toolchain) -> None:
    kernels = [probe(number) for number in range(4)]

    def fault(text: str) -> Finished | None:
        return MACHINE if sum(kernel.namespace in text for kernel in kernels) > 1 else None

    outcome = compiled(kernels, toolchain, Scripted(fault))
    assert {found.status for found in outcome.outcomes.values()} == {"ok"}
    assert len(outcome.artifacts) == 4
