"""Inputs and float64 references on the GPU, made once for all candidates of a problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.arrays import Array, Float64
from codegen.operator import Operator
from codegen.plan.gpu_verification_plan import GpuCase
from workers.gpu.interface import Gpu
from workers.gpu.tensors import on_device


@dataclass(frozen=True)
class Prepared:
    """A case's inputs and what must come out, all on the GPU; `host` are the inputs as they were made."""

    host: Mapping[str, NDArray[Any]]
    inputs: Mapping[str, Array]
    expected: Float64
    bound: Float64


class References:
    """Keeps what was made until `forget`: between problems the memory is needed for the next one. `beat` gets what
    is made, before it is: large ones take long."""

    def __init__(self, gpu: Gpu, beat: Callable[[str], None]) -> None:
        self._gpu = gpu
        self._beat = beat
        self._kept: dict[tuple[tuple[str, str, int], bool], Prepared] = {}

    def of(self, operator: Operator, case: GpuCase, *, keep: bool) -> Prepared:
        key = (case.inputs, case.exact)
        if key in self._kept:
            return self._kept[key]
        extents = list(operator.extents(case.problem))
        self._beat(f"making {case.kind} inputs of extents {extents}")
        host = operator.make_inputs(case.problem, case.kind, np.random.default_rng(case.seed))
        inputs = on_device(self._gpu, host, operator.operands(case.problem))
        self._beat(f"making the reference of {case.kind} inputs of extents {extents}")
        expected, bound = operator.reference(case.problem, inputs, exact=case.exact)
        made = Prepared(host, inputs, expected, bound)
        if keep:
            self._kept[key] = made
        return made

    def forget(self) -> None:
        self._kept.clear()
