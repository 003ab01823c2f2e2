"""Files that are damaged, cut short, of a wrong type or of another release: an error that names them, or a miss."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cukiln import UsageError
from cukiln.cli.elsewhere import compile_bundle, read_results
from cukiln.client import Client
from cukiln.errors import DigestMismatch
from cukiln.kernels.load_kernel import read_record
from cukiln.local_cache import LocalCache
from cukiln.lock import Lock, make_lock
from cukiln.settings import ClientSettings
from cukiln.types import WinnerRecord
from tests.support.fixtures.client import MATMUL, ScriptedService, hits, record_json

Clients = Callable[..., Client]
# What may stand in the place of any JSON file.
DAMAGED = {
    "empty": b"",
    "cut short": b'{"version": 1, "records": [{"na',
    "no text": b"\xff\xfe\x00",
    "no object": b"[1, 2]",
    "a number": b"5",
    "nested": b"[" * 100_000,
}
damaged = pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())


@damaged
def test_a_damaged_lock_file_is_named_with_what_to_do(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "cukiln.lock"
    file.write_bytes(data)
    with pytest.raises(UsageError, match=rf"{re.escape(str(file))} is not a lock file.*`cukiln lock` writes one"):
        Lock.read(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "is a lock file of version 1, and this release reads 2"),
        ({"records": 5}, "is not a whole lock file"),
        ({"records": ["text"]}, "is not a whole lock file"),
        ({"name": 5}, "is not a whole lock file"),
        ({"problem": [1]}, "is not a whole lock file"),
        ({"sha256": None}, "is not a whole lock file"),
        ({"record": 5}, "does not have the promised content"),
    ],
)
def test_a_lock_file_of_wrong_types_or_another_version_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "cukiln.lock"
    make_lock(file, [MATMUL], [WinnerRecord.model_validate(record_json())]).write()
    whole = json.loads(file.read_bytes())
    for name, value in change.items():
        (whole if name in whole else whole["records"][0])[name] = value
    file.write_text(json.dumps(whole))
    with pytest.raises((UsageError, DigestMismatch), match=message):
        Lock.read(file)


@damaged
def test_a_damaged_record_of_a_fetched_folder_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_bytes(data)
    with pytest.raises(UsageError, match=r"record\.json is not a winner record.*`cukiln fetch`"):
        read_record(tmp_path)


def test_a_record_of_another_release_says_which_field_it_is(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps({**record_json(), "revision": "new"}))
    with pytest.raises(UsageError, match=r"record\.json is not a winner record of this release \(revision: "):
        read_record(tmp_path)


@damaged
def test_the_file_of_a_bundles_job_that_is_damaged_is_named(data: bytes, tmp_path: Path, client_of: Clients) -> None:
    (tmp_path / "job.json").write_bytes(data)
    with pytest.raises(UsageError, match=r"job\.json .*remove it"):
        compile_bundle(client_of("http://127.0.0.1:1"), {"problems": []}, tmp_path)


WHOLE = json.dumps({"schema": 1, "problems": [{"candidates": [{"verdict": "ok"}]}]}).encode()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("results.json", b"", "is not JSON"),
        ("results.json", b"\xff", "is not JSON"),
        ("results.json", b"[" * 100_000, "is not JSON"),
        ("results.json", b"[]", "has no list of problems"),
        ("results.json", b'{"problems": []}', "is of schema None, and this release reads 1"),
        ("results.json", b'{"schema": 2, "problems": []}', "is of schema 2, and this release reads 1"),
        ("results.json", b'{"schema": 1, "problems": [5]}', r"problems\[0\] has no list of candidates"),
        ("results.json", b'{"schema": 1, "problems": [{"candidates": [5]}]}', r"problems\[0\] has no list"),
        ("results-1.json.gz", b"no gzip", "is damaged .*bring it back again"),
        ("results-1.json.gz", gzip.compress(WHOLE, mtime=0)[:-9], "is damaged .*bring it back again"),
        ("results-1.json.gz", gzip.compress(WHOLE, mtime=0)[:-5] + b"wrong", "is damaged .*bring it back again"),
    ],
)
def test_results_that_are_damaged_are_named(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=rf"{re.escape(str(tmp_path / name))}.*{message}"):
        read_results(tmp_path / name)
    (tmp_path / "results-1.json.gz").write_bytes(gzip.compress(WHOLE, mtime=0))
    assert read_results(tmp_path / "results-1.json.gz")["problems"]


def test_results_that_would_fill_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cukiln.cli.elsewhere.MOST_RESULTS", 1000)
    (tmp_path / "results-1.json.gz").write_bytes(gzip.compress(b" " * 1001 + WHOLE, mtime=0))
    with pytest.raises(UsageError, match="holds more than 1,000 bytes"):
        read_results(tmp_path / "results-1.json.gz")


@pytest.mark.parametrize("data", [b"\xff", b"url = ", b"a = " + b"[" * 100_000], ids=["no text", "cut short", "nested"])
def test_a_damaged_configuration_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(data)
    with pytest.raises(UsageError, match=r"config\.toml cannot be read .*mend or remove it"):
        ClientSettings.from_environment({"CUKILN_CONFIG": str(tmp_path / "config.toml")})


def test_a_wrong_number_of_the_configuration_is_named_as_its_own(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("cache_bytes = -1")
    variables = {"CUKILN_CONFIG": str(config)}
    with pytest.raises(UsageError, match=rf"^{re.escape(str(config))}: cache_bytes is -1; expected a whole number"):
        ClientSettings.from_environment(variables)
    with pytest.raises(UsageError, match=r"^CUKILN_CACHE_BYTES is '-2'; expected a whole number"):
        ClientSettings.from_environment({**variables, "CUKILN_CACHE_BYTES": "-2"})


def test_a_configuration_that_is_named_and_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"CUKILN_CONFIG names .*confg\.toml, where there is no file"):
        ClientSettings.from_environment({"CUKILN_CONFIG": str(tmp_path / "confg.toml")})


def test_a_configuration_file_that_the_system_refuses_to_look_at_is_an_error_that_names_it(tmp_path: Path) -> None:
    for folder in (tmp_path / ("x" * 300), tmp_path / "file"):  # longer than a name may be, and no folder
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match=r"the configuration file .*config\.toml cannot be read"):
            ClientSettings.from_environment({"CUKILN_CONFIG": str(folder / "config.toml")})


def test_a_user_without_a_home_folder_sees_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UsageError, match=r"there is no home folder .*set HOME, or XDG_CONFIG_HOME"):
        ClientSettings.from_environment({})
    named = {"XDG_CONFIG_HOME": str(tmp_path), "CUKILN_CACHE": str(tmp_path)}
    assert ClientSettings.from_environment(named).cache_dir == tmp_path


# --- the cache: a miss, which the next answer replaces


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(b'{"url": "http'),
    "another's": lambda path: path.write_bytes(b'{"version": 2}'),
    "nested": lambda path: path.write_bytes(b"[" * 100_000),
    "wrong types": lambda path: path.write_bytes(b'{"url": 1, "key": [], "revision": "1", "record": 5, "at": "now"}'),
    "a folder": a_folder,
    "a pipe": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "without an end": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("room", ["answers", "blobs"])
def test_a_damaged_file_of_the_cache_is_a_miss_and_is_replaced(
    room: str, damage: Callable[[Path], Any], scripted: ScriptedService, tmp_path: Path
) -> None:
    scripted.on("POST", "/v1/lookups", hits())
    with Client(scripted.url, cache_dir=tmp_path / "cache") as client:
        client.lookup([MATMUL])
    (file,) = (tmp_path / "cache" / room).iterdir()
    whole = file.read_bytes()
    file.unlink()
    damage(file)
    with Client(scripted.url, cache_dir=tmp_path / "cache") as client:
        assert client.lookup([MATMUL])[0].record is not None
    assert len(scripted.seen) == 2 and file.is_file()
    assert room == "answers" or file.read_bytes() == whole
    with Client(scripted.url, cache_dir=tmp_path / "cache", offline=True) as client:
        assert client.lookup([MATMUL])[0].record is not None


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_library_of_the_cache_is_replaced(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    cache, data = LocalCache(tmp_path), b"a library"
    digest = hashlib.sha256(data).hexdigest()
    (tmp_path / "blobs").mkdir(parents=True)
    damage(cache.path(digest))
    assert cache.get(digest) is None
    assert cache.put(digest, data).read_bytes() == data and cache.get(digest) == data
