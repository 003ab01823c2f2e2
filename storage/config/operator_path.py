"""The operator folders that OPERATOR_PATH names: checked before anything is started, loaded by every server process."""

from codegen.errors import InvalidOperator
from codegen.operators import check_operators, load_operators
from storage.config.settings import Settings
from storage.errors import SettingsError


def load_operator_path(settings: Settings) -> None:
    """Load the operators into this process. Raises `SettingsError`, which says what a folder lacks."""
    try:
        load_operators(settings.operator_folders)
    except InvalidOperator as error:
        raise SettingsError(f"OPERATOR_PATH: {error}") from error


def check_operator_path(settings: Settings) -> None:
    """The same without loading them: for a process that only starts others."""
    try:
        check_operators(settings.operator_folders)
    except InvalidOperator as error:
        raise SettingsError(f"OPERATOR_PATH: {error}") from error
