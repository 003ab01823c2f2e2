"""Race-checked runs count bank conflicts: known patterns take the wavefronts of 32 banks of 4 bytes."""

from __future__ import annotations

import pytest

from codegen.plan.verification_plan import Order
from tests.support.kernels.small_kernels import Small, SmallKernels
from workers.cpu.library import SharedAccess

READ4 = "show(out + thread, read(shared + 4 * ({word})));"
READ8 = "show(out + thread, load_shared<2>(reinterpret_cast<const float*>(shared) + {word}).data[1]);"
READ16 = "show(out + thread, load_shared<4>(reinterpret_cast<const float*>(shared) + {word}).data[1]);"
SUB_WORD = "show(out + thread, load_shared<1>(reinterpret_cast<const {type}*>(shared) + {at}).data[0]);"
ROWS = (
    "unsigned words[{count}];\nldmatrix(words, shared + {pitch} * (lane % 8) + 1024 * (lane / 8));\n"
    "out[thread] = static_cast<float>(words[0]);"
)

# One warp's access, and its wavefronts with and without conflicts.
PATTERNS: dict[str, tuple[str, int, int]] = {
    "successive words": (READ4.format(word="lane"), 1, 1),
    "one word for all": (READ4.format(word="17"), 1, 1),
    "every second word": (READ4.format(word="2 * lane"), 2, 1),
    "every eighth word": (READ4.format(word="8 * lane"), 8, 1),
    "a column of rows of 32 words": (READ4.format(word="32 * lane"), 32, 1),
    "a column of padded rows": (READ4.format(word="33 * lane"), 1, 1),
    "two rows that differ": (READ4.format(word="lane / 2 * 32"), 16, 1),
    "permuted": (READ4.format(word="(lane * 13 + 5) % 32"), 1, 1),
    "half of the lanes": ("if (lane % 2 == 0) " + READ4.format(word="lane"), 1, 1),
    "eight bytes in a row": (READ8.format(word="2 * lane"), 2, 2),
    "eight bytes, two apart": (READ8.format(word="4 * lane"), 4, 2),
    "eight bytes for all": (READ8.format(word="2 * (lane % 2)"), 2, 2),
    "eight bytes, first half-warp": ("if (lane < 16) " + READ8.format(word="2 * lane"), 1, 1),
    "sixteen bytes in a row": (READ16.format(word="4 * lane"), 4, 4),
    "sixteen bytes of a column": (READ16.format(word="32 * lane"), 32, 4),
    "sixteen bytes, padded column": (READ16.format(word="36 * lane"), 4, 4),
    "sixteen bytes, one address per quarter": (READ16.format(word="4 * (lane / 8)"), 4, 4),
    "bytes of a row": (SUB_WORD.format(type="unsigned char", at="lane"), 1, 1),
    "halves of two rows": (SUB_WORD.format(type="unsigned short", at="lane + lane / 16 * 48"), 2, 1),
    "one matrix, rows of 16 bytes": (ROWS.format(count=1, pitch=16), 1, 1),
    "one matrix, rows of 64 bytes": (ROWS.format(count=1, pitch=64), 4, 1),
    "four matrices, rows of 128 bytes": (ROWS.format(count=4, pitch=128), 32, 4),
    "four matrices, rows of 144 bytes": (ROWS.format(count=4, pitch=144), 4, 4),
    "two matrices, rows of 32 bytes": (ROWS.format(count=2, pitch=32), 4, 2),
}  # fmt: skip
STORE = "store_shared<1>(reinterpret_cast<float*>(shared) + {word}, Vec<float, 1>{{{{1}}}});"
COUNTED = {
    "stores": Small(STORE.format(word="thread * 4"), threads=64),
    "copies": Small("cp_async<16>(shared + 128 * (lane % 16) + 16 * (lane / 16), in, true);", threads=32),
    # Lane 5 skips an access; from the next meeting on its turns go with those of the others again.
    "loop": Small("""
        for (int i = 0; i < 6; ++i) {
          if (lane != 5 || i != 3) write(shared + 128 * i + 4 * lane, 1.0f);
          if (i % 2 == 1) warp_barrier();
        }
    """, threads=32),
    "two_operands": Small("""
        float sum = 0.0f;
        for (int i = 0; i < 8; ++i)
          for (int operand = 0; operand < 2; ++operand)
            sum += read(shared + (operand ? 4 * lane + 128 * i : 8 * lane));
        show(out + thread, sum);
    """, threads=128),
    "blocks": Small(STORE.format(word="2 * thread"), threads=32, blocks=5),
}  # fmt: skip


def named(pattern: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in pattern)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallKernels:
    kernels = {named(name): Small(body, threads=32, shared=5120) for name, (body, _, _) in PATTERNS.items()}
    return SmallKernels({**kernels, **COUNTED}, tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_takes_its_wavefronts(name: str, order: Order, small: SmallKernels) -> None:
    body, wavefronts, ideal = PATTERNS[name]
    outcome = small.run(named(name), order, watch=True)
    assert outcome.message == ""
    site = outcome.site("ldmatrix" if "ldmatrix" in body else "read")
    assert (site.warp_accesses, site.wavefronts, site.ideal) == (1, wavefronts, ideal)


def test_a_run_without_race_check_counts_nothing(small: SmallKernels) -> None:
    assert small.run("stores").outcome.shared_memory == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stores", SharedAccess("stores.cuh:1", "write", 4, 2, 8, 2)),
        # Rows of 128 bytes: each quarter-warp of eight lanes meets in one group of four banks.
        ("copies", SharedAccess("copies.cuh:1", "cp_async", 16, 1, 32, 4)),
        ("blocks", SharedAccess("blocks.cuh:1", "write", 4, 5, 10, 5)),
        # Four warps, sixteen turns each; the first operand has two-way conflicts.
        ("two_operands", SharedAccess("two_operands.cuh:4", "read", 4, 64, 96, 64)),
        ("loop", SharedAccess("loop.cuh:2", "write", 4, 6, 6, 6)),
    ],
)
def test_accesses_are_counted_by_place_and_kind(name: str, expected: SharedAccess, small: SmallKernels) -> None:
    assert small.run(name, watch=True).outcome.shared_memory == (expected,)
