"""Device classes: a GPU's product name, or `predicted:<target>` where the CPU verifies and an estimate ranks."""

from __future__ import annotations

from sqlalchemy import ColumnElement

from storage.database.tables import JobProblemRow

PREDICTED = "predicted:"


def is_predicted(device_class: str) -> bool:
    """Whether candidates of this class are verified on the CPU and never measured."""
    return device_class.startswith(PREDICTED)


def asks_predicted() -> ColumnElement[bool]:
    """The same of a problem's row. For those on a GPU: `~asks_predicted()`."""
    return JobProblemRow.device_class.startswith(PREDICTED, autoescape=True)
