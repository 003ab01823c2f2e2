"""Which kernel a problem gets while a function is traced, and how the compiled program calls it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import jax
import jax_tvm_ffi
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cukiln.client import Client
from cukiln.errors import CukilnError, UsageError
from cukiln.gpu import local_target
from cukiln.kernels.load_kernel import Kernel, load
from cukiln.request_file import writable, write_problems
from cukiln.shared_client import shared_client
from cukiln.types import FrontEntry, OnMiss

if TYPE_CHECKING:
    from cukiln.types.problems import Problem

CPU_TARGET = "cpu"


@dataclass(frozen=True)
class Tuned:
    """A kernel, and the platform of XLA that it runs on."""

    kernel: Kernel
    entry: FrontEntry
    platform: str


@dataclass
class _Kernels:
    """Those of one configuration; `lookup`: its options."""

    client: Client
    target: str | None
    lookup: Mapping[str, Any]
    _loaded: dict[tuple[str, str], Tuned] = field(default_factory=dict)
    _loading: threading.Lock = field(default_factory=threading.Lock)

    def find(self, problem: Mapping[str, Any]) -> Tuned | None:
        if self.target is None:
            return None
        try:
            return self._find(problem)
        except CukilnError as error:  # refused by the service, or a library that cannot be had
            _warn(problem, error)
            return None

    def _find(self, problem: Mapping[str, Any]) -> Tuned | None:
        (answer,) = self.client.lookup([cast("Problem", problem)], target=self.target, **self.lookup)
        if answer.record is None or answer.record.vendor_won(answer.record.front[0]):
            return None
        entry = answer.record.front[0]  # the fastest that the lookup's options allow
        key = (answer.record.key, entry.so_sha256)  # problems share libraries, and are launched each in its way
        with self._loading:
            if key not in self._loaded:
                platform = "cpu" if self.target == CPU_TARGET else "cuda"
                kernel = load(entry, client=self.client)
                for device in jax.local_devices():
                    if device.platform == "gpu" and platform == "cuda":
                        kernel.prepare(device.local_hardware_id)  # no module may be loaded while a graph is captured
                self._loaded[key] = Tuned(kernel, entry, platform)
        return self._loaded[key]


_configured: _Kernels | None = None
_recorded: list[dict[str, Any]] | None = None
_targets: set[str] = set()  # of XLA, by name
_registering = threading.Lock()


def configure(
    client: Client | None = None,
    *,
    url: str | None = None,
    target: str | None = None,
    on_miss: OnMiss = "none",
    workspace_limit_bytes: int | None = None,
    deterministic: bool = False,
) -> None:
    """How kernels are found from now on. A second call has JAX forget what it traced, so that all is found again.

    `client`, or `url`: default `cukiln.Client()`. `target`: default the architecture of this machine's GPU; `"cpu"` for
    the emulation of kernels on the CPU, slow and exact, for tests. `on_miss`: `"tune"` has the service tune what is not
    known; `"nearest"`, too, and takes a kernel that was tuned for a problem near by. `workspace_limit_bytes` and
    `deterministic` are those of `cukiln.Client.lookup`. Raises `UsageError`.
    """
    global _configured
    if on_miss not in get_args(OnMiss):
        raise UsageError(f"on_miss is {on_miss!r}; allowed: {', '.join(map(repr, get_args(OnMiss)))}")
    if client is not None and url is not None:
        raise UsageError("client and url are given; one of them says where the service is")
    lookup: dict[str, Any] = {"workspace_limit_bytes": workspace_limit_bytes, "deterministic": deterministic}
    if on_miss != "none":
        lookup["on_miss"] = on_miss
    again = _configured is not None
    _configured = _Kernels(client or shared_client(url), target or local_target(), lookup)
    if again:
        jax.clear_caches()  # operations of the same arrays are traced again


@contextmanager
def record(file: Path | str | None = None) -> Iterator[list[dict[str, Any]]]:
    """The problems of all calls that are traced meanwhile, each once; XLA computes them. At the end they are in `file`,
    a request that `cukiln tune` takes. Raises `UsageError` at once where no file can be written there."""
    global _recorded
    written = None if file is None else writable(Path(file))
    jax.clear_caches()
    problems: list[dict[str, Any]] = []
    _recorded = problems
    try:
        yield problems
    finally:
        _recorded = None
        jax.clear_caches()
        if written is not None:  # also of a model that raises: what it called before is there
            write_problems(written, {"problems": problems})


def find(problem: Mapping[str, Any]) -> Tuned | None:
    """The kernel for the problem; None where none is known, or the vendor's library was faster."""
    if _recorded is not None:
        if problem not in _recorded:
            _recorded.append(dict(problem))
        return None
    if _configured is None:
        try:
            configure()
        except CukilnError as error:  # of the environment, or of the configuration file
            _warn(problem, error)
            return None
    assert _configured is not None
    return _configured.find(problem)


def _warn(problem: Mapping[str, Any], error: CukilnError) -> None:
    warnings.warn(f"XLA computes a call of {problem['operator']}: {error}", stacklevel=3)


def call(tuned: Tuned, arrays: Sequence[jax.Array], like: jax.ShapeDtypeStruct) -> tuple[jax.Array, ...]:
    """The outputs of the kernel, called by the compiled program. `arrays`: its inputs, in the record's order, of any
    shape with as many elements as the record says. `like`: XLA's result, which says beside its shape along which axes
    of a mesh results differ, inside of `shard_map`."""
    launch = tuned.entry.launch
    inputs = [operand for operand in launch.operands if operand.role == "in"]
    outputs = [operand for operand in launch.operands if operand.role == "out"]
    shapes = [(tuple(operand.shape), operand.dtype) for operand in outputs]
    if needed := tuned.kernel.workspace_bytes():  # for the record's extents
        shapes.append(((needed,), "uint8"))
    sharding = None if like.sharding is None else NamedSharding(like.sharding.mesh, PartitionSpec())
    results = [like.update(shape=shape, dtype=np.dtype(dtype), sharding=sharding) for shape, dtype in shapes]
    numbers: list[Any] = [np.int64(value) for value in launch.attributes.values()]
    numbers += [np.float64(value) for value in launch.scalars]
    name = _register(tuned, len(numbers))
    shaped = [
        array.astype(operand.dtype).reshape(operand.shape)  # a mask of bools is one of bytes
        for array, operand in zip(arrays, inputs, strict=True)
    ]
    attributes = {f"number{place}": number for place, number in enumerate(numbers)}
    answers = jax.ffi.ffi_call(name, results)(*shaped, **attributes)
    return tuple(answers[: len(outputs)])


def _register(tuned: Tuned, numbers: int) -> str:
    """The name of its library among XLA's targets. A workspace is one result more, behind the outputs."""
    name = f"cukiln_{tuned.entry.so_sha256}_{tuned.platform}"
    with _registering:
        if name not in _targets:
            jax_tvm_ffi.register_ffi_target(
                name,
                tuned.kernel.function("run"),
                ["args", "rets", *(f"attrs.number{place}" for place in range(numbers))],
                platform="cpu" if tuned.platform == "cpu" else "gpu",
                allow_cuda_graph=True,
            )
            _targets.add(name)
    return name
