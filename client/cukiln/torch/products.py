"""`matmul` with bias, residual and activation in one kernel, and its gradients."""

from itertools import zip_longest
from math import prod
from typing import Any, cast

import torch
from torch.nn import functional

from cukiln.torch import activations
from cukiln.torch.activations import Activation
from cukiln.torch.dispatch import Operator, Tensors, as_on_gpu
from cukiln.torch.layouts import Matrices, is_aligned, is_packed, merged, stored_matrix
from cukiln.torch.library import apply, call, define, forward, lowered
from cukiln.torch.modes import uses_tf32
from cukiln.torch.plan import FLOATS, RINGS, Plan, seen_as
from cukiln.torch.reductions import sum_of_axes

Options = tuple[bool, bool, str | None, bool]  # bias, residual, activation, tf32


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """`activation(a @ b + bias + residual)`, as `torch.matmul` multiplies.

    `bias`: a vector, of a number for each column; `residual`: of the result's shape. `activation`: relu, gelu (by erf),
    silu, tanh, sigmoid, leaky_relu (0.01). Sums and what follows are computed in float32 and rounded once.
    """
    return call(MATMUL, _dispatched, _recorded, a, b, bias, residual, activation)


def pack(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensors, Options]:
    tf32 = a.dtype is torch.float32 and as_on_gpu(a) and uses_tf32("matmul")
    options = (bias is not None, residual is not None, activation, tf32)
    if bias is None and residual is None:
        return (a, b), options
    return tuple([tensor for tensor in (a, b, bias, residual) if tensor is not None]), options


def _dispatched(operator: Operator, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
    return own(*pack(a, b, *rest)) if a.dim() < 2 or b.dim() < 2 else lowered(operator, a, b, *rest)


# ---- the problem


def plan(tensors: Tensors, options: Options) -> Plan | None:
    a, b, *rest = tensors
    with_bias, with_residual, activation, tf32 = options
    dtype = {**FLOATS, **RINGS}.get(a.dtype)
    if dtype is None or any(tensor.dtype is not a.dtype for tensor in tensors) or a.dim() < 2 or b.dim() < 2:
        return None
    if a.dtype in RINGS and (rest or activation):
        return None
    stored = _stored(a, b)
    if stored is None:
        return None
    of_a, of_b, shape = stored
    m, k = (of_a.columns, of_a.rows) if of_a.transposed else (of_a.rows, of_a.columns)
    n = of_b.rows if of_b.transposed else of_b.columns
    batch = max(of_a.batch, of_b.batch)
    of_out = ((m, n), (n, 1)) if batch == 1 else ((batch, m, n), (m * n, n, 1))
    views = [seen_as(a, of_a.view), seen_as(b, of_b.view)]
    for tensor, vector in zip(rest, [True] * with_bias + [False] * with_residual, strict=True):
        if not _fits(tensor, (n,) if vector else shape, n):
            return None
        views.append(None if vector else seen_as(tensor, of_out))
    for matrix, tensor in ((of_a, a), (of_b, b)):
        if not is_aligned(tensor.data_ptr(), matrix.elements, tensor.element_size()):
            return None
    problem: dict[str, Any] = {"operator": "matmul", "m": m, "n": n, "k": k, "dtype": dtype}
    problem["layout"] = ("t" if of_a.transposed else "n") + ("t" if of_b.transposed else "n")
    problem |= {"batch": batch} if batch > 1 else {}
    problem |= {"allow_tf32": True} if tf32 else {}
    for letter, matrix in (("a", of_a), ("b", of_b)):
        if matrix.pitch != matrix.columns:
            problem[f"ld{letter}"] = matrix.pitch
        if batch > 1 and matrix.stride != matrix.rows * matrix.pitch:
            problem[f"stride_{letter}"] = matrix.stride
    bias = {"op": "bias", "axis": "n"} if with_bias else None
    if epilogue := activations.nodes(bias, with_residual, activation):
        problem["epilogue"] = epilogue
    return Plan(
        problem=problem,
        inputs=tuple(views),
        shape=shape,
        dtype=a.dtype,
        out=None if shape == of_out[0] else of_out,
        scalars=activations.scalars(activation),
    )


def _fits(tensor: torch.Tensor, shape: tuple[int, ...], columns: int) -> bool:
    """Of the epilogue's tensors: packed, and as aligned as out."""
    return (
        tuple(tensor.shape) == shape
        and is_packed(tensor.shape, tensor.stride())
        and is_aligned(tensor.data_ptr(), (columns,), tensor.element_size())
    )


def _stored(a: torch.Tensor, b: torch.Tensor) -> tuple[Matrices, Matrices, tuple[int, ...]] | None:
    """Both as matrices, and the result's shape. None where they are not stored as kernels read them, or do not go
    together, which PyTorch's own operator says then."""
    if a.shape[-1] != b.shape[-2]:
        return None
    batch = _broadcast(a.shape[:-2], b.shape[:-2])
    if batch is None:
        return None
    shape = (*batch, a.shape[-2], b.shape[-1])
    of_a, of_b = _matrices(a, batch), _matrices(b, batch)
    if of_b is not None and of_b.stride == 0 and prod(batch) > 1:
        # One matrix for all of them: those of a are one long one, where their rows lie one after the other.
        rows = merged((*a.shape[:-2], a.shape[-2]), a.stride()[:-1]) if tuple(a.shape[:-2]) == batch else None
        long = rows and stored_matrix((rows[0], a.shape[-1]), (rows[1], a.stride(-1)))
        if long and not long[0]:
            one_b = Matrices(of_b.transposed, of_b.rows, of_b.columns, of_b.pitch, 1, 0)
            return Matrices(*long, 1, 0), one_b, shape
    return None if of_a is None or of_b is None else (of_a, of_b, shape)


def _matrices(tensor: torch.Tensor, batch: tuple[int, ...]) -> Matrices | None:
    rows, columns = tensor.shape[-2:]
    matrix = stored_matrix((rows, columns), cast("tuple[int, int]", tensor.stride()[-2:]))
    if matrix is None:
        return None
    new = len(batch) - (tensor.dim() - 2)
    strides = [0] * new + [
        0 if size == 1 else stride for size, stride in zip(tensor.shape[:-2], tensor.stride(), strict=False)
    ]
    across = merged(batch, strides)
    if across is None:
        return None
    _, stored_rows, stored_columns, pitch = matrix
    span = (stored_rows - 1) * pitch + stored_columns
    count, stride = across
    return Matrices(*matrix, count, stride) if stride == 0 or stride >= span else None


def _broadcast(one: torch.Size, other: torch.Size) -> tuple[int, ...] | None:
    sizes = [(size, against) for size, against in zip_longest(reversed(one), reversed(other), fillvalue=1)]
    if any(size != against and 1 not in (size, against) for size, against in sizes):
        return None
    return tuple(size if against == 1 else against for size, against in reversed(sizes))


# ---- PyTorch's own way


def own(tensors: Tensors, options: Options) -> torch.Tensor:
    a, b, *rest = tensors
    with_bias, with_residual, activation, _ = options
    bias = rest.pop(0) if with_bias else None
    if bias is not None and bias.dim() == 1 and b.dim() == 2 and bias.dtype is a.dtype:
        made = functional.linear(a, b.t(), bias)
    else:
        made = torch.matmul(a, b) if bias is None else torch.matmul(a, b) + bias
    return activations.apply(activation, made + rest[0] if with_residual else made)


MATMUL = Operator("matmul", pack, plan, own)


# ---- gradients


class _Matmul(torch.autograd.Function):
    """Of an activation whose gradient follows from its result. `direct`: not by way of PyTorch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        activation: str | None,
        direct: bool,
    ) -> torch.Tensor:
        out = forward(MATMUL, direct, a, b, bias, residual, activation)
        of_a, of_b, *_ = ctx.needs_input_grad  # what no gradient reads may be written meanwhile
        ctx.save_for_backward(a if of_b else None, b if of_a else None, None if activation is None else out)
        ctx.shapes, ctx.dtype = (a.shape, b.shape), a.dtype
        ctx.activation = activation
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        ctx.residual = None if residual is None else residual.shape
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b, out = ctx.saved_tensors
        of_a, of_b, of_bias, of_residual, _, _ = ctx.needs_input_grad
        dz = activations.gradient(ctx.activation, gradients[0], out)
        dproduct = dz.to(ctx.dtype)  # a bias or residual of a wider type made the result one
        return (
            _summed(matmul(dproduct, b.mT), ctx.shapes[0]) if of_a else None,
            _of_second(a, ctx.shapes[1], dproduct) if of_b else None,
            _of_bias(dz, ctx.dtype, *ctx.bias) if of_bias else None,
            dz.sum_to_size(ctx.residual) if of_residual else None,
            None,
            None,
        )


def _summed(gradient: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Of an operand that was broadcast."""
    return gradient if gradient.shape == shape else gradient.sum_to_size(shape)


def _of_second(a: torch.Tensor, shape: torch.Size, dz: torch.Tensor) -> torch.Tensor:
    if len(shape) == 2 and a.dim() > 2:
        return matmul(a.flatten(0, -2).mT, dz.flatten(0, -2))  # `reshape(-1, 0)` is refused
    return _summed(matmul(a.mT, dz), shape)


def _of_bias(dz: torch.Tensor, of_product: torch.dtype, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    dz = dz.to(torch.promote_types(of_product, dtype))  # a residual of a wider type made the result one
    if len(shape) == 1 and shape[0] == dz.shape[-1]:
        return sum_of_axes(dz, range(dz.dim() - 1))
    return dz.sum_to_size(shape)


def _recorded(a: torch.Tensor, b: torch.Tensor, *rest: Any, direct: bool = False) -> torch.Tensor:
    bias, residual, activation = (*rest, None, None, None)[:3]
    if a.dim() < 2 or b.dim() < 2:
        return own(*pack(a, b, bias, residual, activation))
    fused = activation if activation in activations.OF_RESULT else None
    made = apply(MATMUL, _Matmul, a, b, bias, residual, fused, direct=direct)
    return made if activation == fused else activations.apply(activation, made)


define(
    "(Tensor a, Tensor b, Tensor? bias=None, Tensor? residual=None, str? activation=None) -> Tensor",
    MATMUL,
    _recorded,
)
