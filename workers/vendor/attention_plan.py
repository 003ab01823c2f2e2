"""How cuDNN and PyTorch compute an attention: which tensors, which mask; or why they do not. Pure.

Both take tensors of (batch, heads, positions, elements of a head) whatever their order in memory, which strides say.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.operand import packed_strides
from codegen.operator import Operand
from codegen.operators.attention.problem import AttentionProblem
from workers.vendor.tensor import Tensor

NO_CAP = "has no cap of the scores (softcap)"
OF_ONE_LENGTH = "is asked for sequences of one length alone, not for lengths = {lengths}"
LOG2_OF_E = 1.4426950408889634  # from both libraries' logarithms of sums to ours, which are to the base 2


@dataclass(frozen=True)
class AttentionPlan:
    """cuDNN's node. `tensors`: q, k, v. A query sees the keys from before its own place - `left` to its own place +
    `right`, without an end where there is None; the last query stands beside the last key. `lse`: also written,
    as (batch, heads, positions, 1)."""

    tensors: dict[str, Tensor]
    out: Tensor
    lse: Tensor | None
    scale: float
    left: int | None
    right: int | None


def heads_first(operand: Operand, layout: str) -> Tensor:
    """An operand of rank 4 with its heads second."""
    return Tensor.of(operand, (0, 2, 1, 3) if layout == "bshd" else (0, 1, 2, 3))


def plan(problem: AttentionProblem, operands: Sequence[Operand]) -> AttentionPlan:
    """Of a problem that `cudnn_refuses` does not."""
    by_name = {operand.name: operand for operand in operands}
    tensors = {name: heads_first(by_name[name], problem.layout) for name in ("q", "k", "v")}
    rows = (problem.batch, problem.heads_q, problem.seq_q, 1)
    # cuDNN's bound to the left is exclusive, its bound to the right inclusive.
    left = None if problem.window_left is None else problem.window_left + 1
    return AttentionPlan(
        tensors=tensors,
        out=heads_first(by_name["out"], problem.layout),
        lse=Tensor("float32", rows, packed_strides(rows)) if problem.lse else None,
        scale=problem.scale,
        left=left,
        right=problem.window_right,
    )


def cudnn_refuses(problem: AttentionProblem) -> str | None:
    """Why cuDNN is not asked; None where it is. It has nodes of ragged batches and pages: nothing here builds them."""
    if problem.ragged:
        return OF_ONE_LENGTH.format(lengths=problem.lengths)
    return NO_CAP if problem.softcap is not None else None


def pytorch_refuses(problem: AttentionProblem) -> str | None:
    """Why `scaled_dot_product_attention` by its flash backend is not the whole problem; None where it is. A mask of its
    own, which that backend does not take, would be needed for a window; its causal mask puts the first query beside
    the first key."""
    if problem.ragged:
        return OF_ONE_LENGTH.format(lengths=problem.lengths)
    if problem.softcap is not None:
        return NO_CAP
    if problem.lse:
        return "does not return the logarithms of the sums (lse)"
    if problem.window_left is not None or problem.window_right not in (None, 0):
        return "has no window"
    if problem.window_right == 0 and problem.seq_q != problem.seq_kv:
        return "puts the first query of a causal mask beside the first key, not the last beside the last"
    if problem.head_dim_qk != problem.head_dim_vo:
        return "takes one size of head"
    return None
