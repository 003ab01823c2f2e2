"""From a winner record, a fetched folder, a file or bytes to a kernel that can be called.

A library's constructors run when it is loaded, so its SHA-256 is checked before.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from cukiln.counted import counted
from cukiln.errors import DeviceError, UsageError
from cukiln.gpu import local_target
from cukiln.json_file import read_json_object
from cukiln.kernels.capture import outside_captures
from cukiln.kernels.open_library import first_line, open_library
from cukiln.kernels.workspace_pool import POOL, of_cpu
from cukiln.local_cache import LocalCache, verify
from cukiln.lock import Lock
from cukiln.settings import ClientSettings
from cukiln.types import FrontEntry, WinnerRecord

if TYPE_CHECKING:
    from cukiln.client import Client

RECORD_FILE = "record.json"
ON_CPU, ON_CUDA = 1, 2  # kDLCPU, kDLCUDA of dlpack.h


class Kernel:
    """A loaded kernel library. `path` is what it was loaded from, and is gone where no cache could have it; `entry` is
    its place in the winner record; None when it was loaded from bytes alone."""

    def __init__(self, module: Any, path: Path, entry: FrontEntry | None) -> None:
        self._module = module
        self._run = module.get_function("run")
        self.path = path
        self.entry = entry
        self._loaded_on: set[tuple[int, int]] = set()  # devices, as DLPack has them

    def __repr__(self) -> str:
        return f"<cukiln.Kernel {self.path.stem[:12]}>"

    def prepare(self, device: int = 0) -> None:
        """Load the kernel onto CUDA device number `device`.

        The first call does it otherwise; call it yourself before capturing a CUDA graph, inside which no module may be
        loaded. Neither breaks a capture of another thread. Raises `DeviceError` where there is no driver, no such
        device, or one the kernel was not compiled for.
        """
        try:
            with outside_captures():
                self._module.get_function("prepare")(device)
            self._loaded_on.add((ON_CUDA, device))
        except RuntimeError as error:
            raise DeviceError(
                f"cannot prepare the kernel on CUDA device {device}: {first_line(error)}; it needs an NVIDIA GPU of "
                "the architecture it was compiled for, and its driver. `cukiln doctor` shows what is here"
            ) from error

    def workspace_bytes(self, *arguments: Any) -> int:
        """Bytes of scratch memory that a call needs: for these operands, for these extents (integers, in the record's
        order), or without arguments for the recorded problem."""
        if not arguments and self.entry is not None:
            arguments = tuple(self.entry.launch.extents.values())
        return int(self._module.get_function("workspace_bytes")(*arguments))

    def __call__(
        self,
        *tensors: Any,
        attributes: tuple[int, ...] | None = None,
        scalars: tuple[float, ...] | None = None,
        workspace: Any = None,
        transformed: Any = None,
        stream: int | None = None,
    ) -> None:
        """Run the kernel; returns when it is queued.

        `tensors`: anything with DLPack (PyTorch, CuPy, JAX), in the record's operand order (inputs, then
        outputs; matmul: a, b, the epilogue's tensors, out) and of its dtypes: float32, float16, bfloat16, int8, int32,
        int64, uint8 (a mask; bool is as good). `attributes` (stride, padding) and `scalars` (the epilogue's numbers):
        default those of the record. `workspace`: a GPU tensor of at least `workspace_bytes` bytes, not used where
        that is 0; by default a buffer that all calls on the stream share (`cukiln.kernels.workspace_pool`).
        `transformed`: what `transform` has written of one operand, of which the call then reads nothing but the shape.
        `stream`: a raw CUDA stream handle; default: PyTorch's or CuPy's current stream for their tensors, else the
        default stream. A kernel of target `cpu` takes CPU tensors, has no stream, and returns when it is done.
        Raises `TypeError` or `ValueError` for wrong dtypes, shapes, strides, alignment or devices and for negated views
        of PyTorch, `UsageError` for tensors without memory, and `DeviceError`.
        """
        _check_values(tensors)
        numbers = self._numbers(attributes, scalars)
        run, more = (self._run, ()) if transformed is None else (self.function("run_transformed"), (transformed,))
        like = tensors[0] if tensors else None
        stream = _cupys_stream(like) if stream is None else stream
        try:
            if stream is not None:
                # tvm-ffi would take the stream of the tensors' framework; tensors of its own have none.
                tensors = tuple(map(_own_tensor, tensors))
            needed = int(self._module.get_function("workspace_bytes")(*tensors))
            if needed == 0 or workspace is not None:
                with self._loading(like), _on_stream(tensors, stream):
                    run(*tensors, *((workspace,) if needed else ()), *more, *numbers)
                return
            with _lent(tensors, stream, needed, like) as address, self._loading(like), _on_stream(tensors, stream):
                run(*tensors, address, *more, *numbers)
        except (RuntimeError, ValueError) as error:
            if _have_no_memory(tensors):
                raise UsageError(
                    "the tensors have no memory: they are of the meta device, or of a trace of torch.compile, whose "
                    "way to kernels is cukiln.torch"
                ) from error
            if isinstance(error, ValueError):
                raise
            raise DeviceError(f"the kernel could not run: {first_line(error)}") from error

    @contextmanager
    def _loading(self, tensor: Any) -> Iterator[None]:
        """Around a call on tensors like this: the first one on a GPU loads the kernel, and breaks no capture of another
        thread by it. Inside of a capture of its own the library refuses to."""
        device = tensor.__dlpack_device__() if hasattr(tensor, "__dlpack_device__") else (ON_CPU, 0)
        if device[0] == ON_CPU or device in self._loaded_on:
            yield
            return
        with outside_captures():
            yield
        self._loaded_on.add(device)

    def bound(
        self, *, attributes: tuple[int, ...] | None = None, scalars: tuple[float, ...] | None = None
    ) -> Callable[..., None]:
        """The library's own entry with these numbers, for callers that count microseconds: it takes the tensors of
        a call, none of them a negated view, and behind them the address of a workspace where `workspace_bytes` of them
        is not 0. What goes wrong on the device is a `RuntimeError`."""
        numbers, run = self._numbers(attributes, scalars), self._run
        if not numbers:
            entry: Callable[..., None] = run
            return entry
        return lambda *arguments: run(*arguments, *numbers)

    def transformed_bytes(self, *tensors: Any) -> int:
        """Bytes that `transform` writes for these operands. Raises `UsageError` where the library has no transform."""
        return int(self.function("transformed_bytes")(*tensors))

    def transform(
        self,
        *tensors: Any,
        transformed: Any,
        attributes: tuple[int, ...] | None = None,
        stream: int | None = None,
    ) -> None:
        """Write what the kernel makes of one operand alone (the record's `launch.transform`: of Winograd the filters)
        to `transformed`, a GPU tensor of `transformed_bytes` bytes or its address, for any number of calls; returns
        when it is queued. `tensors`: as of a call; the others are not read. Raises what a call does, and
        `UsageError`."""
        _check_values(tensors)
        transform, numbers = self.function("transform"), self._numbers(attributes, None)
        like = tensors[0] if tensors else None
        stream = _cupys_stream(like) if stream is None else stream
        try:
            if stream is not None:
                tensors = tuple(map(_own_tensor, tensors))
            with self._loading(like), _on_stream(tensors, stream):
                transform(*tensors, transformed, *numbers)
        except RuntimeError as error:
            raise DeviceError(f"the transform could not run: {first_line(error)}") from error

    def _numbers(self, attributes: tuple[int, ...] | None, scalars: tuple[float, ...] | None) -> tuple[float, ...]:
        """Those of a call; what is not given is the record's."""
        launch = None if self.entry is None else self.entry.launch
        if attributes is None:
            attributes = tuple(launch.attributes.values()) if launch else ()
        if scalars is None:
            scalars = tuple(launch.scalars) if launch else ()
        return (*attributes, *scalars)

    def function(self, name: str) -> Any:
        """An entry point of the library; raises `UsageError` where it has none of the name."""
        try:
            return self._module.get_function(name)
        except AttributeError as error:
            raise UsageError(f"{self!r} has no {name}: no launch of this kernel reads one operand alone") from error


def _check_values(tensors: Iterable[Any]) -> None:
    """Raises `ValueError` for one that is negated whenever PyTorch reads or writes it, as the imaginary part of a
    conjugated tensor is: a library reads and writes memory. (A conjugated one is complex, which no kernel takes.)"""
    for place, tensor in enumerate(tensors):
        if getattr(tensor, "is_neg", None) is not None and tensor.is_neg():
            raise ValueError(
                f"tensor {place} of the call is a negated view: its memory holds the values with the other sign "
                "(is_neg() is true); pass tensor.resolve_neg(), and as an output a tensor that is no such view"
            )


def _have_no_memory(tensors: Iterable[Any]) -> bool:
    """Whether some have shapes and dtypes alone."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return any(isinstance(tensor, FakeTensor) or getattr(tensor, "is_meta", False) for tensor in tensors)


def _cupys_stream(tensor: Any) -> int | None:
    """The stream that CuPy works on now, on the device of its tensor; None for others."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(tensor, cupy.ndarray):
        return None
    return int(cupy.cuda.get_current_stream(tensor.data.device_id).ptr)


class _Unordered:
    """A tensor of CuPy that is handed over as it is. tvm-ffi asks for it on the default stream, which would wait for
    the current one: inside a captured graph that is an error."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return self._tensor.__dlpack__(stream=-1)  # no order with another stream, by the array API standard

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def _own_tensor(tensor: Any) -> Any:
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor if _cupys_stream(tensor) is None else _Unordered(tensor))


def _device_of(tensors: tuple[Any, ...]) -> int:
    number: int = tensors[0].__dlpack_device__()[1] if tensors else 0
    return number


def _lent(tensors: tuple[Any, ...], stream: int | None, size: int, like: Any) -> AbstractContextManager[int]:
    """A workspace for one call; `like` is the first tensor as it was given."""
    if like.__dlpack_device__()[0] == ON_CPU:
        return of_cpu(size)
    device = _device_of(tensors)
    return POOL.lend(device, _current_stream(device, tensors) if stream is None else stream, size, like)


def _current_stream(device: int, tensors: tuple[Any, ...]) -> int:
    """The stream that tvm-ffi runs a call with these tensors on."""
    stream: int = _ask_stream()(device, *tensors)
    return stream


@functools.cache
def _ask_stream() -> Any:
    """A function with a library's calling convention."""
    import tvm_ffi

    return tvm_ffi.convert(lambda device, *_: tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", device)))


def _on_stream(tensors: tuple[Any, ...], stream: int | None) -> AbstractContextManager[Any]:
    """Sets the stream that tvm-ffi passes to the library for the tensors' device."""
    if stream is None:
        return nullcontext()
    import tvm_ffi

    context: AbstractContextManager[Any] = tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", _device_of(tensors)), stream)
    return context


def choose(
    record: WinnerRecord, *, workspace_limit_bytes: int | None = None, deterministic: bool = False
) -> FrontEntry:
    """The fastest kernel within the limit that, if asked for, gives the same bits every time. Raises `UsageError`."""
    allowed = record.usable(workspace_limit_bytes, deterministic)
    if allowed:
        return allowed[0]
    least = min(entry.workspace_bytes for entry in record.usable(None, deterministic) or record.front)
    raise UsageError(
        f"of record {record.key[:12]}…, {counted(len(record.front), 'kernel')}, none fits: workspace_limit_bytes="
        f"{workspace_limit_bytes}, deterministic={deterministic}; the least workspace is {least} bytes"
    )


def load(
    source: WinnerRecord | FrontEntry | Mapping[str, Any] | Path | str | bytes,
    *,
    sha256: str | None = None,
    client: Client | None = None,
    cache_dir: Path | str | None = None,
    workspace_limit_bytes: int | None = None,
    deterministic: bool = False,
    locked: bool | Path | str = False,
) -> Kernel:
    """Load a kernel, after its SHA-256 was found right.

    `source`: a winner record (or one entry of its front), whose library is taken from the local cache or through
    `client` (within its `lookup_budget`, and 4 s more for a megabyte); a folder that `cukiln fetch` wrote; a library
    file; or a library's bytes. `sha256` is needed for bytes, and for a file that is not named after its digest.
    `locked`: refuse all but what a lock file pins (True: `CUKILN_LOCK`, else `cukiln.lock`;
    or its path); then `source` may be a problem, too, whose record is in the file.
    A cache that cannot be written is a warning; the library is then loaded from a temporary file, which is gone when
    this returns. No GPU is needed to load; `Kernel.prepare` is what needs one.
    Raises `DigestMismatch` before anything of the library runs, `NotLocked`, `NotLoadable`, `UsageError`.
    """
    cache = _cache(client, cache_dir)
    lock = Lock.read(None if locked is True else locked) if locked else None
    entry: FrontEntry | None = None
    if isinstance(source, Mapping):
        if lock is None:
            raise UsageError("loading a problem needs locked=True: a lock file says which kernel it is")
        source = lock.record(source, None if "target" in source else local_target())
    if isinstance(source, WinnerRecord):
        if lock is not None:
            lock.check_record(source)
        source = choose(source, workspace_limit_bytes=workspace_limit_bytes, deterministic=deterministic)
    if isinstance(source, FrontEntry):
        entry, sha256 = source, sha256 or source.so_sha256
        path = None
    elif isinstance(source, bytes):
        path = None
        if sha256 is None:
            raise UsageError("loading a library from bytes needs sha256=…, the digest it was promised with")
    else:
        path = Path(source)
        if path.is_dir():
            entry = choose(read_record(path), workspace_limit_bytes=workspace_limit_bytes, deterministic=deterministic)
            path, sha256 = path / f"{entry.so_sha256}.so", sha256 or entry.so_sha256
        elif sha256 is None and path.exists():
            sha256 = _digest_of_name(path)
        else:
            sha256 = sha256 or path.stem  # there is nothing to read, which is said below
    if lock is not None:
        lock.check_library(sha256)
    data = source if isinstance(source, bytes) else _fetched(sha256, client, cache) if path is None else _read(path)
    verify(data, sha256, f"the library {source}" if isinstance(source, str | Path) else "the library")
    # Loaded from a folder of this user only: the file there is the one whose bytes were checked.
    return Kernel(*open_library(cache, sha256, data), entry)


def read_record(folder: Path) -> WinnerRecord:
    """The record in a folder that `cukiln fetch` wrote; raises `UsageError` where there is none."""
    path, remedy = folder / RECORD_FILE, "`cukiln fetch` writes such a folder"
    if not path.is_file():
        raise UsageError(f"{folder} holds no readable {RECORD_FILE} (there is no such file); {remedy}")
    try:
        return WinnerRecord.model_validate(read_json_object(path, "winner record", remedy))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{path} is not a winner record of this release ({place}: {first['msg']}); write it again with "
            "`cukiln fetch`"
        ) from error


def _cache(client: Client | None, folder: Path | str | None) -> LocalCache:
    if folder is None and client is not None:
        return client.cache
    settings = ClientSettings.from_environment()
    return LocalCache(settings.cache_dir if folder is None else Path(folder), settings.cache_bytes)


def _fetched(digest: str, client: Client | None, cache: LocalCache) -> bytes:
    data = cache.get(digest)
    if data is not None:
        return data
    if client is not None:
        return client.blob(digest, patient=False)
    from cukiln.shared_client import shared_client

    return shared_client(cache_dir=cache.folder).blob(digest, patient=False)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the library {path}: {error.strerror}") from error


def _digest_of_name(path: Path) -> str:
    name = path.stem
    if len(name) != 64:
        raise UsageError(
            f"loading {path} needs sha256=…, the digest it was promised with (files named <sha256>.so carry it)"
        )
    return name
