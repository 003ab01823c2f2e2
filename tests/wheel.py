"""The client's own tests, over the wheel alone in new environments, of every Python from 3.11 that is here:
`python -m tests.wheel`.

The tests lie in a folder without the checkout, so that nothing but the installed wheel can be imported; of them, those
that need the server are left out."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")
NEEDED = ["hypothesis", "pytest", "pytest-timeout", "starlette", "uvicorn", "numpy"]  # by the tests themselves
SERVER = re.compile(r"^(?:from|import) (?:codegen|service|storage|workers|tests\.support\.(?!fixtures\.client))", re.M)
CONFTEST = 'pytest_plugins = ["tests.support.fixtures.client"]\n'


def client_tests() -> list[Path]:
    """Those that import nothing of the server."""
    paths = sorted((ROOT / "tests" / "of_client").glob("*.py"))
    return [path for path in paths if not SERVER.search(path.read_text())]


def lay_out(folder: Path) -> None:
    """The tests with what they import of `tests.support`."""
    for path in [*client_tests(), ROOT / "tests" / "support" / "fixtures" / "client.py"]:
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = --import-mode=importlib\npythonpath = .\nmarkers = checkout\n"
    )


def check(python: str, wheel: Path, folder: Path) -> int:
    """The exit status of pytest."""
    run(python, "-m", "venv", str(folder / "venv"))
    here = str(folder / "venv" / "bin" / "python")
    constraint = ["--constraint", str(ROOT / "constraints.txt")]
    run(here, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *constraint, str(wheel), *NEEDED)
    lay_out(folder / "of_wheel")
    command = [here, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not checkout", "tests"]
    return subprocess.run(command, cwd=folder / "of_wheel", check=False).returncode


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> int:
    worst = 0
    with tempfile.TemporaryDirectory(prefix="cukiln-wheel-") as name:
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", name, str(ROOT))
        (wheel,) = Path(name).glob("*.whl")
        for python in filter(shutil.which, PYTHONS):
            print(f"{wheel.name} with {python}", flush=True)  # noqa: T201
            (Path(name) / python).mkdir()
            worst = max(worst, check(python, wheel, Path(name) / python))
    return worst


if __name__ == "__main__":
    sys.exit(main())
