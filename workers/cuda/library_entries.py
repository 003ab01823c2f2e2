"""The C entries of a group's library, loaded into this process and called (`codegen.text.render_library`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from codegen.kernel import Kernel
from workers.gpu.interface import LaunchRefused


class LibraryEntries:
    """Calls go onto `stream`. `synchronize` raises GpuFault where an error is pending: a refusal is no lost device."""

    def __init__(self, path: Path, kernels: Sequence[Kernel], *, stream: int, synchronize: Callable[[], None]) -> None:
        self._stream, self._synchronize = stream, synchronize
        try:
            self._library = ctypes.CDLL(str(path))
            self._library.cukiln_last_error.restype = ctypes.c_char_p
            self._launch = {kernel.id: self._entry("launch", kernel, ctypes.c_int) for kernel in kernels}
            self._workspace = {kernel.id: self._entry("workspace_bytes", kernel, ctypes.c_int64) for kernel in kernels}
        except (OSError, AttributeError) as error:
            raise LaunchRefused(f"the library cannot be loaded: {error}") from error

    def prepare(self, device: int) -> None:
        """Load the kernels onto a device. Raises LaunchRefused, GpuFault."""
        self._check(self._library.cukiln_prepare(device))

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

    def _entry(self, what: str, kernel: Kernel, result: Any) -> Any:
        entry = self._library[f"cukiln_{what}_{kernel.id[:16]}"]
        entry.restype = result
        return entry

    def _check(self, status: int) -> None:
        if status == 0:
            return
        words = self._library.cukiln_last_error().decode(errors="replace")
        self._synchronize()
        raise LaunchRefused(words)


def _array(element: Any, values: Sequence[Any]) -> Any:
    """Never of no elements: a null pointer would be refused, or mean the library's own values."""
    return (element * max(1, len(values)))(*values)
