"""The verify step: the sanitizers are a setting, and what was verified without them does not count with them."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from codegen.primitives import HOPPER_SUMS
from storage.config.settings import load_settings
from tests.support.kernels.cpu_helpers import matmul_kernel
from workers.cpu.verify import CpuVerdict, cpu_plans
from workers.steps.context import StepContext

step = import_module("workers.steps.verify")  # the package has its function under the same name


class Stop(Exception):
    """Ends the step where this test has seen enough."""


@pytest.mark.parametrize("sanitize", [False, True])
def test_the_setting_decides_how_kernels_are_run_and_which_verdicts_count(
    sanitize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUKILN_VERIFY_SANITIZE", str(sanitize).lower())
    asked: dict[str, Any] = {}
    kernel = matmul_kernel()

    def to_verify(session: object, ref: str, version: dict[str, str]) -> list[Any]:
        asked["version"] = version
        return [SimpleNamespace(kernel_json=kernel.to_json(), slice="s")]

    def verify(kernels: object, *_: object, **options: Any) -> list[CpuVerdict]:
        asked.update({name: options[name] for name in ("sanitize", "sums")})
        raise Stop

    monkeypatch.setattr(step, "builds_to_verify", to_verify)
    monkeypatch.setattr(step, "verify_on_cpu", verify)
    with pytest.raises(Stop):
        step.verify(context())
    plans = cpu_plans(sanitize=sanitize, sums=HOPPER_SUMS)
    assert asked == {"version": plans, "sanitize": sanitize, "sums": HOPPER_SUMS}


def context() -> StepContext:
    class Session:
        def __enter__(self) -> None:
            return None

        def __exit__(self, *_: object) -> None:
            return None

    database = SimpleNamespace(read=Session, clock=SimpleNamespace(new_id=lambda: "0" * 32))
    place: Any = SimpleNamespace(settings=load_settings(), database=database, processes=None, toolchain=None)
    lease = SimpleNamespace(ref="group/plan", target="sm_90a", is_alone=False, is_lost=False)
    return StepContext(place, lease, SimpleNamespace(is_set=lambda: False))  # type: ignore[arg-type]
