"""`cukiln prove`: the CPU verification of a request's first kernels, for a person who writes one; nothing is kept."""

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from pydantic import ValidationError

from codegen.errors import CodegenError
from codegen.job_request import JobRequest, asked_problem, name_of
from codegen.kernel import Kernel
from codegen.lower import lower
from codegen.plan.verification_plan import EXACT_ORDERS as ORDERS
from codegen.plan.verification_plan import Part
from storage.config.operator_path import load_operator_path
from storage.config.settings import Settings, load_settings
from storage.errors import SettingsError
from workers.compile.toolchain import ToolchainMissing, toolchain_of
from workers.cpu.ptx import PtxRequest, verify_ptx
from workers.cpu.verify import CpuVerdict, verify_on_cpu
from workers.processes.processes import ProcessError, fenced_processes

__all__ = ["ORDERS", "Options", "Part", "prove", "report"]

RIGHT, WRONG, WRONG_USE, UNTRANSLATED = 0, 1, 2, 4  # as the client's exit codes, whose 3 is of jobs
WIDTH = 100  # columns of what a person reads


@dataclass(frozen=True)
class Options:
    """`limit`: candidates of each problem; None: all that `schedules` lists, else one. `part`: of the plan. `ptx`:
    run what nvcc makes of the kernels in place of the CPU emulation of their primitives."""

    problem: str | None = None
    limit: int | None = None
    seed: int = 1
    part: Part = field(default_factory=Part)
    sanitize: bool = False
    as_json: bool = False
    ptx: bool = False


class WrongUse(Exception):
    """The request cannot be verified; the message says what is wrong with it."""


def prove(request: Mapping[str, Any], options: Options) -> int:
    """Prints a verdict for every kernel; the exit status: 0 all right, 1 one is not, 2 a wrong request, 4 none is
    wrong, but the PTX of one has no translation."""
    try:
        settings = load_settings()
        load_operator_path(settings)
        if options.ptx and options.sanitize:
            raise WrongUse(
                "--sanitize is for the CPU emulation of primitives, --ptx for what nvcc makes of them: leave one out"
            )
        kernels = list(dict.fromkeys(_kernels(request, options, settings)))
        verdicts = _verify(kernels, options, settings)
    except (CodegenError, ProcessError, SettingsError, ToolchainMissing, ValidationError, WrongUse) as error:
        sys.stderr.write(f"cukiln prove: {error}\n")
        return WRONG_USE
    for asked, verdict in zip(kernels, verdicts, strict=True):
        sys.stdout.write(_json(asked.kernel, verdict) if options.as_json else report(asked, verdict))
    if options.part != Part() and not options.as_json:
        sys.stdout.write("A part of the plan was run: that verifies nothing.\n")
    outcomes = {verdict.verdict for verdict in verdicts}
    return RIGHT if outcomes <= {"ok"} else UNTRANSLATED if outcomes <= {"ok", "untranslated"} else WRONG


class Asked(NamedTuple):
    """A kernel, and whose tensor cores add (`Target.tensor_sums`). `target`: of its PTX; empty without."""

    kernel: Kernel
    sums: int
    target: str


def _kernels(request: Mapping[str, Any], options: Options, settings: Settings) -> Iterator[Asked]:
    """Those of every problem that is asked for; raises WrongUse, CodegenError, ValidationError."""
    parsed = JobRequest.model_validate(dict(request))
    places = [place for place, each in enumerate(parsed.problems) if options.problem in (None, name_of(each, place))]
    if not places:
        raise WrongUse(f"no problem is called {options.problem!r}")
    for place in places:
        problem = asked_problem(parsed, place, settings.default_target)
        few = None if problem.search.schedules is not None else 1
        search = problem.search.model_copy(update={"limit": options.limit or few})
        lowered = lower(problem.problem, problem.target, search)
        if lowered.why_empty:
            raise WrongUse(f"{problem.name}: {lowered.why_empty}")
        target = problem.target.architecture if options.ptx else ""
        yield from (Asked(each.kernel, problem.target.tensor_sums, target) for each in lowered.candidates)


def _verify(kernels: Sequence[Asked], options: Options, settings: Settings) -> list[CpuVerdict]:
    """The verdicts, in the order of the kernels."""
    verdicts: dict[tuple[str, int, str], CpuVerdict] = {}
    with closing(fenced_processes(settings)) as processes:
        toolchain = toolchain_of(settings, processes)
        for sums, target in dict.fromkeys((each.sums, each.target) for each in kernels):
            own = [each.kernel for each in kernels if (each.sums, each.target) == (sums, target)]
            if target:
                request = PtxRequest(target, options.seed, sums, options.part)
                shown = verify_ptx(own, request, toolchain, processes, settings.limits("verify"))
            else:
                shown = verify_on_cpu(
                    own,
                    toolchain,
                    processes,
                    settings.limits("verify"),
                    seed=options.seed,
                    sanitize=options.sanitize,
                    sums=sums,
                    # Where standard output is one object for each kernel, nothing else may stand in it.
                    on_print=sys.stderr.write if options.as_json else sys.stdout.write,
                    part=options.part,
                )
            verdicts |= {(verdict.kernel_id, sums, target): verdict for verdict in shown}
    return [verdicts[each.kernel.id, each.sums, each.target] for each in kernels]


def report(asked: Asked, verdict: CpuVerdict) -> str:
    """What a person reads of a verdict: its message, the cases of the plan, the accesses to shared memory."""
    kernel = asked.kernel
    tunables = ", ".join(f"{name} {value}" for name, value in kernel.tunables.as_dict().items())
    lines = textwrap.wrap(f"{kernel.namespace}, {kernel.operator}: {tunables}", WIDTH, subsequent_indent="  ")
    lines.append(f"  {verdict.verdict}, {verdict.cpu_seconds:.2f} CPU seconds, {_tools(asked, verdict)} included")
    lines += textwrap.wrap(
        verdict.message,
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    if cases := verdict.details.get("cases"):
        rows = [_case(number, case) for number, case in enumerate(cases)]
        lines += ["", *_table(("case", "inputs", "extents", "launches", "runs", "largest error", "its bound"), rows)]
    if sites := verdict.details.get("shared_memory"):
        names = ("site", "kind", "bytes", "warp_accesses", "wavefronts", "ideal")
        rows = [tuple(str(site[name]) for name in names) for site in sites]
        lines += [
            "",
            *_table(("shared memory", "access", "bytes", "by warps", "wavefronts", "without conflicts"), rows),
        ]
    return "\n".join(lines) + "\n\n"


def _tools(asked: Asked, verdict: CpuVerdict) -> str:
    if not asked.target:
        return "g++"
    counts = [verdict.details.get(name, 0) for name in ("instructions", "fusible", "approximate")]
    text = "{} instructions of PTX ({} sums that may be fused, {} approximations), nvcc and g++"
    return text.format(*counts)


def _case(number: int, case: Mapping[str, Any]) -> tuple[str, ...]:
    launches = len({tuple(run["launch"]) for run in case["runs"]})
    errors = [case.get(name) for name in ("max_error", "error_bound")]
    return (
        str(number),
        str(case["kind"]),
        ", ".join(map(str, case["extents"])),
        str(launches),
        str(len(case["runs"])),
        *("-" if error is None else f"{error:.2g}" for error in errors),
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text to the left, of numbers to the right."""
    columns = list(zip(headings, *rows, strict=True))
    numbers = [all(cell[:1].isdigit() or cell == "-" for cell in column[1:]) for column in columns]
    padded = []
    for column, is_number in zip(columns, numbers, strict=True):
        width = max(map(len, column))
        padded.append([cell.rjust(width) if is_number else cell.ljust(width) for cell in column])
    return [f"  {'  '.join(cells)}".rstrip() for cells in zip(*padded, strict=True)]


def _json(kernel: Kernel, verdict: CpuVerdict) -> str:
    return json.dumps({"kernel": kernel.to_json(), **asdict(verdict)}) + "\n"
