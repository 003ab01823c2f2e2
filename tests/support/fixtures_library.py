"""What the tests of libraries share: winners that were built, and processes that call them over a fake driver."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Candidate
from cukiln.types import Launch
from tests.support.fixtures_compile import LIMITS, SM_90A, probe_candidate
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes
from workers.steps import winner_library
from workers.steps.winner_library import WinnerBuild, build_winner, plan_launch

FAKES = Path(__file__).parent / "fake_cuda"


@dataclass(frozen=True)
class Built:
    candidate: Candidate
    build: WinnerBuild
    launch: Launch
    path: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("library")


@pytest.fixture(scope="module")
def fake_driver(folder: Path, toolchain: Toolchain, processes: Processes) -> Path:
    """A folder with a libcuda.so.1 that writes down what it is asked."""
    (folder / "driver").mkdir()
    command = [str(toolchain.host_compiler), "-x", "c", "-std=c11", "-shared", "-fPIC", str(FAKES / "driver.c")]
    done = processes.run([*command, "-o", "driver/libcuda.so.1"], cwd=folder, limits=LIMITS)
    assert done.ok, done.text()
    return folder / "driver"


def build(candidate: Candidate, folder: Path, toolchain: Toolchain, processes: Processes) -> Built:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winner_library, "disassemble", lambda *_: None)  # which takes as long as nvcc, and is not called
        made = build_winner(candidate, SM_90A, toolchain, processes, LIMITS)
    path = folder / f"{candidate.id}.so"
    path.write_bytes(made.library)
    return Built(candidate, made, plan_launch(candidate, toolchain, processes, LIMITS), path)


@pytest.fixture(scope="module")
def two_launches(folder: Path, toolchain: Toolchain, processes: Processes) -> Built:
    return build(probe_candidate(n=1000), folder, toolchain, processes)


class Child:
    """Runs Python in a process of its own: a library's state and a driver belong to a process."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self._folder, self._processes = folder, processes

    def __call__(self, body: str, *, driver: Path | None = None, **environment: str) -> tuple[Any, list[str]]:
        """What `body` leaves in `answer`, and the driver's log."""
        log = self._folder / "log"
        log.write_text("")
        head = f"import json, sys\nsys.path.insert(0, {str(FAKES)!r})\n"
        script = f"{head}{textwrap.dedent(body)}\nprint(json.dumps(answer))"
        extra = {"FAKE_CUDA_LOG": str(log), **environment}
        if driver is not None:
            extra["LD_LIBRARY_PATH"] = str(driver)
        done = self._processes.run([sys.executable, "-c", script], cwd=self._folder, limits=LIMITS, env=extra)
        assert done.ok, done.text()
        return json.loads(done.stdout.splitlines()[-1]), log.read_text().splitlines()


@pytest.fixture
def child(folder: Path, processes: Processes) -> Child:
    return Child(folder, processes)


def calls(path: Path, body: str) -> str:
    """A script that loads the library through tvm-ffi; `attempt(name, *arguments)` is a value or [error, message]."""
    return f"""
sys.modules["torch"] = None  # tvm-ffi imports it where it is installed, which takes longer than the rest
import tvm_ffi
from tensors import FakeTensor as T
library = tvm_ffi.load_module({str(path)!r})
def attempt(name, *arguments):
    try:
        return getattr(library, name)(*arguments)
    except Exception as error:
        return [type(error).__name__, str(error).splitlines()[0]]
{textwrap.dedent(body)}"""


def plain(path: Path, body: str) -> str:
    """A script that loads the library by dlopen alone."""
    return f"""
import ctypes
library = ctypes.CDLL({str(path)!r})
library.cukiln_last_error.restype = ctypes.c_char_p
library.cukiln_workspace_bytes.restype = ctypes.c_int64
def error(): return library.cukiln_last_error().decode()
def array(kind, *values): return (kind * max(1, len(values)))(*values)
{textwrap.dedent(body)}"""


def launches(log: list[str]) -> list[dict[str, Any]]:
    pattern = re.compile(
        r"launch grid=(\S+) block=(\S+) shared=(\d+) context=(\d+) peek=(-?\d+) first=(\S+) (\d+) (\d+)"
    )
    answers = []
    for line in log:
        if match := pattern.match(line):
            grid, block = (tuple(map(int, match[i].split(","))) for i in (1, 2))
            answers.append(
                {"grid": grid, "block": block, "shared": int(match[3]), "context": int(match[4]), "peek": int(match[5]),
                 "first": int(match[6].replace("(nil)", "0"), 16), "function": int(match[7]), "stream": int(match[8])}
            )  # fmt: skip
    return answers
