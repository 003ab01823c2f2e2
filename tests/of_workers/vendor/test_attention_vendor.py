"""Attention by cuDNN and PyTorch: what they are asked for, and what they compute or plan where they are installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from codegen.operators import operator
from codegen.plan.verification_plan import check_output
from tests.operators.attention.kernels import LLAMA, OP, attention, visible
from tests.support.gpu.cudnn_without_a_gpu import planned_without_a_gpu
from tests.support.gpu.numpy_bench import NumpyBench, quiet
from workers.cuda.cupy_gpu import VENDORS
from workers.gpu.interface import GpuError, LaunchRefused
from workers.vendor import attention as vendor
from workers.vendor import cudnn
from workers.vendor.attention_plan import AttentionPlan, plan, pytorch_refuses
from workers.vendor.cublaslt import LibraryMissing
from workers.vendor.cudnn import CudnnError, Found
from workers.vendor.tensor import Tensor

needs_cudnn = pytest.mark.skipif(
    importlib.util.find_spec("cudnn") is None, reason=f"cuDNN is not installed: {cudnn.HOW_TO_INSTALL}"
)
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")

PLAIN: dict[str, Any] = {"batch": 2, "seq_q": 40, "seq_kv": 40, "heads_q": 4, "heads_kv": 2, "head_dim_qk": 16}
GAPS = {"q_strides": [40 * 240, 240, 48], "k_strides": [48 * 40, 48, 24]}
FOR_CUDNN: list[dict[str, Any]] = [
    {},
    {"layout": "bhsd", "dtype": "bfloat16", "head_dim_vo": 24},
    {"causal": True, "lse": True},
    {"seq_q": 20, "causal": True, "scale": 0.5},
    {"window_left": 7, "window_right": 3, "lse": True, "seq_q": 33},
    {**GAPS, "window_left": 0, "causal": True},
]


def planned(fields: Mapping[str, Any]) -> AttentionPlan:
    problem = attention(**{**PLAIN, **fields})
    return plan(problem, OP.operands(problem))


# --- the plan


def test_tensors_have_their_heads_second_whatever_their_layout() -> None:
    found = planned({})
    assert found.tensors["q"] == Tensor("float16", (2, 4, 40, 16), (40 * 64, 16, 64, 1))
    assert found.tensors["k"] == Tensor("float16", (2, 2, 40, 16), (40 * 32, 16, 32, 1))
    assert found.out == found.tensors["q"]
    assert planned({"layout": "bhsd"}).tensors["q"] == Tensor("float16", (2, 4, 40, 16), (40 * 64, 640, 16, 1))


@pytest.mark.parametrize("fields", FOR_CUDNN, ids=str)
def test_the_bounds_say_which_keys_a_query_sees(fields: dict[str, Any]) -> None:
    problem, found = attention(**{**PLAIN, **fields}), planned(fields)
    diagonal = problem.seq_kv - problem.seq_q
    seen = np.ones((problem.seq_q, problem.seq_kv), bool)
    for query, key in product(range(problem.seq_q), range(problem.seq_kv)):
        place = query + diagonal
        seen[query, key] = (found.left is None or key > place - found.left) and (
            found.right is None or key <= place + found.right
        )
    assert np.array_equal(seen, visible(problem))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, None),
        ({"causal": True}, None),
        ({"seq_q": 20}, None),
        ({"softcap": 3.0}, "no cap"),
        ({"lse": True}, "logarithms"),
        ({"window_left": 3}, "no window"),
        ({"window_right": 3}, "no window"),
        ({"seq_q": 20, "causal": True}, "first query"),
        ({"head_dim_vo": 24}, "one size of head"),
        ({"lengths": "ragged"}, "not for lengths = ragged"),
        ({"lengths": "paged", "page_size": 16}, "not for lengths = paged"),
    ],
)
def test_pytorch_is_asked_for_whole_problems_only(fields: dict[str, Any], message: str | None) -> None:
    why = pytorch_refuses(attention(**{**PLAIN, **fields}))
    assert (message is None) == (why is None)
    assert message is None or message in str(why)


def test_attention_has_this_vendor_and_another_operator_is_refused() -> None:
    assert VENDORS["attention"] is vendor.offers
    with pytest.raises(TypeError, match="matmul"):
        vendor.offers(
            NumpyBench(), operator("matmul").parse({"operator": "matmul", "m": 8, "n": 8, "k": 8}), {}, 1, quiet
        )


# --- the whole way, with NumPy in the place of cuDNN and of the device


class NumpyCudnn:
    """cuDNN's attention by its documentation; plans whose number is in `broken` do not run."""

    version = "9.99.0"

    def __init__(self, bench: NumpyBench, broken: tuple[int, ...] = ()) -> None:
        self.bench, self.broken = bench, broken

    def open(self, stream: int) -> None:
        assert stream == self.bench.stream

    def graph(self, plan: AttentionPlan) -> NumpyGraph:
        return NumpyGraph(self, plan)


class NumpyGraph:
    def __init__(self, library: NumpyCudnn, plan: AttentionPlan) -> None:
        self.library, self.plan = library, plan

    def find(self, count: int, workspace_bytes: int, seconds: float) -> Iterator[Found]:
        yield from (Found(index, f"eng{index}", 64 * index) for index in range(3))

    def execute(self, index: int, pointers: Mapping[str, int], output: int, workspace: int) -> None:
        if index in self.library.broken:
            raise CudnnError("not for this device")
        memory, plan = self.library.bench.memory, self.plan
        assert memory[workspace].nbytes >= 64 * index
        q, k, v = (view(memory[pointers[name]], plan.tensors[name]).astype(np.float64) for name in ("q", "k", "v"))
        group = q.shape[1] // k.shape[1]
        k, v = (np.repeat(heads, group, 1) for heads in (k, v))
        scores = plan.scale * q @ k.swapaxes(2, 3)
        place = np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        keys = np.arange(k.shape[2])
        seen = (keys > place - plan.left) if plan.left is not None else np.ones((1, 1), bool)
        if plan.right is not None:
            seen = seen & (keys <= place + plan.right)
        weights = np.where(seen, np.exp(scores), 0.0)
        total = weights.sum(3, keepdims=True)
        view(memory[output], plan.out, write=True)[...] = weights @ v / total
        if plan.lse is not None:
            view(memory[pointers["lse"]], plan.lse, write=True)[...] = np.log(total)


def view(flat: np.ndarray[Any, Any], tensor: Tensor, write: bool = False) -> np.ndarray[Any, Any]:
    values = flat.view(ml_dtypes.bfloat16) if tensor.dtype == "bfloat16" else flat
    steps = [stride * values.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(values, tensor.extents, steps, writeable=write)


def no_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


def no_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise LibraryMissing("no cuDNN here")

    monkeypatch.setattr(vendor, "Cudnn", missing)


@pytest.mark.parametrize("fields", FOR_CUDNN, ids=str)
def test_what_cudnn_is_asked_for_is_the_problem(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    no_pytorch(monkeypatch)
    bench = NumpyBench()
    monkeypatch.setattr(vendor, "Cudnn", lambda: NumpyCudnn(bench, broken=(1,)))
    problem = attention(**{**PLAIN, **fields})
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(5))
    calls = vendor.offers(bench, problem, inputs, 2, quiet)
    assert [call.describe()["algorithm"] for call in calls] == ["eng0", "eng2"]
    assert calls[0].describe() == {
        "library": "cuDNN", "version": "9.99.0", "algorithm": "eng0", "fused": True, "workspace_bytes": 0,
    }  # fmt: skip
    assert np.isnan(calls[0].result(1).astype(np.float64)).any(), "no run has written the second set"
    calls[1].run(1)
    expected, bound = OP.reference(problem, inputs)
    narrow = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[problem.dtype]
    assert check_output(calls[1].result(1), expected, bound + narrow * np.abs(expected), exact=False).ok


def test_a_plan_that_stops_running_refuses_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    no_pytorch(monkeypatch)
    bench = NumpyBench()
    library = NumpyCudnn(bench)
    monkeypatch.setattr(vendor, "Cudnn", lambda: library)
    problem = attention(**PLAIN)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(5))
    call = vendor.offers(bench, problem, inputs, 1, quiet)[0]
    library.broken = (0,)
    with pytest.raises(LaunchRefused, match="not for this device"):
        call.run(0)


def test_a_machine_with_neither_says_what_each_would_need(monkeypatch: pytest.MonkeyPatch) -> None:
    no_pytorch(monkeypatch)
    no_cudnn(monkeypatch)
    problem = attention(**PLAIN)
    with pytest.raises(GpuError, match=r"no cuDNN here; no PyTorch: .*pip install torch"):
        vendor.offers(NumpyBench(), problem, OP.make_inputs(problem, "normal", np.random.default_rng(5)), 1, quiet)


def test_a_process_that_is_heard_is_not_silent_for_as_long_as_both_take(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    def library(name: str) -> Any:
        def offers(*_: Any) -> list[Any]:
            heard.append(name)
            return []

        return offers

    for name in ("by_cudnn", "by_pytorch"):
        monkeypatch.setattr(vendor, name, library(name))
    vendor.offers(NumpyBench(), attention(**PLAIN), {}, 1, heard.append)
    assert heard == ["what cuDNN offers", "by_cudnn", "what PyTorch offers", "by_pytorch"]


def test_each_plan_that_cudnn_builds_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    no_pytorch(monkeypatch)
    bench, heard = NumpyBench(), list[str]()
    monkeypatch.setattr(vendor, "Cudnn", lambda: NumpyCudnn(bench))
    problem = attention(**PLAIN)
    vendor.offers(bench, problem, OP.make_inputs(problem, "normal", np.random.default_rng(5)), 1, heard.append)
    assert [words for words in heard if "builds" in words][:2] == [
        "cuDNN builds plans, eng0 at last",
        "cuDNN builds plans, eng1 at last",
    ]


def test_a_cap_is_in_neither() -> None:
    with pytest.raises(GpuError, match=r"cuDNN has no cap .*PyTorch's flash backend has no cap"):
        vendor.offers(NumpyBench(), attention(**PLAIN, softcap=3.0), {}, 1, quiet)


@pytest.mark.parametrize("fields", [{"lengths": "ragged"}, {"lengths": "paged", "page_size": 16}], ids=str)
def test_sequences_with_lengths_of_their_own_are_in_neither(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "Cudnn", lambda: NumpyCudnn(NumpyBench()))
    problem = attention(**PLAIN, **fields)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(5))
    words = f"is asked for sequences of one length alone, not for lengths = {fields['lengths']}"
    with pytest.raises(GpuError, match=f"cuDNN {words}; PyTorch's flash backend {words}"):
        vendor.offers(NumpyBench(), problem, inputs, 1, quiet)


def test_an_error_of_a_library_that_is_no_refusal_costs_that_library_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    no_pytorch(monkeypatch)
    monkeypatch.setattr(NumpyCudnn, "graph", lambda *given: [][3])
    monkeypatch.setattr(vendor, "Cudnn", lambda: NumpyCudnn(NumpyBench()))
    problem = attention(**PLAIN)
    (lost,) = vendor.offers(
        NumpyBench(), problem, OP.make_inputs(problem, "normal", np.random.default_rng(5)), 1, quiet
    )
    assert lost.describe()["library"] == "cuDNN"
    for use in (lost.run, lost.result):
        with pytest.raises(LaunchRefused, match="cuDNN failed: IndexError: list index out of range"):
            use(0)


# --- PyTorch itself, whose flash backend is there on CPUs, too


@needs_torch
@pytest.mark.parametrize("fields", [{}, {"causal": True}, {"seq_q": 20, "scale": 0.5, **GAPS}], ids=str)
@pytest.mark.parametrize(("layout", "dtype"), [("bshd", "bfloat16"), ("bhsd", "float16")])
def test_pytorch_computes_the_problem(
    fields: dict[str, Any], layout: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_cudnn(monkeypatch)
    gaps = fields if layout == "bshd" else {name: value for name, value in fields.items() if "strides" not in name}
    problem = attention(**{**PLAIN, "layout": layout, "dtype": dtype, **gaps})
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(5))
    (call,) = vendor.offers(NumpyBench(), problem, inputs, 2, quiet)
    described = call.describe()
    assert (described["library"], described["fused"]) == ("PyTorch", True)
    assert "flash" in described["algorithm"]
    call.run(1)
    expected, bound = OP.reference(problem, inputs)
    assert call.result(1).shape == expected.shape
    assert check_output(call.result(1), expected, bound, exact=False).ok


@needs_torch
def test_what_pytorchs_backend_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    no_cudnn(monkeypatch)
    problem = attention(**PLAIN)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(5))
    import torch

    def refuse(*given: Any, **named: Any) -> Any:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    with pytest.raises(GpuError, match=r"no cuDNN here; PyTorch: No available kernel"):
        vendor.offers(NumpyBench(), problem, inputs, 1, quiet)


# --- cuDNN itself


PLAN = """
import json, sys
from codegen.operators import operator
from workers.vendor.attention_plan import plan
from workers.vendor.cudnn import Cudnn, CudnnError
asked = json.load(sys.stdin)
library, answers = Cudnn(json.dumps(asked["device"])), []
for fields in asked["problems"]:
    count = fields.pop("count")
    problem = operator("attention").parse({"operator": "attention", **fields})
    try:
        graph = library.graph(plan(problem, operator("attention").operands(problem)))
        found = [[one.name, one.workspace_bytes] for one in graph.find(count, 2**30, 60.0)]
        answers.append({"plans": found, "graph": json.loads(str(graph.graph))})
    except CudnnError as error:
        answers.append({"refused": str(error)})
print(json.dumps(answers))
"""


def asked_for(folder: Path, problems: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """What cuDNN says to each; it builds at most `count` plans."""
    return planned_without_a_gpu(folder, PLAN, [{**fields, "count": count} for fields in problems])


@needs_cudnn
def test_the_library_accepts_every_graph(tmp_path: Path) -> None:
    answers = asked_for(tmp_path, [{**PLAIN, **fields} for fields in FOR_CUDNN], count=0)
    for fields, answer in zip(FOR_CUDNN, answers, strict=True):
        asked = planned(fields)
        tensors = {tensor["uid"]: tensor for tensor in answer["graph"]["tensors"].values()}
        given = {**dict(enumerate(asked.tensors.values(), start=1)), cudnn.OUTPUT: asked.out}
        for number, tensor in {**given, **({4: asked.lse} if asked.lse else {})}.items():
            described = tensors[number]
            assert (described["dim"], described["stride"]) == (list(tensor.extents), list(tensor.strides))
            assert described["data_type"] == cudnn.DATA_TYPES[tensor.dtype]
        (node,) = answer["graph"]["nodes"]
        assert (node["left_bound"], node["right_bound"]) == (asked.left, asked.right)
        assert (node["diagonal_alignment"] == "BOTTOM_RIGHT") == (asked.left is not None or asked.right is not None)


@needs_cudnn
def test_cudnn_plans_attention_of_bert_of_llama_of_windows_and_of_one_query(tmp_path: Path) -> None:
    bert = {"batch": 8, "seq_q": 128, "heads_q": 12, "head_dim_qk": 64}
    llama = {**LLAMA, "batch": 1, "causal": True, "lse": True}
    window = {**LLAMA, "batch": 1, "causal": True, "window_left": 511}
    decode = {"batch": 16, "seq_q": 1, "seq_kv": 4096, "heads_q": 32, "heads_kv": 8, "head_dim_qk": 128}
    uneven = {**bert, "head_dim_qk": 20}
    fewer_keys = {**bert, "seq_kv": 64, "causal": True}
    *found, odd, fewer = asked_for(tmp_path, [bert, llama, window, decode, uneven, fewer_keys], count=2)
    for answer in found:
        assert len({name for name, _ in answer["plans"]}) == 2
    assert "multiple of 8" in odd["refused"]
    assert "max_s_q" in fewer["refused"]
