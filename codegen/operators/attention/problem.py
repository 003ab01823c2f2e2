"""The attention problem: out = softmax(scale q kᵀ) v of each head, over the keys that each query sees."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import InitErrorDetails

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
DENSE = "it computes dense attention of whole tensors, of ragged batches and of paged caches"
# Lengths of sequences that a problem lists.
MOST_LENGTHS = 4096
# What other definitions of attention have, which is refused by its name.
NOT_COMPUTED = {
    "sinks": "attention sinks",
    "tree_mask": "trees of draft tokens",
    "custom_mask": "masks other than causal and window",
    "block_mask": "sparse attention",
    "feature_map": "linear attention",
    "alibi_slopes": "positional biases",
    "dropout": "dropout",
}
# Of a call, by the `lengths` that has them.
TABLES = {"qo_indptr": "ragged", "kv_indptr": "ragged", "kv_indices": "paged", "kv_last_page_len": "paged"}
PAGE_SIZES = (1, 16, 64)
# Of the pages that sequences need so many more are there, and one: those of no sequence.
SPARE_PAGES = 8


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
SequenceLength = Annotated[int, Field(strict=True, ge=0, le=LONGEST), BeforeValidator(as_integer)]
SequenceLengths = Annotated[tuple[SequenceLength, ...], Field(max_length=MOST_LENGTHS)]
Factor = Annotated[float, Field(strict=True), AfterValidator(_finite_in_float32)]
Strides = tuple[Stride, Stride, Stride]
Element = Annotated[Literal["float16", "bfloat16"], BeforeValidator(_computed_dtype)]
Tensor = Literal["q", "k", "v", "out"]


def filled_in_field(description: str) -> Any:
    """A field whose default is computed from those before it."""
    return Field(default=None, validate_default=True, description=description, json_schema_extra=filled_in)


def _strides_of(tensor: str) -> Any:
    return filled_in_field(f"Elements from one index of {tensor}'s first three axes to the next; default: packed.")


def _lengths_of(what: str, most: str) -> Any:
    return Field(
        default=None,
        validate_default=True,
        description=f"{what.capitalize()} of each sequence of a ragged batch; null: {most} of each.",
    )


class OfSequences(Problem):
    """Of `batch` sequences, of so many queries and keys as the fields of lengths say."""

    @property
    def sum_length(self: Any) -> int:
        longest: int = self.seq_kv
        return longest

    def shape(self, tensor: Any) -> tuple[int, ...]:
        raise NotImplementedError

    def sequence(self, seq_q: int, seq_kv: int) -> "AttentionProblem":
        """One of so many queries and keys, at least one of each, as a packed problem of attention of its own."""
        raise NotImplementedError

    @property
    def pages(self) -> int:
        """That sequences need."""
        return pages_of(self.__dict__)

    @property
    def total_q(self) -> int:
        """Queries of all sequences."""
        return total_of(self.__dict__, "q")

    @property
    def total_kv(self) -> int:
        return total_of(self.__dict__, "kv")

    @property
    def sequences(self: Any) -> Sequence[tuple[int, int]]:
        """Queries and keys of each."""
        of_q = self.q_lengths or (self.seq_q,) * self.batch
        of_kv = self.kv_lengths or (self.seq_kv,) * self.batch
        return list(zip(of_q, of_kv, strict=True))

    @property
    def by_lengths(self: Any) -> Mapping[tuple[int, int], int]:
        """How many sequences have which; of those of one length there may be any number."""
        of_one_length = self.q_lengths is None and self.kv_lengths is None
        return {(self.seq_q, self.seq_kv): self.batch} if of_one_length else Counter(self.sequences)


class AttentionProblem(OfSequences):
    """Query i of a head sees the keys from i + d - window_left to i + d + window_right, where d = seq_kv - seq_q: the
    last query stands beside the last key. Without a window there is no such end; `causal` is window_right = 0.

    Scores are scale · q · k, or softcap · tanh(scale · q · k / softcap). Each head of k and v serves heads_q / heads_kv
    heads of q, one after the other. `lse`: the logarithm to the base 2 of the sum of e^score is a second output,
    float32 of shape (batch, heads_q, seq_q). A query that sees no key has an out of zeros and an lse of -infinity.

    `layout` bshd: tensors are (batch, positions, heads, head_dim); bhsd: (batch, heads, positions, head_dim).

    `lengths` ragged: `batch` sequences of at most seq_q queries and seq_kv keys lie one behind the other in tensors of
    (positions of all, heads, head_dim). Of which positions they are, a call's qo_indptr and kv_indptr say, int32 of
    batch + 1 positions at which sequences begin and the last one ends; `q_lengths` and `kv_lengths` are those that a
    search is for. Each sequence is attention of its own, d is the difference of its own lengths, and lse has the shape
    (positions of all, heads_q). The first stride of each tensor means nothing.

    `lengths` paged: of k and v the keys of a sequence lie in pages, (pages, page_size, heads_kv, head_dim). A call's
    kv_indptr counts entries of kv_indices, which are pages; the last one of a sequence has kv_last_page_len keys.
    """

    operator: Literal["attention"] = "attention"
    lengths: Literal["dense", "ragged", "paged"] = "dense"
    page_size: Annotated[Literal[1, 16, 64] | None, BeforeValidator(as_integer)] = Field(
        default=None, validate_default=True, description="Positions of a page of a paged cache."
    )
    batch: Extent = 1
    seq_q: Length
    seq_kv: Length = filled_in_field("Default: seq_q.")
    heads_q: Extent
    heads_kv: Extent = filled_in_field("Divides heads_q. Default: heads_q.")
    head_dim_qk: HeadDim
    head_dim_vo: HeadDim = filled_in_field("Default: head_dim_qk.")
    dtype: Element = "float16"
    layout: Literal["bshd", "bhsd"] = "bshd"
    causal: StrictBool = False
    window_left: Window | None = None
    window_right: Window | None = Field(default=None, validate_default=True)
    softcap: Factor | None = None
    scale: Factor = filled_in_field("Default: 1 / the root of head_dim_qk.")
    lse: StrictBool = False
    q_lengths: SequenceLengths | None = _lengths_of("queries", "seq_q")
    kv_lengths: SequenceLengths | None = _lengths_of("keys", "seq_kv")
    q_strides: Strides = _strides_of("q")
    k_strides: Strides = _strides_of("k")
    v_strides: Strides = _strides_of("v")
    out_strides: Strides = _strides_of("out")

    def canonical(self) -> dict[str, Any]:
        """`causal` and window_right = 0 say the same. Dense problems have no fields of ragged ones."""
        fields = {**super().canonical(), "causal": self.window_right == 0}
        foreign = () if self.page_size else ("page_size",) if self.ragged else _OF_RAGGED
        return {name: fields[name] for name in fields if name not in foreign}

    @property
    def ragged(self) -> bool:
        """Whether sequences have lengths of their own; their keys may be in pages."""
        return self.lengths != "dense"

    def cached(self, tensor: Tensor) -> bool:
        """Whether it is a cache of pages."""
        return bool(self.page_size) and tensor in ("k", "v")

    @property
    def tables(self) -> dict[str, int]:
        """How many entries each has, in the order of a call."""
        if not self.ragged:
            return {}
        of_ragged = {"qo_indptr": self.batch + 1, "kv_indptr": self.batch + 1}
        return {**of_ragged, "kv_indices": self.pages, "kv_last_page_len": self.batch} if self.page_size else of_ragged

    @property
    def listed_kv(self) -> int:
        """Positions of keys that a call shows: of all sequences, or of the pages that they need."""
        return self.pages * self.page_size if self.page_size else self.total_kv

    @property
    def group(self) -> int:
        """Heads of q that share one of k and v."""
        return self.heads_q // self.heads_kv

    def sequence(self, seq_q: int, seq_kv: int) -> "AttentionProblem":
        fields = {name: value for name, value in self.canonical().items() if name not in (*_OF_RAGGED, *_STRIDES)}
        return AttentionProblem(**{**fields, "batch": 1, "seq_q": seq_q, "seq_kv": seq_kv})

    def shape(self, tensor: Tensor) -> tuple[int, int, int, int]:
        """In the layout's order; ragged tensors as those of a batch of 1."""
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
            raise refuse("too_large", f"is {value} for each of batch = {batch}; at most {allowed} is allowed", allowed)
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

    @field_validator("layout", mode="after")
    @classmethod
    def _of_ragged(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("lengths", "dense") != "dense" and value != "bshd":
            raise refuse(
                "layout_is_not_ragged",
                f"is {value}, but tensors of ragged batches are (positions, heads, head_dim): bshd is allowed",
                "bshd",
            )
        return value

    @field_validator("page_size", mode="after")
    @classmethod
    def _of_paged(cls, value: int | None, info: ValidationInfo) -> int | None:
        lengths = info.data.get("lengths")
        if lengths == "paged" and value is None:
            sizes = ", ".join(map(str, PAGE_SIZES))
            raise refuse("no_page_size", f"is missing, but lengths is paged; allowed: {sizes}", PAGE_SIZES)
        if lengths in ("dense", "ragged") and value is not None:
            raise refuse("page_size_of_no_pages", f"is {value}, but lengths is {lengths}; null is allowed, or paged")
        return value

    @field_validator("q_lengths", "kv_lengths", mode="after")
    @classmethod
    def _of_sequences(cls, value: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        of = (info.field_name or "").removesuffix("_lengths")
        batch, longest = info.data.get("batch"), info.data.get(f"seq_{of}")
        if info.data.get("lengths", "dense") == "dense" or batch is None or longest is None:
            if value is not None and info.data.get("lengths") == "dense":
                raise refuse("lengths_of_dense", "is given, but lengths is dense; null is allowed, or ragged")
            return value
        require_lengths(value, batch, longest, f"seq_{of}", info.data.get("page_size") or 1 if of == "kv" else 1)
        return None if value is None or set(value) == {longest} else value

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
        if value is None:
            require_elements(_tensor(info), math.prod(shape))
        return packed_unless_given(value, shape)

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


def require_lengths(value: tuple[int, ...] | None, batch: int, longest: int, name: str, page_size: int = 1) -> None:
    """Raises where so many sequences cannot have these lengths, each in whole pages."""
    if value is not None and len(value) != batch:
        raise refuse("lengths_of_another_batch", f"has {len(value)} lengths for a batch of {batch}", batch)
    if value is not None and max(value) > longest:
        raise refuse("too_long", f"has {max(value)}, but {name}, the longest, is {longest}", longest)
    pages = batch * -(-longest // page_size) if value is None else sum(-(-length // page_size) for length in value)
    if not 1 <= (total := pages * page_size) <= LONGEST:
        how = "adds up to" if value else f"is null, so batch = {batch} of {name} = {longest} makes"
        whole = f" in pages of {page_size}" if page_size > 1 else ""
        raise refuse("out_of_range", f"{how} {total} positions{whole}; 1 to {LONGEST} are allowed", LONGEST)


def refuse_fields(kind: type[Problem], fields: Mapping[str, Any], error: str, why: Mapping[str, str]) -> None:
    """Raises pydantic.ValidationError for fields that definitions elsewhere have, by name."""
    details = [
        InitErrorDetails(type=refuse(error, why[name]), loc=(name,), input=fields[name])
        for name in fields
        if name in why
    ]
    if details:
        raise ValidationError.from_exception_data(kind.__name__, details)


def packed_unless_given(value: Any, shape: tuple[int, ...]) -> Any:
    """The strides of all axes but the last."""
    packed = packed_strides(shape)[:-1]
    if value is None:
        return packed
    if isinstance(value, list | tuple) and len(value) == len(packed):
        # Of a single index the stride is never used: one spelling for all.
        return tuple(
            own if extent == 1 and type(as_integer(stride)) is int and as_integer(stride) >= 0 else stride
            for own, extent, stride in zip(packed, shape, value, strict=False)
        )
    return value


def _tensor(info: ValidationInfo) -> str:
    return (info.field_name or "").removesuffix("_strides")


_OF_RAGGED = ("lengths", "q_lengths", "kv_lengths", "page_size")
_STRIDES = ("q_strides", "k_strides", "v_strides", "out_strides")
_OF_SHAPE = frozenset(
    ("batch", "seq_q", "seq_kv", "heads_q", "heads_kv", "head_dim_qk", "head_dim_vo", "layout", *_OF_RAGGED)
)


def _known(info: ValidationInfo) -> tuple[int, int, int, int] | None:
    """The tensor's shape; None where a field that it needs was refused already."""
    return _shape(info.data, _tensor(info)) if info.data.keys() >= _OF_SHAPE else None


def _shape(fields: Mapping[str, Any], tensor: str) -> tuple[int, int, int, int]:
    of_q = tensor in ("q", "out")
    positions, heads = fields["seq_q" if of_q else "seq_kv"], fields["heads_q" if of_q else "heads_kv"]
    if fields["page_size"] and not of_q:
        return (*shape_of_pages(fields), heads, _columns(fields, tensor))
    if fields["lengths"] != "dense":
        return (1, total_of(fields, "q" if of_q else "kv"), heads, _columns(fields, tensor))
    middle = (positions, heads) if fields["layout"] == "bshd" else (heads, positions)
    return (fields["batch"], *middle, _columns(fields, tensor))


def _columns(fields: Mapping[str, Any], tensor: str) -> int:
    columns: int = fields["head_dim_qk" if tensor in ("q", "k") else "head_dim_vo"]
    return columns


def pages_of(fields: Mapping[str, Any]) -> int:
    """That all sequences need."""
    size = fields["page_size"]
    if not size:
        return 0
    lengths = fields["kv_lengths"]
    return sum(-(-length // size) for length in lengths) if lengths else fields["batch"] * -(-fields["seq_kv"] // size)


def shape_of_pages(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Pages of a cache, and positions of each."""
    pages = pages_of(fields)
    return pages + pages // SPARE_PAGES + 1, fields["page_size"]


def total_of(fields: Mapping[str, Any], of: str) -> int:
    """Positions of all sequences."""
    lengths = fields[f"{of}_lengths"]
    total: int = sum(lengths) if lengths else fields["batch"] * fields[f"seq_{of}"]
    return total
