"""A compiler that is run as nvcc is, where there is no nvcc: NVRTC makes PTX of a file, ptxas makes a cubin of that.

Run as a program, by its path and with Python's own library alone (`python -I -S driver.py …`). Errors go to stderr in
the messages of NVRTC and ptxas, which are nvcc's; the exit status is 0, 1 where the file is refused, 128 + signal where
ptxas was ended by one. Where NVRTC fails of itself, this process aborts, as a compiler that crashes does.

NVRTC's own cubins are not used: it writes each `static constexpr` member of a class as a variable of the file, used or
not, so that a kernel's code would depend on what else is in its file. Such lines are left out of the PTX.
"""

import argparse
import collections
import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PRELUDE = Path(__file__).with_name("prelude.h")
# Not of the machine code: `--no-cache`, which would write into a home that is removed; a warning about headers of which
# a file uses only a part.
NVRTC_FLAGS = ("-std=c++17", "-default-device", "--device-int128", "--no-cache", "--diag-suppress=177")
PTXAS_FLAGS = ("-O3", "-v")

SUCCESS, OUT_OF_MEMORY, COMPILATION, BUILTINS = 0, 1, 6, 7  # of nvrtcResult
_VARIABLE = re.compile(r"(?:\.visible |\.weak )?\.global [^;=]*?([A-Za-z_$][\w$]*)(?:\[\d*\])?(?: = [^;]*)?;")
_NAME = re.compile(r"[A-Za-z_$%.][\w$]*")


class Refused(Exception):
    """The file is refused, or the machine has not what is needed; the message is for stderr."""


def of_wheels(name: str) -> Path:
    """A file of this Python's `nvidia` wheels. Raises Refused."""
    for place in sys.path:
        if (path := Path(place, "nvidia", name)).is_file():
            return path
    to_do = "pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-nvcc-cu12"
    raise Refused(f"error while loading shared libraries: {name} is not in the wheels of {sys.prefix}; {to_do}")


def load(library: Path) -> ctypes.CDLL:
    """Raises Refused, in the words of a loader."""
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise Refused(f"error while loading shared libraries: {error}") from error


def architectures(library: Path) -> list[int]:
    """The compute capabilities that it compiles for, as 10 × major + minor. Raises Refused."""
    nvrtc, count = load(library), ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(numbers)
    return list(numbers)


def to_ptx(library: Path, name: str, text: str, target: str) -> str:
    """NVRTC's PTX for an architecture (`sm_90a`). Its log goes to stderr. Raises Refused; aborts where NVRTC fails."""
    nvrtc, program = load(library), ctypes.c_void_p()
    source = f'{PRELUDE.read_text(encoding="utf-8")}\n#line 1 "{name}"\n{text}'
    flags = [f"-arch={target.replace('sm_', 'compute_')}", *NVRTC_FLAGS]
    given = (ctypes.c_char_p * len(flags))(*map(str.encode, flags))
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    if status == SUCCESS:
        status = nvrtc.nvrtcCompileProgram(program, len(flags), given)
        sys.stderr.write(_text(nvrtc, "ProgramLog", program))
    if status == SUCCESS:
        return _text(nvrtc, "PTX", program)
    message = ctypes.cast(nvrtc.nvrtcGetErrorString, ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int))(status).decode()
    if status == COMPILATION:
        raise Refused("")  # the log says all
    if status == OUT_OF_MEMORY:
        raise Refused(f"NVRTC: out of memory ({message})")
    if status == BUILTINS:
        raise Refused(f"error while loading shared libraries: the builtins beside {library} ({message})")
    sys.stderr.write(f"NVRTC failed of itself: {message}\n")
    sys.stderr.flush()
    os.abort()


def _text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, data)
    return data.value.decode("utf-8", "replace")


def without_unused_variables(ptx: str) -> str:
    """`ptx` without the variables of the file that nothing names."""
    named = collections.Counter(_NAME.findall(ptx))
    lines = ptx.split("\n")
    matches = [_VARIABLE.fullmatch(line) if ".global" in line else None for line in lines]
    return "\n".join(line for line, match in zip(lines, matches, strict=True) if match is None or named[match[1]] > 1)


def compile_file(options: argparse.Namespace) -> int:
    """Writes PTX, cubin and the times of both steps, by nvcc's columns; returns the exit status. Raises Refused."""
    source, cubin = Path(options.source), Path(options.output)
    ptx = cubin.with_suffix(".ptx")
    began = time.monotonic()
    text = to_ptx(options.nvrtc, source.name, source.read_text(encoding="utf-8"), options.target)
    ptx.write_text(without_unused_variables(text), encoding="utf-8")
    between = time.monotonic()
    rows = ["source, phase, inputs, output, arch, tool, metric, unit", _row(options, "cicc", "nvrtc", between - began)]
    Path(options.time).write_text("\n".join(rows) + "\n", encoding="utf-8")
    command = [str(options.ptxas), f"-arch={options.target}", *PTXAS_FLAGS, "-o", str(cubin), str(ptx)]
    status = subprocess.run(command, check=False).returncode
    rows.append(_row(options, "ptxas", "ptxas", time.monotonic() - between))
    Path(options.time).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return 128 - status if status < 0 else status


def _row(options: argparse.Namespace, phase: str, tool: str, seconds: float) -> str:
    return (
        f"{options.source}, {phase}, {options.source}, {options.output}, {options.target}, {tool}, {1e3 * seconds}, ms"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="nvrtc")
    parser.add_argument("--nvrtc", type=Path, help="libnvrtc.so.12; default: that of this Python's wheels")
    parser.add_argument("--ptxas", type=Path, help="default: the same")
    parser.add_argument("--version", action="store_true", help="of ptxas, which is of NVRTC's release")
    parser.add_argument("--list-gpu-code", action="store_true", help="the architectures, as nvcc lists them")
    parser.add_argument("--target", help="an architecture: sm_90a")
    parser.add_argument("--time", help="the file for the times")
    parser.add_argument("-o", dest="output", help="the cubin; its PTX stands beside it")
    parser.add_argument("source", nargs="?")
    options = parser.parse_args(arguments)
    try:
        options.nvrtc = options.nvrtc or of_wheels("cuda_nvrtc/lib/libnvrtc.so.12")
        options.ptxas = options.ptxas or of_wheels("cuda_nvcc/bin/ptxas")
        if options.version:
            return subprocess.run([str(options.ptxas), "--version"], check=False).returncode
        if options.list_gpu_code:
            sys.stdout.writelines(f"sm_{number}\n" for number in architectures(options.nvrtc))
            return 0
        return compile_file(options)
    except Refused as error:
        sys.stderr.write(f"{error}\n" if str(error) else "")
    except OSError as error:
        sys.stderr.write(f"nvrtc: {error.strerror}: {error.filename}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
