"""A convolution over a ring whose image and filters are split into limbs once, ahead of the implicit product: matrices
of bytes with channels last, a group's in whole vectors of 16 (`codegen/device/conv/channel_planes.cuh`)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from codegen.alignment import round_up
from codegen.counts import LaunchCounts, added, load, merged, store
from codegen.dtypes import dtype
from codegen.operator import Work
from codegen.operators.convolution import implicit
from codegen.operators.convolution.direct import LARGEST_INDEX
from codegen.operators.matmul import counts, limb_planes, limbs, product, split, traffic
from codegen.operators.matmul.kernel_family import Stored
from codegen.operators.matmul.limb_planes import VECTOR
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, check_workspace
from codegen.search.schedule import Schedule
from codegen.targets import Target

# Registers beside those of a gathered image: where planes lie.
PLANE_REGISTERS = 8
# Of the problem that is proved with groups: an odd number of them, and more taps times channels than any filter of it
# has with two vectors.
GROUPS, CHANNELS = 3, 12 * (VECTOR + 1)


def ahead(t: Mapping[str, Any]) -> bool:
    """Whether this is a schedule of an implicit product of planes."""
    return t.get("algorithm") == "limbs" and limb_planes.ahead(t)


def grouped(product: MatmulProblem) -> MatmulProblem:
    """A small product of which each of several groups has several vectors of planes, the last of them not full."""
    return product.model_copy(update={"batch": GROUPS, "m": 6, "n": 6, "k": CHANNELS})


def of_run(t: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule as matmul's rules and costs read it of the product alone: its planes are there."""
    return {**t, limb_planes.LIMB_SPLIT.name: limb_planes.GIVEN}


@dataclass(frozen=True)
class ChannelPlanes:
    """What is split of a problem: the image, `images` of `pixels`, each with `groups` times `channels`, and the
    filters, which have `places` (rows of all groups times taps) times `channels`. `reach`: pixels of an image with its
    padding; `align`, `align_filters`: elements per access of the image and of the filters."""

    dtype: str
    channels_last: bool
    images: int
    pixels: int
    groups: int
    channels: int
    places: int
    reach: int
    align: int
    align_filters: int = 1

    @property
    def size(self) -> int:
        """Bytes of an element, which is how many limbs it has."""
        return dtype(self.dtype).bytes

    @property
    def pitch(self) -> int:
        """Bytes of a group's channels in a plane."""
        return round_up(self.channels, VECTOR)

    @property
    def bytes(self) -> int:
        """Of all planes, as in channel_planes.cuh."""
        return (self.images * self.pixels * self.groups + self.places) * self.pitch * self.size

    @property
    def elements(self) -> tuple[int, int]:
        """Of the image and of the filters."""
        return self.images * self.pixels * self.groups * self.channels, self.places * self.channels

    def padded(self, as_product: MatmulProblem) -> MatmulProblem:
        """The product of planes, whose sums have zeros behind each tap's channels."""
        return as_product.model_copy(update={"k": as_product.k // self.channels * self.pitch})

    def workspace_bytes(self, as_product: MatmulProblem, t: Mapping[str, Any]) -> int:
        return split.partial_bytes(self.padded(as_product), t) + self.bytes

    def rules(
        self, as_product: MatmulProblem, t: Mapping[str, Any], target: Target, workspace_limit: int | None
    ) -> Accepted | Rejected:
        """What an implicit product of planes needs, then matmul's rules for it."""
        elements = self.reach * self.groups * self.pitch * (self.images if self.channels_last else 1)
        broken = check(
            elements <= LARGEST_INDEX,
            "index",
            f"a plane has {elements} bytes with its padding; 32 bits reach {LARGEST_INDEX}",
        ) or check(
            t["truncate"] == "once",
            "limb_split",
            f"tiles of limbs that are split ahead have zeros of their own, and no truncate = {t['truncate']}",
        )
        if broken:
            return broken
        of_planes = self.padded(as_product)
        outcome = product.rules(of_planes, (1, 1), Schedule.of(of_run(t)), target, None)
        if isinstance(outcome, Rejected):
            return outcome
        gathering = registers("nhwc" if self.channels_last else "nchw", t)
        return (
            implicit.register_rule(gathering, t, Stored.of(of_planes, (1, 1)), target)
            or check_workspace(self.workspace_bytes(as_product, t), workspace_limit)
            or ACCEPTED
        )

    def launches(
        self,
        products: Iterable[tuple[int, MatmulProblem]],
        t: Mapping[str, Any],
        align_out: int,
        inside: tuple[int, float],
    ) -> tuple[LaunchCounts, ...]:
        """`products`: how many of each kind a launch computes; `inside`: the operand that is gathered, 0 for A, and its
        share that lies in the image."""
        place, share = inside

        def of_product(as_product: MatmulProblem) -> tuple[LaunchCounts, ...]:
            of_planes = self.padded(as_product)
            bytes_read = list(counts.input_bytes(of_planes, of_run(t)))
            bytes_read[place] = round(bytes_read[place] * share)
            run, *rest = counts.launches(of_planes, of_run(t), (1, 1, align_out), bytes_read)
            return (replace(run, multiplications=counts.multiplications(as_product)), *rest)

        return (self._split(), *added([(number, of_product(product)) for number, product in products]))

    def _split(self) -> LaunchCounts:
        (image, filters), size = self.elements, self.size
        parts = (
            load(size * image, size * self.align),
            load(size * filters, size * self.align_filters),
            store(self.bytes, VECTOR),
        )
        return LaunchCounts(limb_planes.SPLIT_LIMBS, merged(parts))

    def gather_instructions(self) -> float:
        """For each element of an operand, beside those of a copy."""
        return implicit.GATHER_INSTRUCTIONS * self.size / VECTOR

    def beyond_l2(self, target: Target) -> int:
        """Bytes of planes that `run` reads from DRAM."""
        return 0 if self.bytes <= traffic.L2_SHARE * target.l2_bytes else self.bytes

    def split_work(self, target: Target) -> Work:
        """Counts for the roofline of the launch that splits: a thread turns 16 elements."""
        (image, filters), items = self.elements, self.bytes / self.size / VECTOR
        read, turning = float(self.size * (image + filters)), VECTOR / 4 * (self.size // 4) * limbs.TURNING
        return traffic.items(
            items,
            instructions=4 * (image / self.align + filters) + items * (turning + 2 * self.size),
            l2_bytes=read + self.bytes,
            dram_bytes=read + self.beyond_l2(target),
            steps=1,
        )


def registers(layout: str, t: Mapping[str, Any]) -> int:
    """An estimate of those of a thread that the gather takes: corners of the pixels that it has."""
    outer = t["tile_m"] if layout == "nhwc" else t["tile_n"]
    pixels: int = max(1, outer * (t["tile_k"] // VECTOR) // limbs.threads(t))
    return implicit.CORNER_REGISTERS * pixels + implicit.TAP_REGISTERS + PLANE_REGISTERS
