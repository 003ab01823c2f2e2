"""Toolchains that workers compile with and GPUs that they measure on, by the workers' heartbeats; and workers that take
no work for now, because their machine cannot do any: its disk is full, or a store is away."""

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Row, or_, select

from storage.database.session import Session, clock_of
from storage.database.sql import change, core, insert_new, remove
from storage.database.tables import PENDING_OR_GIVEN_UP, BuildRow, DeviceRow, PauseRow, ToolchainRow
from storage.entities.searches import MeasuredUnder
from storage.queue.losses import SilenceWatch

LiveDevice = Row[Any]
"""Of `storage.database.tables.DeviceRow`."""


def measures_under(device: LiveDevice, operator: str) -> MeasuredUnder:
    """What its times of the operator are valid for. A worker of an older release reports no plan versions."""
    return MeasuredUnder(device.driver, device.description.get("plan_versions", {}).get(operator))


def register_device(session: Session, uuid: str, *, fresh: bool = False, **device: Any) -> None:
    """The heartbeat of a worker, by the columns of its GPU's row. `fresh`: the GPU has just computed a right result,
    which ends a drain."""
    values = {**device, "seen_at": clock_of(session).now(), **({"drained": None} if fresh else {})}
    insert_new(session, DeviceRow, [{"uuid": uuid, **values}])
    change(session, DeviceRow, DeviceRow.uuid == uuid, **values)


def drain_device(session: Session, uuid: str, reason: str) -> None:
    """Let the GPU take no more work, for this reason, until a worker is started on it anew. The first reason stays."""
    change(session, DeviceRow, DeviceRow.uuid == uuid, DeviceRow.drained.is_(None), drained=reason)


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


LiveToolchain = Row[Any]
"""Of `storage.database.tables.ToolchainRow`."""


def register_toolchain(session: Session, digest: str, description: dict[str, Any], targets: Sequence[str]) -> None:
    """The heartbeat of a worker with this toolchain."""
    values = {"description": description, "targets": list(targets), "seen_at": clock_of(session).now()}
    insert_new(session, ToolchainRow, [{"digest": digest, **values}])
    change(session, ToolchainRow, ToolchainRow.digest == digest, **values)


def live_toolchains(session: Session, within_seconds: float) -> list[LiveToolchain]:
    """Toolchains with a heartbeat within the last seconds, the latest first."""
    now = clock_of(session).now()
    # A heartbeat from the future is from before the clock was set back: a live worker sends another.
    live = select(core(ToolchainRow)).where(ToolchainRow.seen_at.between(now - within_seconds, now + within_seconds))
    return list(session.execute(live.order_by(ToolchainRow.seen_at.desc(), ToolchainRow.digest)))


def gone_toolchains(session: Session, live: Collection[LiveToolchain]) -> list[tuple[str, str]]:
    """Places of pending builds whose target a live worker compiles for, but with another compiler."""
    digests, targets = {row.digest for row in live}, {target for row in live for target in row.targets}
    build = core(BuildRow).c
    pending = select(build.target, build.toolchain).where(PENDING_OR_GIVEN_UP, build.state == "pending").distinct()
    places = session.execute(pending)
    return [(target, toolchain) for target, toolchain in places if toolchain not in digests and target in targets]


def standing_toolchains(session: Session, watch: SilenceWatch) -> list[LiveToolchain]:
    """Those that are not silent. While the database was away, no worker could send a heartbeat."""
    rows = session.execute(select(core(ToolchainRow)).order_by(ToolchainRow.digest)).all()
    silent = watch.silent(session, {row.digest: row.seen_at for row in rows})
    return [row for row in rows if row.digest not in silent]


LIVE_SECONDS = 15.0
"""A paused worker renews its pause every second or so; after so long without it is gone."""


def set_pause(session: Session, worker: str, reason: str | None) -> None:
    """Why the worker takes no work; None: it does. Pauses of workers that are gone are deleted."""
    expired = PauseRow.told_at < clock_of(session).now() - LIVE_SECONDS
    remove(session, PauseRow, or_(PauseRow.worker == worker, expired))
    if reason is not None:
        insert_new(session, PauseRow, [{"worker": worker, "reason": reason, "told_at": clock_of(session).now()}])


def is_paused(session: Session, worker: str) -> bool:
    return session.get(PauseRow, worker) is not None


def pauses(session: Session) -> dict[str, list[str]]:
    """The workers that are paused now, by reason."""
    now = clock_of(session).now()
    live = PauseRow.told_at.between(now - LIVE_SECONDS, now + LIVE_SECONDS)
    rows = session.execute(select(core(PauseRow)).where(live).order_by(PauseRow.reason, PauseRow.worker))
    workers: dict[str, list[str]] = {}
    for row in rows:
        workers.setdefault(row.reason, []).append(row.worker)
    return workers


def describe_pauses(paused: dict[str, list[str]]) -> str | None:
    """A sentence without a time: each change of it is sent as an event."""
    return "; ".join(f"{', '.join(workers)} paused: {reason}" for reason, workers in paused.items()) or None
