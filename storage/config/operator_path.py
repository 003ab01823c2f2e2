"""The operator folders that OPERATOR_PATH names: checked before anything is started, loaded by every server process."""

from codegen.errors import InvalidOperator
from codegen.operators import check_operators, load_operators
from storage.config.settings import Settings
from storage.errors import SettingsError


def load_operator_path(settings: Settings, *, only_check: bool = False) -> None:
    """Load the operators into this process; a process that only starts others just checks them. Raises `SettingsError`,
    which says what a folder lacks."""
    try:
        (check_operators if only_check else load_operators)(settings.operator_folders)
    except InvalidOperator as error:
        raise SettingsError(f"OPERATOR_PATH: {error}") from error
