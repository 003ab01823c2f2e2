"""What nvcc makes of an operator's kernels: one call for all of a module.

Each run of `make test` compiles half of a part of them that has every class of the whole; the rest is `long`.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.text.ptxas_report import Resources
from codegen.text.render_group import render_device, symbols
from tests.operators.harness.declarations import Declarations
from tests.operators.harness.verifications import PATH, Classes, Names, covering
from tests.support.fixtures.compile import LIMITS
from tests.support.kernels.random_cases import seed_of_this_run
from tests.support.run.each_run import SOME_ROWS
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


def reads_tables_ahead_of_copies(kernel: Kernel, code: Code) -> None:
    """Where keys lie in pages. In the main loop the copies of a tile are begun first, then the page numbers of a later
    one are read, then comes a product, in whose time they arrive; no copy waits for a number of its own turn."""
    turn = [kind for kind in events(main_loop(code.body)) if kind in ("copy", "load", "product")]
    assert "load" in turn and "copy" in turn
    stretches = "".join(kind[0] for kind in turn).replace("pp", "p").split("p")
    assert all(re.fullmatch("c*l*", stretch) for stretch in stretches), stretches
    # Whatever is read has a product behind it in the same turn.
    assert not stretches[-1]


def main_loop(body: str) -> str:
    """The last loop of a PTX function that waits for copies."""
    for label in reversed(re.findall(r"^(\$L__BB\w+):", body, re.MULTILINE)):
        _, _, rest = body.partition(f"{label}:\n")
        jump = re.search(rf"^\s*(?:@!?%p\d+ )?bra(?:\.uni)? *\t*{re.escape(label)};", rest, re.MULTILINE)
        if jump and "cp.async.wait" in rest[: jump.end()]:
            return rest[: jump.end()]
    raise AssertionError("no loop waits for copies")


def events(text: str) -> list[str]:
    kinds = {"cp.async.c": "copy", "ld.global": "load", "mma.sync": "product", "cp.async.wait": "wait"}
    names = [name for name, _ in _INSTRUCTION.findall(text)]
    return [kind for name in names for start, kind in kinds.items() if name.startswith(start) and "commit" not in name]


ALIGNED = (by_tensor_cores, by_ldmatrix, copies_16_bytes)
"""Of a product of fp16 whose tiles come in whole vectors."""

TABLES: Mapping[str, Callable[[Declarations], Mapping[str, Any]]] = {
    "claimed": lambda declared: {
        f"{name}, {claim.__name__}": (name, claim)
        for name, claims in declared.machine_code.claims.items()  # type: ignore[union-attr]
        for claim in claims
    },
    "compiled": lambda declared: {name: name for name in declared.machine_code.kernels()},  # type: ignore[union-attr]
}


def classes(kernel: Kernel, claims: Sequence[Claim]) -> Classes:
    """What a kernel is one of, to nvcc: the way that its tunables take; each claim."""
    tunables = kernel.tunables.as_dict()
    way = (*sorted(tunables), *(tunables.get(name) for name in (*PATH, "split")))
    named = [(kernel.operator, "claim", claim.__name__) for claim in claims]
    return {(kernel.operator, way), *named}


def kernels_of(having: Iterable[Declarations]) -> dict[tuple[str, str], Kernel]:
    codes = {declared.operator: declared.machine_code for declared in having if declared.machine_code is not None}
    return {(operator, name): kernel for operator, of in codes.items() for name, kernel in of.kernels().items()}


def of_every_class(having: Sequence[Declarations]) -> Names:
    claims = {
        (declared.operator, name): of
        for declared in having
        if declared.machine_code is not None
        for name, of in declared.machine_code.claims.items()
    }
    kernels = kernels_of(having)
    return covering(
        {key: classes(kernel, claims.get(key, ())) for key, kernel in kernels.items()},
        kernels,
        lambda kernel: operator(kernel.operator).predicted_compile_seconds(kernel),
    )


def of_this_run(having: Sequence[Declarations]) -> Names:
    """Half of those of every class, by its seed, and what a test of the module's own compares."""
    every = sorted(of_every_class(having))
    some = random.Random(f"{seed_of_this_run()} {every}").sample(every, -(-len(every) // 2)) if SOME_ROWS else []
    codes = {declared.operator: declared.machine_code for declared in having if declared.machine_code is not None}
    return {*some, *((operator, name) for operator, of in codes.items() for name in of.compared)}


def repeats(having: Sequence[Declarations]) -> Names:
    """Of a module's kernels those that `make test-long` compiles."""
    return kernels_of(having).keys() - of_this_run(having)


def repeated_claims(having: Sequence[Declarations]) -> Names:
    long = repeats(having)
    return {
        (declared.operator, row)
        for declared in having
        for row, (name, _) in TABLES["claimed"](declared).items()
        if (declared.operator, name) in long
    }


LONG = {"claimed": repeated_claims, "compiled": repeats}


@pytest.fixture(scope="module")
def codes(
    request: pytest.FixtureRequest, toolchain: Toolchain, processes: Processes,
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[str, Codes]:  # fmt: skip
    """By operator and name, of the kernels that this run's selection of tests asks for."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = {_asked(item) for item in items if item.module is request.module and item.originalname in BY_KERNEL}
    every = kernels_of(request.module.DECLARED)
    asked = asked or of_this_run(request.module.DECLARED)
    kernels = {key: kernel for key, kernel in every.items() if key in asked}
    folder = tmp_path_factory.mktemp("codes")
    compiled = codes_of(list(dict.fromkeys(kernels.values())), "sm_90a", folder, toolchain, processes)
    by_operator: dict[str, dict[str, tuple[Kernel, Code]]] = {}
    for (name, words), kernel in kernels.items():
        by_operator.setdefault(name, {})[words] = (kernel, compiled[kernel])
    return by_operator


def test_nvcc_makes_of_it_what_is_claimed(
    declared: Declarations, claimed: tuple[str, Claim], codes: Mapping[str, Codes]
) -> None:
    name, claim = claimed
    claim(*codes[declared.operator][name])


def test_a_kernel_neither_spills_nor_has_a_stack(
    declared: Declarations, compiled: str, codes: Mapping[str, Codes]
) -> None:
    _, code = codes[declared.operator][compiled]
    assert (code.resources.spill_bytes, code.resources.stack_bytes) == (0, 0)


BY_KERNEL = (test_nvcc_makes_of_it_what_is_claimed.__name__, test_a_kernel_neither_spills_nor_has_a_stack.__name__)


def _asked(item: pytest.Function) -> tuple[str, str]:
    """Operator and name of the kernel that a test is about."""
    params = item.callspec.params
    return params["declared"].operator, params["compiled"] if "compiled" in params else params["claimed"][0]
