"""The pass of the compile backend: it replaces what kernels can compute in a graph of Dynamo by `torch.ops.cukiln`.

It works on the graph before autograd: there a layer is one node in every model, and the operators' own gradients, which
have kernels too, are those that AOTAutograd traces.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from cukiln.torch.dispatch import current, graph_lacks_kernel
from cukiln.torch.graph_calls import Reading, example, read
from cukiln.torch.graph_products import Product, longer, product_of
from cukiln.torch.library import DEFINED
from cukiln.torch.modes import autocast_dtype
from cukiln.torch.plan import FLOATS, RINGS

OPERATORS = ("matmul", "conv2d", "softmax", "layer_norm", "rms_norm", "attention")
NO_KERNEL = "no kernel is known, or PyTorch's is faster"
_OPERATOR_OF = {"linear": "matmul", "addmm": "matmul"}


@dataclass(frozen=True)
class Replaced:
    """What became of a graph. `calls`: operators with what is fused to them, and how often; `left`: operators that
    stay PyTorch's own, with why."""

    calls: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        calls = ", ".join(f"{count} {name}" for name, count in sorted(self.calls.items())) or "nothing"
        left = ", ".join(f"{count} {why}" for why, count in sorted(self.left.items()))
        return f"replaced {calls}" + (f"; left {left}" if left else "")


@dataclass(frozen=True)
class _New:
    """A call of `torch.ops.cukiln`, in the place of `nodes`. `lower`: what autocast makes of its tensors. `transposed`:
    its second argument is."""

    name: str
    operator: str
    arguments: tuple[Any, ...]
    nodes: tuple[Node, ...]
    lower: torch.dtype | None = None
    transposed: bool = False

    def call(self, value: Callable[[Node], Any], function: Callable[..., Any]) -> Any:
        """`function` of its arguments, with what `value` makes of each tensor; in a graph, nodes for all of it."""
        arguments = []
        for place, argument in enumerate(self.arguments):
            if isinstance(argument, Node):
                tensor = example(argument)
                assert tensor is not None
                argument = value(argument)
                if self.lower is not None and tensor.dtype is not self.lower:
                    argument = function(torch.ops.aten.to.dtype, argument, self.lower)
                if self.transposed and place == 1:
                    argument = function(torch.ops.aten.t.default, argument)
            arguments.append(argument)
        return function(getattr(torch.ops.cukiln, self.operator).default, *arguments)


def replace_calls(module: GraphModule, operators: Collection[str] = OPERATORS, *, known_alone: bool = True) -> Replaced:
    """Changes the module's graph. Only operators of `operators`, and `known_alone` where a kernel is known now."""
    replaced = Replaced()
    if any(_transforms_functions(node) for node in module.graph.nodes):
        replaced.left["graph (it transforms functions)"] += 1
        return replaced
    _remove_dropouts_of_inference(module)
    with _Modes() as modes:
        for node in list(module.graph.nodes):
            if node._erased:
                continue  # it is part of a call before
            modes.follow(node)
            reading = read(node)
            operator = "" if reading is None else _OPERATOR_OF.get(reading.kind, reading.kind)
            if reading is None or operator not in operators:
                continue
            made = _chosen(node, reading, known_alone)
            if isinstance(made, str):
                replaced.left[f"{operator} ({made})"] += 1
            else:
                _insert(module, made)
                replaced.calls[made.name] += 1
    module.graph.lint()
    module.recompile()
    return replaced


def _transforms_functions(node: Node) -> bool:
    """Whether it enters or leaves a level of vmap or of `torch.func`'s gradients."""
    module = str(getattr(node.target, "__module__", ""))
    return module.startswith(("torch._functorch", "torch._C._functorch"))


def _remove_dropouts_of_inference(module: GraphModule) -> None:
    """They return their argument itself."""
    for node in list(module.graph.nodes):
        reading = read(node)
        values = reading.values if reading is not None and reading.kind == "dropout" else {}
        if values.get("training", values.get("train", True)) is False:
            node.replace_all_uses_with(values["x"])
            module.graph.erase_node(node)


class _Modes(ExitStack):
    """Autocast as it is where a node is computed: that of the call, and what the graph itself enters and leaves."""

    def __init__(self) -> None:
        super().__init__()
        self._entered: dict[Node, Any] = {}

    def follow(self, node: Node) -> None:
        amp: Any = torch.amp.autocast_mode
        target: Any = node.target
        if target is amp._enter_autocast:
            mode = self._entered[node] = target(*node.args)
            self.callback(lambda: node not in self._entered or amp._exit_autocast(mode))
        elif target is amp._exit_autocast:
            target(self._entered.pop(node.args[0]))  # type: ignore[arg-type]


# ---- which call


def _chosen(node: Node, reading: Reading, known_alone: bool) -> _New | str:
    """The longest call that computes the same; else why there is none."""
    calls = _calls(node, reading)
    if isinstance(calls, str) or not known_alone:
        return calls if isinstance(calls, str) else calls[-1]
    # Where misses are tuned, those of the longest call alone: its parts are of no use then.
    asked = calls[::-1] if current().options.on_miss == "none" else calls[-1:]
    for new in asked:
        if _has_kernel(new):
            return new
    graph_lacks_kernel()
    return NO_KERNEL


def _has_kernel(new: _New) -> bool:
    """Whether a kernel is known for the call, of tensors whose addresses are as aligned as those of new memory."""
    operator = DEFINED[new.operator]
    default = getattr(torch.ops.cukiln, new.operator).default
    with torch.no_grad(), _addresses_of_new_memory():
        arguments = new.call(
            lambda node: node.meta["example_value"],
            lambda function, *given: given if function is default else function(*given),
        )
        return current().has_kernel(operator, *operator.pack(*arguments))


@contextmanager
def _addresses_of_new_memory() -> Iterator[None]:
    """Tensors without data have no address, and warn where it is asked for. Dynamo compiles one graph at a time."""
    FakeTensor.data_ptr = lambda self: 0  # type: ignore[method-assign]
    try:
        yield
    finally:
        del FakeTensor.data_ptr


def _calls(node: Node, reading: Reading) -> list[_New] | str:
    """Calls that compute the same, ever longer; else why there is none."""
    if reading.kind in ("softmax", "layer_norm", "rms_norm", "attention"):
        new = _attention_call(node, reading) if reading.kind == "attention" else _row_call(node, reading)
        return new if isinstance(new, str) else _checked(new) or [new]
    product = product_of(node, reading)
    if product is None:
        return "arguments that kernels do not have"
    if why := _checked(_product_call(product)):
        return why
    calls = [_product_call(product)]
    for made in longer(product):
        if _checked(new := _product_call(made)) is None:
            calls.append(new)
    return calls


def _product_call(product: Product) -> _New:
    tensors = (product.a, product.b, product.bias, product.residual)
    of_first = example(product.a)
    return _New(
        name=product.name,
        operator=product.operator,
        arguments=(*tensors, *product.geometry, product.activation),
        nodes=product.nodes,
        lower=None if of_first is None else autocast_dtype(of_first),
        transposed=product.transposed,
    )


def _row_call(node: Node, reading: Reading) -> _New | str:
    values = reading.values
    x = values.get("x")
    tensor = example(x)
    if tensor is None:
        return "no tensor that is known"
    if autocast_dtype(tensor) is not None:
        return "autocast has a type for it"
    arguments: tuple[Any, ...]
    if reading.kind == "softmax":
        if values.get("dtype") is not None:
            return "of another type"
        if values.get("dim") not in (-1, tensor.dim() - 1):
            return "not along the last axis"
        arguments = (x, -1)
    else:
        shape = values.get("shape")
        shape = [shape] if isinstance(shape, int) else shape
        arguments = (x, shape, values.get("weight"))
        arguments += (values.get("bias"), values.get("eps", 1e-5)) if reading.kind == "layer_norm" else ()
        arguments += (values.get("eps"),) if reading.kind == "rms_norm" else ()
    return _New(reading.kind, reading.kind, arguments, (node,))


def _attention_call(node: Node, reading: Reading) -> _New | str:
    values = reading.values
    tensors = [example(values.get(name)) for name in ("q", "k", "v")]
    if values.get("attn_mask") is not None or values.get("dropout_p", 0.0):
        return "with a mask or a dropout"
    q, k, v = tensors
    if q is None or k is None or v is None or not q.dim() == k.dim() == v.dim() == 4:
        return "not of batch, heads, positions and elements"
    lower = autocast_dtype(q)
    if (lower or q.dtype) not in (torch.float16, torch.bfloat16):
        return f"of {str(q.dtype).removeprefix('torch.')}"
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return "with gradients, which are PyTorch's own"
    if values.get("is_causal", False) and q.shape[2] != k.shape[2]:
        return "causal from the first key on"  # kernels stand the last query beside the last key
    if q.shape[1] != k.shape[1] and not values.get("enable_gqa", False):
        return "with heads that do not go together"
    arguments = (*[values[name] for name in "qkv"], values.get("is_causal", False), values.get("scale"))
    return _New("attention", "attention", arguments, (node,), lower=lower)


def _checked(new: _New) -> str | None:
    """Why the call may not take the place of its nodes; None: it may."""
    expected = example(new.nodes[-1])
    tensors = [example(argument) for argument in new.arguments if isinstance(argument, Node)]
    if expected is None or any(type(tensor) is not FakeTensor for tensor in [*tensors, expected]):
        return "no tensors of PyTorch's own class"
    for tensor in tensors:
        assert tensor is not None
        if tensor.layout is not torch.strided or not all(
            type(size) is int for size in (*tensor.shape, *tensor.stride())
        ):
            return "shapes that are not constant; torch.compile(dynamic=False) has them so"
        if tensor.dtype not in FLOATS and not (tensor.dtype in RINGS and new.operator == "matmul"):
            return f"of {str(tensor.dtype).removeprefix('torch.')}"
        kind = tensor.device.type
        if kind != "cuda" and not (kind == "cpu" and current().computes(tensor.device)):
            return f"on {kind}"
        if (new.operator == "matmul" and tensor.dim() == 0) or tensor.numel() == 0:
            return "empty"
    if new.operator == "matmul" and any(tensor.dim() < 2 for tensor in tensors[:2] if tensor is not None):
        return "of a vector"
    if new.operator == "conv2d" and any(tensor.dim() != 4 for tensor in tensors[:2] if tensor is not None):
        return "of one image"
    return _differs(new, expected)


def _differs(new: _New, expected: torch.Tensor) -> str | None:
    """Whether the call has another result than its nodes, as far as tensors without data show it: what follows in the
    graph was made for these strides."""
    with torch.no_grad():
        made = new.call(lambda node: node.meta["example_value"], lambda function, *arguments: function(*arguments))
    for name in ("shape", "dtype", "device"):
        if getattr(made, name) != getattr(expected, name):
            return f"with another {name}"
    return None if made.stride() == expected.stride() else "with other strides"


def _insert(module: GraphModule, new: _New) -> None:
    graph, last = module.graph, new.nodes[-1]
    with graph.inserting_before(last):
        made = new.call(lambda node: node, lambda function, *arguments: graph.call_function(function, arguments))
    made.meta = dict(last.meta)
    last.replace_all_uses_with(made)
    for node in reversed(new.nodes):
        graph.erase_node(node)
