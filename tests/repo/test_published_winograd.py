"""TVM's templates on a T4, Winograd and the convolution: the roofline ranks them as they were measured."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.published_winograd import MEASURED, Knobs, Product, convolution_us, winograd_us, work_of


@cache
def predicted(images: int, filters_ahead: bool) -> tuple[float, float]:
    """Microseconds of Winograd and of the convolution."""
    return winograd_us(images, filters_ahead), convolution_us(images)


@pytest.mark.parametrize("filters_ahead", [True, False], ids=["filters ahead", "filters each time"])
@pytest.mark.parametrize("images", sorted(MEASURED))
def test_the_faster_one_is_predicted_faster(images: int, filters_ahead: bool) -> None:
    winograd, convolution = predicted(images, filters_ahead)
    assert (winograd < convolution) == (MEASURED[images][0] < MEASURED[images][1])


def test_winograd_gains_least_with_many_images_as_measured() -> None:
    """The convolution's tiles grow with the images; what Winograd moves does so too."""
    ratios = [predicted(images, True)[0] / predicted(images, True)[1] for images in sorted(MEASURED)]
    measured = [MEASURED[images][0] / MEASURED[images][1] for images in sorted(MEASURED)]
    assert ratios == sorted(ratios) and measured == sorted(measured)


def test_both_are_predicted_too_fast_but_by_less_than_2_2_times() -> None:
    for images, measured in MEASURED.items():
        slower = [1e3 * ms / us for ms, us in zip(measured, predicted(images, True), strict=True)]
        assert min(slower) > 1.1 and max(slower) < 2.2


def test_a_block_of_the_convolution_has_images_of_one_pixel() -> None:
    """8 images: 196 pixels and two halves of the filters, of which every pixel's blocks read all."""
    of_8 = Product(196, 8, 256, 2304, 0.0, gathered=True)
    made = work_of(of_8, Knobs(8, (1, 4), (1, 1), 1))
    assert made is not None
    work, _ = made
    assert work.blocks == 392 and work.mma == 196 * 8 * 256 * 2304
    assert work.l2_bytes == 2 * (392 * (8 + 128) * 2304 + 196 * 8 * 256)
    assert work_of(of_8, Knobs(8, (2, 4), (2, 1), 1)) is None  # 32 rows for 8 images
    assert work_of(of_8, Knobs(8, (1, 4), (1, 1), 3)) is not None
    assert work_of(of_8, Knobs(8, (1, 4), (1, 1), 5)) is None  # k is no multiple of 80
