"""Schedules of convolutions over rings of integers."""

from __future__ import annotations

RINGS = {"int32": 32, "int64": 64}
SPLIT_AHEAD = ("conv2d", "conv2d_dgrad")  # whose image and filters may be
AHEAD = {"limb_split": "ahead"}
