"""Find the compilers and say what they are: nvcc, or NVRTC and ptxas where there is none; g++; tvm-ffi's C header."""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codegen.canonical import digest
from codegen.identity import CUDA
from codegen.targets import Target, targets
from codegen.text.render_emulation import EMULATION_FLAGS
from workers.compile.find_compilers import nvcc_in, nvrtc_in, wheel_folders
from workers.compile.nvrtc import driver
from workers.processes.processes import InfrastructureError, Limits, ProcessError, Processes, ProgramMissing

if TYPE_CHECKING:  # what measures elsewhere has no pydantic-settings
    from storage.config.settings import Settings

TOOLKITS = Path("/usr/local")  # where NVIDIA's packages install them
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
class Nvcc:
    """`path`: the program."""

    path: Path

    name = "nvcc"

    @property
    def program(self) -> list[str]:
        return [str(self.path)]

    def describe(self) -> list[str]:
        """What the code depends on beside the version."""
        return list(DEVICE_FLAGS)

    def command(self, host_compiler: Path, target: str, source: str, cubin: str, phases: str) -> list[str]:
        """The device pass alone. `code=sm_…`: `-arch=sm_…` adds a second pass."""
        architecture = f"arch={target.replace('sm_', 'compute_')},code={target}"
        head = [*self.program, "-ccbin", str(host_compiler), "-gencode", architecture]
        return [*head, *DEVICE_FLAGS, "--keep", "--keep-dir", ".", "--time", phases, "-o", cubin, source]

    def ptx_command(self, host_compiler: Path, target: str, source: str, ptx: str) -> list[str]:
        """The same PTX as `command` leaves beside its cubin, with the lines of its source."""
        architecture = f"-arch={target.replace('sm_', 'compute_')}"
        flags = [flag for flag in DEVICE_FLAGS if flag.startswith(("-std", "-O"))]
        head = [*self.program, "-ccbin", str(host_compiler), architecture]
        return [*head, *flags, "-ptx", "-lineinfo", "-o", ptx, source]


@dataclass(frozen=True)
class Nvrtc:
    """NVRTC with ptxas, which a program of this project runs as nvcc is run. `path`: the library. `named`: that
    program, with both, in place of the one here."""

    path: Path
    ptxas: Path
    named: str | None = None

    name = "nvrtc"

    def describe(self) -> list[str]:
        """What the code depends on beside the versions: flags of both, and the text before every file."""
        prelude = hashlib.sha256(driver.PRELUDE.read_bytes()).hexdigest()
        return [*driver.NVRTC_FLAGS, f"prelude={prelude}", "ptxas", *driver.PTXAS_FLAGS]

    @property
    def program(self) -> list[str]:
        """It needs Python's own library alone: without its packages it starts in 20 ms."""
        if self.named:
            return [self.named]
        head = [sys.executable, "-I", "-S", driver.__file__]
        return [*head, "--nvrtc", str(self.path), "--ptxas", str(self.ptxas)]

    def command(self, host_compiler: Path, target: str, source: str, cubin: str, phases: str) -> list[str]:
        """As of `Nvcc`; without a host compiler."""
        return [*self.program, "--target", target, "--time", phases, "-o", cubin, source]

    def ptx_command(self, host_compiler: Path, target: str, source: str, ptx: str) -> list[str]:
        """As of `Nvcc`, but without lines: the PTX stands beside a cubin, and has its name."""
        stem = ptx.removesuffix(".ptx")
        return self.command(host_compiler, target, source, f"{stem}.cubin", f"{stem}.csv")


@dataclass(frozen=True)
class Toolchain:
    """One compiler stack. `versions` are pairs (part, version), the device compiler's first; `gpu_codes` is what
    `nvcc --list-gpu-code` says."""

    device_compiler: Nvcc | Nvrtc
    host_compiler: Path
    tvm_ffi_include: Path
    versions: tuple[tuple[str, str], ...]
    gpu_codes: tuple[str, ...]

    @property
    def cuda(self) -> int:
        """The major release of CUDA whose driver the cubins need."""
        return int(dict(self.versions)[self.device_compiler.name].partition(".")[0])

    @property
    def digest(self) -> str:
        """Versions and flags, never paths: two machines with the same release share builds."""
        return digest("toolchain", TOOLCHAIN_VERSION, **self.describe())

    def describe(self) -> dict[str, Any]:
        """What goes into the digest and what people are shown."""
        return {
            "versions": dict(self.versions),
            "flags": {"device": self.device_compiler.describe(), "host": list(HOST_FLAGS), "link": list(LINK_FLAGS)},
        }

    def device_command(self, target: str, source: str, cubin: str, phases: str) -> list[str]:
        """From a file to its cubin, with its PTX beside it; without paths, which would reach the cubin."""
        return self.device_compiler.command(self.host_compiler, target, source, cubin, phases)

    def ptx_command(self, target: str, source: str, ptx: str) -> list[str]:
        """From a file to its PTX; where the compiler can say so, with the lines that instructions come from."""
        return self.device_compiler.ptx_command(self.host_compiler, target, source, ptx)

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
    processes: Processes | None = None,
    *,
    nvcc: str | None = None,
    host_compiler: str | None = None,
    cuda: int | None = None,
) -> Toolchain:
    """The named compilers, else nvcc of the wheels or of PATH, and g++ (0.1 s). `cuda`: of that major release, 13 or
    newer, or 12, of which NVRTC will do; null for any. Raises ToolchainMissing."""
    if processes is None:
        with closing(Processes()) as processes:
            return find_toolchain(processes, nvcc=nvcc, host_compiler=host_compiler, cuda=cuda)
    try:
        host = host_compiler or "g++"
        host_path = shutil.which(host)
        if host_path is None:
            missing = f"CUKILN_CXX names {host}, which is not an executable file" if host_compiler else "no g++ in PATH"
            raise ToolchainMissing(f"no host compiler: {missing}; install g++ (Debian, Ubuntu: apt-get install g++)")
        compiler, versions, codes = _find_device_compiler(processes, nvcc, cuda)
        others = (
            ("host_compiler", _ask(processes, [host_path, "--version"]).splitlines()[0]),
            ("tvm_ffi", importlib.metadata.version("apache-tvm-ffi")),
        )
        gpu_codes = tuple(re.findall(r"^sm_\d+\w?$", codes, re.MULTILINE))
        return Toolchain(compiler, Path(host_path), tvm_ffi_include(), (*versions, *others), gpu_codes)
    except ProgramMissing as error:
        raise ToolchainMissing(f"{error}; {_INSTALL}") from error


def toolchain_of(settings: "Settings", processes: Processes | None = None) -> Toolchain:
    """The compilers that the settings name. Raises ToolchainMissing."""
    named = {"nvcc": settings.nvcc, "host_compiler": settings.host_compiler}
    return find_toolchain(processes, **named, cuda=settings.cuda)


def supported_targets(toolchain: Toolchain) -> tuple[Target, ...]:
    """The targets with a data sheet that this nvcc makes code for. `sm_90a` and its like are not listed by nvcc: every
    architecture from 9.0 on has its specific variant (CUDA Programming Guide, "Architecture-specific features")."""
    codes = set(toolchain.gpu_codes)
    codes |= {code + "a" for code in codes if code[-1].isdigit() and int(code[3:]) >= 90}
    return tuple(sheet for sheet in targets().values() if sheet.architecture in codes)


def _find_device_compiler(
    processes: Processes, named: str | None, cuda: int | None
) -> tuple[Nvcc | Nvrtc, tuple[tuple[str, str], ...], str]:
    """With its versions, and what it says of architectures. Raises ToolchainMissing."""
    others = []
    for path in _nvccs(named, cuda):
        version = _version_of(processes, path)
        major = int(version.partition(".")[0])
        if cuda is None or (major == cuda if cuda < CUDA else major >= CUDA):
            return Nvcc(path), (("nvcc", version),), _ask(processes, [str(path), "--list-gpu-code"])
        others.append(f"{path} is of CUDA {version}")
    if named:
        other = CUDA if cuda == 12 else 12
        raise ToolchainMissing(
            f"CUKILN_NVCC names an nvcc of another CUDA than CUKILN_CUDA ({cuda}): {others[0]}; name another one, or "
            f"set CUKILN_CUDA to {other}: kernels of both are kept apart, because they need other drivers"
        )
    if cuda == 12:
        return _find_nvrtc(processes, others)
    beside = f" ({'; '.join(others)}: CUKILN_CUDA=12 compiles with it)" if others else ""
    raise ToolchainMissing(f"no nvcc: neither in the wheels of {sys.prefix} nor in PATH{beside}; {_INSTALL}")


def _nvccs(named: str | None, cuda: int | None) -> Iterator[Path]:
    """The named one alone; else that of the wheels, which is of CUDA 13, and that of PATH; else a toolkit's."""
    if named:
        path = shutil.which(named)
        if path is None:
            raise ToolchainMissing(f"CUKILN_NVCC names {named}, which is not an executable file; {_INSTALL}")
        yield Path(path)
        return
    if cuda != 12 and (of_wheels := nvcc_in(wheel_folders())) is not None:
        yield of_wheels
    if (path := shutil.which("nvcc")) is not None:
        yield Path(path)
    if cuda == 12:
        yield from (nvcc for nvcc in sorted(TOOLKITS.glob("cuda-12*/bin/nvcc")) if os.access(nvcc, os.X_OK))


def _find_nvrtc(processes: Processes, others: Sequence[str]) -> tuple[Nvrtc, tuple[tuple[str, str], ...], str]:
    places = nvrtc_in(wheel_folders())
    if places is None:
        beside = f" ({'; '.join(others)})" if others else ""
        raise ToolchainMissing(
            f"no compiler of CUDA 12: no nvcc of it in PATH or {TOOLKITS}{beside}, no NVRTC with ptxas in the wheels "
            f"of {sys.prefix}; `CUDA=12 make run` installs these (the dependency group toolchain-cuda12)"
        )
    compiler = Nvrtc(*places)
    versions = tuple(
        (part, importlib.metadata.version(package))
        for part, package in (("nvrtc", "nvidia-cuda-nvrtc-cu12"), ("ptxas", "nvidia-cuda-nvcc-cu12"))
    )
    return compiler, versions, _ask(processes, [*compiler.program, "--list-gpu-code"])


def _version_of(processes: Processes, nvcc: Path) -> str:
    output = _ask(processes, [str(nvcc), "--version"])
    release = re.search(r"V(\d+\.\d+\.\d+)", output)
    if release is None:
        raise ToolchainMissing(f"{nvcc} --version says no version: {output.strip()[:200]}; {_INSTALL}")
    return release[1]


def tvm_ffi_include() -> Path:
    """The folder of tvm-ffi's C headers. Raises ToolchainMissing."""
    spec = importlib.util.find_spec("tvm_ffi")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "include/tvm/ffi/c_api.h").is_file():
            return Path(place) / "include"
    raise ToolchainMissing("no tvm/ffi/c_api.h: apache-tvm-ffi is missing; `make run` installs it")


def _ask(processes: Processes, question: Sequence[str]) -> str:
    with processes.private_folder("ask") as folder:
        finished = processes.run(question, cwd=folder, limits=_QUESTION)
    if reason := finished.infrastructure_failure():
        raise InfrastructureError(reason)
    if not finished.ok:
        raise ToolchainMissing(
            f"{' '.join(question)} failed with {finished.returncode}: {finished.text().strip()[-200:]}"
        )
    return finished.stdout.decode("utf-8", "replace")
