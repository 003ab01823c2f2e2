"""Runs of candidates in a CPU build that counts, beside what the operator says that they do."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.kernel import Candidate
from codegen.operators import operator
from tests.support.kernels.cpu_helpers import LIMITS, processes, toolchain
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary


class _Count(ctypes.Structure):
    """`cukiln::cpu::Count` of counts.h."""

    _fields_ = (
        ("primitive", ctypes.c_char_p),
        ("function", ctypes.c_int32),
        ("times", ctypes.c_uint64),
        ("multiplications", ctypes.c_uint64),
        ("bytes_read", ctypes.c_uint64),
        ("bytes_written", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Count:
    """What a primitive did in all launches of one of the kernel's functions. `times`: of lanes, or of warps where they
    execute it together. Of global memory two kinds of bytes are counted: those that lanes ask for, by primitive, and
    under the name `sectors` the sectors of 32 bytes that a launch touches, each once."""

    primitive: str
    function: int
    times: int
    multiplications: int
    bytes_read: int
    bytes_written: int


def counts_of(path: Path) -> tuple[Count, ...]:
    """Of the last run of a library that was built to count, in the order of launches."""
    library, counts, count = ctypes.CDLL(str(path)), list[Count](), _Count()
    while library.cukiln_count(len(counts), ctypes.byref(count)):
        fields = {name: getattr(count, name) for name, _ in _Count._fields_}
        counts.append(Count(**{**fields, "primitive": count.primitive.decode()}))
    return tuple(counts)


@dataclass(frozen=True)
class Counted:
    """What a run was counted to do, by function and primitive."""

    functions: tuple[str, ...]
    counts: tuple[Count, ...]

    def of(self, function: str | None = None) -> dict[str, Count]:
        """By primitive: of one function, or the sums of all."""
        found: dict[str, list[Count]] = {}
        for count in self.counts:
            if function is None or self.functions[count.function] == function:
                found.setdefault(count.primitive, []).append(count)
        return {name: _sum(counts) for name, counts in found.items()}

    def moved(self, function: str | None = None) -> tuple[int, int]:
        """Bytes that lanes asked for, read and written."""
        asked = [count for name, count in self.of(function).items() if name != "sectors"]
        return sum(count.bytes_read for count in asked), sum(count.bytes_written for count in asked)

    def sectors(self, function: str | None = None) -> tuple[int, int]:
        """Bytes of the sectors that launches touch, read and written."""
        count = self.of(function)["sectors"]
        return count.bytes_read, count.bytes_written


def _sum(counts: Sequence[Count]) -> Count:
    fields = ("times", "multiplications", "bytes_read", "bytes_written")
    return Count(
        counts[0].primitive, counts[0].function, *(sum(getattr(count, field) for count in counts) for field in fields)
    )


def count_runs(
    candidates: Mapping[str, Candidate], folder: Path, masks: Mapping[str, NDArray[Any]] | None = None
) -> dict[str, Counted]:
    """A run of each, by name. `masks`: by name, where not all elements of one are set."""
    kernels = {candidate.kernel.id: candidate.kernel for candidate in candidates.values()}
    build = build_cpu(list(kernels.values()), toolchain(), processes(), LIMITS, folder=folder, counting=True)
    assert not build.errors, build.errors
    libraries = {kernel.id: path for path, group in build.libraries for kernel in group}
    return {
        name: _run(libraries[candidate.kernel.id], candidate, (masks or {}).get(name))
        for name, candidate in candidates.items()
    }


def _run(path: Path, candidate: Candidate, mask: NDArray[Any] | None) -> Counted:
    library = CpuLibrary(path)
    op, problem = operator(candidate.problem.operator), candidate.problem
    integers, launch = op.integers(problem), op.launch_values(candidate.schedule)
    inputs = op.make_inputs(problem, "integer", np.random.default_rng(1))
    try:
        tensors = library.allocate(op.operands(problem))
        workspace = library.workspace(candidate.kernel.namespace, integers, launch)
        for tensor in tensors:
            if tensor.operand.role == "in":
                values = inputs[tensor.operand.name]
                if tensor.operand.name == "mask":
                    values = np.full_like(values, -1 if values.dtype == np.int32 else 1) if mask is None else mask
                tensor.fill(values)
        outcome = library.run(
            candidate.kernel.namespace, tensors, workspace, integers=integers, launch=launch,
            scalars=op.scalars(problem), order="ascending", seed=1, exact=True, cpu_seconds=120.0,
        )  # fmt: skip
        assert outcome.status == "ok", outcome.message
        return Counted(op.functions(candidate.kernel), counts_of(path))
    finally:
        tensors = []
        library.free()
