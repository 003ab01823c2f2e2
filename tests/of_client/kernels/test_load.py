"""Loading a kernel: its digest first, then tvm-ffi; without a driver a clear error where one is needed."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from starlette.responses import Response

from cukiln import (
    DeviceError,
    DigestMismatch,
    NotLoadable,
    ServiceUnreachable,
    UsageError,
    WinnerRecord,
    choose,
    load,
)
from cukiln.client import Client
from tests.support.fixtures.client import ScriptedService, record_json


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Exists once the library's constructor has run."""
    path = tmp_path / "constructor-ran"
    monkeypatch.setenv("CUKILN_TEST_TRACE", str(path))
    return path


def fetched_folder(folder: Path, library: bytes, digest: str) -> Path:
    folder.mkdir()
    (folder / f"{digest}.so").write_bytes(library)
    (folder / "record.json").write_text(WinnerRecord.model_validate(record_json(digest)).model_dump_json())
    return folder


@pytest.mark.parametrize("source", ["bytes", "file", "named file", "folder", "record", "entry"])
def test_every_source_gives_the_same_kernel(source: str, library: bytes, digest: str, tmp_path: Path) -> None:
    record = WinnerRecord.model_validate(record_json(digest))
    (tmp_path / "any.so").write_bytes(library)
    folder = fetched_folder(tmp_path / "fetched", library, digest)
    cache = tmp_path / "cache"
    (cache / "blobs").mkdir(parents=True)
    shutil.copy(folder / f"{digest}.so", cache / "blobs")
    calls: dict[str, Callable[[], Any]] = {
        "bytes": lambda: load(library, sha256=digest, cache_dir=cache),
        "file": lambda: load(tmp_path / "any.so", sha256=digest, cache_dir=cache),
        "named file": lambda: load(str(folder / f"{digest}.so"), cache_dir=cache),
        "folder": lambda: load(folder, cache_dir=cache),
        "record": lambda: load(record, cache_dir=cache),
        "entry": lambda: load(record.front[0], cache_dir=cache),
    }
    kernel = calls[source]()
    assert kernel.path == cache / "blobs" / f"{digest}.so"
    assert kernel.workspace_bytes(3, 7) == 37
    assert (kernel.entry is not None) == (source in ("folder", "record", "entry"))


def test_the_records_extents_and_scalars_are_the_defaults(library: bytes, digest: str, tmp_path: Path) -> None:
    kernel = load(fetched_folder(tmp_path / "fetched", library, digest), cache_dir=tmp_path)
    assert kernel.workspace_bytes() == 45
    tensor = np.zeros(4, np.float32)
    kernel(tensor, tensor)
    seen = tvm_ffi.load_module(kernel.path).get_function("seen")
    assert seen() == 3 + 0.5 / 100
    kernel(tensor, scalars=(2.0,))
    assert seen() == 2 + 2.0 / 100
    kernel(tensor, workspace=tensor)  # needs none
    assert seen() == 2 + 0.5 / 100


@pytest.mark.parametrize("source", ["bytes", "file", "folder", "cache"])
def test_other_bytes_are_refused_before_anything_of_them_runs(
    source: str, library: bytes, digest: str, tmp_path: Path, trace: Path
) -> None:
    wrong = library + b"\0"  # still loads: the loader ignores what follows the last section
    path = tmp_path / "any.so"
    path.write_bytes(wrong)
    folder = fetched_folder(tmp_path / "fetched", wrong, digest)
    cache = tmp_path / "cache"
    if source == "cache":
        (cache / "blobs").mkdir(parents=True)
        (cache / "blobs" / f"{digest}.so").write_bytes(wrong)
        client = Client("http://127.0.0.1:9", cache_dir=cache, timeout=0.1)
        with pytest.raises(ServiceUnreachable), client:
            load(WinnerRecord.model_validate(record_json(digest)), client=client)
    else:
        given: dict[str, tuple[Any, str | None]] = {
            "bytes": (wrong, digest),
            "file": (path, digest),
            "folder": (folder, None),
        }
        with pytest.raises(DigestMismatch, match="does not have the promised content") as caught:
            load(given[source][0], sha256=given[source][1], cache_dir=cache)
        assert caught.value.expected == digest
    assert not (cache / "blobs" / f"{digest}.so").exists()
    assert not trace.exists()
    load(library, sha256=digest, cache_dir=cache)
    assert trace.exists()  # so the two lines above could have failed


def test_a_record_takes_its_library_from_the_service(
    library: bytes, digest: str, scripted: ScriptedService, tmp_path: Path
) -> None:
    scripted.on("GET", f"/v1/blobs/sha256/{digest}", Response(library))
    with Client(scripted.url, cache_dir=tmp_path) as client:
        record = WinnerRecord.model_validate(record_json(digest))
        assert load(record, client=client).workspace_bytes(1) == 1
        assert load(record, client=client).workspace_bytes(2) == 2
    assert len(scripted.seen) == 1


def test_without_a_client_the_service_of_the_environment_is_asked(
    library: bytes, digest: str, scripted: ScriptedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.on("GET", f"/v1/blobs/sha256/{digest}", Response(library))
    monkeypatch.setenv("CUKILN_URL", scripted.url)
    monkeypatch.setenv("CUKILN_CACHE", str(tmp_path / "cukiln"))
    kernel = load(WinnerRecord.model_validate(record_json(digest)))
    assert kernel.path == tmp_path / "cukiln/blobs" / f"{digest}.so"


@pytest.fixture(params=["no folder", "of all users"])
def no_cache(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that cannot be a cache."""
    folder = tmp_path / "cache"
    if request.param == "no folder":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    return folder


def test_a_cache_that_cannot_be_written_takes_no_library_away(
    no_cache: Path, library: bytes, digest: str, scripted: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.on("GET", f"/v1/blobs/sha256/{digest}", Response(library))
    record = WinnerRecord.model_validate(record_json(digest))
    with Client(scripted.url, cache_dir=no_cache) as client:
        assert client.blob(digest) == library
        assert load(record, client=client).workspace_bytes(3, 7) == 37
    kernel = load(library, sha256=digest, cache_dir=no_cache)
    assert no_cache not in kernel.path.parents and kernel.workspace_bytes(3, 7) == 37
    (said,) = caplog.records
    assert str(no_cache) in said.message and "CUKILN_CACHE" in said.message


def test_what_is_loaded_without_a_cache_leaves_no_file(
    library: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_cache(tmp_path, monkeypatch)
    own = library + bytes(tmp_path)  # which this process has loaded for no other test
    first, second = (load(own, sha256=hashlib.sha256(own).hexdigest(), cache_dir=tmp_path / "cache") for _ in range(2))
    assert not list(tmp_path.glob("cukiln-*")) and not first.path.exists()
    assert first.path == second.path  # the second is no second copy in memory
    tensor = np.zeros(4, np.float32)
    first(tensor, tensor, scalars=(0.5,))
    assert second.function("seen")() == 3 + 0.5 / 100


def test_a_copy_that_was_cut_short_is_not_loaded_the_second_time(
    library: bytes, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_cache(tmp_path, monkeypatch)
    code = (
        "import cukiln, resource\n"
        "data = open('any.so', 'rb').read()\n"
        "def outcome():\n"
        "    try:\n"
        f"        return cukiln.load(data, sha256={digest!r}, cache_dir='cache').workspace_bytes(3, 7)\n"
        "    except cukiln.CukilnError as error:\n"
        "        return type(error).__name__\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) // 2, hard))\n"  # as a disk that is full
        "print(outcome(), outcome())\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))\n"
        "print(outcome())\n"
    )
    (tmp_path / "any.so").write_bytes(library)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["UsageError", "UsageError", "37"]
    assert not list(tmp_path.glob("cukiln-*"))


def without_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `cache` can be none; temporary files lie beside it."""
    (folder / "cache").write_text("")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_without_a_driver_prepare_says_what_is_missing(library: bytes, digest: str, tmp_path: Path) -> None:
    kernel = load(library, sha256=digest, cache_dir=tmp_path)
    with pytest.raises(DeviceError, match=r"device 0: no CUDA driver: libcuda\.so\.1 .*cukiln doctor"):
        kernel.prepare()


def test_wrong_arguments_raise_what_the_library_says(library: bytes, digest: str, tmp_path: Path) -> None:
    kernel = load(library, sha256=digest, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="0 arguments, 1 expected"):
        kernel()


def test_what_is_no_library_says_so(tmp_path: Path) -> None:
    data = b"\x7fELF but not really"
    with pytest.raises(NotLoadable, match="is not a kernel library"):
        load(data, sha256=hashlib.sha256(data).hexdigest(), cache_dir=tmp_path)


def test_a_library_without_entry_points_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int nothing;")
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", "empty.so", "empty.c"], cwd=tmp_path, check=True)
    data = (tmp_path / "empty.so").read_bytes()
    with pytest.raises(NotLoadable, match="export `run`"):
        load(data, sha256=hashlib.sha256(data).hexdigest(), cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"library", "needs sha256="),
        ("missing.so", "cannot read the library missing.so: No such file"),
        (".", "holds no readable record.json"),
    ],
)
def test_a_source_that_cannot_be_used_says_why(
    source: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        load(source, cache_dir=tmp_path / "cache")


def test_a_file_whose_name_is_not_its_digest_needs_one(library: bytes, tmp_path: Path) -> None:
    (tmp_path / "any.so").write_bytes(library)
    with pytest.raises(UsageError, match=r"any\.so needs sha256="):
        load(tmp_path / "any.so", cache_dir=tmp_path)


def test_the_choice_keeps_to_the_workspace_and_to_equal_bits() -> None:
    base = record_json()["front"][0]
    front = [
        {**base, "candidate": "fast", "workspace_bytes": 100, "deterministic": False},
        {**base, "candidate": "small", "workspace_bytes": 10, "deterministic": False},
        {**base, "candidate": "equal", "workspace_bytes": 50, "deterministic": True},
    ]
    record = WinnerRecord.model_validate(record_json(front=front))
    assert choose(record).candidate == "fast"
    assert choose(record, workspace_limit_bytes=60).candidate == "small"
    assert choose(record, deterministic=True).candidate == "equal"
    with pytest.raises(UsageError, match="the least workspace is 10 bytes"):
        choose(record, workspace_limit_bytes=9)
