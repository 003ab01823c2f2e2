"""Data sheets: complete, plausible, sourced."""

from __future__ import annotations

import pytest

from codegen.errors import UnknownTarget
from codegen.targets import target, targets


@pytest.mark.parametrize("name", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"])
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
    assert target(name).fp32_gflops / 1e3 == pytest.approx(tflops, rel=0.01)


@pytest.mark.parametrize("name", sorted(targets()))
def test_a_block_fits_its_multiprocessor(name: str) -> None:
    sheet = target(name)
    assert sheet.shared_per_block + sheet.reserved_shared_bytes <= sheet.shared_per_sm
    assert sheet.max_threads_per_block <= sheet.max_threads_per_sm
    assert sheet.shared_per_sm <= sheet.l2_bytes


def test_an_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(UnknownTarget, match=r"allowed: .*sm_90a") as refused:
        target("sm_1" * 1000)
    assert refused.value.field == "target"
    assert refused.value.allowed == sorted(targets())
    assert len(str(refused.value)) < 300
