"""A lock file pins what a model runs: nothing else is loaded, and nothing is asked for that is here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

import cukiln
from cukiln import DigestMismatch, NotLocked, UsageError, load
from cukiln.lock import Lock, make_lock
from cukiln.types import WinnerRecord
from tests.support.fixtures.client import ScriptedService, exit_code, record_json

PROBLEM: dict[str, Any] = {"operator": "matmul", "m": 4, "n": 4, "k": 4}


def record_of(library: str, **more: Any) -> WinnerRecord:
    return WinnerRecord.model_validate(record_json(library, **more))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """A command in an empty folder: its exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = exit_code(monkeypatch, *arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_lock_fetch_and_load_need_the_service_once(
    run: Any, scripted: ScriptedService, library: bytes, digest: str
) -> None:
    scripted.on(
        "POST",
        "/v1/lookups",
        {"results": [{"name": "ffn1", "key": "a" * 64, "record": record_json(digest)}], "hits": 1, "misses": 0},
    )
    scripted.on("GET", f"/v1/blobs/sha256/{digest}", Response(library))
    Path("request.json").write_text(json.dumps({"target": "sm_90a", "problems": [{**PROBLEM, "name": "ffn1"}]}))
    assert run("lock", "request.json", "--url", scripted.url) == (0, "cukiln.lock: 1 record\n", "")
    code, out, _ = run("fetch", "--lock", "--url", scripted.url)
    assert (code, out.partition(" in ")[0]) == (0, "cukiln.lock: 1 library")
    asked = len(scripted.seen)
    kernel = load({**PROBLEM, "name": "any"}, locked=True)  # from the cache
    assert kernel.entry is not None and kernel.entry.so_sha256 == digest
    assert load(PROBLEM, locked="cukiln.lock").path == kernel.path
    assert len(scripted.seen) == asked


def test_without_a_cache_a_fetch_writes_its_folder_and_libraries_of_a_lock_are_refused(
    run: Any, scripted: ScriptedService, library: bytes, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").write_text("")
    monkeypatch.setenv("CUKILN_CACHE", "file")
    files = {kind: hashlib.sha256(kind.encode()).hexdigest() for kind in ("cubin", "source")}
    record = record_json(digest, **files)
    scripted.on("GET", "/v1/kernels/" + "a" * 64, record)
    scripted.on("GET", f"/v1/blobs/sha256/{digest}", Response(library))
    for kind, of_kind in files.items():
        scripted.on("GET", f"/v1/blobs/sha256/{of_kind}", Response(kind))
    assert run("fetch", "a" * 64, "--out", "out", "--url", scripted.url)[0] == 0
    assert (Path("out") / ("a" * 16) / f"{digest}.so").read_bytes() == library
    make_lock(Path("cukiln.lock"), [PROBLEM], [WinnerRecord.model_validate(record)]).write()
    code, _, err = run("fetch", "--lock", "--url", scripted.url)
    assert code == 2 and "cannot be written" in err


def test_a_problem_without_a_winner_is_named_and_nothing_is_written(run: Any, scripted: ScriptedService) -> None:
    miss = {"results": [{"name": "ffn1", "key": "a" * 64, "record": None}], "hits": 0, "misses": 1}
    scripted.on("POST", "/v1/lookups", miss)
    Path("request.json").write_text(json.dumps({"target": "sm_90a", "problems": [{**PROBLEM, "name": "ffn1"}]}))
    code, out, err = run("lock", "request.json", "--url", scripted.url)
    assert (code, out, err) == (3, "", "ffn1: no winner yet; `cukiln tune` finds one\n")
    assert not Path("cukiln.lock").exists()


@pytest.mark.parametrize("source", ["newer record", "entry", "bytes", "file", "problem"])
def test_what_is_not_pinned_is_refused(source: str, library: bytes, digest: str, tmp_path: Path) -> None:
    lock = make_lock(tmp_path / "cukiln.lock", [PROBLEM], [record_of("d" * 64)])
    lock.write()
    (tmp_path / f"{digest}.so").write_bytes(library)
    other = record_of(digest, revision=2)
    given: dict[str, tuple[Any, str | None]] = {
        "newer record": (record_of("d" * 64, revision=2), None),
        "entry": (other.front[0], None),
        "bytes": (library, digest),
        "file": (tmp_path / f"{digest}.so", None),
        "problem": ({**PROBLEM, "m": 5}, None),
    }
    what, sha256 = given[source]
    with pytest.raises(NotLocked, match=r"cukiln\.lock"):
        load(what, sha256=sha256, locked=lock.path, cache_dir=tmp_path / "cache")


def test_what_is_pinned_is_loaded(library: bytes, digest: str, tmp_path: Path) -> None:
    record = record_of(digest)
    lock = make_lock(tmp_path / "cukiln.lock", [PROBLEM], [record])
    lock.write()
    for what, sha256 in [(record, None), (record.front[0], None), (library, digest)]:
        cukiln.load(library, sha256=digest, cache_dir=tmp_path)  # so that it is in the cache
        assert load(what, sha256=sha256, locked=lock.path, cache_dir=tmp_path).path.stem == digest


def test_a_problem_is_found_as_asked_and_as_the_service_writes_it(tmp_path: Path) -> None:
    records = [
        record_of("d" * 64, target=target, key=key * 64, problem={**PROBLEM, "dtype": "float32"})
        for target, key in (("sm_80", "1"), ("sm_90a", "2"))
    ]
    make_lock(tmp_path / "lock", [PROBLEM, PROBLEM], records).write()
    lock = Lock.read(tmp_path / "lock")
    assert (
        lock.record(PROBLEM, "sm_80") == lock.record({**PROBLEM, "dtype": "float32", "target": "sm_80"}) == records[0]
    )
    with pytest.raises(UsageError, match="for sm_80, sm_90a: name one"):
        lock.record(PROBLEM)
    with pytest.raises(NotLocked, match="not for sm_75"):
        lock.record(PROBLEM, "sm_75")


def test_numbers_of_a_call_keep_their_order_in_a_lock_and_in_the_cache(
    run: Any, scripted: ScriptedService, library: bytes, digest: str
) -> None:
    """They are those of a library's arrays, where `n` may stand before `k`."""
    record = record_json(digest)
    numbers = {
        "extents": {"n": 1, "k": 2, "h": 3},
        "attributes": {"stride": 2, "padding": 1},
        "launch": {"z": 1, "a": 2},
    }
    record["front"][0]["launch"] |= numbers
    result = {"name": "conv", "key": "a" * 64, "record": record}
    scripted.on("POST", "/v1/lookups", {"results": [result], "hits": 1, "misses": 0})
    for _ in range(2):  # the second client has it from the cache
        with cukiln.Client(scripted.url) as client:
            (answer,) = client.lookup([PROBLEM], target="sm_90a")
    assert len(scripted.seen) == 1 and answer.record is not None
    make_lock(Path("cukiln.lock"), [PROBLEM], [answer.record]).write()
    resorted = json.dumps(json.loads(Path("cukiln.lock").read_text()), sort_keys=True)
    Path("cukiln.lock").write_text(resorted)
    cukiln.load(library, sha256=digest)
    locked = load(PROBLEM, locked=True).entry
    assert locked is not None
    for launch in (answer.record.front[0].launch, locked.launch):
        written = launch.model_dump()
        assert {name: list(written[name].items()) for name in numbers} == {
            name: list(of_name.items()) for name, of_name in numbers.items()
        }


def test_a_record_of_the_cache_whose_numbers_have_lost_their_order_is_asked_for_again(
    run: Any, scripted: ScriptedService, digest: str
) -> None:
    result = {"name": "mm", "key": "a" * 64, "record": record_json(digest)}
    scripted.on("POST", "/v1/lookups", {"results": [result], "hits": 1, "misses": 0})
    with cukiln.Client(scripted.url) as client:
        (found,) = client.lookup([PROBLEM], target="sm_90a")
        assert found.record is not None
        sorted_names = json.dumps(found.record.model_dump(mode="json"), sort_keys=True).encode()
        ((answer, path),) = ((client.cache.answer(p.stem), p) for p in (client.cache.folder / "answers").iterdir())
        assert answer is not None
        kept = replace(answer, record=hashlib.sha256(sorted_names).hexdigest())
        client.cache.keep_answer(path.stem, kept, sorted_names)
    with cukiln.Client(scripted.url) as client:
        (found,) = client.lookup([PROBLEM], target="sm_90a")
    assert found.record is not None and len(scripted.seen) == 2


def test_a_lock_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    make_lock(path, [PROBLEM], [record_of("d" * 64)]).write()
    path.write_text(path.read_text().replace("d" * 64, "e" * 64))
    with pytest.raises(DigestMismatch, match="the record of problem0"):
        Lock.read(path)


@pytest.mark.parametrize(
    "text", [None, "", "[]", '{"version": 1}', '{"version": 2}', '{"version": 2, "records": [{}]}']
)
def test_what_is_no_lock_file_says_so(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKILN_LOCK", str(tmp_path / "lock"))
    if text is not None:
        (tmp_path / "lock").write_text(text)
    with pytest.raises(UsageError, match=r"lock"):
        load(PROBLEM, locked=True)


def test_a_problem_needs_a_lock() -> None:
    with pytest.raises(UsageError, match="needs locked=True"):
        load(PROBLEM)


def test_a_records_digest_stays_where_a_later_release_adds_a_field() -> None:
    written = json.loads(make_lock(Path("x"), [PROBLEM], [record_of("d" * 64)]).problems[0].record.model_dump_json())
    same = {**written, "a_later_field": None}
    first, second = (make_lock(Path("x"), [PROBLEM], [WinnerRecord.model_validate(v)]) for v in (written, same))
    assert first.problems[0].sha256 == second.problems[0].sha256
    assert hashlib.sha256(b"").hexdigest() != first.problems[0].sha256
