"""Many kernels as one self-contained .cu: each header once, then one namespace per kernel; and whether a GPU has
confirmed the primitives that such text calls.

Text comes from packaged headers, from numbers, and from enumerations; never from a request.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Literal

from codegen.dtypes import dtype
from codegen.epilogue import chain_type
from codegen.errors import TextError
from codegen.identity import slice_id
from codegen.kernel import Kernel
from codegen.operator import LaunchBounds
from codegen.operators import operator
from codegen.primitives import TURING_SUMS, confirmed_primitives, primitives

DEVICE_HEADERS = (
    "launch.h",
    "device.cuh",
    "convert.cuh",
    "warp.cuh",
    "async_copy.cuh",
    "matrix.cuh",
    "epilogue.cuh",
)
HOST_HEADERS = ("launch.h", "epilogue.cuh", "check_tensors.h")
_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]*\Z")
_TYPE_NAME = re.compile(r"[A-Z][A-Za-z0-9]*\Z")


@dataclass(frozen=True)
class RenderedGroup:
    """`functions` are the kernels as `namespace::function`, `symbols` their mangled names in the cubin."""

    text: str
    functions: frozenset[str]
    symbols: frozenset[str]


@lru_cache(maxsize=64)
def header_text(path: str) -> str:
    """A packaged header of codegen/device, as it is inlined: `#pragma once` means nothing in a main file."""
    return inlined((files("codegen") / "device" / path).read_text(encoding="utf-8"))


def inlined(text: str) -> str:
    """A header's text for the middle of a file."""
    return text.replace("#pragma once\n", "")


@lru_cache(maxsize=64)
def operator_texts(name: str) -> tuple[tuple[str, str], ...]:
    """An operator's files with their text as it is inlined, in order."""
    return tuple((file, inlined(text)) for file, text in operator(name).kernel_texts.items())


def operator_text(name: str) -> str:
    """All of an operator's files as they are inlined."""
    return "".join(text for _, text in operator_texts(name))


def operators_texts(names: Iterable[str]) -> dict[str, str]:
    """The files of several operators as they are inlined, what they share once, by the name that a person sees."""
    texts: dict[str, str] = {}
    for name in names:
        shared = operator(name).shared
        texts |= {file if file in shared else f"{name}/{file}": text for file, text in operator_texts(name)}
    return texts


def render_device(kernels: Sequence[Kernel]) -> RenderedGroup:
    """The .cu that nvcc compiles to a cubin; kernels in the order given, each at most once."""
    parts = [group_headers(operator_names(kernels)), *map(slice_text, kernels)]
    functions = [f"{kernel.namespace}::{name}" for kernel in kernels for name in functions_of(kernel)]
    if len(set(functions)) != len(functions):
        raise TextError("two kernels of the group share a namespace")
    return RenderedGroup("".join(parts), frozenset(functions), frozenset(s for k in kernels for s in symbols(k)))


def group_headers(operators: Iterable[str]) -> str:
    """What a .cu with kernels of these operators begins with."""
    texts = operators_texts(operators).values()
    return "".join(["#define CUKILN_DEVICE 1\n", *map(header_text, DEVICE_HEADERS), *texts])


def functions_of(kernel: Kernel) -> tuple[str, ...]:
    """The kernel's __global__ functions, in the order that `Launch.function` indexes."""
    names = operator(kernel.operator).functions(kernel)
    for name in names:
        if not _IDENTIFIER.match(name):
            raise TextError(f"{name!r} is no name of a kernel function")
    return names


def operator_names(kernels: Iterable[Kernel]) -> list[str]:
    """The operators of the kernels, sorted: their headers' order in a file."""
    return sorted({kernel.operator for kernel in kernels})


def symbols(kernel: Kernel) -> list[str]:
    """Mangled names (Itanium C++ ABI, section 5.1) of the kernel's functions, in the operator's order."""
    op = operator(kernel.operator)
    parameter = "".join(f"{len(part)}{part}" for part in (*op.namespace.split("::"), op.arguments(kernel)))
    space = f"{len(kernel.namespace)}{kernel.namespace}"
    return [f"_ZN{space}{len(name)}{name}EN{parameter}E" for name in functions_of(kernel)]


@lru_cache(maxsize=16384)
def slice_text(kernel: Kernel) -> str:
    """The kernel's own block: its namespace with Config and entry points."""
    op = operator(kernel.operator)
    arguments = f"{op.namespace}::{op.arguments(kernel)}"
    entries = "".join(
        f"__global__ void {_bounds(op.launch_bounds(kernel, name))} {name}(const {arguments} arguments) "
        f"{{ {op.namespace}::{name}<Config>(arguments); }}\n"
        for name in functions_of(kernel)
    )
    return f"namespace {kernel.namespace} {{\n{render_config(kernel)}{entries}}}  // namespace {kernel.namespace}\n"


def _bounds(bounds: LaunchBounds) -> str:
    if bounds.max_registers:
        return f"__maxnreg__({bounds.max_registers})"
    return f"__launch_bounds__({bounds.threads}, {bounds.min_blocks})"


@lru_cache(maxsize=16384)
def slice_digest(kernel: Kernel) -> str:
    """Of everything of the text that can influence this kernel's code, and nothing else of its group."""
    return slice_id(slice_text(kernel), headers_digest(kernel.operator))


@lru_cache(maxsize=64)
def headers_digest(name: str) -> str:
    headers = [*map(header_text, DEVICE_HEADERS), operator_text(name)]
    return hashlib.sha256("\0".join(headers).encode()).hexdigest()


@lru_cache(maxsize=16384)
def render_config(kernel: Kernel) -> str:
    """`struct Config { ... };`: numbers, element types, and one type that only the epilogue's typed nodes decide."""
    config = operator(kernel.operator).config(kernel)
    members = [_constant(name, value) for name, value in config.fields.items()]
    members += [f"using {_type_name(name)} = {dtype(element).cxx};" for name, element in config.types]
    members.append(f"using Epilogue = {chain_type(config.epilogue, config.operand_dtype)};")
    return "struct Config {\n" + "".join(f"  {member}\n" for member in members) + "};\n"


def _type_name(name: str) -> str:
    if not _TYPE_NAME.match(name) or name == "Epilogue":
        raise TextError(f"{name!r} is no name of a Config type")
    return name


def _constant(name: str, value: int | bool) -> str:
    # The last gate before text: a name is an identifier, a value is a Python int or bool and nothing else.
    if not _IDENTIFIER.match(name):
        raise TextError(f"{name!r} is no name of a Config member")
    if type(value) is bool:
        return f"static constexpr bool {name} = {'true' if value else 'false'};"
    if type(value) is int and -(2**31) < value < 2**31:
        return f"static constexpr int {name} = {value};"
    raise TextError(f"{name} = {value!r} is no constant")


def verified_label(operator_name: str, sums: int = TURING_SUMS) -> Literal["cpu", "cpu-unconfirmed"]:
    """`cpu-unconfirmed` while `device/confirmed.json` lacks a primitive that the operator's kernels use, has it with
    another text than today's, or of a GPU whose tensor cores add otherwise than those of `sums`."""
    return "cpu" if primitives_of(operator_name) <= confirmed_primitives(sums) else "cpu-unconfirmed"


@cache
def primitives_of(operator_name: str) -> frozenset[str]:
    """The primitives that an operator's kernels, epilogue included, may call."""
    used = re.findall(r"\b\w+\b", operator_text(operator_name) + header_text("epilogue.cuh"))
    return primitives() & set(used)
