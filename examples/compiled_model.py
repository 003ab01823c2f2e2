"""What `bert_layer.py` and `resnet_block.py` share: record the problems of a model, tune them, run it, compare."""

# ruff: noqa: T201 - printing is what these programs are for

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import cukiln
import cukiln.torch as ck


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--target", help="an architecture; default: this GPU's; cpu: the emulation of kernels, no GPU")
    parser.add_argument("--url", help="the service; default: CUKILN_URL, else http://127.0.0.1:8765")
    parser.add_argument("--inner", help="the backend behind ours; default: inductor, with --target cpu aot_eager")
    parser.add_argument("--level", type=int, default=0, help="how far to search: 0 (one good default) to 2 (all)")
    parser.add_argument("--train", action="store_true", help="the gradients of all parameters, too")
    return parser.parse_args()


def device_of(given: argparse.Namespace) -> torch.device:
    if given.target != "cpu" and not torch.cuda.is_available():
        sys.exit("PyTorch has no GPU here; --target cpu computes by the emulation of kernels")
    return torch.device("cpu" if given.target == "cpu" else "cuda")


def main(model: torch.nn.Module, x: torch.Tensor, given: argparse.Namespace) -> None:
    try:
        with cukiln.Client(given.url) as client:
            tune_and_compare(model, x, given, client)
    except cukiln.CukilnError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def tune_and_compare(model: torch.nn.Module, x: torch.Tensor, given: argparse.Namespace, client: cukiln.Client) -> None:
    inner = given.inner or ("aot_eager" if given.target == "cpu" else "inductor")
    compiled = torch.compile(model, backend="cukiln", dynamic=False, options={"inner": inner})
    with tempfile.TemporaryDirectory() as folder:
        request_file = Path(folder) / "request.json"
        with ck.record(request_file, target=given.target):
            results(compiled, model, x, given.train)
        # `cukiln tune request.json` does this too, in a shell.
        request = {**json.loads(request_file.read_text()), "search": {"level": given.level}}
    print(f"the graph: {ck.replaced()[-1]}")
    begin = time.monotonic()
    job = client.wait(client.submit(request))
    print(f"tuned {len(job.problems)} problems in {time.monotonic() - begin:.0f} s: {job.state}")
    with ck.using(client=client, target=given.target, wait_seconds=30):
        with ck.counted() as calls:
            made = results(compiled, model, x, given.train)
        expected = results(model, model, x, given.train)
    print(f"{calls.kernels} of {calls.kernels + calls.own} calls ran a kernel of ours")
    differences = [(one - other).abs().max() for one, other in zip(made, expected, strict=True)]
    print(f"largest difference from eager: {float(torch.stack(differences).max()):.2e}")


def results(
    call: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module, x: torch.Tensor, train: bool
) -> list[torch.Tensor]:
    """The model's output; in training, the gradients of its parameters behind it."""
    if not train:
        with torch.no_grad():
            return [call(x)]
    made = call(x)
    return [made.detach(), *torch.autograd.grad(made.square().mean(), list(model.parameters()))]
