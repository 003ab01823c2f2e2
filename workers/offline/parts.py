"""The parts of a run on a machine without a network: what each is, which is next, and what became of it.

What began and ended stands in `parts.jsonl`, synced, so that the same command continues after whatever ended it. A part
that ended is not run again, but one that found no GPU, or could not be run; one that was cut off is, where it would
have more time, or continues where it was, as it does behind a crash and a lost context; one that the whole run ended
with twice is left out, but for the last, which loses nothing by it. What a part shows is of the installation, of a
product with its driver, or of one card: on another it is run again.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from workers.gpu.interface import Device
from workers.offline.measured import append_line, read_lines

PARTS_FILE, CONFIRMED_FILE, PRIMITIVES_JOURNAL = "parts.jsonl", "confirmed.json", "primitives.jsonl"
BUNDLE, WORKSPACES_LIBRARY = "bundle", "workspaces.so"  # in what was installed
TRIES = 2  # of a part with which the whole run ended
CUTS = 5  # one after the other, of a part that continues: what it does first takes longer than it has, or ends it
SHARE = 0.25  # of the budget, for one part but the last
LEAST_SECONDS = 2.0  # that is worth a start
NOTHING_TO_USE = 2  # exit status of each part that finds no GPU, or nothing to drive it
NOT_RUN = 3  # of one that this machine cannot run, such as without a compiler: its last line says why
LEFT_OPEN = 4  # of one that this machine's trouble, or a lost context, kept from some of its work


@dataclass(frozen=True)
class Part:
    """`python -m` with `arguments`. `seconds`: of one try at most. `continues`: it repeats nothing that it has done.
    `takes_rest`: it has all that is left of the budget, and ends in order within `--budget`. `depends_on`: what its
    result depends on, beside the installation."""

    name: str
    arguments: Sequence[str]
    seconds: float
    continues: bool = False
    takes_rest: bool = False
    depends_on: Literal["machine", "product", "card"] = "machine"

    @property
    def log(self) -> str:
        """The file of its output."""
        return f"{self.name.replace(' ', '-')}.log"

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", *self.arguments]


@dataclass(frozen=True)
class Ended:
    """How a try ended. `limit`: its seconds; `cut_off`: whether it reached them, or was stopped; `why`: it was not
    run, or found nothing to use."""

    status: int
    seconds: float
    limit: float
    cut_off: bool
    why: str = ""

    @property
    def is_short(self) -> bool:
        """It did not come to its end: it was cut off, it crashed, or left something open."""
        return self.cut_off or self.status < 0 or self.status == LEFT_OPEN

    @property
    def is_well(self) -> bool:
        """Nothing failed, and nothing is left that could be run here."""
        return self.status in (0, NOT_RUN) and not self.cut_off


def parts_of(installed: Path, into: Path, *, gpu_module: str, device: str, seconds: float) -> list[Part]:
    """What shows most about all that follows comes first."""
    of_gpu = ("--gpu-module", gpu_module, "--device", device)
    measured = ("workers.offline.measure_bundle", str(installed / BUNDLE), "--out", str(into / "measured"))
    results = ("--result", str(into / CONFIRMED_FILE), "--journal", str(into / PRIMITIVES_JOURNAL))
    primitives = ("tests.gpu.confirm_primitives", *results, *of_gpu)
    workspaces = ("tests.gpu.check_workspaces", "--library", str(installed / WORKSPACES_LIBRARY), *of_gpu)
    last = (*measured, *of_gpu, "--seconds", str(seconds))
    return [
        Part("libraries", ("workers.offline.libraries_there",), 60),
        Part("primitives", primitives, 150, continues=True, depends_on="product"),
        Part("measuring checks", ("tests.gpu.check_measuring", *of_gpu), 180, depends_on="card"),
        Part("workspaces", workspaces, 90, depends_on="product"),
        Part("ceilings", ("workers.offline.ceilings", "--out", str(into), *of_gpu), 90, depends_on="card"),
        Part("candidates and vendor", last, float("inf"), continues=True, takes_rest=True, depends_on="product"),
    ]


def cards_of(folder: Path) -> list[Device]:
    """Those that the folder's results are of, in their order: the last one has it now."""
    return [card for line in read_lines(folder / PARTS_FILE) if (card := card_of(line)) is not None]


def card_of(line: Mapping[str, Any], name: str = "card") -> Device | None:
    """None where the line names none, or is damaged."""
    try:
        return Device.from_dict(line[name])
    except (LookupError, TypeError, ValueError):
        return None


class Progress:
    """What was begun and what ended, in `folder`, of the installation called `of`, which has other kernels than another
    one, and of the card; None: there is none to use. `cards`: those that its results are of, the last one last."""

    def __init__(self, folder: Path, of: str = "", card: Device | None = None) -> None:
        self._path, self._of, self._card = folder / PARTS_FILE, of, card
        self._begun: dict[str, int] = {}  # tries without an end
        self._short: dict[str, int] = {}  # tries that were, since the last that was not
        self.ended: dict[str, Ended] = {}
        if card is not None and card not in cards_of(folder)[-1:]:
            append_line(self._path, {"card": card.as_dict(), "at": time.time()})
        self.cards = cards_of(folder)
        own = {kind: self._facts_of(kind) for kind in ("machine", "product", "card")}
        for line in read_lines(self._path):
            if _is_whole(line) and line["of"] == own.get(str(line.get("depends_on"))):
                self._take(line)

    def begin(self, part: Part) -> None:
        self._write(part, {"part": part.name, "began": time.time()})

    def end(self, part: Part, ended: Ended) -> None:
        self._write(part, {"part": part.name, "ended": vars(ended), "at": time.time()})

    def next_limit(self, part: Part, budget: float, left: float) -> float | None:
        """The seconds that the part has now; None where it is not run."""
        limit = left if part.takes_rest else min(part.seconds, SHARE * budget, left)
        ended = self.ended.get(part.name)
        if limit < LEAST_SECONDS or (self._begun.get(part.name, 0) >= TRIES and not part.takes_rest):
            return None
        if ended is None or part.takes_rest:
            return None if ended is not None and ended.status == 0 and not ended.cut_off else limit
        goes_on = ended.is_short and part.continues and self._short.get(part.name, 0) < CUTS
        has_more = ended.cut_off and limit > ended.limit
        return limit if ended.status in (NOTHING_TO_USE, NOT_RUN) or goes_on or has_more else None

    def described(self, parts: Sequence[Part]) -> Iterator[tuple[str, str]]:
        """A word for each part."""
        for part in parts:
            ended = self.ended.get(part.name)
            if ended is None:
                tries = self._begun.get(part.name, 0)
                yield part.name, f"the run ended with it, {tries} times" if tries else "not begun"
            elif ended.status == NOT_RUN:
                yield part.name, ended.why or "not run"
            elif ended.status == NOTHING_TO_USE and ended.why:
                yield part.name, f"exit status {ended.status}: {ended.why}"
            elif ended.cut_off:
                yield part.name, f"cut off after {ended.seconds:.0f} s"
            else:
                yield part.name, f"exit status {ended.status} after {ended.seconds:.0f} s"

    def _facts_of(self, kind: str) -> list[str]:
        if kind == "machine" or self._card is None:
            return [self._of]
        product = [self._of, self._card.name, self._card.driver]
        return product if kind == "product" else [*product, self._card.uuid]

    def _write(self, part: Part, line: Mapping[str, Any]) -> None:
        facts = {"of": self._facts_of(part.depends_on), "depends_on": part.depends_on}
        append_line(self._path, {**facts, **line})
        self._take(line)

    def _take(self, line: Mapping[str, Any]) -> None:
        name = str(line["part"])
        if "ended" in line:
            self.ended[name] = ended = Ended(**line["ended"])
            self._short[name] = self._short.get(name, 0) + 1 if ended.is_short else 0
            self._begun[name] = 0
        else:
            self._begun[name] = self._begun.get(name, 0) + 1


def _is_whole(line: Mapping[str, Any]) -> bool:
    """Whether it says what this release reads; the part of one that does not is run again."""
    ended, names = line.get("ended"), {field.name for field in fields(Ended)}
    of_end = isinstance(ended, dict) and names - {"why"} <= ended.keys() <= names
    return isinstance(line.get("part"), str) and isinstance(line.get("of"), list) and ("ended" not in line or of_end)
