"""What was carried or brought back and is damaged, cut short or of another release: a sentence, or done again."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.confirm_primitives import confirmed_before
from tests.support.fixtures.elsewhere import installed_for
from workers.gpu.interface import Device
from workers.offline import brought_back, ceilings, measure_there, there
from workers.offline.brought_back import StateDamaged, bring_back, restore
from workers.offline.measured import Conditions, Journal, append_line
from workers.offline.parts import Ended, Part, Progress

CHECK = Part("check", ("m",), 100)
DEVICE = Device("GPU", "GPU-1", (8, 0), "580", 108, 2**25, 2**33)


@pytest.fixture
def back(tmp_path: Path) -> Path:
    """A folder that was brought back."""
    into = tmp_path / "first"
    into.mkdir()
    progress = Progress(into, card=DEVICE)
    progress.begin(CHECK)
    progress.end(CHECK, Ended(0, 1.0, 2.0, False))
    (into / "ceilings.json").write_text("{}")
    bring_back(into, progress, [CHECK])
    return into / "back"


def without_parts(state: Path) -> None:
    with zipfile.ZipFile(state, "w") as archive:
        archive.writestr("ceilings.json", "{}")


def with_a_changed_byte(state: Path) -> None:
    data = bytearray(state.read_bytes())
    data[data.index(b"parts.jsonl") + len("parts.jsonl") + 3] ^= 0xFF  # of the compressed text
    state.write_bytes(data)


def of_another_method(state: Path) -> None:
    data = bytearray(state.read_bytes())
    data[data.index(b"PK\1\2") + 10] = 97  # APPNOTE.TXT 4.4.5: no method that Python has
    state.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.unlink(), "cannot read .*No such file"),
        (lambda state: state.write_bytes(b""), "is damaged"),
        (lambda state: state.write_bytes(b'{"no": "archive"}'), "is damaged"),
        (lambda state: state.write_bytes(state.read_bytes()[:-30]), "is damaged"),
        (with_a_changed_byte, "is damaged"),
        (of_another_method, "is damaged"),
        (without_parts, r"is not what a run brings back: it has no parts\.jsonl"),
    ],
)
def test_a_damaged_state_is_named_and_nothing_of_it_is_restored(
    damage: Callable[[Path], Any], message: str, back: Path, tmp_path: Path
) -> None:
    damage(back / "state.zip")
    into = tmp_path / "second"
    into.mkdir()
    with pytest.raises(StateDamaged, match=rf"(?s)state\.zip.*{message.split('.*')[-1]}.*carry it again"):
        restore(back, into, DEVICE)
    assert list(into.iterdir()) == []


def test_a_state_that_would_fill_the_memory_is_refused(
    back: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brought_back, "MOST_STATE", 10)
    with pytest.raises(StateDamaged, match=r"parts\.jsonl has more than 10 bytes"):
        restore(back, tmp_path / "second", DEVICE)


def test_the_command_says_so_and_ends_as_wrongly_used(
    back: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (back / "state.zip").write_bytes(b"?")
    words = [str(installed_for(tmp_path)), "--into", str(tmp_path / "second"), "--continue-from", str(back)]
    words += ["--gpu-module", "tests.support.gpu.fake_gpu"]
    assert there.main(words) == there.WRONG_USE
    assert re.search(r"measure_there: .*state\.zip is damaged .*begins anew\n", capsys.readouterr().err)


PART = {"name": "carried.zip.1", "sha256": "0" * 64}
WHOLE = {"schema": 1, "python": None, "sha256": "1" * 64, "parts": [PART]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged"),
        (b"\xff", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b"[]", "does not name the parts"),
        ({"schema": 2}, "is of schema 2, this script reads 1"),
        ({**WHOLE, "parts": []}, "does not name the parts"),
        ({**WHOLE, "parts": [5]}, "does not name the parts"),
        ({**WHOLE, "parts": [{**PART, "name": "../outside"}]}, "does not name the parts"),
        ({**WHOLE, "sha256": 5}, "does not name the parts"),
        ({**WHOLE, "python": 3.12}, "does not name the parts"),
        (None, "No such file or directory; carry it again"),
    ],
)
def test_a_damaged_list_of_what_is_carried_is_named(
    content: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_there, "HERE", tmp_path)
    if content is not None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / "carried.json").write_bytes(data)
    with pytest.raises(SystemExit, match=rf"carried\.json.*{message}"):
        measure_there.read_carried()


def test_a_list_without_one_of_the_parts_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    script = tmp_path / "measure_there.py"
    script.write_bytes(Path(measure_there.__file__).read_bytes())
    (tmp_path / "carried.zip.1").write_bytes(b"a part")
    part = {"name": "carried.zip.1", "sha256": hashlib.sha256(b"a part").hexdigest()}
    (tmp_path / "carried.json").write_text(json.dumps({**WHOLE, "parts": [part]}))
    ended = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert re.fullmatch(
        r"measure_there: the parts that .* names are not all of the archive; carry it again\n", ended.stderr
    )


LINES = [
    b'{"card": 5}\n',
    b'{"run": 5}\n',
    b'{"counts": 5}\n',
    b"\xff\xfe\n",
    b'{"cut',
    b"5\n",
    b"[]\n",
    b"[" * 100_000 + b"\n",
    b"{}\n",
    b'{"of": "", "part": 5}\n',
]
LINES += [b'{"of": "", "part": "check", "ended": {"status": 0}}\n', b'{"of": "", "part": "check", "ended": 5}\n']
LINES += [b'{"part": "check"}\n', b'{"of": null, "part": "check", "ended": {"status": 0}}\n']
LINES += [b'{"of": [""], "depends_on": "machine", "part": "check", "ended": {"status": 0}}\n']


def test_damaged_lines_of_what_was_begun_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "parts.jsonl").write_bytes(b"\n".join(LINES))
    assert Progress(tmp_path).ended == {}
    assert dict(Progress(tmp_path).described([CHECK])) == {"check": "not begun"}
    Progress(tmp_path).end(CHECK, Ended(0, 1.0, 2.0, False))
    assert Progress(tmp_path).ended == {"check": Ended(0, 1.0, 2.0, False)}


def test_an_end_of_a_release_that_gave_no_reason_counts(tmp_path: Path) -> None:
    ended = {"status": 0, "seconds": 1.0, "limit": 2.0, "cut_off": False}
    append_line(tmp_path / "parts.jsonl", {"of": [""], "depends_on": "machine", "part": "check", "ended": ended})
    assert Progress(tmp_path).ended == {"check": Ended(0, 1.0, 2.0, False)}


def test_damaged_lines_of_what_was_measured_are_measured_again(tmp_path: Path) -> None:
    conditions = Conditions(DEVICE, {})  # type: ignore[arg-type]
    Journal(tmp_path, conditions).add_comparison(["a", "b"], None)
    for line in ({"result": 5}, {"result": {"candidate": "c"}}, {"compared": 5}, {"compared": ["c"], "comparison": 5}):
        append_line(tmp_path / "measured.jsonl", line)
    with (tmp_path / "measured.jsonl").open("ab") as file:
        file.write(b"\n".join(LINES))
    journal = Journal(tmp_path, conditions)
    assert journal.comparisons == {("a", "b"): None} and journal.result("c", None) is None


@pytest.mark.parametrize("text", ["", "[]", '{"uuid": 1}', "[" * 100_000])
def test_damaged_ceilings_are_measured_again(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ceilings.json").write_text(text)

    def lease(*_: Any) -> Path:
        raise LookupError("it is measured")

    monkeypatch.setattr(ceilings, "lease_file", lease)
    with pytest.raises(LookupError, match="it is measured"):
        ceilings.ceilings_of("module", DEVICE, tmp_path, None)  # type: ignore[arg-type]
    assert "the ceilings are measured again" in "".join(capsys.readouterr())


@pytest.mark.parametrize("text", ["", "[]", '{"primitives": 5}', "[" * 100_000])
def test_a_damaged_file_of_confirmed_primitives_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "confirmed.json").write_text(text)
    with pytest.raises(SystemExit, match=r"confirmed\.json .*remove it, and all is confirmed anew"):
        confirmed_before(tmp_path / "confirmed.json")
