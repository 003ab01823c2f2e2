"""The label of a CPU verification: `cpu` once every primitive that a kernel uses matched its CPU emulation on a GPU."""

import re
from functools import cache
from typing import Literal

from codegen.primitives import confirmed_primitives, primitives
from codegen.text.render_group import header_text, operator_text


def verified_label(operator_name: str) -> Literal["cpu", "cpu-unconfirmed"]:
    """`cpu-unconfirmed` while `device/confirmed.json` lacks a primitive that the operator's kernels use, or has it with
    another text than today's."""
    return "cpu" if primitives_of(operator_name) <= confirmed_primitives() else "cpu-unconfirmed"


@cache
def primitives_of(operator_name: str) -> frozenset[str]:
    """The primitives that an operator's kernels, epilogue included, may call."""
    used = re.findall(r"\b\w+\b", operator_text(operator_name) + header_text("epilogue.cuh"))
    return primitives() & set(used)
