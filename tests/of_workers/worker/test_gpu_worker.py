"""A worker of one GPU: it finds it, says that it is alive, and stops using it when it is out of order."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from codegen.identity import CUDA
from cukiln.cli import doctor
from storage.config.files import UMASK
from storage.config.own_modules import gpu_plans
from storage.config.settings import load_settings
from storage.entities.heartbeats import LiveDevice, drain_device, live_devices
from tests.support.fixtures.queue import QueueWorld, make_world, wait_for
from tests.support.gpu.fake_gpu import UUID, VARIABLE, configure
from tests.support.processes.fences import machine
from workers import wake_ups
from workers.gpu.interface import FIRST_DRIVERS, Device, DriverTooOld, GpuMissing, require_driver
from workers.processes.fence.access import ROOT
from workers.processes.processes import Processes, fenced_processes
from workers.supervisor.valkey import EmbeddedValkey
from workers.worker import gpu_worker, main
from workers.worker.gpu_worker import EXIT_DRAINED, DeviceBeat, find_gpus

FAKE = "tests.support.gpu.fake_gpu"
CLASS = "Simulated GPU"


def device(number: int, name: str = "NVIDIA H200") -> Device:
    return Device(name, f"GPU-{number}", (9, 0), "570.1", 132, 50 * 2**20, 2**37)


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()


def test_without_cupy_nothing_is_started_and_the_words_say_what_to_install(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(gpu_worker, "probe", lambda *_: pytest.fail("a child was started"))
    with pytest.raises(GpuMissing, match=r"CuPy is not installed.*pip install"):
        find_gpus(load_settings(), processes)


@pytest.mark.parametrize(
    ("devices", "message"),
    [([], "no GPU is found.*nvidia-smi"), ([device(0, "predicted:sm_90a")], "cannot be the name of a device class")],
)
def test_a_machine_without_a_gpu_that_can_be_used_is_reported(
    devices: list[Device], message: str, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_worker, "probe", lambda *_: devices)
    with pytest.raises(GpuMissing, match=message):
        find_gpus(load_settings(gpu_module=FAKE), processes)


@pytest.mark.parametrize(
    ("cuda", "too_old"), [(12080, True), (11080, True), (13000, False), (13020, False), (0, False)]
)
def test_a_driver_that_cannot_load_the_kernels_ends_the_worker_before_it_takes_any_work(
    cuda: int, too_old: bool, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(device(0), cuda=cuda)
    monkeypatch.setattr(gpu_worker, "probe", lambda *_: [here])
    settings = load_settings(gpu_module=FAKE)
    if not too_old:
        assert find_gpus(settings, processes) == [here]
        return
    words = rf"\(570.1\) is for CUDA {cuda // 1000}.8, .* by CUDA 13, .* release 580 or later, .*"
    with pytest.raises(DriverTooOld, match=words):
        find_gpus(settings, processes)


def test_a_driver_with_which_no_gpu_can_be_listed_is_said_to_be_too_old(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, configure(tmp_path / "gpu.json", too_old="older than CuPy"))
    with pytest.raises(DriverTooOld, match="older than CuPy"):
        find_gpus(load_settings(gpu_module=FAKE), processes)


def test_kernels_of_cuda_12_need_an_older_driver() -> None:
    require_driver([replace(device(0), cuda=12040)], 12)
    with pytest.raises(DriverTooOld, match="release 525 or later"):
        require_driver([replace(device(0), cuda=11080)], 12)
    assert doctor.FIRST_DRIVERS == FIRST_DRIVERS and doctor.CUBINS_OF == CUDA == load_settings().cuda


@pytest.mark.parametrize(("driver", "too_old"), [(12080, False), (13000, False), (11080, True)])
def test_a_worker_of_cuda_12_takes_work_where_one_of_13_would_not(
    driver: int, too_old: bool, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(device(0), cuda=driver)
    monkeypatch.setattr(gpu_worker, "probe", lambda *_: [here])
    settings = load_settings(gpu_module=FAKE, cuda=12)
    if not too_old:
        assert find_gpus(settings, processes) == [here]
        return
    with pytest.raises(DriverTooOld, match=r"compiled by CUDA 12, .* release 525 or later, or use another machine"):
        find_gpus(settings, processes)


def test_gpus_are_listed_by_a_child(processes: Processes) -> None:
    [gpu] = find_gpus(load_settings(gpu_module=FAKE), processes)
    assert gpu.name == CLASS


def test_gpus_are_listed_where_the_data_folder_lies_in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKILN_DATA", str(ROOT / ".cukiln"))  # as it is without the setting
    settings = load_settings(gpu_module=FAKE)
    with closing(fenced_processes(settings)) as processes:
        [gpu] = find_gpus(settings, processes)
    assert gpu.name == CLASS


@pytest.mark.parametrize("argv", [["gpu"], ["gpu", "--device", "7"]])
def test_a_worker_that_has_no_gpu_ends_with_78_and_one_sentence(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUKILN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("CUKILN_GPU_MODULE", FAKE if len(argv) > 1 else "tests.no_such_gpu")
    before = os.umask(UMASK)  # which a worker keeps
    try:
        assert main.main(argv) == 78
    finally:
        os.umask(before)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("cukiln worker: ")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "argv", ["plan --target sm_80", "gpu --target sm_80", "compile --device 1", "reconcile --device 0"]
)
def test_an_option_of_another_kind_of_worker_is_refused(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(argv.split())
    kind, option, _ = argv.split()
    assert f"{option} is an option of" in capsys.readouterr().err, kind


# ---- heartbeats


def live(world: QueueWorld, *, with_drained: bool = True) -> list[LiveDevice]:
    with world.database.read() as session:
        return live_devices(session, 60.0, with_drained=with_drained)


def drain(world: QueueWorld, uuid: str) -> None:
    with world.database.write() as session:
        drain_device(session, uuid, "it fell off the bus")


def test_a_beat_registers_the_gpu_and_only_a_fresh_start_ends_a_drain(
    queue_world: QueueWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_worker, "BEAT_SECONDS", 0.0)
    beat = DeviceBeat(queue_world.database, device(0), "host.1")
    beat.start()
    [row] = live(queue_world)
    assert (row.uuid, row.device_class, row.capability, row.driver, row.worker) == (
        "GPU-0", "NVIDIA H200", "9.0", "570.1", "host.1"
    )  # fmt: skip
    sizes = {"multiprocessors": 132, "l2_bytes": 50 * 2**20, "memory_bytes": 2**37}
    assert row.description == {"plan_versions": gpu_plans(), **sizes}
    assert beat.may_continue()
    drain(queue_world, "GPU-0")
    beat()
    assert not beat.may_continue()
    assert beat.drained == "it fell off the bus"
    again = DeviceBeat(queue_world.database, device(0), "host.2")
    again.start()
    assert again.may_continue()


def test_a_gpu_that_is_listed_and_computes_nothing_stays_drained(
    queue_world: QueueWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    DeviceBeat(queue_world.database, device(0), "before").start()
    drain(queue_world, "GPU-0")
    monkeypatch.setattr(main, "find_gpus", lambda *_: [device(0)])
    monkeypatch.setattr(main, "why_silent", lambda *_, **__: "it has fallen off the bus")
    with caplog.at_level("INFO"):
        assert main.run_gpu_worker(queue_world.settings, {}, device="GPU-0") == EXIT_DRAINED
    assert "stays drained (it fell off the bus): it has fallen off the bus" in caplog.text
    assert "measuring on" not in caplog.text, "it says that it measures once it does"
    assert live(queue_world, with_drained=False) == []
    [row] = live(queue_world)
    assert str(row.drained) == "it fell off the bus" and row.worker != "before"


def test_a_database_that_is_away_does_not_end_the_worker(
    queue_world: QueueWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_worker, "BEAT_SECONDS", 0.0)
    beat = DeviceBeat(queue_world.database, device(0), "host.1")
    beat.start()
    path = queue_world.settings.data_dir / "cukiln.db"
    queue_world.database.dispose()
    path.rename(path.with_suffix(".away"))
    path.mkdir()
    beat()
    assert beat.may_continue()
    path.rmdir()
    path.with_suffix(".away").rename(path)


# ---- a worker in a process of its own


@pytest.fixture
def world(tmp_path: Path, valkey: EmbeddedValkey) -> Iterator[QueueWorld]:
    with make_world(tmp_path, valkey.url, gpu_module=FAKE, gpu_lock_dir=tmp_path / "locks", lease_seconds=1) as made:
        yield made


def test_it_takes_the_tasks_of_its_class_compares_before_it_measures_and_says_what_it_does(world: QueueWorld) -> None:
    """On a GPU that was drained and answers again."""
    DeviceBeat(world.database, replace(device(0, CLASS), uuid=UUID), "before").start()
    drain(world, UUID)
    world.add("other", kind="measure", target="NVIDIA H200")
    first, second = (world.add(kind, kind=kind, target=CLASS)[0] for kind in ("measure", "compare"))
    worker = world.start("gpu")
    wait_for(lambda: len(world.journal("end")) == 2, what=world.logs())
    assert [entry.ref for entry in world.journal("end")] == [second, first]
    assert world.waiting() == 1
    assert [(row.device_class, row.drained) for row in live(world)] == [(CLASS, None)]
    [said] = [line for line in world.logs().splitlines() if "doctor" in line]
    for name, is_there, words in machine().in_force():
        assert (name in said) is is_there
        assert (f"fence: {name}: {words}" in world.logs()) is not is_there
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(240) == 0


def drained_with_a_task_that_waits(world: QueueWorld) -> str:
    """The task of a worker that has ended, because its GPU went."""
    worker = world.start("gpu")
    [ref] = world.add("gone", kind="measure", target=CLASS)
    assert worker.wait(240) == EXIT_DRAINED, world.logs()
    assert "is drained and takes no more work: the GPU does not answer" in world.logs()
    assert live(world, with_drained=False) == []
    [row] = live(world)
    assert str(row.drained).startswith("the GPU does not answer")
    assert world.waiting() == wake_ups.queued_wake_ups(world.redis, "gpu", CLASS) == 1
    return ref


def test_a_gpu_that_is_gone_ends_the_worker_and_its_task_waits_uncounted(
    world: QueueWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu").mkdir()  # a child makes no file right beside the data folder
    monkeypatch.setenv(VARIABLE, configure(tmp_path / "gpu" / "gpu.json"))
    ref = drained_with_a_task_that_waits(world)
    assert {entry.attempt for entry in world.journal("start", ref)} == {1}


@pytest.mark.long  # the whole of the two before it, and of a GPU that is listed and computes nothing
def test_a_gpu_that_is_gone_ends_the_worker_and_another_takes_the_task_once_it_is_back(
    world: QueueWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu").mkdir()  # a child makes no file right beside the data folder
    gpu_file = tmp_path / "gpu" / "gpu.json"
    monkeypatch.setenv("NVIDIA_SIMULATED_GPU", configure(gpu_file))
    ref = drained_with_a_task_that_waits(world)

    configure(gpu_file, open="missing")  # it is listed, and computes nothing
    before = world.logs().count("measuring on")
    assert world.start("gpu").wait(240) == EXIT_DRAINED
    assert world.logs().count("measuring on") == before, "it says that it measures once it does"
    assert "stays drained (the GPU does not answer" in world.logs()
    assert "the simulated GPU has fallen off the bus" in world.logs()
    assert live(world, with_drained=False) == []

    configure(gpu_file)
    (world.folder / "gpu-is-back").touch()
    world.start("gpu")
    wait_for(lambda: world.journal("end", ref), what=world.logs())
    assert {entry.attempt for entry in world.journal("start", ref)} == {1}
    assert [each.drained for each in live(world)] == [None]
