"""Render the host side of a shared library: launch code, loader and entry points, as one self-contained C++ file.

Winner libraries export `winner_exports(kernel)`, group libraries `group_exports(kernels)`, and nothing else.
"""

import re
from collections.abc import Sequence
from dataclasses import astuple

from codegen.kernel import Candidate, Kernel
from codegen.operator import Operator
from codegen.operators import operator
from codegen.text.render_group import (
    HOST_HEADERS,
    functions_of,
    header_text,
    operator_names,
    operators_texts,
    render_config,
    symbols,
)

# The assembler puts the cubin into read-only data; hidden, so that the library exports only its entry points. The
# section flags spell out what as needs on every architecture.
EMBED_ASSEMBLY = """\
.section .rodata.cukiln,"a",%progbits
.balign 64
.globl cukiln_cubin
.hidden cukiln_cubin
cukiln_cubin:
.incbin "group.cubin"
.byte 0
.section .note.GNU-stack,"",%progbits
"""


def winner_exports(kernel: Kernel) -> frozenset[str]:
    """Exports of a library that holds one kernel: plain C, and tvm-ffi's `__tvm_ffi_<name>`."""
    plain, ffi = ["launch", "prepare", "workspace_bytes", "last_error"], ["run", "prepare", "workspace_bytes"]
    if operator(kernel.operator).transformed(kernel):
        plain += ["transform", "transformed_bytes", "launch_transformed"]
        ffi += ["transform", "transformed_bytes", "run_transformed"]
    return frozenset([*(f"cukiln_{name}" for name in plain), *(f"__tvm_ffi_{name}" for name in ffi)])


def group_exports(kernels: Sequence[Kernel]) -> frozenset[str]:
    """Exports of a library that holds a group: plain C, one launch and one workspace_bytes per kernel."""
    each = {f"cukiln_{name}_{kernel.id[:16]}" for kernel in kernels for name in ("launch", "workspace_bytes")}
    return frozenset(each | {"cukiln_prepare", "cukiln_last_error"})


def render_library(kernels: Sequence[Kernel], *, target: str, launch: Sequence[int] | None = None) -> str:
    """The library's C++ text. With `launch`, the winner's: one kernel, those launch-time values baked in, with tvm-ffi
    entries. Without, a group's: one launch per kernel, with the launch-time values of the operator's first test
    launch."""
    names = [name for kernel in kernels for name in symbols(kernel)]
    parts = [
        "#define CUKILN_HOST 1\n",
        *_launch_code(kernels),
        header_text("binding/errors.h"),
        header_text("binding/driver.h"),
        "namespace cukiln {\nnamespace binding {\n"
        f"constexpr int function_count = {len(names)};\n"
        f"constexpr const char* function_names[] = {{{', '.join(map(_quoted, names))}}};\n"
        f"constexpr char target[] = {_quoted(target)};\n"
        "}  // namespace binding\n}  // namespace cukiln\n",
        header_text("binding/on_gpu.h"),
        header_text("binding/library.h"),
    ]
    first = 0
    blocks = []
    for kernel in kernels:
        own = operator(kernel.operator)
        values = own.test_launches(kernel, own.test_problems(kernel)[0])[0] if launch is None else launch
        blocks.append(kernel_block(kernel, first, values, for_tensors=launch is not None))
        first += len(functions_of(kernel))
    if launch is not None:
        (kernel,) = kernels
        headers, exports = winner_entries(kernel)
        return "\n".join([*parts, *headers, *blocks, *exports])
    return "\n".join([*parts, *blocks, *(_launch_exports(kernel, "_" + kernel.id[:16]) for kernel in kernels)])


def winner_entries(kernel: Kernel) -> tuple[list[str], list[str]]:
    """Of a library that holds one kernel: headers of its entries, which stand before the kernel's block, and the
    exports, which stand behind it."""
    exports = [_launch_exports(kernel, ""), f"CUKILN_TVM_FFI_EXPORTS({kernel.namespace}::Binding)\n"]
    headers = [header_text("binding/tvm_ffi.h")]
    if operator(kernel.operator).transformed(kernel):
        headers.append(header_text("binding/transform.h"))
        exports.append(f"CUKILN_TRANSFORM_EXPORTS({kernel.namespace}::Binding)\n")
    return headers, exports


def render_plan(candidate: Candidate) -> str:
    """A program that prints the candidate's launches, from the launch code that the library runs: a line per launch
    with function, grid, block, shared bytes; then one line with the workspace's bytes."""
    kernel, op = candidate.kernel, operator(candidate.kernel.operator)
    block = kernel_block(kernel, 0, op.launch_values(candidate.schedule), for_tensors=False)
    extents, scalars = op.integers(candidate.problem), [*map(float.hex, op.scalars(candidate.problem))]
    main = (
        f"const int64_t extents[] = {_array(extents)};\nconst double scalars[] = {_array(scalars)};\n"
        f"int main() {{ cukiln::binding::print_plan<{kernel.namespace}::Binding>(extents, scalars); }}\n"
    )
    headers = [*_launch_code([kernel]), header_text("binding/print_plan.h")]
    return "\n".join(["#define CUKILN_HOST 1\n", *headers, block, main])


def _launch_code(kernels: Sequence[Kernel]) -> list[str]:
    return [*map(header_text, HOST_HEADERS), *operators_texts(operator_names(kernels)).values()]


def kernel_block(
    kernel: Kernel, first_function: int, launch: Sequence[int], *, for_tensors: bool, on_cpu: bool = False
) -> str:
    """The kernel's Config and Binding. `for_tensors`: with the check of a call that is given tensors, which only
    tvm-ffi's entries make. `on_cpu`: the kernel's own text, with its Config, stands before, and what stands in tables
    is checked too."""
    op: Operator = operator(kernel.operator)
    problem = op.test_problems(kernel)[0]
    bounds = op.scalar_bounds(problem)
    pairs = [f"{{{each.least.hex()}, {each.most.hex()}}}" for each in bounds]
    space = f"::{op.namespace}"
    check = _CHECK.replace("SPACE", space) if for_tensors else ""
    if on_cpu and (tables := op.tables(kernel)):
        check = _CHECK_WITH_TABLES.replace("SPACE", space).replace("TABLES", _array(astuple(tables)))
    if for_tensors and (operand := op.transformed(kernel)):
        check += _TRANSFORM.replace("SPACE", space).replace("OPERAND", _quoted(operand))
    return f"""\
namespace {kernel.namespace} {{
{"" if on_cpu else render_config(kernel)}
struct Binding {{
  using Arguments = {space}::{op.arguments(kernel)};
  static constexpr int operands = {len(op.operands(problem))}, extents = {len(op.integers(problem))};
  static constexpr int attributes = {len(op.attribute_names)}, scalars = {len(op.scalars(problem))};
  static constexpr int first_function = {first_function};
  static constexpr const char* attribute_names[] = {_array([*map(_quoted, op.attribute_names)])};
  static constexpr int32_t launch[] = {_array(launch)};
  static constexpr int bounded = {len(bounds)};
  static constexpr const char* bounded_names[] = {_array([_quoted(bound.name) for bound in bounds])};
  static constexpr double bounds[][2] = {_array(pairs or ["{0}"])};
  static Arguments bind(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars,
                        void* workspace) {{
    return {space}::bind<Config>(pointers, extents, launch, scalars, workspace);
  }}
  // Null `launch`: the values of this library.
  static int64_t workspace_bytes(const int64_t* extents, const int32_t* given) {{
    return {space}::workspace_bytes<Config>(extents, given ? given : launch);
  }}
  static int plan(const Arguments& arguments, cukiln::Launch* out) {{ return {space}::plan<Config>(arguments, out); }}
{check}}};
}}  // namespace {kernel.namespace}
"""


_CHECK = """\
  static bool check(const cukiln::TensorView* tensors, int count, int64_t* extents, cukiln::Complaint complaint) {
    return SPACE::check<Config>(tensors, count, extents, complaint);
  }
"""


_CHECK_WITH_TABLES = """\
  static bool check(const cukiln::TensorView* tensors, int count, int64_t* extents, cukiln::Complaint complaint) {
    return SPACE::check<Config>(tensors, count, extents, complaint) &&
           cukiln::binding::check_tables(TABLES, tensors, complaint);
  }
"""


_TRANSFORM = """\
  static constexpr const char* transformed = OPERAND;
  static int64_t transformed_bytes(const int64_t* extents) { return SPACE::transformed_bytes<Config>(extents); }
  static void use_transformed(Arguments& arguments, void* place) { SPACE::use_transformed<Config>(arguments, place); }
"""


def _launch_exports(kernel: Kernel, suffix: str) -> str:
    return f"CUKILN_LAUNCH_EXPORTS({kernel.namespace}::Binding, {suffix})\n"


def _array(values: Sequence[object]) -> str:
    """A C initialiser; C++ has no empty arrays, so an empty list becomes one zero, unread."""
    return "{" + (", ".join(map(str, values)) or "0") + "}"


def _quoted(text: str) -> str:
    if not re.fullmatch(r"\w+", text):
        raise ValueError(f"not an identifier: {text!r}")
    return f'"{text}"'
