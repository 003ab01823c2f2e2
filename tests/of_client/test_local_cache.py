"""The local cache: shared by processes, whole or absent, of a bounded size."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cukiln.client import Client
from cukiln.errors import UsageError
from cukiln.local_cache import CachedAnswer, LocalCache
from tests.support.fixtures.client import MATMUL, ScriptedService, hits

OLD = time.time() - 86_400


def put(cache: LocalCache, data: bytes, used: float = OLD) -> str:
    digest = hashlib.sha256(data).hexdigest()
    path = cache.put(digest, data)
    os.utime(path, (used, used))
    return digest


def test_the_longest_unused_go_first_and_what_is_in_use_stays(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path)
    oldest, older, new = put(cache, b"a" * 100, OLD - 2), put(cache, b"b" * 100, OLD - 1), put(cache, b"c" * 100, OLD)
    assert cache.get(oldest) is not None  # a use: now it is the newest
    removed = cache.prune(200)
    assert (removed.libraries, removed.bytes) == (1, 100)
    assert [cache.path(digest).exists() for digest in (oldest, older, new)] == [True, False, True]
    assert cache.prune(0).libraries == 1  # the one that is not in use
    assert cache.usage().libraries == 1
    assert cache.prune(0, unused_seconds=0).libraries == 1


def test_files_of_a_clock_that_stood_ahead_go_first_unless_they_are_used(tmp_path: Path) -> None:
    cache, ahead = LocalCache(tmp_path, most_bytes=250), time.time() + 10 * 365 * 86_400
    future = [put(cache, bytes([number]) * 100, ahead) for number in range(3)]
    old = put(cache, b"old" * 10, OLD)
    assert cache.get(future[0]) is not None  # a use: from now on its time is right
    left = tmp_path / "blobs" / ".killed"
    left.touch()
    os.utime(left, (ahead, ahead))
    assert cache.prune().libraries == 1
    assert [cache.path(digest).exists() for digest in (future[0], old)] == [True, True]
    assert sum(cache.path(digest).exists() for digest in future) == 2 and not left.exists()
    assert cache.prune(0).libraries == 2 and cache.path(future[0]).exists()
    assert cache.prune(0, unused_seconds=-math.inf).libraries == 1


def test_a_write_keeps_the_cache_below_its_limit(tmp_path: Path) -> None:
    large = LocalCache(tmp_path)
    for number in range(5):
        put(large, bytes([number]) * 1000)
    small = LocalCache(tmp_path, most_bytes=2500)
    put(small, b"new" * 100)
    assert small.usage().bytes <= 2500
    assert small.get(hashlib.sha256(b"new" * 100).hexdigest()) is not None


def test_damaged_files_are_found_and_removed(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path)
    good, bad = put(cache, b"good"), put(cache, b"bad")
    cache.path(bad).write_bytes(b"BAD")
    assert cache.verify() == [cache.path(bad)]
    assert cache.verify() == []
    assert cache.get(good) == b"good"


def test_an_answer_is_kept_with_its_record(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path)
    record = b'{"revision": 3}'
    answer = CachedAnswer("http://host", "key", 3, hashlib.sha256(record).hexdigest(), 5.0)
    cache.keep_answer("0" * 64, answer, record)
    assert LocalCache(tmp_path).answer("0" * 64) == answer
    assert cache.get(answer.record, "record") == record
    cache.drop_answer("0" * 64)
    assert cache.answer("0" * 64) is None


ANSWER = {"url": "http://host", "key": "a" * 64, "revision": 1, "record": "1" * 64, "at": 5.0}
WRONG = [{"url": 1}, {"key": None}, {"revision": "1"}, {"record": 7}, {"record": "../x"}, {"at": "now"}, {"etag": 1}]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"other": 1}', *(json.dumps(ANSWER | wrong) for wrong in WRONG)])
def test_an_answer_that_cannot_be_read_is_absent(text: str, tmp_path: Path) -> None:
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / f"{'0' * 64}.json").write_text(text)
    assert LocalCache(tmp_path).answer("0" * 64) is None


@pytest.mark.parametrize("wrong", WRONG)
def test_a_lookup_replaces_an_answer_of_wrong_types(
    wrong: dict[str, object], scripted: ScriptedService, client_of: Callable[..., Client]
) -> None:
    scripted.on("POST", "/v1/lookups", hits())
    assert client_of(scripted.url).lookup([MATMUL])[0].record is not None
    client = client_of(scripted.url)
    (file,) = (client.cache.folder / "answers").iterdir()
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole | wrong))
    assert client.lookup([MATMUL])[0].record is not None
    assert len(scripted.seen) == 2
    assert json.loads(file.read_text()).keys() == whole.keys() and client.cache.answer(file.stem) is not None


@pytest.mark.parametrize("room", ["", "blobs", "answers"])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_a_folder_that_others_may_write_is_not_used_and_that_is_said_once(
    mode: int, room: str, scripted: ScriptedService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.on("POST", "/v1/lookups", hits())
    folder = tmp_path / "shared"
    with Client(scripted.url, cache_dir=folder) as client:
        client.lookup([MATMUL])
        library = put(client.cache, b"library")
    (folder / room).chmod(mode)
    for _ in range(2):
        with Client(scripted.url, cache_dir=folder) as client:
            assert client.lookup([MATMUL])[0].record is not None
            assert client.cache.get(library) is None and client.cache.usage().records == 0
            with pytest.raises(
                UsageError, match=rf"{folder / room} is not used: others may write it \(mode {mode:04o}"
            ):
                put(client.cache, b"another")
    assert len(scripted.seen) == 3
    assert len(caplog.records) == 1 and "CUKILN_CACHE" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    digest = put(LocalCache(tmp_path), b"library")
    os.chown(tmp_path / "blobs", 12_345, -1)
    cache = LocalCache(tmp_path)
    assert cache.get(digest) is None and "is of user 12345, this process is of user 0" in str(cache.refusal)


def test_a_folder_is_made_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = LocalCache(tmp_path / "deep" / "cache")
        digest = put(cache, b"library")
        cache.keep_answer("0" * 64, CachedAnswer("", "", 1, "1" * 64, 0.0), b"{}")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (cache.folder, *cache.folder.iterdir())} == {0o700}
    assert LocalCache(cache.folder).get(digest) == b"library"


def test_a_folder_that_cannot_be_made_keeps_no_answer_and_refuses_a_library(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = LocalCache(tmp_path / "file")
    cache.keep_answer("0" * 64, CachedAnswer("", "", 1, "1" * 64, 0.0), b"{}")
    assert cache.answer("0" * 64) is None
    with pytest.raises(UsageError, match="cannot be written"):
        cache.put(hashlib.sha256(b"x").hexdigest(), b"x")


@pytest.mark.parametrize("again", [False, True])
def test_what_another_process_removes_while_all_is_verified_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    cache = LocalCache(tmp_path)
    path = cache.path(put(cache, b"library"))
    opens, opened = itertools.count(), os.open

    def remove_first(name: Any, *more: Any) -> int:
        if next(opens) > 0:
            return opened(name, *more)
        path.unlink()
        if again:  # once the reader has seen that it is gone
            monkeypatch.setattr(os.path, "lexists", lambda each: path.write_bytes(b"library") > 0)
        return opened(name, *more)

    monkeypatch.setattr(os, "open", remove_first)
    assert cache.verify() == []
    monkeypatch.undo()
    assert path.exists() == again


def test_processes_that_write_and_prune_at_once_see_whole_files_or_none(tmp_path: Path) -> None:
    code = f"""
import hashlib, random
from pathlib import Path
from cukiln.local_cache import LocalCache
cache = LocalCache(Path({str(tmp_path)!r}), most_bytes=100_000)
for _ in range(300):
    data = bytes([random.randrange(20)]) * 10_000
    digest = hashlib.sha256(data).hexdigest()
    cache.put(digest, data)
    got = cache.get(digest)
    assert got in (None, data)
    cache.prune(unused_seconds=0)
assert cache.verify() == []
"""
    children = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(3)]
    for child in children:
        _, errors = child.communicate(timeout=240)
        assert child.returncode == 0, errors.decode()
    assert not [path for path in (tmp_path / "blobs").iterdir() if path.name.startswith(".")]
