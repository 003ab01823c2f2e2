"""Problems of two-dimensional convolutions (as deep learning has them: the filter is not mirrored), with groups."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationInfo, field_validator

from codegen.canonical import as_integer
from codegen.dtypes import dtype
from codegen.epilogue import MAX_NODES, Bias, MaskedActivation, Node, PlainNode
from codegen.fixed_point import (
    RINGS,
    Element,
    ElementOut,
    FractionBits,
    ShiftRounding,
    SumDtype,
    Truncation,
    exact_in_a_ring,
    keyed,
    over_ring,
)
from codegen.problem import (
    LARGEST_EXTENT,
    AllowTf32,
    Extent,
    Problem,
    refuse,
    require_elements,
    require_indexable,
)

Layout = Literal["nhwc", "nchw"]
Winograd = Literal["none", "f2", "f4"]
# What Winograd's two forms compute.
OF_WINOGRAD: dict[str, Any] = {"r": 3, "s": 3, "stride": (1, 1), "dilation": (1, 1), "groups": 1}
# Outputs along an axis of the tiles that each allows.
WINOGRAD: dict[str, tuple[int, ...]] = {"none": (), "f2": (2,), "f4": (2, 4)}


class ChannelBias(Node):
    """One number for each filter, whatever axis that is."""

    cxx: ClassVar[str] = "Bias"
    operand: ClassVar[Literal["out", "uint8"] | None] = "out"
    op: Literal["bias"] = "bias"
    axis: Literal["k"] = "k"

    @property
    def structure(self) -> str:
        return "bias.k"


AnyNode = Annotated[ChannelBias | PlainNode | MaskedActivation, Field(discriminator="op")]
Chain = Annotated[tuple[AnyNode, ...], Field(max_length=MAX_NODES)]


Distance = Annotated[int, Field(strict=True, ge=0, le=LARGEST_EXTENT), BeforeValidator(as_integer)]
Padding = tuple[tuple[int, int], tuple[int, int]]


def _or_one(number: Any, two: Any) -> BeforeValidator:
    """Of a type of two: one number stands for both, and what is wrong with it is said once."""
    adapter = TypeAdapter(number)

    def pair(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise refuse("number_or_two", "should be a number, or an array of two")
        number = adapter.validate_python(value)
        return number, number

    return BeforeValidator(pair, json_schema_input_type=number | two)


Steps = Annotated[tuple[Extent, Extent], _or_one(Extent, tuple[Extent, Extent])]
Sides = Annotated[tuple[Distance, Distance], _or_one(Distance, tuple[Distance, Distance])]
Distances = Annotated[tuple[Sides, Sides], _or_one(Distance, tuple[Sides, Sides])]


class Convolution(Problem):
    """A convolution's extents and geometry, forward or of a gradient. Packed tensors. `nhwc`: x is n, h, w, c; w is k,
    r, s, c / groups; out is n, p, q, k. `nchw`: x is n, c, h, w; w is k, c / groups, r, s; out is n, k, p, q.

    What is read is of `dtype`, sums of float32; the result, biases and residuals of `out_dtype`. Over a ring (int32,
    int64) all are of `dtype`, and sums are truncated by `fraction_bits` (`codegen/fixed_point.py`). A single number for
    `stride`, `dilation` or `padding` stands for both axes, and one of an axis' padding for both sides. Along an axis
    where the filter has one element dilation becomes 1.
    """

    # The two tensors that are read, which of them is gathered, and the one that is written.
    reads: ClassVar[tuple[str, str]]
    gathered: ClassVar[Literal["x", "dy"]] = "x"
    writes: ClassVar[Literal["out", "dx", "dw"]]

    n: Extent
    h: Extent
    w: Extent
    c: Extent
    k: Extent
    r: Extent
    s: Extent
    groups: Extent = 1
    layout: Layout = "nhwc"
    stride: Steps = (1, 1)
    dilation: Steps = (1, 1)
    padding: Distances = Field(
        default=((0, 0), (0, 0)),
        validate_default=True,
        description="Zeros around the image: (top, bottom), (left, right).",
    )
    dtype: Element = "float32"
    acc_dtype: SumDtype = Field(default=None, validate_default=True)
    out_dtype: ElementOut = Field(default=None, validate_default=True)
    allow_tf32: AllowTf32 = False
    fraction_bits: FractionBits = 0
    rounding: ShiftRounding = None
    truncation: Truncation = None
    epilogue: Chain = ()

    def canonical(self) -> dict[str, Any]:
        return keyed(super().canonical())

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns of the image with its padding."""
        return self.h + sum(self.padding[0]), self.w + sum(self.padding[1])

    @property
    def corner(self) -> tuple[int, int]:
        """Rows and columns of padding before the image's first element."""
        return self.padding[0][0], self.padding[1][0]

    @property
    def p(self) -> int:
        """Rows of the output."""
        return _output_extent(self.padded[0], self.r, self.dilation[0], self.stride[0])

    @property
    def q(self) -> int:
        """Columns of the output."""
        return _output_extent(self.padded[1], self.s, self.dilation[1], self.stride[1])

    @property
    def group_channels(self) -> int:
        return self.c // self.groups

    @property
    def group_filters(self) -> int:
        return self.k // self.groups

    def shape_of(self, tensor: str) -> tuple[int, int, int, int]:
        if tensor in ("x", "dx"):
            first, rows, columns, channels = self.n, self.h, self.w, self.c
        elif tensor in ("w", "dw"):
            first, rows, columns, channels = self.k, self.r, self.s, self.group_channels
        else:
            first, rows, columns, channels = self.n, self.p, self.q, self.k
        return (first, rows, columns, channels) if self.channels_last else (first, channels, rows, columns)

    @property
    def taps(self) -> int:
        """Products in a sum."""
        return self.r * self.s * self.group_channels

    @property
    def sum_length(self) -> int:
        return self.taps

    @property
    def longest_sum(self) -> int:
        """Products in it, where sums differ."""
        return self.sum_length

    @property
    def gathered_products(self) -> int:
        """Of a sum, those with zeros of a stride included."""
        return self.sum_length

    @property
    def pixels(self) -> int:
        """Output pixels of all images."""
        return self.n * self.p * self.q

    @property
    def taps_inside(self) -> int:
        """Pairs of an output pixel and an element of the filter that meet an element of the image, not its padding."""
        extents = zip((self.p, self.q), (self.r, self.s), (self.h, self.w), strict=True)
        rows, columns = (
            windows_inside(windows, self.stride[axis], self.corner[axis], taps, self.dilation[axis], extent)
            for axis, (windows, taps, extent) in enumerate(extents)
        )
        return self.n * rows * columns

    @property
    def input_bytes(self) -> int:
        """Of the two tensors that are read, and of x what some window meets, each once."""
        elements = {"x": self.elements_seen, "w": self.k * self.taps, "dy": self.pixels * self.k}
        return dtype(self.dtype).bytes * sum(elements[name] for name in self.reads)

    @property
    def elements_seen(self) -> int:
        """Elements of x that must be read, at most: those of rows that some window meets, and with channels last of
        columns; with channels first the others of a row come along."""
        rows = min(self.h, self.p * self.r)
        return self.n * self.c * rows * (min(self.w, self.q * self.s) if self.channels_last else self.w)

    @property
    def channels_last(self) -> bool:
        return self.layout == "nhwc"

    @property
    def depthwise(self) -> bool:
        """Whether every channel has a filter of its own, and one only; kernels over rings have that as groups."""
        return self.groups == self.c == self.k and self.groups > 1 and not over_ring(self)

    @property
    def pointwise(self) -> bool:
        """Whether it is a product of stored matrices; with channels first the images of one group are one."""
        single = (self.r, self.s, *self.stride, *self.padded) == (1, 1, 1, 1, self.h, self.w)
        return single and not self.depthwise and (self.channels_last or self.groups == 1)

    _exact_in_a_ring = field_validator("epilogue", mode="after")(exact_in_a_ring)

    @field_validator("groups", mode="after")
    @classmethod
    def _divides(cls, value: int, info: ValidationInfo) -> int:
        for name, what in (("c", "channels"), ("k", "filters")):
            extent = info.data.get(name, value)
            if extent % value:
                raise refuse("groups_do_not_divide", f"is {value}, which does not divide the {extent} {what} ({name})")
        return value

    @field_validator("dilation", mode="after")
    @classmethod
    def _means_something(cls, value: tuple[int, int], info: ValidationInfo) -> tuple[int, int]:
        # One spelling for what a single element does not show, so that they share a key.
        return tuple(1 if info.data.get(name) == 1 else step for name, step in zip("rs", value, strict=True))  # type: ignore[return-value]

    @field_validator("padding", mode="after")
    @classmethod
    def _has_an_output(cls, value: Padding, info: ValidationInfo) -> Padding:
        if any(name not in info.data for name in ("n", "h", "w", "c", "k", "r", "s", "groups", "stride", "dilation")):
            return value  # another field is already at fault
        d, out = info.data, []
        for axis, (extent, filter_extent) in enumerate((("h", "r"), ("w", "s"))):
            padded, window = d[extent] + sum(value[axis]), d["dilation"][axis] * (d[filter_extent] - 1) + 1
            if window > padded:
                raise refuse(
                    "no_output",
                    f"is {_words(value[axis])}: {extent} = {d[extent]} is {padded} with it, less than the {window} "
                    f"that {d[filter_extent]} elements of the filter span with dilation {d['dilation'][axis]}; nothing "
                    "would be left",
                )
            if padded > LARGEST_EXTENT:
                raise refuse(
                    "too_large",
                    f"is {_words(value[axis])}: {extent} is {padded} with it; at most {LARGEST_EXTENT} is allowed",
                    allowed=LARGEST_EXTENT,
                )
            out.append(_output_extent(padded, d[filter_extent], d["dilation"][axis], d["stride"][axis]))
        taps = d["r"] * d["s"] * (d["c"] // d["groups"])
        require_indexable(d["n"] * out[0] * out[1], "output pixels (n p q)")
        require_indexable(taps, "products in a sum (r s c / groups)")
        require_indexable(d["n"] * d["groups"], "groups of all images (n groups)")
        require_elements("x", d["n"] * d["h"] * d["w"] * d["c"])
        require_elements("w", d["k"] * taps)
        require_elements("out", d["n"] * out[0] * out[1] * d["k"])
        return value


class AllowsWinograd(Convolution):
    """One that says which of Winograd's forms may compute it."""

    # On a side; None: any.
    most_padding: ClassVar[int | None] = None
    winograd: Winograd = Field(
        default="none",
        description="Which of Winograd's forms may compute it, with their larger errors: f2 F(2 x 2, 3 x 3), f4 also "
        "F(4 x 4, 3 x 3). Means nothing where Winograd does not compute the convolution.",
    )

    def canonical(self) -> dict[str, Any]:
        """Without `winograd` where it is none, so that what was stored before it was a field is found."""
        fields = super().canonical()
        return {name: value for name, value in fields.items() if (name, value) != ("winograd", "none")}

    @property
    def fits_winograd(self) -> bool:
        """Whether F(2 x 2, 3 x 3) and F(4 x 4, 3 x 3) compute it."""
        return self._fits({name: getattr(self, name) for name in (*OF_WINOGRAD, "padding")})

    @classmethod
    def _fits(cls, fields: Mapping[str, Any]) -> bool:
        """What is missing is at fault elsewhere."""
        widest = max(max(sides) for sides in fields.get("padding", ((0, 0),)))
        of_form = all(fields.get(name, fit) == fit for name, fit in OF_WINOGRAD.items())
        return of_form and (cls.most_padding is None or widest <= cls.most_padding)

    @field_validator("winograd", mode="after")
    @classmethod
    def _of_what_winograd_computes(cls, value: Winograd, info: ValidationInfo) -> Winograd:
        return value if cls._fits(info.data) and info.data.get("dtype") not in RINGS else "none"


def _words(sides: tuple[int, int]) -> str:
    """An axis' padding as one number where its sides are equal."""
    return str(sides[0]) if sides[0] == sides[1] else f"{sides[0]} and {sides[1]}"


def _output_extent(padded: int, taps: int, dilation: int, stride: int) -> int:
    return (padded - dilation * (taps - 1) - 1) // stride + 1


def with_axes(chain: tuple[AnyNode, ...], axis: Literal["m", "n"]) -> tuple[Node, ...]:
    """The chain with its bias along that axis of a matrix of outputs."""
    return tuple(Bias(axis=axis) if isinstance(node, ChannelBias) else node for node in chain)


def windows_inside(windows: int, stride: int, padding: int, taps: int, dilation: int, extent: int) -> int:
    """Along an axis: pairs of a window and a tap of it that lie on one of `extent` elements."""
    inside = 0
    for tap in range(taps):
        before = padding - tap * dilation  # elements from the tap of the first window to the first element
        first, end = max(0, -(-before // stride)), min(windows, (extent - 1 + before) // stride + 1)
        inside += max(0, end - first)
    return inside
