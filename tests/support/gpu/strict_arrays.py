"""Arrays that compute with NumPy and allow what CuPy 13 and later allow: code that works with them works on a GPU.

Like `cupy.ndarray` they refuse to become NumPy arrays unasked, have no bfloat16, reach float16 by way of float32, take
subnormals of float32 for 0 where they are converted from it or to it, and do not name their namespace, which is the
module `strict`. Beyond that they refuse whatever is not named here: NumPy's
functions, NumPy arrays and scalars beside them, keyword arguments, functions of which every operand is a Python number
(whose result type is a matter of opinion), and being looped over. `waits` counts what would wait for a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.arrays import SMALLEST_NORMAL
from codegen.arrays import erf as numpy_erf

NAME = "strict"
# What `strict` has. The first operand is an array, but of `where` one of those to choose from is one too.
FUNCTIONS = (
    "abs", "all", "argmax", "argmin", "broadcast_to", "clip", "count_nonzero", "exp", "frexp", "isfinite", "isposinf",
    "log", "matmul", "max", "maximum", "min", "minimum", "nan_to_num", "rint", "signbit", "sqrt", "take", "tanh",
    "where", "zeros_like",
)  # fmt: skip
SCALARS = (bool, int, float)
TYPES = ("bool", "float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class StrictArray:
    """Wraps the NumPy array that it computes with."""

    __module__ = NAME
    __hash__ = None  # type: ignore[assignment]
    waits = 0

    def __init__(self, values: npt.NDArray[Any]) -> None:
        if values.dtype.name not in TYPES:
            raise TypeError(f"no such element type here: {values.dtype.name}")
        self._values = values

    def __array__(self, *args: object, **kwargs: object) -> npt.NDArray[Any]:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, function: Any, *args: object, **kwargs: object) -> Any:
        raise TypeError(f"numpy.{function.__name__} got an array of another namespace")

    def __array_function__(self, function: Any, *args: object) -> Any:
        raise TypeError(f"numpy.{function.__name__} got an array of another namespace")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("looping over the elements of a GPU's array takes one transfer each")

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._values.dtype

    @property
    def size(self) -> int:
        return self._values.size

    def astype(self, dtype: npt.DTypeLike) -> StrictArray:
        wanted = np.dtype(dtype)
        values = self._values
        if (values.dtype.name, wanted.name) == ("float64", "float16"):
            values = _quiet(lambda: values.astype(np.float32))
        made = _quiet(lambda: values.astype(wanted))
        if {values.dtype.name, wanted.name} == {"float32", "float64"}:
            made = np.where(np.abs(values) < SMALLEST_NORMAL, np.copysign(wanted.type(0.0), made), made)
        return StrictArray(made)

    def view(self, dtype: npt.DTypeLike) -> StrictArray:
        return StrictArray(self._values.view(np.dtype(dtype)))

    def swapaxes(self, one: int, other: int) -> StrictArray:
        return StrictArray(self._values.swapaxes(one, other))

    def transpose(self, *axes: int) -> StrictArray:
        return StrictArray(self._values.transpose(*axes))

    def reshape(self, *shape: int) -> StrictArray:
        return StrictArray(self._values.reshape(*shape))

    def any(self, axis: int | None = None) -> StrictArray:
        return StrictArray(np.asarray(self._values.any(axis)))

    def sum(self, axis: int) -> StrictArray:
        return StrictArray(_quiet(lambda: self._values.sum(axis)))

    def max(self, axis: int) -> StrictArray:
        return StrictArray(self._values.max(axis))

    def min(self, axis: int) -> StrictArray:
        return StrictArray(self._values.min(axis))

    def argmax(self, axis: int) -> StrictArray:
        return StrictArray(self._values.argmax(axis))

    def __getitem__(self, index: Any) -> StrictArray:
        parts = index if type(index) is tuple else (index,)
        if not all(part is None or type(part) in (int, slice) for part in parts):
            raise TypeError(f"an index is made of int, slice and None, not {index!r}")
        return StrictArray(np.asarray(self._values[index]))

    def __setitem__(self, index: Any, values: StrictArray) -> None:
        if type(values) is not StrictArray or not all(type(part) is slice for part in index):
            raise TypeError("what is set is a block, to values of the same namespace")
        self._values[index] = values._values

    def __invert__(self) -> StrictArray:
        return StrictArray(~self._values)

    def _number(self) -> Any:
        if self._values.size != 1:
            raise TypeError("only an array with one element is a number")
        StrictArray.waits += 1
        return self._values.reshape(())[()]

    def __bool__(self) -> bool:
        return bool(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())


StrictArray.__qualname__ = "ndarray"

_BINARY = {
    "add": "__add__", "subtract": "__sub__", "multiply": "__mul__", "true_divide": "__truediv__",
    "remainder": "__mod__", "bitwise_and": "__and__", "bitwise_or": "__or__", "bitwise_xor": "__xor__",
    "left_shift": "__lshift__", "right_shift": "__rshift__", "equal": "__eq__", "not_equal": "__ne__", "less": "__lt__",
    "less_equal": "__le__", "greater": "__gt__", "greater_equal": "__ge__",
}  # fmt: skip
REFLECTED = {name: f"__r{name[2:]}" for name in ("__add__", "__sub__", "__mul__", "__truediv__", "__and__", "__or__")}


def _quiet(call: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    with np.errstate(all="ignore"):
        return call()


def _operand(value: Any) -> Any:
    if type(value) is StrictArray:
        return value._values
    if type(value) in SCALARS:
        return value
    raise TypeError(f"{type(value).__module__}.{type(value).__name__} beside an array of another namespace")


def _add_operators() -> None:
    def binary(function: Any) -> Callable[[StrictArray, Any], StrictArray]:
        return lambda self, other: StrictArray(np.asarray(_quiet(lambda: function(self._values, _operand(other)))))

    def reflected(function: Any) -> Callable[[StrictArray, Any], StrictArray]:
        return lambda self, other: StrictArray(np.asarray(_quiet(lambda: function(_operand(other), self._values))))

    for function, name in _BINARY.items():
        setattr(StrictArray, name, binary(getattr(np, function)))
        if name in REFLECTED:
            setattr(StrictArray, REFLECTED[name], reflected(getattr(np, function)))


_add_operators()


def _function(name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        decides = args[1:] if name == "where" else args
        if type(args[0]) is not StrictArray or not any(type(decide) is StrictArray for decide in decides):
            raise TypeError(f"{name} of Python numbers alone: of which type is the result?")
        operands = [arg if name == "broadcast_to" and type(arg) is tuple else _operand(arg) for arg in args]
        result = _quiet(lambda: getattr(np, name)(*operands))
        if isinstance(result, tuple):
            return tuple(StrictArray(np.asarray(each)) for each in result)
        return StrictArray(np.asarray(result))

    call.__name__ = name
    return call


def on_device(values: npt.NDArray[Any]) -> StrictArray:
    """A copy as a GPU's driver makes it: of bfloat16 the bits."""
    copied = np.array(values)
    return StrictArray(copied.view(np.uint16) if copied.dtype.name == "bfloat16" else copied)


def on_host(array: StrictArray) -> npt.NDArray[Any]:
    """The NumPy array inside."""
    return array._values


@contextmanager
def strict_namespace() -> Iterator[ModuleType]:
    """Makes `strict` and, where its error function is, `strictx.scipy.special` modules for a while."""
    namespace, special = ModuleType(NAME), ModuleType(f"{NAME}x.scipy.special")
    for name in FUNCTIONS:
        setattr(namespace, name, _function(name))
    namespace.concatenate = lambda parts: StrictArray(  # type: ignore[attr-defined]
        np.concatenate([_operand(part) for part in parts])
    )
    namespace.zeros = lambda shape, dtype=float: StrictArray(np.zeros(shape, dtype))  # type: ignore[attr-defined]
    special.erf = lambda values: StrictArray(numpy_erf(values._values))  # type: ignore[attr-defined]
    StrictArray.waits = 0
    modules = {each.__name__: each for each in (namespace, special)}
    sys.modules.update(modules)
    try:
        yield namespace
    finally:
        for name in modules:
            del sys.modules[name]
