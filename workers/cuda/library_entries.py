"""The C entries of a group's library, loaded into this process and called (`codegen.text.render_library`)."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.gpu.interface import GpuError, LaunchRefused, LoadFailed

if TYPE_CHECKING:
    from codegen.kernel import Kernel


# Codes of cuda.h's CUresult with which a driver refuses what is in the file: an invalid value (more shared memory than
# a block may have), a kernel that is not there. All others are the machine's: no memory (2), no code for this GPU
# (209), a compiler that is newer than the driver (222, 803, 804), and whatever else it says. So is an invalid image or
# source (200, 300): a driver too old for a cubin calls it invalid, and that the file is whole was looked at before.
OF_THE_FILE = frozenset({1, 500})
_CODE = re.compile(r"\(CUDA error (\d+)\)$")


def load_failure(message: str) -> GpuError:
    """Of what a library says of a load that failed; it names CUDA's code. Without one no driver could be asked."""
    code = _CODE.search(message)
    if code is not None and int(code[1]) in OF_THE_FILE:
        return LaunchRefused(message)
    return LoadFailed(f"{message}; nothing is said of the kernels by that: look at the GPU's memory and at its driver")


class LibraryEntries:
    """Calls go onto `stream`. `synchronize` raises GpuFault where an error is pending: a refusal is no lost device. A
    kernel is named by its id; the only one of a winner's library, None, by an empty name."""

    def __init__(
        self, path: Path, kernels: Sequence[Kernel | None], *, stream: int, synchronize: Callable[[], None]
    ) -> None:
        self._stream, self._synchronize = stream, synchronize
        try:
            self._library = ctypes.CDLL(str(path))
            self._library.cukiln_last_error.restype = ctypes.c_char_p
            names = [kernel.id if kernel is not None else "" for kernel in kernels]
            self._launch = {name: self._entry("launch", name, ctypes.c_int) for name in names}
            self._workspace = {name: self._entry("workspace_bytes", name, ctypes.c_int64) for name in names}
        except (OSError, AttributeError) as error:
            raise LaunchRefused(f"the library cannot be loaded: {error}") from error

    def prepare(self, device: int) -> None:
        """Load the kernels onto a device. Raises LaunchRefused, LoadFailed, GpuFault."""
        if self._library.cukiln_prepare(device):
            message = self._last_error()
            self._synchronize()
            raise load_failure(message)

    def workspace_bytes(self, kernel: str, integers: Sequence[int], launch: Sequence[int]) -> int:
        return int(self._workspace[kernel](_array(ctypes.c_int64, integers), _array(ctypes.c_int32, launch)))

    def launch(
        self,
        kernel: str,
        pointers: Sequence[int],
        integers: Sequence[int],
        launch: Sequence[int],
        scalars: Sequence[float],
        workspace: int,
    ) -> None:
        self._check(
            self._launch[kernel](
                _array(ctypes.c_void_p, pointers),
                _array(ctypes.c_int64, integers),
                _array(ctypes.c_int32, launch),
                _array(ctypes.c_double, scalars),
                ctypes.c_void_p(workspace or None),
                ctypes.c_void_p(self._stream),
            )
        )

    def _entry(self, what: str, kernel: str, result: Any) -> Any:
        entry = self._library[f"cukiln_{what}_{kernel[:16]}" if kernel else f"cukiln_{what}"]
        entry.restype = result
        return entry

    def _check(self, status: int) -> None:
        if status == 0:
            return
        message = self._last_error()
        self._synchronize()
        raise LaunchRefused(message)

    def _last_error(self) -> str:
        message: bytes = self._library.cukiln_last_error()
        return message.decode(errors="replace")


def _array(element: Any, values: Sequence[Any]) -> Any:
    """Never of no elements: a null pointer would be refused, or mean the library's own values."""
    return (element * max(1, len(values)))(*values)
