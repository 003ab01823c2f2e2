"""Why a running job does not go on: it is to be measured on a GPU that no live worker has, or workers are paused."""

from __future__ import annotations

from sqlalchemy import String, cast, select

from storage.database import Session
from storage.device_classes import asks_predicted
from storage.devices import live_devices
from storage.judge import LIVE
from storage.new_items import FINISH
from storage.pauses import in_words, pauses
from storage.rows import core
from storage.tables import DeviceRow, ItemRow, JobProblemRow


def waiting_for(session: Session, job_id: str, live_seconds: float) -> str | None:
    """What the job lacks, in a sentence; None where it lacks nothing, or has all that a GPU can give it.

    A worker that gave no sign of life for `live_seconds` counts as gone.
    """
    finishing = select(ItemRow.id).where(ItemRow.kind == FINISH, ItemRow.ref == cast(JobProblemRow.id, String))
    wanted = session.scalars(
        select(JobProblemRow.device_class)
        .where(JobProblemRow.job_id == job_id, JobProblemRow.state.in_(LIVE), ~asks_predicted(), ~finishing.exists())
        .distinct()
    ).all()
    paused = in_words(pauses(session))
    if not wanted:
        return paused
    live = {device.device_class for device in live_devices(session, live_seconds)}
    gone = sorted(set(wanted) - live)
    return "; ".join([*(_sentence(session, device_class) for device_class in gone), *filter(None, [paused])]) or None


def _sentence(session: Session, device_class: str) -> str:
    """Without the time of day or a duration: watchers are told whenever it changes."""
    device = core(DeviceRow)
    known = session.execute(select(device).where(device.c.device_class == device_class).order_by(device.c.uuid)).all()
    words = [
        f"{one.uuid} was drained: {one.drained}" if one.drained else f"the worker of {one.uuid}, {one.worker}, is gone"
        for one in known
    ]
    return f"no live worker measures on {device_class}: {', '.join(words) or 'none was ever seen here'}"
