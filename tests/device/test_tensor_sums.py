"""Sums of the emulated tensor cores are, bit by bit, those of MMA-Sim (PyPI's `mmasim`), on numbers of every kind."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.primitives import HOPPER_SUMS, TURING_SUMS, tensor_sums
from codegen.targets import architectures
from tests.gpu.run_primitives import CPU_FLAGS, CPU_HEADERS, compile_in, texts_of
from tests.support.run.each_run import some_each_run

torch = pytest.importorskip("torch")
pytest.importorskip("mmasim")

TILES = 120  # of each kind of numbers; a tile has 128 sums
Words = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Product:
    """`shape`: what PTX and MMA-Sim call it; `kind`: of the operands; `edge`: the exponents between which most random
    operands lie, those of a type with more exponents being products in the range of fp32."""

    shape: str
    cxx: str
    kind: str
    k: int
    edge: tuple[int, int]

    @property
    def half_sums(self) -> bool:
        return self.shape.endswith("f16.f16.f16.f16")


PRODUCTS = {
    "f16": Product("m16n8k16.f32.f16.f16.f32", "Halves, ToFloat, 16", "float16", 16, (-16, 10)),
    "f16_k8": Product("m16n8k8.f32.f16.f16.f32", "Halves, ToFloat, 8", "float16", 8, (-16, 10)),
    "f16_f16": Product("m16n8k16.f16.f16.f16.f16", "Halves, ToHalf, 16", "float16", 16, (-16, 4)),
    "bf16": Product("m16n8k16.f32.bf16.bf16.f32", "BFloats, ToFloat, 16", "bfloat16", 16, (-40, 40)),
    "tf32": Product("m16n8k8.f32.tf32.tf32.f32", "TensorFloats, ToFloat, 8", "float32", 8, (-40, 40)),
}
# MMA-Sim's names, with an architecture of each.
GENERATIONS = {
    "Turing": "sm_75",
    "Ampere": "sm_80",
    "Ada Lovelace": "sm_89",
    "Hopper": "sm_90",
    "Blackwell": "sm_100",
    "RTX Blackwell": "sm_120",
}
# The others differ in nothing but the name, in MMA-Sim too.
CASES = [(generation, name) for generation in ("Ampere", "Hopper") for name in PRODUCTS]
OTHERS = [
    (generation, name)
    for generation in GENERATIONS
    for name in PRODUCTS
    if (generation, name) not in CASES and (generation != "Turing" or name == "f16_k8")
]

_ENTRY = """
#define EXPORT extern "C" __attribute__((visibility("default")))
template <class Type, class Target, int K>
void add_tiles(float* d, const typename Type::Raw* a, const typename Type::Raw* b, int tiles) {{
  for (int i = 0; i < tiles; ++i) {{
    float left[16][K], right[K][8], sums[16][8];
    Type::widen(a + i * 16 * K, left[0], 16 * K);
    Type::widen(b + i * K * 8, right[0], K * 8);
    memcpy(sums, d + i * 128, sizeof(sums));
    cukiln::cpu::add_products<Type, Target, K>(sums, left, right);
    memcpy(d + i * 128, sums, sizeof(sums));
  }}
}}
using namespace cukiln::cpu;
{entries}
"""


@pytest.fixture(scope="module")
def emulations(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ctypes.CDLL]:
    """By whose tensor cores add: a library with an entry for each product."""
    folder = tmp_path_factory.mktemp("sums")
    return {sums: _built(folder, sums) for sums in (TURING_SUMS, HOPPER_SUMS)}


def _built(folder: Path, sums: int) -> ctypes.CDLL:
    entries = "".join(
        f"EXPORT void {name}(float* d, const void* a, const void* b, int tiles) {{ add_tiles<{product.cxx}>(d, "
        f"static_cast<const {product.cxx.split(',')[0]}::Raw*>(a), "
        f"static_cast<const {product.cxx.split(',')[0]}::Raw*>(b), tiles); }}\n"
        for name, product in PRODUCTS.items()
    )
    headers = CPU_HEADERS[: CPU_HEADERS.index("cpu/tensor_sums.h") + 1]
    defines = (
        f"#define CUKILN_TENSOR_SUMS {sums}\n#define CUKILN_DEVICE 1\n#define CUKILN_HOST 1\n#define CUKILN_CPU 1\n"
    )
    (folder / f"{sums}.cpp").write_text(defines + texts_of(headers) + _ENTRY.format(entries=entries), encoding="utf-8")
    compile_in(["g++", *CPU_FLAGS, f"{sums}.cpp", "-o", f"{sums}.so"], folder)
    return ctypes.CDLL(str(folder / f"{sums}.so"))


@pytest.fixture(scope="module")
def model() -> Iterator[Callable[[str, str], Any]]:
    """MMA-Sim's, by generation and shape. Its multiplication of doubles, which no test here uses, compiles a library
    against PyTorch on import: it is left out."""
    name, threads = "mmasim.arithmetic.fma", torch.get_num_threads()
    missing = name not in sys.modules
    if missing:
        sys.modules[name] = ModuleType(name)
    import mmasim.arithmetic

    if missing:
        mmasim.arithmetic.fma = sys.modules[name]
    from mmasim.nv_ptx.sim import MMA

    torch.set_num_threads(1)
    yield MMA
    torch.set_num_threads(threads)


def words_of(numbers: NDArray[np.float64], kind: str) -> Words:
    """The bits of numbers, rounded to the type."""
    with np.errstate(over="ignore"):
        rounded = torch.from_numpy(numbers.astype(np.float32)).to(getattr(torch, kind))
    return _unsigned(rounded)


def _unsigned(tensor: Any) -> Words:
    short = tensor.element_size() == 2
    words: Words = tensor.view(torch.int16 if short else torch.int32).numpy().view(np.uint16 if short else np.uint32)
    return words


def tensor_of(words: Words, kind: str) -> Any:
    signed = words.view(np.int16 if words.dtype == np.uint16 else np.int32).copy()
    return torch.from_numpy(signed).view(getattr(torch, kind))


def any_bits(random: np.random.Generator, shape: tuple[int, ...], kind: str, specials: bool) -> Words:
    """Any bits at all; without `specials` neither infinities nor NaN."""
    word, exponent = {"float16": (np.uint16, 0x7C00), "bfloat16": (np.uint16, 0x7F80)}.get(
        kind, (np.uint32, 0x7F800000)
    )
    words = random.integers(0, np.iinfo(word).max, shape, dtype=word, endpoint=True)
    field = word(exponent)
    return words if specials else np.where((words & field) == field, words & ~field, words)


Fragment = Callable[[np.random.Generator, tuple[int, ...], str, tuple[int, int]], Words]


def _spread(random: np.random.Generator, shape: tuple[int, ...], kind: str, edge: tuple[int, int]) -> Words:
    """Of every size, with zeros of both signs."""
    numbers = random.standard_normal(shape) * np.exp2(random.uniform(*edge, shape))
    numbers[random.random(shape) < 0.2] = 0.0
    numbers[random.random(shape) < 0.1] = -0.0
    return words_of(numbers, kind)


def _special(random: np.random.Generator, shape: tuple[int, ...], kind: str, edge: tuple[int, int]) -> Words:
    """Normals among which are infinities, NaN of any bits and the largest numbers."""
    words = _spread(random, shape, kind, edge)
    most = torch.finfo(getattr(torch, kind)).max
    values = random.choice([np.inf, -np.inf, np.nan, most, -most], shape)
    words = np.where(random.random(shape) < 0.02, words_of(values, kind), words)
    return np.where(random.random(shape) < 0.01, any_bits(random, shape, kind, True), words)


_TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}
FRAGMENTS: dict[str, Fragment] = {
    "normal": lambda random, shape, kind, _: words_of(random.standard_normal(shape), kind),
    "positive": lambda random, shape, kind, _: words_of(random.random(shape), kind),
    "spread": _spread,
    "subnormal": lambda random, shape, kind, _: words_of(random.integers(-99, 100, shape) * _TINY[kind], kind),
    "large": lambda random, shape, kind, edge: words_of(random.standard_normal(shape) * 2.0 ** (1.5 * edge[1]), kind),
    "of any finite bits": lambda random, shape, kind, _: any_bits(random, shape, kind, False),
    "of any bits": lambda random, shape, kind, _: any_bits(random, shape, kind, True),
    "special": _special,
    "largest significand": lambda _, shape, kind, __: words_of(np.full(shape, 2 - 2.0**-7), kind),
}
# What is multiplied, and to what it is added.
KINDS = [
    ("normal", "normal"),
    ("positive", "positive"),
    ("spread", "spread"),
    ("spread", "subnormal"),
    ("subnormal", "subnormal"),
    ("subnormal", "normal"),
    ("large", "large"),
    ("of any finite bits", "of any finite bits"),
    ("of any bits", "special"),
    ("special", "special"),
    ("largest significand", "largest significand"),
]


def differing(emulation: Any, model: Any, product: Product, random: np.random.Generator, kinds: tuple[str, str]) -> str:
    """The first sum that differs from the model's, "" where none does."""
    of_sum = "float16" if product.half_sums else "float32"
    multiplied, added = (FRAGMENTS[kind] for kind in kinds)
    a, b = (
        multiplied(random, (TILES, *shape), product.kind, product.edge) for shape in ((16, product.k), (product.k, 8))
    )
    d = added(random, (TILES, 16, 8), of_sum, product.edge)
    rows = tensor_of(a, product.kind)[:, :, None, :].expand(-1, -1, 8, -1)
    columns = tensor_of(b, product.kind).transpose(1, 2)[:, None].expand(-1, 16, -1, -1)
    sums = tensor_of(d, of_sum)
    expected = _unsigned(model.dpa(rows.clone(), columns.clone(), sums).float())
    made = sums.float().contiguous().numpy().copy()
    emulation(*(ctypes.c_void_p(np.ascontiguousarray(each).ctypes.data) for each in (made, a, b)), TILES)
    got = made.view(np.uint32)
    wrong = np.argwhere(got != expected)
    if not len(wrong):
        return ""
    first = tuple(wrong[0])
    return f"{kinds}: {len(wrong)} sums differ; that at {first} is {got[first]:#x}, the model's {expected[first]:#x}"


def compared(
    emulations: dict[int, ctypes.CDLL], model: Callable[[str, str], Any], generation: str, name: str
) -> list[str]:
    product = PRODUCTS[name]
    emulation = getattr(emulations[tensor_sums(GENERATIONS[generation])], name)
    random = np.random.default_rng([*generation.encode(), *name.encode()])
    its_model = model(generation, product.shape)
    assert TILES * 128 * len(KINDS) >= 100_000
    return [each for kinds in KINDS if (each := differing(emulation, its_model, product, random, kinds))]


@pytest.mark.parametrize(("generation", "name"), some_each_run(CASES, 5))
def test_sums_are_those_of_the_model_to_the_bit(
    generation: str, name: str, emulations: dict[int, ctypes.CDLL], model: Callable[[str, str], Any]
) -> None:
    assert compared(emulations, model, generation, name) == []


@pytest.mark.long
@pytest.mark.parametrize(("generation", "name"), OTHERS)
def test_sums_of_every_other_generation_are_too(
    generation: str, name: str, emulations: dict[int, ctypes.CDLL], model: Callable[[str, str], Any]
) -> None:
    assert compared(emulations, model, generation, name) == []


def test_one_way_of_adding_does_not_pass_for_the_other(
    emulations: dict[int, ctypes.CDLL], model: Callable[[str, str], Any]
) -> None:
    random = np.random.default_rng(1)
    for generation, other in (("Ampere", HOPPER_SUMS), ("Hopper", TURING_SUMS)):
        for name, product in PRODUCTS.items():
            wrong = getattr(emulations[other], name)
            assert differing(wrong, model(generation, product.shape), product, random, ("spread", "spread")) != ""


def test_every_architecture_has_one_of_the_two_ways() -> None:
    assert {target.tensor_sums for target in architectures().values()} == {TURING_SUMS, HOPPER_SUMS}
    assert {name: target.tensor_sums for name, target in architectures().items()} == {
        name: HOPPER_SUMS if target.capability >= 90 else TURING_SUMS for name, target in architectures().items()
    }
