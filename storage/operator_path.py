"""The operator folders that OPERATOR_PATH names: checked before anything is started, loaded by every server process."""

from __future__ import annotations

from codegen.errors import InvalidOperator
from codegen.operators import check_operators, load_operators
from storage.errors import SettingsError
from storage.settings import Settings


def load_operator_path(settings: Settings) -> None:
    """Make the operators known to this process. Raises `SettingsError`, which says what a folder lacks."""
    try:
        load_operators(settings.operator_folders)
    except InvalidOperator as error:
        raise SettingsError(f"OPERATOR_PATH: {error}") from error


def check_operator_path(settings: Settings) -> None:
    """The same without making them known: for a process that only starts others."""
    try:
        check_operators(settings.operator_folders)
    except InvalidOperator as error:
        raise SettingsError(f"OPERATOR_PATH: {error}") from error
