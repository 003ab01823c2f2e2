"""`make offline-wheels`, of `make carry`: what a machine without a network lacks, for its Python; the list is whole."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.fixtures.elsewhere import ROOT

# On the machine already: the arrays of the host and of the device.
THERE = {"numpy"}


@pytest.fixture(scope="module")
def group() -> set[str]:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {canonicalize_name(Requirement(line).name) for line in data["dependency-groups"]["elsewhere"]}


def test_the_group_names_all_that_its_packages_need(group: set[str]) -> None:
    seen = 0
    for name in group:
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # what only machines with a GPU have installed; the long test imports it
            continue
        seen += 1
        for line in lines:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": "", "python_version": "3.12"}):
                assert canonicalize_name(needed.name) in group | THERE, f"{name} needs {needed.name}"
    assert seen > len(group) // 2


def test_what_a_stand_alone_run_imports_is_of_the_group(group: set[str]) -> None:
    code = (
        "import sys, importlib.metadata as m\n"
        "import workers.offline.there, workers.offline.measure_bundle, workers.gpu.run_on_gpu\n"
        "import tests.gpu.confirm_primitives, tests.gpu.check_measuring, tests.gpu.check_workspaces\n"
        "owners = m.packages_distributions()\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted({owner for top in tops for owner in owners.get(top, ())}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    # setuptools hooks itself into every start of an interpreter that has it.
    assert {canonicalize_name(name) for name in run.stdout.split()} - {"cukiln", "setuptools"} <= group | THERE


def test_the_makefile_takes_a_version_and_names_no_address() -> None:
    text = (ROOT / "Makefile").read_text()
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", "offline-wheels", "PYTHON=3.12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "--python-version 3.12" in shown
    assert "manylinux_2_28_x86_64" in shown
    assert not re.search(r"https?://", text)
    assert not re.search(r"^3\.12 -m venv", shown, re.MULTILINE), "3.12 is a version, no program of this machine"


@pytest.mark.long
def test_the_wheels_work_alone(tmp_path: Path, group: set[str]) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheels = tmp_path / "wheels"
    made = subprocess.run(
        ["make", "offline-wheels", f"PYTHON={version}", f"OFFLINE={wheels}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert {canonicalize_name(wheel.name.split("-")[0]) for wheel in wheels.iterdir()} == group
    target = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--find-links", str(wheels)]
    subprocess.run([*pip, "--target", str(target), *map(str, wheels.iterdir())], check=True)
    import numpy

    (target / "numpy").symlink_to(Path(numpy.__file__).parent)
    for beside in Path(numpy.__file__).parent.parent.glob("numpy.libs"):
        (target / beside.name).symlink_to(beside)
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _ALONE.format(paths=[str(ROOT), str(ROOT / "client"), str(target)])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


_ALONE = "import sys; sys.path[:0] = {paths}; import workers.offline.there, workers.gpu.run_on_gpu, pynvml"
