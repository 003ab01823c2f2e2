"""Before the first candidate: a GPU is warmed up, a library may have packed relocations."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu import fake_gpu
from tests.support.gpu.gpu_tasks import Gpu, matmul_candidate, matmul_problem
from workers.compile.toolchain import LINK_FLAGS
from workers.gpu import run_on_gpu
from workers.gpu.check_library import refusal
from workers.gpu.interface import GpuFault, warm_up
from workers.gpu.leftovers import thread_names

CANDIDATE = matmul_candidate(matmul_problem())
X86_64, AARCH64 = 62, 183
RELRENT = 37
TABLE = """
static const char* words[] = {"one", "two", "three", "four"};
extern "C" {
__attribute__((visibility("default"))) const char* cukiln_last_error() { return words[1]; }
__attribute__((visibility("default"))) int cukiln_prepare(int device) { return words[device & 3][0]; }
}
"""


def started(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, work: Any) -> list[dict[str, Any]]:
    opened: Any = fake_gpu.open_gpu("0")
    opened.warm_up = work
    monkeypatch.setattr(run_on_gpu, "open_gpu", lambda module, device: opened)
    said: list[dict[str, Any]] = []
    (gpu.folder / "no.so").write_bytes(b"no library")
    run_on_gpu.run_task(gpu.task([(CANDIDATE, gpu.folder / "no.so")]), said.append)
    return said


def test_a_gpu_is_warmed_up_before_it_is_ready(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    said = started(gpu, monkeypatch, lambda beat: beat("warming up"))
    kinds = [next(iter(line)) for line in said]
    assert kinds[:2] == ["beat", "ready"] and "candidate" in kinds[2:] and said[0] == {"beat": "warming up"}
    assert said[1]["ready"]["threads"] == thread_names()


def test_a_gpu_that_fails_while_it_is_warmed_up_is_gone(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(beat: Any) -> None:
        raise GpuFault("cudaErrorUnknown")

    assert started(gpu, monkeypatch, lost) == [{"gone": "cudaErrorUnknown"}]


def test_a_gpu_may_have_nothing_to_warm_up() -> None:
    warm_up(object(), lambda what: None)  # type: ignore[arg-type]


# --- what a library may have


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("packed")
    (folder / "table.cpp").write_text(TABLE)
    command = ["g++", "-shared", "-fPIC", "-O1", "table.cpp", "-o", "table.so", *LINK_FLAGS]
    command.append("-Wl,-z,pack-relative-relocs")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        pytest.skip(f"g++ here packs no relocations: {done.stderr[-200:]}")
    library = Path(folder, "table.so").read_bytes()
    if RELRENT not in dynamic_entries(library):
        pytest.skip("g++ here packs no relocations")
    return library


def dynamic_entries(library: bytes) -> dict[int, int]:
    """Where each entry of the dynamic section stands in the file, by tag."""
    start, size, count = struct.unpack_from("<Q", library, 32)[0], 56, struct.unpack_from("<H", library, 56)[0]
    headers = [struct.unpack_from("<IIQQQQQQ", library, start + size * i) for i in range(count)]
    (dynamic,) = [header for header in headers if header[0] == 2]
    places = range(dynamic[2], dynamic[2] + dynamic[5], 16)
    return {struct.unpack_from("<Q", library, place)[0]: place for place in reversed(places)}


def test_a_library_with_packed_relative_relocations_is_ours(packed: bytes) -> None:
    assert refusal(packed, []) is None


@pytest.mark.parametrize("tag", [0x70000000, 0x70000001, 0x70000003])
def test_a_marked_linkage_table_is_ours_on_x86_64_alone(packed: bytes, tag: int) -> None:
    library = bytearray(packed)
    struct.pack_into("<Q", library, dynamic_entries(packed)[RELRENT], tag)
    for machine, words in ((X86_64, None), (AARCH64, f"it has a dynamic entry {tag:#x}, which no library of ours has")):
        struct.pack_into("<H", library, 18, machine)
        assert refusal(bytes(library), []) == words


def test_any_other_entry_of_a_machine_is_refused(packed: bytes) -> None:
    library = bytearray(packed)
    struct.pack_into("<Q", library, dynamic_entries(packed)[RELRENT], 0x70000002)
    assert "dynamic entry 0x70000002" in (refusal(bytes(library), []) or "")
