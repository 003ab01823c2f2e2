"""Whatever tool dies, of whatever signal, in whatever step: the machine's failures are no kernel's verdict, and a crash
counts once it has come twice."""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Candidate
from tests.support.fixtures.compile import LIMITS, SM_90A, probe_candidate
from tests.support.kernels.ptx_mutants import ptx_of
from tests.support.processes.hunter import until_hit
from tests.support.run.each_run import some_each_run
from workers.compile.compile_group import GroupOutcome, compile_group
from workers.compile.toolchain import Toolchain
from workers.cpu.ptx import PtxRequest, verify_ptx
from workers.cpu.verify import verify_on_cpu
from workers.processes.cause import CRASH_SIGNALS, MACHINE_SIGNALS, Cause, cause_of, signals_in
from workers.processes.processes import InfrastructureError, Processes
from workers.reproduce import driver
from workers.steps.winner_library import WinnerBuild, build_winner, plan_launch

MACHINE = (signal.SIGKILL, signal.SIGTERM, signal.SIGBUS)
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)

GCC = "Please submit a full bug report, with preprocessed source (by using -freport-bug)."
# What the drivers say of children that were killed: nvcc 13.2, gcc 12.2, binutils 2.40.
WORDS: list[tuple[int, str, Cause]] = [
    (-9, "Killed", "machine"),
    (4, "Compilation terminated.", "machine"),  # cicc under SIGTERM
    (-7, "Bus error", "machine"),
    (-11, "Segmentation fault", "crash"),
    (1, "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.", "machine"),
    (1, "g++: fatal error: Terminated signal terminated program as\ncompilation terminated.", "machine"),
    (4, f"g++: internal compiler error: Bus error signal terminated program as\n{GCC}", "machine"),
    (4, f"g++: internal compiler error: Aborted signal terminated program collect2\n{GCC}", "crash"),
    (1, f"library.cpp:7:1: internal compiler error: Segmentation fault\n0x7f {GCC}", "crash"),
    (1, "embed.s: Assembler messages:\nembed.s: Internal error (Segmentation fault).", "crash"),
    (1, "embed.s:1: Internal error (Bus error).\nmalloc assertion failure\nInternal error (Aborted).", "machine"),
    (1, "collect2: fatal error: ld terminated with signal 9 [Killed]\ncompilation terminated.", "machine"),
    (1, "collect2: fatal error: ld terminated with signal 11 [Segmentation fault], core dumped", "crash"),
    (1, "nvcc error   : '/usr/bin/g++' died due to signal 15 \nnvcc fatal   : Host compiler …", "machine"),
    (1, "nvcc error   : 'cicc' died due to signal 8 (Floating point exception)", "crash"),
    (1, "g++: fatal error: Killed signal terminated program as\ng++: internal compiler error: Aborted", "machine"),
    (1, "cc1plus: fatal error: error writing to /tmp/x.s: No space left on device", "machine"),
    (1, "as: can't create library.o: Read-only file system", "machine"),
    (255, "ptxas fatal   : Failed to write to outp file 'o.cubin'", "machine"),
    (1, "nvcc fatal   : Failed to preprocess host compiler properties.", "machine"),
    (-6, "LLVM ERROR: out of memory\nAborted", "machine"),
    (1, 'catastrophic error: out of memory\n1 error detected in the compilation of "a.cu".', "machine"),
    (255, "ptxas fatal   : Memory allocation failure", "machine"),
    (1, "cc1plus: out of memory allocating 65536 bytes after a total of 1 bytes", "machine"),
    (1, 'a.cu(3): error: expected a ";"\n1 error detected in the compilation of "a.cu".', "refusal"),
    (4, '100 errors detected in the compilation of "a.cu".\nCompilation terminated.', "refusal"),
    (1, "library.cpp:1:10: fatal error: nothing.h: No such file or directory\ncompilation terminated.", "refusal"),
    (1, "library.cpp:7: internal compiler error: in expand_expr_real_1, at expr.cc:11", "refusal"),
    (0, "g++: warning: Killed signal terminated program cc1plus", "ok"),
]


@pytest.mark.parametrize(("returncode", "message", "cause"), WORDS)
def test_the_drivers_messages_give_the_cause(returncode: int, message: str, cause: Cause) -> None:
    assert cause_of(returncode, message) == cause


@pytest.mark.parametrize("number", sorted(MACHINE_SIGNALS | CRASH_SIGNALS))
def test_a_signal_is_known_by_its_number_and_by_every_way_to_name_it(number: int) -> None:
    name = signal.strsignal(number)
    assert signals_in(-number, "") == {number}
    for words in (
        f"g++: fatal error: {name} signal terminated program cc1plus",
        f"a.cpp:1: internal compiler error: {name}",
        f"a.s: Internal error ({name}).",
        f"collect2: fatal error: ld terminated with signal {number} [{name}]",
        f"nvcc error   : 'ptxas' died due to signal {number} ({name})",
    ):
        assert signals_in(1, words) == {number}, words


# ---- real children, killed

# As `workers/reproduce/files/build.sh`: of a child that died the shell says no more than 128 + signal.
BUILD_SH = """set -eu
cd "$(dirname "$0")"
set -x
case "$1" in
  device) "$NVCC" -cubin -arch=sm_90a -o kernel.cubin kernel.cu ;;
  library) "$CXX" -shared -fPIC -o library.so launch.cpp ;;
esac
"""


@pytest.fixture(scope="module")
def candidates() -> list[Candidate]:
    return [probe_candidate(factor=factor) for factor in (1, 2)]


@pytest.fixture(scope="module")
def steps(
    toolchain: Toolchain, processes: Processes, candidates: list[Candidate], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Callable[[], Any]]:
    """What runs tools. Each raises InfrastructureError, or returns whether all its kernels came out right."""
    one, _ = candidates
    ptx = ptx_of((one.kernel,), SM_90A.name)

    def of_groups(outcomes: list[GroupOutcome]) -> bool:
        states = [outcome.status for group in outcomes for outcome in group.outcomes.values()]
        return bool(states) and set(states) == {"ok"}

    def compiled() -> bool:
        return of_groups([compile_group([one.kernel], SM_90A, toolchain, processes, LIMITS)])

    def verified() -> bool:
        (verdict,) = verify_on_cpu([one.kernel], toolchain, processes, LIMITS, seed=1)
        return verdict.verdict == "ok"

    def run_from_ptx() -> bool:
        (verdict,) = verify_ptx([one.kernel], PtxRequest(SM_90A.name, 1), toolchain, processes, LIMITS, ptx=ptx)
        return verdict.verdict == "ok"

    def finished() -> bool:
        built: WinnerBuild = build_winner(one, SM_90A, toolchain, processes, LIMITS)
        return bool(built.library) and bool(plan_launch(one, toolchain, processes, LIMITS).functions)

    folder = tmp_path_factory.mktemp("reproduced")
    (folder / "build.sh").write_text(BUILD_SH)
    (folder / "kernel.cu").write_text("#include <cstdio>\n__global__ void empty(int* out) { out[threadIdx.x] = 1; }\n")
    (folder / "launch.cpp").write_text("#include <cstdio>\nint launch() { return 1; }\n")

    def reproduced() -> bool:
        parts = (("device", "NVCC", toolchain.device_compiler.path), ("library", "CXX", toolchain.host_compiler))
        for part, variable, program in parts:
            built, words = driver.build(folder, part, driver.Compiler(variable, str(program), "named"))
            if built is None:
                raise InfrastructureError(words)
            if not built:
                return False
        return True

    return {"compile": compiled, "verify": verified, "ptx": run_from_ptx, "finish": finished, "reproduce": reproduced}


HOST = ("g++", "cc1plus", "as", "ld")
ALL = ("nvcc", "cicc", "ptxas", *HOST)
TOOLS: dict[str, Sequence[str]] = {"compile": ALL, "verify": HOST, "ptx": ("cc1plus",), "finish": ALL, "reproduce": ALL}


def test_nvcc_starts_no_tool_but_those_of_the_table(toolchain: Toolchain, tmp_path: Path) -> None:
    """No fatbinary and no cudafe++: it makes a cubin alone."""
    (tmp_path / "a.cu").write_text("__global__ void empty() {}\n")
    command = [*toolchain.device_command("sm_90a", "a.cu", "a.cubin", "phases.csv"), "--dryrun"]
    words = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
    started = [shlex.split(line.removeprefix("#$ "))[0] for line in words.splitlines() if "=" not in line.split()[1]]
    assert {Path(program).name for program in started} == {"g++", "cicc", "ptxas"}


# The driver itself, what it starts, and what g++ starts under it: each says of a signal what others of its kind say.
IN_ALL_WAYS = ("nvcc", "cicc", "cc1plus")


# Of the other steps, each program that they start themselves; below it they have what a compile has.
FEW = {"verify": ("cc1plus",), "ptx": ("cc1plus",), "finish": ("ptxas", "ld"), "reproduce": ("cicc", "as")}


def table(tools: Mapping[str, Sequence[str]], ways: Sequence[signal.Signals], some: int | None = None) -> list[Any]:
    """Each tool of a compile and some of each step, and how it ends: in one way each, in turn, of which each run has
    `some`, or all. The other ways of some, and the others of all steps, take long."""
    few, others = list[Any](), list[Any]()
    for step, names in tools.items():
        for place, tool in enumerate(names):
            turns = [*ways[place % len(ways) :], *ways[: place % len(ways)]]
            for turn, number in enumerate(turns if step == "compile" and tool in IN_ALL_WAYS else turns[:1]):
                row = (step, tool, number)
                if turn == 0 and tool in FEW.get(step, ALL):
                    few.append(row)
                else:
                    others.append(pytest.param(*row, marks=pytest.mark.long))
    return [*(few if some is None else some_each_run(few, some)), *others]


@pytest.mark.parametrize(("step", "tool", "number"), table(TOOLS, MACHINE, some=7))
def test_a_killed_tool_says_nothing_about_the_kernel(
    steps: dict[str, Callable[[], Any]], step: str, tool: str, number: signal.Signals
) -> None:
    outcome = until_hit(steps[step], tool, number, counts=lambda outcome: outcome is not True)
    assert isinstance(outcome, InfrastructureError), outcome


@pytest.mark.parametrize(("step", "tool", "number"), table(TOOLS, CRASHES, some=4))
def test_a_tool_that_crashes_once_is_run_once_more(
    steps: dict[str, Callable[[], Any]], step: str, tool: str, number: signal.Signals
) -> None:
    assert until_hit(steps[step], tool, number, counts=lambda outcome: True) is True


@pytest.mark.parametrize(("step", "number"), [*(("verify", number) for number in MACHINE), ("ptx", MACHINE[0])])
def test_a_killed_child_says_nothing_about_the_kernel_that_it_runs(
    steps: dict[str, Callable[[], Any]], step: str, number: signal.Signals
) -> None:
    outcome = until_hit(steps[step], "run", number, counts=lambda outcome: outcome is not True)
    assert isinstance(outcome, InfrastructureError), outcome
