"""Every barrier and bounds check of matmul's kernel.cuh is needed: the CPU execution notices when one is gone."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from tests.cpu_helpers import loaded, matmul_kernel, verify
from tests.mutants import Mutant, mutants, write_operator

# Here the vectors of a tile are not a multiple of the threads, so that some threads have nothing to bring.
UNEVEN = {"tile_m": 16, "tile_n": 64, "thread_m": 2, "thread_n": 4, "padding": 4}
EVEN: dict[str, int] = {}
# Every layout, alignment class, number of stages and of fragment buffers, each pair of these at least once.
CONFIGS: tuple[dict[str, Any], ...] = (
    {"layout": "nn", "align": 4, "stages": 1, "fragments": 1, **EVEN},
    {"layout": "nn", "align": 1, "stages": 2, "fragments": 2, "epilogue": ("bias.n",), **UNEVEN},
    {"layout": "nt", "align": 1, "stages": 1, "fragments": 2, **EVEN},
    {"layout": "nt", "align": 4, "stages": 2, "fragments": 1, **UNEVEN},
    {"layout": "tn", "align": 4, "stages": 2, "fragments": 2, "epilogue": ("bias.m", "gelu"), **EVEN},
    {"layout": "tn", "align": 1, "stages": 1, "fragments": 1, **UNEVEN},
    {"layout": "tt", "align": 1, "stages": 2, "fragments": 1, "epilogue": ("residual",), **EVEN},
    {"layout": "tt", "align": 4, "stages": 1, "fragments": 2, **UNEVEN},
)
Verdicts = Mapping[str, list[dict[str, str]]]


def kernels_of(name: str) -> list[Kernel]:
    return [matmul_kernel(operator=name, **config) for config in CONFIGS]


def is_uneven(kernel: Kernel) -> bool:
    """Whether some thread has no vector of a tile to bring: else the compiler drops that bounds check."""
    t, s = kernel.tunables.as_dict(), kernel.signature_dict
    threads = operator("matmul").threads(kernel)
    vectors = [
        int(t[f"tile_{axis}"]) * int(t["tile_k"]) // s[f"align_{name}"] for axis, name in (("m", "a"), ("n", "b"))
    ]
    return any(count % threads for count in vectors)


def reaches(site: str, kernel: Kernel) -> bool:
    """Whether the kernel's Config instantiates the mutated line at all."""
    if site.startswith("bounds store vector"):
        return is_uneven(kernel)
    if site == "barrier 1 deleted":  # the one inside `if constexpr (C::stages == 1)`
        return kernel.tunables.get("stages") == 1
    return True


def all_mutants() -> list[Mutant]:
    return list(mutants(operator("matmul").kernel_text))


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """By site and config; the unmutated kernel is site "none". One g++ file and one verification for all."""
    folder = tmp_path_factory.mktemp("mutants")
    names = {"none": "matmul"}
    folders = []
    for number, mutant in enumerate(all_mutants()):
        names[mutant.site] = f"matmul_mutant_{number}"
        folders.append(write_operator(folder / str(number), "matmul", "Matmul", names[mutant.site], mutant.text))
    kernels = {site: kernels_of(name) for site, name in names.items()}
    with loaded(folders):
        judged = {verdict.kernel_id: verdict for verdict in verify([k for group in kernels.values() for k in group])}
    found = {
        site: [{"verdict": judged[kernel.id].verdict, "message": judged[kernel.id].message} for kernel in group]
        for site, group in kernels.items()
    }
    listed = folder / "mutants.json"
    listed.write_text(json.dumps({"configs": CONFIGS, "verdicts": found}, indent=1))
    sys.stdout.write(f"verdicts and messages: {listed}\n")
    for site, results in found.items():
        sys.stdout.write(f"{site}: {', '.join(result['verdict'] for result in results)}\n")
    return found


def test_the_kernel_as_it_is_passes_in_every_config(verdicts: Verdicts) -> None:
    assert [found["verdict"] for found in verdicts["none"]] == ["ok"] * len(CONFIGS), verdicts["none"]


@pytest.mark.parametrize("site", [mutant.site for mutant in all_mutants()])
def test_every_mutant_is_caught(site: str, verdicts: Verdicts) -> None:
    reached = [index for index, kernel in enumerate(kernels_of("matmul")) if reaches(site, kernel)]
    assert reached, f"no config reaches the line of {site!r}: add one"
    survived = [CONFIGS[index] for index in reached if verdicts[site][index]["verdict"] == "ok"]
    if "off by one" in site:
        # In some layouts one element too many lands in padding that nobody reads; in none may it always do so.
        assert len(survived) < len(reached), verdicts[site]
    else:
        assert not survived, verdicts[site]


def test_every_barrier_and_every_check_has_a_mutant() -> None:
    text = operator("matmul").kernel_text
    sites = [mutant.site for mutant in all_mutants()]
    assert len([s for s in sites if s.startswith("barrier")]) == text.count("__syncthreads();") >= 3
    assert len([s for s in sites if s.endswith("deleted") and s.startswith("bounds")]) == text.count("// bounds: ") >= 5
    assert text.count("in_bounds(") == text.count("// bounds: ") + 1, "a bounds check has no '// bounds: name'"


@pytest.mark.parametrize("line", ["if (in_bounds(i, n)) {", "if (i < n) {  // bounds: row"])
def test_a_check_without_a_name_and_a_name_without_a_check_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="belong on one line"):
        list(mutants(line))
