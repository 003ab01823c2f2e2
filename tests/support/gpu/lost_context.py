"""Checks of kernels, to be run in processes of their own, of which one ends its process as a lost context does."""

from __future__ import annotations

import os
from typing import Any

LOST, RIGHT = "lost", "all is as it was promised"


def check_here(module: str, device: str, name: str, *_: Any) -> str:
    if name == LOST:
        os.abort()
    return RIGHT
