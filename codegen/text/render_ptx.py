"""A kernel's PTX as one C++ file for g++: its functions as nvcc made them, translated, behind the entry points of any
library for the CPU, with the operator's own launch code.

The file holds no runtime: `render_ptx_runtime` is a file of its own, which is compiled once and linked with each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codegen.errors import TextError
from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.primitives import TURING_SUMS
from codegen.ptx.module import Module
from codegen.ptx.translate import Translation, translate
from codegen.text.render_cpu import CPU_HEADERS, RUNTIME_HEADERS, entries, header
from codegen.text.render_group import (
    DEVICE_HEADERS,
    functions_of,
    header_text,
    operator_names,
    operators_texts,
    render_config,
    slice_text,
    symbols,
)

PTX_HEADERS = ("ptx/values.h", "ptx/approximations.h", "ptx/machine.h")
_MATRICES = ("cpu/warp.h", "cpu/tensor_sums.h", "cpu/matrix.h")  # the runtime's, whose text is long
_DEFINES = "#define CUKILN_HOST 1\n#define CUKILN_CPU 1\n"


@dataclass(frozen=True)
class PtxText:
    """The C++ file of a kernel, and what of its functions a run has more than one way to compute."""

    text: str
    functions: tuple[Translation, ...]

    @property
    def fusible(self) -> int:
        return sum(function.fusible for function in self.functions)

    @property
    def approximate(self) -> int:
        return sum(function.approximate for function in self.functions)

    @property
    def is_loose(self) -> bool:
        """Whether it has products and sums without a rounding in their names."""
        return all(sum(function.loose[place] for function in self.functions) for place in (0, 1))

    @property
    def tensor(self) -> int:
        return sum(function.tensor for function in self.functions)


def render_ptx_runtime(sums: int = TURING_SUMS) -> str:
    """The C++ text that runs them. `sums`: whose tensor cores add (`Target.tensor_sums`)."""
    paths = (
        *(path for path in CPU_HEADERS if path in (*RUNTIME_HEADERS, "cpu/convert.h", *_MATRICES)),
        *PTX_HEADERS,
        "ptx/runtime.h",
    )
    head = f"{_DEFINES}#define CUKILN_RUNTIME 1\n#define CUKILN_TENSOR_SUMS {sums}\n"
    return "".join([head, *(header(path, header_text(path)) for path in paths)])


def render_ptx(kernel: Kernel, module: Module) -> PtxText:
    """The C++ file of a kernel that the module holds; raises UnknownPtx, and TextError where it does not hold it."""
    by_symbol = {entry.name: entry for entry in module.entries}
    missing = [symbol for symbol in symbols(kernel) if symbol not in by_symbol]
    if missing:
        raise TextError(f"the PTX has no entry {missing[0]}; it has {', '.join(sorted(by_symbol)) or 'none'}")
    names = [f"ptx_{name}" for name in functions_of(kernel)]
    functions = tuple(
        translate(module, by_symbol[symbol], name) for symbol, name in zip(symbols(kernel), names, strict=True)
    )
    op = operator(kernel.operator)
    sizes = [by_symbol[symbol].parameter_bytes for symbol in symbols(kernel)]
    arguments = f"{op.namespace}::{op.arguments(kernel)}"
    paths = [path for path in CPU_HEADERS if path not in (*_MATRICES, "cpu/grid.h")]
    paths[paths.index("epilogue.cuh") : paths.index("epilogue.cuh")] = PTX_HEADERS
    parts = [_DEFINES, *(header(path, header_text(path)) for path in paths)]
    parts += [header(name, text) for name, text in operators_texts([kernel.operator]).items()]
    parts.append(f'#line 1 "{kernel.namespace}.cu"\nnamespace {kernel.namespace} {{\n{render_config(kernel)}}}\n')
    parts.append("namespace cukiln {\nnamespace ptx {\n" + "".join(each.text for each in functions) + "}\n}\n")
    # What `bind` makes is what the PTX reads.
    parts += [f"static_assert(sizeof({arguments}) == {size});\n" for size in sizes]
    parts.append(entries(kernel, op, [f"cukiln::ptx::{name}" for name in names]))
    return PtxText("".join(parts), functions)


def render_lines(kernels: Sequence[Kernel]) -> str:
    """The `.cu` of the kernels, whose lines nvcc's `-lineinfo` names as those of the files that they come from."""
    texts: Mapping[str, str] = operators_texts(operator_names(kernels))
    parts = ["#define CUKILN_DEVICE 1\n", *(header(path, header_text(path)) for path in DEVICE_HEADERS)]
    parts += [header(name, text) for name, text in texts.items()]
    parts += [f'#line 1 "{kernel.namespace}.cu"\n{slice_text(kernel)}' for kernel in kernels]
    return "".join(parts)
