"""The client's own tests, over the wheel alone in new environments, of every Python from 3.11 that is here, on the PATH
or pyenv's: `python -m tests.wheel [TORCH]`, a requirement of PyTorch's build for CPUs.

The tests lie in a folder without the checkout's client, so that nothing but the installed wheel can be imported; of
them, those that need the server are left out. Those of `cukiln.torch` and `cukiln.jax` run with that extra, each in an
environment of its own, with the references of `codegen` beside them; the service that they call is another process, of
the checkout's environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.service.running_service import SERVER_PYTHON

ROOT = Path(__file__).parents[1]
RELEASES = ("3.11", "3.12", "3.13")
NEEDED = ("hypothesis", "pytest", "pytest-timeout", "starlette", "uvicorn", "numpy")  # by the tests themselves
OF_CODEGEN = ("ml-dtypes", "rfc8785")
CLIENT = "tests/support/fixtures/client.py"
OF_CLIENT = (CLIENT, "tests/support/run/forget_caches.py")
SERVICE = "tests/support/service/running_service.py"
REFERENCES = ("tests/support/kernels/reference_kernel.py", "tests/support/kernels/torch_graphs.py")
CONFTEST = """
from importlib.util import find_spec
from pathlib import Path
import sys
import cukiln

pytest_plugins = ["tests.support.fixtures.client"]
assert Path(cukiln.__file__).is_relative_to(sys.prefix), f"not the wheel's: {cukiln.__file__}"
assert not [name for name in ("service", "storage", "workers") if find_spec(name)], "the server is here"


def pytest_report_header():
    return f"cukiln: {cukiln.__file__}"
"""
SETTINGS = (
    "[pytest]\naddopts = --import-mode=importlib\npythonpath = .\nmarkers =\n    checkout\n    long\ntimeout = 300\n"
)


@dataclass(frozen=True)
class Part:
    """Tests of one folder, and of the `rooms` in it. `beside`: what they may import of the checkout, packages and
    modules."""

    tests: str
    rooms: tuple[str, ...] = ()
    beside: tuple[str, ...] = OF_CLIENT
    extra: str = ""
    packages: tuple[str, ...] = NEEDED

    def files(self) -> list[Path]:
        """Those that import no more than that of the checkout."""
        paths = [path for room in ("", *self.rooms) for path in sorted((ROOT / self.tests / room).glob("*.py"))]
        return [path for path in paths if set(imports(path)) <= set(self.beside)]

    def lay_out(self, folder: Path) -> None:
        for path in [*self.files(), *(ROOT / name for name in self.beside)]:
            place = folder / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if path.is_dir() else shutil.copy)(path, place)
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "pytest.ini").write_text(SETTINGS)


IMPORT = re.compile(r"^ *(?:from|import) ((?:codegen|service|storage|workers|tests\.(?:support|gpu))\b[\w.]*)", re.M)


def imports(path: Path) -> list[str]:
    """The packages of the server and the modules of `tests` that a test names."""
    names = IMPORT.findall(path.read_text())
    return [f"{name.replace('.', '/')}.py" if name.startswith("tests.") else name.partition(".")[0] for name in names]


def parts(torch: str | None) -> list[Part]:
    beside = (*OF_CLIENT, SERVICE)
    found = [Part("tests/of_client", ("http", "kernels")), Part("tests/of_client/jax", beside=beside, extra="jax")]
    if torch is not None:
        packages = (*NEEDED, *OF_CODEGEN, torch)
        beside = (*beside, *REFERENCES, "codegen")
        found.append(Part("tests/of_client/torch", beside=beside, extra="torch", packages=packages))
    return found


def check(python: str, wheel: Path, part: Part, folder: Path) -> int:
    """The exit status of pytest."""
    run(python, "-m", "venv", str(folder / "venv"))
    here = str(folder / "venv" / "bin" / "python")
    constraint = ["--constraint", str(ROOT / "constraints.txt")]
    client = f"{wheel}[{part.extra}]" if part.extra else str(wheel)
    run(here, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *constraint, client, *part.packages)
    part.lay_out(folder / "of_wheel")
    command = [here, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not checkout and not long", "tests"]
    environment = {**os.environ, SERVER_PYTHON: sys.executable}
    return subprocess.run(command, cwd=folder / "of_wheel", env=environment, check=False).returncode


def pythons() -> list[str]:
    """Of each release that the pins cover, the first that makes environments."""
    versions = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = []
    for release in RELEASES:
        names = [f"python{release}", *map(str, sorted(versions.glob(f"{release}.*/bin/python{release}")))]
        found += list(filter(_makes_environments, filter(shutil.which, names)))[:1]
    return found


def _makes_environments(python: str) -> bool:
    # pyenv's shims are on the PATH for releases that are not chosen, too.
    done = subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True, check=False)
    return done.returncode == 0


def has(python: str, requirement: str) -> bool:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps", "--dest"]
    with tempfile.TemporaryDirectory() as unused:
        return subprocess.run([*command, unused, requirement], stderr=subprocess.DEVNULL, check=False).returncode == 0


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def main(torch: str | None = None) -> int:
    worst = 0
    with tempfile.TemporaryDirectory(prefix="cukiln-wheel-") as name:
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", name, str(ROOT))
        (wheel,) = Path(name).glob("*.whl")
        for python in pythons():
            of_torch = torch if torch is not None and has(python, torch) else None
            if of_torch != torch:
                print(f"this package index has no {torch} for {python}: its tests are left out")  # noqa: T201
            for part in parts(of_torch):
                print(f"{wheel.name} with {python}: {part.tests}", flush=True)  # noqa: T201
                with tempfile.TemporaryDirectory(dir=name) as folder:
                    worst = max(worst, check(python, wheel, part, Path(folder)))
    return worst


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
