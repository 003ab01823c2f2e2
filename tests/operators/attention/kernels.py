"""What tests of attention share: problems by a few fields, kernels by a few words, another way to compute them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.attention.problem import AttentionProblem
from codegen.search.schedule import Schedule
from tests.operators.harness.declarations import Array, Inputs

NAME = "attention"
OP = operator(NAME)
DEFAULT: dict[str, Any] = {"seq_q": 70, "seq_kv": 90, "heads_q": 4, "heads_kv": 2, "head_dim_qk": 64}
# Small ones: two warps with a piece of 16 queries each.
SMALL: dict[str, Any] = {"tile_q": 32, "tile_kv": 32, "warps": 2, "stages": 1, "q_in": "registers"}

LLAMA: dict[str, Any] = {
    "seq_q": 2048,
    "seq_kv": 2048,
    "heads_q": 32,
    "heads_kv": 8,
    "head_dim_qk": 128,
    "causal": True,
}
# One token more of a sequence: few blocks, many keys.
DECODE: dict[str, Any] = {**LLAMA, "seq_q": 1, "seq_kv": 8192}
# What public models have.
CLASSES: dict[str, dict[str, Any]] = {
    "BERT": {"batch": 8, "seq_q": 512, "seq_kv": 512, "heads_q": 12, "heads_kv": 12},
    "heads of 96": {**LLAMA, "head_dim_qk": 96},
    "Llama": LLAMA,
    "Llama, bfloat16": {**LLAMA, "dtype": "bfloat16", "lse": True},
    "Gemma": {**LLAMA, "head_dim_qk": 256, "heads_q": 8, "window_left": 4096, "softcap": 50.0},
    "192 and 128": {**LLAMA, "head_dim_qk": 192, "head_dim_vo": 128, "heads_q": 16, "dtype": "bfloat16"},
    "decode": DECODE,
    "speculative": {**DECODE, "seq_q": 8},
    "decode, bfloat16": {**DECODE, "batch": 2, "head_dim_qk": 64, "dtype": "bfloat16", "lse": True},
}
STRIDES = {"q_strides": [70 * 256, 256, 64], "k_strides": [90 * 128, 128, 64], "v_strides": [90 * 128, 128, 64],
           "out_strides": [70 * 256, 256, 64]}  # fmt: skip
EXPLICIT: dict[str, Any] = {
    "batch": 1, **DEFAULT, "head_dim_vo": 64, "dtype": "float16", "layout": "bshd", "causal": False,
    "window_left": None, "window_right": None, "softcap": None, "scale": 0.125, "lse": False,
}  # fmt: skip
USUAL = {"tile_q": 64, "tile_kv": 64, "warps": 4, "stages": 2, "q_in": "registers", "band": 0}
ONE_QUERY = {**USUAL, "tile_q": 16, "warps": 1, "q_in": "shared", "split": "workspace", "split_kv": 8}


def attention(**fields: Any) -> AttentionProblem:
    """70 queries and 90 keys of 4 heads on 2, where nothing else is said."""
    problem = OP.parse({"operator": NAME, **DEFAULT, **fields})
    assert isinstance(problem, AttentionProblem)
    return problem


def kernel(
    dtype: str = "float16",
    *,
    qk: int = 64,
    vo: int = 0,
    align: int = 8,
    align_out: int = 0,
    layout: str = "bshd",
    softcap: bool = False,
    lse: bool = False,
    ragged: bool = False,
    page_size: int = 0,
    name: str = NAME,
    **tunables: int | str,
) -> Kernel:
    """`vo`: as `qk`; `align_out`: as `align`; `page_size`: of a paged cache."""
    lengths = "paged" if page_size else "ragged" if ragged else "dense"
    signature = {
        "dtype": dtype, "layout": layout, "softcap": softcap, "lse": lse, "columns_qk": qk, "columns_vo": vo or qk,
        "align": align, "align_out": align_out or align, **({"lengths": lengths} if lengths != "dense" else {}),
        **({"page_size": page_size} if page_size else {}),
    }  # fmt: skip
    return Kernel.of(name, signature, Schedule.of({**SMALL, **tunables}))


def heads_first(p: AttentionProblem, tensor: Array) -> Array:
    return tensor.swapaxes(1, 2) if p.layout == "bshd" else tensor


def visible(p: AttentionProblem) -> Array:
    """Which keys each query sees, by the definition: place by place."""
    seen = np.zeros((p.seq_q, p.seq_kv), bool)
    for i in range(p.seq_q):
        own = i + p.seq_kv - p.seq_q
        for j in range(p.seq_kv):
            inside = p.window_left is None or j >= own - p.window_left
            seen[i, j] = inside and (p.window_right is None or j <= own + p.window_right)
    return seen


def definition(p: AttentionProblem, inputs: Inputs) -> Array:
    """Row by row in extended precision: out, and lse behind it."""
    q, k, v = (heads_first(p, inputs[name].astype(np.longdouble)) for name in ("q", "k", "v"))
    seen = visible(p)
    out = np.zeros((p.batch, p.heads_q, p.seq_q, p.head_dim_vo), np.longdouble)
    lse = np.full((p.batch, p.heads_q, p.seq_q), -np.inf, np.longdouble)
    for batch, head, i in np.ndindex(p.batch, p.heads_q, p.seq_q):
        own = head * p.heads_kv // p.heads_q
        keys, values = k[batch, own][seen[i]], v[batch, own][seen[i]]
        if len(keys):
            scores = p.scale * (keys @ q[batch, head, i])
            scores = p.softcap * np.tanh(scores / p.softcap) if p.softcap else scores
            most = scores.max()
            weights = np.exp(scores - most)
            out[batch, head, i] = weights @ values / weights.sum()
            lse[batch, head, i] = (most + np.log(weights.sum())) / np.log(np.longdouble(2))
    whole = heads_first(p, out)
    return np.concatenate([whole.reshape(-1), lse.reshape(-1)]) if p.lse else whole


def in_fp32(p: AttentionProblem, inputs: Inputs, lost: bool) -> Array:
    """In single precision, with weights of 16 bits; without the last key in the sums where that is `lost`."""
    q, k, v = (heads_first(p, inputs[name].astype(np.float32)) for name in ("q", "k", "v"))
    k, v = (np.repeat(tensor, p.heads_q // p.heads_kv, axis=1) for tensor in (k, v))
    scores = np.float32(p.scale) * (q @ k.swapaxes(2, 3))
    if p.softcap:
        scores = np.float32(p.softcap) * np.tanh(scores / np.float32(p.softcap))
    seen = visible(p)
    if lost:
        seen[:, -1] = False
    bits = np.where(seen, scores * np.float32(math.log2(math.e)), np.float32(-np.inf))
    most = np.where(seen.any(1)[:, None], bits.max(3, keepdims=True), np.float32(0))
    weights = np.exp2(bits - most)
    total = weights.sum(3, keepdims=True)
    narrow = weights.astype(inputs["v"].dtype).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total == 0, np.float32(0), narrow @ v / total)
        lse = most + np.log2(total)
    whole = heads_first(p, out).astype(inputs["v"].dtype).astype(np.float32)
    return np.concatenate([whole.reshape(-1), lse.reshape(-1)]) if p.lse else whole


def by_torch(p: AttentionProblem, inputs: Inputs) -> Array:
    """PyTorch's scaled_dot_product_attention in float64; it has no softcap."""
    import torch

    q, k, v = (torch.from_numpy(heads_first(p, inputs[name].astype(np.float64)).copy()) for name in ("q", "k", "v"))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.from_numpy(visible(p)), scale=p.scale, enable_gqa=True
    )
    result: Array = heads_first(p, out.numpy())
    return result
