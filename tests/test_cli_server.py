"""Where the command line finds a service, and what it says where there is none."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import cukiln
from cukiln import ServerMissing, UsageError
from cukiln.cli import main
from cukiln.cli_server import find_service, quickstart_file, running_service, server_module
from cukiln.client import DEFAULT_URL
from storage.settings import load_settings
from tests.fixtures_client import *  # noqa: F403
from tests.fixtures_client import ScriptedService

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


def lock_file(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "serve.lock").write_text(text)


def test_the_address_given_comes_before_the_environment(
    scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock_file(tmp_path / ".cukiln", f"pid 1, {scripted.url}")
    scripted.on("GET", "/healthz", {"status": "ok"})
    assert found() == (scripted.url, False)
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
    monkeypatch.setitem(sys.modules, "storage.settings", None)
    with pytest.raises(ServerMissing, match=r"this is the client alone\. Give the address"):
        found()


def test_a_server_that_lacks_a_package_names_it() -> None:
    code = (
        f"import sys; sys.path[:0] = [{str(Path(CLIENT).parent)!r}, {CLIENT!r}]\n"
        "sys.modules['pydantic_settings'] = None\n"
        "from cukiln.cli_server import server_module\n"
        "try: server_module('workers.serve')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ServerMissing the cukiln server is here, but the package 'pydantic_settings")


@pytest.mark.parametrize("command", [["tune", "request.json"], ["serve"]])
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
    monkeypatch.setattr(server_module("workers.serve"), "serve", lambda settings: called.append(settings) or 0)
    monkeypatch.setattr(server_module("workers.main"), "main", lambda argv: called.append(argv) or 7)
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
        ["compile", "--target", "sm_80", "--target", "sm_90a"],
        ["gpu", "--device", "0"],
        ["gpu", "--device", "GPU-1-2"],
        ["reconcile"],
    ]


def test_the_quickstart_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quickstart_file().name == "quickstart.json"
    monkeypatch.setattr("cukiln.cli_server.__file__", str(tmp_path / "a/b/c.py"))
    with pytest.raises(UsageError, match="checkout"):
        quickstart_file()
