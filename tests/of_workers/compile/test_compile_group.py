"""Groups: innocents survive, culprits are named or all are left, and the machine's failures are no kernel's verdict."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from codegen.errors import NotUnique
from codegen.kernel import Kernel
from codegen.targets import target
from codegen.text.cubin import exported_symbols, read_cubin
from codegen.text.render_group import render_device, symbols
from codegen.text.render_library import group_exports, render_library
from storage.config.limits import EndedBy
from tests.of_workers.compile.compiled import compile_kernels, statuses
from tests.support.fixtures.compile import LIMITS, SM_90A, compiled_in_this_run, matmul_candidates, probe
from tests.support.kernels.compile_cache import CachingProcesses
from tests.support.processes.running import running_with
from workers.compile import compile_group as module
from workers.compile.compile_file import CompileCancelled, FileCompiler, UnexpectedSymbols
from workers.compile.compile_group import Artifact, GroupOutcome, compile_group, find_culprits
from workers.compile.toolchain import Nvcc, Toolchain
from workers.processes.process_stream import Finished
from workers.processes.processes import InfrastructureError, Limits, Processes
from workers.processes.stopwatch import Stopwatch


class Faulty(CachingProcesses):
    """The process interface with faults: `fault` may answer in a program's stead, given its name and its folder. A
    program compiles equal files once."""

    folder: Path

    def __init__(self, fault: Callable[[str, Path], Finished | None]) -> None:
        super().__init__(self.folder)
        self.fault = fault
        self.started: list[str] = []

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        limits: Limits,
        **options: Any,
    ) -> Finished:
        self.started.append(Path(argv[0]).name)
        answer = self.fault(self.started[-1], cwd)
        return answer or super().run(argv, cwd=cwd, limits=limits, **options)


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    Faulty.folder = compiled_in_this_run(tmp_path_factory)


def ended(returncode: int, stderr: str = "", ended_by: EndedBy | None = None) -> Finished:
    return Finished(("nvcc",), returncode, b"", stderr.encode(), 0.1, 0.2, 0, ended_by)


def nvcc_fails_with(kernel: Kernel, finished: Finished) -> Callable[[str, Path], Finished | None]:
    """nvcc ends like this whenever `kernel` is in the file."""

    def fault(program: str, folder: Path) -> Finished | None:
        guilty = program == "nvcc" and kernel.namespace in (folder / "group.cu").read_text()
        return finished if guilty else None

    return fault


def artifact_of(outcome: GroupOutcome) -> Artifact:
    assert outcome.artifact is not None, (outcome.why, outcome.outcomes)
    return outcome.artifact


def test_a_group_becomes_one_cubin_and_one_library(toolchain: Toolchain, processes: Processes) -> None:
    kernels = [*(candidate.kernel for candidate in matmul_candidates(2, epilogue=[{"op": "relu"}])), probe()]
    outcome = compile_kernels(kernels, toolchain, processes)
    assert statuses(outcome, kernels) == ["ok"] * 3
    assert (outcome.left, outcome.why) == ((), "")
    artifact = artifact_of(outcome)
    cubin = read_cubin(artifact.cubin)
    assert artifact.kernels == tuple(kernel.id for kernel in kernels)
    assert artifact.source == render_device(kernels).text
    assert cubin.symbols == {name for kernel in kernels for name in symbols(kernel)}
    assert exported_symbols(artifact.library) == group_exports(kernels)
    assert artifact.cubin in artifact.library
    for kernel in kernels[:2]:
        result = outcome.outcomes[kernel.id]
        assert result.log == ""
        assert result.code_digest == cubin.kernels[symbols(kernel)[0]]
        assert result.resources is not None and result.resources.registers > 20 and result.resources.barriers == 1
    names = [phase.name for phase in artifact.phases]
    assert {"cicc", "ptxas", "host", "link"} <= set(names)
    assert all(phase.seconds >= 0 for phase in artifact.phases)
    assert "$ nvcc" in artifact.log and "Used" in artifact.log and "$ g++" in artifact.log
    assert outcome.cpu_seconds > 0 and outcome.wall_seconds > 0


def test_every_tool_of_every_file_is_a_phase_in_its_order(toolchain: Toolchain, processes: Processes) -> None:
    good, bad = probe(1), probe(2, "ptxas_line")
    stopwatch = Stopwatch()
    outcome = compile_group([good, bad], SM_90A, toolchain, processes, LIMITS, stopwatch=stopwatch)
    names = [phase.name for phase in outcome.phases]
    device = ["render", "preprocess", "cicc", "ptxas", "nvcc"]
    assert names[-8:] == [*device, "render", "host", "link"], "of the file that came to its end"
    assert names[:3] == device[:3] and names[len(names) - 9] == "nvcc", "and of the one that ptxas refused"
    assert {phase.kernels for phase in outcome.phases} == {(good.id, bad.id), (good.id,)}
    ends = [phase.start + phase.seconds for phase in outcome.phases]
    assert all(phase.start >= end - 1e-6 for phase, end in zip(outcome.phases[1:], ends[:-1], strict=True))
    assert ends[-1] <= stopwatch.read().wall
    tools = sum(phase.seconds for phase in outcome.phases if phase.name != "render")
    assert tools == pytest.approx(outcome.wall_seconds)


def test_a_tool_that_was_ended_has_its_time_too(tmp_path: Path, toolchain: Toolchain, processes: Processes) -> None:
    outcome = compile_kernels(
        [probe()], fake_nvcc(tmp_path, toolchain, BUSY), processes, replace(LIMITS, cpu_seconds=0.5)
    )
    (render, nvcc) = outcome.phases
    assert (render.name, nvcc.name) == ("render", "nvcc")
    assert nvcc.seconds == pytest.approx(outcome.wall_seconds) and nvcc.seconds >= 0.4


BETWEEN = [pytest.param(name, marks=pytest.mark.long) for name in ("sm_80", "sm_89", "sm_100a", "sm_120")]


@pytest.mark.parametrize("name", ["sm_75", "sm_120a", *BETWEEN])
def test_other_targets_compile_too(toolchain: Toolchain, processes: Processes, name: str) -> None:
    sheet = target(name)
    epilogue = [{"op": "gelu"}, {"op": "cast", "dtype": "bfloat16"}]
    (kernel,) = (candidate.kernel for candidate in matmul_candidates(1, sheet, epilogue=epilogue))
    outcome = compile_group([kernel], sheet, toolchain, processes, LIMITS)
    assert statuses(outcome, [kernel]) == ["ok"], outcome.outcomes[kernel.id].log


def test_ptxas_keeps_to_a_limit_on_registers(toolchain: Toolchain, processes: Processes) -> None:
    # Each thread of the first launch holds 100 values: without a limit that takes as many registers.
    kernels = {most: probe(live=100, maxnreg=most) for most in (0, 64, 32)}
    outcome = compile_kernels(list(kernels.values()), toolchain, processes)
    used = {}
    for most, kernel in kernels.items():
        reported = outcome.outcomes[kernel.id].resources
        assert reported is not None, outcome.outcomes[kernel.id].log
        used[most] = reported
    assert used[0].registers > 100 and used[0].spill_bytes == 0
    for most in (64, 32):
        assert used[most].registers <= most
        assert used[most].spill_bytes > 0  # what did not fit
    assert len({each.code_digest for each in outcome.outcomes.values()}) == 3


def test_resources_are_the_worst_of_a_kernels_functions(toolchain: Toolchain, processes: Processes) -> None:
    # Only the first of the two launches holds values, and waits at a barrier while it does.
    kernel = probe(live=100)
    reported = compile_kernels([kernel], toolchain, processes).outcomes[kernel.id].resources
    assert reported is not None and reported.registers > 100 and reported.barriers == 1


def test_equal_groups_give_equal_bytes(toolchain: Toolchain, processes: Processes) -> None:
    first, second = (artifact_of(compile_kernels([probe(), probe(2)], toolchain, processes)) for _ in range(2))
    assert (first.cubin, first.library) == (second.cubin, second.library)


def test_a_kernel_of_two_functions_has_one_digest_of_both(toolchain: Toolchain, processes: Processes) -> None:
    # Only `first` has the factor: the second function is equal code.
    kernels = [probe(3), probe(4)]
    outcome = compile_kernels(kernels, toolchain, processes)
    cubin = read_cubin(artifact_of(outcome).cubin).kernels
    assert cubin[symbols(kernels[0])[1]] == cubin[symbols(kernels[1])[1]]
    assert outcome.outcomes[kernels[0].id].code_digest != outcome.outcomes[kernels[1].id].code_digest


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("front_end", "fault 1: the front end refuses this kernel"),
        ("ptxas_line", "no_such_instruction"),
        ("ptxas_symbol", "uses too much shared data"),
        ("host", "fault 4: the host compiler refuses this kernel"),
    ],
)
def test_a_bad_kernel_is_named_with_its_words_and_the_others_survive(
    toolchain: Toolchain, processes: Processes, fault: str, message: str
) -> None:
    counting = Faulty(lambda program, folder: None)
    good = [probe(1), probe(2), probe(3)]
    bad = [probe(4, fault), probe(5, fault)]
    kernels = [good[0], bad[0], good[1], bad[1], good[2]]
    outcome = compile_kernels(kernels, toolchain, counting)
    assert statuses(outcome, good) == ["ok"] * 3
    for kernel in bad:
        result = outcome.outcomes[kernel.id]
        assert result.status == "compile_error"
        assert message in result.log
        assert (result.code_digest, result.resources) == (None, None)
    assert artifact_of(outcome).kernels == tuple(kernel.id for kernel in good)
    assert (outcome.left, outcome.why) == ((), "")
    # Named, not searched for. ptxas stops at the first kernel whose shared memory is too large.
    assert counting.started.count("nvcc") <= 3


@pytest.mark.long  # as the one before it, with all kinds at once
def test_every_kind_of_fault_in_one_group(toolchain: Toolchain, processes: Processes) -> None:
    good = [probe(1), *(candidate.kernel for candidate in matmul_candidates(1))]
    bad = [probe(2, "front_end"), probe(3, "ptxas_line"), probe(4, "ptxas_symbol"), probe(5, "host")]
    outcome = compile_kernels([bad[0], good[0], *bad[1:], good[1]], toolchain, processes)
    assert statuses(outcome, good) == ["ok"] * 2
    assert statuses(outcome, bad) == ["compile_error"] * 4


def test_a_kernel_alone_keeps_the_whole_log(toolchain: Toolchain, processes: Processes) -> None:
    kernel = probe(1, "front_end")
    result = compile_kernels([kernel], toolchain, processes).outcomes[kernel.id]
    assert result.status == "compile_error" and "error" in result.log


UNNAMED = [
    (ended(-signal.SIGSEGV, "nvcc error : 'cicc' died due to signal 11"), "compile_error", "died due to signal 11"),
    (ended(-signal.SIGABRT), "compile_error", "died of signal 6"),
    (ended(-signal.SIGKILL, ended_by="memory"), "compile_error", "bytes of memory"),
    (ended(-signal.SIGKILL, ended_by="output"), "compile_error", "it wrote more than"),
    (ended(-signal.SIGKILL, ended_by="wall"), "compile_timeout", "it ran longer than 120 s"),
    (ended(-signal.SIGKILL, ended_by="cpu"), "compile_timeout", "more than 120 CPU seconds"),
    (ended(1, "nvcc fatal : no name at all"), "compile_error", "no name at all"),
]


@pytest.mark.parametrize(("finished", "status", "message"), UNNAMED)
def test_where_no_kernel_is_named_all_are_left_with_the_compilers_words(
    toolchain: Toolchain, finished: Finished, status: str, message: str
) -> None:
    bad = probe(3)
    kernels = [probe(1), probe(2), bad, probe(4), probe(5)]
    faulty = Faulty(nvcc_fails_with(bad, finished))
    outcome = compile_kernels(kernels, toolchain, faulty)
    assert (outcome.outcomes, outcome.artifact) == ({}, None)
    assert outcome.left == tuple(kernels)
    assert message in outcome.why
    assert faulty.started == ["nvcc"], "no file but that of the group"
    # The seconds of a file that failed are part of the price.
    assert (outcome.wall_seconds, outcome.cpu_seconds) == pytest.approx((0.1, 0.2))
    assert [phase.name for phase in outcome.phases] == ["render", "nvcc"]

    alone = compile_kernels([bad], toolchain, faulty)
    assert (alone.artifact, alone.left, alone.why) == (None, (), "")
    result = alone.outcomes[bad.id]
    assert (result.status, result.code_digest, result.resources) == (status, None, None)
    assert message in result.log


@pytest.mark.parametrize("fault", ["ptxas_line", "host"])
def test_a_named_culprit_is_set_aside_though_the_others_are_left(toolchain: Toolchain, fault: str) -> None:
    named, unnamed = probe(1, fault), probe(3)
    others = [probe(2), unnamed, probe(4)]
    crash = ended(-signal.SIGSEGV, "nvcc error : 'cicc' died due to signal 11")

    def only_without_the_named(program: str, folder: Path) -> Finished | None:
        text = (folder / "group.cu").read_text() if program == "nvcc" else ""
        return crash if unnamed.namespace in text and named.namespace not in text else None

    outcome = compile_kernels([others[0], named, *others[1:]], toolchain, Faulty(only_without_the_named))
    assert {name: result.status for name, result in outcome.outcomes.items()} == {named.id: "compile_error"}
    assert (outcome.artifact, outcome.left) == (None, tuple(others))
    assert "died due to signal 11" in outcome.why


FAILURES = [
    ended(-signal.SIGKILL, "nvcc error : 'cicc' died due to signal 9 (Kill signal)"),
    ended(-signal.SIGTERM),
    ended(-signal.SIGBUS),
    ended(1, "group.cpp1.ii: No space left on device"),
    ended(2, "cicc: Cannot allocate memory"),
    ended(1, "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated."),
    ended(1, "nvcc error   : '/usr/bin/g++' died due to signal 9 (Kill signal)"),
    ended(1, "collect2: fatal error: ld terminated with signal 9 [Killed]\ncompilation terminated."),
]


# g++ comes after a real nvcc: of it one signal and one message.
@pytest.mark.parametrize(
    ("finished", "program"),
    [
        *((failure, "nvcc") for failure in FAILURES),
        *((failure, "g++") for failure in (FAILURES[1], FAILURES[-1])),
        *(pytest.param(failure, "g++", marks=pytest.mark.long) for failure in (FAILURES[0], *FAILURES[2:-1])),
    ],
)
def test_the_machines_failure_is_no_kernels_verdict(toolchain: Toolchain, finished: Finished, program: str) -> None:
    with pytest.raises(InfrastructureError):
        compile_kernels([probe()], toolchain, Faulty(lambda name, folder: finished if name == program else None))


BUSY = "while :; do :; done"


def fake_nvcc(folder: Path, toolchain: Toolchain, body: str) -> Toolchain:
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return replace(toolchain, device_compiler=Nvcc(path))


def test_a_compiler_that_is_killed_is_the_machines_failure(
    tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    # nvcc reports its killed cicc with the exit status 137.
    with pytest.raises(InfrastructureError, match="SIGKILL"):
        compile_kernels([probe()], fake_nvcc(tmp_path, toolchain, "sh -c 'kill -9 $$'; exit 137"), processes)


def test_a_compiler_that_hangs_is_ended_with_all_it_started(
    tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    marker = f"28810.{os.getpid()}"
    hanging = fake_nvcc(tmp_path, toolchain, f"setsid sleep {marker} & {BUSY}")
    kernel = probe()
    outcome = compile_kernels([kernel], hanging, processes, replace(LIMITS, cpu_seconds=0.3))
    result = outcome.outcomes[kernel.id]
    assert (result.status, result.limit) == ("compile_timeout", {"cpu": 0.3})
    assert "more than 0.3 CPU seconds" in result.log
    assert not running_with(marker)


def test_a_compiler_that_gets_no_core_is_the_machines_failure(
    tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    with pytest.raises(InfrastructureError, match=r"less than 50% of a core") as caught:
        compile_kernels(
            [probe()], fake_nvcc(tmp_path, toolchain, "sleep 300"), processes, replace(LIMITS, wall_seconds=0.3)
        )
    assert caught.value.stalled


def test_a_full_disk_is_the_machines_failure(tmp_path: Path, toolchain: Toolchain, processes: Processes) -> None:
    # /dev/full answers every write as a full file system does.
    with pytest.raises(InfrastructureError, match="No space left on device"):
        compile_kernels([probe()], fake_nvcc(tmp_path, toolchain, "cat group.cu > /dev/full"), processes)


def test_sources_that_cannot_be_written_are_the_machines_failure(
    tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    compiler = FileCompiler(tmp_path / "missing", toolchain, processes, LIMITS)
    with pytest.raises(InfrastructureError, match=r"cannot write group\.cu"):
        compiler.compile_device("", "sm_90a", frozenset())


def test_cancelling_ends_the_compile(tmp_path: Path, toolchain: Toolchain, processes: Processes) -> None:
    cancel = threading.Event()
    threading.Timer(0.2, cancel.set).start()
    started = time.monotonic()
    with pytest.raises(CompileCancelled):
        compile_group([probe()], SM_90A, fake_nvcc(tmp_path, toolchain, "sleep 300"), processes, LIMITS, cancel)
    assert time.monotonic() - started < 60


def test_private_folders_are_gone_whatever_happened(toolchain: Toolchain, tmp_path: Path) -> None:
    processes = Processes(root=tmp_path)
    compile_kernels([probe(1), probe(2, "front_end")], toolchain, processes)
    with pytest.raises(InfrastructureError):
        compile_kernels([probe()], fake_nvcc(tmp_path, toolchain, "kill -9 $$"), processes)
    (root,) = tmp_path.glob("cukiln-*")
    assert list(root.iterdir()) == []
    processes.close()
    assert not root.exists()


def test_a_helper_that_is_not_expected_stops_the_group_before_nvcc(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Faulty(lambda program, folder: None)

    def render(kernels: Sequence[Kernel]) -> object:
        group = render_device(kernels)
        return replace(group, text=group.text + "\n__global__ void stray() {}\n")

    monkeypatch.setattr(module, "render_device", render)
    with pytest.raises(NotUnique):
        compile_kernels([probe()], toolchain, counting)
    assert counting.started == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda names: names | {"_ZN5extra3runEv"}, "missing \\['_ZN5extra3runEv'\\]"),
        (lambda names: frozenset(sorted(names)[1:]), "not expected \\['_ZN23kernel_"),
    ],
)
def test_a_cubin_with_other_kernels_than_expected_is_a_bug(
    toolchain: Toolchain,
    caching_processes: CachingProcesses,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[frozenset[str]], frozenset[str]],
    message: str,
) -> None:
    def render(kernels: Sequence[Kernel]) -> object:
        group = render_device(kernels)
        return replace(group, symbols=change(group.symbols))

    monkeypatch.setattr(module, "render_device", render)
    with pytest.raises(UnexpectedSymbols, match=message):
        compile_kernels([probe()], toolchain, caching_processes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nCUKILN_EXPORT int one_too_many() { return 0; }\n", "not expected \\['one_too_many'\\]"),
        ("\n#define cukiln_prepare cukiln_other\n", "missing \\['cukiln_prepare'\\]"),
    ],
)
def test_a_library_with_other_exports_than_expected_is_a_bug(
    toolchain: Toolchain, caching_processes: CachingProcesses, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    def render(kernels: Sequence[Kernel], *, target: str) -> str:
        whole = render_library(kernels, target=target)
        return whole + text if "EXPORT" in text else text + whole

    monkeypatch.setattr(module, "render_library", render)
    with pytest.raises(UnexpectedSymbols, match=message):
        compile_kernels([probe()], toolchain, caching_processes)


def test_a_compiler_that_forgets_its_output_is_the_machines_failure(
    tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    with pytest.raises(InfrastructureError, match=r"group\.cubin cannot be read"):
        compile_kernels([probe()], fake_nvcc(tmp_path, toolchain, "exit 0"), processes)


def test_words_about_the_shared_text_accuse_no_kernel() -> None:
    kernels = [probe(1), probe(2)]
    source = render_device(kernels).text
    log = 'group.cu(3): error: identifier "x" is undefined\n\nptxas fatal   : Ptx assembly aborted due to errors\n'
    assert find_culprits(kernels, log, source, None) == {}


def test_a_line_inside_a_block_accuses_its_kernel() -> None:
    kernels = [probe(1), probe(2)]
    source = render_device(kernels).text
    line = source[: source.index(kernels[1].namespace)].count("\n") + 2
    log = f"group.cu({line}): error: expected a ;\n   words\n\n1 error detected\n"
    assert list(find_culprits(kernels, log, source, None)) == [kernels[1].id]
    assert list(find_culprits(kernels, log.replace(f"({line}):", f":{line}:7:"), source, None)) == [kernels[1].id]


def test_an_error_does_not_speak_of_the_kernels_reported_after_it() -> None:
    kernels = [probe(1), probe(2)]
    guilty, innocent = (symbols(kernel)[0] for kernel in kernels)
    log = (
        f"ptxas error   : Entry function '{guilty}' uses too much shared data\n"
        f"ptxas info    : Compiling entry function '{innocent}' for 'sm_90a'\n"
    )
    assert list(find_culprits(kernels, log, "", None)) == [kernels[0].id]


def test_a_compiler_that_fails_without_a_word_is_reported(toolchain: Toolchain) -> None:
    kernel = probe()
    outcome = compile_kernels([kernel], toolchain, Faulty(nvcc_fails_with(kernel, ended(3))))
    assert outcome.outcomes[kernel.id].log == "nvcc failed with status 3, without a word"


def test_the_host_compilers_context_belongs_to_the_error_below_it() -> None:
    kernels = [probe(1), probe(2)]
    log = (
        f"library.cpp: In instantiation of 'bind() [with C = {kernels[0].namespace}::Config]':\n"
        "library.cpp:9:50:   required from here\n"
        "library.cpp:4:10: error: static assertion failed\n"
        f"library.cpp: In instantiation of 'size() [with C = {kernels[1].namespace}::Config]':\n"
        "library.cpp:8:50:   required from here\n"
        "library.cpp:5:10: warning: only a warning\n"
    )
    assert list(find_culprits(kernels, log, "", None)) == [kernels[0].id]
