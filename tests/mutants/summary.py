"""What became of the mutants of a run, in numbers: by operator and rule, with the words of those that survived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.mutants.arguments import takes
from tests.mutants.rules import WIDE
from tests.mutants.subjects import SUBJECTS
from tests.mutants.verify import ARGUED, SAME_LIBRARY, SAME_PTX

COLUMNS = ("mutants", "caught", "equivalent", "survived", "of 32-bit offsets")
# How the plan caught them: words of a message, the first that fit.
CAUGHT = {
    "launch": ("invalid launch", "its launch code"),
    "race or barrier": ("race on", "barrier", "divergent", "diverged", "collective", "wait at", "cp_async"),
    "memory": ("outside", "misaligned", "unchecked", "segmentation", "it is an input", "between the rows"),
    "no end": ("run_timeout", "still running", "CPU limit"),
    "two runs differ": ("differ between two runs",),
    "wrong result": ("elements are wrong",),
}


def summarised(subjects: Sequence[Mapping[str, Any]], date: str) -> dict[str, Any]:
    """Of what `tests.mutants.run` wrote of each subject, in the order of SUBJECTS."""
    names = [subject.name for subject in SUBJECTS]
    subjects = sorted(subjects, key=lambda subject: names.index(subject["subject"]))
    of_subject = {
        name: [s for s in subjects if s["subject"] == name] for name in dict.fromkeys(s["subject"] for s in subjects)
    }
    texts = [mutant for subject in subjects for mutant in subject["mutants"]]
    mutants = [mutant for mutant in texts if mutant["outcome"] != "no mutant"]
    same_code = sum(mutant["how"] in (SAME_LIBRARY, SAME_PTX) for mutant in texts)
    return {
        "date": date,
        "seeds": sorted({subject["seed"] for subject in subjects}),
        "cpu_seconds": round(sum(mutant["seconds"] for mutant in texts)),
        "refused": len(texts) - len(mutants) - same_code,
        "same_code": same_code,
        "subjects": {
            name: counted(mutant for subject in of_each for mutant in subject["mutants"])
            for name, of_each in of_subject.items()
        },
        "rules": {
            rule: counted(mutant for mutant in mutants if mutant["change"]["rule"] == rule)
            for rule in sorted({mutant["change"]["rule"] for mutant in mutants})
        },
        "caught_by": dict(Counter(way(mutant["how"]) for mutant in mutants if mutant["outcome"] == "caught")),
        "by_another_kernel": sum(bool(mutant["first"]) for mutant in mutants),
        "argued": _words(subjects, lambda mutant: _column(mutant) == "equivalent"),
        "survived": _words(subjects, lambda mutant: _column(mutant) in ("survived", "of 32-bit offsets")),
    }


def counted(mutants: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    counts = Counter(_column(mutant) for mutant in mutants if mutant["outcome"] != "no mutant")
    return {"mutants": sum(counts.values()), **{column: counts[column] for column in COLUMNS[1:]}}


def _column(mutant: Mapping[str, Any]) -> str:
    """Offsets of 32 bits are counted apart, whether they are not seen or can be no other."""
    argued = mutant["how"].startswith(ARGUED)
    if mutant["outcome"] == "no mutant":
        return ""
    if mutant["outcome"] == "caught":
        return "caught"
    return "of 32-bit offsets" if mutant["change"]["rule"] == WIDE else "equivalent" if argued else "survived"


def nothing(how: str) -> str:
    """What it would take to see a change that an argument says is none."""
    return f"nothing does: {how.removeprefix(ARGUED)}" if how.startswith(ARGUED) else ""


def way(message: str) -> str:
    return next((name for name, words in CAUGHT.items() if any(word in message for word in words)), "another fault")


def operator_of(subject: str) -> str:
    (operator,) = [each.operator for each in SUBJECTS if each.name == subject]
    return operator


def _words(subjects: Sequence[Mapping[str, Any]], taken: Any) -> list[dict[str, Any]]:
    """Each change once, with the subjects whose kernels have it."""
    by_change: dict[tuple[str, str, str, str, str], dict[str, Any]] = {}
    for subject in subjects:
        for mutant in filter(taken, subject["mutants"]):
            change = mutant["change"]
            key = (change["file"], change["rule"], change["text"].strip(), change["old"], change["new"])
            row = by_change.setdefault(
                key,
                {
                    **dict(zip(("file", "rule", "text", "old", "new"), key, strict=True)),
                    "line": change["line"],
                    "how": mutant["how"],
                    "takes": takes(change["file"], change["text"]) or nothing(mutant["how"]),
                    "of": [],
                    "kernels": [],
                },
            )
            for column, value in (("of", subject["subject"]), ("kernels", mutant["first"] or mutant["kernel"])):
                if value not in row[column]:
                    row[column].append(value)
    return sorted(by_change.values(), key=lambda row: (row["file"], row["text"], row["new"]))
