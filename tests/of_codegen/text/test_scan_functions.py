"""The scanner: what it sees, and that nothing hides from it. Each text here is broken on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.errors import NotUnique, TextError, Unclassified
from codegen.operators import operators
from codegen.text.cxx_tokens import Token, tokenize
from codegen.text.render_group import group_headers, render_device
from codegen.text.scan_functions import assert_unique, read_headers, scan_functions, tokens_of
from tests.support.fixtures.codegen import kernels

HEADER = """
#define LIMIT 4
namespace cukiln { namespace matmul {
struct Arguments { int m; };
template <class C> __device__ void run(const Arguments& arguments) { if (arguments.m < 3) { return; } }
} }
"""
KERNEL = """
namespace kernel_a {
struct Config { static constexpr int tile = 3; };
__global__ void __launch_bounds__(64, 1) run(const cukiln::matmul::Arguments arguments) {
  cukiln::matmul::run<Config>(arguments);
}
}
"""
EXPECTED = {"kernel_a::run"}


def scan(text: str) -> set[str]:
    return {function.name for function in scan_functions(text)}


@pytest.mark.parametrize("bounds", ["__launch_bounds__(64, 1)", "__launch_bounds__(64)", "__maxnreg__(96)", ""])
def test_the_plain_text_passes(bounds: str) -> None:
    text = HEADER + KERNEL.replace("__launch_bounds__(64, 1)", bounds)
    assert scan(text) == {"cukiln::matmul::run", "kernel_a::run"}
    assert_unique(text, EXPECTED)


def test_several_functions_of_one_kernel_are_distinguished() -> None:
    entry = KERNEL[KERNEL.index("__global__") : KERNEL.rindex("}")]
    both = KERNEL.replace(entry, entry + entry.replace("run", "reduce"))
    assert scan(HEADER + both) == {"cukiln::matmul::run", "kernel_a::run", "kernel_a::reduce"}
    with pytest.raises(TextError, match="not expected: kernel_a::reduce"):
        assert_unique(HEADER + both, EXPECTED)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        # two kernels of one name
        (KERNEL + KERNEL, "opened twice"),
        (KERNEL.replace("run(const", "run(int) {} void run(const"), "defined more than once: kernel_a::run"),
        # a helper where it does not belong
        (KERNEL + "void helper() {}", "not expected: ::helper"),
        ("static inline int helper(int a) { return a; }" + KERNEL, "not expected: ::helper"),
        (KERNEL.replace("struct Config", "void helper() {}\nstruct Config"), "not expected: kernel_a::helper"),
        ("namespace other { void run() {} }" + KERNEL, "not expected: other::run"),
        (KERNEL.replace("run(const", "walk(const"), "not expected: kernel_a::walk"),
        ("", "not defined: kernel_a::run"),
        # what only looks like the expected function
        (KERNEL.replace("__global__", "// __global__"), "closes a bracket"),
        ("/*" + KERNEL + "*/", "not defined"),
        ('const char* text = "' + KERNEL.replace("\n", " ") + '";', "cannot classify"),
    ],
)  # fmt: skip
def test_functions_that_are_not_exactly_the_expected_ones_are_refused(broken: str, said: str) -> None:
    with pytest.raises(TextError, match=said):
        assert_unique(HEADER + broken, EXPECTED)


@pytest.mark.parametrize(
    "broken",
    [
        # macros that would define a function, or could
        "#define HELPER void helper() {}\nHELPER" + KERNEL,
        "#define HELPER() void helper() {}\nHELPER()" + KERNEL,
        "#define HELPER void helper() {}\nnamespace cukiln { HELPER }" + KERNEL,
        "#define run run() {} void helper\n" + KERNEL,
        "#define namespace struct A { void helper() {} }; namespace\n" + KERNEL,
        KERNEL + "\n#define HELPER 1\n",
        KERNEL.replace("struct Config", "#define HELPER 1\nstruct Config"),
        "namespace other { DEFINE_KERNEL(run) }" + KERNEL,
        "DEFINE_KERNEL(run);" + KERNEL,
        KERNEL.replace("run<Config>(arguments)", "LIMIT"),
        KERNEL.replace("struct Config {", "struct Config { int limit = LIMIT;"),
        KERNEL.replace("tile = 3", "tile = LIMIT"),
        KERNEL.replace("struct Config {", "static int x = 1;\nstruct Config {"),
        "_Pragma(\"x\")" + KERNEL,
        # scopes that could be opened or closed unseen
        "#define OPEN {\n" + KERNEL,
        "#define CLOSE }\n" + KERNEL,
        "#define SWAP )(\n" + KERNEL,
        "#define F(\n" + KERNEL,
        "#define\n" + KERNEL,
        KERNEL + "}",
        KERNEL + "{",
        KERNEL.replace("arguments) {", "arguments) { )"),
        # namespaces that are not plainly one kernel's
        "namespace { void run() {} }" + KERNEL,
        "inline namespace v1 { void run() {} }" + KERNEL,
        "namespace b = cukiln;" + KERNEL,
        "namespace [[deprecated]] b {}" + KERNEL,
        KERNEL + "namespace cukiln { void late() {} }",
        KERNEL.replace("struct Config", "namespace inner { void helper() {} }\nstruct Config"),
        KERNEL.replace("run(const", "run(int) { namespace b = cukiln; }\n__global__ void walk(const"),
        # linkage, declarations, instantiations, qualified definitions
        'extern "C" void helper() {}' + KERNEL,
        'extern "C" { void helper() {} }' + KERNEL,
        "extern int x;" + KERNEL,
        "void helper();" + KERNEL,
        KERNEL.replace("struct Config", "void helper();\nstruct Config"),
        "template void cukiln::matmul::run<int>(const cukiln::matmul::Arguments&);" + KERNEL,
        "void cukiln::matmul::helper() {}" + KERNEL,
        "namespace kernel_b { void kernel_a::helper() {} }" + KERNEL,
        KERNEL.replace("struct Config {", "struct Config { friend void helper() {}"),
        "struct A { } f() { };" + KERNEL,
        "asm(\"helper:\");" + KERNEL,
        KERNEL.replace("{\n  cukiln", "{ asm(\"helper:\"); cukiln"),
        "using namespace cukiln;" + KERNEL,
        "using cukiln::matmul::run;" + KERNEL,
        "namespace cukiln { using namespace matmul; }" + KERNEL,
        "typedef int number;" + KERNEL,
        "int counter = 3;" + KERNEL,
        "void helper() try { } catch (...) { }" + KERNEL,
        "auto helper = [] { };" + KERNEL,
        "A::A() : x(1) {}" + KERNEL,
        "int (*helper())(int) { return 0; }" + KERNEL,
        "bool operator==(int a, int b) { return a; }" + KERNEL,
        "constexpr int a = 3\n",
        "template <class T" + "\n",
        "template <class T>",
        # directives
        '#include "/etc/passwd"\n' + KERNEL,
        "#include HEADER\n" + KERNEL,
        "#line 3\n" + KERNEL,
        "#pragma push_macro(\"run\")\n" + KERNEL,
        "#import <x>\n" + KERNEL,
        KERNEL.replace("struct Config", "#if 0\nstruct Config"),
        KERNEL.replace("struct Config", "#include <stdio.h>\nstruct Config"),
        # text that other readers would read differently
        'constexpr auto x = R"( " void helper() {} ")";' + KERNEL,
        "// what ends here \\\n" + KERNEL.replace("\n", "\\\n") + "\n??>",
        "constexpr char c = '\\u00e9'; int \u00e9 = 1;" + KERNEL,
        "/* never ends " + KERNEL,
        'constexpr auto x = "never ends;\n' + KERNEL,
        "constexpr int x = `1`;" + KERNEL,
    ],
)  # fmt: skip
def test_what_cannot_be_classified_is_an_error(broken: str) -> None:
    with pytest.raises(TextError):
        assert_unique(HEADER + broken, EXPECTED)
    with pytest.raises(Unclassified):
        scan(HEADER + broken)


@pytest.mark.parametrize(
    "hidden",
    [
        "<% void helper() <% %> %>",
        "void hel\\\nper() {}",
        "void/* */helper/**/()\\\n{ /* } */ }",
        "void helper() { const char* a = \"}\"; char b = '}'; }",
        "template <int N = (3 > 2)> void helper() {}",
        "alignas(16) void helper() noexcept {}",
        "[[nodiscard]] static int helper(int a = (1), int b = 2) { return a; }",
    ],
)  # fmt: skip
def test_a_function_in_disguise_is_seen(hidden: str) -> None:
    if hidden.startswith("<%"):
        hidden = "namespace other " + hidden
    with pytest.raises(NotUnique, match="helper"):
        assert_unique(HEADER + hidden + KERNEL, EXPECTED)


@pytest.mark.parametrize(
    "harmless",
    [
        "// void helper() {}\n", "/* void helper() {} */", "// continued \\\n void helper() {}\n",
        "%:define HELPER 1\n", "#undef HELPER\n", "#include <stdint.h>\n", "#pragma GCC diagnostic push\n",
        "#if defined(A)\n#else\n#endif\n", ";;", "struct A;", "enum class B { x, y };", "union C { int a; float b; };",
        "static_assert(sizeof(int) == 4, \"void helper() {}\");", "using T = int;", "constexpr int a = 3, b = 1'000;",
        "inline constexpr int c[] = {1, 2};", "constexpr int d{3};", "template <class T> struct E { void f() {} };",
        "template <class T> using F = T;", "#\n",
    ],
)  # fmt: skip
def test_what_defines_no_function_is_let_through(harmless: str) -> None:
    assert_unique(HEADER + "\n" + harmless + "\n" + KERNEL, EXPECTED)


def test_shared_headers_may_overload_declare_and_define_macros() -> None:
    text = """
#define LARGER(a, b) \\
  ((a) > (b) ? (a) : (b))
#define EMPTY
namespace cukiln {
int declared(int);
inline int size(int a) { return LARGER(a, 1); }
inline int size(float a) { return a < 1 ? 0 : 1; }
static int counter = 0;
namespace detail::deep { template <class... T> constexpr int count() noexcept { return sizeof...(T); } }
namespace other { using detail::deep::count, cukiln::size; }
}
"""
    functions = scan(
        text + KERNEL.replace("cukiln::matmul::Arguments", "int").replace("cukiln::matmul::run<Config>", "")
    )
    assert functions == {
        "cukiln::size",
        "cukiln::detail::deep::count",
        "kernel_a::run",
    }


@pytest.mark.parametrize(
    "used",
    [
        "MAKE(a, b)",
        "MAKE(a)",
        "OTHER",
        "OTHER(1)",
        "OTHER void f() {}",
        "int OTHER() { return 1; }",
        "NESTED(x)",
        "MAKE",
    ],
)
def test_a_macro_is_no_declaration_even_in_a_header(used: str) -> None:
    defines = "#define MAKE(a, b) struct a {};\n#define OTHER inline\n#define NESTED(x) MAKE(x, x)\n"
    with pytest.raises(Unclassified):
        scan(f"{defines}namespace cukiln {{\n{used}\n}}\n")


def test_both_branches_of_a_conditional_count() -> None:
    text = HEADER + "#if 1\nvoid one() {}\n#else\nvoid two() {}\n#endif\n"
    assert {"::one", "::two"} <= scan(text)


def test_errors_name_the_line_of_the_text() -> None:
    with pytest.raises(Unclassified, match="line 4: "):
        scan("// a \\\n b\n\ntypedef int x;\n")


@given(st.data())
def test_no_single_lost_character_lets_another_function_through(data: st.DataObject) -> None:
    text = HEADER + KERNEL
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + text[at + 1 :]
    try:
        functions = {name for name in scan(damaged) if not name.startswith("cukiln::")}
    except TextError:
        return
    # What is still classified is one function, perhaps under a shortened name.
    assert len(functions) <= 1 or damaged == text


@given(st.text(alphabet="ab {}()<>;:#\"'/*\\\n=,", max_size=60))
def test_any_text_is_classified_or_refused(text: str) -> None:
    try:
        scan(text)
    except TextError:
        return


def test_a_rendered_group_with_an_added_helper_is_refused() -> None:
    rendered = render_device(kernels(2))
    assert_unique(rendered.text, rendered.functions)
    with pytest.raises(NotUnique):
        assert_unique(rendered.text + "__device__ void helper() {}\n", rendered.functions)
    with pytest.raises(NotUnique, match="not defined"):
        assert_unique(rendered.text, {*rendered.functions, "kernel_0000000000000000::run"})


@given(
    st.lists(st.sampled_from([HEADER, KERNEL, "\\\n", "/*", "*/", "//", '"', "'", "\n", " ", "#define A \\ \n", "x"])),
    st.lists(st.sampled_from([KERNEL, "*/", "/*", '"', "\n", "\\\n"])),
)
def test_reading_the_headers_apart_changes_no_token(headers: list[str], kernels: list[str]) -> None:
    text = "".join([*headers, "\nnamespace kernel_b {}\n", *kernels])

    def outcome(read: Callable[[str], list[Token]]) -> list[Token] | str:
        try:
            return read(text)
        except Unclassified as error:
            return str(error)

    assert outcome(tokens_of) == outcome(tokenize)


@pytest.mark.parametrize(
    "headers",
    [
        "namespace a {}\nnamespace b {}\n", "int a\\\nnamespace b {}\n", "// a \\  \nnamespace b {}\n",
        "#define A \\\nnamespace b\n\nnamespace c {}\n", "/* a\nnamespace b */ int c;\nnamespace d {}\n",
    ],
)  # fmt: skip
def test_headers_are_read_in_pieces_where_nothing_reaches_over_a_cut(headers: str) -> None:
    assert list(read_headers(headers)) == tokenize(headers)


def test_headers_that_stand_in_the_same_lines_are_read_once() -> None:
    shared = "namespace remembered_a {}\nnamespace remembered_b {}\n"
    one, other = read_headers(f"{shared}namespace c {{}}\n"), read_headers(f"{shared}namespace d {{}}\n")
    assert all(token is again for token, again in zip(one[:10], other[:10], strict=True))
    assert one[10:] != other[10:]


def test_every_operators_headers_stay_remembered() -> None:
    texts = [group_headers([name]) for name in operators()]
    remembered = [read_headers(headers) for headers in texts]
    assert all(read_headers(headers) is tokens for headers, tokens in zip(texts, remembered, strict=True))
