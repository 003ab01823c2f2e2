"""What `cukiln tune` and `cukiln lookup` print when they are done."""

import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from cukiln.cli.console import GAP, duration, fitting, plain_table
from cukiln.counted import counted
from cukiln.types import FrontEntry, Job, LookupResult, MeasuredOn, ProblemReport, RunnerUp, WinnerSummary
from cukiln.vendor_text import Vendor, vendor_of, vendor_of_record

_VERIFIED = {
    "gpu": "verified gpu: the kernel's results were checked on a GPU",
    "cpu": "verified cpu: the kernel's own source, run on the CPU, gave the reference's results",
    "cpu-unconfirmed": "verified cpu-unconfirmed: right on the CPU, but it uses a GPU instruction whose CPU emulation "
    "was never compared with a real GPU",
}
_PTX = {
    "ok": "ptx ok: what nvcc made of the kernel, run on the CPU, gave them, too",
    "untranslated": "ptx untranslated: what nvcc made of the kernel could not be run on the CPU",
}
_OTHER_BITS = "other bits: the GPU gave others than that run promises, within their bounds (the record's ptx.broken)"
_NAME_WIDTH = 20  # characters of a problem's name in a line
_SCHEDULE_LINES = 4  # of a schedule in a table, at most
_SCHEDULE_WIDTHS = range(24, 78, 2)  # characters that its column is tried with
_LEAST_WIDTH = 70  # of a table with schedules
# From so many winners on, what all of them share is printed once, below the table.
_MANY_WINNERS = 4
_PREDICTED = (
    "predicted µs: an estimate for {targets} from the compiled kernel's registers and shared memory and the GPU's data "
    "sheet; nothing was measured"
)
_MEASURED = "measured µs: the median time of a run on {devices}, of many in one process"
_VENDOR = (
    "× {library}: how many times as fast our kernel is as the vendor's library on the same problem; their runs were "
    "interleaved; in brackets, the 95 % interval"
)
_VENDOR_TIE = "tie with {library}: neither is certainly faster by 1 % or more"
_VENDOR_OFF = (
    "its result is off: the vendor's largest error against the reference, on inputs that ours was checked with, is "
    "above what ours is allowed there; so no ratio is given. Where the vendor takes several kernels, it rounds between "
    "them, which explains a small excess and no large one"
)
_KEEP = "keep"  # a request's option, counted among the rules' rejections
_RUNNER_UP = "runner-up: how much longer the next best candidate takes; in brackets, the 95 % interval"
_TIE = "tie: the next best candidate is not certainly slower, or by less than counts as a difference"
_SECONDS = (
    "seconds: wall time, summed over the processes that worked; the time of a kernel that problems share is split "
    "between them"
)


@dataclass(frozen=True)
class _Part:
    """Columns that stay together: their headings, a row of cells for each problem, the characters they need."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    width: int


def print_job(console: Console, job: Job) -> None:
    """One row per problem, then the legend; on a narrow terminal, where rich would drop columns, several tables."""
    several = len({problem.device_class for problem in job.problems}) > 1
    names = [_name(problem, several) for problem in job.problems]
    parts = [*_winners_parts(job, console.width), *_compared_part(job), _seconds_part(job)]
    _print_parts(console, names, parts, leave_out=parts[-1] if job.cached else None)
    for note in notes(job):
        console.print(Text(note, style="dim"))


def _winners_parts(job: Job, width: int) -> list[_Part]:
    common = _common(job)
    typed = any("dtype" in problem.problem for problem in job.problems)
    schedules: list[list[str | Text]] = [
        [*([_dtype(problem)] if typed else []), _outcome(problem, common)] for problem in job.problems
    ]
    labels = [list(_labels(problem)) for problem in job.problems]
    return _schedule_parts(["dtype"] if typed else [], schedules, ["verified", "ranked by"], labels, width)


def _schedule_parts(
    before: Sequence[str],
    schedules: Sequence[Sequence[str | Text]],
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
) -> list[_Part]:
    """Schedules, the last cells of `schedules`, and what stands behind them: in one table where no schedule takes more
    than four lines there, else in two."""
    texts = [str(row[-1]) for row in schedules]
    needed = next(n for n in _SCHEDULE_WIDTHS if n == _SCHEDULE_WIDTHS[-1] or _lines(texts, n) <= _SCHEDULE_LINES)
    first = _NAME_WIDTH + GAP + sum(_width(schedules, place) + GAP for place in range(len(before))) + needed
    last = sum(max(len(name), _width(rows, place)) + GAP for place, name in enumerate(headings))
    if first + last <= max(width, _LEAST_WIDTH):
        whole = [[*left, *right] for left, right in zip(schedules, rows, strict=True)]
        return [_Part([*before, "winner's schedule", *headings], whole, max(first + last, _LEAST_WIDTH))]
    return [_Part([*before, "winner's schedule"], schedules, max(first, _LEAST_WIDTH)), _Part(headings, rows, last)]


def _lines(texts: Sequence[str], width: int) -> int:
    return max((len(textwrap.wrap(text, width)) for text in texts), default=0)


def _width(rows: Sequence[Sequence[str | Text]], place: int) -> int:
    return max((len(line) for row in rows for line in str(row[place]).splitlines()), default=0)


def _compared_part(job: Job) -> list[_Part]:
    """The vendor's library and the runner-up, where a winner was compared with either."""
    if not any(winner.vendor_us or winner.runner_up for winner in _winners(job)):
        return []
    rows = []
    for problem in job.problems:
        winner = problem.winner
        if winner is None:
            rows.append(["-", "-"])
        else:
            rows.append([_beside(vendor_of(winner)), _runner_up(winner.runner_up)])
    return [_compared_columns(rows)]


def _seconds_part(job: Job) -> _Part:
    stages = ["lower", "codegen", "compile", "verify"]
    if any(problem.seconds.measure.wall for problem in job.problems):
        stages.append("measure")
    rows = [
        ["-" if problem.cached else f"{getattr(problem.seconds, stage).wall:.2f}" for stage in stages]
        for problem in job.problems
    ]
    return _Part([f"{stage} s" for stage in stages], rows, 55)


def _print_parts(
    console: Console, names: Sequence[str], parts: Sequence[_Part], leave_out: _Part | None = None
) -> None:
    """As many parts side by side as fit; `leave_out`: a part that gets no table of its own."""
    for number, places in enumerate(fitting([part.width for part in parts], console.width)):
        columns = [parts[place] for place in places]
        if number and columns == [leave_out]:
            continue
        table = plain_table()
        for heading in ["problem", *(heading for part in columns for heading in part.headings)]:
            if heading == "winner's schedule":
                table.add_column(heading, ratio=1)
            else:
                table.add_column(heading, no_wrap=True, justify="right" if heading.endswith(" s") else "left")
        for row, name in enumerate(names):
            table.add_row(name, *(cell for part in columns for cell in part.rows[row]))
        if number:
            console.print()
        console.print(table)


def _name(problem: ProblemReport, several: bool) -> str:
    """Of a problem that is tuned on several device classes, the class too."""
    name = _folded(problem.name)
    return f"{name}\non {problem.device_class}" if several else name


def _folded(name: str) -> str:
    """In lines that fit the column, broken behind slashes where possible: models' names differ at their ends."""
    lines = []
    while len(name) > _NAME_WIDTH:
        end = name.rfind("/", 0, _NAME_WIDTH) + 1 or _NAME_WIDTH
        lines.append(name[:end])
        name = name[end:]
    return "\n".join([*lines, name])


def _winners(job: Job) -> list[WinnerSummary]:
    return [problem.winner for problem in job.problems if problem.winner is not None]


def _beside(theirs: Vendor | None) -> str:
    """The vendor's time, and how many times as fast ours is; no ratio where the vendor's result is off."""
    if theirs is None:
        return "-"
    if theirs.off:
        return f"{microseconds(theirs.us)}\n({theirs.text})"
    return f"{microseconds(theirs.us)}, {theirs.text}"


def _compared_columns(rows: Sequence[Sequence[str]]) -> _Part:
    """The vendor's, and the runner-up's where the rows have it."""
    headings = ["vendor", "runner-up"][: len(rows[0])]
    width = sum(max(len(name), _width(rows, place)) + GAP for place, name in enumerate(headings))
    return _Part(headings, rows, width)


def _runner_up(runner_up: RunnerUp | None) -> str:
    if runner_up is None:
        return "-"
    text = "tie" if runner_up.tie else f"{100 * runner_up.margin:+.1f} %"
    if runner_up.low is None or runner_up.high is None:
        return text
    return f"{text} ({100 * runner_up.low:.1f}–{100 * runner_up.high:.1f})"


def _dtype(problem: ProblemReport) -> str:
    """Of the inputs."""
    dtype = str(problem.problem.get("dtype", "-"))
    return f"{dtype}, tf32" if problem.problem.get("allow_tf32") else dtype


def _common(job: Job) -> dict[str, Any]:
    """Tunables that have one value in all winners' schedules that have them; none in jobs of few winners."""
    schedules = [winner.schedule for winner in _winners(job)]
    if len(schedules) < _MANY_WINNERS:
        return {}
    merged = {name: value for schedule in schedules for name, value in schedule.items()}
    joined = {name for schedule in schedules for names in _by_stem(schedule) if len(names) > 1 for name in names}
    return {
        name: value
        for name, value in sorted(merged.items())
        if name not in joined and all(schedule.get(name, value) == value for schedule in schedules)
    }


def _outcome(problem: ProblemReport, common: Collection[str]) -> Text:
    """The winner's schedule, or why there is none."""
    if problem.winner is not None:
        return Text(_described(problem.winner, common))
    style = "red" if problem.state == "failed" else "yellow"
    return Text(f"{problem.state}: {problem.error or 'no winner'}", style=style)


def _labels(problem: ProblemReport) -> tuple[str, str]:
    """How the winner was verified and ranked."""
    winner = problem.winner
    if winner is None:
        return "-", "-"
    time_us = winner.measured_us if winner.ranked_by == "measured" else winner.predicted_us
    return _verified(winner), marked(f"{winner.ranked_by} {microseconds(time_us)}", winner)


def _verified(winner: WinnerSummary | FrontEntry) -> str:
    if winner.ptx is None:
        return winner.verified
    return f"{winner.verified}\nptx {winner.ptx.verdict}{', other bits' if winner.ptx.broken else ''}"


def notes(job: Job) -> list[str]:
    """The legend: one line for each term that the table shows."""
    winners = _winners(job)
    common = schedule_text(_common(job))
    lines = [f"in every winner's schedule that has them: {common}"] if common else []
    lines += [_VERIFIED[name] for name in sorted({winner.verified for winner in winners})]
    marks = [winner.ptx for winner in winners if winner.ptx is not None]
    lines += [_PTX[name] for name in sorted({mark.verdict for mark in marks})]
    lines += [_OTHER_BITS] if any(mark.broken for mark in marks) else []
    if any(winner.ranked_by == "predicted" for winner in winners):
        targets = {"the GPU that cpu emulates" if of.target == "cpu" else of.target for of in job.problems}
        lines.append(_PREDICTED.format(targets=", ".join(sorted(targets))))
    lines += _measured_notes(job)
    if any(stage.wall for problem in job.problems for stage in dict(problem.seconds).values()):
        lines.append(_SECONDS)
    return lines + _rejected_notes(job)


def _rejected_notes(job: Job) -> list[str]:
    """How many schedules were not compiled: those that a rule forbids, and those that `keep` left out."""
    broke = sum(count for problem in job.problems for rule, count in problem.rejected.items() if rule != _KEEP)
    lines = [f"{broke} more schedules broke a rule of their operator and were not compiled"] if broke else []
    cut = [problem for problem in job.problems if problem.rejected.get(_KEEP)]
    if cut:
        left = sum(problem.rejected[_KEEP] for problem in cut)
        best = " or ".join(map(str, sorted({problem.candidates for problem in cut})))
        of_each = " of their problem" if len(job.problems) > 1 else ""
        lines.append(f"{left} more schedules were predicted slower than the best {best}{of_each} and were not compiled")
    return lines


def _measured_notes(job: Job) -> list[str]:
    measured = [
        problem for problem in job.problems if problem.winner is not None and problem.winner.ranked_by == "measured"
    ]
    lines = (
        [_MEASURED.format(devices=", ".join(sorted({problem.device_class for problem in measured})))]
        if measured
        else []
    )
    lines += steadiness_notes((problem.name, problem.winner) for problem in measured)
    winners = _winners(job)
    vendors = [theirs for winner in winners if (theirs := vendor_of(winner)) is not None]
    times = {theirs.library for theirs in vendors if not theirs.off and not theirs.is_tie}
    lines += [_VENDOR.format(library=name) for name in sorted(times)]
    ties = {theirs.library for theirs in vendors if theirs.is_tie}
    lines += [_VENDOR_TIE.format(library=name) for name in sorted(ties)]
    lines += [_VENDOR_OFF] if any(theirs.off for theirs in vendors) else []
    others = [winner.runner_up for winner in winners if winner.runner_up is not None]
    lines += [_RUNNER_UP] if any(not other.tie for other in others) else []
    return lines + ([_TIE] if any(other.tie for other in others) else [])


def summary(job: Job, seconds: float) -> str:
    """One line: the outcome of the job, and its time."""
    total = len(job.problems)
    solved = sum(problem.winner is not None for problem in job.problems)
    if job.cached:
        return f"{counted(total, 'problem')} answered from the cache in {duration(seconds)}; nothing was compiled."
    candidates = sum(problem.candidates for problem in job.problems)
    verdicts: Counter[str] = Counter()
    for problem in job.problems:
        verdicts.update(problem.verdicts)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(verdicts.items(), key=lambda item: item[0] != "ok"))
    head = {"done": "done", "partial": f"{total - solved} of {total} without a winner"}.get(job.state, job.state)
    verified = f"{counted(candidates, 'candidate')} ({counts or 'none verified'})"
    return f"Job {job.job}: {head}, {counted(total, 'problem')}, {verified}, {duration(seconds)}.{_ptx_cost(job)}"


def _ptx_cost(job: Job) -> str:
    """Of running every candidate from its PTX; nothing where the job does not ask for that, or none was run."""
    costs = [problem.ptx for problem in job.problems if problem.ptx is not None]
    kernels = sum((Counter(cost.kernels) for cost in costs), Counter[str]())
    if not kernels:
        return ""
    verdicts = ", ".join(f"{count} {name}" for name, count in sorted(kernels.items(), key=lambda item: item[0] != "ok"))
    spent = sum(cost.cpu_seconds for cost in costs)
    return f" From their PTX: {counted(kernels.total(), 'kernel')} ({verdicts}), {spent:.1f} CPU s."


def print_lookups(console: Console, results: Sequence[LookupResult]) -> None:
    """One row per problem, then the whole keys, which are too wide for a column: `cukiln fetch` and HTTP take them."""
    names = [result.name or result.key[:12] for result in results]
    rows = [_looked_up(result) for result in results]
    behind = ["verified", "ranked by", "device class"]
    parts = _schedule_parts([], [row[:1] for row in rows], behind, [row[1:4] for row in rows], console.width)
    if any(result.record is not None and result.record.vendor is not None for result in results):
        parts.append(_compared_columns([row[4:] for row in rows]))
    _print_parts(console, names, parts)
    if any("\n" in row[4] for row in rows):
        console.print(Text(_VENDOR_OFF, style="dim"))
    records = [(name, result.record) for name, result in zip(names, results, strict=True) if result.record is not None]
    for note in steadiness_notes((name, record.front[0].measured_on) for name, record in records):
        console.print(Text(note, style="dim"))
    keys = "".join(f"\n{result.key}  {name}" for result, name in zip(results, names, strict=True))
    console.print(Text(f"keys:{keys}"), soft_wrap=True)  # a key in two lines cannot be copied


def _looked_up(result: LookupResult) -> list[str]:
    """Schedule, verified, ranked by, device class, vendor."""
    record = result.record
    if record is None:
        return ["no winner yet", "-", "-", "-", "-"]
    best = record.front[0]
    time_us = best.measured_us if record.ranked_by == "measured" else best.predicted_us
    rank = marked(f"{record.ranked_by} {microseconds(time_us)}", best.measured_on)
    meanwhile = "" if record.tuned_for is None else "no winner yet; a neighbour's: "
    own = meanwhile + _described(best)
    return [own, _verified(best), rank, record.device_class, _beside(vendor_of_record(record))]


def _described(winner: WinnerSummary | FrontEntry, common: Collection[str] = ()) -> str:
    """Its schedule without the `common` tunables, its workspace, and whether its bits vary."""
    parts = [schedule_text({name: value for name, value in winner.schedule.items() if name not in common})]
    if winner.workspace_bytes:
        parts.append(f"{counted(winner.workspace_bytes, 'byte')} of workspace")
    if not winner.deterministic:
        parts.append("bits differ from run to run")
    return "; ".join(parts)


def schedule_text(schedule: Mapping[str, Any]) -> str:
    """`tile 128×64×16, thread 8×4, stages 2`: tunables that differ in their axis alone are one, and stand first."""
    joined, single = [], []
    for names in _by_stem(schedule):
        if len(names) > 1:
            joined.append((-len(names), f"{names[0][:-2]} {'×'.join(str(schedule[name]) for name in names)}"))
        else:
            single.append(f"{names[0]} {schedule[names[0]]}")
    return ", ".join([text for _, text in sorted(joined)] + single)


def _by_stem(schedule: Mapping[str, Any]) -> list[list[str]]:
    """Names that are written as one, along m, n and k; all others alone."""
    groups: dict[str, list[str]] = {}
    for name in sorted(schedule):
        stem = name[:-2] if name[-2:] in ("_m", "_n", "_k") else name
        groups.setdefault(stem, []).append(name)
    written: list[list[str]] = []
    for stem, names in groups.items():
        if len(names) > 1 and stem not in names:
            written.append(sorted(names, key=lambda name: "mnk".index(name[-1])))
        else:
            written += [[name] for name in names]
    return written


def microseconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g} µs" if value < 1000 else f"{value:,.0f} µs"


# ---- a GPU that changed while the best kernels took turns, or was held back; a vendor's library that was not there

Compared = WinnerSummary | MeasuredOn | None
_UNSTEADY = "unsteady: the GPU changed while the best took turns, also when they did once more; ratios hardly suffer: "
_LIMITED = "limited: something held the GPU back before and after, the same for all; times are of a GPU so limited: "
_MISSING = "no vendor: its library was not compared: "
_MOST_NAMES = 3


def marked(text: str, compared: Compared) -> str:
    """With what is to be known of it in a line of its own."""
    if compared is None:
        return text
    marks = [*(["unsteady"] if compared.unsteady else []), *(["limited"] if compared.limited_by else [])]
    return f"{text}\n({', '.join(marks)})" if marks else text


def steadiness_notes(compared: Iterable[tuple[str, Compared]]) -> list[str]:
    """What each mark stands for, by the names that have it."""
    rows = [(name, entry) for name, entry in compared if entry is not None]
    unsteady = [(name, "; ".join(entry.unsteady)) for name, entry in rows if entry.unsteady]
    limited = [(name, ", ".join(entry.limited_by)) for name, entry in rows if entry.limited_by]
    missing = [(name, entry.vendor_missing) for name, entry in rows if entry.vendor_missing]
    return [
        head + "; ".join(_changes(text, pairs) for text in dict.fromkeys(text for _, text in pairs))
        for head, pairs in ((_UNSTEADY, unsteady), (_LIMITED, limited), (_MISSING, missing))
        if pairs
    ]


def _changes(text: str, pairs: Iterable[tuple[str, str]]) -> str:
    names = [name for name, of_it in pairs if of_it == text]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{text} ({', '.join(names[:_MOST_NAMES])}{more})"
