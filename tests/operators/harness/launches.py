"""What Python says of a candidate's launches is what its launch code does. One program has the launch code of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from os.path import commonprefix
from pathlib import Path

import pytest

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.text.render_library import render_plan
from tests.operators.harness.declarations import SM_90A, Declarations
from tests.support.fixtures.compile import LIMITS
from workers.compile.compile_file import FileCompiler
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes

TABLES = {
    "planned": lambda declared: {name: name for name in declared.launches.planned},
    "counted": lambda declared: {name: (name, count) for name, (_, count) in declared.launches.counted.items()},
}


@dataclass(frozen=True)
class Planned:
    function: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int

    @property
    def blocks(self) -> int:
        return prod(self.grid)


Plan = tuple[Candidate, list[Planned], int]
"""Of a candidate its launches, and bytes of workspace."""
Plans = Mapping[tuple[str, str], list[Plan]]


def plans_of(
    candidates: Sequence[Candidate],
    folder: Path,
    toolchain: Toolchain,
    processes: Processes,
) -> list[Plan]:
    texts = [render_plan(candidate) for candidate in candidates]
    # What all begin with, up to the kernels' own namespaces.
    head = commonprefix(texts).rpartition("\nnamespace ")[0] + "\n"  # noqa: RUF071
    parts = [
        f"namespace plan_{number} {{\n{text[len(head) :].replace('int main()', 'void show()')}}}\n"
        for number, text in enumerate(texts)
    ]
    calls = "".join(f"  plan_{number}::show();\n" for number in range(len(texts)))
    main = f"int main() {{\n{calls}}}\n"
    shown = FileCompiler(folder, toolchain, processes, LIMITS).run_program("".join([head, *parts, main]), "plans")
    rows = iter([list(map(int, line.split())) for line in shown.splitlines()])
    result = []
    for candidate in candidates:
        names, launches = operator(candidate.kernel.operator).functions(candidate.kernel), []
        # The last line is the workspace alone.
        while len(row := next(rows)) > 1:
            launches.append(Planned(names[row[0]], (row[1], row[2], row[3]), prod(row[4:7]), row[7]))
        result.append((candidate, launches, row[0]))
    return result


@pytest.fixture(scope="module")
def plans(
    request: pytest.FixtureRequest, toolchain: Toolchain, processes: Processes,
    tmp_path_factory: pytest.TempPathFactory,
) -> Plans:  # fmt: skip
    """By operator and name."""
    asked: list[tuple[tuple[str, str], Candidate]] = []
    for declared in request.module.DECLARED:
        if (of := declared.launches) is not None:
            for name, candidates in of.planned.items():
                asked += [((declared.operator, name), candidate) for candidate in candidates()]
            asked += [((declared.operator, name), candidate()) for name, (candidate, _) in of.counted.items()]
    made: dict[tuple[str, str], list[Plan]] = {}
    for name in dict.fromkeys(each for (each, _), _ in asked):  # one program has the code of one operator
        some = [(key, candidate) for key, candidate in asked if key[0] == name]
        plans = plans_of([candidate for _, candidate in some], tmp_path_factory.mktemp("plans"), toolchain, processes)
        for (key, _), plan in zip(some, plans, strict=True):
            made.setdefault(key, []).append(plan)
    return made


def test_the_launches_are_what_cost_and_work_say(declared: Declarations, planned: str, plans: Plans) -> None:
    op, of = declared.op, declared.launches
    assert of is not None
    for candidate, launches, workspace in plans[declared.operator, planned]:
        problem, kernel, schedule = candidate.problem, candidate.kernel, of.bound(candidate)
        cost, work = op.cost(problem, schedule), op.work(problem, schedule, SM_90A)
        assert (len(launches), workspace) == (cost.launches, cost.workspace_bytes), schedule
        assert tuple(launch.function for launch in launches) == op.functions(kernel), schedule
        assert max(launch.shared_bytes for launch in launches) == op.shared_bytes(kernel), schedule
        bounds = [op.launch_bounds(kernel, launch.function).threads for launch in launches]
        assert [launch.threads for launch in launches] == bounds, schedule
        (run,) = (launch for launch in launches if launch.function == "run")
        others = [launch for launch in launches if launch is not run]
        for launch, said in zip([run, *others], [work, *work.others], strict=True):
            predicted = (said.blocks, said.threads, said.dynamic_shared_bytes)
            assert (launch.blocks, launch.threads, launch.shared_bytes) == predicted, (schedule, launch)


def test_a_problem_has_so_many_launches(declared: Declarations, counted: tuple[str, int], plans: Plans) -> None:
    name, expected = counted
    ((_, launches, _),) = plans[declared.operator, name]
    assert len(launches) == expected
