"""What is brought back from a machine without a network: at most 8 files of 16 MB, written as wholes.

```
report.json         what became of each part, on which card, the machine's libraries, what was too large
state.zip           what the run continues from, on another machine too (`restore`)
results-1.json.gz … what `cukiln import-results` sends; of a run that is not finished, too
confirmed.json      of the primitives
ceilings.json       of the device
logs.txt            the end of each part's output
```
"""

import gzip
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from lzma import LZMAError
from pathlib import Path
from typing import Any

from workers.gpu.interface import Device
from workers.offline.ceilings import CEILINGS_FILE
from workers.offline.measured import JOURNAL_FILE, RESULTS_FILE, count_all, lines_in, write_whole
from workers.offline.parts import CONFIRMED_FILE, PARTS_FILE, PRIMITIVES_JOURNAL, Part, Progress, card_of, cards_of

BACK = "back"
MOST_FILES, MOST_BYTES = 8, 16 * 2**20
STATE_FILE, REPORT_FILE, LOGS_FILE = "state.zip", "report.json", "logs.txt"
LOG_BYTES = 1 << 18  # of each part
# Below INTO: all that a later call needs.
JOURNAL = f"measured/{JOURNAL_FILE}"
STATE = (PARTS_FILE, CEILINGS_FILE, CONFIRMED_FILE, PRIMITIVES_JOURNAL, JOURNAL)
MOST_RESULTS = MOST_FILES - 5
MOST_STATE = 2**30  # bytes of one file of it
THEN = "carry it again, or leave --continue-from out, which begins anew"


class StateDamaged(Exception):
    """An earlier run cannot be continued from this; the message says which file, what is wrong and what to do."""


class TooLarge(Exception):
    """Nothing fits into so few files; the message says what."""


def bring_back(into: Path, progress: Progress, parts: Sequence[Part]) -> dict[str, int]:
    """Write `back` anew from what stands in `into`; its files with their bytes."""
    files: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    for name, data in _files(into, parts):
        if len(data) <= MOST_BYTES:
            files[name] = data
        else:
            left_out[name] = f"{len(data)} bytes, of at most {MOST_BYTES}"
    results, why = _results(into / "measured" / RESULTS_FILE)
    if why:
        left_out[RESULTS_FILE] = why
    report = {
        "schema": 1,
        "parts": dict(progress.described(parts)),
        "cards": [{"name": card.name, "uuid": card.uuid, "driver": card.driver} for card in progress.cards],
        "libraries": _libraries(into),
        "left_out": left_out,
    }
    files |= results | {REPORT_FILE: (json.dumps(report, indent=1) + "\n").encode()}
    folder = into / BACK
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        write_whole(folder / name, data)
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    return {name: len(data) for name, data in files.items()}


def restore(back: Path, into: Path, card: Device) -> str:
    """What a run on an earlier machine had done, where that was on such a card; nothing where this one has begun, which
    a call that found no GPU has not. A sentence. Raises StateDamaged, and has then written nothing."""
    if cards_of(into) or all((into / name).exists() for name in (PARTS_FILE, JOURNAL)):
        return f"{into} has begun: nothing of {back} is taken over"
    state = _state(back / STATE_FILE)
    earlier = _last_card(state, back / STATE_FILE)
    if earlier is None or (earlier.name, earlier.driver) != (card.name, card.driver):
        of = "no card" if earlier is None else f"{earlier.name}, {earlier.uuid}, driver {earlier.driver}"
        return f"{back} is of {of}: nothing of it counts for {card.name} with driver {card.driver}"
    for name in (*(name for name in state if name != PARTS_FILE), PARTS_FILE):  # last: it says that all of it is there
        if name == PARTS_FILE and earlier.uuid != card.uuid:
            count_all(into / "measured")
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(into / name, state[name])
    return f"continues what {earlier.name}, {earlier.uuid}, began"


def _last_card(state: Mapping[str, bytes], path: Path) -> Device | None:
    """An older release named it in the journal of what was measured alone."""
    lines = list(lines_in(state[PARTS_FILE].splitlines()))
    if state[PARTS_FILE] and not lines:
        raise StateDamaged(f"{path} is damaged: {PARTS_FILE} in it names no card; {THEN}")
    runs = lines_in(state.get(JOURNAL, b"").splitlines())
    named = [card for line in lines if (card := card_of(line)) is not None]
    named = named or [card for line in runs if "run" in line and (card := card_of(line, "device")) is not None]
    return named[-1] if named else None


def _state(path: Path) -> dict[str, bytes]:
    """The files of an archive of `bring_back`. Raises StateDamaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            held = {name: archive.getinfo(name) for name in STATE if name in archive.namelist()}
            if large := [name for name, entry in held.items() if entry.file_size > MOST_STATE]:
                raise StateDamaged(f"{path}: {large[0]} has more than {MOST_STATE} bytes, which no run writes; {THEN}")
            state = {name: archive.read(name) for name in held}
    except OSError as error:
        raise StateDamaged(f"cannot read {path} ({error.strerror or error}); {THEN}") from error
    # Cut short, changed, of another method of compression, or with a password.
    except (zipfile.BadZipFile, zlib.error, LZMAError, EOFError, RuntimeError, ValueError) as error:
        raise StateDamaged(f"{path} is damaged ({error}); {THEN}") from error
    if PARTS_FILE not in state:
        raise StateDamaged(f"{path} is not what a run brings back: it has no {PARTS_FILE}; {THEN}")
    return state


def _files(into: Path, parts: Sequence[Part]) -> Iterator[tuple[str, bytes]]:
    state = io.BytesIO()
    with zipfile.ZipFile(state, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in STATE:
            if (into / name).is_file():
                archive.writestr(name, (into / name).read_bytes())
    yield STATE_FILE, state.getvalue()
    for name in (CONFIRMED_FILE, CEILINGS_FILE):
        if (into / name).is_file():
            yield name, (into / name).read_bytes()
    logs = [into / part.log for part in parts]
    ends = [f"==> {log.name}\n".encode() + log.read_bytes()[-LOG_BYTES:] for log in logs if log.is_file()]
    yield LOGS_FILE, b"\n".join(ends)


def _results(path: Path) -> tuple[dict[str, bytes], str]:
    """Compressed, as many problems in a file as fit; or why there are none."""
    if not path.is_file():
        return {}, ""
    try:
        results = json.loads(path.read_bytes())
    except ValueError as error:
        return {}, f"{path} is damaged ({error}): `{STATE_FILE}` has all of it"
    try:
        packed = list(_packed(results, results["problems"]))
    except TooLarge as error:
        return {}, str(error)
    if len(packed) > MOST_RESULTS:
        return {}, f"{len(packed)} files of {MOST_BYTES} bytes, of at most {MOST_RESULTS}: `{STATE_FILE}` has all of it"
    return {f"results-{number}.json.gz": data for number, data in enumerate(packed, 1)}, ""


def _packed(results: Mapping[str, Any], problems: Sequence[Any]) -> Iterator[bytes]:
    content = json.dumps({**results, "problems": problems}, separators=(",", ":"), allow_nan=False)
    data = gzip.compress(content.encode(), mtime=0)
    if len(data) <= MOST_BYTES:
        yield data
    elif len(problems) == 1:
        raise TooLarge(f"{problems[0]['name']}: {len(data)} bytes of results, of at most {MOST_BYTES}")
    else:
        half = len(problems) // 2
        yield from _packed(results, problems[:half])
        yield from _packed(results, problems[half:])


def _libraries(into: Path) -> Any:
    log = into / "libraries.log"
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
