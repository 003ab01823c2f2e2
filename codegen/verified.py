"""What a CPU proof is worth: `cpu` once every primitive that a kernel uses matched its CPU twin on a real GPU."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Literal

from codegen.kernel import Kernel
from codegen.render_group import header_text, operator_text

# A primitive is a function that device.cuh defines at the start of a line; its CPU twin has the same name.
_DEFINED = re.compile(r"^__device__ __forceinline__ (?:constexpr )?[\w<>, ]+?[ *](\w+)\(", re.MULTILINE)
_BARRIER = "__syncthreads"


def verified_label(kernel: Kernel) -> Literal["cpu", "cpu-unconfirmed"]:
    """`cpu-unconfirmed` while `device/confirmed.json` lacks a primitive that the kernel's operator uses."""
    return "cpu" if primitives_of(kernel.operator) <= confirmed_primitives() else "cpu-unconfirmed"


@cache
def primitives_of(operator_name: str) -> frozenset[str]:
    """The primitives that an operator's kernels, epilogue included, may call."""
    defined = {*_DEFINED.findall(header_text("device.cuh")), _BARRIER}
    used = set(re.findall(r"\b\w+\b", operator_text(operator_name) + header_text("epilogue.cuh")))
    return frozenset(defined & used)


@cache
def confirmed_primitives() -> frozenset[str]:
    """Names of the primitives whose PTX gave the results of their CPU twins on a real GPU. The run of those tests
    writes the file, with the device and the date."""
    found = json.loads((files("codegen") / "device" / "confirmed.json").read_text(encoding="utf-8"))
    return frozenset(found["primitives"])
