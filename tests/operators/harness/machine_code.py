"""What nvcc makes of an operator's kernels: one call for all of a module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.text.ptxas_report import Resources
from codegen.text.render_group import render_device, symbols
from tests.operators.harness.declarations import Declarations
from tests.support.fixtures.compile import LIMITS
from workers.compile.compile_file import PTX, FileCompiler
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes

_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]*)(?: ([^;]*))?;", re.MULTILINE)


@dataclass(frozen=True)
class Code:
    """Of one of a kernel's functions: how often each instruction stands in its PTX (cp.async with its bytes); ptxas'
    report."""

    instructions: Counter[str]
    resources: Resources
    body: str

    def count(self, start: str) -> int:
        return sum(number for name, number in self.instructions.items() if name.startswith(start))


Claim = Callable[[Kernel, Code], object]
Codes = Mapping[str, tuple[Kernel, Code]]


def codes_of(
    kernels: Sequence[Kernel],
    arch: str,
    folder: Path,
    toolchain: Toolchain,
    processes: Processes,
    function: str = "run",
) -> dict[Kernel, Code]:
    group = render_device(kernels)
    device = FileCompiler(folder, toolchain, processes, LIMITS).compile_device(group.text, arch, group.symbols)
    parts = re.split(r"^\.visible \.entry (\w+)\(", (folder / PTX).read_text(), flags=re.MULTILINE)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    names = {kernel: symbols(kernel)[operator(kernel.operator).functions(kernel).index(function)] for kernel in kernels}
    return {
        kernel: Code(instructions(bodies[name]), device.resources[name], bodies[name]) for kernel, name in names.items()
    }


def instructions(body: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, arguments in _INSTRUCTION.findall(body):
        # The size of an asynchronous copy is an operand: cp.async.cg.shared.global [to], [from], 16, wanted.
        size = f" {arguments.split(', ')[2]}" if re.match(r"cp\.async\.c[ag]\.", name) else ""
        counts[name + size] += 1
    return counts


# ---- claims


def by_tensor_cores(kernel: Kernel, code: Code) -> None:
    assert code.count("mma.sync") > 0


def by_ldmatrix(kernel: Kernel, code: Code) -> None:
    assert code.count("ldmatrix") > 0


def without_ldmatrix(kernel: Kernel, code: Code) -> None:
    assert code.count("ldmatrix") == 0


def copies_16_bytes(kernel: Kernel, code: Code) -> None:
    copies = {instruction for instruction in code.instructions if re.match(r"cp\.async\.c[ag]\.", instruction)}
    assert copies == {"cp.async.cg.shared.global 16"}


def on_cuda_cores(kernel: Kernel, code: Code) -> None:
    assert code.count("mma.sync") == 0 and code.count("fma.rn.f32") > 0


def loads_16_bytes(kernel: Kernel, code: Code) -> None:
    assert code.count("ld.global.nc.v4") > 0


ALIGNED = (by_tensor_cores, by_ldmatrix, copies_16_bytes)
"""Of a product of fp16 whose tiles come in whole vectors."""

TABLES: Mapping[str, Callable[[Declarations], Mapping[str, Any]]] = {
    "claimed": lambda declared: {
        f"{name}, {claim.__name__}": (name, claim)
        for name, claims in declared.machine_code.claims.items()  # type: ignore[union-attr]
        for claim in claims
    }
}


@pytest.fixture(scope="module")
def codes(
    request: pytest.FixtureRequest, toolchain: Toolchain, processes: Processes,
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[str, Codes]:  # fmt: skip
    """By operator and name."""
    having = [declared for declared in request.module.DECLARED if declared.machine_code is not None]
    asked = {declared.operator: declared.machine_code.kernels() for declared in having}
    every = list(dict.fromkeys(kernel for kernels in asked.values() for kernel in kernels.values()))
    compiled = codes_of(every, "sm_90a", tmp_path_factory.mktemp("codes"), toolchain, processes)
    return {
        name: {words: (kernel, compiled[kernel]) for words, kernel in kernels.items()}
        for name, kernels in asked.items()
    }


def test_nvcc_makes_of_it_what_is_claimed(
    declared: Declarations, claimed: tuple[str, Claim], codes: Mapping[str, Codes]
) -> None:
    name, claim = claimed
    claim(*codes[declared.operator][name])


def test_no_kernel_spills_or_has_a_stack(declared: Declarations, codes: Mapping[str, Codes]) -> None:
    of_operator = codes[declared.operator]
    spilled = {
        name: (code.resources.spill_bytes, code.resources.stack_bytes) for name, (_, code) in of_operator.items()
    }
    assert spilled == dict.fromkeys(of_operator, (0, 0))
