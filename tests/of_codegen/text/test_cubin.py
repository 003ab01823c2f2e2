"""Reading cubins: which kernels they hold, and when two kernels are the same code."""

from __future__ import annotations

import struct

import pytest

from codegen.kernel import Kernel
from codegen.text.cubin import Cubin, NotElf, exported_symbols, read_cubin, read_elf
from codegen.text.render_group import render_device, symbols
from tests.support.fixtures.compile import LIMITS, matmul_candidates, probe
from workers.compile.compile_file import FileCompiler
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes


class Compile:
    """nvcc's device pass on rendered kernels, or on text, in a new folder every time."""

    def __init__(self, toolchain: Toolchain, processes: Processes) -> None:
        self._toolchain, self._processes = toolchain, processes

    def bytes(self, text: str, names: frozenset[str], target: str = "sm_90a") -> bytes:
        with self._processes.private_folder() as folder:
            compiler = FileCompiler(folder, self._toolchain, self._processes, LIMITS)
            return compiler.compile_device(text, target, names).cubin

    def kernels(self, *kernels: Kernel) -> Cubin:
        group = render_device(kernels)
        return read_cubin(self.bytes(group.text, group.symbols))


@pytest.fixture(scope="module")
def compile_code(toolchain: Toolchain, processes: Processes) -> Compile:
    return Compile(toolchain, processes)


def test_code_is_equal_alone_and_in_a_group_in_any_order(compile_code: Compile) -> None:
    kernels = [matmul_candidate.kernel for matmul_candidate in matmul_candidates(2)] + [probe()]
    group, reverse = compile_code.kernels(*kernels), compile_code.kernels(*reversed(kernels))
    assert group.symbols == {name for kernel in kernels for name in symbols(kernel)}
    assert group.kernels == reverse.kernels
    for kernel in (kernels[0], kernels[-1]):
        alone = compile_code.kernels(kernel).kernels
        assert alone == {name: group.kernels[name] for name in symbols(kernel)}
    assert len(set(group.kernels.values())) == len(group.kernels)


def test_code_does_not_know_its_namespace(compile_code: Compile) -> None:
    kernel = probe()
    group = render_device([kernel, probe(2)])
    renamed = "kernel_" + "f" * 16  # of equal length, so that symbols() of another name need not be written here
    changed = group.text.replace(kernel.namespace, renamed)
    names = frozenset(name.replace(kernel.namespace, renamed) for name in group.symbols)
    before = read_cubin(compile_code.bytes(group.text, group.symbols)).kernels
    after = read_cubin(compile_code.bytes(changed, names)).kernels
    for name in symbols(kernel):
        assert after[name.replace(kernel.namespace, renamed)] == before[name]


def test_a_constant_that_nothing_reads_leaves_the_code(compile_code: Compile) -> None:
    """As the Config has one for a tunable of a later release, at its default."""
    kernel = matmul_candidates(1)[0].kernel
    group = render_device([kernel])
    start = f"namespace {kernel.namespace} {{\nstruct Config {{\n"
    assert start in group.text
    later = group.text.replace(start, f"{start}  static constexpr int hint = 0;\n")
    assert read_cubin(compile_code.bytes(later, group.symbols)).kernels == compile_code.kernels(kernel).kernels


TWINS = """
namespace kernel_a {{ __global__ void run(float* x, int n) {{ {a} }} }}
namespace a_longer_name {{ __global__ void run(float* x, int n) {{ {b} }} }}
"""
TWIN_NAMES = frozenset({"_ZN8kernel_a3runEPfi", "_ZN13a_longer_name3runEPfi"})


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("x[n] = 1;", "x[n] = 1;", True),
        ("x[n] = 1;", "x[n] = 2;", False),  # .text
        ("x[n] = 1;", "x[n] = 1; __syncthreads();", False),
    ],
)
def test_equal_code_has_an_equal_digest(compile_code: Compile, a: str, b: str, equal: bool) -> None:
    kernels = read_cubin(compile_code.bytes(TWINS.format(a=a, b=b), TWIN_NAMES)).kernels
    assert (len(set(kernels.values())) == 1) is equal


def test_parameters_count_even_where_the_text_is_equal(compile_code: Compile) -> None:
    text = "namespace a { __global__ void run(int) {} } namespace b { __global__ void run(int, int) {} }"
    kernels = read_cubin(compile_code.bytes(text, frozenset({"_ZN1a3runEi", "_ZN1b3runEii"}))).kernels
    assert len(set(kernels.values())) == 2


def test_kernels_that_differ_only_in_a_global_variable_are_distinguished(compile_code: Compile) -> None:
    # Both texts read the first slot of a shared constant bank; only the relocation says which variable is meant.
    text = "__device__ float {0}[64];\nnamespace a {{ __global__ void run(int i, float v) {{ {0}[i] = v; }} }}"
    digests = [
        read_cubin(compile_code.bytes(text.format(name), frozenset({"_ZN1a3runEif"}))).kernels["_ZN1a3runEif"]
        for name in ("one", "two", "one")
    ]
    assert digests[0] != digests[1]
    assert digests[0] == digests[2]


@pytest.fixture(scope="module")
def probe_cubin(compile_code: Compile) -> bytes:
    group = render_device([probe()])
    return compile_code.bytes(group.text, group.symbols)


def test_a_cubin_is_byte_identical_from_any_folder(compile_code: Compile, probe_cubin: bytes) -> None:
    group = render_device([probe()])
    assert compile_code.bytes(group.text, group.symbols) == probe_cubin


def test_device_functions_are_no_kernels(compile_code: Compile) -> None:
    text = """
    namespace a { __device__ __noinline__ float helper(float x) { return x * x + 1; } }
    namespace a { __global__ void run(float* x) { *x = helper(*x); } }
    """
    assert read_cubin(compile_code.bytes(text, frozenset({"_ZN1a3runEPf"}))).symbols == {"_ZN1a3runEPf"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "not a 64-bit"),
        (lambda data: b"MZ" + data[2:], "not a 64-bit"),
        (lambda data: data[:200], "do not fit"),
        (lambda data: data[:4] + b"\x01" + data[5:], "not a 64-bit"),  # ELFCLASS32
        (lambda data: data[:18] + struct.pack("<H", 62) + data[20:], "not a cubin"),  # EM_X86_64
        (lambda data: data[:60] + b"\0\0" + data[62:], "do not fit|not a cubin|no section"),
    ],
)
def test_what_is_no_cubin_is_refused(probe_cubin: bytes, change: object, message: str) -> None:
    with pytest.raises(NotElf, match=message):
        read_cubin(change(probe_cubin))  # type: ignore[operator]


def test_a_section_outside_the_file_is_refused(probe_cubin: bytes) -> None:
    data = bytearray(probe_cubin)
    headers = struct.unpack_from("<Q", data, 40)[0]
    struct.pack_into("<Q", data, headers + 64 * 2 + 32, len(data))  # sh_size of section 2
    with pytest.raises(NotElf, match="does not fit"):
        read_elf(bytes(data))


def test_a_kernel_without_its_sections_is_refused(compile_code: Compile) -> None:
    name = b"_ZN1a3runEPf"
    data = compile_code.bytes("namespace a { __global__ void run(float* x) { *x = 1; } }", frozenset({name.decode()}))
    with pytest.raises(NotElf, match="has no section"):
        read_cubin(data.replace(b".nv.info." + name, b".nv.junk." + name))


def test_exports_are_what_dlsym_finds(toolchain: Toolchain, processes: Processes) -> None:
    source = """
    extern "C" int offered() { return 1; }
    extern "C" __attribute__((visibility("hidden"))) int hidden() { return 2; }
    static int local() { return 3; }
    extern "C" int missing();
    extern "C" int caller() { return local() + hidden() + missing(); }
    int data = 4;
    """
    with processes.private_folder() as folder:
        (folder / "library.cpp").write_text(source)
        command = [str(toolchain.host_compiler), "-shared", "-fPIC", "library.cpp", "-o", "library.so"]
        compiled = processes.run(command, cwd=folder, limits=LIMITS)
        assert compiled.ok, compiled.stderr
        assert exported_symbols((folder / "library.so").read_bytes()) == {"offered", "caller", "data"}
