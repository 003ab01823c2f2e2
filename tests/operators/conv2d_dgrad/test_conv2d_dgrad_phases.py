"""In which order the kernels' own text (`phases.cuh`), compiled by g++, numbers the phases of an axis."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from codegen.text.render_cpu import render_cpu
from tests.operators.conv2d.kernels import Kernels
from tests.support.kernels.cpu_helpers import toolchain
from workers.cpu.build import CPU_FLAGS

# Writes of each phase in turn its first pixel, its pixels and its taps, and returns how many phases there are.
ENTRY = """
CUKILN_CPU_EXPORT int numbered(int extent, int taps, int stride, int padding, int dilation, int* out) {
  using namespace cukiln::conv2d_dgrad;
  const Along along = along_of(extent, taps, stride, padding, padding, dilation);
  for (int number = 0; number < along.phases; ++number) {
    const int first = first_pixel(along, number);
    const Part part = part_of<true>(along, first);
    const int found[] = {first, part.extent, part.taps};
    for (int i = 0; i < 3; ++i) out[3 * number + i] = found[i];
  }
  return along.phases;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("phases")
    text = render_cpu([Kernels("conv2d_dgrad").simt({"strided": True})]) + ENTRY
    (folder / "phases.cpp").write_text(text)
    command = [str(toolchain().host_compiler), *CPU_FLAGS, "-o", "phases.so", "phases.cpp", "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "phases.so"))


def numbered(library: ctypes.CDLL, extent: int, *axis: int) -> list[tuple[int, int, int]]:
    """(first pixel, pixels, taps) of each phase, in the order of their numbers."""
    out = (ctypes.c_int * (3 * extent))()
    count = library.numbered(extent, *axis, out)
    return [(out[3 * i], out[3 * i + 1], out[3 * i + 2]) for i in range(count)]


@pytest.mark.parametrize("padding", [0, 1, 2, 5, 40])
@pytest.mark.parametrize(("stride", "dilation"), [(2, 1), (3, 1), (2, 2), (4, 2), (6, 4), (5, 3), (7, 1), (1, 3)])
@pytest.mark.parametrize("taps", [1, 2, 3, 7])
def test_phases_have_every_pixel_once_and_fall_in_taps(
    taps: int, stride: int, dilation: int, padding: int, library: ctypes.CDLL
) -> None:
    extent = 11
    result = numbered(library, extent, taps, stride, padding, dilation)
    assert sorted(first for first, _, _ in result) == list(range(stride))
    assert sum(pixels for _, pixels, _ in result) == extent
    counts = [count for _, _, count in result]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == taps
    for first, _, count in result:
        assert count == sum((first + padding - tap * dilation) % stride == 0 for tap in range(taps))


def test_an_axis_that_is_shorter_than_the_stride_has_its_pixels_in_turn(library: ctypes.CDLL) -> None:
    assert numbered(library, 3, 2, 7, 1, 1) == [(0, 1, 1), (1, 1, 0), (2, 1, 0)]


def test_distances_whose_product_is_over_32_bits_are_numbered_too(library: ctypes.CDLL) -> None:
    stride, dilation = 65_537, 2**31 - 1
    result = numbered(library, stride, 1, stride, 0, dilation)
    assert len({first for first, _, _ in result}) == stride and result[0] == (0, 1, 1)
