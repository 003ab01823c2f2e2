"""Kernels of a few lines for the tests of the CPU execution: text in the test, compiled together, run one by one.

A body sees `in` and `out` (1,024 floats each; `in` holds 0, 1, 2, …), `shared` (bytes), `thread` and everything of
namespace cukiln. Messages name its lines as `<name>.cuh:<line>`, counted from the body's first line. `then` is the body
of a second launch, where there is one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.operator import Operand
from codegen.plan.verification_plan import Order
from codegen.text.render_cpu import render_cpu
from tests.support.kernels.cpu_helpers import toolchain
from workers.cpu.build import CPU_FLAGS
from workers.cpu.library import CpuLibrary, Outcome, SharedAccess

ELEMENTS = 1024
OPERANDS = (
    Operand("in", "float32", "in", (ELEMENTS,), (1,)),
    Operand("out", "float32", "out", (ELEMENTS,), (1,)),
)
_PRELUDE = """
struct SmallArguments {
  const float* in;
  float* out;
  explicit SmallArguments(void* const* pointers)
      : in(static_cast<const float*>(pointers[0])), out(static_cast<float*>(pointers[1])) {}
};
namespace cukiln {
CUKILN_INLINE float read(const void* from, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  return load_shared<1>(static_cast<const float*>(from), line, file).data[0];
}
CUKILN_INLINE void write(void* to, float value, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  store_shared<1>(static_cast<float*>(to), Vector<float, 1>{{value}}, line, file);
}
CUKILN_INLINE void show(float* out, float value) { store_global<1>(out, Vector<float, 1>{{value}}); }
template <class T, int N> using Vec = Vector<T, N>;
}
"""


@dataclass(frozen=True)
class Small:
    body: str
    threads: int = 64
    shared: int = 4096  # bytes
    blocks: int = 1
    then: str = ""


@dataclass(frozen=True)
class Ran:
    outcome: Outcome
    out: NDArray[np.float32]

    @property
    def message(self) -> str:
        return self.outcome.message

    def site(self, kind: str) -> SharedAccess:
        """The only place with accesses of this kind."""
        (access,) = (each for each in self.outcome.shared_memory if each.kind == kind)
        return access


class SmallKernels:
    """The kernels of one test module as one library."""

    def __init__(self, kernels: Mapping[str, Small], folder: Path) -> None:
        self._kernels = kernels
        source = folder / "small.cpp"
        source.write_text(render_cpu([]) + _PRELUDE + "".join(_text(name, each) for name, each in kernels.items()))
        command = [
            str(toolchain().host_compiler),
            *CPU_FLAGS,
            "-Wall",
            "-Wextra",
            "-Werror",
            "-o",
            "small.so",
            "small.cpp",
            "-lm",
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        self.library = CpuLibrary(folder / "small.so")

    def run(self, name: str, order: Order = "ascending", *, watch: bool = False, **changed: Any) -> Ran:
        source, out = tensors = self.library.allocate(OPERANDS)
        try:
            source.fill(np.arange(ELEMENTS, dtype=np.float32))
            out.poison()
            call = {
                "integers": [],
                "launch": [],
                "scalars": [],
                "seed": 1,
                "exact": True,
                "cpu_seconds": 5.0,
                **changed,
            }
            outcome = self.library.run(name, tensors, None, order=order, watch=watch, **call)
            return Ran(outcome, out.view.copy())
        finally:
            del source, out, tensors
            self.library.free()


def _text(name: str, small: Small) -> str:
    bodies = [("run", small.body)] + ([("then", small.then)] if small.then else [])
    launches = [
        f"{{{number}, {{{small.blocks}, 1, 1}}, {{{small.threads}, 1, 1}}, {small.shared}}}" for number in (0, 1)
    ]
    functions = [f"cukiln::cpu::call_kernel<SmallArguments, {name}::{function}>" for function, _ in bodies]
    return f"""
namespace {name} {{
{"".join(_function(name, function, body) for function, body in bodies)}
}}
CUKILN_CPU_EXPORT int {name}_run(const cukiln::cpu::Call* call) {{
  const SmallArguments arguments(call->pointers);
  const cukiln::Launch launches[] = {{{", ".join(launches)}}};
  const cukiln::cpu::Function functions[] = {{{", ".join(functions)}}};
  return cukiln::cpu::execute(*call, launches, {len(bodies)}, functions, {len(bodies)}, &arguments);
}}
"""


def _function(name: str, function: str, body: str) -> str:
    return f"""
static void {function}(const SmallArguments arguments) {{
  using namespace cukiln;
  [[maybe_unused]] const float* const in = arguments.in;
  [[maybe_unused]] float* const out = arguments.out;
  [[maybe_unused]] const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  [[maybe_unused]] char* const shared = shared_memory<char>();
#line 1 "{name}.cuh"
{dedent(body).strip()}
#line 1 "small.cpp"
}}
"""
