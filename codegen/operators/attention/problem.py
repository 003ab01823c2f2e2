"""The attention problem: out = softmax(scale q kᵀ) v of each head, over the keys that each query sees."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, ValidationInfo, field_validator

from codegen.canonical import as_integer
from codegen.operand import packed_strides
from codegen.problem import LARGEST_EXTENT, Extent, Problem, Stride, filled_in, refuse, require_elements

# Sums of two positions and a tile fit 32 bits.
LONGEST = 2**29
LARGEST_HEAD_DIM = 512
# Of `make_inputs`: a key's place on a parabola has three coordinates.
SMALLEST_HEAD_DIM = 4
DTYPES = ("float16", "bfloat16")
# Powers of two of them are normal numbers in fp32, and so are their reciprocals.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-20, 2.0**20
DENSE = "it computes dense attention of whole tensors"
# What other definitions of attention have, which is refused by its name.
NOT_COMPUTED = {
    "sinks": "attention sinks",
    "tree_mask": "trees of draft tokens",
    "custom_mask": "masks other than causal and window",
    "block_mask": "sparse attention",
    "feature_map": "linear attention",
    "qo_indptr": "ragged batches",
    "kv_indptr": "ragged batches",
    "kv_indices": "paged caches",
    "kv_last_page_len": "paged caches",
    "page_size": "paged caches",
    "alibi_slopes": "positional biases",
    "dropout": "dropout",
}


def _computed_dtype(value: Any) -> Any:
    if isinstance(value, str) and value.lower().startswith(("fp8", "float8", "e4m3", "e5m2")):
        raise refuse(
            "dtype", f"is {value[:40]}: attention in fp8 is not computed; allowed: {', '.join(DTYPES)}", DTYPES
        )
    return value


def _finite_in_float32(value: float) -> float:
    if not SMALLEST_SCALE <= value <= LARGEST_SCALE:
        raise refuse(
            "out_of_range",
            f"is {value}; {SMALLEST_SCALE} to {LARGEST_SCALE} is allowed",
            {"minimum": SMALLEST_SCALE, "maximum": LARGEST_SCALE},
        )
    return value


Length = Annotated[int, Field(strict=True, ge=1, le=LONGEST), BeforeValidator(as_integer)]
HeadDim = Annotated[int, Field(strict=True, ge=SMALLEST_HEAD_DIM, le=LARGEST_HEAD_DIM), BeforeValidator(as_integer)]
Window = Annotated[int, Field(strict=True, ge=0, le=LONGEST), BeforeValidator(as_integer)]
Factor = Annotated[float, Field(strict=True), AfterValidator(_finite_in_float32)]
Strides = tuple[Stride, Stride, Stride]
Element = Annotated[Literal["float16", "bfloat16"], BeforeValidator(_computed_dtype)]
Tensor = Literal["q", "k", "v", "out"]


def _filled_in(description: str) -> Any:
    """A field whose default is computed from those before it."""
    return Field(default=None, validate_default=True, description=description, json_schema_extra=filled_in)


def _strides_of(tensor: str) -> Any:
    return _filled_in(f"Elements from one index of {tensor}'s first three axes to the next; default: packed.")


class AttentionProblem(Problem):
    """Query i of a head sees the keys from i + d - window_left to i + d + window_right, where d = seq_kv - seq_q: the
    last query stands beside the last key. Without a window there is no such end; `causal` is window_right = 0.

    Scores are scale · q · k, or softcap · tanh(scale · q · k / softcap). Each head of k and v serves heads_q / heads_kv
    heads of q, one after the other. `lse`: the logarithm to the base 2 of the sum of e^score is a second output,
    float32 of shape (batch, heads_q, seq_q). A query that sees no key has an out of zeros and an lse of -infinity.

    `layout` bshd: tensors are (batch, positions, heads, head_dim); bhsd: (batch, heads, positions, head_dim).
    """

    operator: Literal["attention"] = "attention"
    batch: Extent = 1
    seq_q: Length
    seq_kv: Length = _filled_in("Default: seq_q.")
    heads_q: Extent
    heads_kv: Extent = _filled_in("Divides heads_q. Default: heads_q.")
    head_dim_qk: HeadDim
    head_dim_vo: HeadDim = _filled_in("Default: head_dim_qk.")
    dtype: Element = "float16"
    layout: Literal["bshd", "bhsd"] = "bshd"
    causal: StrictBool = False
    window_left: Window | None = None
    window_right: Window | None = Field(default=None, validate_default=True)
    softcap: Factor | None = None
    scale: Factor = _filled_in("Default: 1 / the root of head_dim_qk.")
    lse: StrictBool = False
    q_strides: Strides = _strides_of("q")
    k_strides: Strides = _strides_of("k")
    v_strides: Strides = _strides_of("v")
    out_strides: Strides = _strides_of("out")

    def canonical(self) -> dict[str, Any]:
        """`causal` and window_right = 0 say the same."""
        return {**super().canonical(), "causal": self.window_right == 0}

    @property
    def sum_length(self) -> int:
        return self.seq_kv

    @property
    def group(self) -> int:
        """Heads of q that share one of k and v."""
        return self.heads_q // self.heads_kv

    def shape(self, tensor: Tensor) -> tuple[int, int, int, int]:
        """In the layout's order."""
        return _shape(self.__dict__, tensor)

    def strides(self, tensor: Tensor) -> tuple[int, int, int]:
        own: tuple[int, int, int] = getattr(self, f"{tensor}_strides")
        return own

    def by_name(self, tensor: Tensor) -> tuple[int, int, int]:
        """Strides of batch, positions and heads, 0 where there is one of them."""
        strides = [
            stride if extent > 1 else 0
            for extent, stride in zip(self.shape(tensor), self.strides(tensor), strict=False)
        ]
        return (strides[0], *(strides[1:] if self.layout == "bshd" else strides[:0:-1]))  # type: ignore[return-value]

    @field_validator("seq_kv", "heads_kv", "head_dim_vo", mode="before")
    @classmethod
    def _like_q(cls, value: Any, info: ValidationInfo) -> Any:
        like = {"seq_kv": "seq_q", "heads_kv": "heads_q", "head_dim_vo": "head_dim_qk"}[info.field_name or ""]
        return info.data.get(like, SMALLEST_HEAD_DIM) if value is None else value

    @field_validator("heads_q", mode="after")
    @classmethod
    def _countable(cls, value: int, info: ValidationInfo) -> int:
        batch = info.data.get("batch", 1)
        if value * batch > LARGEST_EXTENT:
            allowed = LARGEST_EXTENT // batch
            raise refuse("too_large", f"is {value} for each of {batch}; at most {allowed} is allowed", allowed)
        return value

    @field_validator("heads_kv", mode="after")
    @classmethod
    def _divides(cls, value: int, info: ValidationInfo) -> int:
        heads = info.data.get("heads_q", value)
        if heads % value:
            divisors = [count for count in range(1, min(heads, 1024) + 1) if heads % count == 0]
            raise refuse(
                "heads_do_not_divide",
                f"is {value}, which does not divide heads_q = {heads}; allowed: {', '.join(map(str, divisors))}",
                divisors,
            )
        return value

    @field_validator("window_right", mode="after")
    @classmethod
    def _as_causal(cls, value: int | None, info: ValidationInfo) -> int | None:
        if not info.data.get("causal"):
            return value
        if value:
            raise refuse(
                "window_contradicts_causal",
                f"is {value}, but causal attention sees no key behind a query's place; 0 is allowed, or causal false",
                0,
            )
        return 0

    @field_validator("scale", mode="before")
    @classmethod
    def _of_head_dim(cls, value: Any, info: ValidationInfo) -> Any:
        return 1.0 / math.sqrt(info.data.get("head_dim_qk", 1)) if value is None else value

    @field_validator("q_strides", "k_strides", "v_strides", "out_strides", mode="before")
    @classmethod
    def _packed(cls, value: Any, info: ValidationInfo) -> Any:
        shape = _known(info)
        if shape is None:
            return (0, 0, 0)  # another field is already at fault
        packed = packed_strides(shape)[:3]
        if value is None:
            require_elements(_tensor(info), math.prod(shape))
            return packed
        if isinstance(value, list | tuple) and len(value) == 3:
            # Of a single index the stride is never used: one spelling for all.
            given = zip(packed, shape, value, strict=False)
            return tuple(own if extent == 1 and _is_stride(stride) else stride for own, extent, stride in given)
        return value

    @field_validator("q_strides", "k_strides", "v_strides", "out_strides", mode="after")
    @classmethod
    def _in_memory(cls, value: Strides, info: ValidationInfo) -> Strides:
        shape = _known(info)
        if shape is None:
            return value
        name = _tensor(info)
        require_elements(name, 1 + sum((n - 1) * stride for n, stride in zip(shape, (*value, 1), strict=True)))
        if name == "out":
            inner = shape[3]
            for stride, extent in sorted((s, n) for s, n in zip(value, shape, strict=False) if n > 1):
                if stride < inner:
                    raise refuse(
                        "elements_overlap",
                        f"has {stride} where the faster axes span {inner} elements; at least {inner} is allowed",
                        inner,
                    )
                inner += stride * (extent - 1)
        return value


def _is_stride(value: Any) -> bool:
    return type(as_integer(value)) is int and as_integer(value) >= 0


def _tensor(info: ValidationInfo) -> str:
    return (info.field_name or "").removesuffix("_strides")


_OF_SHAPE = frozenset(("batch", "seq_q", "seq_kv", "heads_q", "heads_kv", "head_dim_qk", "head_dim_vo", "layout"))


def _known(info: ValidationInfo) -> tuple[int, int, int, int] | None:
    """The tensor's shape; None where a field that it needs was refused already."""
    return _shape(info.data, _tensor(info)) if info.data.keys() >= _OF_SHAPE else None


def _shape(fields: Mapping[str, Any], tensor: str) -> tuple[int, int, int, int]:
    of_q = tensor in ("q", "out")
    positions, heads = fields["seq_q" if of_q else "seq_kv"], fields["heads_q" if of_q else "heads_kv"]
    columns = fields["head_dim_qk" if tensor in ("q", "k") else "head_dim_vo"]
    middle = (positions, heads) if fields["layout"] == "bshd" else (heads, positions)
    return (fields["batch"], *middle, columns)
