"""What nvcc compiles (a kernel) and what is verified and measured (a candidate)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from codegen.identity import candidate_id, kernel_id
from codegen.problem import Problem
from codegen.search.schedule import Schedule

SignatureValue = int | str | bool | tuple[str, ...]


@dataclass(frozen=True, order=True)
class Kernel:
    """A signature with its compile-time tunables; extents and launch-time tunables are run-time arguments.

    `signature` are (name, value) pairs sorted by name; lists in it are tuples.
    """

    operator: str
    signature: tuple[tuple[str, SignatureValue], ...]
    tunables: Schedule

    @classmethod
    def of(cls, operator: str, signature: Mapping[str, Any], tunables: Schedule) -> "Kernel":
        frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in signature.items()}
        return cls(operator, tuple(sorted(frozen.items())), tunables)

    @cached_property
    def id(self) -> str:
        return kernel_id(self.operator, dict(self.signature), self.tunables.as_dict())

    @property
    def namespace(self) -> str:
        return f"kernel_{self.id[:16]}"

    @cached_property
    def signature_dict(self) -> dict[str, Any]:
        return dict(self.signature)

    def to_json(self) -> dict[str, Any]:
        signature = {name: list(value) if isinstance(value, tuple) else value for name, value in self.signature}
        return {"operator": self.operator, "signature": signature, "tunables": self.tunables.as_dict()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Kernel":
        return cls.of(data["operator"], data["signature"], Schedule.of(data["tunables"]))


@dataclass(frozen=True)
class Candidate:
    """A problem with a schedule. Its id does not depend on generator or toolchain."""

    problem: Problem
    schedule: Schedule
    kernel: Kernel

    @cached_property
    def id(self) -> str:
        return candidate_id(self.problem.digest, self.schedule.as_dict())
