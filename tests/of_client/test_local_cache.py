"""The local cache: shared by processes, whole or absent, of a bounded size."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cukiln.errors import UsageError
from cukiln.local_cache import CachedAnswer, LocalCache

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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"other": 1}'])
def test_an_answer_that_cannot_be_read_is_absent(text: str, tmp_path: Path) -> None:
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / f"{'0' * 64}.json").write_text(text)
    assert LocalCache(tmp_path).answer("0" * 64) is None


def test_a_folder_that_cannot_be_made_keeps_no_answer_and_refuses_a_library(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = LocalCache(tmp_path / "file")
    cache.keep_answer("0" * 64, CachedAnswer("", "", 1, "1" * 64, 0.0), b"{}")
    assert cache.answer("0" * 64) is None
    with pytest.raises(UsageError, match="cannot be written"):
        cache.put(hashlib.sha256(b"x").hexdigest(), b"x")


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
