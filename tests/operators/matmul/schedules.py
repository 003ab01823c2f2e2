"""Schedules, each good for the problem beside it."""

from __future__ import annotations

GOOD = {
    "tile_m": 64, "tile_n": 64, "tile_k": 32, "warps_m": 2, "warps_n": 2, "stages": 3, "fragments": 2, "mma_k": 16,
    "copy": "cp_async", "epilogue_path": "shared", "static_k": 0, "min_blocks": 1, "maxnreg": 0, "split": "none",
    "raster": 0, "split_k": 1, "stream_blocks": 0,
}  # fmt: skip


TURING = {"copy": "registers", "stages": 2, "mma_k": 8}


CUBE = {"m": 1024, "n": 1024, "k": 1024, "dtype": "float16"}


# Nine tiles leave multiprocessors idle on every device.
FEW_TILES = {"m": 192, "n": 192, "k": 16384}


STREAMED = {"split": "stream", "stream_blocks": 132}
