"""What a run there says and does before its first part: which card it has, whether that loads what was carried, and how
it is asked."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.fixtures.elsewhere import FAKE_GPU, installed_for
from tests.support.gpu import fake_gpu
from workers.offline import there
from workers.offline.children import compiled_folder, own_processes
from workers.offline.parts import Part
from workers.processes.processes import ProcessError

SAYS = "import os, sys; print(*(os.environ.get(name) for name in sys.argv[1:])); sys.exit(%d)"
VARIABLES = ("CUKILN_PID_NAMESPACES", "CUPY_CACHE_DIR")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated GPU is listed by no child, whose start takes seconds."""
    monkeypatch.setattr(there, "probe", lambda *_: fake_gpu.list_devices())


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only part: it says its environment. The file of its words."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUKILN_PID_NAMESPACES", "true")  # what a run sets is not there after the test
    (tmp_path / "says.py").write_text(SAYS % 0)
    monkeypatch.setattr(there, "parts_of", lambda *_, **__: [Part("says", ("says", *VARIABLES), 60.0)])
    return tmp_path / "into" / "says.log"


def run(tmp_path: Path, *words: str, **bundle: str) -> int:
    installed = str(installed_for(tmp_path, **bundle))
    return there.main([installed, "--into", str(tmp_path / "into"), "--gpu-module", FAKE_GPU, *words])


def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **fields: Any) -> None:
    monkeypatch.setenv(fake_gpu.VARIABLE, fake_gpu.configure(tmp_path / "gpu.json", **fields))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("gpu", "bundle", "message"),
    [
        ({"devices": [{"driver": "570.1", "cuda": 12080}]}, {}, "install a driver of release 580 or later"),
        ({"devices": [{"driver": "470.1", "cuda": 11040}]}, {"nvcc": "12.9.86"}, "release 525 or later"),
        ({"too_old": "the driver is for CUDA 11"}, {}, "the driver is for CUDA 11"),
        ({"devices": [{"capability": [8, 0]}]}, {}, "wide is compiled for sm_90a, but Simulated GPU has"),
        ({}, {"target": "sm_999"}, "sm_999"),
    ],
)
def test_a_card_that_loads_nothing_of_what_was_carried_is_said_before_any_part(
    gpu: dict[str, Any],
    bundle: dict[str, str],
    message: str,
    part: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    simulated(monkeypatch, tmp_path, **gpu)
    assert run(tmp_path, **bundle) == there.WRONG_USE
    said = capsys.readouterr().err
    assert said.startswith("measure_there: ") and message in said and said.count("\n") == 1
    assert not part.exists() and not (tmp_path / "into" / "parts.jsonl").exists()


@pytest.mark.usefixtures("at_once")
def test_a_card_that_loads_it_is_measured(part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(monkeypatch, tmp_path, devices=[{"cuda": 12080}])
    assert run(tmp_path, nvcc="12.9.86") == there.DONE
    assert part.is_file()


@pytest.mark.usefixtures("at_once")
def test_a_part_that_found_nothing_to_use_has_its_last_words_in_the_report(part: Path, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS % 2)
    assert run(tmp_path) == there.LEFT
    report = json.loads((tmp_path / "into" / "back" / "report.json").read_bytes())
    assert report["parts"]["says"].startswith("exit status 2: true /")


# --- PID namespaces


def test_a_driver_that_answers_in_no_pid_namespace_is_asked_outside_and_parts_stay_there(
    part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated(monkeypatch, tmp_path, outside=["no device of that minor", str(Path("/proc/self/ns/pid").readlink())])
    assert run(tmp_path) == there.DONE
    assert os.environ["CUKILN_PID_NAMESPACES"] == "true"
    assert part.read_text().startswith("false ")
    assert (
        "outside of PID namespaces alone, where all parts stay now (no device of that minor)" in capsys.readouterr().out
    )


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("arguments", "inherited"), [((), "true"), (("--no-pid-namespaces",), "false")])
def test_parts_are_set_to_stay_outside_of_pid_namespaces(
    arguments: tuple[str, ...], inherited: str, part: Path, tmp_path: Path
) -> None:
    assert run(tmp_path, *arguments) == there.DONE
    assert part.read_text().startswith(f"{inherited} ")


def test_a_variable_that_is_no_choice_is_refused_before_any_part(
    part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUKILN_PID_NAMESPACES", "maybe")
    assert run(tmp_path) == there.WRONG_USE
    assert "CUKILN_PID_NAMESPACES is 'maybe'; it must be true or false" in capsys.readouterr().err
    assert not part.exists()


def test_without_a_gpu_the_reason_is_said_and_nothing_of_namespaces(
    part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated(monkeypatch, tmp_path, devices=[])
    assert run(tmp_path) == there.DONE
    said = capsys.readouterr().out
    assert "no GPU to use: there is no GPU 0 on this machine: it has none" in said and "namespaces" not in said
    assert os.environ["CUKILN_PID_NAMESPACES"] == "true"


def test_the_variable_of_a_service_holds_for_a_run_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, allowed in (("false", False), ("0", False), ("true", True), ("", True)):
        monkeypatch.setenv("CUKILN_PID_NAMESPACES", text)
        with closing(own_processes()) as processes:
            assert processes.namespaces is allowed
    monkeypatch.setenv("CUKILN_PID_NAMESPACES", "perhaps")
    with pytest.raises(ProcessError, match="CUKILN_PID_NAMESPACES is 'perhaps'; it must be true or false"):
        own_processes()


# --- what CuPy compiles to


@pytest.mark.usefixtures("at_once")
def test_all_parts_compile_into_one_folder(part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/no-home")
    assert run(tmp_path) == there.DONE
    assert part.read_text().split()[1] == str(tmp_path / "into" / "cache")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "into" / "cache"))
    # So have the ceilings and the candidates, whose children get it from these.
    assert compiled_folder(tmp_path / "into" / "measured") == tmp_path / "into" / "cache"
    monkeypatch.delenv("CUPY_CACHE_DIR")
    assert compiled_folder(tmp_path / "out") == tmp_path / "out" / "cache"
