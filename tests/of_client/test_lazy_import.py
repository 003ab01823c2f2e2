"""`import cukiln` is free: a framework imports it at its own start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cukiln

HEAVY = ("pydantic", "httpx2", "tenacity", "tvm_ffi", "numpy", "rich", "typer", "click", "ssl", "asyncio")
CLIENT = str(Path(cukiln.__file__).parents[1])


def run(code: str) -> str:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {CLIENT!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_importing_cukiln_loads_nothing_heavy() -> None:
    # What the interpreter has loaded before (a .pth file may load more) does not count.
    code = "before = set(sys.modules)\nimport cukiln\nprint(*sorted(set(sys.modules) - before))"
    loaded = {name.partition(".")[0] for name in run(code).split()}
    assert "cukiln" in loaded
    assert not loaded & set(HEAVY)


def test_every_public_name_is_there() -> None:
    names = run("import cukiln\nfor name in cukiln.__all__: getattr(cukiln, name)\nprint(*dir(cukiln))").split()
    assert set(names) == set(cukiln.__all__)


def test_a_name_stays_callable_whatever_was_imported_before_it() -> None:
    imports = "import cukiln.kernels.load_kernel, cukiln.client, cukiln\n"
    assert run(f"{imports}print(callable(cukiln.load), callable(cukiln.Client))") == "True True\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tune'"):
        cukiln.tune  # noqa: B018


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        expected = version("cukiln")
    except PackageNotFoundError:
        expected = "0+checkout"
    assert cukiln.__version__ == expected


def test_torch_is_imported_by_cukiln_torch_alone() -> None:
    code = "import cukiln, cukiln.client, cukiln.kernels.load_kernel\nprint('torch' in sys.modules)"
    assert run(code) == "False\n"


def test_without_pytorch_the_import_says_what_to_install() -> None:
    code = """
sys.modules["torch"] = None
try:
    import cukiln.torch
except ImportError as error:
    print(error)
"""
    assert "install it with `pip install cukiln[torch]`" in run(code)
