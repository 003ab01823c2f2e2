"""Measure on a machine with a GPU and no network: unpack what stands beside this script into a folder and run it there.

`python3 measure_there.py --budget 500` needs Python alone to begin: no network, package index, pip or make. It installs
once, into INTO, and then runs `workers.offline.there`, whose options are these. The same command continues after
whatever ended it.
"""

import argparse
import hashlib
import importlib.util
import io
import json
import os
import shutil
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEFAULT_INTO = "cukiln-measured"
CARRIED_FILE, SCHEMA = "carried.json", 1
WRONG_USE = 2


def install(into: Path) -> Path:
    """The folder in which everything stands; made where it is not there, as a whole or not at all."""
    carried = read_carried()
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if carried["python"] not in (None, own):
        raise SystemExit(f"the packages are for Python {carried['python']}, this is {own}: python{carried['python']} …")
    if importlib.util.find_spec("numpy") is None:
        raise SystemExit(f"{sys.executable} has no NumPy, which every part needs: run a Python that has NumPy and CuPy")
    installed = into / f"installed-{carried['sha256'][:16]}"
    if installed.is_dir():
        return installed
    data = b"".join(map(part_of, carried["parts"]))
    if hashlib.sha256(data).hexdigest() != carried["sha256"]:
        raise SystemExit(f"the parts that {HERE / CARRIED_FILE} names are not all of the archive; carry it again")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        beside = into / ".installing"
        shutil.rmtree(beside, ignore_errors=True)
        archive.extractall(beside)
    for wheel in sorted((beside / "wheels").iterdir()):
        with zipfile.ZipFile(wheel) as package:
            package.extractall(beside / "packages")
    for folder, _, names in os.walk(beside):
        for name in names:
            with Path(folder, name).open("rb") as file:
                os.fsync(file.fileno())
    beside.rename(installed)
    return installed


def read_carried() -> dict[str, Any]:
    """What `make carry` writes last, beside this script."""
    path = HERE / CARRIED_FILE
    try:
        carried = json.loads(path.read_bytes())
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}; carry it again, beside this script") from error
    except (ValueError, RecursionError) as error:
        raise SystemExit(f"{path} is damaged ({error}); carry it again") from error
    schema = carried.get("schema") if isinstance(carried, dict) else None
    if schema not in (None, SCHEMA):
        raise SystemExit(f"{path} is of schema {schema!r}, this script reads {SCHEMA}; carry all files of one release")
    if not isinstance(carried, dict) or not is_whole(carried):
        raise SystemExit(f"{path} is damaged: it does not name the parts; carry it again")
    return carried


def is_whole(carried: dict[str, Any]) -> bool:
    """Whether it says all that is read of it."""
    parts, python = carried.get("parts"), carried.get("python", 0)
    if not isinstance(carried.get("sha256"), str) or not isinstance(python, str | None) or not isinstance(parts, list):
        return False
    return bool(parts) and all(
        isinstance(part, dict)
        and isinstance(part.get("sha256"), str)
        and isinstance(part.get("name"), str)
        and Path(part["name"]).name == part["name"]
        for part in parts
    )


def part_of(part: dict[str, str]) -> bytes:
    path = HERE / part["name"]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}; carry it again") from error
    if hashlib.sha256(data).hexdigest() != part["sha256"]:
        raise SystemExit(f"{path} is damaged, or of another bundle; carry it again")
    return data


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--into", type=Path, default=Path(DEFAULT_INTO))
    options, arguments = parser.parse_known_args()
    into = options.into.resolve()
    try:
        into.mkdir(parents=True, exist_ok=True)
        installed = install(into)
    except OSError as error:
        sys.stderr.write(f"measure_there: cannot install into {into} ({error}); --into names another folder\n")
        sys.exit(WRONG_USE)
    except SystemExit as error:
        sys.stderr.write(f"measure_there: {error}\n")
        sys.exit(WRONG_USE)
    folders = [installed / "source", installed / "source" / "client", installed / "packages"]
    inherited = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([*map(str, folders), *([inherited] if inherited else [])])
    own = ["--into", str(into), "--began", str(began)]
    # -P: run in a checkout, that one's modules would come before these.
    command = [sys.executable, "-P", "-m", "workers.offline.there", str(installed), *own, *arguments]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": paths})


if __name__ == "__main__":
    main()
