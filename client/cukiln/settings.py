"""What the client reads from its environment and its configuration file, in one place.

| variable | key in the file | meaning |
|---|---|---|
| `CUKILN_URL` | `url` | where the service is; default `http://127.0.0.1:8765` |
| `CUKILN_API_KEY` | `api_key` | sent as a Bearer token |
| `CUKILN_OFFLINE` | `offline` | `1`: nothing is sent, all comes from the cache |
| `CUKILN_CACHE` | `cache` | the folder of records and libraries; default `~/.cache/cukiln` |
| `CUKILN_CACHE_BYTES` | `cache_bytes` | how large it may grow; default 4 GiB |
| `CUKILN_CONFIG` | | the file, in TOML; default `~/.config/cukiln/config.toml` |

A variable goes before the file; an empty one counts as unset. `XDG_CACHE_HOME` and `XDG_CONFIG_HOME` are honoured. Any
other variable `CUKILN_…` is said to have no effect (`cukiln.variables`).
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cukiln.errors import UsageError
from cukiln.local_cache import DEFAULT_BYTES
from cukiln.variables import warn_of_misspelt

DEFAULT_URL = "http://127.0.0.1:8765"
BY_DEFAULT = "the default"  # what named the address where nothing did
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_KINDS: dict[str, type] = {"url": str, "api_key": str, "offline": bool, "cache": str, "cache_bytes": int}


@dataclass(frozen=True)
class ClientSettings:
    """Where the service is, how to be let in, where to keep what it answers. `url_from`: what named the address."""

    url: str
    url_from: str
    api_key: str | None = field(repr=False)
    cache_dir: Path
    cache_bytes: int
    offline: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "ClientSettings":
        """Raises `UsageError` for a value that cannot be used."""
        values = os.environ if environment is None else environment
        warn_of_misspelt(values)
        config = _config_file(values)
        configured = _read_config(config, is_named=bool(values.get("CUKILN_CONFIG")))
        named = {name: values.get(f"CUKILN_{name.upper()}") or configured.get(name) for name in _KINDS}
        of_file = str(config) if named["url"] else BY_DEFAULT
        return cls(
            url=named["url"] or DEFAULT_URL,
            url_from="CUKILN_URL" if values.get("CUKILN_URL") else of_file,
            api_key=named["api_key"] or None,
            cache_dir=own_path(named["cache"])
            if named["cache"]
            else _home(values, "XDG_CACHE_HOME", ".cache") / "cukiln",
            cache_bytes=_bytes(named["cache_bytes"], config),
            offline=_flag(named["offline"]),
        )


def own_path(text: str) -> Path:
    """`~` is the home folder: no shell expands it in a file, nor in a unit of systemd. Raises `UsageError`."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{text!r} names no folder ({error}): set HOME, or name the whole path") from error


def _home(values: Mapping[str, str], variable: str, default: str) -> Path:
    """The XDG specification: a relative path in the variable is invalid and to be ignored."""
    path = Path(values.get(variable) or "")
    if path.is_absolute():
        return path
    try:
        return Path.home() / default
    except RuntimeError as error:  # a user without an entry in the system, as in some containers
        raise UsageError(f"there is no home folder ({error}): set HOME, or {variable} to an absolute path") from error


def _config_file(values: Mapping[str, str]) -> Path:
    named = values.get("CUKILN_CONFIG")
    return own_path(named) if named else _home(values, "XDG_CONFIG_HOME", ".config") / "cukiln" / "config.toml"


def _read_config(path: Path, *, is_named: bool) -> dict[str, Any]:
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if is_named:
            raise UsageError(f"CUKILN_CONFIG names {path}, where there is no file: correct or unset it") from error
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the configuration file {path} cannot be read ({error}); mend or remove it") from error
    for name, value in read.items():
        if name not in _KINDS:
            raise UsageError(f"{path}: there is no setting {name!r}; allowed: {', '.join(_KINDS)}")
        if type(value) is not _KINDS[name]:
            raise UsageError(f"{path}: {name} is {value!r}; expected a value of type {_KINDS[name].__name__}")
    return read


def _bytes(value: str | int | None, config: Path) -> int:
    if value is None:
        return DEFAULT_BYTES
    try:
        number = int(value)
    except ValueError:
        number = -1
    if number < 0:
        name = f"{config}: cache_bytes" if isinstance(value, int) else "CUKILN_CACHE_BYTES"
        raise UsageError(f"{name} is {value!r}; expected a whole number of bytes")
    return number


def _flag(value: str | bool | None) -> bool:
    if isinstance(value, bool) or value is None:
        return bool(value)
    if value.lower() not in _TRUE | _FALSE:
        raise UsageError(f"CUKILN_OFFLINE is {value!r}; allowed: 1 or 0")
    return value.lower() in _TRUE
