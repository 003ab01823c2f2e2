"""GPUs say that they are alive, are drained with a reason, and come back with a worker that was started anew."""

from __future__ import annotations

from typing import Any

from storage.database.session import Database
from storage.entities.heartbeats import drain_device, drained_reason, drivers_of, live_devices, register_device
from tests.support.run.fake_clock import FakeClock


def register(database: Database, uuid: str, **changes: Any) -> None:
    values: dict[str, Any] = {
        "device_class": "NVIDIA H200",
        "capability": "9.0",
        "driver": "570.1",
        "description": {"multiprocessors": 132},
        "worker": "w",
    }
    with database.write() as session:
        register_device(session, uuid=uuid, **{**values, **changes})


def live(database: Database, **asked: Any) -> list[str]:
    with database.read() as session:
        return [device.uuid for device in live_devices(session, 30, **asked)]


def drain(database: Database, uuid: str, reason: str) -> None:
    with database.write() as session:
        drain_device(session, uuid, reason)


def reason_of(database: Database, uuid: str) -> str | None:
    with database.read() as session:
        return drained_reason(session, uuid)


def test_devices_are_live_while_their_workers_say_so(database: Database, clock: FakeClock) -> None:
    register(database, "old")
    clock.advance(20)
    register(database, "new", device_class="NVIDIA H100", capability="9.0")
    assert live(database) == ["new", "old"]  # by class
    clock.advance(20)
    register(database, "new", description={"multiprocessors": 114}, worker="w2", driver="580.2")
    assert live(database) == ["new"]
    with database.read() as session:
        (device,) = live_devices(session, 30)
    # Whatever changed between two signs of life is the newer one's.
    assert (device.device_class, device.worker, device.driver) == ("NVIDIA H200", "w2", "580.2")
    assert (device.capability, device.description, device.drained) == ("9.0", {"multiprocessors": 114}, None)
    assert device.seen_at == clock.now()


def test_a_drained_device_takes_no_work_until_a_worker_is_started_on_it_anew(database: Database) -> None:
    register(database, "a")
    register(database, "b")
    drain(database, "a", "does not answer")
    drain(database, "a", "still does not")
    register(database, "a")  # its worker lives on
    assert live(database) == ["b"]
    assert live(database, with_drained=True) == ["a", "b"]
    assert (reason_of(database, "a"), reason_of(database, "b"), reason_of(database, "unknown")) == (
        "does not answer",
        None,
        None,
    )
    register(database, "a", fresh=True)
    assert live(database) == ["a", "b"]
    assert reason_of(database, "a") is None


def test_the_driver_of_a_class_is_that_of_its_device_heard_of_last(database: Database, clock: FakeClock) -> None:
    register(database, "z", driver="570.1")
    clock.advance(1)
    register(database, "a", driver="580.2")
    register(database, "other", device_class="NVIDIA H100", driver="565.0")
    with database.read() as session:
        assert drivers_of(session, 30) == {"NVIDIA H200": "580.2", "NVIDIA H100": "565.0"}
    drain(database, "a", "too hot")
    clock.advance(1)
    with database.read() as session:
        assert drivers_of(session, 30) == {"NVIDIA H200": "570.1", "NVIDIA H100": "565.0"}
    clock.advance(60)
    with database.read() as session:
        assert drivers_of(session, 30) == {}
