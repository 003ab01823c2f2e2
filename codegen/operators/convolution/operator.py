"""What a convolution is as an operator, forward or a gradient: as a product of matrices of which one is gathered on the
way (`implicit_gemm`), or without one (`direct`)."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from codegen.alignment import needs_cuda_cores
from codegen.call_limits import EdgeCall
from codegen.counts import LaunchCounts, added
from codegen.dtypes import dtype
from codegen.epilogue import Bias, structures, tensor_nodes, words_of_mask
from codegen.fixed_point import over_ring, shift_of
from codegen.kernel import Kernel
from codegen.operand import packed_strides
from codegen.operator import CONV, GEMM, Array, Constants, Cost, Float64, InputKind, LaunchBounds, Operand, Work
from codegen.operators.convolution import implicit, inputs, reference
from codegen.operators.convolution.direct import LARGEST_INDEX, Direct
from codegen.operators.convolution.problem import Convolution
from codegen.operators.convolution.reduced import GEOMETRIES, Reduced, as_matmul
from codegen.operators.matmul import counts, ring_space, split, traffic
from codegen.operators.matmul.kernel_family import Stored
from codegen.operators.matmul.problem import Layout, MatmulProblem
from codegen.operators.matmul.product import Fields, ProductOperator, product_fields, rules, whole
from codegen.operators.matmul.reduced import long_problem as long_product
from codegen.operators.matmul.reduced import needed_policy
from codegen.operators.matmul.reduced import reduced_problems as reduced_products
from codegen.operators.matmul.reference import accumulated
from codegen.problem import Problem
from codegen.run_once import RunOnce
from codegen.search.joined_space import Kind, build_joined, together
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, first_accepted
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable
from codegen.targets import Target

Admit = Callable[[Schedule], Accepted | Rejected]

# From so many filters of a group on a product of matrices is the better first guess.
MANY_FILTERS = 8
# That nvcc 13.2 takes for what finds the elements of an image: of 48 kernels for sm_90a, beside their products.
GATHER_SECONDS = 0.05
# How a kernel of `direct` divides its sums where it has no tunables for that.
UNDIVIDED: Fields = {"split": "none", "split_k": 1}


class ConvolutionOperator(ProductOperator):
    """An operator says which product it is, how that is gathered, and what its kernel without one does."""

    problem_type: ClassVar[type[Convolution]]
    shared: ClassVar[tuple[str, ...]] = (*GEMM, *CONV)
    extent_names = ("n", "h", "w", "c", "k", "r", "s", "p", "q", "groups")
    attribute_names = ("stride_h", "stride_w", "top", "bottom", "left", "right", "dilation_h", "dilation_w")
    limited = (*extent_names, *attribute_names)
    # Of the signature, what the Config has beside layout and algorithm, and the classes of what is read and written.
    flags: ClassVar[tuple[str, ...]] = ("pointwise", "depthwise")
    align_names: ClassVar[tuple[str, str, str]] = ("align_x", "align_w", "align_out")
    # Whether with channels first the second of the tensors that are read is the product's A.
    turned: ClassVar[bool] = True
    # What the product of a group is where each channel has a filter of its own.
    narrow: ClassVar[str] = "column"
    gather_instructions: ClassVar[int] = implicit.GATHER_INSTRUCTIONS
    direct: Direct
    reduced: Reduced
    # Whether an implicit product over a ring may have limbs that are split ahead.
    splits_ahead: ClassVar[bool] = False
    # Tunables that both algorithms have, and of which levels try the default alone.
    beside: ClassVar[tuple[Tunable, ...]] = ()

    @abstractmethod
    def product_layout(self, layout: str, *, pointwise: bool) -> Layout:
        """How the operands of the product lie in memory."""

    @staticmethod
    @abstractmethod
    def aligns(p: Any) -> tuple[int, int, int]:
        """Elements per access of the two tensors that are read, and of the one that is written."""

    @abstractmethod
    def index_rule(self, p: Any, *, whole: bool) -> Rejected | None:
        """What a kernel reaches with 32 bits. `whole`: of all images, not of one product's."""

    @abstractmethod
    def gather_rule(self, p: Any, t: Fields) -> Rejected | None:
        """Every static_assert of the gather is a rule here."""

    @abstractmethod
    def gather_registers(self, s: Fields, t: Fields) -> int:
        """An estimate of those of a thread that the gather takes."""

    @abstractmethod
    def direct_kind(self, p: Any, target: Target) -> Kind | None:
        """What searches try of `direct`; None where it is not worth it."""

    @abstractmethod
    def direct_default(self, p: Any, target: Target, admit: Admit) -> Schedule:
        """The first of `direct` that breaks no rule."""

    @abstractmethod
    def direct_rules(self, p: Any, t: Fields, target: Target, workspace_limit: int | None) -> Accepted | Rejected:
        """`rules` of `direct`."""

    @abstractmethod
    def direct_work(self, p: Any, t: Fields, least: Cost, target: Target) -> Work:
        """`work` of `direct`."""

    @abstractmethod
    def direct_launches(self, p: Any, t: Fields) -> tuple[LaunchCounts, ...]:
        """`launches` of `direct`."""

    @abstractmethod
    def spread(self, p: Any, factors: Array) -> Array:
        """A factor for each product of a sum, as factors of the tensor that is read and not gathered."""

    @abstractmethod
    def multiply(self, p: Any, first: Float64, second: Float64) -> Float64:
        """The result of the two tensors that are read; channels are last in all three."""

    def edge_calls(self, kernel: Kernel) -> list[EdgeCall]:
        """Channels or filters beyond 32 bits, of which a group has few enough; as many as groups do not divide."""
        eight = {"groups": 8, "k": 8, "c": 8}
        return [EdgeCall({**eight, name: number}, False) for name in "ck" for number in (2**32 + 8, 9)]

    def signature(self, problem: Problem) -> dict[str, Any]:
        p = self.own(problem)
        plain = ("layout", "dtype", "acc_dtype", "out_dtype", "allow_tf32", *self.flags)
        return {
            **{name: getattr(p, name) for name in plain},
            **dict(zip(self.align_names, self.aligns(p), strict=True)),
            "epilogue": structures(self.product(p).epilogue),
            **shift_of(p),
        }

    def product_aligns(self, s: Fields) -> tuple[int, int]:
        """Elements per access of the product's A and B."""
        first, second = s[self.align_names[0]], s[self.align_names[1]]
        return (second, first) if self.turned and s["layout"] == "nchw" else (first, second)

    def out_align(self, s: Fields, t: Fields) -> int:
        """Elements of a store of `run`."""
        return int(s[self.align_names[2]])

    def stored(self, s: Fields) -> Stored:
        layout = self.product_layout(s["layout"], pointwise=s["pointwise"])
        return Stored(dtype(s["dtype"]).bytes, self.product_aligns(s), layout)

    def values(self, schedule: Schedule) -> dict[str, Any]:
        """The length of a sum is never a constant of the code."""
        return {"static_k": 0, **whole(schedule.as_dict())}

    # ---- search

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        p = self.own(problem)
        admit = partial(self.rules, p, target=target)
        if over_ring(p):
            others, lacking = self.ring_kinds(p, target), self.ring_tunables_lacking(p, target)
            return ring_space.space(self.product(p), target, search, admit, others, lacking, stored=self.splits_ahead)
        kinds = self.kinds(p, target, search)
        make = {"direct": self.direct_default, "implicit_gemm": self.product_default}
        order = [name for name in sorted(make, reverse=not self.direct_first(p)) if name in kinds]
        default = first_accepted((make[name](p, target, admit) for name in order), admit).as_dict()
        default = {**{tunable.name: tunable.default for tunable in self.beside}, **default}
        return build_joined(search, "algorithm", self.every_kind(p, target), kinds, Schedule.of(default))

    def ring_kinds(self, p: Any, target: Target) -> dict[Value, Kind]:
        """What searches over a ring try beside implicit products."""
        return {}

    def ring_tunables_lacking(self, p: Any, target: Target) -> dict[Value, tuple[Tunable, ...]]:
        """The tunables of algorithms over a ring that do not compute the problem."""
        return {}

    def every_kind(self, p: Any, target: Target) -> dict[Value, tuple[Tunable, ...]]:
        """The tunables of each algorithm."""
        as_product = implicit.tunables_of(self.product(p), target)
        return {"implicit_gemm": (*as_product, *self.beside), "direct": (*self.direct.TUNABLES, *self.beside)}

    def kinds(self, p: Any, target: Target, search: Search) -> dict[Value, Kind]:
        """What searches try of each algorithm that is worth it; of `beside` levels have the defaults alone."""
        tried = {
            "implicit_gemm": None if p.depthwise else self.product_kind(p, target),
            "direct": self.direct_kind(p, target),
        }
        return {
            name: replace(kind, tunables=(*kind.tunables, *self.beside))
            for name, kind in tried.items()
            if kind is not None
        }

    def product_kind(self, p: Any, target: Target) -> Kind:
        """What searches try of `implicit_gemm`."""
        return implicit.kind(self.product(p), self.product_aligns(_signature(self, p)), target)

    def product_default(self, p: Any, target: Target, admit: Admit) -> Schedule:
        """The first of `implicit_gemm` that breaks no rule."""
        aligned = self.product_aligns(_signature(self, p))
        return implicit.default(self.product(p), aligned, p.input_bytes, target, admit)

    def direct_first(self, p: Any) -> bool:
        """Whether the level-0 schedule is one of `direct`: where filters are few."""
        return bool(p.group_filters < MANY_FILTERS)

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        p, t = self.own(problem), self.values(schedule)
        directly = t["algorithm"] == "direct"
        if (directly or not p.pointwise) and (broken := self.index_rule(p, whole=directly or p.channels_last)):
            return broken
        if directly:
            return self.direct_rules(p, t, target, workspace_limit)
        if p.depthwise:
            return Rejected(
                "algorithm",
                f"{p.groups} products with one {self.narrow} each are mostly padding: direct computes them",
            )
        if not p.pointwise and (broken := self.gather_rule(p, t)):
            return broken
        s = _signature(self, p)
        outcome = rules(self.product(p), self.product_aligns(s), Schedule.of(t), target, workspace_limit)
        if isinstance(outcome, Rejected) or p.pointwise:
            return outcome
        return implicit.register_rule(self.gather_registers(s, t), t, self.stored(s), target) or ACCEPTED

    # ---- the kernel

    def fields(self, s: Fields, t: Fields) -> Constants:
        flags = {"direct": is_direct(t), "channels_last": s["layout"] == "nhwc", **{n: s[n] for n in self.flags}}
        out = self.out_align(s, t)
        if is_direct(t):
            return {**flags, **self.direct.fields(s, t, out)}
        return {**flags, **product_fields(s, t, self.stored(s).layout, (*self.product_aligns(s), out))}

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        t = kernel.tunables.as_dict()
        if is_direct(t) and function == "run":
            return LaunchBounds(int(t["threads"]))
        return super().launch_bounds(kernel, function)

    def estimated_registers(self, kernel: Kernel) -> int:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        if is_direct(t):
            return self.direct.registers(s, t)
        return super().estimated_registers(kernel) + (0 if s["pointwise"] else self.gather_registers(s, t))

    def shared_bytes(self, kernel: Kernel) -> int:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        return self.direct.shared_bytes(s, t) if is_direct(t) else super().shared_bytes(kernel)

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        if is_direct(t):
            return self.direct.compile_seconds(t, tuple(s["epilogue"]))
        return super().predicted_compile_seconds(kernel) + (0.0 if s["pointwise"] else GATHER_SECONDS)

    # ---- a call

    def attributes(self, problem: Problem) -> list[int]:
        p = self.own(problem)
        return [*p.stride, *p.padding[0], *p.padding[1], *p.dilation]

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Of rank 4 and packed; bias is a vector. Accesses go over the ends of rows, so their alignment is said."""
        p = self.own(problem)
        first, second, written = self.aligns(p)
        shape, extra = p.shape_of(p.writes), []
        for node, name, element in tensor_nodes(self.product(p).epilogue, p.out_dtype):
            if node.packed_mask:
                extra.append(_packed(name, element, "in", (words_of_mask(math.prod(shape)),), 1))
            elif isinstance(node, Bias):
                extra.append(_packed(name, element, "in", (p.k,), written if node.axis == "n" else 1))
            else:
                extra.append(_packed(name, element, "in", shape, written))
        return (
            *(_packed(n, p.dtype, "in", p.shape_of(n), w) for n, w in zip(p.reads, (first, second), strict=True)),
            *extra,
            _packed(p.writes, p.out_dtype, "out", shape, written),
        )

    # ---- tests

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        """Even, tail tiles, smallest, many tiles: of the product what matmul has, of the geometry another each:
        padding, strides that leave elements unseen, dilation, windows that lie in the padding altogether, several
        images and groups."""
        s, t = kernel.signature_dict, self.values(kernel.tunables)
        if is_direct(t):
            return self.reduced.directly(self.problem_type, s, t)
        reduced, kind = reduced_products(self._as_matmul(s), t), self.problem_type
        problems = (self.reduced.of_product(kind, s, number, matmul) for number, matmul in enumerate(reduced))
        return [self._tolerant(problem, t) for problem in problems]

    def run_once(self, kernel: Kernel) -> list[RunOnce]:
        s, t, once = kernel.signature_dict, self.values(kernel.tunables), super().run_once(kernel)
        if not is_direct(t) and (matmul := long_product(self._as_matmul(s), t)):
            problem = self._tolerant(self.reduced.of_product(self.problem_type, s, len(GEOMETRIES) - 1, matmul), t)
            once.append(RunOnce("long", problem, tuple(split.most_parts(t, self.product(self.own(problem))))))
        return once

    def _as_matmul(self, s: Fields) -> dict[str, Any]:
        return as_matmul(s, self.stored(s).layout, (*self.product_aligns(s), s[self.align_names[2]]))

    def _tolerant(self, problem: Problem, t: Fields) -> Problem:
        """What allows the schedule to truncate where it does, and no more."""
        policy = needed_policy(self.product(self.own(problem)), t)
        return self.parse({**problem.canonical(), "truncation": policy}) if policy else problem

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        return [[0, 0, 0]] if is_direct(kernel.tunables.as_dict()) else super().test_launches(kernel, problem)

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        p = self.own(problem)
        return inputs.make_inputs(p, self.product(p), partial(self.spread, p), self.operands(p), kind, rng)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        p = self.own(problem)
        if over_ring(p):
            return reference.in_ring(p, partial(self.multiply, p), inputs)
        multiply, bound = partial(self.multiply, p), partial(self.bound, p)
        return reference.reference(p, multiply, bound, inputs, exact, self.reached(p))

    def reached(self, p: Any) -> Callable[[Array], Array] | None:
        """Of what is no number in the first tensor that is read, which outputs it reaches beside those whose sums have
        it; none where that is left to the sums."""
        return None

    def bound(self, p: Any, first: Float64, second: Float64) -> Float64:
        """How far the sums of a kernel may be from `multiply`'s: in any order, in any number of slices."""
        multiply, on_cuda_cores = partial(self.multiply, p), needs_cuda_cores(p.dtype, p.allow_tf32)
        bound: Float64 = accumulated(
            multiply, first, second, p.longest_sum, on_cuda_cores=on_cuda_cores, tf32=p.allow_tf32
        )
        return bound

    # ---- what a schedule costs

    def divided(self, p: Any, t: Fields) -> tuple[MatmulProblem, Fields]:
        """The product whose sums a schedule divides, and the schedule as matmul's rules of splits read it."""
        return self.product(p), {**UNDIVIDED, **t}

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        p = self.own(problem)
        cost = traffic.cost(*self.divided(p, schedule.as_dict()), self.operands(p))
        unseen = (p.n * p.h * p.w * p.c - p.elements_seen) * dtype(p.dtype).bytes
        return replace(cost, bytes_read=cost.bytes_read - unseen)

    def launches(self, problem: Problem, schedule: Schedule, target: Target) -> tuple[LaunchCounts, ...]:
        """Of the gathered operand lanes ask for what lies in the image, not for its padding."""
        p, t = self.own(problem), self.values(schedule)
        if is_direct(t):
            return self.direct_launches(p, t)
        s = _signature(self, p)
        aligned, place = (*self.product_aligns(s), s[self.align_names[2]]), self.gathered_place(p)
        inside = self.share_inside(p)

        def of_product(product: MatmulProblem) -> tuple[LaunchCounts, ...]:
            bytes_read = list(counts.input_bytes(product, t))
            bytes_read[place] = round(bytes_read[place] * inside)
            return counts.launches(product, t, aligned, bytes_read)

        return added([(number, of_product(product)) for number, product in self.products(p)])

    def share_inside(self, p: Any) -> float:
        """Of the gathered matrices, without the zeros of the padding."""
        return float(p.taps_inside * (p.c if p.gathered == "x" else p.k) / self.gathered_elements(p))

    def gathered_place(self, p: Any) -> int:
        """Which of the product's operands is gathered."""
        place: int = p.reads.index(p.gathered)
        return 1 - place if self.turned and not p.channels_last else place

    def gathered_elements(self, p: Any) -> int:
        """Of the gathered matrices, with the zeros of the padding."""
        place = self.gathered_place(p)
        products = self.products(p)
        return sum(number * of.batch * of.k * (of.n if place else of.m) for number, of in products)

    def opened(self, p: Any, schedule: Schedule, *, inputs: bool) -> tuple[int, int]:
        """Raw inputs have the zeros of the padding."""
        (rows, columns), gathered = p.padded, p.reads.index(p.gathered)
        image = p.n * rows * columns * p.c if p.gathered == "x" else math.prod(p.shape_of("out"))
        other = math.prod(p.shape_of(p.reads[1 - gathered]))
        image = image if inputs else self.gathered_elements(p)
        return (other, image) if gathered else (image, other)

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        p, least, t = self.own(problem), self.cost(problem, schedule), self.values(schedule)
        if is_direct(t):
            return self.direct_work(p, t, least, target)
        s = _signature(self, p)
        aligned = (*self.product_aligns(s), s[self.align_names[2]])
        gathered = s[self.align_names[p.reads.index(p.gathered)]]
        per_element = 0.0 if p.pointwise else self.gather_instructions / gathered
        return implicit.work(self.product(p), t, aligned, least, target, p.input_bytes, per_element)


@lru_cache(maxsize=1024)  # called for every schedule
def _signature(operator: ConvolutionOperator, problem: Convolution) -> dict[str, Any]:
    return operator.signature(problem)


def index_check(elements: int, what: str) -> Rejected | None:
    return check(elements <= LARGEST_INDEX, "index", f"{what}; 32 bits reach {LARGEST_INDEX}")


def is_direct(tunables: Fields) -> bool:
    return str(tunables["algorithm"]) == "direct"


def every_tunable(direct: tuple[Tunable, ...]) -> tuple[Tunable, ...]:
    """The order of those chosen at launch is the launch ABI's: raster, split_k, stream_blocks."""
    meaning = "how the convolution is computed; each way has tunables of its own"
    kinds = (implicit.SIMT_TUNABLES, implicit.TENSOR_TUNABLES, direct, ring_space.IMAD, ring_space.LIMBS)
    return together(kinds, "algorithm", meaning)


def _packed(name: str, element: str, role: Any, shape: tuple[int, ...], align: int) -> Operand:
    return Operand(name, element, role, shape, packed_strides(shape), align)
