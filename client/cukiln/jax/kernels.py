"""Which kernel a problem gets while a function is traced, and how the compiled program calls it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import jax
import jax_tvm_ffi
import numpy as np

from cukiln.client import Client
from cukiln.gpu import local_target
from cukiln.load_kernel import Kernel, load

if TYPE_CHECKING:
    from cukiln.types.problems import Problem

CPU_TARGET = "cpu"
_BOOLS_AS = {"bool": "uint8"}  # a mask of bytes


@dataclass
class _Kernels:
    """Those of one configuration; `lookup`: its options."""

    client: Client
    target: str | None
    lookup: Mapping[str, Any]
    _loaded: dict[str, Kernel] = field(default_factory=dict)
    _loading: threading.Lock = field(default_factory=threading.Lock)

    def find(self, problem: Mapping[str, Any]) -> Kernel | None:
        if self.target is None:
            return None
        (answer,) = self.client.lookup([cast("Problem", problem)], target=self.target, **self.lookup)
        if answer.record is None or answer.record.vendor_won:
            return None
        entry = answer.record.front[0]
        with self._loading:
            if entry.so_sha256 not in self._loaded:
                self._loaded[entry.so_sha256] = load(entry, client=self.client)
        return self._loaded[entry.so_sha256]


_configured: _Kernels | None = None
_targets: set[str] = set()  # of XLA, by name
_registering = threading.Lock()


def configure(
    client: Client | None = None,
    *,
    target: str | None = None,
    on_miss: str = "none",
    workspace_limit_bytes: int | None = None,
    deterministic: bool = False,
) -> None:
    """How kernels are found from now on. A second call has JAX forget what it traced, so that all is found again.

    `client`: default `cukiln.Client()`. `target`: default the architecture of this machine's GPU; `"cpu"` for the
    emulation of kernels on the CPU, slow and exact, for tests. `on_miss`: `"tune"` has the service tune what is not
    known. `workspace_limit_bytes` and `deterministic` are those of `cukiln.Client.lookup`.
    """
    global _configured
    lookup: dict[str, Any] = {"workspace_limit_bytes": workspace_limit_bytes, "deterministic": deterministic}
    if on_miss != "none":
        lookup["on_miss"] = on_miss
    again = _configured is not None
    _configured = _Kernels(client or Client(), target or local_target(), lookup)
    if again:
        jax.clear_caches()  # operations of the same arrays are traced again


def find(problem: Mapping[str, Any]) -> Kernel | None:
    """The kernel for the problem; None where none is known, or the vendor's library was faster."""
    if _configured is None:
        configure()
    assert _configured is not None
    return _configured.find(problem)


def platform_of(kernel: Kernel) -> str:
    """The name of XLA's platform that it runs on."""
    return "cpu" if _configured is not None and _configured.target == CPU_TARGET else "cuda"


def call(kernel: Kernel, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The outputs of the kernel, called by the compiled program. `arrays`: its inputs, in the record's order, of any
    shape with as many elements as the record says."""
    assert kernel.entry is not None, "kernels that are found have their entry"
    launch = kernel.entry.launch
    inputs = [operand for operand in launch.operands if operand.role == "in"]
    outputs = [operand for operand in launch.operands if operand.role == "out"]
    results = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in outputs]
    if launch.workspace_bytes:
        results.append(jax.ShapeDtypeStruct((launch.workspace_bytes,), "uint8"))
    numbers: list[Any] = [np.int64(value) for value in launch.attributes.values()]
    numbers += [np.float64(value) for value in launch.scalars]
    name = _register(kernel, len(numbers))
    shaped = [
        array.astype(_BOOLS_AS.get(str(array.dtype), array.dtype)).reshape(operand.shape)
        for array, operand in zip(arrays, inputs, strict=True)
    ]
    attributes = {f"number{place}": number for place, number in enumerate(numbers)}
    answers = jax.ffi.ffi_call(name, results)(*shaped, **attributes)
    return tuple(answers[: len(outputs)])


def _register(kernel: Kernel, numbers: int) -> str:
    """The name of its library among XLA's targets. A workspace is one result more, behind the outputs."""
    assert kernel.entry is not None
    platform = platform_of(kernel)
    name = f"cukiln_{kernel.entry.so_sha256}_{platform}"
    with _registering:
        if name not in _targets:
            if platform != "cpu":
                for device in jax.local_devices():
                    kernel.prepare(device.local_hardware_id or 0)  # inside a captured graph no module may be loaded
            run = ["args", "rets", *(f"attrs.number{place}" for place in range(numbers))]
            jax_tvm_ffi.register_ffi_target(
                name,
                kernel.function("run"),
                run,
                platform="cpu" if platform == "cpu" else "gpu",
                allow_cuda_graph=True,
            )
            _targets.add(name)
    return name
