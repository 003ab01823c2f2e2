"""Entries of PTX of a few instructions, each run by the threads of one block: what an instruction makes of many inputs.

A body finds its thread's four inputs in %rd10 to %rd13, their lower halves in %r10 to %r13 and %f10 to %f13, their
lowest 16 bits in %rs10 to %rs13 and in %p10 whether the first is not 0. It leaves its result in the register that it is
asked for: %rd20, %r20, %f20, %rs20 or %p20. Shared memory has 4,096 bytes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from codegen.operand import Operand
from codegen.plan.ptx_plan import PtxRun
from codegen.plan.verification_plan import Order
from codegen.ptx.read import read_ptx
from codegen.ptx.translate import translate
from codegen.text.render_cpu import CPU_HEADERS, header
from codegen.text.render_group import header_text
from codegen.text.render_ptx import PTX_HEADERS, render_ptx_runtime
from tests.support.kernels.cpu_helpers import toolchain
from workers.cpu.build import CPU_FLAGS
from workers.cpu.library import Outcome
from workers.cpu.run import PtxLibrary

THREADS, INPUTS = 256, 4
SHARED = "shared_bytes"
_HEAD = f".version 9.2\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 {SHARED}[];\n"
_LOAD = """
	.reg .pred %p<24>; .reg .b16 %rs<24>; .reg .f32 %f<24>; .reg .b32 %r<24>; .reg .b64 %rd<24>;
	ld.param.u64 %rd1, [NAME_in]; ld.param.u64 %rd2, [NAME_out];
	mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 32; add.s64 %rd4, %rd1, %rd3;
	ld.global.v2.u64 {%rd10, %rd11}, [%rd4]; ld.global.v2.u64 {%rd12, %rd13}, [%rd4+16];
	mul.wide.u32 %rd5, %r1, 8; add.s64 %rd6, %rd2, %rd5; mov.u64 %rd20, 0;
	setp.ne.s64 %p10, %rd10, 0;
"""
_NARROWED = "".join(
    f"\tcvt.u32.u64 %r{i}, %rd{i}; mov.b32 %f{i}, %r{i}; cvt.u16.u64 %rs{i}, %rd{i};\n" for i in range(10, 14)
)
_RESULTS = {
    "rd": "", "r": "cvt.u64.u32 %rd20, %r20;", "f": "mov.b32 %r20, %f20; cvt.u64.u32 %rd20, %r20;",
    "rs": "cvt.u64.u16 %rd20, %rs20;", "p": "selp.u64 %rd20, 1, 0, %p20;",
}  # fmt: skip


@dataclass(frozen=True)
class Snippet:
    """`result`: the kind of register in which the body leaves it. `more`: bodies that run after it with the same
    inputs, each with the register of its own result."""

    body: str
    result: str = "r"
    more: tuple[tuple[str, str], ...] = ()

    def text(self, name: str) -> str:
        parameters = f".param .u64 {name}_in,\n.param .u64 {name}_out\n"
        bodies = "".join(
            f"{body}\n{_RESULTS[result]} st.global.u64 [%rd6+{8 * THREADS * row}], %rd20;\n"
            for row, (body, result) in enumerate(((self.body, self.result), *self.more))
        )
        code = f"{_LOAD.replace('NAME', name)}{_NARROWED}{bodies}"
        return f".visible .entry {name}(\n{parameters})\n{{\n{code}\tret;\n}}\n"


@dataclass(frozen=True)
class Ran:
    """`rows`: the results of each body. `out`: those of the first."""

    outcome: Outcome
    rows: list[list[int]]

    @property
    def out(self) -> list[int]:
        return self.rows[0]

    @property
    def message(self) -> str:
        return self.outcome.message


class Snippets:
    """Those of one test module, as one library."""

    def __init__(self, snippets: Mapping[str, Snippet], folder: Path) -> None:
        module = read_ptx(_HEAD + "".join(each.text(name) for name, each in snippets.items()))
        headers = [path for path in CPU_HEADERS if path.startswith("cpu/") or path == "launch.h"]
        headers = [path for path in headers if path not in ("cpu/warp.h", "cpu/tensor_sums.h", "cpu/matrix.h")]
        parts = ["#define CUKILN_HOST 1\n#define CUKILN_CPU 1\n"]
        parts += [header(path, header_text(path)) for path in (*headers, *PTX_HEADERS)]
        functions = [translate(module, entry, entry.name).text for entry in module.entries]
        parts += ["namespace cukiln { namespace ptx {\n", *functions, "}}\n"]
        parts += [_entry(name) for name in snippets]
        rows = max(1 + len(each.more) for each in snippets.values())
        self.operands = (
            Operand("in", "int64", "in", (THREADS, INPUTS), (INPUTS, 1), 2),
            Operand("out", "int64", "out", (rows * THREADS,), (1,)),
        )
        (folder / "runtime.cpp").write_text(render_ptx_runtime())
        (folder / "snippets.cpp").write_text("".join(parts))
        warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-label", "-Wno-unused-but-set-variable")
        warnings = (*warnings, "-Wno-unused-variable", "-Wno-unused-parameter")
        command = [str(toolchain().host_compiler), *CPU_FLAGS, *warnings, "-o", "snippets.so"]
        done = subprocess.run(
            [*command, "snippets.cpp", "runtime.cpp", "-lm"], cwd=folder, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        self.library = PtxLibrary(folder / "snippets.so")

    def run(
        self,
        name: str,
        inputs: Sequence[Sequence[int]] = (),
        order: Order = "ascending",
        *,
        threads: int = THREADS,
        approximation: int = 0,
        fuse: bool = False,
        watch: bool = False,
    ) -> Ran:
        """The results of as many threads as there are inputs; `inputs`: up to four words for each."""
        source, out = tensors = self.library.allocate(self.operands)
        try:
            words = np.zeros((THREADS, INPUTS), np.uint64)
            for row, values in enumerate(inputs):
                words[row, : len(values)] = [value % 2**64 for value in values]
            source.fill(words.view(np.int64))
            out.poison()
            self.library.round_as(PtxRun(order, (), 1, watch, approximation, fuse))
            outcome = self.library.run(
                name, tensors, None, integers=[], launch=[threads], scalars=[], order=order, seed=1, exact=False,
                cpu_seconds=5.0, watch=watch,
            )  # fmt: skip
            results = out.view.view(np.uint64).reshape(-1, THREADS)[:, : len(inputs) or threads]
            return Ran(outcome, results.tolist())
        finally:
            del source, out, tensors
            self.library.free()


def _entry(name: str) -> str:
    return f"""
CUKILN_CPU_EXPORT int {name}_run(const cukiln::cpu::Call* call) {{
  void* const arguments[] = {{call->pointers[0], call->pointers[1]}};
  const cukiln::Launch launches[] = {{{{0, {{1, 1, 1}}, {{uint32_t(call->launch[0]), 1, 1}}, 4096}}}};
  const cukiln::cpu::Function functions[] = {{cukiln::ptx::{name}}};
  return cukiln::cpu::execute(*call, launches, 1, functions, 1, arguments);
}}
"""
