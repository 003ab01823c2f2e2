"""run.py of a folder that `cukiln reproduce` wrote: builds one candidate and says whether it is what was recorded.

It runs where nothing of cukiln is installed, on copies of the modules that verified the candidate; it needs NumPy, and
CuPy for a GPU. `AGREES`, `DIFFERS` and `CANNOT` begin the lines that count; the exit status is 0 where all agree, 1
where something differs, 2 where something could not be looked at.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codegen.text.cubin import NotElf, code_digest_of, read_cubin
from workers.compile.find_compilers import nvcc_in, wheel_folders
from workers.processes.cause import cause_of, signed

AGREES, DIFFERS, CANNOT = "AGREES ", "DIFFERS", "CANNOT "
NVRTC = "nvrtc/nvrtc"
"""In the folder of a candidate that NVRTC compiled: what is run in nvcc's place."""
CHILD_SECONDS = 600.0  # of the process that runs the kernel
MAX_MESSAGE_CHARACTERS = 1500  # characters of what a tool said that are shown
# What no second run can repeat, because it comes from the machine and its limits.
NOT_REPEATABLE = ("compile_timeout", "run_timeout", "skipped")


@dataclass
class Report:
    """Prints what was found, and keeps how the lines begin."""

    seen: list[str] = field(default_factory=list)

    def line(self, kind: str, text: str) -> None:
        self.seen.append(kind)
        sys.stdout.write(f"{kind} {text}\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        sys.stdout.write(f"        {text}\n")
        sys.stdout.flush()

    @property
    def status(self) -> int:
        return 1 if DIFFERS in self.seen else 2 if CANNOT in self.seen else 0


@dataclass(frozen=True)
class Compiler:
    """A program of build.sh: the variable that names it, and where it was found. `version`: of nvcc, or of what is run
    in its place, alone; `kind`: which; `named`: how a person names another one."""

    variable: str
    program: str
    found_in: str
    version: str | None = None
    kind: str = "nvcc"
    named: str = "NVCC=..."

    @property
    def is_there(self) -> bool:
        return shutil.which(self.program) is not None


def find_nvcc(folder: Path) -> Compiler:
    """As the service looks for it: the one that NVCC names, else that of this Python's wheels, else that of PATH. Of a
    candidate that NVRTC compiled, the folder's own program, with what NVRTC and PTXAS name, else with the wheels'."""
    if (own := folder / NVRTC).is_file():
        os.environ.setdefault("PYTHON", sys.executable)
        where = "with what NVRTC and PTXAS name, else with this Python's wheels"
        return Compiler("NVCC", str(own), where, _release(str(own)), "nvrtc", "NVRTC=... PTXAS=...")
    named, of_wheels = os.environ.get("NVCC"), nvcc_in(wheel_folders())
    if named:
        program, where = named, "named by NVCC"
    elif of_wheels:
        program, where = str(of_wheels), "in this Python's wheels"
    else:
        program, where = shutil.which("nvcc") or "nvcc", "in PATH"
    return Compiler("NVCC", program, where, _release(program))


def _release(program: str) -> str | None:
    release = re.search(r"V(\d+\.\d+\.\d+)", _version_text(program))
    return release[1] if release else None


def _version_text(program: str) -> str:
    if shutil.which(program) is None:
        return ""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout


def main(folder: Path, arguments: Sequence[str]) -> int:
    """The whole of run.py."""
    parser = argparse.ArgumentParser(prog="run.py", description="Build this candidate and compare it with its record.")
    parser.add_argument("--gpu", action="store_true", help="run it on a GPU (needs CuPy) instead of on the CPU")
    parser.add_argument("--device", type=int, default=0, help="the GPU's number, of those that CUDA shows")
    parser.add_argument("--child", choices=("cpu", "gpu"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("ml_dtypes") is None:
        # The copied modules name it for bfloat16 alone, and here its bits are moved and never computed with.
        sys.modules["ml_dtypes"] = types.ModuleType("ml_dtypes")
        sys.modules["ml_dtypes"].bfloat16 = "uint16"  # type: ignore[attr-defined]
    if options.child:
        outcome = _on_cpu(folder) if options.child == "cpu" else _on_gpu(folder, options.device)
        sys.stdout.write("\n" + json.dumps(outcome) + "\n")
        return 0
    facts, recipe = (json.loads((folder / name).read_text(encoding="utf-8")) for name in ("facts.json", "recipe.json"))
    report = Report()
    named = os.environ.get("CXX")
    nvcc, cxx = find_nvcc(folder), Compiler("CXX", named or "g++", "named by CXX" if named else "in PATH")
    _heading(report, facts, nvcc, cxx)
    _check_code(folder, facts, recipe, nvcc, report)
    if facts["verdict"] != "compile_error":
        _check_runs(folder, facts, "gpu" if options.gpu else "cpu", options.device, cxx, report)
    return report.status


def _heading(report: Report, facts: dict[str, Any], nvcc: Compiler, cxx: Compiler) -> None:
    versions = (facts["toolchain"] or {}).get("versions", {})
    made_by = ", ".join(f"{part} {version}" for part, version in versions.items()) or "compilers that are not recorded"
    report.note(f"candidate {facts['candidate']}, {facts['operator']}, {facts['target']}, {facts['device_class']}")
    report.note(f"recorded with {made_by}")
    for compiler in (nvcc, cxx):
        if compiler.is_there:
            lines = [line for line in _version_text(compiler.program).splitlines() if line.strip()]
            shown = next((line for line in lines if "release" in line), lines[0] if lines else "")
            report.note(f"here: {compiler.program}, {compiler.found_in}: {shown}")


def build(folder: Path, part: str, compiler: Compiler) -> tuple[bool | None, str]:
    """Whether a part of build.sh succeeded, and its messages; null where the tool or the machine failed."""
    program = shutil.which(compiler.program)
    if program is None:
        return None, f"there is no {compiler.program} here: install it, or name one with {compiler.variable}=..."
    # build.sh works in another folder; the messages that `cause_of` reads are English.
    environment = {**os.environ, compiler.variable: str(Path(program).absolute()), "LC_ALL": "C"}
    for _ in range(2):
        done = subprocess.run(
            ["sh", str(folder / "build.sh"), part],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env=environment,
        )
        output = done.stdout[-MAX_MESSAGE_CHARACTERS:].strip()
        match cause_of(signed(done.returncode), done.stdout):
            case "machine":
                return None, f"{compiler.program} was ended by this machine, not by the kernel: {output}"
            case "crash":
                continue
        break
    return done.returncode == 0, output


def _check_code(folder: Path, facts: dict[str, Any], recipe: dict[str, Any], nvcc: Compiler, report: Report) -> None:
    """Whether kernel.cu compiles, and gives the recorded code: that of another nvcc need not be the same."""
    built, output = build(folder, "device", nvcc)
    # Null where the compilers are the same, or one of the versions is not known.
    other, made_by = None, (facts["toolchain"] or {}).get("versions", {}).get(nvcc.kind)
    if None not in (made_by, nvcc.version) and made_by != nvcc.version:
        other = (
            f"compiler differs: recorded {nvcc.kind} {made_by}, found {nvcc.version} {nvcc.found_in} ({nvcc.program})"
        )
    if built is None:
        report.line(CANNOT, f"code digest: {output}")
    elif built:
        other = other and f"{other}; the code cannot be compared; set {nvcc.named} to the recorded one"
        _check_digest(folder, facts, recipe, other, report)
    elif facts["verdict"] != "compile_error" and other is not None:
        report.line(CANNOT, f"code digest: {other}; it does not compile kernel.cu; set {nvcc.named}:\n{output}")
    elif facts["verdict"] != "compile_error":
        report.line(DIFFERS, f"code digest: kernel.cu does not compile here:\n{output}")
    if facts["verdict"] != "compile_error":
        return
    if built is None:
        report.line(CANNOT, "verdict: compile_error is recorded; without nvcc it cannot be compared")
    elif other is not None:
        here = "compiles" if built else "does not compile either"
        report.line(CANNOT, f"verdict: compile_error is recorded, here it {here}; {other}; set {nvcc.named}")
    elif built:
        report.line(DIFFERS, "verdict: compile_error is recorded, but kernel.cu compiles here")
    else:
        report.line(AGREES, "verdict: compile_error")


def _check_digest(
    folder: Path, facts: dict[str, Any], recipe: dict[str, Any], other: str | None, report: Report
) -> None:
    recorded = facts["code_digest"]
    try:
        kernels = read_cubin((folder / "build" / recipe["cubin"]).read_bytes()).kernels
        digest = code_digest_of([kernels[symbol] for symbol in recipe["symbols"]])
    except (KeyError, NotElf) as error:
        report.line(DIFFERS, f"code digest: the cubin is not that of this kernel: {error}")
        return
    if recorded is None:
        report.note(f"code digest: {digest}; none is recorded")
    elif digest == recorded:
        report.line(AGREES, f"code digest: {digest}")
    elif other is not None:
        report.line(CANNOT, f"code digest: {other}")
    else:
        report.line(DIFFERS, f"code digest: {digest}, recorded {recorded}: other code of the same compiler")


def _check_runs(folder: Path, facts: dict[str, Any], venue: str, device: int, cxx: Compiler, report: Report) -> None:
    part = "cpu" if venue == "cpu" else "library"
    built, output = build(folder, part, cxx)
    if built is None or (venue == "gpu" and not (folder / "build" / "group.cubin").is_file()):
        report.line(CANNOT, f"verdict: {output if built is None else 'without nvcc there is no cubin to run'}")
        return
    if not built:
        report.line(DIFFERS, f"verdict: build.sh {part} fails:\n{output}")
        return
    outcome = _run_child(folder, venue, device)
    if "cannot" in outcome:
        report.line(CANNOT, f"verdict on the {venue.upper()}: {outcome['cannot']}")
        return
    for case in outcome.get("cases", []):
        report.note(case)
    recorded = facts["verdict"]
    text = f"{outcome['verdict']} on the {venue.upper()}" + (f": {outcome['message']}" if outcome["message"] else "")
    if recorded is None or recorded in NOT_REPEATABLE:
        report.note(f"verdict: {text}; recorded is {recorded}, which no second run can repeat")
    elif recorded == outcome["verdict"]:
        report.line(AGREES, f"verdict: {text}")
    else:
        where = (facts["details"] or {}).get("venue")
        report.line(DIFFERS, f"verdict: {text}; recorded is {recorded}" + (f" on the {where.upper()}" if where else ""))


def _run_child(folder: Path, venue: str, device: int) -> dict[str, Any]:
    """What a child found that may die of the kernel."""
    command = [sys.executable, str(folder / "run.py"), "--child", venue, "--device", str(device)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=CHILD_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"verdict": "run_timeout", "message": f"still running after {CHILD_SECONDS:g} s"}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        outcome: dict[str, Any] = json.loads(lines[-1])
        return outcome
    message = done.stderr.strip()[-MAX_MESSAGE_CHARACTERS:]
    if cause_of(done.returncode, done.stderr) == "machine":
        return {"cannot": f"the child was ended by this machine: {message or done.returncode}"}
    if done.returncode < 0:
        return {"verdict": "runtime_error", "message": f"the process died of signal {-done.returncode}"}
    return {"cannot": f"the child failed: {message}"}


def _on_cpu(folder: Path) -> dict[str, Any]:
    try:
        from workers.cpu.cpu_check import KernelTest
        from workers.cpu.library import CpuLibrary
        from workers.reproduce.recorded_case import RecordedOperator
    except ModuleNotFoundError as error:
        return {"cannot": f"this Python has no {error.name}: `pip install numpy`"}
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    recorded = RecordedOperator(folder / "cases")
    library = CpuLibrary(folder / "build" / "kernel_cpu.so")
    test = KernelTest(
        library,
        recipe["namespace"],
        recorded,
        recorded.plan(),
        repeats=recipe["deterministic"],
        cpu_seconds=recipe["cpu_seconds"],
    )
    failure = test.failure()
    return {
        "verdict": failure.verdict if failure else "ok",
        "message": failure.message if failure else "",
        "cases": [
            f"{case['kind']} inputs, extents {', '.join(map(str, case['extents']))}: {_errors_text(case)}"
            for case in test.described
        ],
    }


def _on_gpu(folder: Path, device: int) -> dict[str, Any]:
    try:
        from workers.reproduce.on_gpu import GpuAbsent, run_on_gpu
    except ModuleNotFoundError as error:
        to_do = "`pip install numpy cupy-cuda13x`, for kernels of CUDA 12 cupy-cuda12x"
        return {"cannot": f"this Python has no {error.name}: {to_do}"}
    try:
        return run_on_gpu(folder, device)
    except GpuAbsent as error:
        return {"cannot": str(error)}


def _errors_text(case: dict[str, Any]) -> str:
    error, bound = case.get("max_error"), case.get("error_bound")
    largest = "no output is a number" if error is None else f"largest error {error:.3g}"
    return largest + (f", allowed there {bound:.3g}" if bound else "")
