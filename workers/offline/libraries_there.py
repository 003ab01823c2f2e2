"""What of the machine's own libraries measuring uses, and what of it is missing: a JSON object on the last line.

They are loaded here and not in the process that asks: a library that does not fit may end its process.
"""

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from workers.compile.find_compilers import find_nvcc
from workers.vendor.cublaslt import CublasLt
from workers.vendor.cudnn import Cudnn


def _version(package: str) -> str:
    return str(importlib.import_module(package).__version__)


def _program(name: str) -> str:
    if (path := shutil.which(name)) is None:
        raise FileNotFoundError(f"no {name} in PATH")
    return path


def _nvrtc() -> str:
    """What CuPy compiles its kernels with: NVRTC, and CUDA's headers as CuPy itself looks for them."""
    nvrtc, core = importlib.import_module("cupy.cuda").nvrtc, importlib.import_module("cupy._core.core")
    headers = [word[2:] for word in core.assemble_cupy_compiler_options(()) if word.startswith("-I")]
    return f"{'.'.join(map(str, nvrtc.getVersion()))}, headers in {headers[-1]}"


def _nvml() -> str:
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return str(nvml.nvmlSystemGetNVMLVersion())


def _torch() -> str:
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        raise ImportError(f"PyTorch {torch.__version__} is not for CUDA")
    return str(torch.__version__)


# Each with what needs it.
USED: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "NumPy": ("everything", lambda: _version("numpy")),
    "CuPy": ("everything on a GPU", lambda: _version("cupy")),
    "NVRTC": ("everything on a GPU: CuPy compiles its own kernels with it", _nvrtc),
    "NVML": ("clocks, throttling and the driver's version beside each time", _nvml),
    "cuBLASLt": ("the vendor's time of matmul, and the ceilings of products", lambda: CublasLt().version),
    "cuDNN": ("the vendor's time of convolutions and attention", lambda: Cudnn().package.backend_version()),
    "PyTorch": ("the vendor's time of attention and reductions", _torch),
    "nvcc": ("confirming primitives", lambda: _program(find_nvcc())),
    "g++": ("confirming primitives", lambda: _program("g++")),
}


def look() -> dict[str, dict[str, str]]:
    """By name `is`: its version or place, or `missing`: why, with `needed_for`."""
    there = {}
    for name, (needed_for, ask) in USED.items():
        try:
            there[name] = {"is": str(ask())}
        except Exception as error:  # noqa: BLE001 - whatever a library of another's machine says of itself
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            there[name] = {"missing": reason, "needed_for": needed_for}
    return there


def main() -> int:
    there = look()
    for name, entry in there.items():
        is_missing = "missing" in entry
        state = f"missing, for {entry['needed_for']}: {entry['missing']}" if is_missing else entry["is"]
        sys.stdout.write(f"{name}: {state}\n")
    sys.stdout.write(json.dumps(there) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
