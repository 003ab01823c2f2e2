"""Reads the calls in a graph that Dynamo made: which operation a node is, in whatever way a model has written it."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import Node
from torch.nn import functional

from cukiln.torch.activations import SLOPE

Kind: TypeAlias = Literal[
    "linear",
    "matmul",
    "addmm",
    "conv2d",
    "softmax",
    "layer_norm",
    "rms_norm",
    "attention",
    "add",
    "activation",
    "dropout",
]


@dataclass(frozen=True)
class Reading:
    """What a node computes. `values`: its arguments by name, but for those that are left out. `activation`: the name of
    an activation; empty where no kernel has it. `writes`: whether the result overwrites its first argument."""

    kind: Kind
    values: Mapping[str, Any]
    activation: str = ""
    writes: bool = False


_nn: Any = torch._C._nn
_MATMUL = ("a", "b")
_LAYER_NORM = ("x", "shape", "weight", "bias", "eps")
_RMS_NORM = ("x", "shape", "weight", "eps")
_CONV2D = ("x", "w", "bias", "stride", "padding", "dilation", "groups")

# Functions, and methods by name: what they compute, and the names of their arguments in order.
_SPELLINGS: dict[Any, tuple[Kind, tuple[str, ...]]] = {
    _nn.linear: ("linear", ("a", "b", "bias")),
    operator.matmul: ("matmul", _MATMUL),
    torch.matmul: ("matmul", _MATMUL),
    torch.mm: ("matmul", _MATMUL),
    torch.bmm: ("matmul", _MATMUL),
    "matmul": ("matmul", _MATMUL),
    "mm": ("matmul", _MATMUL),
    "bmm": ("matmul", _MATMUL),
    "__matmul__": ("matmul", _MATMUL),
    torch.addmm: ("addmm", ("input", "a", "b")),
    "addmm": ("addmm", ("input", "a", "b")),
    torch.conv2d: ("conv2d", _CONV2D),
    functional.softmax: ("softmax", ("x", "dim", "_stacklevel", "dtype")),
    torch.softmax: ("softmax", ("x", "dim", "dtype")),
    "softmax": ("softmax", ("x", "dim", "dtype")),
    functional.layer_norm: ("layer_norm", _LAYER_NORM),
    torch.layer_norm: ("layer_norm", (*_LAYER_NORM, "cudnn_enable")),
    functional.rms_norm: ("rms_norm", _RMS_NORM),
    torch.rms_norm: ("rms_norm", _RMS_NORM),
    _nn.scaled_dot_product_attention: ("attention", ("q", "k", "v", "attn_mask", "dropout_p", "is_causal")),
    operator.add: ("add", ("input", "other")),
    operator.iadd: ("add", ("input", "other")),
    torch.add: ("add", ("input", "other")),
    "add": ("add", ("input", "other")),
    "add_": ("add", ("input", "other")),
    functional.dropout: ("dropout", ("x", "p", "training", "inplace")),
    torch.dropout: ("dropout", ("x", "p", "train")),
}
# Arguments that have other names in PyTorch, where they are given by name.
_SAME = {
    "input": ("x", "a"), "mat1": ("a",), "mat2": ("b",), "other": ("b",), "weight": ("b", "w"), "train": ("training",),
    "normalized_shape": ("shape",), "query": ("q",), "key": ("k",), "value": ("v",),
}  # fmt: skip
_ACTIVATIONS: dict[Any, str] = {
    **dict.fromkeys((torch.relu, torch.relu_, functional.relu, functional.relu_, "relu", "relu_"), "relu"),
    **dict.fromkeys((torch.tanh, torch.tanh_, functional.tanh, "tanh", "tanh_"), "tanh"),
    **dict.fromkeys((torch.sigmoid, torch.sigmoid_, functional.sigmoid, "sigmoid", "sigmoid_"), "sigmoid"),
    functional.silu: "silu",
    _nn.gelu: "gelu",
    functional.leaky_relu: "leaky_relu",
}
_ARGUMENTS_OF_ACTIVATIONS = {
    "relu": ("x", "inplace"), "tanh": ("x",), "sigmoid": ("x",), "silu": ("x", "inplace"), "gelu": ("x",),
    "leaky_relu": ("x", "negative_slope", "inplace"),
}  # fmt: skip


def read(node: Node) -> Reading | None:
    """None: not one of the operations that kernels are for, or with arguments that are not known here."""
    target = node.target
    if node.op not in ("call_function", "call_method"):
        return None
    writes = (_name(target).endswith("_") and not _name(target).endswith("__")) or target is operator.iadd
    if (activation := _ACTIVATIONS.get(target)) is not None:
        values = _bound(node, _ARGUMENTS_OF_ACTIVATIONS[activation])
        if values is None:
            return None
        as_kernels = values.get("approximate", "none") == "none" and values.get("negative_slope", SLOPE) == SLOPE
        return Reading("activation", values, activation if as_kernels else "", writes or bool(values.get("inplace")))
    kind, names = _SPELLINGS.get(target, (None, ()))
    if kind is None or (values := _bound(node, names)) is None or values.get("out") is not None:
        return None
    return Reading(kind, values, writes=writes)


_MORE_NAMES = {"alpha", "beta", "approximate", "inplace", "out", "dtype", "negative_slope", "scale", "enable_gqa"}


def _bound(node: Node, names: tuple[str, ...]) -> dict[str, Any] | None:
    """The arguments by our names; None where one has no place."""
    if len(node.args) > len(names):
        return None
    values: dict[str, Any] = dict(zip(names, node.args, strict=False))
    for name, value in node.kwargs.items():
        place = name if name in names else next((other for other in _SAME.get(name, ()) if other in names), None)
        if place is None and name not in _MORE_NAMES:
            return None
        values[place or name] = value
    return values


# ---- what a node does beside computing its result


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "")


# Functions that write to arguments, though their names do not say so.
_WRITERS = {"batch_norm", "instance_norm", "embedding", "embedding_bag", "setitem", "fake_quantize_per_tensor_affine"}
_PURE_MODULES = {"_operator", "torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "torch._C._linalg"}


def is_pure(node: Node) -> bool:
    """Whether the node computes new values of tensors alone: it writes to none, and changes no mode that others are
    computed under. What is not known is not."""
    if node.op in ("placeholder", "get_attr"):
        return True
    name = _name(node.target)
    if example(node) is None or name.endswith("_") or name in _WRITERS:
        return False
    if node.op == "call_method":
        return example(node.args[0] if node.args else None) is not None
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable
    if node.op != "call_function" or "out" in node.kwargs or _inplace(node):
        return False
    module = getattr(node.target, "__module__", None)
    if module == "_operator":
        return not _is_inplace_operator(node.target)
    return module in _PURE_MODULES


def _is_inplace_operator(target: Any) -> bool:
    """`operator.iadd` and its like: those whose names without the i are operators, too."""
    name = _name(target)
    return name.startswith("i") and hasattr(operator, name[1:])


def _inplace(node: Node) -> bool:
    if node.kwargs.get("inplace"):
        return True
    # Where it is given by place, it is the last.
    code = getattr(node.target, "__code__", None)
    if code is None or "inplace" not in code.co_varnames[: code.co_argcount]:
        return False
    place = code.co_varnames.index("inplace")
    return place < len(node.args) and bool(node.args[place])


def example(node: Any) -> torch.Tensor | None:
    """What Dynamo says of a node's result: a tensor without data."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None
