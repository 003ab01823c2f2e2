"""Kernels that compute their operator's float64 reference, on what a framework hands to them, and a service that has
them for every problem."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from codegen.dtypes import dtype
from codegen.operators import operator
from codegen.problem import Problem
from cukiln.types import FrontEntry, LookedUp, WinnerRecord
from tests.support.fixtures.client import record_json

Change = Callable[[dict[str, Any]], dict[str, Any]]


class ReferenceKernel:
    """It refuses operands, attributes and scalars other than those of its very problem."""

    def __init__(self, problem: dict[str, Any], workspace: int = 0) -> None:
        self.operator = operator(problem["operator"])
        self.problem: Problem = self.operator.parse(problem)
        self.workspace, self.prepared = workspace, 0
        self._ran: list[None] = []  # appending is safe among threads

    @property
    def calls(self) -> int:
        return len(self._ran)

    def prepare(self, device: int) -> None:
        self.prepared += 1

    def workspace_bytes(self, *tensors: torch.Tensor) -> int:
        assert tensors
        return self.workspace

    def bound(self, *, attributes: tuple[int, ...], scalars: tuple[float, ...]) -> Callable[..., None]:
        assert attributes == tuple(self.operator.attributes(self.problem))
        assert scalars == tuple(self.operator.scalars(self.problem))
        return self._run

    def _run(self, *given: Any) -> None:
        operands = self.operator.operands(self.problem)
        if self.workspace:
            *given, address = given  # type: ignore[assignment]
            assert address % 16 == 0
        assert len(given) == len(operands)
        inputs: dict[str, NDArray[Any]] = {}
        for operand, tensor in zip(operands, given, strict=True):
            assert _dtype(tensor) == operand.dtype, operand
            assert _same(tensor, operand.shape, operand.strides), (operand, tensor.shape, tensor.stride())
            if operand.role == "in":
                array = _array(tensor)
                shared = array.size != np.prod(operand.shape)  # one matrix for a batch
                inputs[operand.name] = (np.broadcast_to if shared else np.reshape)(array, operand.shape)  # type: ignore[operator]
        expected, _ = self.operator.reference(self.problem, inputs)
        outs = [tensor for operand, tensor in zip(operands, given, strict=True) if operand.role == "out"]
        for tensor, values in zip(outs, expected if isinstance(expected, Sequence) else [expected], strict=True):
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(values)).reshape(tensor.shape))
        self._ran.append(None)


def _dtype(tensor: torch.Tensor) -> str:
    """As a library reads it: a bool is a byte."""
    return "uint8" if tensor.dtype is torch.bool else str(tensor.dtype).removeprefix("torch.")


def _same(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """As a library compares: axes of one index and a batch of one matrix are no difference."""
    have = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s > 0]
    need = [(n, s) for n, s in zip(shape, strides, strict=True) if n > 1 and s > 0]
    return have == need or (tensor.is_contiguous() and tensor.numel() == np.prod(shape) and _packed(shape, strides))


def _packed(shape: Sequence[int], strides: Sequence[int]) -> bool:
    return all(n == 1 or s == np.prod(shape[i + 1 :]) for i, (n, s) in enumerate(zip(shape, strides, strict=True)))


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(dtype("bfloat16").numpy)
    return tensor.numpy()


@dataclass
class PlayedService:
    """A client whose service has a kernel for every problem, but those that `lacks` says; `change` makes the record
    another one. `asked`: the problems, `options`: of the last lookup."""

    lacks: Callable[[dict[str, Any]], bool] = lambda problem: False
    change: Change = lambda record: record
    workspace: int = 0
    unanswered: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[ReferenceKernel] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def lookup(self, problems: Sequence[dict[str, Any]], on_miss: str = "none", **options: Any) -> list[LookedUp]:
        self.asked += problems
        self.options = {"on_miss": on_miss, **options}
        return [self._answer(problem) for problem in problems]

    def _answer(self, problem: dict[str, Any]) -> LookedUp:
        if self.unanswered is not None:
            return LookedUp(name=None, key="", record=None, unanswered=self.unanswered)
        if self.lacks(problem):
            return LookedUp(name=None, key="a" * 64, record=None)
        record = self.change(record_json(operator=problem["operator"]))
        said = {name: value for name, value in problem.items() if name != "target"}
        for entry in record["front"]:
            entry["schedule"] = {"problem": json.dumps(said)}
        return LookedUp(name=None, key="a" * 64, record=WinnerRecord.model_validate(record), at=1.0)

    def load(self, entry: FrontEntry, client: Any) -> ReferenceKernel:
        self.kernels.append(ReferenceKernel(json.loads(entry.schedule["problem"]), self.workspace))
        return self.kernels[-1]

    @property
    def calls(self) -> int:
        return sum(kernel.calls for kernel in self.kernels)
