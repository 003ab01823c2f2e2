"""Operands in a GPU's memory between zones that must stay untouched, poisoned before each run."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from codegen.arrays import Array, compared, joined
from codegen.dtypes import dtype
from codegen.operand import Operand
from codegen.plan.verification_plan import differing
from workers.cpu.library import POISON, WIDEST_ACCESS, alignment_of
from workers.gpu.interface import Gpu

# A kernel that writes beside a buffer begins right beside it. The wide zones stand where a kernel is verified; there
# may be thousands of buffers to time it with.
WIDE_GUARD = 64 * 1024
NARROW_GUARD = 4096
# What cudaMalloc and frameworks align to: the address that a kernel is timed with.
ALLOCATION = 256


class DeviceTensor:
    """One operand. `view` has its shape and strides; gaps between its rows, and all around it, are poison.

    Its address is a multiple of `alignment` bytes and, below `ALLOCATION`, of nothing better: an access that is wider
    than the operand's class promises must not work by luck. Elements of bfloat16 are their bits as uint16: not every
    namespace has the type.
    """

    def __init__(self, gpu: Gpu, operand: Operand, *, guard: int, alignment: int) -> None:
        self.operand = operand
        element = stored_as(operand.dtype)
        size = operand.elements * element.itemsize
        self._memory = gpu.arrays.empty(size + 2 * guard + 2 * ALLOCATION, dtype=np.uint8)
        start = guard + -(gpu.address(self._memory) + guard) % ALLOCATION
        if alignment < ALLOCATION:
            start += alignment
        self._start, self._end = start, start + size
        self._flat = self._memory[start : self._end].view(element)
        self.pointer = gpu.address(self._flat)
        strides = tuple(stride * element.itemsize for stride in operand.strides)
        self.view: Array = import_module(f"{gpu.arrays.__name__}.lib.stride_tricks").as_strided(
            self._flat, operand.shape, strides
        )
        self._gpu = gpu
        self.wipe()

    @property
    def bytes(self) -> int:
        return self._end - self._start

    @cached_property
    def _gaps(self) -> Array | None:
        """The elements between rows; null where none."""
        if self.operand.contiguous:
            return None
        covered = self._gpu.arrays.zeros(self._flat.shape, dtype=np.uint8)
        stride_tricks = import_module(f"{self._gpu.arrays.__name__}.lib.stride_tricks")
        stride_tricks.as_strided(covered, self.operand.shape, self.operand.strides)[...] = 1
        return None if bool(covered.all()) else covered == 0

    def poison(self) -> None:
        """The operand itself and its gaps; the zones around it keep what is in them."""
        self._memory[self._start : self._end] = POISON

    def wipe(self) -> None:
        """The operand, its gaps and the zones around it, as they were at first."""
        self._memory[...] = POISON

    def fill(self, values: Array) -> None:
        """`values`: of the operand's logical shape, as `on_device` gives them."""
        if not self.operand.contiguous:
            self.poison()
        self.view[...] = values

    def bits(self) -> Array:
        """A copy of the operand's elements."""
        return self.view.copy()

    def harm(self) -> str | None:
        """Where something was written beside the operand; null where nothing was."""
        name = self.operand.name
        before = _first(self._memory[: self._start][::-1] != POISON)
        if before is not None:
            return f"wrote outside of {name}, {before + 1} bytes before it"
        behind = _first(self._memory[self._end :] != POISON)
        if behind is not None:
            return f"wrote outside of {name}, {behind} bytes behind its end"
        if self._gaps is not None:
            elements = self._memory[self._start : self._end].reshape(-1, self._flat.itemsize)
            gap = _first(self._gaps & (elements != POISON).any(axis=1))
            if gap is not None:
                return f"wrote between the rows of {name}, at element {gap}"
        return None


class Outputs:
    """What a call writes: of several tensors all elements, one tensor behind the other."""

    def __init__(self, tensors: Sequence[DeviceTensor]) -> None:
        self.tensors = tensors

    def poison(self) -> None:
        for tensor in self.tensors:
            tensor.poison()

    def values(self) -> Array:
        """As a reference has them."""
        return compared([(tensor.view, tensor.operand.dtype) for tensor in self.tensors])

    def bits(self) -> Array:
        """A copy of all elements; of several tensors, which may be of different types, their bytes."""
        if len(self.tensors) == 1:
            return self.tensors[0].bits()
        return joined([tensor.bits().reshape(-1).view(np.uint8) for tensor in self.tensors])


class Operands:
    """`verifying`: addresses no better aligned than promised, wide zones; else as a framework allocates."""

    def __init__(self, gpu: Gpu, operands: Sequence[Operand], *, verifying: bool) -> None:
        self.tensors = [
            DeviceTensor(
                gpu,
                operand,
                guard=WIDE_GUARD if verifying else NARROW_GUARD,
                alignment=alignment_of(operand) if verifying else ALLOCATION,
            )
            for operand in operands
        ]
        self.out = Outputs([tensor for tensor in self.tensors if tensor.operand.role == "out"])
        self.pointers = tuple(tensor.pointer for tensor in self.tensors)
        self._written: Mapping[str, Array] = {}

    def write(self, inputs: Mapping[str, Array]) -> None:
        self._written = inputs
        for tensor in self.tensors:
            if tensor.operand.role == "in":
                tensor.fill(inputs[tensor.operand.name])

    def restore(self) -> None:
        """As after `write` into new buffers, whatever runs have done to zones, gaps and inputs."""
        for tensor in self.tensors:
            tensor.wipe()
        self.write(self._written)

    def harm(self) -> str | None:
        """What runs did that they must not: something written beside a buffer, or an input that was changed."""
        for tensor in self.tensors:
            if message := tensor.harm():
                return message
            if tensor.operand.role == "in" and (changed := differing(tensor.view, self._written[tensor.operand.name])):
                return f"changed {changed} elements of its input {tensor.operand.name}"
        return None


def workspace(gpu: Gpu, size: int, *, verifying: bool) -> DeviceTensor | None:
    """Exactly as many bytes as a call asks for; null for 0."""
    if not size:
        return None
    operand = Operand("workspace", "uint8", "out", (size,), (1,))
    guard, alignment = (WIDE_GUARD, WIDEST_ACCESS) if verifying else (NARROW_GUARD, ALLOCATION)
    return DeviceTensor(gpu, operand, guard=guard, alignment=alignment)


def on_device(gpu: Gpu, inputs: Mapping[str, np.ndarray[Any, Any]], operands: Sequence[Operand]) -> dict[str, Array]:
    """Host inputs, as `Operator.make_inputs` gives them, in the GPU's memory, of their logical shapes."""
    types = {operand.name: stored_as(operand.dtype) for operand in operands}
    arrays = {}
    for name, values in inputs.items():
        # What a stride of 0 repeats is sent once.
        once = values[tuple(slice(1 if stride == 0 else None) for stride in values.strides)]
        sent = gpu.arrays.asarray(np.ascontiguousarray(once).view(types[name]).reshape(once.shape))
        arrays[name] = gpu.arrays.broadcast_to(sent, values.shape)
    return arrays


def stored_as(name: str) -> np.dtype[Any]:
    """The type of an operand's elements in an array."""
    return np.dtype(np.uint16) if name == "bfloat16" else dtype(name).numpy


def _first(wrong: Array) -> int | None:
    return int(wrong.argmax()) if bool(wrong.any()) else None
