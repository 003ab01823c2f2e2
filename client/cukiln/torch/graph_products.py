"""Products and convolutions in a graph, with the bias, residual and activation behind them that one kernel computes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from cukiln.torch.convolution_plans import paddings, pair
from cukiln.torch.graph_calls import Reading, example, is_pure, read


@dataclass(frozen=True)
class Product:
    """`activation(a · b + bias + residual)`. `nodes`: what it computes, from the product on. `transposed`: b is a
    linear layer's weight. `geometry`: stride, padding, dilation and groups of a convolution."""

    operator: str
    a: Node
    b: Node
    nodes: tuple[Node, ...]
    transposed: bool = False
    bias: Node | None = None
    residual: Node | None = None
    activation: str | None = None
    geometry: tuple[Any, ...] = ()

    @property
    def last(self) -> Node:
        return self.nodes[-1]

    @property
    def name(self) -> str:
        parts = [self.operator, self.bias and "bias", self.residual and "residual", self.activation]
        return " + ".join(str(part) for part in parts if part)


def product_of(node: Node, reading: Reading) -> Product | None:
    """The node alone; None where it is no product of tensors, or not as kernels have it."""
    values = reading.values
    if reading.kind == "conv2d":
        return _convolution(node, values)
    if reading.kind not in ("linear", "matmul", "addmm"):
        return None
    a, b, bias = values.get("a"), values.get("b"), values.get("bias")
    if not isinstance(a, Node) or not isinstance(b, Node) or not (bias is None or isinstance(bias, Node)):
        return None
    made = Product("matmul", a, b, (node,), transposed=reading.kind == "linear", bias=bias)
    if reading.kind != "addmm":
        return made
    added = values.get("input")
    if not isinstance(added, Node) or values.get("alpha", 1) != 1 or values.get("beta", 1) != 1:
        return None
    return _with(made, made.nodes, added)


def _convolution(node: Node, values: Any) -> Product | None:
    x, w, bias = values.get("x"), values.get("w"), values.get("bias")
    if not isinstance(x, Node) or not isinstance(w, Node) or not (bias is None or isinstance(bias, Node)):
        return None
    dilation = pair(values.get("dilation", 1))
    filters = example(w)
    stride = pair(values.get("stride", 1))
    padding = None if filters is None else paddings(values.get("padding", 0), filters, dilation, stride)
    if padding is None:
        return None
    geometry = ([*stride], [*padding], [*dilation], values.get("groups", 1))
    return Product("conv2d", x, w, (node,), bias=bias, geometry=geometry)


def longer(product: Product) -> Iterator[Product]:
    """The product with ever more of what follows it. What follows has its result alone, and nothing between them
    writes to a tensor or changes a mode, as all is computed where the last node is."""
    while (node := _follower(product.last)) is not None and (reading := read(node)) is not None:
        made = _extended(product, node, reading)
        if made is None:
            return
        yield made
        product = made
        if product.activation is not None:
            return


def _follower(node: Node) -> Node | None:
    if len(node.users) != 1:
        return None
    (user,) = node.users
    between = node.next
    while between is not user:
        if not is_pure(between):
            return None
        between = between.next
    return user


def _extended(product: Product, node: Node, reading: Reading) -> Product | None:
    values = reading.values
    if reading.kind == "activation" and reading.activation and values.get("x") is product.last:
        result = example(node)
        if reading.activation == "leaky_relu" and (result is None or result.requires_grad):
            return None  # its gradient would need the result, which a model may overwrite: PyTorch's own needs it not
        return replace(product, nodes=(*product.nodes, node), activation=reading.activation)
    if reading.kind != "add" or values.get("alpha", 1) != 1:
        return None
    first, second = values.get("input"), values.get("other")
    added = second if first is product.last else first
    if not isinstance(added, Node) or added is product.last or (reading.writes and first is not product.last):
        return None
    return _with(product, (*product.nodes, node), added)


def _with(product: Product, nodes: tuple[Node, ...], added: Node) -> Product | None:
    """The product with a tensor added: a vector for the columns, or one like the result."""
    result, tensor = example(nodes[-1]), example(added)
    of_product = example(product.last)  # before the sum, which may be of a wider type, or of more rows
    if result is None or tensor is None or of_product is None or product.activation is not None:
        return None
    if tensor.dtype is not of_product.dtype or result.dtype is not of_product.dtype:
        return None
    if result.shape != of_product.shape:
        return None
    plain = product.bias is None and product.residual is None and product.operator == "matmul"
    if plain and tensor.dim() == 1 and tensor.shape[0] == result.shape[-1]:
        return replace(product, nodes=nodes, bias=added)
    same = tensor.shape == result.shape and tensor.stride() == result.stride()
    return replace(product, nodes=nodes, residual=added) if same and product.residual is None else None
