"""The architecture of this machine's GPU, which requests without a target are for."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cukiln import gpu
from cukiln.client import Client
from cukiln.gpu import Gpus, find_gpus, local_target
from cukiln.operations import jobs, lookups
from tests.support.fixtures.client import MATMUL, ScriptedService, hits, job_json

BARE = {name: value for name, value in MATMUL.items() if name != "target"}


def driver_library(folder: Path, major: int, minor: int) -> str:
    """A stand-in for libcuda.so.1 with one GPU of this compute capability."""
    (folder / "driver.c").write_text(
        f"""#include <string.h>
        int cuInit(unsigned flags) {{ return 0; }}
        int cuDriverGetVersion(int* version) {{ *version = 13020; return 0; }}
        int cuDeviceGetCount(int* count) {{ *count = 1; return 0; }}
        int cuDeviceGetName(char* name, int size, int device) {{ strcpy(name, "First"); return 0; }}
        int cuDeviceGetAttribute(int* value, int attribute, int device) {{
          *value = attribute == 75 ? {major} : attribute == 76 ? {minor} : -1;
          return 0;
        }}
        """
    )
    library = folder / "driver.so"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, folder / "driver.c"], check=True)
    return str(library)


def test_the_driver_is_asked_for_the_compute_capability(tmp_path: Path) -> None:
    assert find_gpus(driver_library(tmp_path, 8, 6)) == Gpus(("First",), (8, 6), (13, 2))


@pytest.mark.parametrize(
    ("capability", "target"), [((8, 6), "sm_86"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), (None, None)]
)
def test_the_target_of_a_capability(
    capability: tuple[int, int] | None, target: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "find_gpus", lambda: Gpus(capability=capability))
    assert local_target.__wrapped__() == target


def test_requests_name_the_gpu_of_the_machine_unless_they_name_another(
    scripted: ScriptedService, client_of: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (jobs, lookups):
        monkeypatch.setattr(module, "local_target", lambda: "sm_90a")
    scripted.on("POST", "/v1/lookups", hits())
    scripted.on("POST", "/v1/jobs", job_json("queued"))
    client = client_of(scripted.url)
    client.lookup([BARE])
    client.lookup([BARE], target="sm_75")
    client.lookup([MATMUL])
    client.tune([BARE], wait=False)
    client.tune([MATMUL], wait=False)
    client.submit({"target": "sm_80", "problems": [BARE]})
    assert [seen.json.get("target") for seen in scripted.seen] == ["sm_90a", "sm_75", None, "sm_90a", None, "sm_80"]


def test_without_a_gpu_the_service_is_left_to_refuse(
    scripted: ScriptedService, client_of: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "local_target", lambda: None)
    scripted.on("POST", "/v1/jobs", job_json("queued"))
    client_of(scripted.url).tune([BARE], wait=False)
    assert "target" not in scripted.seen[0].json
