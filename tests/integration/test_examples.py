"""The examples for PyTorch as a user runs them, and the lines of docs/frameworks.md, over a service without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from storage.config.settings import load_settings
from tests.support.fixtures.service import Started
from tests.support.run.each_run import one_each_run
from tests.support.run.places import ROOT

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
EAGER = re.compile(r"largest difference from eager: (\S+)")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, at_work: Started) -> Iterator[str]:
    data = tmp_path_factory.mktemp("examples")
    with at_work(load_settings(data_dir=data, port=0, workers=1, gpus="none")) as running:
        yield running.url


def run(*argv: str, url: str, folder: Path) -> str:
    environment = {**os.environ, "CUKILN_URL": url, "XDG_CACHE_HOME": str(folder)}
    environment.pop("CUKILN_TARGET", None)
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# In `make test` a convolution's, and the page's lines below.
@pytest.mark.parametrize(
    "arguments, graph, calls",
    [
        pytest.param(
            "bert_layer.py",
            "2 layer_norm, 1 matmul + bias, 1 matmul + bias + gelu, 2 matmul + bias + residual",
            6,
            marks=pytest.mark.long,
        ),
        ("resnet_block.py", "1 conv2d + bias, 1 conv2d + bias + relu, 1 conv2d + bias + residual + relu", 3),
        pytest.param("bert_layer.py --train", "1 matmul + bias + gelu", 14, marks=pytest.mark.long),
        pytest.param("resnet_block.py --train", "1 conv2d + bias + residual + relu", 8, marks=pytest.mark.long),
    ],
)
@one_each_run("programs with PyTorch", 0)
def test_every_call_of_an_example_runs_a_kernel_and_the_result_is_that_of_eager(
    arguments: str, graph: str, calls: int, url: str, tmp_path: Path
) -> None:
    name, *options = arguments.split()
    out = run(str(ROOT / "examples" / name), "--target", "cpu", *options, url=url, folder=tmp_path)
    assert graph in out
    ((kernels, total),) = re.findall(r"(\d+) of (\d+) calls ran a kernel of ours", out)
    assert kernels == total and int(total) >= calls
    (difference,) = EAGER.findall(out)
    assert float(difference) < 1e-5


@pytest.mark.long
def test_without_a_gpu_an_example_says_what_runs_here(tmp_path: Path, url: str) -> None:
    with pytest.raises(AssertionError, match="PyTorch has no GPU here; --target cpu computes by the emulation"):
        run(str(ROOT / "examples/bert_layer.py"), url=url, folder=tmp_path)


@one_each_run("programs with PyTorch", 1)
def test_the_lines_of_the_page_give_a_model_kernels(url: str, tmp_path: Path) -> None:
    (block,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/frameworks.md").read_text(), re.DOTALL)
        if "torch.compile" in block
    )
    assert len(block.splitlines()) <= 12
    counted = "with ck.counted() as calls:\n    model(x)\nprint(calls.kernels, calls.own)\n"
    assert run("-c", block + counted, url=url, folder=tmp_path).splitlines()[-1] == "2 0"


@pytest.mark.long
def test_pyright_accepts_the_examples() -> None:
    pytest.importorskip("pyright")
    files = sorted(map(str, (ROOT / "examples").glob("*.py")))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout
