"""The same text through nvcc of CUDA 13 and through CUDA 12's compiler: of every operator, kernels on tensor cores and
on CUDA cores. `make test` compiles the cheapest of each of some operators, in one file by each compiler; `make
test-long` all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from tests.operators.harness.every_operator import FOLDER, declared_in
from tests.operators.harness.machine_code import Claim, Code, codes_of
from tests.support.run.each_run import rows_using, some_each_run
from workers.compile.toolchain import Toolchain, find_toolchain
from workers.processes.processes import Processes

# What kernels are written for, and no compiler may replace: products on tensor cores, copies past the registers,
# exchanges within a warp, atomics, barriers.
CHOSEN = re.compile(r"(mma|ldmatrix|cp\.async|shfl|vote|atom|red|bar|barrier)[.a-z].*")
Codes = Mapping[Kernel, Code]


def claimed() -> dict[str, dict[Kernel, Sequence[Claim]]]:
    """By operator, the kernels of all modules with what is claimed of each."""
    by_operator: dict[str, dict[Kernel, Sequence[Claim]]] = {}
    for declared in declared_in(sorted(FOLDER.glob("*/test_*.py"))):
        if declared.machine_code is not None:
            claims = declared.machine_code.claims
            kernels = declared.machine_code.kernels().items()
            by_operator.setdefault(declared.operator, {}).update({k: claims.get(name, ()) for name, k in kernels})
    return by_operator


CLAIMED = claimed()


def cheapest(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The one that compiles fastest, of those on tensor cores, which have copies of their own, and of the others."""

    def seconds(kernel: Kernel) -> float:
        return operator(kernel.operator).predicted_compile_seconds(kernel)

    kinds = ([k for k in kernels if ("copy" in k.tunables.as_dict()) == has_copies] for has_copies in (True, False))
    return [min(of_kind, key=seconds) for of_kind in kinds if of_kind]


FEW = {name: cheapest(list(kernels)) for name, kernels in CLAIMED.items()}


@pytest.fixture(scope="module")
def cuda_12(processes: Processes) -> Toolchain:
    return find_toolchain(processes, cuda=12)


def compiled(
    kernels: Sequence[Kernel], tools: tuple[Toolchain, Toolchain], processes: Processes, folder: Path
) -> tuple[Codes, Codes]:
    """By both, all in one file."""
    by_both = []
    for toolchain in tools:
        place = folder / toolchain.device_compiler.name
        place.mkdir()
        by_both.append(codes_of(kernels, "sm_90a", place, toolchain, processes))
    return by_both[0], by_both[1]


@pytest.fixture(scope="module")
def few(
    request: pytest.FixtureRequest, toolchain: Toolchain, cuda_12: Toolchain, processes: Processes,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Codes, Codes]:  # fmt: skip
    kernels = [kernel for row in rows_using("few", request) for kernel in FEW[row["name"]]]
    return compiled(kernels, (toolchain, cuda_12), processes, tmp_path_factory.mktemp("both"))


def require_alike(kernel: Kernel, claims: Sequence[Claim], codes: tuple[Codes, Codes]) -> None:
    ours, other = (each[kernel] for each in codes)
    for claim in claims:
        claim(kernel, other)
    assert (other.resources.spill_bytes, other.resources.stack_bytes) == (0, 0)
    chosen = [{name for name in code.instructions if CHOSEN.match(name)} for code in (ours, other)]
    assert chosen[0] == chosen[1]
    assert other.resources.static_shared_bytes == ours.resources.static_shared_bytes


@pytest.mark.parametrize("name", some_each_run(sorted(FEW), 4))
def test_cuda_12_makes_of_it_what_is_claimed_and_what_cuda_13_makes(name: str, few: tuple[Codes, Codes]) -> None:
    for kernel in FEW[name]:
        require_alike(kernel, CLAIMED[name][kernel], few)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(CLAIMED))
def test_cuda_12_makes_of_all_kernels_that_are_declared_what_is_claimed(
    name: str, toolchain: Toolchain, cuda_12: Toolchain, processes: Processes, tmp_path: Path
) -> None:
    codes = compiled(list(CLAIMED[name]), (toolchain, cuda_12), processes, tmp_path)
    for kernel, claims in CLAIMED[name].items():
        require_alike(kernel, claims, codes)
