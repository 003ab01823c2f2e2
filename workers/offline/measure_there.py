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

HERE = Path(__file__).resolve().parent
DEFAULT_INTO = "cukiln-measured"
WRONG_USE = 2


def install(into: Path) -> Path:
    """The folder in which everything stands; made where it is not there, as a whole or not at all."""
    carried = json.loads((HERE / "carried.json").read_bytes())
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if carried["python"] not in (None, own):
        raise SystemExit(f"the packages are for Python {carried['python']}, this is {own}: python{carried['python']} …")
    if importlib.util.find_spec("numpy") is None:
        raise SystemExit(f"{sys.executable} has no NumPy, which every part needs: run a Python that has NumPy and CuPy")
    installed = into / f"installed-{carried['sha256'][:16]}"
    if installed.is_dir():
        return installed
    with zipfile.ZipFile(io.BytesIO(b"".join(map(part_of, carried["parts"])))) as archive:
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
    options, words = parser.parse_known_args()
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
    command = [sys.executable, "-P", "-m", "workers.offline.there", str(installed), *own, *words]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": paths})


if __name__ == "__main__":
    main()
