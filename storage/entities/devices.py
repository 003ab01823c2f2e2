"""GPUs that workers measure on: their heartbeats, and why one takes no more work."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, select, update

from storage.database.session import Session, clock_of
from storage.database.sql import core, insert_new
from storage.database.tables import DeviceRow
from storage.entities.searches import MeasuredUnder

LiveDevice = Row[Any]
"""Of `storage.database.tables.DeviceRow`."""


def measures_under(device: LiveDevice, operator: str) -> MeasuredUnder:
    """What its times of the operator are valid for. A worker of an older release reports no plan versions."""
    return MeasuredUnder(device.driver, device.description.get("plan_versions", {}).get(operator))


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
    """The heartbeat of a worker. `fresh`: its GPU has just computed a right result, which ends a drain."""
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
    """Why the GPU takes no more work; None where it does, or was never registered."""
    return session.scalar(select(DeviceRow.drained).where(DeviceRow.uuid == uuid))


def live_devices(session: Session, within_seconds: float, *, with_drained: bool = False) -> list[LiveDevice]:
    """GPUs with a heartbeat within the last seconds, by class and UUID; drained ones only with `with_drained`."""
    now = clock_of(session).now()
    query = select(core(DeviceRow)).where(DeviceRow.seen_at.between(now - within_seconds, now + within_seconds))
    if not with_drained:
        query = query.where(DeviceRow.drained.is_(None))
    return list(session.execute(query.order_by(DeviceRow.device_class, DeviceRow.uuid)))


def drivers_of(session: Session, within_seconds: float) -> dict[str, str]:
    """The driver of each class with a live GPU. Where two of a class differ, the one with the latest heartbeat."""
    devices = sorted(live_devices(session, within_seconds), key=lambda device: device.seen_at)
    return {device.device_class: device.driver for device in devices}
