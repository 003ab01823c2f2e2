"""What a service keeps is its user's alone, also where an older release left it open; workers have no API key."""

from __future__ import annotations

import os
import stat
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from storage.config.files import close, close_tree
from storage.config.settings import Settings, load_settings
from storage.database.session import Database
from tests.support.fixtures.queue import JOURNAL_WORKER
from workers.supervisor import serve
from workers.supervisor.serve import Commands, Running
from workers.supervisor.start_checks import ServeError, lock_folder

KEY = "k" * 32


def open_to_others(folder: Path) -> dict[str, str]:
    """Of a folder and all in it, what others may do something with."""
    modes = {}
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        if mode & 0o077 and not stat.S_ISLNK(mode):
            modes[str(path.relative_to(folder))] = oct(stat.S_IMODE(mode))
    return modes


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Over a data folder as an older release left it."""
    folder = tmp_path_factory.mktemp("service")
    data = folder / "data"
    for inside in ("blobs/sha256/ab", "valkey/appendonlydir", "logs"):
        (data / inside).mkdir(parents=True)
    for file in ("blobs/sha256/ab/abc", "valkey/old.log", "logs/api.log", "cukiln.db.old"):
        (data / file).write_text("words")
    for path in (data, *data.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return load_settings(data_dir=data, port=0, workers=1, api_key=KEY, gpus="none")


@pytest.fixture(scope="module")
def umasks() -> Iterator[list[str]]:
    """Each that this process is given meanwhile, by which thread and from where: it has one for all of its threads."""
    given: list[str] = []
    real = os.umask

    def umask(mask: int) -> int:
        given.append(f"{mask:03o} by {threading.current_thread().name}: {''.join(traceback.format_stack()[-4:-1])}")
        return real(mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "umask", umask)
        yield given


@pytest.fixture(scope="module")
def running(settings: Settings, tmp_path_factory: pytest.TempPathFactory, umasks: list[str]) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_JOURNAL", str(tmp_path_factory.mktemp("journal") / "journal"))
        patch.setenv("CUKILN_API_KEY", KEY)
        before = os.umask(0o022)
        try:
            with serve.embedded(settings, commands=Commands(worker=JOURNAL_WORKER)) as made:
                yield made
                assert os.umask(0o022) == 0o077, umasks
            assert os.umask(before) == 0o022, "the caller's is back"
        finally:
            os.umask(before)


def test_all_that_a_running_service_has_is_closed_to_others(
    running: Running, settings: Settings, umasks: list[str]
) -> None:
    names = {path.name for path in settings.data_dir.rglob("*")}
    assert names >= {"cukiln.db", "cukiln.db-wal", "cukiln.db-shm", "valkey.sock", "valkey.log", "api.log"}
    assert open_to_others(settings.data_dir) == {}, "\n".join(umasks)


def test_the_api_alone_has_the_key(running: Running) -> None:
    for name, pid in running.pids.items():
        assert KEY.encode() not in Path(f"/proc/{pid}/environ").read_bytes(), name
    environment = serve.worker_environment(load_settings(api_key=KEY, host="0.0.0.0"))
    assert KEY not in environment.values() and environment["CUKILN_HOST"] == "127.0.0.1"
    assert httpx.get(f"{running.url}/v1/targets").status_code == 401
    assert httpx.get(f"{running.url}/v1/targets", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


def test_a_database_elsewhere_is_closed_too(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.db"
    path.touch(mode=0o644)
    path.chmod(0o644)
    database = Database(f"sqlite:///{path}")
    database.migrate()
    database.dispose()
    tmp_path.chmod(0o700)
    assert open_to_others(tmp_path) == {}


def test_a_closed_folder_is_not_looked_through_again_and_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.touch()
    outside.chmod(0o644)
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    (data / "link").symlink_to(outside)
    close_tree(data)
    assert oct(stat.S_IMODE(outside.stat().st_mode)) == "0o644"
    (data / "later").touch()
    (data / "later").chmod(0o644)
    close_tree(data)
    assert open_to_others(data) == {"later": "0o644"}


def test_a_device_is_not_closed(tmp_path: Path) -> None:
    """DATABASE_URL=sqlite:////dev/null, run as root, took /dev/null from all other users."""
    device = tmp_path / "device"
    try:
        os.mknod(device, stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this user may make no device")
    device.chmod(0o666)
    close(device)
    assert stat.S_IMODE(device.stat().st_mode) == 0o666


def test_a_folder_for_all_users_is_no_data_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(ServeError, match="is for all users"):
        lock_folder(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777
    assert list(tmp_path.iterdir()) == []
