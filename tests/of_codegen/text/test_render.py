"""Rendering: what a group's text holds, and that nothing but typed values reaches it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from codegen.epilogue import chain_type, structures
from codegen.errors import TextError
from codegen.operator import Config
from codegen.operators import operator
from codegen.operators.matmul import Matmul
from codegen.text.render_group import header_text, operator_text, render_config, render_device, slice_text, symbols
from codegen.text.scan_functions import assert_unique, scan_functions
from tests.support.fixtures.codegen import EVERY_NODE, default_candidate, kernels, matmul
from tests.support.fixtures.compile import PROBE, probe


def test_a_kernel_s_block_is_exactly_this() -> None:
    epilogue = [{"op": "bias"}, {"op": "gelu"}, {"op": "cast", "dtype": "float16"}]
    candidate = default_candidate(matmul(m=1024, n=1024, k=1024, layout="nt", epilogue=epilogue, ldc=1025))
    name = candidate.kernel.namespace
    assert re.fullmatch(r"kernel_[0-9a-f]{16}", name)
    assert (
        slice_text(candidate.kernel)
        == f"""namespace {name} {{
struct Config {{
  static constexpr bool tensor_cores = false;
  static constexpr bool a_transposed = false;
  static constexpr bool b_transposed = true;
  static constexpr int align_a = 4;
  static constexpr int align_b = 4;
  static constexpr int align_c = 1;
  static constexpr int tile_m = 64;
  static constexpr int tile_n = 64;
  static constexpr int tile_k = 16;
  static constexpr int thread_m = 8;
  static constexpr int thread_n = 8;
  static constexpr int warp_m = 4;
  static constexpr int stages = 2;
  static constexpr int fragments = 2;
  static constexpr int padding = 4;
  static constexpr int unroll_k = 8;
  static constexpr int split = 0;
  static constexpr int threads = 64;
  using Input = float;
  using Accumulator = float;
  using Output = float;
  using Epilogue = cukiln::Chain<cukiln::Bias<cukiln::Axis::n, float>, cukiln::Gelu, cukiln::CastHalf>;
}};
__global__ void __launch_bounds__(64, 1) run(const cukiln::matmul::Arguments arguments) {{ CALL }}
}}  // namespace {name}
""".replace("CALL", "cukiln::matmul::run<Config>(arguments);")
    )


def test_headers_come_once_and_every_kernel_once() -> None:
    several = kernels(5)
    rendered = render_device(several)
    assert rendered.text.startswith("#define CUKILN_DEVICE 1\n")
    for part in (
        *map(header_text, ("launch.h", "device.cuh", "epilogue.cuh")),
        operator_text("matmul"),
        *map(slice_text, several),
    ):
        assert rendered.text.count(part) == 1
    assert "#pragma once" not in rendered.text
    assert rendered.functions == {f"{kernel.namespace}::run" for kernel in several}
    assert rendered.symbols == {symbol for kernel in several for symbol in symbols(kernel)}
    assert_unique(rendered.text, rendered.functions)


def test_a_kernel_s_block_does_not_depend_on_its_group() -> None:
    several = kernels(4)
    alone = render_device([several[2]]).text
    assert slice_text(several[2]) in alone
    assert slice_text(several[2]) in render_device(several[::-1]).text


def test_symbols_are_mangled_by_the_itanium_abi() -> None:
    kernel = kernels(1)[0]
    assert symbols(kernel) == [f"_ZN23{kernel.namespace}3runEN6cukiln6matmul9ArgumentsE"]


def test_a_kernel_twice_is_refused() -> None:
    kernel = kernels(1)[0]
    with pytest.raises(TextError, match="share a namespace"):
        render_device([kernel, kernel])


@pytest.mark.parametrize("node", EVERY_NODE, ids=lambda node: "-".join(map(str, node.values())))
def test_every_node_s_type_exists_in_the_headers(node: dict[str, Any]) -> None:
    chain = matmul(epilogue=[node]).epilogue
    chain_of_one = chain_type(structures(chain))
    name = chain_of_one.removeprefix("cukiln::Chain<cukiln::").split("<")[0].rstrip(">")
    assert re.search(rf"struct {name} [:{{]", header_text("epilogue.cuh"))
    assert f"using Epilogue = {chain_of_one};" in render_config(default_candidate(matmul(epilogue=[node])).kernel)


def test_scalars_of_the_chain_are_not_in_the_text() -> None:
    kernel = default_candidate(matmul(epilogue=[{"op": "scale", "value": 12345.5}])).kernel
    assert "12345" not in slice_text(kernel)


@pytest.mark.parametrize(
    "field",
    [{"tile_m; evil": 1}, {"Tile": 1}, {"tile_m": 2**31}, {"tile_m": 1.0}, {"tile_m": "1; } void evil() {"}],
)
def test_only_numbers_and_identifiers_reach_the_text(field: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels(1, layout="tt")[0]
    config = operator("matmul").config(kernel)
    monkeypatch.setattr(Matmul, "config", lambda self, kernel: replace(config, fields=field))
    render_config.cache_clear()
    with pytest.raises(TextError):
        render_config(kernel)
    render_config.cache_clear()


def test_an_epilogue_outside_the_enumeration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels(1, layout="tt")[0]
    monkeypatch.setattr(Matmul, "config", lambda self, kernel: Config({}, ("Gelu> evil; //",)))
    render_config.cache_clear()
    with pytest.raises(KeyError):
        render_config(kernel)
    render_config.cache_clear()


def test_the_scanner_classifies_all_packaged_headers() -> None:
    names = {function.name for function in scan_functions(render_device(kernels(1)).text)}
    assert {"cukiln::fma", "cukiln::load_global", "cukiln::matmul::run", "cukiln::matmul::bind"} <= names


@pytest.mark.parametrize(
    ("way", "functions"),
    [("copy", ["run"]), ("workspace", ["first", "second"]), ("atomic", ["clear", "first", "second"])],
)
def test_each_kernel_has_the_functions_that_its_operator_names(way: str, functions: list[str]) -> None:
    kernel = probe(way=way)
    rendered = render_device([kernel, probe(2)])
    entry = re.compile(r"\b(\w+)\(const cukiln::probe::Arguments arguments\) { cukiln::probe::(\w+)<Config>")
    assert entry.findall(slice_text(kernel)) == [(name, name) for name in functions]
    assert rendered.functions == {
        *(f"{kernel.namespace}::{name}" for name in functions),
        *(f"{probe(2).namespace}::{name}" for name in ("first", "second")),
    }
    assert symbols(kernel) == [
        f"_ZN23{kernel.namespace}{len(name)}{name}EN6cukiln5probe9ArgumentsE" for name in functions
    ]
    assert_unique(rendered.text, rendered.functions)


def test_a_limit_on_registers_stands_instead_of_launch_bounds() -> None:
    free, limited = slice_text(probe()), slice_text(probe(maxnreg=32))
    assert "__maxnreg__" not in free
    assert free.count("__launch_bounds__(64, 1)") == 2
    assert "__global__ void __maxnreg__(32) first(const" in limited
    assert "__global__ void __launch_bounds__(64, 1) second(const" in limited  # it is a function's own
    assert_unique(render_device([probe(maxnreg=32)]).text, render_device([probe(maxnreg=32)]).functions)


@pytest.mark.parametrize(
    ("types", "operand_dtype", "lines"),
    [
        ((("Input", "float16"), ("Output", "int8")), "float16",
         ["using Input = cukiln::Half;", "using Output = signed char;",
          "using Epilogue = cukiln::Chain<cukiln::Bias<cukiln::Axis::n, cukiln::Half>, "
          "cukiln::Residual<cukiln::Half>>;"]),
        ((("Accumulator", "int32"),), "bfloat16",
         ["using Accumulator = int;", "using Epilogue = cukiln::Chain<cukiln::Bias<cukiln::Axis::n, cukiln::BFloat16>, "
          "cukiln::Residual<cukiln::BFloat16>>;"]),
    ],
)  # fmt: skip
def test_element_types_are_rendered_by_name(
    types: tuple[tuple[str, str], ...], operand_dtype: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rendered_with(Config({}, ("bias.n", "residual"), types, operand_dtype), monkeypatch) == [
        "struct Config {", *(f"  {line}" for line in lines), "};",
    ]  # fmt: skip


@pytest.mark.parametrize("types", [(("input", "float16"),), (("Evil; //", "float16"),), (("Epilogue", "float16"),)])
def test_a_type_has_a_name_of_its_own(types: tuple[tuple[str, str], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TextError, match="is no name of a Config type"):
        rendered_with(Config({}, (), types), monkeypatch)


def test_a_dtype_outside_the_enumeration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        rendered_with(Config({}, (), (("Input", "float16; evil"),)), monkeypatch)


@pytest.mark.parametrize("name", ["run; evil", "Run", "", "a b"])
def test_a_function_has_the_name_of_an_identifier(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(PROBE), "functions", lambda self, kernel: ("first", name))
    with pytest.raises(TextError, match="is no name of a kernel function"):
        render_device([probe(63)])


def rendered_with(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a kernel's Config, if its operator gave this one."""
    monkeypatch.setattr(type(PROBE), "config", lambda self, kernel: config)
    render_config.cache_clear()
    try:
        return render_config(probe()).splitlines()
    finally:
        render_config.cache_clear()
