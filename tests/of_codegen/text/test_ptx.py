"""PTX and SASS: kept of groups and winners, served as text, fetched with a winner; never what a compile fails for."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from starlette.responses import Response

from codegen.text.render_group import symbols
from cukiln.cli.winners import fetch_record
from cukiln.client import Client
from cukiln.types import WinnerRecord
from storage.database.tables import GroupRow
from storage.entities.libraries import Library, files_of
from tests.support.fixtures.api import Api
from tests.support.fixtures.client import ScriptedService, record_json
from tests.support.fixtures.compile import LIMITS, SM_90A, matmul_candidates, probe, probe_candidate
from workers.compile.compile_group import compile_group
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Limits, Processes
from workers.steps.winner_library import build_winner, disassemble, find_disassembler

GROUP = "a" * 32
PTX = b".version 9.2\n.target sm_90a\n.visible .entry kernel()\n" * 100


def entries(ptx: bytes) -> set[str]:
    """The kernels that the text defines."""
    return set(re.findall(r"\.visible \.entry (\w+)\(", ptx.decode("ascii")))


def test_a_groups_ptx_defines_each_of_its_kernels(toolchain: Toolchain, processes: Processes) -> None:
    kernels = [probe(), probe(factor=2), matmul_candidates(1)[0].kernel]
    artifact, again = (compile_group(kernels, SM_90A, toolchain, processes, LIMITS).artifact for _ in range(2))
    assert artifact is not None and again is not None
    text = gzip.decompress(artifact.ptx)
    assert entries(text) == {symbol for kernel in kernels for symbol in symbols(kernel)}
    assert len(artifact.ptx) < len(text) / 3
    assert again.ptx == artifact.ptx


def test_a_winners_ptx_is_its_kernel_alone(toolchain: Toolchain, processes: Processes) -> None:
    candidate = probe_candidate()
    made = build_winner(candidate, SM_90A, toolchain, processes, LIMITS)
    assert entries(made.ptx) == set(symbols(candidate.kernel))
    disassembler = find_disassembler(toolchain.device_compiler.path)
    assert (made.sass is None) == (disassembler is None)


def compiler_folder(folder: Path, **tools: str) -> Path:
    """A folder with an nvcc and shell scripts in place of disassemblers; returns nvcc's path."""
    for name, script in {"nvcc": "exit 1", **tools}.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder / "nvcc"


@pytest.fixture(autouse=True)
def no_disassembler_in_path(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = os.environ["PATH"].split(os.pathsep)
    bare = [
        folder for folder in folders if not any((Path(folder) / tool).exists() for tool in ("nvdisasm", "cuobjdump"))
    ]
    monkeypatch.setenv("PATH", os.pathsep.join(bare))


READS_ITS_FILE = 'test "$1 $(cat "$2")" = "{option} the cubin" && echo "/*0000*/ EXIT ;"'
DISASSEMBLERS = {
    "nvdisasm": {"nvdisasm": READS_ITS_FILE.format(option="-c")},
    "cuobjdump": {"cuobjdump": READS_ITS_FILE.format(option="-sass")},
    "both": {"nvdisasm": READS_ITS_FILE.format(option="-c"), "cuobjdump": "echo the other"},
}


@pytest.mark.parametrize("tools", DISASSEMBLERS)
@pytest.mark.parametrize("where", ["beside nvcc", "behind a link to nvcc", "in PATH"])
def test_a_disassembler_is_found_and_run_on_the_cubin(
    tools: str, where: str, tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = compiler_folder(tmp_path, **DISASSEMBLERS[tools])
    (tmp_path / "bin").mkdir()
    if where == "behind a link to nvcc":
        (tmp_path / "bin" / "nvcc").symlink_to(nvcc)
        nvcc = tmp_path / "bin" / "nvcc"
    elif where == "in PATH":
        monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{tmp_path}")
        nvcc = tmp_path / "bin" / "nvcc"
    assert disassemble(b"the cubin", nvcc, processes) == b"/*0000*/ EXIT ;\n"


def test_cuobjdump_finds_the_nvdisasm_of_its_folder(tmp_path: Path, processes: Processes) -> None:
    # Preferred or not, cuobjdump calls nvdisasm by its name: its own folder has to be in PATH.
    nvcc = compiler_folder(tmp_path, cuobjdump='case ":$PATH:" in *":$(dirname "$0"):"*) echo found;; esac')
    assert disassemble(b"", nvcc, processes) == b"found\n"


FAULTS = {
    "none is there": {},
    "it fails": {"nvdisasm": "echo no such architecture >&2; echo half; exit 3"},
    "it dies": {"nvdisasm": "kill -SEGV $$"},
    "it says nothing": {"nvdisasm": "exit 0"},
    "it hangs": {"nvdisasm": "sleep 600"},
    "it floods": {"nvdisasm": "yes"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_without_sass_a_compile_continues(fault: str, tmp_path: Path, processes: Processes) -> None:
    limits = Limits(wall_seconds=0.5, cpu_seconds=5, memory_bytes=1 << 30, output_bytes=1 << 20)
    nvcc = compiler_folder(tmp_path, **FAULTS[fault])
    assert disassemble(b"the cubin", nvcc, processes, limits=limits) is None


def test_a_cancelled_compile_does_not_wait_for_sass(tmp_path: Path, processes: Processes) -> None:
    cancel = threading.Event()
    cancel.set()
    assert disassemble(b"", compiler_folder(tmp_path, nvdisasm="sleep 600"), processes, cancel) is None


def test_a_real_disassembler_names_the_kernel(
    toolchain: Toolchain, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # PATH as it was
    if find_disassembler(toolchain.device_compiler.path) is None:
        pytest.skip("no nvdisasm and no cuobjdump here: `pip install nvidia-cuda-nvdisasm` brings one")
    candidate = probe_candidate()
    sass = build_winner(candidate, SM_90A, toolchain, processes, LIMITS).sass
    assert sass is not None
    assert all(symbol.encode() in sass for symbol in symbols(candidate.kernel))


# Over HTTP


def group_with(api: Api, **digests: str) -> None:
    with api.database.write() as session:
        row = {"id": GROUP, "target": "sm_90a", "state": "compiled", "kernels": [], "created_at": time.time()}
        session.add(GroupRow(**row, **digests))


ENCODINGS = [
    ("gzip", True), ("deflate, gzip;q=0.5", True), ("GZIP", True), ("br;q=1.0, x-gzip", True),
    ("identity", False), ("", False), ("gzip;q=0", False), ("gzip; q=0.000, br", False), ("br", False),
]  # fmt: skip


@pytest.mark.parametrize(("accepted", "compressed"), ENCODINGS)
def test_compressed_text_is_sent_as_it_is_to_who_takes_it(accepted: str, compressed: bool, api: Api) -> None:
    packed_ptx = gzip.compress(PTX, mtime=0)
    group_with(api, ptx=api.blobs.put(packed_ptx, "application/gzip").digest)
    url = f"/v1/groups/{GROUP}/ptx"
    with api.client.stream("GET", url, headers={"Accept-Encoding": accepted}) as answer:
        raw = b"".join(answer.iter_raw())
    assert raw == (packed_ptx if compressed else PTX)
    assert answer.headers.get("content-encoding") == ("gzip" if compressed else None)
    assert answer.headers["vary"] == "Accept-Encoding"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert api.client.get(url, headers={"Accept-Encoding": accepted}).content == PTX
    head = api.client.head(url, headers={"Accept-Encoding": accepted})
    assert head.headers["content-length"] == str(len(raw))


def test_text_that_is_kept_plain_is_sent_plain(api: Api) -> None:
    group_with(api, ptx=api.blobs.put(PTX, "text/x-ptx").digest)
    answer = httpx.get(f"{api.url}/v1/groups/{GROUP}/ptx", trust_env=False)
    assert answer.content == PTX
    assert "content-encoding" not in answer.headers


def test_a_group_report_names_its_ptx(api: Api) -> None:
    digest = api.blobs.put(PTX, "text/x-ptx").digest
    group_with(api, ptx=digest)
    report = api.client.get(f"/v1/groups/{GROUP}").json()
    assert (report["ptx_sha256"], report["sass_sha256"]) == (digest, None)
    assert api.client.get(f"/v1/blobs/sha256/{digest}").headers["content-type"].startswith("text/x-ptx")


# A winner's files


def test_the_files_of_a_winner_are_all_that_its_record_names() -> None:
    plain = WinnerRecord.model_validate(record_json()).front[0]
    assert plain.blobs == ("d" * 64, "e" * 64, "f" * 64)
    whole = plain.model_copy(update={"ptx_sha256": "7" * 64, "sass_sha256": "8" * 64})
    assert whole.files == {"so": "d" * 64, "cubin": "e" * 64, "cu": "f" * 64, "ptx": "7" * 64, "sass": "8" * 64}
    assert whole.blobs == tuple(whole.files.values())
    assert files_of(Library(library="so", cubin="cubin", source="cu")) == ["so", "cubin", "cu"]
    every = Library(library="so", cubin="cubin", source="cu", ptx="ptx", sass="sass")
    assert files_of(every) == ["so", "cubin", "cu", "ptx", "sass"]


@pytest.mark.parametrize("extra", [(), ("ptx",), ("ptx", "sass")])
def test_fetch_writes_the_ptx_and_the_sass_beside_the_source(
    extra: tuple[str, ...], scripted: ScriptedService, client_of: Callable[[str], Client], tmp_path: Path
) -> None:
    data = {kind: f"the {kind}".encode() for kind in ("so", "cubin", "cu", *extra)}
    digests = {kind: hashlib.sha256(content).hexdigest() for kind, content in data.items()}
    for kind, content in data.items():
        scripted.on("GET", f"/v1/blobs/sha256/{digests[kind]}", Response(content))
    record = WinnerRecord.model_validate(record_json(digests["so"], digests["cubin"], digests["cu"]))
    named = {f"{kind}_sha256": digests[kind] for kind in extra}
    record = record.model_copy(update={"front": [record.front[0].model_copy(update=named)]})
    folder = tmp_path / "out"
    fetch_record(client_of(scripted.url), record, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "record.json"} == {
        f"{digests[kind]}.{kind}": content for kind, content in data.items()
    }
