"""`cukiln reproduce`: one candidate as a folder that builds and checks it where nothing of cukiln is installed."""

import importlib.resources
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import ValidationError

from codegen.errors import CodegenError
from codegen.kernel import Candidate
from codegen.operator import Operator
from codegen.operators import operator
from codegen.plan.gpu_verification_plan import GpuCase, full_cases, reduced_cases
from codegen.plan.verification_plan import Case, FarCase, Run, plan_cases
from codegen.search.schedule import Schedule
from codegen.targets import target
from codegen.text.render_cpu import render_cpu
from codegen.text.render_group import render_device, slice_digest, symbols
from codegen.text.render_library import EMBED_ASSEMBLY, render_library
from cukiln.types import CandidateFacts
from storage.config.operator_path import load_operator_path
from storage.config.own_modules import module_files
from storage.config.settings import load_settings
from storage.errors import SettingsError
from workers.compile.compile_file import CUBIN, EMBED, LIBRARY, OBJECT, PHASES
from workers.compile.toolchain import Nvcc, Nvrtc, Toolchain, ToolchainMissing, tvm_ffi_include
from workers.cpu.build import CPU_FLAGS
from workers.cpu.verify import KERNEL_CPU_SECONDS
from workers.reproduce.driver import NVRTC
from workers.reproduce.recorded_case import RecordedCase

DRIVERS = ("workers.reproduce.driver", "workers.reproduce.on_gpu")
DEFAULT_SEED = 1  # where no verification is recorded
# Inputs on the problem's own extents are written only so far: reference and files would take minutes and gigabytes.
MOST_BYTES = 64 << 20
MOST_FLOPS = 10**10
RUN_PY = '''\
"""Builds the candidate in this folder and says whether it is what was recorded; see README.md."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "lib"))
sys.dont_write_bytecode = True

from workers.reproduce.driver import main  # noqa: E402 - it lies in lib

sys.exit(main(HERE, sys.argv[1:]))
'''


# In nvcc's place. Python's packages are those of the one that runs run.py.
NVRTC_SH = """#!/bin/sh
exec "${PYTHON:-python3}" -I "$(dirname "$0")/driver.py" ${NVRTC:+--nvrtc "$NVRTC"} ${PTXAS:+--ptxas "$PTXAS"} "$@"
"""


class CannotReproduce(Exception):
    """The candidate cannot be written as it was; the message says why and what to do."""


def reproduce(facts: CandidateFacts, folder: Path) -> int:
    """Write the folder, completely or not at all; returns the exit status: 0, or 2 with the reason on stderr."""
    try:
        load_operator_path(load_settings())
        write_folder(facts, folder)
    except (CannotReproduce, CodegenError, SettingsError, ToolchainMissing) as error:
        sys.stderr.write(f"cukiln reproduce: {error}\n")
        return 2
    sys.stdout.write(f"{folder}: `python {shlex.quote(str(folder / 'run.py'))}` builds it and compares\n")
    return 0


def write_folder(facts: CandidateFacts, folder: Path) -> None:
    """Raises CannotReproduce, CodegenError, ToolchainMissing."""
    candidate = _candidate(facts)
    folder = folder.absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CannotReproduce(f"{folder} is there already and not an empty folder; name another with --out")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
            whole = Path(beside) / "whole"
            whole.mkdir()
            _fill(whole, facts, candidate)
            whole.rename(folder)  # onto nothing, or onto an empty folder
    except OSError as error:
        raise CannotReproduce(f"cannot write {folder}: {error}") from error


def _candidate(facts: CandidateFacts) -> Candidate:
    """The candidate as this checkout makes it, if that is what was recorded."""
    own = operator(facts.operator)
    try:
        candidate = own.candidate(own.parse(facts.problem), Schedule.of(facts.schedule))
    except (KeyError, ValidationError) as error:
        raise CannotReproduce(f"this checkout does not have the candidate's problem or schedule: {error}") from error
    other = "The service runs another version of cukiln: reproduce the candidate with a checkout of that version."
    for what, recorded, made in (
        ("candidate id", facts.candidate, candidate.id),
        ("kernel id", facts.kernel, candidate.kernel.id),
        ("slice digest (the kernel's text and the headers it is compiled with)", facts.slice, None),
    ):
        here = made or slice_digest(candidate.kernel)
        if recorded is not None and here != recorded:
            raise CannotReproduce(
                f"this checkout's generator makes another {what}: {here}, recorded {recorded}. {other}"
            )
    flags = (facts.toolchain or {}).get("flags")
    if flags is not None and flags != (ours := _named_toolchain(facts).describe()["flags"]):
        raise CannotReproduce(f"it was compiled with other flags ({flags}) than this checkout's ({ours}). {other}")
    return candidate


def _named_toolchain(facts: CandidateFacts) -> Toolchain:
    """The recorded kind, whose commands name the compilers by variables of the shell."""
    compiler = Nvrtc(Path(), Path(), "$NVCC") if _is_of_nvrtc(facts) else Nvcc(Path("$NVCC"))
    return Toolchain(compiler, Path("$CXX"), Path("../include"), (), ())


def _is_of_nvrtc(facts: CandidateFacts) -> bool:
    return Nvrtc.name in (facts.toolchain or {}).get("versions", {})


def _fill(folder: Path, facts: CandidateFacts, candidate: Candidate) -> None:
    kernel, own = candidate.kernel, operator(candidate.kernel.operator)
    launch = own.launch_values(candidate.schedule)
    library = render_library([kernel], target=_architecture(facts), launch=launch)
    seed = int((facts.details or {}).get("seed", DEFAULT_SEED))
    texts = {
        "kernel.cu": render_device([kernel]).text,
        "launch.cpp": library,
        EMBED: EMBED_ASSEMBLY,
        "kernel_cpu.cpp": render_cpu([kernel], sums=target(facts.target).tensor_sums),
        "build.sh": _build_sh(facts),
        "run.py": RUN_PY,
        "facts.json": facts.model_dump_json(indent=1) + "\n",
        "recipe.json": json.dumps(_recipe(own, candidate), indent=1) + "\n",
        "README.md": _readme(facts, candidate, seed),
    }
    if _is_of_nvrtc(facts):
        files = importlib.resources.files("workers") / "compile" / "nvrtc"
        texts |= {f"nvrtc/{name}": (files / name).read_text(encoding="utf-8") for name in ("driver.py", "prelude.h")}
        texts[NVRTC] = NVRTC_SH
        (folder / NVRTC).parent.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755 if text.startswith("#!") else 0o644)
    modules = {f"lib/{name}": data for name, data in module_files(DRIVERS).items()}
    for name, data in {**_headers(library), **modules}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for chosen in [*_cpu_cases(own, candidate, facts, seed), *_gpu_cases(own, candidate, seed)]:
        _write_case(folder / "cases", own, *chosen)


def _recipe(own: Operator, candidate: Candidate) -> dict[str, Any]:
    """What run.py reads beside the facts."""
    return {
        "namespace": candidate.kernel.namespace,
        "symbols": symbols(candidate.kernel),
        "cubin": CUBIN,
        "deterministic": own.deterministic(candidate.kernel),
        "cpu_seconds": KERNEL_CPU_SECONDS,
    }


_AnyCase = TypeVar("_AnyCase", Case, GpuCase)

_Chosen = tuple[str, Case | GpuCase, bool]
"""Name in the folder, case, and whether its runs must give the same bits: a case with an exact result, one with random
inputs; on a GPU also the whole problem."""


def _cpu_cases(own: Operator, candidate: Candidate, facts: CandidateFacts, seed: int) -> Iterator[_Chosen]:
    """An exact and a random case of the CPU's plan; the one that was found wrong, if one was."""
    cases = list(plan_cases(own, candidate.kernel, seed))
    details = facts.details or {}
    recorded = details.get("cases", []) if details.get("venue") == "cpu" and facts.verdict != "ok" else []
    wrong = cases[len(recorded) - 1 : len(recorded)] if recorded else []
    for kind in ("integer", "normal"):
        # What is far apart in memory cannot be written.
        failing = next((case for case in wrong if case.kind == kind and not isinstance(case, FarCase)), None)
        case = failing or _with_tails([case for case in cases if case.kind == kind])
        yield f"cpu-{kind}", case, own.deterministic(candidate.kernel)


def _gpu_cases(own: Operator, candidate: Candidate, seed: int) -> Iterator[_Chosen]:
    cases = list(reduced_cases(own, candidate.kernel, seed))
    for kind in ("integer", "normal"):
        case = _with_tails([case for case in cases if case.kind == kind])
        yield f"gpu-{kind}", case, case.same_bits
    if is_written(own, candidate):
        whole = next(case for case in full_cases(own, candidate, seed) if case.kind == "normal")
        yield "gpu-whole", whole, whole.same_bits


def _with_tails(cases: Sequence[_AnyCase]) -> _AnyCase:
    """Operators give even extents first and those with tails next (`Operator.test_problems`): these show more."""
    return cases[min(1, len(cases) - 1)]


def is_written(own: Operator, candidate: Candidate) -> bool:
    """Whether inputs and reference of the candidate's own extents are few enough to be written."""
    elements = sum(operand.elements for operand in own.operands(candidate.problem))
    cost = own.cost(candidate.problem, candidate.schedule)
    return 8 * elements <= MOST_BYTES and cost.flops <= MOST_FLOPS


def _write_case(folder: Path, own: Operator, name: str, case: Case | GpuCase, same_bits: bool) -> None:
    venue: Literal["cpu", "gpu"]
    if isinstance(case, Case):
        venue, runs = "cpu", case.runs
    else:
        venue, runs = "gpu", tuple(Run("ascending", launch, case.seed) for launch in case.launches)
    inputs = own.make_inputs(case.problem, case.kind, np.random.default_rng(case.seed))
    expected, bound = own.reference(case.problem, inputs, exact=case.exact)
    recorded = RecordedCase(
        name=name,
        venue=venue,
        kind=case.kind,
        exact=case.exact,
        seed=case.seed,
        same_bits=same_bits,
        extents=tuple(own.extents(case.problem)),
        attributes=tuple(own.attributes(case.problem)),
        scalars=tuple(own.scalars(case.problem)),
        operands=own.operands(case.problem),
        runs=runs,
    )
    recorded.write(folder, inputs, expected, bound)


def _headers(library: str) -> dict[str, bytes]:
    """The files of tvm-ffi's C headers that the library's text includes, and those that they include."""
    root = tvm_ffi_include()
    files: dict[str, bytes] = {}
    waiting = re.findall(r"^#include <(.+?)>", library, re.MULTILINE)
    while waiting:
        name = waiting.pop()
        path = root / name
        if f"include/{name}" not in files and path.is_file():
            files[f"include/{name}"] = path.read_bytes()
            waiting += re.findall(r"^ *# *include <(.+?)>", path.read_text(encoding="utf-8"), re.MULTILINE)
    return files


def _architecture(facts: CandidateFacts) -> str:
    """What nvcc compiled for."""
    return target(facts.target).architecture


def _build_sh(facts: CandidateFacts) -> str:
    """The commands of the service, run in the folder `build`."""
    toolchain = _named_toolchain(facts)
    commands = {
        "DEVICE": [toolchain.device_command(_architecture(facts), "../kernel.cu", CUBIN, PHASES)],
        "LIBRARY": [
            toolchain.host_command("../launch.cpp", OBJECT),
            toolchain.link_command([OBJECT, f"../{EMBED}"], LIBRARY),
        ],
        "CPU": [["$CXX", *CPU_FLAGS, "-o", "kernel_cpu.so", "../kernel_cpu.cpp", "-lm"]],
    }
    text = _template("build.sh").replace("@NVCC@", '$(dirname "$0")/' + NVRTC if _is_of_nvrtc(facts) else "nvcc")
    for name, lines in commands.items():
        quoted = [[f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in command] for command in lines]
        text = text.replace(f"@{name}@", "\n".join(f"  {' '.join(command)}" for command in quoted))
    return text


def _readme(facts: CandidateFacts, candidate: Candidate, seed: int) -> str:
    versions = (facts.toolchain or {}).get("versions", {})
    time = "not measured"
    if facts.measurement is not None:
        run = facts.measurement
        time = f"{run.median_us:.3f} µs ({run.low_us:.3f} to {run.high_us:.3f}) on {run.device}, driver {run.driver}"
    whole = "" if is_written(operator(facts.operator), candidate) else " Its own extents are too large to be written."
    fields = {
        "CANDIDATE": facts.candidate,
        "OPERATOR": facts.operator,
        "PROBLEM": json.dumps(facts.problem),
        "SCHEDULE": json.dumps(facts.schedule),
        "TARGET": facts.target,
        "DEVICE_CLASS": facts.device_class,
        "COMPILERS": ", ".join(f"{part} {version}" for part, version in versions.items()) or "not recorded",
        "CODE_DIGEST": facts.code_digest or "none",
        "VERDICT": facts.verdict or "none yet",
        "TIME": time,
        "SEED": str(seed),
        "WHOLE": whole,
    }
    return re.sub(r"@([A-Z_]+)@", lambda match: fields[match[1]], _template("README.md"))


def _template(name: str) -> str:
    return (importlib.resources.files("workers") / "reproduce" / "files" / name).read_text(encoding="utf-8")
