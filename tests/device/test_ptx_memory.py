"""PTX that loads, stores, converts addresses, adds to memory and waits, in every form that has a rule."""

from __future__ import annotations

import pytest

from tests.support.kernels.ptx_models import FLOATS, NAN, flushed, number, signed, sum_of
from tests.support.kernels.ptx_snippets import SHARED, Snippet, Snippets

OWN = f"mov.u32 %r3, {SHARED}; mad.lo.s32 %r4, %r1, 16, %r3;"
DEPOT = ".local .align 16 .b8 depot[16]; mov.u64 %rd14, depot; cvta.local.u64 %rd15, %rd14;"
# Per space: what puts 16 bytes there, of the first two inputs, and where they are.
FILLED = {
    "global": ("", "%rd4"), "global.nc": ("", "%rd4"),
    "shared": (f"{OWN} st.shared.v2.u64 [%r4], {{%rd10, %rd11}};", "%r4"),
    "local": (f"{DEPOT} st.local.v2.u64 [%rd15], {{%rd10, %rd11}};", "%rd15"),
}  # fmt: skip
LOADS = (
    ("global", 1, "u", 8), ("global", 2, "s", 16), ("global", 4, "u", 16), ("global.nc", 4, "f", 32),
    ("global.nc", 1, "b", 64),
    ("shared", 4, "b", 8), ("shared", 1, "s", 8), ("shared", 2, "u", 64), ("shared", 2, "f", 32), ("local", 2, "b", 64),
    ("local", 1, "s", 32), ("local", 4, "f", 32), ("local", 2, "u", 8),
)  # fmt: skip
STORES = (
    ("shared", 1, "u", 8), ("shared", 2, "s", 16), ("shared", 4, "f", 32), ("shared", 4, "b", 8), ("local", 2, "b", 64),
    ("local", 1, "u", 16), ("local", 4, "s", 32), ("global", 2, "f", 32), ("global", 4, "s", 8), ("global", 1, "b", 64),
)  # fmt: skip
WORDS = [
    (0x0102030405060708, 0x1112131415161718),
    (0xF1F2F3F4F5F6F7F8, 0x8081828384858687),
    (0, 2**64 - 1),
    (0x7F80FF8000010203, 0x7FC000008000FFFF),
]


def registers(count: int, kind: str, bits: int) -> list[str]:
    """Narrow types stand in registers of 32 bits, which are filled with zeros or the sign."""
    name = "f" if kind == "f" else "rd" if bits == 64 else "r"
    return [f"%{name}{16 + place}" for place in range(count)]


def vector(names: list[str]) -> str:
    return f".v{len(names)}" if len(names) > 1 else ""


def operand(names: list[str]) -> str:
    return f"{{{', '.join(names)}}}" if len(names) > 1 else names[0]


def name_of(what: str, space: str, count: int, kind: str, bits: int) -> str:
    return f"{what}_{space.replace('.', '_')}_{count}_{kind}{bits}"


def loading(space: str, count: int, kind: str, bits: int) -> Snippet:
    """The result is a sum of the elements, each counted by its place."""
    fill, address = FILLED[space]
    names = registers(count, kind, bits)
    summed = []
    for place, name in enumerate(names, 1):
        widened = {"f": f"mov.b32 %r14, {name}; cvt.u64.u32 %rd22, %r14;", "r": f"cvt.u64.u32 %rd22, {name};"}
        wide = "%rd22" if bits < 64 else name
        summed.append(
            f"{widened['f' if kind == 'f' else 'r'] if bits < 64 else ''} mad.lo.u64 %rd20, {wide}, {place}, %rd20;"
        )
    load = f"ld.{space}{vector(names)}.{kind}{bits} {operand(names)}, [{address}+{count * bits // 8 % 16}];"
    return Snippet(f"{fill} {load} {' '.join(summed)}", "rd")


def loaded(words: tuple[int, ...], count: int, kind: str, bits: int) -> int:
    at = count * bits // 8 % 16
    whole = (words[0] | words[1] << 64) >> 8 * at
    elements = [whole >> bits * place & (1 << bits) - 1 for place in range(count)]
    register = max(bits, 32)
    return sum(place * (number(each, kind, bits) % 2**register) for place, each in enumerate(elements, 1)) % 2**64


def storing(space: str, count: int, kind: str, bits: int) -> Snippet:
    """Of the first inputs; the result is the eight bytes that are there afterwards, and eight more where there are."""
    fill, address = FILLED[space]
    if space == "global":
        fill, address = "st.global.u64 [%rd6], %rd11;", "%rd6"
    names = [name.replace("16", "10").replace("17", "11").replace("18", "12").replace("19", "13")
             for name in registers(count, kind, bits)]  # fmt: skip
    back = f"ld.{space}.v2.u64 {{%rd20, %rd16}}, [{address}]; add.s64 %rd20, %rd20, %rd16;"
    if space == "global":
        back = "ld.global.u64 %rd20, [%rd6];"
    return Snippet(f"{fill} st.{space}{vector(names)}.{kind}{bits} [{address}], {operand(names)}; {back}", "rd")


def stored(words: tuple[int, ...], space: str, count: int, bits: int) -> int:
    before = words[1] if space == "global" else words[0] | words[1] << 64
    covered = count * bits
    elements = sum((words[place] & (1 << bits) - 1) << bits * place for place in range(count))
    after = before >> covered << covered | elements
    return after % 2**64 if space == "global" else (after % 2**64 + (after >> 64)) % 2**64


def of_parameters(name: str, loads: str) -> Snippet:
    """`loads`: %rd14 from the parameter that points at the inputs."""
    text = f"{loads.replace('PARAMETER', f'{name}_in')} add.s64 %rd14, %rd14, %rd3; ld.global.u64 %rd20, [%rd14];"
    return Snippet(text, "rd")


_BYTES = "".join(f"and.b32 %r{14 + i}, %r{14 + i}, 255; shl.b32 %r{14 + i}, %r{14 + i}, {8 * i}; " for i in range(4))
_JOINED = "or.b32 %r14, %r14, %r15; or.b32 %r14, %r14, %r16; or.b32 %r14, %r14, %r17;"
_OF_BYTES = (
    "ld.param.v4.{kind}8 {{%r14, %r15, %r16, %r17}}, [PARAMETER+{at}]; "
    + f"{_BYTES} {_JOINED} mov.u32 %r2{{at}}, %r14;"
)
PARAMETERS = {
    "one_word": "ld.param.s64 %rd14, [PARAMETER];",
    "two_floats": "ld.param.v2.f32 {%f14, %f15}, [PARAMETER]; mov.b32 %r14, %f14; mov.b32 %r15, %f15; "
    "mov.b64 %rd14, {%r14, %r15};",
    "four_halves": "ld.param.v4.u16 {%rs14, %rs15, %rs16, %rs17}, [PARAMETER]; "
    "mov.b64 %rd14, {%rs14, %rs15, %rs16, %rs17};",
    "two_words": "ld.param.b32 %r14, [PARAMETER]; ld.param.u32 %r15, [PARAMETER+4]; mov.b64 %rd14, {%r14, %r15};",
    "bytes": f"{_OF_BYTES.format(kind='u', at=0)} {_OF_BYTES.format(kind='s', at=4).replace('%r24', '%r21')} "
    "mov.b64 %rd14, {%r20, %r21};",
    "by_address": "mov.u64 %rd15, PARAMETER; cvta.param.u64 %rd16, %rd15; cvta.to.param.u64 %rd17, %rd16; "
    "ld.param.u64 %rd14, [%rd17];",
}  # fmt: skip
ADDITIONS = {"u32": "%r11", "s32": "%r11", "f32": "%f11"}
SNIPPETS = {
    **{name_of("ld", *each): loading(*each) for each in LOADS},
    **{name_of("st", *store): storing(*store) for store in STORES},
    **{name: of_parameters(name, loads) for name, loads in PARAMETERS.items()},
    "generic_global": Snippet(
        "cvta.global.u64 %rd14, %rd4; cvta.to.global.u64 %rd15, %rd14; ld.global.u64 %rd20, [%rd15];", "rd"
    ),
    "generic_local": Snippet(
        f"{DEPOT} st.local.u64 [%rd14], %rd10; cvta.to.local.u64 %rd16, %rd15; ld.local.u64 %rd20, [%rd16];", "rd"
    ),
    "generic_shared": Snippet(
        f"mov.u64 %rd14, {SHARED}; cvta.shared.u64 %rd15, %rd14; cvta.to.shared.u64 %rd16, %rd15; "
        "setp.ne.s64 %p1, %rd14, %rd15; setp.eq.and.s64 %p20, %rd14, %rd16, %p1;", "p",
    ),
    "copy_of_16": Snippet(
        f"{OWN} cp.async.cg.shared.global [%r4], [%rd4], 16; cp.async.commit_group; cp.async.wait_group 0; "
        "ld.shared.v2.u64 {%rd20, %rd14}, [%r4]; add.s64 %rd20, %rd20, %rd14;", "rd",
    ),
    **{
        f"add_{kind}": Snippet(
            f"st.global.u32 [%rd6], %r10; red.global.add.{kind} [%rd6], {value}; ld.global.u32 %r20, [%rd6];"
        )
        for kind, value in ADDITIONS.items()
    },
    "add_of_all": Snippet(
        "mov.u32 %r14, 0; setp.eq.u32 %p1, %r1, 0;\n@%p1 st.global.u32 [%rd2+1024], %r14;\nbar.sync 0; "
        "red.global.add.u32 [%rd2+1024], %r10; bar.sync 0; ld.global.u32 %r20, [%rd2+1024];"
    ),
    "uni": Snippet(
        "and.b32 %r2, %r1, 31; setp.eq.u32 %p1, %r2, 9; vote.sync.uni.pred %p2, %p1, -1; setp.lt.u32 %p3, %r1, 32; "
        "vote.sync.uni.pred %p4, %p3, -1; selp.u32 %r14, 2, 0, %p2; selp.u32 %r20, 1, 0, %p4; add.s32 %r20, %r20, %r14;"
    ),
    # The first warp brings what the second waits for.
    "named": Snippet(
        f"{OWN} setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L_bring;\nbar.sync 1, 64; sub.s32 %r5, %r4, 512; "
        "ld.shared.u32 %r20, [%r5]; bra $L_end;\n"
        "$L_bring:\nst.shared.u32 [%r4], %r10; mov.u32 %r20, 0; bar.arrive 1, 64;\n$L_end:"
    ),
    "aligned": Snippet(
        f"{OWN} st.shared.u32 [%r4], %r10; barrier.sync.aligned 0; xor.b32 %r5, %r1, 63; mad.lo.s32 %r5, %r5, 16, %r3; "
        "ld.shared.u32 %r20, [%r5];"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def snippets(tmp_path_factory: pytest.TempPathFactory) -> Snippets:
    return Snippets(SNIPPETS, tmp_path_factory.mktemp("snippets"))


@pytest.mark.parametrize("load", LOADS)
def test_a_load_takes_elements_of_its_type_and_fills_wider_registers(
    snippets: Snippets, load: tuple[str, int, str, int]
) -> None:
    got = snippets.run(name_of("ld", *load), WORDS).out
    assert list(map(hex, got)) == [hex(loaded(words, *load[1:])) for words in WORDS]


@pytest.mark.parametrize("store", STORES)
def test_a_store_changes_its_own_bytes_alone(snippets: Snippets, store: tuple[str, int, str, int]) -> None:
    space, count, _, bits = store
    rows = [(*words, words[0] ^ 0x5A5A5A5A5A5A5A5A, words[1] ^ 0xA5A5A5A5A5A5A5A5) for words in WORDS]
    got = snippets.run(name_of("st", *store), rows).out
    assert list(map(hex, got)) == [hex(stored(words, space, count, bits)) for words in rows]


@pytest.mark.parametrize("name", [*PARAMETERS, "generic_global", "generic_local"])
def test_an_address_is_the_same_however_it_is_taken(snippets: Snippets, name: str) -> None:
    assert snippets.run(name, WORDS).out == [words[0] for words in WORDS]


def test_addresses_of_shared_memory_are_others_in_the_generic_space(snippets: Snippets) -> None:
    assert snippets.run("generic_shared", threads=32).out == [1] * 32


def test_a_copy_brings_sixteen_bytes(snippets: Snippets) -> None:
    assert snippets.run("copy_of_16", WORDS).out == [sum(words) % 2**64 for words in WORDS]


def test_additions_to_memory_wrap_around_and_flush_subnormal_floats(snippets: Snippets) -> None:
    rows = [(a, b) for a in (0, 1, 2**31 - 1, 2**32 - 1) for b in (1, 2**31, 2**32 - 1)]
    for kind in ("u32", "s32"):
        assert snippets.run(f"add_{kind}", rows).out == [(a + b) % 2**32 for a, b in rows]
    floats = [(a, b) for a in FLOATS for b in FLOATS[:13] if NAN not in (a, b)]
    assert snippets.run("add_f32", floats).out == [flushed(sum_of(flushed(a), flushed(b))) for a, b in floats]
    inputs = [(3 * i + 1,) for i in range(64)]
    assert snippets.run("add_of_all", inputs, threads=64).out == [sum(value for (value,) in inputs)] * 64


def test_a_vote_says_whether_a_warp_agrees(snippets: Snippets) -> None:
    assert snippets.run("uni", threads=64).out == [1] * 64


def test_threads_wait_at_barriers_of_each_form(snippets: Snippets) -> None:
    inputs = [(100 + i,) for i in range(64)]
    assert snippets.run("named", inputs, threads=64).out == [0] * 32 + [100 + i for i in range(32)]
    assert snippets.run("aligned", inputs, threads=64).out == [163 - i for i in range(64)]


def test_bytes_with_a_sign_fill_registers_with_it() -> None:
    assert loaded((0x80 << 8, 0), 1, "s", 8) == signed(0x80, 8) % 2**32
