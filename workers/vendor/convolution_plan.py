"""How cuDNN computes a convolution or a gradient of one: which tensors, which graph, what is left after it. Pure.

cuDNN's tensors are (images, channels, rows, columns) whatever their order in memory, which strides say. Sums and all
that is between the nodes of a graph are of float32. Where a graph writes the output's type and nodes are left, the
kernel after it rewrites the output, as `workers.vendor.matmul` has it for products.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from codegen.epilogue import Bias, Node, operand_names
from codegen.fixed_point import over_ring
from codegen.operator import Operand
from codegen.operators.convolution.problem import Convolution
from workers.vendor.epilogue import CONVERSION, After, Matrices, output_of
from workers.vendor.tensor import Tensor

# Nodes that a graph of cuDNN computes as `codegen.epilogue` defines them: its gelu is the exact one, by erf. A clip, a
# mask and a cast are left to the kernel after it.
FUSED = ("bias", "residual", "scale", "relu", "leaky_relu", "gelu", "silu", "tanh", "sigmoid")


@dataclass(frozen=True)
class Form:
    """The method of a graph, our operand for each of its tensors, and the dimension that a bias lies along."""

    method: Literal["conv_fprop", "conv_dgrad", "conv_wgrad"]
    tensors: Mapping[str, str]
    bias: int


FORMS: Mapping[str, Form] = {
    "conv2d": Form("conv_fprop", {"image": "x", "weight": "w"}, 1),
    "conv2d_dgrad": Form("conv_dgrad", {"loss": "dy", "filter": "w"}, 1),
    "conv2d_wgrad": Form("conv_wgrad", {"image": "x", "loss": "dy"}, 0),
}


@dataclass(frozen=True)
class ConvolutionPlan:
    """One graph: the convolution, then `fused`, into `product`; and the nodes left for a kernel after it. `tensors`: by
    the name of the operand, of those that the graph reads. `in_place`: the product lies in the output, which the kernel
    after it, if any, rewrites; else in a buffer of its own, packed as the output."""

    form: Form
    tensors: Mapping[str, Tensor]
    product: Tensor
    fused: tuple[Node, ...]
    fused_operands: tuple[str | None, ...]
    rest: tuple[Node, ...]
    rest_operands: tuple[str, ...]
    in_place: bool
    padding: tuple[tuple[int, int], tuple[int, int]]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    tensor_cores: bool

    @property
    def needs_kernel(self) -> bool:
        """Whether a second kernel follows: for nodes, or to convert the product to the output's type."""
        return bool(self.rest) or not self.in_place

    def text(self) -> str:
        """What is done where, for a person."""
        parts = [f"{', '.join(node.op for node in self.fused)} in its graph"] if self.fused else []
        if self.needs_kernel:
            nodes = [node.op for node in self.rest]
            parts.append(f"{', '.join(nodes or [CONVERSION])} in a kernel after it")
        return "; ".join(parts)


def plans(problem: Convolution, operands: Sequence[Operand]) -> tuple[ConvolutionPlan, ...]:
    """The ways to try, those with most in one graph first: cuDNN has kernels for few graphs, and none over rings."""
    if over_ring(problem):
        return ()
    most = 0
    while most < len(problem.epilogue) and problem.epilogue[most].op in FUSED:
        most += 1
    ways = [_plan(problem, operands, nodes, problem.out_dtype) for nodes in range(most, -1, -1)]
    if problem.out_dtype not in ("float32", problem.dtype):
        ways.append(_plan(problem, operands, 0, "float32"))
    if problem.operator == "conv2d_wgrad" and problem.dtype != "float32" == problem.out_dtype:
        # cuDNN 9.26 plans no gradient of filters in fp32 of fp16 tensors for an H100; it plans all of them in fp16.
        ways.append(_plan(problem, operands, 0, problem.dtype))
    return tuple(ways)


def _plan(problem: Convolution, operands: Sequence[Operand], nodes: int, dtype: str) -> ConvolutionPlan:
    form = FORMS[problem.operator]
    by_name = {operand.name: operand for operand in operands}
    last = problem.layout == "nhwc"
    names = operand_names(problem.epilogue)
    tensors = {name: tensor(by_name[name], last) for name in form.tensors.values()}
    for node, name in zip(problem.epilogue[:nodes], names[:nodes], strict=True):
        if name is not None:
            operand = by_name[name]
            tensors[name] = _along(operand, form.bias) if node.op == "bias" else tensor(operand, last)
    product = tensor(output_of(operands), last)
    return ConvolutionPlan(
        form=form,
        tensors=tensors,
        product=Tensor(dtype, product.extents, product.strides),
        fused=problem.epilogue[:nodes],
        fused_operands=tuple(names[:nodes]),
        rest=problem.epilogue[nodes:],
        rest_operands=tuple(name for name in names[nodes:] if name is not None),
        in_place=dtype == problem.out_dtype,
        padding=problem.padding,
        stride=problem.stride,
        dilation=problem.dilation,
        tensor_cores=problem.dtype != "float32" or problem.allow_tf32,
    )


def tensor(operand: Operand, channels_last: bool) -> Tensor:
    """An operand of rank 4 with its channels second, as cuDNN orders dimensions."""
    return Tensor.of(operand, (0, 3, 1, 2) if channels_last else (0, 1, 2, 3))


def after(problem: Convolution, plan: ConvolutionPlan, operands: Sequence[Operand]) -> After:
    """After cuDNN's. The output is a batch of matrices of which a bias has the rows, or the columns."""
    out = output_of(operands)
    axis = plan.form.bias
    if problem.layout == "nhwc" and axis == 1:
        axis = len(out.shape) - 1
    if axis == len(out.shape) - 1:
        batch, rows, columns = 1, prod(out.shape[:-1]), out.shape[-1]
    else:
        batch, rows, columns = prod(out.shape[:axis]), out.shape[axis], prod(out.shape[axis + 1 :])
    along: Literal["m", "n"] = "n" if axis == len(out.shape) - 1 else "m"
    chain = tuple(Bias(axis=along) if node.op == "bias" else node for node in plan.rest)
    stride = rows * columns if batch > 1 else 0
    return After(
        chain,
        rows,
        columns,
        batch,
        Matrices(plan.product.dtype, columns, stride),
        Matrices(problem.out_dtype, columns, stride),
    )


def _along(operand: Operand, dimension: int) -> Tensor:
    """A vector as a tensor of four dimensions, repeated along three of them."""
    (count,) = operand.shape
    extents = tuple(count if axis == dimension else 1 for axis in range(4))
    return Tensor(operand.dtype, extents, tuple(count if axis < dimension else 1 for axis in range(4)))
