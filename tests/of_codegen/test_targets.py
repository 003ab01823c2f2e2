"""Data sheets: complete, plausible, sourced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codegen.errors import UnknownTarget
from codegen.targets import architectures, target, targets
from tests.support.fixtures.codegen import fp32_gflops, tensor_gflops


@pytest.mark.parametrize("name", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120", "sm_120a"])
def test_each_architecture_has_a_sheet_with_its_source(name: str) -> None:
    sheet = target(name)
    assert sheet.name == name
    assert "NVIDIA" in sheet.product
    assert "white paper" in sheet.source or "data sheet" in sheet.source
    assert sheet.data_sheet()["sm_count"] == sheet.sm_count


# Peak fp32 as the products' own documents state it: an independent check of count, lanes and clock.
@pytest.mark.parametrize(
    ("name", "tflops"),
    [("sm_75", 8.1), ("sm_80", 19.5), ("sm_86", 38.7), ("sm_87", 5.3), ("sm_89", 91.6), ("sm_90a", 66.9),
     ("sm_100", 75.0), ("sm_120", 104.8)],
)  # fmt: skip
def test_the_peak_is_the_published_one(name: str, tflops: float) -> None:
    assert fp32_gflops(target(name)) / 1e3 == pytest.approx(tflops, rel=0.01)


# Dense peaks with sums in fp32 (int8: int32), as the products' own documents state them, in TFLOPS or TOPS.
@pytest.mark.parametrize(
    ("name", "float16", "tf32", "int8"),
    [("sm_75", 65, 0, 130), ("sm_80", 312, 156, 624), ("sm_86", 154.8, 77.4, 309.7), ("sm_87", 42.5, 21.3, 85),
     ("sm_89", 362.05, 183, 733), ("sm_90a", 989.4, 494.7, 1978.9), ("sm_100", 2250, 1125, 4500),
     ("sm_120", 209.5, 104.8, 838)],
)  # fmt: skip
def test_the_peak_of_the_tensor_cores_is_the_published_one(name: str, float16: float, tf32: float, int8: float) -> None:
    sheet = target(name)
    tflops = {dtype: tensor_gflops(sheet, dtype) / 1e3 for dtype in sheet.tensor_macs}
    bfloat16 = 0 if name == "sm_75" else float16
    published = {"float16": float16, "bfloat16": bfloat16, "tf32": tf32, "int8": int8}
    assert tflops == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("name", sorted(targets()))
def test_mma_sync_reaches_its_share_of_the_peak(name: str) -> None:
    sheet = target(name)
    for dtype in sheet.tensor_macs:
        reached = 2e-3 * sheet.mma_macs(dtype) * sheet.sm_count * sheet.clock_mhz
        assert reached == pytest.approx(sheet.mma_share * tensor_gflops(sheet, dtype))
    # Where wgmma or tcgen05 is what the peak needs.
    assert (sheet.mma_share < 1) == (sheet.capability in (90, 100))


@pytest.mark.parametrize(("name", "digits"), [("sm_75", 75), ("sm_90a", 90), ("sm_100a", 100), ("sm_120", 120)])
def test_the_capability_is_in_the_name(name: str, digits: int) -> None:
    assert target(name).capability == digits


@pytest.mark.parametrize("name", sorted(targets()))
def test_a_block_fits_its_multiprocessor(name: str) -> None:
    sheet = target(name)
    assert sheet.shared_per_block + sheet.reserved_shared_bytes <= sheet.shared_per_sm
    assert sheet.max_threads_per_block <= sheet.max_threads_per_sm
    assert sheet.shared_per_sm <= sheet.l2_bytes


def test_the_cpu_emulates_an_architecture_and_is_none() -> None:
    cpu, emulated = target("cpu"), target("sm_80")
    assert (cpu.name, cpu.emulates, cpu.architecture, cpu.capability) == ("cpu", "sm_80", "sm_80", 80)
    assert replace(cpu, name="sm_80", product=emulated.product, emulates=None) == emulated
    assert cpu.product == "CPU emulation of NVIDIA A100 SXM4 80GB"
    assert architectures() == {name: sheet for name, sheet in targets().items() if name != "cpu"}
    assert {sheet.architecture for sheet in architectures().values()} == set(architectures())


def test_an_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(UnknownTarget, match=r"allowed: .*sm_90a") as refused:
        target("sm_1" * 1000)
    assert refused.value.field == "target"
    assert refused.value.allowed == sorted(targets())
    assert len(str(refused.value)) < 300
