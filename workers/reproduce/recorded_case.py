"""A case of a test plan as files: operands, inputs, reference and bound, for machines without the operator.

```
cases/NAME/case.json       RecordedCase: operands, extents, attributes, scalars, how it is compared, the runs
cases/NAME/OPERAND.npy     one for each input, of its logical shape; of bfloat16 the bits as uint16
cases/NAME/expected.npy    float64, as is bound.npy: what |out - expected| may be
```
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from codegen.dtypes import dtype
from codegen.operand import Operand
from codegen.plan.verification_plan import Case, Kind, Run


@dataclass(frozen=True)
class RecordedCase:
    """`runs`: of the CPU, in an order of warps; on a GPU each launch runs twice, `same_bits` or not."""

    name: str
    venue: Literal["cpu", "gpu"]
    kind: Kind
    exact: bool
    seed: int
    same_bits: bool
    extents: tuple[int, ...]
    attributes: tuple[int, ...]
    scalars: tuple[float, ...]
    operands: tuple[Operand, ...]
    runs: tuple[Run, ...]

    # What a test plan's problem has; the verification that was recorded says it.
    sum_length = None

    @property
    def integers(self) -> tuple[int, ...]:
        return (*self.extents, *self.attributes)

    @property
    def launches(self) -> tuple[tuple[int, ...], ...]:
        return tuple(dict.fromkeys(run.launch for run in self.runs))

    def write(
        self, folder: Path, inputs: Mapping[str, NDArray[Any]], expected: NDArray[Any], bound: NDArray[Any]
    ) -> None:
        """Into `folder`/NAME, which must not exist."""
        here = folder / self.name
        here.mkdir(parents=True)
        for operand in self.operands:
            if operand.role == "in":
                np.save(here / f"{operand.name}.npy", _as_bits(inputs[operand.name], operand.dtype))
        np.save(here / "expected.npy", expected)
        np.save(here / "bound.npy", np.ascontiguousarray(np.broadcast_to(bound, expected.shape)))
        (here / "case.json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> "RecordedCase":
        data = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        operands = tuple(
            Operand(**{**fields, "shape": tuple(fields["shape"]), "strides": tuple(fields["strides"])})
            for fields in data.pop("operands")
        )
        runs = tuple(Run(**{**fields, "launch": tuple(fields["launch"])}) for fields in data.pop("runs"))
        lists: dict[str, Any] = {name: tuple(data.pop(name)) for name in ("extents", "attributes", "scalars")}
        return RecordedCase(**data, **lists, operands=operands, runs=runs)


class RecordedOperator:
    """Answers for recorded cases what their operator answered: the cases stand for the problems."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def cases(self, venue: Literal["cpu", "gpu"]) -> list[RecordedCase]:
        cases = [RecordedCase.read(path.parent) for path in sorted(self._folder.glob("*/case.json"))]
        return [case for case in cases if case.venue == venue]

    def plan(self) -> list[Case]:
        """The CPU's cases as those of a test plan."""
        return [Case(cast(Any, case), case.kind, case.exact, case.seed, case.runs) for case in self.cases("cpu")]

    def extents(self, problem: RecordedCase, /) -> list[int]:
        return list(problem.extents)

    def integers(self, problem: RecordedCase, /) -> list[int]:
        return list(problem.integers)

    def scalars(self, problem: RecordedCase, /) -> list[float]:
        return list(problem.scalars)

    def operands(self, problem: RecordedCase, /) -> tuple[Operand, ...]:
        return problem.operands

    def make_inputs(self, problem: RecordedCase, kind: Kind, rng: np.random.Generator, /) -> dict[str, NDArray[Any]]:
        inputs = (operand for operand in problem.operands if operand.role == "in")
        return {operand.name: self._load(problem, operand.name).view(dtype(operand.dtype).numpy) for operand in inputs}

    def reference(
        self, problem: RecordedCase, inputs: Mapping[str, Any], /, exact: bool = False
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._load(problem, "expected"), self._load(problem, "bound")

    def _load(self, case: RecordedCase, name: str) -> NDArray[Any]:
        return cast("NDArray[Any]", np.load(self._folder / case.name / f"{name}.npy", allow_pickle=False))


def _as_bits(values: NDArray[Any], name: str) -> NDArray[Any]:
    """As NumPy alone can write them."""
    contiguous = np.ascontiguousarray(values, dtype(name).numpy).reshape(values.shape)
    return contiguous.view(np.uint16) if name == "bfloat16" else contiguous
