"""The operators' problems as types, so that a wrong field or value fails a type check.

Made of the operators' schemas by `python -m tests.repo.problem_types`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict


class ProblemHead(TypedDict, total=False):
    """What any problem may say beside what is computed."""

    name: str
    target: str
    device_class: str
    search: Mapping[str, Any]


class ExactOnce(TypedDict, total=False):
    policy: Required[Literal["exact_once"]]


class Tolerance(TypedDict, total=False):
    policy: Required[Literal["tolerance"]]
    ulp: Required[int]


class ChannelBias(TypedDict, total=False):
    op: Required[Literal["bias"]]
    axis: Literal["k"]


class Scale(TypedDict, total=False):
    op: Required[Literal["scale"]]
    value: Required[float]


class Residual(TypedDict, total=False):
    op: Required[Literal["residual"]]


class Mask(TypedDict, total=False):
    op: Required[Literal["mask"]]


class Relu(TypedDict, total=False):
    op: Required[Literal["relu"]]


class Gelu(TypedDict, total=False):
    op: Required[Literal["gelu"]]


class Silu(TypedDict, total=False):
    op: Required[Literal["silu"]]


class Tanh(TypedDict, total=False):
    op: Required[Literal["tanh"]]


class Sigmoid(TypedDict, total=False):
    op: Required[Literal["sigmoid"]]


class LeakyRelu(TypedDict, total=False):
    op: Required[Literal["leaky_relu"]]
    slope: float


class Clip(TypedDict, total=False):
    op: Required[Literal["clip"]]
    lo: Required[float]
    hi: Required[float]


class Cast(TypedDict, total=False):
    op: Required[Literal["cast"]]
    dtype: Required[Literal["float16", "bfloat16"]]


class Identity(TypedDict, total=False):
    op: Required[Literal["identity"]]


class Square(TypedDict, total=False):
    op: Required[Literal["square"]]


class Polynomial(TypedDict, total=False):
    op: Required[Literal["polynomial"]]
    coefficients: Required[Sequence[float]]


class MaskedActivation(TypedDict, total=False):
    op: Required[Literal["masked_activation"]]
    mask: Literal["bits", "bytes"]
    where_set: Required[Relu | Gelu | Silu | Identity | Square | Polynomial]
    where_clear: Relu | Gelu | Silu | Identity | Square | Polynomial


PlainNode = Scale | Residual | Mask | Relu | Gelu | Silu | Tanh | Sigmoid | LeakyRelu | Clip | Cast


class Bias(TypedDict, total=False):
    op: Required[Literal["bias"]]
    axis: Literal["m", "n"]


class OfSequencesFields(ProblemHead, total=False):
    batch: int
    heads_q: Required[int]
    dtype: Literal["float16", "bfloat16"]
    causal: bool
    scale: float | None
    lse: bool
    q_lengths: Sequence[int] | None
    kv_lengths: Sequence[int] | None


class AttentionProblem(OfSequencesFields, total=False):
    operator: Required[Literal["attention"]]
    lengths: Literal["dense", "ragged", "paged"]
    page_size: Literal[1, 16, 64] | None
    seq_q: Required[int]
    seq_kv: int | None
    heads_kv: int | None
    head_dim_qk: Required[int]
    head_dim_vo: int | None
    layout: Literal["bshd", "bhsd"]
    window_left: int | None
    window_right: int | None
    softcap: float | None
    q_strides: Sequence[Any] | None
    k_strides: Sequence[Any] | None
    v_strides: Sequence[Any] | None
    out_strides: Sequence[Any] | None


class ConvolutionFields(ProblemHead, total=False):
    n: Required[int]
    h: Required[int]
    w: Required[int]
    c: Required[int]
    k: Required[int]
    r: Required[int]
    s: Required[int]
    groups: int
    layout: Literal["nhwc", "nchw"]
    stride: int | Sequence[Any]
    dilation: int | Sequence[Any]
    padding: int | Sequence[Any]
    dtype: Literal["float32", "float16", "bfloat16", "int32", "int64"]
    acc_dtype: Literal["float32", "int32", "int64"] | None
    out_dtype: Literal["float32", "float16", "bfloat16", "int32", "int64"] | None
    allow_tf32: bool
    fraction_bits: int
    rounding: Literal["floor", "nearest"] | None
    truncation: ExactOnce | Tolerance | None


class AllowsWinogradFields(ConvolutionFields, total=False):
    winograd: Literal["none", "f2", "f4"]


class Conv2dProblem(AllowsWinogradFields, total=False):
    operator: Required[Literal["conv2d"]]
    epilogue: Sequence[ChannelBias | PlainNode | MaskedActivation]


class Conv2dDgradProblem(AllowsWinogradFields, total=False):
    operator: Required[Literal["conv2d_dgrad"]]
    epilogue: Sequence[Scale | Residual | Mask | Clip | Cast]


class Conv2dWgradProblem(ConvolutionFields, total=False):
    operator: Required[Literal["conv2d_wgrad"]]
    epilogue: Sequence[ChannelBias | PlainNode | MaskedActivation]


class RowFields(ProblemHead, total=False):
    shape: Required[Sequence[int]]
    dtype: Literal["float32", "float16", "bfloat16"]
    out_dtype: Literal["float32", "float16", "bfloat16"] | None


class NormFields(RowFields, total=False):
    scale: bool
    shift: bool
    epsilon: float


class LayerNormProblem(NormFields, total=False):
    operator: Required[Literal["layer_norm"]]


class MaskedActivationProblem(ProblemHead, total=False):
    operator: Required[Literal["masked_activation"]]
    shape: Required[Sequence[int]]
    dtype: Literal["float32", "float16", "bfloat16", "int32", "int64"]
    fraction_bits: int
    rounding: Literal["floor", "nearest"] | None
    where_set: Required[Relu | Gelu | Silu | Identity | Square | Polynomial]
    where_clear: Relu | Gelu | Silu | Identity | Square | Polynomial
    mask: Literal["bits", "bytes"]
    mask_dtype: Literal["int32", "uint8"] | None
    mask_length: int | None


class MatmulProblem(ProblemHead, total=False):
    operator: Required[Literal["matmul"]]
    m: Required[int]
    n: Required[int]
    k: Required[int]
    batch: int
    layout: Literal["nn", "nt", "tn", "tt"]
    dtype: Literal["float32", "float16", "bfloat16", "int8", "int32", "int64"]
    acc_dtype: Literal["float32", "int32", "int64"] | None
    out_dtype: Literal["float32", "float16", "bfloat16", "int32", "int64"] | None
    allow_tf32: bool
    fraction_bits: int
    rounding: Literal["floor", "nearest"] | None
    truncation: ExactOnce | Tolerance | None
    epilogue: Sequence[Bias | PlainNode | MaskedActivation]
    lda: int | None
    ldb: int | None
    ldc: int | None
    stride_a: int | None
    stride_b: int | None
    stride_c: int | None


class MlaProblem(OfSequencesFields, total=False):
    operator: Required[Literal["mla"]]
    queries: Literal["one", "ragged"]
    seq_q: int
    seq_kv: Required[int]
    head_dim_ckv: Literal[512]
    head_dim_kpe: Literal[64]
    page_size: Required[Literal[1, 16, 64]]
    q_nope_strides: Sequence[Any] | None
    q_pe_strides: Sequence[Any] | None
    ckv_cache_strides: Sequence[Any] | None
    kpe_cache_strides: Sequence[Any] | None


class ReduceProblem(ProblemHead, total=False):
    operator: Required[Literal["reduce"]]
    shape: Required[Sequence[int]]
    axes: Required[Sequence[int]]
    strides: Sequence[int] | None
    dtype: Literal["float32", "float16", "bfloat16", "int32", "int64"]
    fn: Literal["sum", "mean", "sum_of_squares", "max", "min", "argmax", "variance", "logsumexp"]
    map: Literal["identity", "square", "multiply", "relu_grad", "gelu_grad", "silu_grad", "tanh_grad", "sigmoid_grad"]
    write_map: bool
    out_dtype: Literal["float32", "float16", "bfloat16", "int32", "int64"] | None
    epilogue: Sequence[PlainNode]


class RmsNormProblem(NormFields, total=False):
    operator: Required[Literal["rms_norm"]]


class SoftmaxProblem(RowFields, total=False):
    operator: Required[Literal["softmax"]]


Problem = (
    AttentionProblem
    | Conv2dProblem
    | Conv2dDgradProblem
    | Conv2dWgradProblem
    | LayerNormProblem
    | MaskedActivationProblem
    | MatmulProblem
    | MlaProblem
    | ReduceProblem
    | RmsNormProblem
    | SoftmaxProblem
)
