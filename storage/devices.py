"""GPUs that workers measure on: their signs of life, and why one takes no more work."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, select, update

from storage.database import Session, clock_of
from storage.rows import core, insert_new
from storage.searches import MeasuredUnder
from storage.tables import DeviceRow

LiveDevice = Row[Any]
"""Of `storage.tables.DeviceRow`."""


def measures_under(device: LiveDevice) -> MeasuredUnder:
    """What its times are valid for. A worker of an older release does not say its test plan."""
    return MeasuredUnder(device.driver, device.description.get("plan_version"))


def register_device(
    session: Session,
    *,
    uuid: str,
    device_class: str,
    capability: str,
    driver: str,
    description: dict[str, Any],
    worker: str,
    fresh: bool = False,
) -> None:
    """Say that a worker has this GPU; called again and again while it does. `fresh`: it was just started and has seen
    the GPU compute something right, which ends a drain."""
    values: dict[str, Any] = {
        "device_class": device_class,
        "capability": capability,
        "driver": driver,
        "description": description,
        "worker": worker,
        "seen_at": clock_of(session).now(),
        **({"drained": None} if fresh else {}),
    }
    insert_new(session, DeviceRow, [{"uuid": uuid, **values}])
    session.execute(update(core(DeviceRow)).where(core(DeviceRow).c.uuid == uuid).values(**values))


def drain_device(session: Session, uuid: str, reason: str) -> None:
    """Let the GPU take no more work, for this reason, until a worker is started on it anew. The first reason stays."""
    session.execute(update(DeviceRow).where(DeviceRow.uuid == uuid, DeviceRow.drained.is_(None)).values(drained=reason))


def drained_reason(session: Session, uuid: str) -> str | None:
    """Why the GPU takes no more work; None where it does, or was never heard of."""
    return session.scalar(select(DeviceRow.drained).where(DeviceRow.uuid == uuid))


def live_devices(session: Session, within_seconds: float, *, with_drained: bool = False) -> list[LiveDevice]:
    """GPUs heard of within the last seconds, by class and UUID; drained ones only where asked for."""
    now = clock_of(session).now()
    query = select(core(DeviceRow)).where(DeviceRow.seen_at.between(now - within_seconds, now + within_seconds))
    if not with_drained:
        query = query.where(DeviceRow.drained.is_(None))
    return list(session.execute(query.order_by(DeviceRow.device_class, DeviceRow.uuid)))


def drivers_of(session: Session, within_seconds: float) -> dict[str, str]:
    """The driver of each class with a live GPU. Where two of a class differ, of the one heard of last."""
    devices = sorted(live_devices(session, within_seconds), key=lambda device: device.seen_at)
    return {device.device_class: device.driver for device in devices}
