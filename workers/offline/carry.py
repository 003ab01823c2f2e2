"""What a machine with a GPU and no network is given: this checkout's Python and kernels, the packages that the machine
lacks, and a bundle, as one archive in parts of a size, beside the script that unpacks them (`measure_there.py`).

```
FOLDER/measure_there.py   python3 measure_there.py, there
FOLDER/carried.json       the parts with their sizes and digests; for which Python the packages are. Written last
FOLDER/carried.zip.1 …    source/, wheels/, bundle/, workspaces.so
```
"""

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.offline.measured import write_whole
from workers.offline.parts import WORKSPACES_LIBRARY
from workers.offline.work import BUNDLE_FILE, LIBRARIES
from workers.processes.fence.access import ROOT

SCHEMA = 1
MOST_BYTES = 60_000_000
CARRIED_FILE, ARCHIVE, SCRIPT = "carried.json", "carried.zip", "measure_there.py"
SOURCES = ("codegen", "storage", "workers", "client/cukiln", "tests/gpu")
DEFAULT_WHEELS = ROOT / "build" / "offline-wheels"
# The winner of this is what the check of workspaces calls there (tests/gpu/check_workspaces.py).
WORKSPACES_REQUEST = ROOT / "tests" / "gpu" / "workspaces.json"
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # the same content is the same archive


class NotCarried(Exception):
    """It cannot be packed; the message says what is missing or too large, and what to do."""


@dataclass(frozen=True)
class Carried:
    """`files`: by name, with their bytes."""

    folder: Path
    files: dict[str, int]
    wheels: int

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def workspaces_request(target: str) -> dict[str, Any]:
    """What is compiled beside a bundle, for the check of workspaces."""
    request: dict[str, Any] = json.loads(WORKSPACES_REQUEST.read_bytes())
    return {**request, "target": target}


def wheels_in(folder: Path) -> list[Path]:
    """Raises NotCarried where there are none."""
    packages = sorted(folder.glob("*.whl"))
    if not packages:
        raise NotCarried(
            f"{folder} holds no wheels of what the other machine lacks: `make offline-wheels PYTHON=3.12` collects "
            "them for its Python"
        )
    return packages


def pack(bundle: Path, folder: Path, *, wheels: Path, part_bytes: int) -> Carried:
    """Of a folder of `cukiln export-bundle` with WORKSPACES_LIBRARY in it. Raises NotCarried, OSError."""
    packages = wheels_in(wheels)
    archive = _archive(dict(_members(bundle, packages)))
    script = (Path(__file__).with_name(SCRIPT)).read_bytes()
    if (size := len(archive) + len(script)) > MOST_BYTES:
        raise NotCarried(
            f"{size / 1e6:.1f} MB are to be carried, and {MOST_BYTES / 1e6:.0f} may be: ask for fewer problems or a "
            "smaller search, or export several bundles"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    parts = {
        f"{ARCHIVE}.{number}": archive[first : first + part_bytes]
        for number, first in enumerate(range(0, len(archive), part_bytes), 1)
    }
    for name, data in {SCRIPT: script, **parts}.items():
        write_whole(folder / name, data)
    described = [{"name": name, "bytes": len(data), "sha256": _digest(data)} for name, data in parts.items()]
    content = {"schema": SCHEMA, "sha256": _digest(archive), "python": _python_of(packages), "parts": described}
    write_whole(folder / CARRIED_FILE, (json.dumps(content, indent=1) + "\n").encode())
    return Carried(folder, {path.name: path.stat().st_size for path in sorted(folder.iterdir())}, len(packages))


def _members(bundle: Path, packages: list[Path]) -> Iterator[tuple[str, bytes]]:
    for name in SOURCES:
        for path in sorted((ROOT / name).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"source/{path.relative_to(ROOT)}", path.read_bytes()
    for path in packages:
        yield f"wheels/{path.name}", path.read_bytes()
    yield WORKSPACES_LIBRARY, (bundle / WORKSPACES_LIBRARY).read_bytes()
    yield f"bundle/{BUNDLE_FILE}", (bundle / BUNDLE_FILE).read_bytes()
    for path in sorted((bundle / LIBRARIES).glob("*.so")):
        yield f"bundle/{LIBRARIES}/{path.name}", path.read_bytes()


def _archive(members: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), data, zipfile.ZIP_DEFLATED)
    return written.getvalue()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _python_of(packages: list[Path]) -> str | None:
    """Of the wheels that are for one release of Python: `3.12`; None where all fit any."""
    for path in packages:
        tag = path.stem.split("-")[-3]
        if tag.startswith("cp3") and "abi3" not in path.stem:
            return f"3.{tag.removeprefix('cp3')}"
    return None
