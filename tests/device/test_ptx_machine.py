"""PTX on the CPU: lanes that work together, memory that is checked, and what has no translation."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.ptx.module import UnknownPtx
from codegen.ptx.read import read_ptx
from codegen.ptx.translate import translate
from tests.support.kernels.ptx_fragments import (
    LANES,
    MMA,
    Mma,
    bits_of_elements,
    bits_of_sums,
    loaded,
    sum_place,
    words_of,
)
from tests.support.kernels.ptx_snippets import SHARED, Snippet, Snippets

LANE = "and.b32 %r2, %r1, 31;"
INSIDE = "selp.b32 %r14, 1000, 0, %p1;"
SHUFFLES = {
    # Source lanes by the manual's rule, and which lanes have one.
    "idx": ("shfl.sync.idx.b32 %r15|%p1, %r2, 5, 31, -1;", lambda i: (5, True)),
    "up": ("shfl.sync.up.b32 %r15|%p1, %r2, 3, 0, -1;", lambda i: (i - 3, True) if i >= 3 else (i, False)),
    "down": ("shfl.sync.down.b32 %r15|%p1, %r2, 3, 31, -1;", lambda i: (i + 3, True) if i < 29 else (i, False)),
    "bfly": ("shfl.sync.bfly.b32 %r15|%p1, %r2, 6, 31, -1;", lambda i: (i ^ 6, True)),
    "idx_of_8": ("shfl.sync.idx.b32 %r15|%p1, %r2, 13, 0x181f, -1;", lambda i: (i // 8 * 8 + 5, True)),
    "up_of_8": (
        "shfl.sync.up.b32 %r15|%p1, %r2, 3, 0x1800, -1;",
        lambda i: (i - 3, True) if i % 8 >= 3 else (i, False),
    ),
    "down_of_8": (
        "shfl.sync.down.b32 %r15|%p1, %r2, 3, 0x181f, -1;",
        lambda i: (i + 3, True) if i % 8 < 5 else (i, False),
    ),
    "bfly_of_8": (
        "shfl.sync.bfly.b32 %r15|%p1, %r2, 12, 0x181f, -1;",
        lambda i: (i ^ 12, True) if (i ^ 12) <= i // 8 * 8 + 7 else (i, False),
    ),
    "idx_clamped": ("shfl.sync.idx.b32 %r15|%p1, %r2, 20, 15, -1;", lambda i: (i, False)),
}
STORE = f"mov.u32 %r3, {SHARED}; mad.lo.s32 %r4, %r1, 4, %r3;"
WIDE = f"mov.u32 %r3, {SHARED}; mad.lo.s32 %r4, %r1, 16, %r3;"
LOAD_NEXT = "add.s32 %r5, %r1, 1; and.b32 %r5, %r5, 63; mad.lo.s32 %r6, %r5, 4, %r3; ld.shared.u32 %r20, [%r6];"
DEPOT = ".local .align 16 .b8 depot[16]; mov.u64 %rd14, depot; cvta.local.u64 %rd15, %rd14;"
MATRICES = {f"ldmatrix_x{n}{how.replace('.', '_')}": (n, how) for n in (1, 2, 4) for how in ("", ".trans")}


def pairs_of(registers: int) -> range:
    """The first of every two registers: as many as a snippet gives back."""
    return range(0, registers, 2)


def loading(name: str, first: int) -> Snippet:
    """Each lane stores a row of 16 bytes, and points at that of the lane as far from the other end."""
    count, how = MATRICES[name]
    out = [f"%r{14 + i}" for i in range(count)]
    pair = (*out, "0")[first : first + 2]
    return Snippet(
        f"{WIDE} st.shared.v4.u32 [%r4], {{%r10, %r11, %r12, %r13}}; bar.sync 0; sub.s32 %r5, 31, %r1; "
        "mad.lo.s32 %r6, %r5, 16, %r3; "
        f"ldmatrix.sync.aligned.m8n8.x{count}{how}.shared.b16 {{{', '.join(out)}}}, [%r6]; "
        f"mov.b64 %rd20, {{{', '.join(pair)}}};",
        "rd",
    )


def multiplying(mma: Mma, first: int) -> Snippet:
    """a is in the words of 32 bits 0 to 3, b in 4 and 5, c's two registers in 6 and 7; its other ones are 0."""
    unpacked = " ".join(f"mov.b64 {{%r{2 * i + 2}, %r{2 * i + 3}}}, %rd{10 + i};" for i in range(4))
    a, b = (", ".join(f"%r{start + i}" for i in range(n)) for start, n in zip((2, 6), mma.words, strict=True))
    c = ["0"] * mma.sums
    c[first : first + 2] = ["%r8", "%r9"]
    d = [f"%r{14 + i}" for i in range(mma.sums)]
    return Snippet(
        f"{unpacked} mma.sync.aligned.{mma.types} {{{', '.join(d)}}}, {{{a}}}, {{{b}}}, {{{', '.join(c)}}}; "
        f"mov.b64 %rd20, {{{', '.join(d[first : first + 2])}}};",
        "rd",
    )


SNIPPETS = {
    **{
        name: Snippet(f"{LANE} {text} {INSIDE} add.s32 %r20, %r15, %r14;") for name, (text, _) in SHUFFLES.items()
    },
    "ballot": Snippet(f"{LANE} setp.lt.u32 %p1, %r2, 5; vote.sync.ballot.b32 %r20, %p1, -1;"),
    "any": Snippet(f"{LANE} setp.eq.u32 %p1, %r2, 9; vote.sync.any.pred %p20, %p1, -1;", "p"),
    "all": Snippet(f"{LANE} setp.eq.u32 %p1, %r2, 9; vote.sync.all.pred %p20, !%p1, -1;", "p"),
    "some_lanes": Snippet(f"{LANE} shfl.sync.idx.b32 %r20, %r2, 0, 31, 65535;"),
    "a_branch": Snippet(f"{LANE} setp.lt.u32 %p1, %r2, 8;\n@%p1 bra $L_out;\nbar.warp.sync -1;\n$L_out:"),
    "a_barrier_in_a_branch": Snippet("setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L_past;\nbar.sync 0;\n$L_past:"),
    "neighbour": Snippet(f"{STORE} st.shared.u32 [%r4], %r1; bar.sync 0; {LOAD_NEXT}"),
    "race": Snippet(f"{STORE} st.shared.u32 [%r4], %r1; {LOAD_NEXT}"),
    "unwritten": Snippet(f"{STORE} ld.shared.u32 %r20, [%r4+16];"),
    "behind_shared": Snippet(f"{STORE} ld.shared.u32 %r20, [%r4+4096];"),
    "misaligned": Snippet(f"{STORE} ld.shared.v2.u32 {{%r20, %r21}}, [%r4+4];"),
    "an_offset_as_an_address": Snippet("mov.u32 %r4, 0; ld.shared.u32 %r20, [%r4];"),
    "local": Snippet(f"{DEPOT} st.local.u32 [%rd15+8], %r10; ld.local.u32 %r20, [%rd14+8];"),
    "unwritten_local": Snippet(f"{DEPOT} ld.local.u32 %r20, [%rd14+12];"),
    "behind_local": Snippet(f"{DEPOT} ld.local.u32 %r20, [%rd14+16];"),
    "behind_global": Snippet("st.global.u64 [%rd6+8192], %rd10;", "rd"),
    "an_input": Snippet("st.global.u64 [%rd4], %rd10;", "rd"),
    "read_only_cache": Snippet("st.global.u64 [%rd6], %rd10; ld.global.nc.u64 %rd20, [%rd6];", "rd"),
    "unwaited": Snippet(
        f"{STORE} cp.async.ca.shared.global [%r4], [%rd4], 4; cp.async.commit_group; bar.sync 0; "
        "ld.shared.u32 %r20, [%r4];"
    ),
    "waited": Snippet(
        f"{STORE} cp.async.ca.shared.global [%r4], [%rd4], 4; cp.async.commit_group; cp.async.wait_group 0; "
        "ld.shared.u32 %r20, [%r4];"
    ),
    "no_source": Snippet(
        f"{STORE} mov.u32 %r7, 0; cp.async.ca.shared.global [%r4], [%rd4], 4, %r7; cp.async.wait_all; "
        "ld.shared.u32 %r20, [%r4];"
    ),
    **{
        name: Snippet(
            f"{WIDE} st.shared.v4.u32 [%r4], {{%r10, %r11, %r12, %r13}}; cvt.u32.u64 %r7, %rd13; "
            f"cp.async.ca.shared.global [%r4], [%rd4], 16, %r7; cp.async.commit_group; {wait} "
            "ld.shared.v2.u64 {%rd20, %rd14}, [%r4]; add.s64 %rd20, %rd20, %rd14;",
            "rd",
        )
        for name, wait in (("a_part", "cp.async.wait_group 0;"), ("unwaited_part", ""))
    },
    "a_part_from_elsewhere": Snippet(
        f"{WIDE} mov.u32 %r7, 6; cp.async.ca.shared.global [%r4], [%rd4+8192], 8, %r7; cp.async.wait_all;"
    ),
    "a_part_of_a_misaligned_source": Snippet(
        f"{WIDE} mov.u32 %r7, 6; cp.async.ca.shared.global [%r4], [%rd4+4], 8, %r7; cp.async.wait_all;"
    ),
    "a_part_behind_shared": Snippet(
        f"{WIDE} mov.u32 %r7, 6; cp.async.ca.shared.global [%r4+4096], [%rd4], 8, %r7; cp.async.wait_all;"
    ),
    "more_than_the_copy": Snippet(
        f"{WIDE} mov.u32 %r7, 20; cp.async.ca.shared.global [%r4], [%rd4], 16, %r7; cp.async.wait_all;"
    ),
    **{f"{name}_{first}": loading(name, first) for name, (n, _) in MATRICES.items() for first in pairs_of(n)},
    **{f"mma_{name}_{first}": multiplying(mma, first) for name, mma in MMA.items() for first in pairs_of(mma.sums)},
    "wider_than_the_parameters": Snippet(
        "mov.u64 %rd14, wider_than_the_parameters_in; ld.param.v4.u64 {%rd15, %rd16, %rd17, %rd20}, [%rd14];", "rd"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def snippets(tmp_path_factory: pytest.TempPathFactory) -> Snippets:
    return Snippets(SNIPPETS, tmp_path_factory.mktemp("snippets"))


@pytest.mark.parametrize("name", SHUFFLES)
def test_a_shuffle_gives_the_lane_that_the_manual_says(snippets: Snippets, name: str) -> None:
    source = SHUFFLES[name][1]
    expected = [lane + 1000 * inside for lane, inside in (source(i) for i in range(32))]
    assert snippets.run(name, threads=64).out == expected * 2


def test_votes_count_all_lanes(snippets: Snippets) -> None:
    assert snippets.run("ballot", threads=32).out == [0b11111] * 32
    assert snippets.run("any", threads=32).out == [1] * 32
    assert snippets.run("all", threads=32).out == [0] * 32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some_lanes", "a mask of members 0x0000ffff"),
        ("a_branch", "divergent collective in warp 0"),
        ("a_barrier_in_a_branch", "divergent barrier"),
        ("behind_shared", "outside of its 4096 bytes"),
        ("misaligned", "misaligned in its 4096 bytes"),
        ("an_offset_as_an_address", "outside of its 4096 bytes"),
        ("behind_local", "4 bytes at offset 16 of 16 bytes of local memory"),
        ("behind_global", "of out (2048 bytes): outside of it"),
        ("an_input", "an input, which no kernel may write"),
        ("a_part_from_elsewhere", "of in (8192 bytes): outside of it"),
        ("a_part_of_a_misaligned_source", "a copy of 8 bytes from a misaligned source"),
        ("a_part_behind_shared", "outside of its 4096 bytes"),
        ("more_than_the_copy", "a copy that reads 20 of its 16 bytes"),
        ("wider_than_the_parameters", "32 bytes at offset 0 of 16 bytes of parameters"),
        ("read_only_cache", "reads through the read-only cache"),
    ],
)
def test_what_no_gpu_promises_ends_the_run(snippets: Snippets, name: str, message: str) -> None:
    ran = snippets.run(name, threads=64, inputs=())
    assert ran.outcome.status == "runtime_error"
    assert message in ran.message
    assert "kernel.ptx:" in ran.message or name.startswith("a_")


def test_a_missing_barrier_is_a_race_and_shows_in_some_order(snippets: Snippets) -> None:
    assert snippets.run("neighbour", threads=64, watch=True).out == [*range(1, 64), 0]
    assert "race on shared memory" in snippets.run("race", threads=64, watch=True).message
    assert snippets.run("race", threads=64).out != [*range(1, 64), 0]


def test_local_memory_is_a_threads_own_and_poisoned(snippets: Snippets) -> None:
    assert snippets.run("local", [(7 + i,) for i in range(64)], threads=64).out == [7 + i for i in range(64)]
    assert set(snippets.run("unwritten_local", threads=64).out) == {0xFFFFFFFF}


def test_shared_memory_and_copies_are_poisoned_until_they_are_there(snippets: Snippets) -> None:
    assert set(snippets.run("unwritten", threads=64).out) == {0xFFFFFFFF}
    words = [(1000 + i,) for i in range(64)]
    assert set(snippets.run("unwaited", words, threads=64).out) == {0xFFFFFFFF}
    assert snippets.run("waited", words, threads=64).out == [1000 + i for i in range(64)]
    assert set(snippets.run("no_source", words, threads=64).out) == {0}


def test_a_copy_of_a_part_brings_that_and_zeros_and_no_sooner_than_it_must(snippets: Snippets) -> None:
    first, second = 0x1122334455667788, 0x99AABBCCDDEEFF01
    sizes = [*range(17)] * 3
    words = [(first + i, second, 0, size) for i, size in enumerate(sizes)]
    whole = [(first + i).to_bytes(8, "little") + second.to_bytes(8, "little") for i in range(len(sizes))]
    copied = [row[:size] + bytes(16 - size) for row, size in zip(whole, sizes, strict=True)]
    halves = [[int.from_bytes(row[at : at + 8], "little") for at in (0, 8)] for row in copied]
    for watch in (False, True):
        ran = snippets.run("a_part", words, threads=len(words), watch=watch)
        assert (ran.outcome.status, ran.message) == ("ok", "")
        assert ran.out == [(low + high) % 2**64 for low, high in halves]
    poison = snippets.run("unwaited_part", words, threads=len(words)).out
    assert set(poison) == {2**64 - 2}  # all bits set, twice
    assert "has not waited" in snippets.run("unwaited_part", words, threads=len(words), watch=True).message


@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_is_loaded_as_the_manual_lays_it_out(snippets: Snippets, name: str) -> None:
    count, how = MATRICES[name]
    rows = np.random.default_rng(5).integers(0, 2**16, (LANES, 8), np.uint16)
    words = [[int(word) for word in row.view(np.uint32)] for row in rows]
    for first in pairs_of(count):
        got = snippets.run(f"{name}_{first}", words, threads=LANES).out
        for lane in range(LANES):
            expected = [loaded(rows[::-1], lane, matrix, bool(how)) for matrix in range(first, min(first + 2, count))]
            assert got[lane] == sum(word << 32 * place for place, word in enumerate(expected)), lane


@pytest.mark.parametrize("name", MMA)
def test_a_product_of_matrices_takes_and_gives_elements_where_the_manual_says(snippets: Snippets, name: str) -> None:
    mma = MMA[name]
    rng = np.random.default_rng(5)
    least, beyond = {"s8": (-128, 128), "u8": (0, 256)}.get(name, (-4, 5))
    a, b = rng.integers(least, beyond, (16, mma.k)), rng.integers(least, beyond, (mma.k, 8))
    c = rng.integers(-50, 50, (16, 8))
    words = np.zeros((LANES, 8), np.int64)
    words[:, : mma.words[0]] = words_of(bits_of_elements(a, mma.types), mma.words[0], mma.bits, mma.a)
    words[:, 4 : 4 + mma.words[1]] = words_of(bits_of_elements(b, mma.types), mma.words[1], mma.bits, mma.b)
    added, expected = (
        words_of(bits_of_sums(sums, mma), mma.sums, 16 if mma.half_sums else 32, sum_place) for sums in (c, a @ b + c)
    )
    for first in pairs_of(mma.sums):
        words[:, 6:] = added[:, first : first + 2]
        inputs = [[int(low) | int(high) << 32 for low, high in row.reshape(4, 2)] for row in words]
        got = snippets.run(f"mma_{name}_{first}", inputs, threads=LANES).out
        assert got == [int(low) | int(high) << 32 for low, high in expected[:, first : first + 2]]


UNKNOWN = {
    "add.s32 %r20, %r10, 010;": "an operand that has no translation, 010",
    "ld.shared.u32 %r20, [%r10+010];": "an address that has no translation, [%r10+010]",
    "add.sat.s32 %r20, %r10, %r11;": "no rule for add.sat.s32",
    "add.rz.f32 %f20, %f10, %f11;": "no rule for add.rz.f32",
    "cvt.rm.f16.f32 %rs20, %f10;": "no rule for cvt.rm.f16.f32",
    "ex2.approx.f16 %rs20, %rs10;": "no rule for ex2.approx.f16",
    "ld.volatile.shared.u32 %r20, [%r10];": "no rule for ld.volatile.shared.u32",
    "add.s32 %r20, %r10, %rd10;": "%rd10 has 64 bits, not 32",
    "add.s32 %r20, %r10, %r99;": "%r99 is no register that has been declared",
    "add.s32 %r20, %r10, 0x123456789;": "has more than 32 bits",
    "add.s32 %r20, %r10;": "2 operands, not 3",
    "mov.u32 %r20, %clock;": "%clock is no register",
    "bra $L_nowhere;": "a jump to a label that is not there",
    "@%p10 bra.uni $L_end;\n$L_end:": "a jump of all lanes under a guard that each lane has for itself",
    "mov.f32 %f20, 1;": "1 is no float",
    "selp.f32 %f20, 1, 0, %p10;": "1 is no float",
    "cp.async.cg.shared.global [%r10], [%rd10], 8;": "a copy of 8 bytes",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2}, {%r1}, {%r2}, {%f1, %f2};": "not 4",
    "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16 {%r1}, {%r1}, {%r2}, {%r1};": "no rule for these types",
    "call.uni (%r20), f, (%r10);": "no rule for call.uni",
    "{ .reg .b32 %t; }": "has no translation",
}  # fmt: skip


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_has_no_translation_is_refused_by_name_and_line(text: str) -> None:
    with pytest.raises(UnknownPtx) as refusal:
        module = read_ptx(f".version 9.2\n.target sm_80\n.address_size 64\n{Snippet(text).text('one')}")
        translate(module, module.entries[0], "one")
    assert UNKNOWN[text] in str(refusal.value)
    assert "kernel.ptx:20: " in str(refusal.value)


def test_shared_memory_that_is_aligned_to_more_than_it_is_here_is_refused() -> None:
    text = ".version 9.2\n.target sm_80\n.address_size 64\n.extern .shared .align {} .b8 tiles[];\n"
    assert read_ptx(text.format(16)).shared == {"tiles": 16}
    with pytest.raises(UnknownPtx, match=r"kernel\.ptx:4: shared memory at a multiple of 128, 16 at most"):
        read_ptx(text.format(128))
