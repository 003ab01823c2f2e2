"""What the client reads from its environment, in one place.

| variable | meaning |
|---|---|
| `CUKILN_URL` | where the service is, such as `http://127.0.0.1:8765` |
| `CUKILN_API_KEY` | sent as a Bearer token |
| `XDG_CACHE_HOME` | downloaded libraries go to `$XDG_CACHE_HOME/cukiln`; default `~/.cache/cukiln` |
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ClientSettings:
    """Where the service is, how to be let in, where to keep downloaded libraries."""

    url: str | None
    api_key: str | None = field(repr=False)
    cache_dir: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "ClientSettings":
        """Read the variables above; an empty variable counts as unset."""
        values = os.environ if environment is None else environment
        cache_home = values.get("XDG_CACHE_HOME") or ""
        # The XDG specification: a relative path there is invalid and to be ignored.
        root = Path(cache_home) if Path(cache_home).is_absolute() else Path.home() / ".cache"
        return cls(
            url=values.get("CUKILN_URL") or None,
            api_key=values.get("CUKILN_API_KEY") or None,
            cache_dir=root / "cukiln",
        )
