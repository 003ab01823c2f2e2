"""The PTX that nvcc makes of kernels passes the plan on the CPU; wrong PTX does not, and its instruction is named."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.plan.ptx_plan import PtxRun, Ways, ptx_cases
from codegen.text import render_group, render_ptx
from tests.operators.attention import kernels as attentions
from tests.operators.reduce import kernels as reductions
from tests.support.kernels.cpu_helpers import matmul_kernel, tensor_kernel
from tests.support.kernels.ptx_mutants import mutants_of, ptx_of, sample, verdict_of, verdicts_of
from tests.support.run.each_run import some_each_run

HALVES = tensor_kernel(layout="nt", dtype="float16", stages=3)
BFLOATS = tensor_kernel(layout="nn", dtype="bfloat16")
BYTES = tensor_kernel(layout="nn", dtype="int8", copy="registers")
GELU = matmul_kernel(epilogue=["gelu"])
SUMS = reductions.kernel({})
ATTENTION = attentions.kernel("bfloat16")
KERNELS = {"halves": HALVES, "bfloats": BFLOATS, "bytes": BYTES, "gelu": GELU, "sums": SUMS, "attention": ATTENTION}

# The kernel, and what of its PTX becomes what: the wrong texts of `asm` that no test of opcodes sees.
WRONG = {
    "ldmatrix gives its registers swapped": ("halves", r"(ldmatrix.*?\{)(%r\d+), (%r\d+)", r"\1\3, \2"),
    "mma takes a's registers swapped": ("bfloats", r"(mma\.sync.*?\}, \{)(%r\d+), (%r\d+)", r"\1\3, \2"),
    "cp.async does not fill with zeros": ("halves", r"(cp\.async\.cg\.shared\.global .*, 16), %r\d+;", r"\1;"),
    "bytes are permuted otherwise": ("bytes", r"(mov\.u32\s+%r\d+, )20800;", r"\g<1>21520;"),
    "bfloat16 pairs are the other way round": (
        "attention", r"(cvt\.rn\.bf16x2\.f32\s+%r\d+), (%f\d+), (%f\d+);", r"\1, \3, \2;",
    ),
    "lanes are added from elsewhere": ("attention", r"shfl\.sync\.bfly", "shfl.sync.up"),
    "erf has another coefficient": ("gelu", r"0f3E0375D4", "0f3E1375D4"),
}  # fmt: skip
# The same in the `.cuh`, through nvcc: the kernel, the header, what becomes what.
WRONG_HEADERS = {
    "ldmatrix": ("halves", "matrix.cuh", "{%0, %1, %2, %3}, [%4];", "{%1, %0, %2, %3}, [%4];"),
    "mma": ("bfloats", "matrix.cuh", "{%4, %5, %6, %7}, {%8, %9}", "{%5, %4, %6, %7}, {%8, %9}"),
    "cp.async": ("halves", "async_copy.cuh", "[%0], [%1], 16, %2;", "[%0], [%1], 16;"),
    "prmt": ("bytes", "convert.cuh", "0x5140", "0x5410"),
    "rounding": ("bfloats", "device.cuh", "(bits + 0x7fffu + ((bits >> 16) & 1u))", "bits"),
    "pairs": ("attention", "convert.cuh", "cvt.rn.bf16x2.f32 %0, %1, %2;", "cvt.rn.bf16x2.f32 %0, %2, %1;"),
    "shuffle": ("attention", "warp.cuh", "word_of(value), mask)", "word_of(value), mask | 4)"),
    "erf": ("gelu", "device.cuh", "::erff(x)", "::tanhf(1.1283792f * x)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def ptx() -> str:
    return ptx_of(tuple(KERNELS.values()))


@pytest.mark.parametrize("name", some_each_run(list(KERNELS), 2))
def test_the_ptx_of_a_kernel_passes_the_plan(ptx: str, name: str) -> None:
    verdict = verdict_of(KERNELS[name], ptx)
    assert (verdict.verdict, verdict.message) == ("ok", "")
    assert verdict.details["instructions"] > 50
    assert (verdict.details["approximate"] > 0) == (name in ("gelu", "attention"))


@pytest.mark.parametrize("name", some_each_run(list(WRONG), 4))
def test_a_wrong_instruction_is_caught(ptx: str, name: str) -> None:
    kernel, pattern, becomes = WRONG[name]
    start = min(ptx.index(symbol) for symbol in render_group.symbols(KERNELS[kernel]))
    wrong, changed = re.subn(pattern, becomes, ptx[start:])
    assert changed
    verdict = verdict_of(KERNELS[kernel], ptx[:start] + wrong)
    assert verdict.verdict in ("incorrect", "runtime_error"), verdict.message


def test_a_fault_is_named_with_its_instruction_and_the_line_that_it_comes_from(ptx: str) -> None:
    (wait, *_) = [mutant for mutant in mutants_of(HALVES, ptx) if mutant.rule == "no wait"]
    verdict = verdict_of(HALVES, wait.of(ptx))
    assert verdict.verdict == "runtime_error"
    assert re.search(r"gemm/tensor\.cuh:\d+, kernel\.ptx:\d+ and has not waited for that", verdict.message)
    assert re.search(r"\[line \d+: cp\.async\.cg\.shared\.global \[%r\d+\]", verdict.message)


def test_a_sample_of_mutants_is_caught(ptx: str) -> None:
    every = [mutant for mutant in mutants_of(HALVES, ptx) if mutant.rule in CERTAIN]
    chosen = sample(every, len(CERTAIN), seed=3)
    assert {mutant.rule for mutant in chosen} == CERTAIN
    for mutant in chosen:
        assert verdict_of(HALVES, mutant.of(ptx)).verdict in ("incorrect", "runtime_error"), mutant


# Of these rules no mutant of that kernel is equivalent.
CERTAIN = {"no barrier", "no commit", "transposed", "rows of a swapped", "no product"}


def test_ptx_without_a_translation_is_no_verdict_about_the_kernel(ptx: str) -> None:
    verdict = verdict_of(HALVES, ptx.replace("cp.async.wait_group", "cp.async.wait_something"))
    assert verdict.verdict == "untranslated"
    assert "no rule for cp.async.wait_something: 'cp.async.wait_something" in verdict.message
    assert "a launch of" not in verdict.message


def test_a_kernel_that_the_ptx_lacks_is_untranslated_and_the_others_are_verified() -> None:
    lacking, own = verdicts_of([GELU, SUMS], ptx_of((SUMS,)))
    assert (lacking.verdict, own.verdict) == ("untranslated", "ok")
    assert re.match(r"the PTX has no entry \w+; it has \w+$", lacking.message)


def test_a_translation_that_no_compiler_takes_is_no_verdict_about_the_kernel() -> None:
    ptx = ptx_of((SUMS,))
    larger = re.sub(r"(\.param \.align 8 \.b8 \w+\[)(\d+)(\])", lambda m: f"{m[1]}{int(m[2]) + 8}{m[3]}", ptx)
    assert larger != ptx
    verdict = verdict_of(SUMS, larger)
    assert verdict.verdict == "untranslated"
    assert re.match(
        r"the translation of the PTX was not compiled: g\+\+: .*static assertion", verdict.message, re.DOTALL
    )


def test_a_launch_with_more_threads_than_the_ptx_allows_is_refused(ptx: str) -> None:
    verdict = verdict_of(SUMS, re.sub(r"\.maxntid \d+", ".maxntid 32", ptx))
    assert "a launch of 64 threads, .maxntid allows 32" in verdict.message


def runs_of(ways: Ways, kernel: Kernel = GELU) -> Iterator[PtxRun]:
    for case in ptx_cases(operator(kernel.operator), kernel, 1, ways):
        for run in case.runs:
            assert isinstance(run, PtxRun)
            yield run


def test_approximations_run_at_both_ends_and_sums_both_fused_and_not() -> None:
    assert {(run.approximation, run.fuse) for run in runs_of(Ways(fusible=True, approximate=True))} == {
        (-1, False),
        (1, True),
    }
    assert {(run.approximation, run.fuse) for run in runs_of(Ways(fusible=False, approximate=False))} == {(0, False)}
    exact = list(runs_of(Ways(fusible=True, approximate=False), HALVES))
    assert {run.fuse for run in exact} == {True, False}


def test_runs_of_one_case_are_computed_in_one_way_where_they_must_give_the_same_bits() -> None:
    for case in ptx_cases(operator("matmul"), GELU, 1, Ways(True, True)):
        assert not case.exact
        assert len({(run.launch, run.approximation, run.fuse) for run in case.runs if isinstance(run, PtxRun)}) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_a_wrong_text_of_a_primitive_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kernel, path, right, wrong = WRONG_HEADERS[name]
    header_text = render_group.header_text

    def changed(asked: str) -> str:
        text = header_text(asked)
        return text.replace(right, wrong) if asked == path else text

    assert changed(path) != header_text(path)
    monkeypatch.setattr(render_ptx, "header_text", changed)
    own = KERNELS[kernel]
    verdict = verdict_of(own, ptx_of.__wrapped__((own,)))
    assert verdict.verdict in ("incorrect", "runtime_error"), verdict.message
