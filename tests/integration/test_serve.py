"""`cukiln serve` starts everything or nothing, keeps it running, and leaves nothing behind, however it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from codegen.operators import operators
from storage.config.operator_path import load_operator_path
from storage.config.settings import Settings, load_settings
from storage.database.session import Database
from storage.entities.heartbeats import live_devices
from tests.support.fixtures.queue import JOURNAL_WORKER, QueueWorld, wait_for
from tests.support.gpu.fake_gpu import configure
from tests.support.processes.running import name_of, opened, processes_of, running_with
from tests.support.processes.server_processes import ServerProcess, WarmForkServer, start_process, warm_up
from tests.support.run.places import FAULTY
from workers import wake_ups
from workers.processes import supervised_process
from workers.processes.fork_server import ForkServer
from workers.processes.supervised_process import Child, tail_of
from workers.supervisor import foundation, serve
from workers.supervisor.serve import Commands
from workers.supervisor.start_checks import ServeError
from workers.wake_ups import url_file
from workers.worker.main import WorkerError, redis_url

COMMANDS = Commands(worker=JOURNAL_WORKER)
SERVE = f"""
import sys
from storage.config.settings import load_settings
from workers.supervisor.serve import Commands, serve
sys.exit(serve(load_settings(), commands=Commands(worker={JOURNAL_WORKER!r}, api=eval(sys.argv[1]))))
"""
NAMED = ("api", "plan worker", "valkey")
NAMES = {"api", "fork server", "compile worker 1", "plan worker", "reconcile", "valkey"}


class Serving:
    """A `cukiln serve` in a process of its own. `own_python`: nothing is imported there before."""

    def __init__(
        self, folder: Path, settings: Settings, api: Sequence[str] = Commands().api, *, own_python: bool = False
    ) -> None:
        self.folder, self.settings = folder, settings
        self.output = folder / "serve.txt"
        self.output.touch()
        self.process = (self._start if own_python else self._fork)(tuple(api), serve.child_environment(settings))

    def _fork(self, api: tuple[str, ...], env: dict[str, str]) -> ServerProcess | subprocess.Popen[bytes]:
        return start_process("supervisor", repr(JOURNAL_WORKER), repr(api), env=env, log=self.output)

    def _start(self, api: tuple[str, ...], env: dict[str, str]) -> ServerProcess | subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SERVE, repr(api)]
        with self.output.open("wb") as output:
            return subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_until_ready(self) -> str:
        wait_for(lambda: "ready: " in self.said() or self.process.poll() is not None)
        match = re.search(r"ready: (\S+)", self.said())
        assert match is not None, self.said()
        return match[1]

    def pids(self) -> dict[str, int]:
        """By name, as last said."""
        said = re.findall(r"^  (.+?) +pid (\d+)$|^(.+) started again, pid (\d+)$", self.said(), re.MULTILINE)
        return {name or again: int(pid or new) for name, pid, again, new in said}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("TEST_JOURNAL", str(tmp_path / "journal"))
    return load_settings(data_dir=tmp_path / "data", port=0, workers=1, max_attempts=50, gpus="none", lease_seconds=2.0)


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services that are started here: their fork servers have imported everything."""
    warm_up()
    monkeypatch.setattr(serve, "ForkServer", WarmForkServer)


@contextlib.contextmanager
def made(serving: Serving) -> Iterator[Serving]:
    """It leaves no process."""
    yield serving
    serving.kill()
    wait_for(lambda: not processes_of(serving.folder), what="processes left over")


@pytest.fixture
def serving(tmp_path: Path, settings: Settings) -> Iterator[Serving]:
    with made(Serving(tmp_path, settings)) as world:
        yield world


def world_of(serving: Serving, folder: Path) -> QueueWorld:
    """Its queue and database, seen from here."""
    url = url_file(serving.settings.data_dir / "valkey").read_text()
    return QueueWorld(folder, serving.settings, Database(serving.settings.database_url), wake_ups.connect(url))


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def own_serving(tmp_path: Path, settings: Settings) -> Iterator[Serving]:
    with made(Serving(tmp_path, settings, own_python=True)) as world:
        yield world


def test_everything_is_started_kept_running_where_it_is_killed_or_stopped_and_ended_in_order(
    own_serving: Serving, tmp_path: Path
) -> None:
    serving = own_serving
    url = serving.wait_until_ready()
    no_connection_and_no_open_file_is_shared(serving)
    before = serving.pids()
    assert set(before) == NAMES
    assert answers(url)

    world = world_of(serving, tmp_path)
    [ref] = world.add("quick")
    wait_for(lambda: world.journal("end", ref), what=serving.said())
    world.add("flushed", wake_up=False)
    wait_for(lambda: world.journal("end", "flushed:0-0"), what="the reconciler's wake-up")
    world.wait_until_done()

    for name in NAMED:
        os.kill(before[name], signal.SIGKILL)
    wait_for(lambda: serving.said().count("started again, pid") == 3, what=serving.said())
    wait_for(lambda: answers(url), what=serving.said())
    [ref] = world.add("later", wake_up=False)
    wait_for(lambda: world.journal("end", ref), what=serving.said())
    world.wait_until_done()

    stopped = serving.pids()
    for name in NAMED:
        os.kill(stopped[name], signal.SIGSTOP)
    wait_for(lambda: serving.said().count("started again, pid") == 6, what=serving.said())
    for name in NAMED:
        assert serving.said().count(f"{name} is stopped by a signal: it is killed") == 1
        assert gone(stopped[name])
    wait_for(lambda: answers(url), what=serving.said())
    world = world_of(serving, tmp_path)
    [ref] = world.add("first")
    wait_for(lambda: world.journal("start", ref), what=serving.said())
    os.kill(world.journal("start", ref)[0].pid, signal.SIGSTOP)  # the child of a worker
    wait_for(lambda: world.journal("end", ref), what=serving.said())

    [ref] = world.add("forever")
    wait_for(lambda: world.journal("start", ref), what=serving.said())
    for number in (signal.SIGINT, signal.SIGTERM):  # at once, as where make sends on what its whole group got
        serving.process.send_signal(number)
    assert serving.process.wait(240) == 0, serving.said()
    assert serving.said().endswith("stopped\n")
    assert "was killed" not in serving.said().partition("stopping;")[2]
    assert world.waiting() == 1  # handed back
    wait_for(lambda: not processes_of(tmp_path), what="processes left over")
    assert not answers(url)


STUBBORN_API = """
import http.server, os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
mute = pathlib.Path(os.environ["CUKILN_DATA"], "mute")
mute.unlink(missing_ok=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if mute.exists():
            time.sleep(300)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(os.environ["CUKILN_PORT"])), Handler).serve_forever()
"""


def test_an_api_that_does_not_answer_is_started_again_and_a_second_signal_stops_without_waiting_for_it(
    settings: Settings, tmp_path: Path
) -> None:
    with made(Serving(tmp_path, settings, api=(sys.executable, "-c", STUBBORN_API))) as serving:
        url = serving.wait_until_ready()
        before = serving.pids()["api"]
        (settings.data_dir / "mute").touch()
        wait_for(lambda: "api started again" in serving.said(), what=serving.said())
        assert "api does not answer: it is killed" in serving.said()
        assert gone(before)
        wait_for(lambda: answers(url), what=serving.said())

        serving.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "stopping;" in serving.said())
        time.sleep(serve.SAME_SIGNAL_SECONDS)
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait(240) == 0
        assert "api did not end in time and was killed" in serving.said()


SILENT_API = "import time; time.sleep(301)"


def test_a_stop_during_the_start_leaves_nothing_and_kills_nothing_that_runs(settings: Settings, tmp_path: Path) -> None:
    with made(Serving(tmp_path, settings, api=(sys.executable, "-c", SILENT_API))) as serving:
        wait_for(lambda: running_with(SILENT_API), what=serving.said())
        serving.process.send_signal(signal.SIGINT)
        assert serving.process.wait(240) == 1
        assert serving.said().endswith("stopped before it was ready\n")
        assert "was killed" not in serving.said()
        wait_for(lambda: not processes_of(tmp_path), what="processes left over")


FORK_SERVERS_END = "fork server was killed by SIGKILL, and with it all that it had forked"


@pytest.mark.long  # a stopped one is killed, too: below
def test_a_killed_fork_server_ends_what_it_forked_and_all_of_it_runs_again(serving: Serving, tmp_path: Path) -> None:
    serving.wait_until_ready()
    world = world_of(serving, tmp_path)
    end_fork_server(serving, world, "first", signal.SIGKILL)
    assert serving.said().count(FORK_SERVERS_END) == 1
    assert not world.journal("TWICE")


def end_fork_server(serving: Serving, world: QueueWorld, behaviour: str, number: signal.Signals) -> None:
    """Under a running step, until all of it runs again."""
    [ref] = world.add(behaviour)
    wait_for(lambda: compilers(world.folder), what="the compiler")
    before = serving.pids()
    forked = [pid for name, pid in before.items() if name != "valkey"]
    dying = [*forked, *compilers(world.folder)]
    again = serving.said().count("started again, pid") + len(forked)
    os.kill(before["fork server"], number)
    wait_for(lambda: all(map(gone, dying)), what="all to die")

    wait_for(lambda: serving.said().count("started again, pid") == again, what=serving.said())
    assert serving.pids().keys() == NAMES
    assert not set(serving.pids().values()) & set(forked)
    wait_for(lambda: answers(serving.wait_until_ready()), what=serving.said())
    wait_for(lambda: world.journal("end", ref), what=serving.said())


def compilers(folder: Path) -> list[int]:
    """What steps of this test's service have started."""
    return [process.pid for process in processes_of(folder) if name_of(process) == "sleep"]


def test_a_stopped_fork_server_is_ended_with_what_it_forked_and_a_killed_supervisor_leaves_no_process(
    serving: Serving, tmp_path: Path
) -> None:
    """All of it runs again, started by the supervisor or by the next one."""
    serving.wait_until_ready()
    world = world_of(serving, tmp_path)
    end_fork_server(serving, world, "first", signal.SIGSTOP)
    assert serving.said().count(FORK_SERVERS_END) == 1
    [ref] = world.add("first_2")
    wait_for(lambda: compilers(tmp_path), what="the compiler")
    pids = [*serving.pids().values(), *(process.pid for process in processes_of(tmp_path))]
    serving.kill()
    wait_for(lambda: all(map(gone, pids)), what="all to die")
    wait_for(lambda: not processes_of(tmp_path))

    with serve.embedded(serving.settings, commands=COMMANDS) as running:
        assert answers(running.url)
        wait_for(lambda: world.journal("end", ref), what="the item to be run again")
    assert not world.journal("TWICE")
    wait_for(lambda: not processes_of(tmp_path), what="processes left over")


def no_connection_and_no_open_file_is_shared(serving: Serving) -> None:
    """By processes of one fork server."""
    pids = serving.pids()
    roles = [psutil.Process(pid) for name, pid in pids.items() if name not in ("valkey", "fork server")]
    server = psutil.Process(pids["fork server"])
    assert {role.ppid() for role in roles} == {server.pid}
    assert server.num_threads() == 1
    assert not [name for name in opened(server.pid) if "cukiln.db" in name]
    sockets = [{name for name in opened(process.pid) if name.startswith("socket:")} for process in (server, *roles)]
    assert len(set.union(*sockets)) == sum(map(len, sockets))  # no socket in two processes
    assert len(sockets[0]) == 1 + len(roles)  # to the supervisor: its own, and one for each
    assert {os.getsid(role.pid) for role in roles} == {role.pid for role in roles}
    assert os.getpgid(server.pid) == server.pid


def test_no_gpu_is_looked_for_where_none_is_to_be_used(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.worker.gpu_worker.probe", lambda *_: pytest.fail("CUKILN_GPUS=none"))
    assert foundation.check_machine(settings) == []


def test_an_embedded_service_is_there_for_a_block_alone_on_its_folder_and_an_error_passes_through(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has found no GPU."""
    monkeypatch.setattr("workers.worker.gpu_worker.probe", lambda *_: [])
    with pytest.raises(WorkerError, match=r"REDIS_URL.*cukiln serve"):
        redis_url(settings)
    messages: list[str] = []
    bare = settings.model_copy(update={"gpus": "auto", "gpu_module": "tests.support.gpu.fake_gpu"})
    with (
        pytest.raises(RuntimeError, match="in the block"),
        serve.embedded(bare, commands=COMMANDS, say=messages.append) as running,
    ):
        assert answers(running.url)
        assert set(running.pids) == NAMES
        assert running.url in (settings.data_dir / "serve.lock").read_text()
        assert redis_url(settings) == running.redis_url, "a worker started by hand finds the queue"
        assert wake_ups.connect(redis_url(settings)).ping()
        with pytest.raises(ServeError, match=f"another cukiln serve.*{running.url}.*CUKILN_DATA"):
            serve.Supervisor(settings, say=print).start()
        assert answers(running.url)
        port = running.url.rpartition(":")[2]
        second = settings.model_copy(update={"port": int(port), "data_dir": tmp_path / "other"})
        with pytest.raises(ServeError, match=f"port {port}.*CUKILN_PORT"):
            serve.Supervisor(second, say=print).start()
        raise RuntimeError("in the block")
    assert all(map(gone, running.pids.values()))
    assert not answers(running.url)
    assert messages == [], "nothing is said about a GPU"


def test_a_child_that_ends_at_its_start_stops_everything_and_shows_its_words(
    settings: Settings, tmp_path: Path
) -> None:
    broken = Commands(api=(sys.executable, "-c", "import sys; sys.exit('no such animal')"), worker=JOURNAL_WORKER)
    with (
        pytest.raises(ServeError, match=r"(?s)api ended with 1 at its start:\n.*no such animal"),
        serve.embedded(settings, commands=broken),
    ):
        pass
    wait_for(lambda: not processes_of(tmp_path), what="processes left over")


def test_a_module_that_cannot_be_imported_is_shown_at_the_start(settings: Settings, tmp_path: Path) -> None:
    broken = Commands(api=(sys.executable, "-m", "no_such_module"), worker=JOURNAL_WORKER)
    words = r"(?s)the fork server ended with 1 at its start:\n.*No module named 'no_such_module'"
    with pytest.raises(ServeError, match=words), serve.embedded(settings, commands=broken):
        pass
    wait_for(lambda: not processes_of(tmp_path), what="processes left over")


def test_a_package_that_is_not_installed_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "workers.supervisor.foundation", raising=False)
    monkeypatch.delattr("workers.supervisor.foundation", raising=False)
    monkeypatch.setitem(sys.modules, "redis.exceptions", None)
    with pytest.raises(ServeError, match=r"the package 'redis.exceptions' .* is not installed: `make run`"):
        serve.Supervisor(settings, say=print).start()


# ---- GPUs


@pytest.fixture
def with_gpu(settings: Settings, tmp_path: Path) -> Settings:
    return settings.model_copy(
        update={
            "gpus": "auto",
            "gpu_module": "tests.support.gpu.fake_gpu",
            "gpu_lock_dir": tmp_path / "locks",
            "lease_seconds": 1,
        }
    )


def test_each_gpu_gets_a_worker_that_is_known_before_the_service_is_ready(
    with_gpu: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = [{"uuid": "GPU-0"}, {"uuid": "GPU-1", "name": "Another GPU"}]
    monkeypatch.setenv("NVIDIA_SIMULATED_GPU", configure(tmp_path / "gpus.json", devices=two))
    with serve.embedded(with_gpu, commands=COMMANDS) as running:
        assert set(running.pids) == {*NAMES, "gpu worker 1", "gpu worker 2"}
        database = Database(with_gpu.database_url)
        with database.read() as session:
            devices = live_devices(session, 60.0)
        assert [(device.device_class, device.uuid) for device in devices] == [
            ("Another GPU", "GPU-1"),
            ("Simulated GPU", "GPU-0"),
        ]
    assert all(map(gone, running.pids.values()))


def test_a_gpu_that_fell_out_is_used_again_once_it_answers(with_gpu: Settings, tmp_path: Path) -> None:
    messages: list[str] = []
    with serve.embedded(with_gpu, commands=COMMANDS, say=messages.append) as running:
        world = QueueWorld(tmp_path, with_gpu, Database(with_gpu.database_url), wake_ups.connect(running.redis_url))
        [ref] = world.add("gone", kind="measure", target="Simulated GPU")
        wait_for(lambda: "gpu worker 1 ended with 69, starting it again" in str(messages), what=str(messages))
        (tmp_path / "gpu-is-back").touch()
        wait_for(lambda: world.journal("end", ref), what=str(messages))
        assert {entry.attempt for entry in world.journal("start", ref)} == {1}


@pytest.mark.parametrize(
    ("gpus", "module", "message"),
    [
        (
            "0,GPU-77",
            "tests.support.gpu.fake_gpu",
            "CUKILN_GPUS=0,GPU-77: there is no GPU GPU-77 .* it has 0 = Simulated GPU",
        ),
        ("0", "tests.no_such_gpu", "CUKILN_GPUS=0: .*no_such_gpu.*set it to none"),
    ],
)
def test_a_gpu_that_was_named_and_is_not_there_is_refused(
    with_gpu: Settings, gpus: str, module: str, message: str
) -> None:
    asked = with_gpu.model_copy(update={"gpus": gpus, "gpu_module": module})
    with pytest.raises(ServeError, match=f"(?s){message}"):
        serve.Supervisor(asked, say=print).start()


def test_locks_that_cannot_have_a_folder_are_refused(with_gpu: Settings, tmp_path: Path) -> None:
    (tmp_path / "locks").touch()
    with pytest.raises(ServeError, match=r"CUKILN_GPU_LOCKS names .*locks, which is not a folder"):
        serve.Supervisor(with_gpu, say=print).start()


def test_what_cannot_be_said_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        serve.write_line("it runs")
        with contextlib.suppress(OSError):
            full.close()


# ---- checks before the start


def test_a_host_that_others_can_reach_needs_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], settings: Settings
) -> None:
    monkeypatch.setenv("CUKILN_DATA", str(settings.data_dir))
    monkeypatch.setenv("CUKILN_HOST", "0.0.0.0")
    assert serve.main() == 78
    assert re.search(r"0\.0\.0\.0.*CUKILN_API_KEY", capsys.readouterr().err)
    assert not settings.data_dir.exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "blobs_url",
            "file:///proc/y",
            r"the blob store file:///proc/y cannot be used \(No such file or directory\)",
        ),
        ("blobs_url", "s3://", r"the blob store s3:// cannot be used \(Generic URL error: .*\): name one that"),
        ("tool_folders", "/usr:/no/such", "CUKILN_TOOL_FOLDERS names /no/such, which is not a folder"),
        ("tool_folders", "/etc/passwd", "CUKILN_TOOL_FOLDERS names /etc/passwd, which is not a folder"),
    ],
)
def test_a_setting_that_the_machine_does_not_bear_out_is_named_in_one_sentence(
    capsys: pytest.CaptureFixture[str], settings: Settings, field: str, value: str, message: str
) -> None:
    assert serve.serve(settings.model_copy(update={field: value})) == 78
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2, said
    assert re.search(message, said[1])


def test_a_database_that_is_none_is_named_in_one_sentence(
    capsys: pytest.CaptureFixture[str], settings: Settings
) -> None:
    settings.data_dir.mkdir()
    (settings.data_dir / "cukiln.db").write_bytes(b"not a database" * 1000)
    assert serve.serve(settings) == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2, said
    words = "cukiln serve: the database {}/cukiln.db .*not a database.*DATABASE_URL"
    assert re.match(words.format(settings.data_dir), said[1]), said


@pytest.mark.parametrize("password", ["", "me:secret@", ":secret@"])
def test_a_redis_that_is_away_is_named_at_once_without_its_password(settings: Settings, password: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{closed.getsockname()[1]}"
        away = settings.model_copy(update={"redis_url": f"redis://{password}{place}/0?password=secret"})
        with pytest.raises(ServeError, match=f"REDIS_URL names redis://{place}/0, which does not answer") as refused:
            serve.Supervisor(away, say=print).start()
    assert "secret" not in str(refused.value)


def test_a_busy_port_is_named_with_its_setting(capsys: pytest.CaptureFixture[str], settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert serve.serve(settings.model_copy(update={"port": port})) == 1
    assert re.search(rf"127\.0\.0\.1 port {port} .*CUKILN_PORT", capsys.readouterr().out)


def test_without_a_compiler_it_says_what_to_install(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(settings.data_dir))
    with pytest.raises(ServeError, match=r"g\+\+"):
        serve.Supervisor(settings, say=print).start()


@pytest.mark.parametrize(
    ("variable", "value", "status", "message"),
    [
        ("CUKILN_NVCC", "/nowhere/nvcc", 1, "CUKILN_NVCC names /nowhere/nvcc, which is not an executable file"),
        ("CUKILN_CXX", "no-such-g++", 1, r"no host compiler: CUKILN_CXX names no-such-g\+\+, which is not"),
        ("OPERATOR_PATH", "{folder}", 78, "OPERATOR_PATH: {folder}: an operator folder needs a file kernel.cuh"),
        ("OPERATOR_PATH", "/nowhere", 78, "OPERATOR_PATH: /nowhere: an operator folder needs a file __init__.py"),
        ("CUKILN_DATA", "{folder}/__init__.py", 1, "{folder}/__init__.py cannot be used as the data.*CUKILN_DATA"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_in_one_sentence_that_names_its_variable(
    variable: str, value: str, status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "__init__.py").write_text("OPERATOR = None\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUKILN_DATA", str(tmp_path / "data"))
        patch.setenv(variable, value.format(folder=folder))
        assert serve.serve(load_settings()) == status
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2, said  # where the data are, and why it does not start
    assert re.match("cukiln serve: .*" + message.format(folder=folder), said[1]), said
    assert not processes_of(tmp_path)


def test_operator_code_that_fails_is_shown_with_its_folder(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "kernel.cuh").touch()
    (tmp_path / "__init__.py").write_text("import no_such_package\n")
    broken = load_settings(data_dir=settings.data_dir, operator_path=str(tmp_path))
    with pytest.raises(ServeError, match=f"OPERATOR_PATH: {tmp_path}: .*ModuleNotFoundError.*no_such_package"):
        serve.Supervisor(broken, say=print).start()


def test_checking_an_operator_does_not_make_it_known(settings: Settings) -> None:
    faulty = FAULTY
    before = set(operators())
    load_operator_path(settings.model_copy(update={"operator_path": str(faulty)}), only_check=True)
    assert set(operators()) == before


def test_children_get_every_setting_as_it_is_here(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
    monkeypatch.setenv("CUKILN_NVCC", "/elsewhere/nvcc")
    changed = load_settings(
        data_dir=settings.data_dir,
        redis_url="unix:///here",
        api_key="k" * 32,
        lease_seconds=7,
        workers=3,
        nvcc="/here/nvcc",
        host_compiler="/here/g++",
        operator_path="/here/a:/here/b",
    )
    environment = serve.child_environment(changed)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        assert load_settings() == changed
    assert "REDIS_URL" not in serve.child_environment(settings.model_copy(update={"redis_url": None}))


# ---- one kept child


def a_child(tmp_path: Path, server: ForkServer, words: str) -> Child:
    argv = [sys.executable, "-c", words]
    return Child("it", argv, server=server, env={}, log=tmp_path / "it.log", grace_seconds=1.0)


@pytest.fixture
def fork_server(tmp_path: Path) -> Iterator[ForkServer]:
    server = ForkServer("fork server", [], env=fork_server_environment(tmp_path), log=tmp_path / "server.log")
    yield server
    server.stop()
    wait_for(lambda: not processes_of(tmp_path), what="processes left over")


def fork_server_environment(tmp_path: Path) -> dict[str, str]:
    return serve.child_environment(load_settings(data_dir=tmp_path / "data"))


def test_a_child_is_started_again_after_growing_pauses(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_process, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(supervised_process, "LONGEST_PAUSE_SECONDS", 0.04)
    child = a_child(tmp_path, fork_server, "print('here'); raise SystemExit(3)")
    child.start()
    messages: list[str] = []
    while sum("started again" in words for words in messages) < 4:
        messages.append(child.keep() or "")
    pauses = [
        float(match[1])
        for words in messages
        if (match := re.search(r"ended with 3, starting it again in (\S+) s", words))
    ]
    assert pauses == [0.01, 0.02, 0.04, 0.04]
    child.end(5.0)
    assert tail_of(child.log).count("here") == 5


def test_a_child_that_cannot_be_started_is_tried_until_it_can(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_process, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(supervised_process, "LONGEST_PAUSE_SECONDS", 0.04)
    child = a_child(tmp_path, fork_server, "import time; time.sleep(300)")
    child.start()
    fork_server.stop()
    fork_server.log, log = tmp_path, fork_server.log  # a folder
    wait_for(lambda: "cannot be started" in (child.keep() or ""))
    for _ in range(20):
        assert child.keep() is None, "it was said before"
        time.sleep(0.01)
    fork_server.log = log
    wait_for(lambda: "it started again, pid" in (child.keep() or ""))


def test_a_hung_child_is_killed_and_said_to_be_once(tmp_path: Path, fork_server: ForkServer) -> None:
    child = a_child(tmp_path, fork_server, "import time; time.sleep(300)")
    child.start()
    wait_for(lambda: child.ended() or child.pid)
    os.kill(fork_server.pid or 0, signal.SIGSTOP)  # so that its end is not seen
    assert child.end_hung("does not answer") == "it does not answer: it is killed"
    assert child.end_hung("does not answer") is None


def test_a_child_that_was_killed_is_said_to_have_been(tmp_path: Path, fork_server: ForkServer) -> None:
    child = a_child(tmp_path, fork_server, "import time; time.sleep(300)")
    child.start()
    wait_for(lambda: child.ended() or child.pid)
    os.kill(child.pid or 0, signal.SIGKILL)
    wait_for(lambda: child.ended() is not None)
    assert "was killed by SIGKILL" in (child.keep() or "")


def test_a_child_dies_with_the_thread_that_started_its_fork_server(tmp_path: Path) -> None:
    """Why the supervisor starts and watches its children from one thread."""
    server = ForkServer("fork server", [], env=fork_server_environment(tmp_path), log=tmp_path / "server.log")
    child = a_child(tmp_path, server, "import time; print('up', flush=True); time.sleep(300)")
    enough = threading.Event()
    thread = threading.Thread(target=lambda: child.start() or enough.wait())  # type: ignore[func-returns-value]
    thread.start()
    wait_for(lambda: "up" in tail_of(child.log))
    assert child.ended() is None
    enough.set()
    thread.join()
    wait_for(lambda: child.ended() == -signal.SIGKILL)
    wait_for(lambda: not processes_of(tmp_path), what="processes left over")
