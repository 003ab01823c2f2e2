"""A bound call of a real library: its stream, its workspace, under capture. Over the simulated driver."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.fixtures.library import Built, Child, launches

pytestmark = pytest.mark.checkout

# Tensors of the simulated GPU, which PyTorch's build for CPUs has none of: they make new ones as PyTorch's do.
SCRIPT = """
import os
import torch
import cukiln
from cukiln.torch.plan import Plan, bind
from tensors import StreamTensor

class Tensor(StreamTensor):
    made = []
    dtype = torch.float32
    def __init__(self, shape, dtype="float32", **more):
        super().__init__(shape, dtype, **more)
        self.address = self._tensor.data
    def new_empty(self, shape, dtype=torch.float32):
        sizes = (shape,) if isinstance(shape, int) else shape
        new = Tensor(sizes, str(dtype).removeprefix("torch."))
        Tensor.made.append([list(sizes), new.address])
        return new
    def data_ptr(self):
        return self.address

kernel = cukiln.load({path!r}, sha256={digest!r}, cache_dir="cache")
kernel.prepare(0)
plan = Plan({{"operator": "probe"}}, inputs=(None,), shape=(1000,), dtype=torch.float32, scalars=(2.5,))
call = bind(plan, kernel)
x = Tensor((1000,))
answer = []
os.environ["FAKE_CUDA_CAPTURING"] = "1"  # a module cannot be loaded from here on
for StreamTensor.current in (7, 8, 7, 7, 8, 7):
    call(x)
    answer.append(list(Tensor.made))
    Tensor.made.clear()
    if len(answer) == 3:
        del os.environ["FAKE_CUDA_CAPTURING"]
"""


def test_calls_take_all_memory_from_pytorch_and_run_on_its_current_stream_whether_it_captures_or_not(
    two_launches: Built, child: Child, fake_driver: Path
) -> None:
    digest = hashlib.sha256(two_launches.path.read_bytes()).hexdigest()
    script = SCRIPT.format(path=str(two_launches.path), digest=digest)
    answer, log = child(script, driver=fake_driver, torch=True, FAKE_CUDA_PEEK="16")
    for (out, _), (workspace, _) in answer:
        assert out == [1000] and workspace == [4000]
    seen = launches(log)
    assert [launch["stream"] for launch in seen] == [7, 7, 8, 8, 7, 7] * 2
    workspaces = [address for _, (_, address) in answer]
    assert [launch["peek"] for launch in seen] == [address for address in workspaces for _ in range(2)]
    assert not [line for line in log if line.startswith(("alloc ", "free "))]
    words = [line.split()[0] for line in log]
    assert words.count("load") == 1 and words.index("load") < words.index("launch")
