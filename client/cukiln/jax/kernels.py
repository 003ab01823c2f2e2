"""Which kernel a problem gets while a function is traced, and how a compiled program calls it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax_tvm_ffi
import numpy as np

from cukiln.client import Client
from cukiln.errors import UsageError
from cukiln.gpu import local_target
from cukiln.load_kernel import Kernel, load

CPU_TARGET = "cpu"


class _Kernels:
    """Those of one configuration, by problem."""

    def __init__(self, client: Client, target: str | None, lookup: Mapping[str, Any]) -> None:
        self._client, self._target, self._lookup = client, target, lookup
        self._lock = threading.Lock()
        self._loaded: dict[str, Kernel] = {}

    def find(self, problem: Mapping[str, Any]) -> Kernel | None:
        """None where no kernel is known, or the vendor's library was faster."""
        if self._target is None:
            return None
        (found,) = self._client.lookup([problem], target=self._target, **self._lookup)
        record = found.record
        if record is None or record.vendor_won:
            return None
        entry = record.front[0]
        with self._lock:
            if entry.so_sha256 not in self._loaded:
                self._loaded[entry.so_sha256] = load(entry, client=self._client)
        return self._loaded[entry.so_sha256]


_configured: _Kernels | None = None
_registered: dict[str, str] = {}
_registering = threading.Lock()


def configure(
    client: Client | None = None,
    *,
    target: str | None = None,
    on_miss: str = "none",
    workspace_limit_bytes: int | None = None,
    deterministic: bool = False,
) -> None:
    """How kernels are found from now on.

    `client`: default `cukiln.Client()`. `target`: default the architecture of this machine's GPU; `"cpu"`: kernels'
    emulation on the CPU, slow and exact, for tests. `on_miss`: `"tune"` has the service queue what is not known.
    `workspace_limit_bytes` and `deterministic` are those of a lookup.
    """
    global _configured
    lookup = {
        "on_miss": on_miss,
        "workspace_limit_bytes": workspace_limit_bytes,
        "deterministic": deterministic,
    }
    _configured = _Kernels(client or Client(), target or local_target(), lookup)
