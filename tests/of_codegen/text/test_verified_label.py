"""What a CPU verification is called, and what a recorded search depends on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from codegen import primitives as primitives_module
from codegen.operators import operator
from codegen.plan import generator as generators
from codegen.plan.generator import generator
from codegen.primitives import (
    EMULATION_HEADERS,
    HOPPER_SUMS,
    PRIMITIVE_HEADERS,
    TURING_SUMS,
    confirmed_primitives,
    primitive_digest,
    primitives,
)
from codegen.text import render_group
from codegen.text.render_group import primitives_of, verified_label
from tests.support.run.forget_caches import forget_caches

MMA = {name for name in primitives() if name.startswith("mma_")}
BYTES = {name for name in MMA if name.endswith("8") and "k32" in name}
SHUFFLES = {name for name in primitives() if name.startswith("shuffle_")}
Recorded = Callable[[dict[str, Any]], None]


def forget() -> None:
    forget_caches(primitives_module)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recorded]:
    """Replaces what the file of confirmations records."""

    def record(entries: dict[str, Any]) -> None:
        (tmp_path / "confirmed.json").write_text(json.dumps({"primitives": entries}))
        confirmed_primitives.cache_clear()

    monkeypatch.setattr(primitives_module, "CONFIRMED", tmp_path / "confirmed.json")
    yield record
    confirmed_primitives.cache_clear()


@pytest.fixture
def device_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A copy of codegen/device that may be changed; call `forget` after that."""
    copy = tmp_path / "device"
    shutil.copytree(primitives_module.DEVICE, copy)
    monkeypatch.setattr(primitives_module, "DEVICE", copy)
    yield copy
    forget()


def test_a_verification_on_unconfirmed_primitives_is_labelled_so() -> None:
    assert verified_label("matmul") == "cpu-unconfirmed"


def test_a_verification_counts_as_cpu_once_every_primitive_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = primitives_of("matmul")
    monkeypatch.setattr(render_group, "confirmed_primitives", lambda _: needed)
    assert verified_label("matmul") == "cpu"


@pytest.mark.parametrize("missing", sorted(primitives_of("matmul")))
def test_one_missing_primitive_is_enough_to_doubt_it(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_group, "confirmed_primitives", lambda _: primitives_of("matmul") - {missing})
    assert verified_label("matmul") == "cpu-unconfirmed"


def test_a_primitive_is_confirmed_while_the_recorded_digest_is_that_of_its_text(recorded: Recorded) -> None:
    digests = {name: {"digest": primitive_digest(name), "arch": "sm_80"} for name in primitives()}
    recorded({**digests, "erf": {"digest": primitive_digest("exp")}, "gone": {"digest": "0"}})
    assert confirmed_primitives() == primitives() - {"erf"}


def test_the_label_follows_the_file(recorded: Recorded) -> None:
    needed = {name: {"digest": primitive_digest(name), "arch": "sm_80"} for name in primitives_of("matmul")}
    recorded(needed)
    assert verified_label("matmul") == "cpu"
    recorded({**needed, "load_global": {"digest": "of an older text"}})
    assert verified_label("matmul") == "cpu-unconfirmed"


def test_mma_is_confirmed_for_tensor_cores_that_add_as_those_of_the_gpu(recorded: Recorded) -> None:
    recorded({name: {"digest": primitive_digest(name), "arch": "sm_90"} for name in primitives()})
    assert confirmed_primitives(HOPPER_SUMS) == primitives()
    assert confirmed_primitives(TURING_SUMS) == primitives() - (MMA - BYTES)
    recorded({name: {"digest": primitive_digest(name), "arch": "sm_86"} for name in primitives()})
    assert confirmed_primitives(TURING_SUMS) == primitives()


def test_the_packaged_file_can_be_read() -> None:
    assert confirmed_primitives() <= primitives()


@pytest.mark.parametrize(
    ("header", "old", "new", "changed"),
    [
        ("device.cuh", "__fmaf_rn(a, b, c)", "a * b + c", {"fma"}),
        ("warp.cuh", "__builtin_memcpy(&word, &value, 4)", "word = value", SHUFFLES),
        ("matrix.cuh", "m8n8.x2.trans", "m8n8.x2", {"ldmatrix_trans"}),
        ("cpu/tensor_sums.h", "from[i] & 0xffffe000u", "from[i]", {"mma_m16n8k8_tf32"}),
        ("cpu/matrix.h", "d3 += a[i + 3][k] * row", "d3 -= a[i + 3][k] * row", BYTES),
        ("cpu/tensor_sums.h", "wide_sums ? 25 : 24", "wide_sums ? 26 : 24", MMA - BYTES),
        ("cpu/matrix.h", "first = i % 4 * per_word", "first = i % 2 * per_word", MMA),
        ("cpu/emulation.h", "__builtin_tanhf(x)", "x", {"tanh"}),
        (
            "cpu/emulation.h",
            "::cukiln::cpu::barrier(__LINE__",
            "::cukiln::cpu::barrier(1 + __LINE__",
            {"__syncthreads"},
        ),
        ("cpu/convert.h", "return {0x7fff}", "return {0x7e00}", {"from_float", "mma_m16n8k16_f16_f16", "pack_pair"}),
        ("cpu/warp.h", "ballot |=", "ballot ^=", {"vote_any", "vote_all", "vote_ballot"}),
    ],
)
def test_a_changed_text_changes_the_digests_of_those_that_use_it(
    header: str, old: str, new: str, changed: set[str], device_copy: Path
) -> None:
    before = {name: primitive_digest(name) for name in primitives()}
    text = (device_copy / header).read_text()
    assert text.count(old) >= 1
    (device_copy / header).write_text(text.replace(old, new))
    forget()
    assert {name for name in primitives() if primitive_digest(name) != before[name]} == changed


def test_comments_and_lines_are_no_part_of_the_digests(device_copy: Path) -> None:
    before = {name: primitive_digest(name) for name in primitives()}
    for header in (*PRIMITIVE_HEADERS, *EMULATION_HEADERS):
        text = (device_copy / header).read_text()
        text = text.replace(") {\n", ")\n{  // also here\n")
        changed = re.sub(r"^ *// .*$", "// Another comment; with (brackets) {", text, flags=re.MULTILINE)
        (device_copy / header).write_text(changed)
    forget()
    assert {name: primitive_digest(name) for name in primitives()} == before


def test_the_primitives_are_those_that_the_kernels_call() -> None:
    assert {
        "load_global",
        "store_global",
        "load_shared",
        "store_shared",
        "fma",
        "erf",
        "__syncthreads",
    } <= primitives_of("matmul")


@pytest.fixture
def fresh_generator() -> None:
    generator.cache_clear()


@pytest.mark.usefixtures("fresh_generator")
def test_generator_differs_on_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = generator("matmul")
    generator.cache_clear()
    monkeypatch.setattr(generators, "GENERATOR_VERSION", generators.GENERATOR_VERSION + 1)
    assert generator("matmul") != before
    generator.cache_clear()


@pytest.mark.usefixtures("fresh_generator")
def test_generator_differs_on_the_kernels_text(monkeypatch: pytest.MonkeyPatch) -> None:
    before = generator("matmul")
    generator.cache_clear()
    monkeypatch.setattr(generators, "headers_digest", lambda name: "other")
    assert generator("matmul") != before
    generator.cache_clear()


@pytest.mark.usefixtures("fresh_generator")
def test_generator_differs_on_the_tunables(monkeypatch: pytest.MonkeyPatch) -> None:
    before = generator("matmul")
    generator.cache_clear()
    own = operator("matmul")
    monkeypatch.setattr(type(own), "tunables", own.tunables[1:])
    assert generator("matmul") != before
    generator.cache_clear()
