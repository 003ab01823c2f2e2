"""`examples/private_resnet18.json` is ResNet-18 for CIFAR-10 over Z/2^64; its first layer sends what the page says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from codegen.counts import Openings
from codegen.lower import lower
from codegen.operators import operator
from codegen.search.search import Search
from codegen.targets import target
from cukiln.client import Client
from tests.operators.harness.jobs import client
from tests.support.run.places import ROOT

__all__ = ["client"]

REQUEST: dict[str, Any] = json.loads((ROOT / "examples" / "private_resnet18.json").read_text(encoding="utf-8"))
SHEET = target(REQUEST["target"])


def layers() -> Iterator[tuple[int, ...]]:
    """Rows, channels, filters, rows of a filter, stride, padding of each convolution (He et al., arXiv:1512.03385, with
    a first layer of 3 x 3 and no pooling, as for CIFAR-10)."""
    yield 32, 3, 64, 3, 1, 1
    rows, channels = 32, 64
    for stage, filters in enumerate((64, 128, 256, 512)):
        stride = 1 if stage == 0 else 2
        yield rows, channels, filters, 3, stride, 1
        if stride == 2:
            yield rows, channels, filters, 1, stride, 0
        rows //= stride
        for _ in range(3):
            yield rows, filters, filters, 3, 1, 1
        channels = filters


def parsed(fields: dict[str, Any]) -> Any:
    return operator(fields["operator"]).parse({name: value for name, value in fields.items() if name != "name"})


def test_the_example_has_every_layer() -> None:
    *convolutions, dense = map(parsed, REQUEST["problems"])
    assert [(p.h, p.c, p.k, p.r, p.stride[0], p.padding[0][0]) for p in convolutions] == list(layers())
    assert (dense.m, dense.n, dense.k) == (1, 10, 512)
    assert {(p.dtype, p.fraction_bits) for p in (*convolutions, dense)} == {("int64", 18)}


def test_the_first_layers_schedules_send_what_the_forms_say() -> None:
    """As a product, and by Winograd's F(2), each output truncated once."""
    op, problem = operator("conv2d"), parsed({**REQUEST["problems"][0], "epilogue": []})
    sent = {}
    for candidate in lower(problem, SHEET, Search(level=1)).candidates:
        schedule = candidate.schedule
        counts = (op.ring_bytes(problem, schedule, Openings()), op.cost(problem, schedule).truncations)
        sent[schedule.as_dict().get("output_tile")] = counts
        forms = {
            form.name: (form.ring_bytes, form.truncations) for form in op.ring_forms(problem, schedule, Openings())
        }
        assert forms["product"] == (759_296, 65_536) and forms["winograd, truncated once"] == (647_168, 65_536)
    assert sent == {None: (759_296, 65_536), 2: (647_168, 65_536), 4: (634_880, 65_536)}


@pytest.mark.long
def test_every_layer_has_a_verified_winner(client: Client) -> None:
    answer = client.tune(**REQUEST)
    assert answer.state == "done"
    assert all(problem.winner is not None and set(problem.verdicts) == {"ok"} for problem in answer.problems)
    assert len(answer.problems) == len(REQUEST["problems"])
