"""Find the compilers and say what they are: nvcc, g++, tvm-ffi's C header."""

import importlib.metadata
import importlib.util
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen.canonical import digest
from codegen.targets import Target, targets
from codegen.text.render_emulation import EMULATION_FLAGS
from workers.compile.nvidia_wheels import nvcc_in, wheel_folders
from workers.processes.processes import InfrastructureError, Limits, ProcessError, Processes, ProgramMissing

TOOLCHAIN_VERSION = 1  # of the digest's schema
# --time's file and ptxas' report do not change the code; they are here because the build's log is part of what is kept.
DEVICE_FLAGS = ("-cubin", "-std=c++17", "-O3", "-Xptxas", "-v")
# Launch code is a few divisions per call: -O2 would only cost half as much again of g++'s time.
HOST_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-Wall", "-Werror")
# No build id, no names of temporary objects (-s): equal inputs give equal bytes. The stub needs nothing of libstdc++.
# Without start files a library has no initialiser at all: one with any is foreign (`workers.gpu.check_library`).
LINK_FLAGS = (
    "-shared",
    "-nostartfiles",
    "-Wl,--build-id=none",
    "-Wl,-s",
    "-Wl,-z,noexecstack",
    "-Wl,--as-needed",
    "-lpthread",
    "-ldl",
)
_QUESTION = Limits(wall_seconds=30, cpu_seconds=30, memory_bytes=2 << 30, output_bytes=1 << 20)
_INSTALL = "`make run` installs it from PyPI wheels, or name one with CUKILN_NVCC"


class ToolchainMissing(ProcessError):
    """A part of the toolchain is not there or does not run; the message says which and what to do."""


@dataclass(frozen=True)
class Toolchain:
    """One compiler stack. `versions` are pairs (part, version); `gpu_codes` is what `nvcc --list-gpu-code` says."""

    nvcc: Path
    host_compiler: Path
    tvm_ffi_include: Path
    versions: tuple[tuple[str, str], ...]
    gpu_codes: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Versions and flags, never paths: two machines with the same release share builds."""
        return digest("toolchain", TOOLCHAIN_VERSION, **self.describe())

    def describe(self) -> dict[str, Any]:
        """What goes into the digest and what people are shown."""
        return {
            "versions": dict(self.versions),
            "flags": {"device": list(DEVICE_FLAGS), "host": list(HOST_FLAGS), "link": list(LINK_FLAGS)},
        }

    def device_command(self, target: str, source: str, cubin: str, phases: str) -> list[str]:
        """nvcc's device pass alone, without paths, which would reach the cubin. `code=sm_…`: `-arch=sm_…` adds a second
        pass."""
        architecture = f"arch={target.replace('sm_', 'compute_')},code={target}"
        head = [str(self.nvcc), "-ccbin", str(self.host_compiler), "-gencode", architecture]
        return [*head, *DEVICE_FLAGS, "--keep", "--keep-dir", ".", "--time", phases, "-o", cubin, source]

    def program_command(self, source: str, output: str) -> list[str]:
        """g++ on a small host program that is run once: not optimised."""
        return [str(self.host_compiler), "-std=c++17", "-O0", source, "-o", output]

    def host_command(self, source: str, output: str) -> list[str]:
        """g++ on launch code and stub: one object."""
        return [str(self.host_compiler), *HOST_FLAGS, f"-I{self.tvm_ffi_include}", "-c", source, "-o", output]

    def emulation_command(self, source: str, output: str) -> list[str]:
        """g++ on a library of target cpu, kernel and stub: one object."""
        return [str(self.host_compiler), *EMULATION_FLAGS, f"-I{self.tvm_ffi_include}", "-c", source, "-o", output]

    def link_command(self, inputs: Sequence[str], output: str) -> list[str]:
        """g++ as assembler and linker: objects and the file that embeds the cubin become the library."""
        return [str(self.host_compiler), *inputs, *LINK_FLAGS, "-o", output]


def find_toolchain(
    processes: Processes | None = None, *, nvcc: str | None = None, host_compiler: str | None = None
) -> Toolchain:
    """The named compilers, else nvcc of the wheels or of PATH, and g++ (0.1 s). Raises ToolchainMissing."""
    if processes is None:
        with closing(Processes()) as processes:
            return find_toolchain(processes, nvcc=nvcc, host_compiler=host_compiler)
    try:
        nvcc_path = _find_nvcc(nvcc)
        host = host_compiler or "g++"
        host_path = shutil.which(host)
        if host_path is None:
            missing = f"CUKILN_CXX names {host}, which is not an executable file" if host_compiler else "no g++ in PATH"
            raise ToolchainMissing(f"no host compiler: {missing}; install g++ (Debian, Ubuntu: apt-get install g++)")
        nvcc_words = _ask(processes, nvcc_path, "--version")
        release = re.search(r"V(\d+\.\d+\.\d+)", nvcc_words)
        if release is None:
            raise ToolchainMissing(f"{nvcc_path} --version says no version: {nvcc_words.strip()[:200]}; {_INSTALL}")
        versions = (
            ("nvcc", release[1]),
            ("host_compiler", _ask(processes, Path(host_path), "--version").splitlines()[0]),
            ("tvm_ffi", importlib.metadata.version("apache-tvm-ffi")),
        )
        codes = tuple(re.findall(r"^sm_\d+\w?$", _ask(processes, nvcc_path, "--list-gpu-code"), re.MULTILINE))
        return Toolchain(nvcc_path, Path(host_path), tvm_ffi_include(), versions, codes)
    except ProgramMissing as error:
        raise ToolchainMissing(f"{error}; {_INSTALL}") from error


def supported_targets(toolchain: Toolchain) -> tuple[Target, ...]:
    """The targets with a data sheet that this nvcc makes code for. `sm_90a` and its like are not listed by nvcc: every
    architecture from 9.0 on has its specific variant (CUDA Programming Guide, "Architecture-specific features")."""
    codes = set(toolchain.gpu_codes)
    codes |= {code + "a" for code in codes if code[-1].isdigit() and int(code[3:]) >= 90}
    return tuple(sheet for sheet in targets().values() if sheet.architecture in codes)


def _find_nvcc(named: str | None) -> Path:
    if named:
        path = shutil.which(named)
        if path is None:
            raise ToolchainMissing(f"CUKILN_NVCC names {named}, which is not an executable file; {_INSTALL}")
        return Path(path)
    if (of_wheels := nvcc_in(wheel_folders())) is not None:
        return of_wheels
    path = shutil.which("nvcc")
    if path is None:
        raise ToolchainMissing(f"no nvcc: neither in the wheels of {sys.prefix} nor in PATH; {_INSTALL}")
    return Path(path)


def tvm_ffi_include() -> Path:
    """The folder of tvm-ffi's C headers. Raises ToolchainMissing."""
    spec = importlib.util.find_spec("tvm_ffi")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "include/tvm/ffi/c_api.h").is_file():
            return Path(place) / "include"
    raise ToolchainMissing("no tvm/ffi/c_api.h: apache-tvm-ffi is missing; `make run` installs it")


def _ask(processes: Processes, program: Path, question: str) -> str:
    with processes.private_folder("ask") as folder:
        finished = processes.run([str(program), question], cwd=folder, limits=_QUESTION)
    if reason := finished.infrastructure_failure():
        raise InfrastructureError(reason)
    if not finished.ok:
        raise ToolchainMissing(
            f"{program} {question} failed with {finished.returncode}: {finished.text().strip()[-200:]}"
        )
    return finished.stdout.decode("utf-8", "replace")
