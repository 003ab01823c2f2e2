"""What NVIDIA's management library says of a GPU, and what becomes of questions that it does not answer."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workers.cuda import state as gpu_state
from workers.cuda.state import THROTTLE_REASONS, ask, processes, read_state, throttle_reasons


class Nvml:
    """Answers as pynvml does; `refuses` some questions."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, *refuses: str) -> None:
        self._refuses = refuses

    def __getattr__(self, name: str) -> Any:
        def answer(handle: object, *arguments: int) -> Any:
            if any(name.endswith(refuse) for refuse in self._refuses):
                raise self.NVMLError("Not Supported")
            return {
                "ClockInfo": {1: 1980, 2: 3201}.get(*arguments[:1] or (0,)),
                "MaxClockInfo": {1: 1985, 2: 3202}.get(*arguments[:1] or (0,)),
                "Temperature": 41,
                "PowerUsage": 123_456,
                "EnforcedPowerLimit": 700_000,
                "CurrentClocksThrottleReasons": 0x24,
                "UtilizationRates": SimpleNamespace(gpu=98, memory=31),
                "EccMode": [1, 1],
                "PersistenceMode": 0,
                "ViolationStatus": SimpleNamespace(violationTime=1_500_000 + sum(arguments), referenceTime=7_000_000),
                "ComputeRunningProcesses": [SimpleNamespace(pid=os.getpid(), usedGpuMemory=5)],
            }[name.removeprefix("nvmlDeviceGet")]

        return answer


def test_everything_that_is_asked_is_reported_in_plain_units() -> None:
    assert ask(Nvml(), None) == {
        "sm_mhz": 1980, "sm_max_mhz": 1985, "memory_mhz": 3201, "memory_max_mhz": 3202, "temperature_c": 41,
        "power_w": 123.456, "power_limit_w": 700.0, "throttle": ["sw_power_cap", "sw_thermal_slowdown"],
        "held_back": {
            reason: {"us": 1500, "at_us": 7_000_000}
            for reason in ("sw_power_cap", "sw_thermal_slowdown", "sync_boost", "board_limit", "reliability")
        },
        "utilisation_percent": 98, "memory_utilisation_percent": 31, "ecc": True, "persistence": False,
        "other_processes": 0,
    }  # fmt: skip


def test_what_is_not_answered_is_left_out() -> None:
    answers = ask(Nvml("PowerUsage", "UtilizationRates", "ThrottleReasons", "EccMode", "ViolationStatus"), None)
    assert {"power_w", "utilisation_percent", "throttle", "ecc", "held_back"}.isdisjoint(answers)
    assert answers["sm_mhz"] == 1980 and answers["temperature_c"] == 41


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0, []),
        (1, ["gpu_idle"]),
        (0x48, ["hw_slowdown", "hw_thermal_slowdown"]),
        (0x200, ["board_limit"]),
        (0x4, ["sw_power_cap"]),
        (0x10004, ["sw_power_cap", "0x10000"]),
    ],
)
def test_reasons_have_names_and_an_unknown_one_its_bit(bits: int, names: list[str]) -> None:
    assert throttle_reasons(bits) == names


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ([(7, 100)], {"other_processes": 0}),
        ([(7, 100), (8, 30), (9, 12)], {"other_processes": 2, "other_processes_memory_bytes": 42}),
        ([(7, 100), (8, None)], {"other_processes": 1}),
        # Ids of another container's kind: one of these two may be this process.
        ([(70, 100), (80, 30)], {"compute_processes": 2, "compute_processes_memory_bytes": 130}),
        ([], {"compute_processes": 0}),
    ],
)
def test_others_are_counted_apart_only_where_process_ids_mean_the_same(
    running: list[tuple[int, int | None]], expected: dict[str, int]
) -> None:
    assert processes(running, own=7) == expected


def test_without_the_package_the_state_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_state("GPU-1") == {"nvml": gpu_state.MISSING} and "nvidia-ml-py" in gpu_state.MISSING
    assert gpu_state.driver_version() is None


def test_without_the_driver_the_state_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(Nvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise self.NVMLError("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", Missing())
    assert read_state("GPU-1") == {"nvml": "NVML Shared Library Not Found"}
    assert gpu_state.driver_version() is None


def test_every_name_that_is_used_of_pynvml_is_there() -> None:
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("nvidia-ml-py is not installed: pip install --constraint constraints.txt nvidia-ml-py")
    import pynvml

    used = set(re.findall(r"\b(?:nvml|pynvml)\.(n\w+|NVML\w+)", Path(gpu_state.__file__).read_text(encoding="utf-8")))
    assert len(used) > 12 and not {name for name in used if not hasattr(pynvml, name)}
    reasons = {value: name for name, value in vars(pynvml).items() if name.startswith("nvmlClocksThrottleReason")}
    for bit, name in THROTTLE_REASONS.items():
        assert reasons[bit].lower().endswith(name.replace("_", "")) or name == "applications_clocks_setting"


def test_of_a_part_the_whole_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parted(Nvml):
        """Of a part the library answers nothing but which GPU it is of, and finds it by its own UUID alone."""

        def nvmlInit(self) -> None: ...  # noqa: N802

        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
            if uuid != "MIG-1":
                raise self.NVMLError("Not Found")
            return "part"

        def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:  # noqa: N802
            assert handle == "part"
            return "whole"

        def __getattr__(self, name: str) -> Any:
            answer = super().__getattr__(name)

            def of_the_whole(handle: object, *arguments: int) -> Any:
                if handle != "whole":
                    raise self.NVMLError("Not Supported")
                return answer(handle, *arguments)

            return of_the_whole

    monkeypatch.setitem(sys.modules, "pynvml", Parted())
    state = read_state("MIG-1")
    assert state["sm_mhz"] == 1980 and state["throttle"] == ["sw_power_cap", "sw_thermal_slowdown"]
    assert "MIG" in state["part_of"]
    assert read_state("GPU-1") == {"nvml": "Not Found"}
