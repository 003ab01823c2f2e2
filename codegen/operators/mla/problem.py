"""The problem of multi-head latent attention, absorbed (DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434, section 2.1):
heads share their keys, a key lies in two tensors, and the larger one is its value."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, ValidationInfo, field_validator

from codegen.canonical import as_integer
from codegen.operators.attention.problem import (
    LONGEST,
    AttentionProblem,
    Element,
    Factor,
    Length,
    OfSequences,
    SequenceLengths,
    filled_in_field,
    packed_unless_given,
    require_lengths,
    shape_of_pages,
    total_of,
)
from codegen.problem import Extent, Stride, refuse, require_elements

HEAD_DIM_CKV, HEAD_DIM_KPE = 512, 64
HEAD_DIM = HEAD_DIM_CKV + HEAD_DIM_KPE
# Of a head before its matrices are absorbed: 128 elements and those of the positional encoding.
HEAD_DIM_BEFORE = 128 + HEAD_DIM_KPE
MOST_HEADS = 1024
VECTOR = 8  # elements of 16 bytes
Heads = Annotated[int, Field(strict=True, ge=1, le=MOST_HEADS), BeforeValidator(as_integer)]
Strides = tuple[Stride, Stride]
Tensor = Literal["q_nope", "q_pe", "ckv_cache", "kpe_cache"]
TENSORS: tuple[Tensor, ...] = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
QUERIES, CACHES = TENSORS[:2], TENSORS[2:]
# Of a call, by what asks for calls with them.
TABLES = {
    "qo_indptr": "queries ragged", "kv_indptr": "the operator", "kv_indices": "the operator",
    "kv_last_page_len": "a page_size of more than 1",
}  # fmt: skip


def _strides_of(tensor: str) -> Any:
    return filled_in_field(
        f"Elements from one index of {tensor}'s first two axes to the next, multiples of {VECTOR}; default: packed."
    )


class AbsorbedSequence(AttentionProblem):
    """One sequence as attention whose heads share one head of k, of which v is the first elements."""

    head_dim_qk: int = HEAD_DIM


class MlaProblem(OfSequences):
    """out = softmax(scale (q_nope ckvᵀ + q_pe kpeᵀ)) ckv of each query and head, over the keys of the query's sequence.

    q_nope is (tokens, heads_q, 512), q_pe (tokens, heads_q, 64), out as q_nope. Keys lie in pages, ckv_cache is (pages,
    page_size, 512), kpe_cache (pages, page_size, 64): a call's kv_indptr, int32 of batch + 1, counts entries of
    kv_indices, which are pages; the last one of a sequence has kv_last_page_len keys, where pages have several.

    `queries` one: each of `batch` sequences has one query, which sees all keys, and token i is that of sequence i.
    ragged: a call's qo_indptr, int32 of batch + 1, says at which tokens sequences begin and the last one ends. With
    `causal` query i of n sees all keys but the last n - 1 - i. A query that sees no key has an out of zeros and an lse
    of -infinity. `lse`: the logarithm to the base 2 of the sum of e^score is a second output, float32 of (tokens,
    heads_q). `q_lengths` and `kv_lengths` are those that a search is for.
    """

    operator: Literal["mla"] = "mla"
    queries: Literal["one", "ragged"] = "one"
    batch: Extent = 1
    seq_q: Length = Field(default=1, validate_default=True)
    seq_kv: Length
    heads_q: Heads
    head_dim_ckv: Annotated[Literal[512], BeforeValidator(as_integer)] = 512
    head_dim_kpe: Annotated[Literal[64], BeforeValidator(as_integer)] = 64
    page_size: Annotated[Literal[1, 16, 64], BeforeValidator(as_integer)]
    dtype: Element = "bfloat16"
    causal: StrictBool = False
    scale: Factor = filled_in_field(f"Default: 1 / the root of {HEAD_DIM_BEFORE}, a head's size before it is absorbed.")
    lse: StrictBool = False
    q_lengths: SequenceLengths | None = Field(
        default=None, validate_default=True, description="Queries of each sequence; null: seq_q of each."
    )
    kv_lengths: SequenceLengths | None = Field(
        default=None, validate_default=True, description="Keys of each sequence; null: seq_kv of each."
    )
    q_nope_strides: Strides = _strides_of("q_nope")
    q_pe_strides: Strides = _strides_of("q_pe")
    ckv_cache_strides: Strides = _strides_of("ckv_cache")
    kpe_cache_strides: Strides = _strides_of("kpe_cache")

    @property
    def ragged(self) -> bool:
        """Whether a sequence may have any number of queries."""
        return self.queries == "ragged"

    @property
    def rows(self) -> int:
        """Of out: pairs of a query and a head."""
        return self.total_q * self.heads_q

    @property
    def tables(self) -> dict[str, int]:
        """How many entries each has, in the order of a call."""
        first = {"qo_indptr": self.batch + 1} if self.ragged else {}
        last = {"kv_last_page_len": self.batch} if self.page_size > 1 else {}
        return {**first, "kv_indptr": self.batch + 1, "kv_indices": self.pages, **last}

    def shape(self, tensor: Tensor) -> tuple[int, int, int]:
        return _shape(self.__dict__, tensor)

    def strides(self, tensor: Tensor) -> tuple[int, int]:
        own: tuple[int, int] = getattr(self, f"{tensor}_strides")
        return own

    def sequence(self, seq_q: int, seq_kv: int) -> AbsorbedSequence:
        return AbsorbedSequence(
            seq_q=seq_q, seq_kv=seq_kv, heads_q=self.heads_q, heads_kv=1, head_dim_qk=HEAD_DIM,
            head_dim_vo=HEAD_DIM_CKV, dtype=self.dtype, causal=self.causal, scale=self.scale, lse=self.lse,
        )  # fmt: skip

    @field_validator("seq_q", mode="after")
    @classmethod
    def _one_query(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("queries") == "one" and value > 1:
            raise refuse("queries_of_one", f"is {value}, but queries is one; 1 is allowed, or queries ragged", 1)
        return value

    @field_validator("causal", mode="after")
    @classmethod
    def _last_query_sees_all(cls, value: bool, info: ValidationInfo) -> bool:
        # Of one query it says nothing: one spelling for both.
        return value and info.data.get("queries") != "one"

    @field_validator("scale", mode="before")
    @classmethod
    def _before_absorption(cls, value: Any) -> Any:
        return 1.0 / math.sqrt(HEAD_DIM_BEFORE) if value is None else value

    @field_validator("q_lengths", "kv_lengths", mode="after")
    @classmethod
    def _of_sequences(cls, value: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        of = (info.field_name or "").removesuffix("_lengths")
        batch, longest = info.data.get("batch"), info.data.get(f"seq_{of}")
        if batch is None or longest is None:
            return value
        if of == "q" and value is not None and info.data.get("queries") == "one":
            raise refuse("lengths_of_one", "is given, but queries is one; null is allowed, or queries ragged")
        require_lengths(value, batch, longest, f"seq_{of}", info.data.get("page_size", 1) if of == "kv" else 1)
        if of == "q" and "heads_q" in info.data:
            rows = (sum(value) if value else batch * longest) * info.data["heads_q"] + batch
            if rows > LONGEST:
                detail = f"makes {rows} rows of queries, heads and sequences; {LONGEST} are allowed"
                null = "" if value else f"is null, so batch = {batch} of seq_q = {longest} "
                raise refuse("too_many_rows", null + detail, LONGEST)
        return None if value is None or set(value) == {longest} else value

    @field_validator("q_nope_strides", "q_pe_strides", "ckv_cache_strides", "kpe_cache_strides", mode="before")
    @classmethod
    def _packed(cls, value: Any, info: ValidationInfo) -> Any:
        shape = _known(info)
        if shape is None:
            return (0, 0)  # another field is already at fault
        return packed_unless_given(value, shape)

    @field_validator("q_nope_strides", "q_pe_strides", "ckv_cache_strides", "kpe_cache_strides", mode="after")
    @classmethod
    def _in_memory(cls, value: Strides, info: ValidationInfo) -> Strides:
        shape = _known(info)
        if shape is None:
            return value
        if any(stride % VECTOR for stride in value):
            raise refuse("not_aligned", f"has {value}; multiples of {VECTOR} are allowed", VECTOR)
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, (*value, 1), strict=True))
        require_elements((info.field_name or "").removesuffix("_strides"), span)
        return value


_OF_SHAPE = frozenset(("batch", "seq_q", "seq_kv", "heads_q", "page_size", "q_lengths", "kv_lengths"))


def _known(info: ValidationInfo) -> tuple[int, int, int] | None:
    """The tensor's shape; None where a field that it needs was refused already."""
    tensor = (info.field_name or "").removesuffix("_strides")
    return _shape(info.data, tensor) if info.data.keys() >= _OF_SHAPE else None


def _shape(fields: Mapping[str, Any], tensor: str) -> tuple[int, int, int]:
    columns = HEAD_DIM_CKV if tensor in ("q_nope", "ckv_cache") else HEAD_DIM_KPE
    if tensor in CACHES:
        return *shape_of_pages(fields), columns
    return total_of(fields, "q"), fields["heads_q"], columns
