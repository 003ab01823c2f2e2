"""Random matmul problems over the whole domain, each with one accepted schedule, and how they are verified on the CPU.

What a case is about (dtype, target, layout, alignment, split, …) goes round in steps that share no factor, so that a
hundred cases have all of it, and so does what chance alone would bring seldom; the extents and the rest are chance.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from codegen.dtypes import dtype
from codegen.epilogue import MAX_NODES
from codegen.kernel import Candidate, Kernel
from codegen.operator import Operator
from codegen.operators import operator
from codegen.operators.matmul.kernel_family import aligns
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.tensor import LEAST_COPY_BYTES
from codegen.problem import Problem
from codegen.search.rules import Accepted
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.targets import target
from tests.support.fixtures.codegen import EVERY_NODE
from tests.support.kernels.cpu_helpers import loaded, processes, verify
from tests.support.kernels.mutants import write_operator
from workers.cpu.verify import KERNEL_CPU_SECONDS, KERNEL_WALL_SECONDS, CpuVerdict
from workers.processes.processes import Processes

# (dtype, allow_tf32); bf16, tf32 and int8 have no tensor cores on sm_75.
KINDS = (("float16", False), ("bfloat16", False), ("float32", True), ("int8", False), ("float32", False))
AMPERE_ONLY = ("bfloat16", "int8")
TARGETS = ("sm_80", "sm_90a", "sm_75")
LAYOUTS = ("nn", "nt", "tn", "tt")
SPLITS = ("level 2", "none", "workspace", "stream", "level 2", "atomic")
GRAINS = (1, 8, 2, 16, 4)  # elements that extents and pitches are multiples of
MOST, TAIL = 200, 600
# Of a problem, padding of its tiles not counted: what a run on the CPU should not exceed.
MOST_PRODUCTS = 2_000_000
SLICES = STREAM_BLOCKS = (2, 3, 5, 7, 16)
# What chance alone would leave out of a few hundreds of cases: one of seven has it by its number. "deep": three
# stages or more on tensor cores that can have them, which takes aligned rows, here packed ones.
FORCED = ("shared operand", "longer extent", "", "another raster", "", "deep", "")
NODES = (0, 1, 2, 0, 3, 1, MAX_NODES)  # of an epilogue, seven cases each
ATTEMPTS = 2000  # schedules that are looked at for one that is accepted
EACH_RUN = 25
"""Random cases of one operator in `make test`, with a fresh seed each time; `make test-long` has 5,000."""
SPREAD = 50
"""Cases whose kinds are counted."""
SPREAD_SEEDS = (2, 1, 3)
"""Of one of them all kinds must come up: what fifty cases of a single seed leave out by chance is no fault."""


def seed_of_this_run() -> int:
    """One in all processes of a run, and where a test is run again alone; fresh unless CUKILN_TEST_SEED is set."""
    return int(os.environ["CUKILN_TEST_SEED"])


def random_cases(count: int, seed: int) -> list[tuple[str, Candidate]]:
    """Targets and candidates."""
    return [_case(number, rng) for number, rng in _numbered(count, seed)]


def random_problems(count: int, seed: int) -> list[tuple[str, MatmulProblem]]:
    """Targets and problems, whether or not there are schedules for them."""
    return [(_target(number), _problem(number, rng)) for number, rng in _numbered(count, seed)]


def _numbered(count: int, seed: int) -> list[tuple[int, random.Random]]:
    rng = random.Random(seed)
    start = rng.randrange(10_000)
    return [(start + number, random.Random(rng.getrandbits(64))) for number in range(count)]


def _case(number: int, rng: random.Random) -> tuple[str, Candidate]:
    arch = _target(number)
    while True:
        schedule = _schedule(_problem(number, rng), arch, SPLITS[number // 2 % 6], FORCED[number % 7], rng)
        if schedule is not None:
            return arch, schedule


def _target(number: int) -> str:
    arch = TARGETS[number // 5 % 3]
    return "sm_86" if arch == "sm_75" and KINDS[number % 5][0] in AMPERE_ONLY else arch


def _problem(number: int, rng: random.Random) -> MatmulProblem:
    element, tf32 = KINDS[number % 5]
    forced, grain = FORCED[number % 7], GRAINS[number // 3 % 5]
    if forced == "deep":
        grain = max(grain, LEAST_COPY_BYTES // dtype(element).bytes)
    outs = ("int32",) if element == "int8" and number // 15 % 3 == 0 else ("float32", "float16", "bfloat16")
    long_k = SPLITS[number // 2 % 6] not in ("level 2", "none")
    batch = rng.choice((2, 3) if forced == "shared operand" else (1, 1, 1, 2, 3))
    m, n, k = _extents(rng, batch, grain, long_k, forced)
    out = rng.choice((*outs, *((element,) if element in outs else ())))
    nodes = () if out == "int32" else rng.choices(EVERY_NODE, k=NODES[number // 7 % 7])
    fields: dict[str, Any] = {"m": m, "n": n, "k": k, "batch": batch, "layout": LAYOUTS[number % 4], "dtype": element}
    fields |= {"allow_tf32": tf32, "out_dtype": out, "epilogue": list(nodes)}
    fields |= {} if forced == "deep" else _gaps(fields, grain, rng)
    if forced == "shared operand":
        fields[f"stride_{rng.choice('ab')}"] = 0
    problem = operator("matmul").parse({"operator": "matmul", **fields})
    assert isinstance(problem, MatmulProblem)
    return problem


def _extents(rng: random.Random, batch: int, grain: int, long_k: bool, forced: str) -> list[int]:
    """m, n, k. `long_k`: with more k-steps than one, so that k can be split."""

    def extent(least: int, most: int) -> int:
        return max(grain, rng.randint(least, max(most, least + 50)) // grain * grain)

    while True:
        leasts = [1, 1, 150 if long_k and rng.random() < 0.8 else 1]
        if forced == "another raster":
            leasts[:2] = [40, 40]  # two tiles of 16, whatever the grain
        mosts = [TAIL if rng.random() < 0.07 else rng.choice((24, 80, MOST)) for _ in leasts]
        if forced == "longer extent":
            axis = rng.randrange(3)
            leasts[axis], mosts[axis] = MOST + max(GRAINS), TAIL
        extents = [extent(least, most) for least, most in zip(leasts, mosts, strict=True)]
        if batch * math.prod(extents) <= MOST_PRODUCTS:
            return extents


def _gaps(problem: Mapping[str, Any], grain: int, rng: random.Random) -> dict[str, int]:
    """Pitches and strides, of some operands only, that leave gaps or repeat a matrix."""
    m, n, k, batch, layout = (problem[name] for name in ("m", "n", "k", "batch", "layout"))
    fields: dict[str, int] = {}
    stored = {"a": (m, k), "b": (k, n), "c": (m, n)}
    for operand, (rows, columns) in stored.items():
        if operand != "c" and layout["ab".index(operand)] == "t":
            rows, columns = columns, rows
        if rng.random() < 0.5:
            columns += rng.randint(1, 3) * rng.choice((grain, grain, 1))
            fields[f"ld{operand}"] = columns
        if batch > 1 and rng.random() < 0.5:
            fields[f"stride_{operand}"] = rows * columns + rng.randint(0, 3) * rng.choice((grain, 1))
        if batch > 1 and operand != "c" and rng.random() < 0.2:
            fields[f"stride_{operand}"] = 0
    return fields


def _schedule(problem: MatmulProblem, arch: str, split: str, forced: str, rng: random.Random) -> Candidate | None:
    """A random accepted schedule: of level 2 as it is, or of wider lists with this way of dividing k."""
    op, where = operator("matmul"), target(arch)
    # The first schedule of a sample is the default one: what is wanted is the one after it.
    space = op.space(problem, where, Search(level=2, limit=2, seed=rng.randrange(2**32)))
    if split == "level 2":
        return _accepted(problem, arch, space, space.first)
    lists: dict[str, Sequence[Value]] = dict(space.tunables)
    if "stream_blocks" not in lists and split == "stream":
        split = "workspace"
    lists |= {"split": [split], "split_k": SLICES if split in ("workspace", "atomic") else [1]}
    if "stream_blocks" in lists:
        lists |= {"stream_blocks": STREAM_BLOCKS if split == "stream" else [0], **_wider(problem, arch, forced, rng)}
    tried = (Schedule.of({name: rng.choice(values) for name, values in lists.items()}) for _ in range(ATTEMPTS))
    return _accepted(problem, arch, tried, None)


def _wider(problem: MatmulProblem, arch: str, forced: str, rng: random.Random) -> dict[str, Sequence[Value]]:
    """Lists of the tensor-core kernel beyond those of level 2: what only a search that names it tries."""
    size = dtype(problem.dtype).bytes
    every = (16, 32, 64, 128)
    turned = size == 1 and problem.layout != "nt"
    can_be_asynchronous = arch != "sm_75" and min(aligns(problem)[:2]) * size >= 4 and not turned
    by_registers = not can_be_asynchronous or (forced != "deep" and rng.random() < 0.2)
    asynchronous_stages = [3, 4, 5] if forced == "deep" else [2, 3, 4, 5]
    limited = rng.random() < 0.3
    ordered = forced == "another raster" or (min(problem.m, problem.n) > 32 and rng.random() < 0.6)
    return {
        "tile_m": [tile for tile in every if tile < 2 * problem.m] or [16],
        "tile_n": [tile for tile in every if tile < 2 * problem.n] or [16],
        "tile_k": [32 // size, 64 // size, 128 // size],
        "warps_m": [1, 2, 4, 8],
        "warps_n": [1, 2, 4, 8],
        "copy": ["registers" if by_registers else "cp_async"],
        "stages": [1, 2] if by_registers else asynchronous_stages,
        "fragments": [1, 2],
        "epilogue_path": ["direct", "shared"],
        "maxnreg": [96, 168, 255] if limited else [0],
        "min_blocks": [1] if limited else [1, 2, 3],
        "static_k": [0, problem.k] if problem.k <= 1024 else [0],
        "raster": [1, 4, 8] if ordered else [0],
    }


def _accepted(
    problem: MatmulProblem, arch: str, schedules: Iterable[Schedule], but: Schedule | None
) -> Candidate | None:
    """The first accepted one that is not `but`; that one where there is no other."""
    op, where = operator("matmul"), target(arch)
    candidate = None
    for schedule in islice(schedules, ATTEMPTS):
        if isinstance(op.rules(problem, schedule, where), Accepted):
            candidate = op.candidate(problem, schedule)
            if schedule != but:
                break
    return candidate


@dataclass(frozen=True)
class VerifiedCase:
    """A case and what the CPU said of its kernel, run on the case's own extents and launch values."""

    arch: str
    candidate: Candidate
    verdict: CpuVerdict

    def words(self) -> str:
        problem = {k: v for k, v in self.candidate.problem.canonical().items() if v not in (None, [], ())}
        return f"{self.verdict.verdict}: {self.verdict.message}\n{problem}\n{self.candidate.schedule.as_dict()}"


class OperatorOfCases(Operator):
    """An operator whose kernels are tested on the problems of its random cases, listed in `cases.json`."""

    @cached_property
    def uses(self) -> dict[str, list[tuple[Problem, list[int]]]]:
        listed = json.loads((Path(str(self.folder)) / "cases.json").read_text())
        return {
            kernel: [(operator(problem["operator"]).parse(problem), launch) for problem, launch in uses]
            for kernel, uses in listed.items()
        }

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return list(dict.fromkeys(problem for problem, _ in self.uses[kernel.id]))

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        launches = [launch for each, launch in self.uses[kernel.id] if each == problem]
        return launches or super().test_launches(kernel, problem)  # type: ignore[safe-super]  # of a long problem


def verify_cases(cases: Sequence[tuple[str, Candidate]], folder: Path, *, seed: int) -> list[VerifiedCase]:
    """Those of a run are one g++ file and one child; of more, two files at a time."""
    parts = [cases[first : first + EACH_RUN] for first in range(0, len(cases), EACH_RUN)]
    base = cases[0][1].kernel.operator
    names = [f"cases_{base}_{number}" for number in range(len(parts))]
    made = [_write_cases(folder / name, name, part) for name, part in zip(names, parts, strict=True)]
    with loaded(made), ThreadPoolExecutor(2) as pool:
        kernels = [[_renamed(name, each.kernel) for _, each in part] for name, part in zip(names, parts, strict=True)]
        runner = processes()  # of this thread
        verdicts = list(pool.map(lambda asked: _verified(asked, seed, runner), kernels))
    by_kernel = {verdict.kernel_id: verdict for part in verdicts for verdict in part}
    return [
        VerifiedCase(arch, candidate, by_kernel[kernel.id])
        for asked, part in zip(kernels, parts, strict=True)
        for kernel, (arch, candidate) in zip(asked, part, strict=True)
    ]


def _verified(kernels: Sequence[Kernel], seed: int, runner: Processes) -> list[CpuVerdict]:
    """A kernel has the time of a plan for each of its problems."""
    problems = max(Counter(kernel.id for kernel in kernels).values())
    seconds, wall = problems * KERNEL_CPU_SECONDS, problems * KERNEL_WALL_SECONDS
    return verify(kernels, seed=seed, runner=runner, kernel_cpu_seconds=seconds, kernel_wall_seconds=wall)


def too_seldom(counts: Counter[str], wanted: Mapping[str, int], count: int) -> dict[str, int]:
    """What a case can be about and fewer cases are than the percentage that is wanted."""
    sys.stdout.write(f"cases: {dict(sorted(counts.items()))}\n")
    return {name: counts[name] for name, percent in wanted.items() if 100 * counts[name] < percent * count}


def require_right(verified: Sequence[VerifiedCase], extents: int | None = None) -> None:
    """Equal on integers, within the bound on normals, on the case's own extents; `extents`: of the launch ABI's, how
    many tell problems apart (default: all)."""
    wrong = [case.words() for case in verified if case.verdict.verdict != "ok"]
    assert wrong == [], f"{len(wrong)} of {len(verified)}: {wrong[:5]}"
    for case in verified:
        problem = case.candidate.problem
        own = operator(problem.operator).extents(problem)[:extents]
        cases = [run for run in case.verdict.details["cases"] if run["extents"][:extents] == own]
        assert {case["kind"] for case in cases} - {"positive", "special"} == {"integer", "normal"}, (
            "not run on its own extents"
        )
        assert all(case["max_error"] == 0.0 for case in cases if case["exact"])
        assert all(case["max_ratio"] <= 1.0 for case in cases)


def _write_cases(folder: Path, name: str, cases: Sequence[tuple[str, Candidate]]) -> Path:
    """The folder of an operator like that of the cases, which tests its kernels on them."""
    base = cases[0][1].kernel.operator
    class_name = type(operator(base)).__name__
    write_operator(folder, base, class_name, name, {})
    (folder / "__init__.py").write_text(
        f"from pathlib import Path\n\nfrom codegen.operators.{base} import {class_name}\n"
        f"from tests.support.kernels.random_cases import OperatorOfCases\n\n\n"
        f"class OfCases(OperatorOfCases, {class_name}):\n"
        f"    name = {name!r}\n    folder = Path(__file__).parent\n"
        f"    shared, files = (), {tuple(operator(base).kernel_texts)!r}\n\n\nOPERATOR = OfCases()\n"
    )
    uses: dict[str, list[Any]] = {}
    for _, candidate in cases:
        launch = operator(base).launch_values(candidate.schedule)
        uses.setdefault(_renamed(name, candidate.kernel).id, []).append([candidate.problem.canonical(), launch])
    (folder / "cases.json").write_text(json.dumps(uses))
    return folder


def _renamed(name: str, kernel: Kernel) -> Kernel:
    return Kernel.of(name, kernel.signature_dict, kernel.tunables)
