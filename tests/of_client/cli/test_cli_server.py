"""Where the command line finds a service, and what it says where there is none."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import cukiln
from cukiln import ServerMissing, UsageError
from cukiln.cli.main import main
from cukiln.cli.server import find_service, quickstart_file, running_service, server_module
from cukiln.settings import DEFAULT_URL
from storage.blobs.blob_store import BlobStore
from storage.config.settings import load_settings
from storage.database.session import Database
from tests.support.fixtures.client import ScriptedService
from workers.supervisor.start_checks import ServeError, refuse_half_restored

CLIENT = str(Path(cukiln.__file__).parents[1])


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("CUKILN_URL", "CUKILN_DATA", "CUKILN_HOST", "CUKILN_PORT", "CUKILN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def found(url: str | None = None) -> tuple[str, bool]:
    with find_service(url, Console(file=io.StringIO())) as service:
        return service.url, service.embedded


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    """The exit code of a command and its words, which are one line."""
    monkeypatch.setattr("sys.argv", ["cukiln", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    captured = capsys.readouterr()
    [words] = (captured.out + captured.err).splitlines()
    return stopped.value.code, words


def lock_file(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "serve.lock").write_text(text)


def test_the_address_given_comes_before_the_environment_the_file_and_the_default(
    scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock_file(tmp_path / ".cukiln", f"pid 1, {scripted.url}")
    scripted.on("GET", "/healthz", {"status": "ok"})
    assert found() == (DEFAULT_URL, False)  # the same from every folder, whatever lies in this one
    assert found("private") == (scripted.url, False)
    (tmp_path / "config.toml").write_text('url = "http://file:1"')
    monkeypatch.setenv("CUKILN_CONFIG", str(tmp_path / "config.toml"))
    assert found() == ("http://file:1", False)
    monkeypatch.setenv("CUKILN_URL", "http://environment:1")
    assert found() == ("http://environment:1", False)
    assert found("http://option:1") == ("http://option:1", False)


@pytest.mark.parametrize("text", ["", "pid 7", "pid 7, http://127.0.0.1:9"])
def test_a_lock_file_that_was_left_behind_is_no_service(text: str, tmp_path: Path) -> None:
    lock_file(tmp_path / "data", text)
    assert running_service(tmp_path / "data") is None
    assert running_service(tmp_path / "nothing") is None


def test_the_default_address_is_that_of_the_server() -> None:
    assert load_settings().port == int(DEFAULT_URL.rpartition(":")[2])


def test_without_the_server_packages_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "storage.config.settings", None)
    with pytest.raises(ServerMissing, match=r"this is the client alone\. Give the address"):
        found("private")


def test_the_help_of_worker_needs_no_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "workers.worker.main", None)
    monkeypatch.setattr("sys.argv", ["cukiln", "worker", "--help"])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr().out
    assert stopped.value.code == 0
    for word in ("plan", "compile", "gpu", "reconcile", "--target", "--device"):
        assert word in said


def test_a_server_that_lacks_a_package_names_it() -> None:
    code = (
        f"import sys; sys.path[:0] = [{str(Path(CLIENT).parent)!r}, {CLIENT!r}]\n"
        "sys.modules['pydantic_settings'] = None\n"
        "from cukiln.cli.server import server_module\n"
        "try: server_module('workers.supervisor.serve')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ServerMissing the cukiln server is here, but the package 'pydantic_settings")


@pytest.mark.parametrize("command", [["tune", "request.json", "--url", "private"], ["serve"]])
def test_a_setting_that_cannot_be_used_is_one_line(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("request.json").write_text(json.dumps({"problems": [{}]}))
    monkeypatch.setenv("CUKILN_PORT", "none")
    monkeypatch.setattr("sys.argv", ["cukiln", *command])
    with pytest.raises(SystemExit) as stopped:
        main()
    err = capsys.readouterr().err
    assert stopped.value.code == 2
    assert err.startswith("cukiln: CUKILN_PORT: ")
    assert len(err.splitlines()) == 1


def test_the_options_of_serve_and_worker_reach_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[Any] = []
    monkeypatch.setattr(
        server_module("workers.supervisor.serve"), "serve", lambda settings: called.append(settings) or 0
    )
    monkeypatch.setattr(server_module("workers.worker.main"), "main", lambda argv: called.append(argv) or 7)
    for arguments, code in {
        ("serve", "--port", "0", "--workers", "3", "--data", "here"): 0,
        ("worker", "plan"): 7,
        ("worker", "compile", "--target", "sm_80", "--target", "sm_90a"): 7,
        ("worker", "gpu"): 7,
        ("worker", "gpu", "--device", "GPU-1-2"): 7,
        ("worker", "reconcile"): 7,
    }.items():
        monkeypatch.setattr("sys.argv", ["cukiln", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == code
    settings, *workers = called
    assert (settings.port, settings.workers, settings.data_dir) == (0, 3, tmp_path / "here")
    assert workers == [
        ["plan"],
        ["compile", "--target=sm_80", "--target=sm_90a"],
        ["gpu"],
        ["gpu", "--device=GPU-1-2"],
        ["reconcile"],
    ]


def test_the_quickstart_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quickstart_file().name == "quickstart.json"
    monkeypatch.setattr("cukiln.cli.server.__file__", str(tmp_path / "a/b/c.py"))
    with pytest.raises(UsageError, match="checkout"):
        quickstart_file()


UNREADABLE = "x" * 300  # the system refuses to look at it, as at what is in another user's closed folder


@pytest.mark.parametrize("command", [["gc"], ["blobs", "verify"], ["backup", "copy"]])
def test_data_that_cannot_be_looked_at_are_named_in_one_sentence(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUKILN_DATA", str(tmp_path / UNREADABLE))
    code, words = refused(monkeypatch, capsys, *command)
    assert code == 1
    assert words.startswith(f"cukiln: the data of sqlite:///{tmp_path / UNREADABLE}/cukiln.db cannot be used ([Errno ")
    assert words.endswith("set CUKILN_DATA or DATABASE_URL to others")


def test_a_database_that_cannot_be_opened_is_named_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUKILN_DATA", str(tmp_path))
    (tmp_path / "cukiln.db").write_text("words" * 1000)
    code, words = refused(monkeypatch, capsys, "gc")
    assert code == 1
    assert "cukiln.db cannot be used (file is not a database): " in words


def test_a_service_over_data_that_cannot_be_looked_at_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(
        ServeError, match=r"x cannot be used as the data folder \(File name too long\): set CUKILN_DATA"
    ):
        refuse_half_restored(tmp_path / UNREADABLE)


def test_a_backup_onto_a_file_says_what_to_name_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Database(load_settings().database_url).migrate()
    (tmp_path / "file").touch()
    code, words = refused(monkeypatch, capsys, "backup", "file")
    assert code == 1
    assert words.startswith("cukiln: no backup was made in file ([Errno 17] File exists: 'file'): name a new folder")


def test_a_backup_that_finds_no_room_says_what_to_name_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Database(load_settings().database_url).migrate()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        code, words = refused(monkeypatch, capsys, "backup", "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert words.startswith("cukiln: no backup was made in copy (disk I/O error): name a new folder")


def test_a_restore_into_a_file_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    manifest: dict[str, Any] = {"created_at": 0, "database": None, "blobs": {}, "missing": []}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUKILN_DATA", str(tmp_path / "file"))
    code, words = refused(monkeypatch, capsys, "restore", str(tmp_path))
    assert code == 1
    assert "was not restored into" in words and "set CUKILN_DATA to an empty or new folder" in words


def test_output_that_is_not_read_on_is_no_fault_of_the_data(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path)
    database = Database(settings.database_url)
    database.migrate()
    BlobStore(database, settings.blobs_url).put(b"gone", "-")
    shutil.rmtree(tmp_path / "blobs")
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "CUKILN_DATA": str(tmp_path)}
    command = [sys.executable, "-c", "from cukiln.cli.main import main; main()", "blobs", "verify"]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment, timeout=240, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, b"")
