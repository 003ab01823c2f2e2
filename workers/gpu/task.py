"""What the child that owns a GPU reads and what it answers, as JSON: a task file, then one line per answer.

Lines, each marked (`workers.processes.child_protocol`): `{"waiting": holder}` while another process has the GPU,
`{"ready": {"device": …, "state": …, "threads": …}}` once it is ours and has computed something right, `{"start":
candidate}` before anything of a candidate is run (`VENDOR`: of the vendor's library), `{"beat": what}` where something
takes long, `{"candidate": CandidateResult}` after it,
`{"comparison": {"problem": key, "result": Comparison}}` of each problem of a compare task, null where no candidate was
left to compare. Or
`{"gone": message}`: there is no such GPU, or it computes nothing right; `{"failed": message}`: the child itself failed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from codegen.operators import operator

TaskKind = Literal["measure", "compare"]
VENDOR = "vendor"  # no candidate has that name


@dataclass(frozen=True)
class TaskCandidate:
    """`problem` is the key of one of the task's; `library` the path of a library that holds its kernel. `verified`: its
    code has passed the reduced test plan on such a GPU before, so only its own problem is left to be verified."""

    candidate: str
    problem: str
    schedule: Mapping[str, Any]
    library: str
    verified: bool = False


@dataclass(frozen=True)
class GpuTask:
    """`measure`: verify and time each candidate. `compare`: problem by problem, time all its candidates, which are
    right, against each other and the vendor's library, in one process.

    `gpu` names the module that drives the device (see `workers.gpu.interface`), `device` its UUID, `lease` the file
    that is locked while it is used. `problems` are canonical, by any key; `operators`: see `operator_folders`.
    `best_us`: the best time so far by problem; one that is clearly slower is dropped early. `seconds`: of one
    candidate's samples. `vendor`: whether to compare with the vendor's library; not in the problems `without_vendor`.
    """

    kind: TaskKind
    gpu: str
    device: str
    lease: str
    operators: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    problems: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    candidates: tuple[TaskCandidate, ...] = ()
    best_us: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.3
    vendor: bool = True
    without_vendor: tuple[str, ...] = ()

    def of_problem(self, key: str) -> "GpuTask":
        """The part of a compare task that is of one of its problems."""
        own = tuple(entry for entry in self.candidates if entry.problem == key)
        return replace(self, candidates=own, vendor=self.vendor and key not in self.without_vendor)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "GpuTask":
        candidates = tuple(TaskCandidate(**entry) for entry in data["candidates"])
        return GpuTask(**{**data, "candidates": candidates, "without_vendor": tuple(data["without_vendor"])})


def operator_folders(problems: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Of the operators of canonical problems, by name."""
    names = {str(problem["operator"]) for problem in problems}
    return {name: str(operator(name).folder) for name in names}


@dataclass(frozen=True)
class CandidateResult:
    """As the CPU's verdicts; `measurement`: `cukiln.types.Measurement` as JSON. `tainted`: its process has ended."""

    candidate: str
    verdict: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    measurement: dict[str, Any] | None = None
    verify_wall: float = 0.0
    verify_cpu: float = 0.0
    measure_wall: float = 0.0
    measure_cpu: float = 0.0
    tainted: bool = False
