"""A data folder of an older commit under the service of today.

`data_folder_0008.tar.xz` was left by commit 8ba6120, whose schema is 0008, when it was killed with one job done, one
planned and one queued; `expected.json` in it says which. Of its log alone a path was changed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).parent / "data_folder_0008.tar.xz"


@dataclass(frozen=True)
class OlderJobs:
    """`done`: the id of the job that had ended, with its request and its winners by the problems' names; `unfinished`:
    the ids of the others."""

    done: str
    request: dict[str, Any]
    winners: dict[str, str]
    unfinished: list[str]


def unpack(folder: Path) -> OlderJobs:
    """Make `folder` the older data folder."""
    folder.mkdir(parents=True)
    shutil.unpack_archive(ARCHIVE, folder)
    expected = json.loads((folder / "expected.json").read_text())
    (folder / "expected.json").unlink()
    ended = expected["done"]
    return OlderJobs(ended["job"], ended["request"], ended["winners"], expected["unfinished"])
