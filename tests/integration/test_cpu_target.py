"""Target `cpu` over a real service: tuned, looked up, loaded, called on CPU tensors, beside the GPU's own records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cukiln
from codegen.operators import operator
from storage.config.settings import load_settings
from tests.support.fixtures.client import exit_code
from tests.support.fixtures.service import Started
from tests.support.kernels.cpu_calls import CASES, LONG_CASES, checked_call

LEAST = {"level": 0, "limit": 1}
PRODUCT: dict[str, Any] = {
    "name": "product", "operator": "matmul", "m": 24, "n": 20, "k": 36, "epilogue": [{"op": "bias"}, {"op": "relu"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, at_work: Started) -> Iterator[cukiln.Client]:
    data = tmp_path_factory.mktemp("cpu")
    settings = load_settings(data_dir=data, port=0, workers=1)
    with at_work(settings) as running, cukiln.Client(running.url, cache_dir=data / "client") as client:
        yield client


@pytest.fixture(scope="module")
def job(client: cukiln.Client) -> cukiln.Job:
    return client.tune([PRODUCT], target="cpu", search=LEAST)


def find(client: cukiln.Client, target: str) -> cukiln.WinnerRecord | None:
    (answer,) = client.lookup([PRODUCT], target=target, refresh=True)
    return answer.record


def test_the_targets_say_what_is_an_emulation(client: cukiln.Client) -> None:
    targets = {report.target: report for report in client.targets().targets}
    cpu = targets.pop("cpu")
    assert (cpu.emulates, cpu.device_classes) == ("sm_80", ["predicted:cpu"])
    assert cpu.toolchains == targets["sm_80"].toolchains != []
    assert cpu.name.startswith("CPU emulation of ")
    assert {report.emulates for report in targets.values()} == {None}


def test_a_record_says_that_it_is_an_emulation(client: cukiln.Client, job: cukiln.Job) -> None:
    (problem,) = job.problems
    assert (problem.state, problem.target, problem.device_class) == ("done", "cpu", "predicted:cpu")
    record = find(client, "cpu")
    assert record is not None
    assert (record.target, record.emulates, record.device_class) == ("cpu", "sm_80", "predicted:cpu")
    assert record.key == problem.key and record.vendor is None
    assert {entry.measured_us for entry in record.front} == {None}


def test_the_winner_computes_on_cpu_tensors(client: cukiln.Client, job: cukiln.Job) -> None:
    record = find(client, "cpu")
    assert record is not None
    kernel = cukiln.load(record, client=client)
    rng = np.random.default_rng(5)
    a, b, bias = (rng.standard_normal(shape, np.float32) for shape in ((24, 36), (36, 20), (20,)))
    out = np.empty((24, 20), np.float32)
    kernel(a, b, bias, out)
    assert np.allclose(out, np.maximum(a @ b + bias, 0), rtol=1e-5, atol=1e-5)


def test_pytorchs_cpu_tensors_are_taken_too(client: cukiln.Client, job: cukiln.Job) -> None:
    torch = pytest.importorskip("torch")
    record = find(client, "cpu")
    assert record is not None
    kernel = cukiln.load(record, client=client)
    a, b, bias, out = torch.randn(24, 36), torch.randn(36, 20), torch.randn(20), torch.empty(24, 20)
    kernel(a, b, bias, out)
    torch.testing.assert_close(out, torch.relu(a @ b + bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_tensors_without_memory_are_refused(kind: str, client: cukiln.Client, job: cukiln.Job) -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    record = find(client, "cpu")
    assert record is not None
    kernel = cukiln.load(record, client=client)
    shapes = ((24, 36), (36, 20), (20,), (24, 20))
    if kind == "fake":
        with FakeTensorMode():
            tensors = [torch.empty(shape) for shape in shapes]
    else:
        tensors = [torch.empty(shape, device="meta") for shape in shapes]
    with pytest.raises(cukiln.UsageError, match=r"have no memory: .* cukiln\.torch"):
        kernel(*tensors)


def test_a_gpu_s_lookup_gets_no_emulation_and_its_job_compiles_nothing_again(
    client: cukiln.Client, job: cukiln.Job
) -> None:
    assert find(client, "sm_80") is None
    of_gpu = client.tune([PRODUCT], target="sm_80", search=LEAST)
    assert (of_gpu.state, of_gpu.cached) == ("done", False)
    gpu, cpu = find(client, "sm_80"), find(client, "cpu")
    assert gpu is not None and cpu is not None
    # Its verification is that of the PTX alone, which the emulation's library is not made of.
    marks = [entry.ptx for entry in gpu.front if entry.ptx is not None]
    assert [mark.verdict for mark in marks] == ["ok"] * len(gpu.front)
    assert {entry.ptx for entry in cpu.front} == {None}
    assert of_gpu.seconds.verify.cpu == pytest.approx(sum(mark.cpu_seconds for mark in marks))
    assert of_gpu.seconds.codegen.cpu == 0
    assert (gpu.target, gpu.emulates, gpu.key != cpu.key) == ("sm_80", None, True)
    ours, theirs = cpu.front[0], gpu.front[0]
    same = ("candidate", "kernel", "code_digest", "source_sha256", "predicted_us")  # one kernel was in the file
    assert {name: getattr(ours, name) for name in same} == {name: getattr(theirs, name) for name in same}
    assert ours.so_sha256 != theirs.so_sha256
    with pytest.raises(ValueError, match="a is in host memory; a CUDA tensor is needed"):
        cukiln.load(gpu, client=client)(*(np.zeros(s, np.float32) for s in ((24, 36), (36, 20), (20,), (24, 20))))


def test_the_same_request_is_answered_from_the_cache(client: cukiln.Client, job: cukiln.Job) -> None:
    assert client.tune([PRODUCT], target="cpu", search=LEAST).cached


def test_the_command_line_takes_the_target(
    client: cukiln.Client, job: cukiln.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"target": "sm_90a", "search": LEAST, "problems": [{**PRODUCT, "target": "sm_75"}]}))

    def run(*words: str) -> tuple[int, str]:
        code = exit_code(monkeypatch, *words, "--url", client.url)
        return code, capsys.readouterr().out

    code, out = run("tune", str(file), "--target", "cpu")
    assert code == 0 and "an estimate for the GPU that cpu emulates" in " ".join(out.split())
    code, out = run("lookup", str(file), "--target", "cpu", "--json")
    (result,) = json.loads(out)["results"]
    assert (code, result["record"]["target"]) == (0, "cpu")
    assert run("lookup", str(file))[0] == 3
    folder = tmp_path / "fetched"
    assert run("fetch", str(file), "--target", "cpu", "--out", str(folder))[0] == 0
    assert cukiln.load(folder / "product").entry is not None


@pytest.mark.long
def test_every_operator_s_winner_computes_what_its_reference_says(client: cukiln.Client) -> None:
    pytest.importorskip("torch")
    cases = {**CASES, **LONG_CASES}
    problems = [
        {
            "name": name, "operator": kind, **fields,
            "search": LEAST if tunables is None else {"tunables": tunables, "limit": 1},
        }
        for name, (kind, fields, tunables) in cases.items()
    ]  # fmt: skip
    assert client.tune(problems, target="cpu").state == "done"
    for found, (kind, fields, _) in zip(client.lookup(problems, target="cpu"), cases.values(), strict=True):
        assert found.record is not None
        problem = operator(kind).parse({"operator": kind, **fields})
        checked = checked_call(cukiln.load(found.record, client=client), problem)
        assert checked.ok, f"{found.name}: {checked.sentence()}"
