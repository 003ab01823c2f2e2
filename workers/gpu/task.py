"""What the child that owns a GPU reads and what it answers, as JSON: a task file, then one line per answer.

Lines, each marked (`workers.processes.child_protocol`): `{"waiting": holder}` while another process has the GPU,
`{"ready": {"device": …, "state": …, "threads": …}}` once it is ours and has computed something right, `{"start":
candidate}` before anything of a candidate is run (`VENDOR`: of the vendor's library), `{"beat": what}` where something
takes long, `{"candidate": CandidateResult}` after it,
`{"comparison": Comparison}` at the end of a compare task, null where no candidate was left to compare. Or
`{"gone": message}`: there is no such GPU, or it computes nothing right; `{"failed": message}`: the child itself failed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from codegen.operators import operator

TaskKind = Literal["measure", "compare"]
VENDOR = "vendor"  # no candidate has that name


@dataclass(frozen=True)
class TaskCandidate:
    """`problem` indexes the task's problems; `library` is the path of a library that holds its kernel. `proven`: its
    code has passed the reduced test plan on such a GPU before, so only its own problem is left to be verified."""

    candidate: str
    problem: int
    schedule: Mapping[str, Any]
    library: str
    proven: bool = False


@dataclass(frozen=True)
class GpuTask:
    """`measure`: verify and time each candidate. `compare`: time all candidates, which are right and belong to the one
    problem, against each other and the vendor's library, in one process.

    `gpu` names the module that drives the device (see `workers.gpu.interface`), `device` its UUID, `lease` the file
    that is locked while it is used. `problems` are canonical, `operators` the folders of the operators by name.
    `best_us`: the best time so far by problem index; one that is clearly slower is dropped early. `seconds`: of one
    candidate's samples. `vendor`: whether to compare with the vendor's library.
    """

    kind: TaskKind
    gpu: str
    device: str
    lease: str
    operators: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    problems: tuple[Mapping[str, Any], ...] = ()
    candidates: tuple[TaskCandidate, ...] = ()
    best_us: Mapping[int, float] = field(default_factory=dict)
    seconds: float = 0.3
    vendor: bool = True

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "best_us": {str(index): us for index, us in self.best_us.items()}}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "GpuTask":
        return GpuTask(
            **{
                **data,
                "problems": tuple(data["problems"]),
                "candidates": tuple(TaskCandidate(**entry) for entry in data["candidates"]),
                "best_us": {int(index): us for index, us in data["best_us"].items()},
            }
        )


class Wanted(NamedTuple):
    """A candidate to measure or compare. `key` is that of its problem, which is canonical; else as `TaskCandidate`."""

    key: Any
    problem: Mapping[str, Any]
    candidate: str
    schedule: Mapping[str, Any]
    library: str
    proven: bool


def gpu_task(kind: TaskKind, wanted: Sequence[Wanted], best: Mapping[Any, float], **where: Any) -> GpuTask:
    """One task, problem by problem. `best`: the best time so far by the problem's key; `where`: the other fields."""
    problems = {entry.key: entry.problem for entry in wanted}
    index_of = {key: index for index, key in enumerate(problems)}
    names = {str(problem["operator"]) for problem in problems.values()}
    return GpuTask(
        kind,
        operators={name: str(operator(name).folder) for name in names},
        problems=tuple(problems.values()),
        candidates=tuple(
            TaskCandidate(entry.candidate, index_of[entry.key], entry.schedule, entry.library, entry.proven)
            for entry in wanted
        ),
        best_us={index_of[key]: us for key, us in best.items() if key in index_of},
        **where,
    )


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
