"""What the convolutions share, forward and their gradients: as a product of matrices of which one is gathered on the
way (`implicit_gemm`), or without one (`direct`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from codegen.dtypes import dtype
from codegen.epilogue import scalars
from codegen.kernel import Kernel
from codegen.operand import packed_strides
from codegen.operator import CONV, GEMM, Config, ConfigField, LaunchBounds, Operand, Operator
from codegen.operators.matmul import config_fields, simt_rules, simt_work, split, tensor_rules, tensor_work
from codegen.operators.matmul.kernel_family import is_tensor
from codegen.problem import Problem, require


class ConvolutionOperator(Operator):
    """An operator says how its product lies in memory, and what its own kernels take."""

    shared: ClassVar[tuple[str, ...]] = (*GEMM, *CONV)
    extent_names = ("n", "h", "w", "c", "k", "r", "s", "p", "q", "groups")
    attribute_names = ("stride_h", "stride_w", "top", "bottom", "left", "right", "dilation_h", "dilation_w")
    # Of the signature, what the Config has beside layout and algorithm.
    flags: ClassVar[tuple[str, ...]] = ("pointwise", "depthwise")

    @abstractmethod
    def stored(self, kernel: Kernel) -> tensor_rules.Stored:
        """How the operands of the product lie in memory."""

    @abstractmethod
    def out_align(self, kernel: Kernel) -> int:
        """Elements of a store of the product."""

    @abstractmethod
    def gather_registers(self, kernel: Kernel, of_product_alone: int) -> int:
        """`estimated_registers` of a product whose operands are gathered."""

    @abstractmethod
    def direct_fields(self, kernel: Kernel) -> Iterable[ConfigField]:
        """What the code of `direct` reads."""

    @abstractmethod
    def direct_registers(self, kernel: Kernel) -> int:
        """`estimated_registers` of `direct`."""

    @abstractmethod
    def direct_shared_bytes(self, kernel: Kernel) -> int:
        """`shared_bytes` of `direct`."""

    @abstractmethod
    def direct_compile_seconds(self, kernel: Kernel) -> float:
        """`predicted_compile_seconds` of `direct`."""

    def own(self, problem: Problem) -> Any:
        """The problem as one of this operator."""
        return require(self.problem_type)(problem)

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        return split.functions(divided(kernel.tunables.as_dict()))

    def deterministic(self, kernel: Kernel) -> bool:
        return split.deterministic(divided(kernel.tunables.as_dict()), str(kernel.signature_dict["acc_dtype"]))

    def config(self, kernel: Kernel) -> Config:
        s = kernel.signature_dict
        bools = {"direct": is_direct(kernel), "channels_last": s["layout"] == "nhwc", **{n: s[n] for n in self.flags}}
        types = (("Input", s["dtype"]), ("Accumulator", s["acc_dtype"]), ("Output", s["out_dtype"]))
        return Config(
            (
                *(ConfigField("bool", name, value) for name, value in bools.items()),
                *(self.direct_fields(kernel) if is_direct(kernel) else self._product_fields(kernel)),
            ),
            tuple(s["epilogue"]),
            types,
            s["out_dtype"],
        )

    def _product_fields(self, kernel: Kernel) -> Iterable[ConfigField]:
        stored = self.stored(kernel)
        aligns = (*stored.aligns, self.out_align(kernel))
        return config_fields(matmul_tunables(kernel.tunables.as_dict()), stored.layout, aligns)

    def extents(self, problem: Problem) -> list[int]:
        return [int(getattr(problem, name)) for name in self.extent_names]

    def attributes(self, problem: Problem) -> list[int]:
        p = self.own(problem)
        return [*p.stride, *p.padding[0], *p.padding[1], *p.dilation]

    def scalars(self, problem: Problem) -> list[float]:
        return scalars(self.own(problem).epilogue)

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        t = kernel.tunables.as_dict()
        if function != "run":
            return LaunchBounds(split.REDUCE_THREADS)
        if is_tensor(t):
            return tensor_rules.launch_bounds(t)
        if is_direct(kernel):
            return LaunchBounds(int(t["threads"]))
        return LaunchBounds(simt_rules.threads(t), int(t["min_blocks"]))

    def estimated_registers(self, kernel: Kernel) -> int:
        if is_direct(kernel):
            return self.direct_registers(kernel)
        t = kernel.tunables.as_dict()
        of_product_alone = tensor_rules.registers(t, self.stored(kernel)) if is_tensor(t) else simt_rules.registers(t)
        pointwise = kernel.signature_dict["pointwise"]
        return of_product_alone if pointwise else self.gather_registers(kernel, of_product_alone)

    def shared_bytes(self, kernel: Kernel) -> int:
        if is_direct(kernel):
            return self.direct_shared_bytes(kernel)
        t = kernel.tunables.as_dict()
        return tensor_rules.shared_bytes(t, self.stored(kernel).size) if is_tensor(t) else simt_rules.shared_bytes(t)

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        if is_direct(kernel):
            return self.direct_compile_seconds(kernel)
        t, epilogue = matmul_tunables(kernel.tunables.as_dict()), tuple(kernel.signature_dict["epilogue"])
        if is_tensor(t):
            return tensor_work.compile_seconds(t, epilogue, self.stored(kernel))
        return simt_work.compile_seconds(t, epilogue)


def is_direct(kernel: Kernel) -> bool:
    return kernel.tunables.get("algorithm") == "direct"


def input_bytes(kernel: Kernel) -> int:
    """Of an element."""
    return dtype(kernel.signature_dict["dtype"]).bytes


def matmul_tunables(tunables: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule of the implicit product as matmul's rules read it: its length is never a constant of the code."""
    return {"static_k": 0, **tunables}


def divided(tunables: Mapping[str, Any]) -> dict[str, Any]:
    """With how the sums are divided, where `direct` never does."""
    return {"split": "none", "split_k": 1, **tunables}


def packed(name: str, element: str, role: Any, shape: tuple[int, ...], align: int) -> Operand:
    return Operand(name, element, role, shape, packed_strides(shape), align)
