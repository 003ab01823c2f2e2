"""The folder in which a stand-alone run keeps what it has done: nothing that was measured is lost where it is killed.

```
FOLDER/measured.jsonl   one line for each candidate and comparison, synced as soon as it is known
FOLDER/results.json     all of it with the problems: what `cukiln import-results` sends
```
Lines belong to the run that stands before them; a later run takes over those of the same card, driver and test plan,
and of cards of the same product that a line `{"counts": uuids}` names.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from codegen.identity import PlanVersions
from codegen.kernel import Candidate
from workers.gpu.interface import Device
from workers.gpu.task import CandidateResult
from workers.offline.work import Built, Work, WorkProblem, predicted

SCHEMA = 1
JOURNAL_FILE, RESULTS_FILE = "measured.jsonl", "results.json"
_OF_RESULT = {"code_digest", *(field.name for field in fields(CandidateResult) if field.name != "tainted")}
NOT_MEASURED = "not measured: the run was not finished"


@dataclass(frozen=True)
class Conditions:
    """What measurements must agree in to stand beside each other."""

    device: Device
    plan_versions: PlanVersions

    @property
    def key(self) -> list[str]:
        return [self.device.name, self.device.driver, *self.plan_versions.values()]


class Journal:
    """Results of candidates, by candidate and code digest, and comparisons, by the candidates that were compared. Their
    lines are `{"run": key, …}` at the beginning of each run, `{"result": …}` and `{"compared": names, …}`. `others`:
    cards whose lines do not count, as name and UUID; `counted`: the UUIDs of those beside this card whose lines do."""

    def __init__(self, folder: Path, conditions: Conditions) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.conditions = conditions
        self._path = folder / JOURNAL_FILE
        self._results: dict[tuple[str, str], dict[str, Any]] = {}
        self.comparisons: dict[tuple[str, ...], dict[str, Any] | None] = {}
        self.others: set[tuple[str, str]] = set()
        self.counted: set[str] = set()
        uuids = {conditions.device.uuid, *counted_in(folder)}
        counts = False
        for line in read_lines(self._path):
            if "run" in line:
                name, uuid = _card_of(line)
                counts = line["run"] == conditions.key and uuid in uuids
                if uuid != conditions.device.uuid:
                    self.counted |= {uuid} if counts else set()
                    self.others |= set() if counts else {(name, uuid)}
            elif counts and _is_whole(line):
                self._take(line)
        append_line(self._path, {"run": conditions.key, "device": conditions.device.as_dict(), "at": time.time()})

    def result(self, candidate: str, code_digest: str | None) -> dict[str, Any] | None:
        return self._results.get((candidate, code_digest or ""))

    def was_compared(self, contenders: Sequence[str]) -> bool:
        return tuple(sorted(contenders)) in self.comparisons

    def verified(self) -> set[str]:
        """Code digests of which a candidate was right."""
        return {code for (_, code), result in self._results.items() if result["verdict"] == "ok"}

    def add(self, result: CandidateResult, code_digest: str | None) -> None:
        fields = {**asdict(result), "code_digest": code_digest}
        self._write({"result": {name: value for name, value in fields.items() if name != "tainted"}})

    def add_comparison(self, contenders: Sequence[str], comparison: Mapping[str, Any] | None) -> None:
        self._write({"compared": sorted(contenders), "comparison": comparison})

    def _write(self, line: dict[str, Any]) -> None:
        append_line(self._path, line)
        self._take(line)

    def _take(self, line: Mapping[str, Any]) -> None:
        if "result" in line:
            result = dict(line["result"])
            self._results[result["candidate"], result["code_digest"] or ""] = result
        elif "compared" in line:
            self.comparisons[tuple(line["compared"])] = line["comparison"]


def counted_in(folder: Path) -> list[str]:
    """The cards whose measurements count in the folder, beside those of the card that measures."""
    lists = (line.get("counts") for line in read_lines(folder / JOURNAL_FILE))
    return [str(uuid) for counts in lists if isinstance(counts, list) for uuid in counts]


def count_all(folder: Path) -> None:
    """From now on measurements count of all cards that the journal has, for other cards of their product."""
    runs = {_card_of(line)[1]: None for line in read_lines(folder / JOURNAL_FILE) if "run" in line}
    if runs:
        append_line(folder / JOURNAL_FILE, {"counts": list(runs)})


def _card_of(run: Mapping[str, Any]) -> tuple[str, str]:
    """Name and UUID; of a damaged line words that no card has."""
    device = run.get("device")
    named = device if isinstance(device, dict) else {}
    return str(named.get("name", "a card without a name")), str(named.get("uuid", "a damaged line"))


def _is_whole(line: Mapping[str, Any]) -> bool:
    """Whether a line says what this release writes. What one of a damaged file does not is measured again."""
    if "result" in line:
        result = line["result"]
        return isinstance(result, dict) and result.keys() >= _OF_RESULT and isinstance(result["details"], dict)
    names, comparison = line.get("compared"), line.get("comparison", 0)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    return comparison is None or (isinstance(comparison, dict) and isinstance(comparison.get("contenders"), list))


def results_of(work: Work, journal: Journal, *, complete: bool) -> dict[str, Any]:
    """The content of results.json: every candidate of every problem, also those without a verdict."""
    return {
        "schema": SCHEMA,
        "complete": complete,
        "device": journal.conditions.device.as_dict(),
        "plan_versions": dict(journal.conditions.plan_versions),
        "written_at": time.time(),
        "toolchains": dict(work.toolchains),
        "problems": [_problem(problem, work, journal) for problem in work.problems],
    }


def _problem(problem: WorkProblem, work: Work, journal: Journal) -> dict[str, Any]:
    candidates = []
    for candidate in problem.candidates:
        built = work.built(problem, candidate)
        candidates.append(
            {
                "candidate": candidate.id,
                "schedule": candidate.schedule.as_dict(),
                "kernel": candidate.kernel.id,
                "toolchain": built.toolchain,
                "code_digest": built.code_digest,
                "resources": dict(built.resources) if built.resources else None,
                "prediction": predicted(candidate, built, problem.target),
                **_verdict(candidate.id, built, problem, journal),
            }
        )
    # The last that was made of this problem's candidates, if all that it names are right still.
    ids, right = set(problem.builds), {candidate.id for _, candidate, _ in right_of(problem, work, journal)}
    comparisons = [
        comparison
        for compared, comparison in journal.comparisons.items()
        if comparison
        and ids.issuperset(compared)
        and right.issuperset(contender["candidate"] for contender in comparison["contenders"])
    ]
    return {**problem.said, "candidates": candidates, "comparison": comparisons[-1] if comparisons else None}


def _verdict(candidate: str, built: Built, problem: WorkProblem, journal: Journal) -> dict[str, Any]:
    """Verdict, message, details and times; `skipped` where there is none, with the reason."""
    none: dict[str, Any] = {"details": {}, "measurement": None, "seconds": {}}
    if built.state != "ok":
        return {"verdict": built.state, "message": built.message, **none}
    result = journal.result(candidate, built.code_digest)
    if result is None:
        return {"verdict": "skipped", "message": problem.left_out.get(candidate, NOT_MEASURED), **none}
    seconds = {
        stage: {"wall": result[f"{stage}_wall"], "cpu": result[f"{stage}_cpu"]} for stage in ("verify", "measure")
    }
    fields = {name: result[name] for name in ("verdict", "message", "measurement")}
    return {**fields, "details": in_short(result["details"]), "seconds": seconds}


def in_short(details: Mapping[str, Any]) -> dict[str, Any]:
    """A verification's details with a few of its cases: the largest error, what was wrong, and those whose output's
    SHA-256 a service compares with what it promises. The seed gives all."""
    cases = details.get("cases", [])
    inexact = [case for case in cases if not case.get("exact") and case.get("max_error") is not None]
    worst = max(inexact, key=lambda case: float(case["max_error"]), default=None)
    shown = [case for case in cases if case is worst or "wrong" in case or "sha256" in case]
    # One that never came to an end, such as that of an illegal access, is the last one and has no error.
    shown += [case for case in cases[-1:] if "max_error" not in case and case not in shown]
    return {**details, "cases": shown} if cases else dict(details)


def right_of(problem: WorkProblem, work: Work, journal: Journal) -> list[tuple[float, Candidate, Built]]:
    """The problem's candidates that were found right, with the median of their samples."""
    return [
        (float(result["measurement"]["median_us"]), candidate, built)
        for candidate in problem.candidates
        if (result := journal.result(candidate.id, (built := work.built(problem, candidate)).code_digest))
        and result["verdict"] == "ok"
        and result["measurement"]
    ]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal; one that a crash cut short, or that holds no object, is passed over."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        yield from lines_in(lines)


def lines_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """As `read_lines`."""
    for line in lines:
        try:
            read = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(read, dict):
            yield read


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Durable when it returns. A line that was cut short before it stays a line of its own."""
    text = json.dumps(_finite(value), allow_nan=False) + "\n"
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _finite(value: Any) -> Any:
    """The value with null for what JSON cannot say: an error may be infinite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def write_whole(path: Path, data: bytes) -> None:
    """The file has all of its bytes or is not there, whatever happens meanwhile."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def write_results(folder: Path, results: Mapping[str, Any]) -> Path:
    path = folder / RESULTS_FILE
    write_whole(path, (json.dumps(results, separators=(",", ":"), allow_nan=False) + "\n").encode())
    return path
