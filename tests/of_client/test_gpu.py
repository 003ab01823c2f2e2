"""The architecture of this machine's GPU, which requests without a target are for."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from codegen.errors import UnknownTarget
from codegen.targets import Target, architectures
from codegen.targets import target as data_sheet
from cukiln import gpu
from cukiln.client import Client
from cukiln.gpu import Gpus, find_gpus, local_target, target_of
from cukiln.operations import jobs, lookups
from tests.support.fixtures.client import MATMUL, ScriptedService, hits, job_json

BARE = {name: value for name, value in MATMUL.items() if name != "target"}

RUN_BY = {
    (7, 5): "sm_75",
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_100",
    (12, 0): "sm_120a",
    (12, 1): "sm_120",
}


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
    ("capability", "target"), [((8, 6), "sm_86"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a"), (None, None)]
)
def test_the_target_is_that_of_the_first_gpu(
    capability: tuple[int, int] | None, target: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "find_gpus", lambda: Gpus(capability=capability))
    assert local_target.__wrapped__() == target


@pytest.mark.parametrize(("capability", "target"), RUN_BY.items())
def test_what_a_client_sends_is_a_target_whose_kernels_its_gpu_runs(capability: tuple[int, int], target: str) -> None:
    assert target_of(capability) == target
    compiled_for = divmod(data_sheet(target).capability, 10)
    # Within a major number a GPU runs what is compiled for an earlier one, but not where the name has a letter.
    assert compiled_for == capability if target.endswith("a") else compiled_for <= capability
    assert compiled_for[0] == capability[0]


@pytest.mark.parametrize("sheet", architectures().values(), ids=architectures())
def test_every_architecture_is_sent_by_a_client_with_its_gpu(sheet: Target) -> None:
    capability = divmod(sheet.capability, 10)
    assert target_of(capability) in architectures() and capability in RUN_BY


@pytest.mark.parametrize("capability", [(7, 0), (8, 8), (11, 0), (13, 0)])
def test_a_gpu_without_a_target_has_the_service_list_those_that_are_there(capability: tuple[int, int]) -> None:
    with pytest.raises(UnknownTarget, match=rf"unknown target 'sm_{capability[0]}.*; allowed: .*sm_120a"):
        data_sheet(target_of(capability))


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
