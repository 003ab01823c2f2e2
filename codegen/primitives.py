"""The primitives that kernels are written in: where they are defined, and which of them a GPU has confirmed.

It needs Python's standard library alone, because the confirmation on a GPU (tests/gpu) uses it too.
"""

import hashlib
import json
import re
from functools import cache
from pathlib import Path

DEVICE = Path(__file__).parent / "device"
# Their PTX, and their CPU emulations; the rest of `cpu/` runs those.
PRIMITIVE_HEADERS = ("device.cuh", "convert.cuh", "warp.cuh", "async_copy.cuh", "matrix.cuh")
EMULATION_HEADERS = ("cpu/barriers.h", "cpu/twin.h", "cpu/async_copy.h", "cpu/convert.h", "cpu/warp.h", "cpu/matrix.h")
CONFIRMED = DEVICE / "confirmed.json"
BARRIER = "__syncthreads"

# A primitive is a function that such a header defines at the start of a line; its CPU emulation has the same name.
_DEFINED = re.compile(r"^__device__ __forceinline__ (?:constexpr )?[\w<>, ]+?[ *]+(\w+)\(", re.MULTILINE)
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', re.DOTALL)


@cache
def primitives() -> frozenset[str]:
    """The names of all primitives."""
    return frozenset({name for header in PRIMITIVE_HEADERS for name in _DEFINED.findall(_text(header))} | {BARRIER})


@cache
def primitive_digest(name: str) -> str:
    """Of a primitive's name, and of the code of all primitives and CPU emulations, which use parts of each other.
    Comments and line breaks do not count."""
    headers = ("launch.h", *PRIMITIVE_HEADERS, *EMULATION_HEADERS)
    code = [" ".join(_COMMENT.sub(lambda match: match[1] or "", _text(header)).split()) for header in headers]
    return hashlib.sha256("\0".join([name, *code]).encode()).hexdigest()


@cache
def confirmed_primitives() -> frozenset[str]:
    """Those whose PTX, as it is today, gave the results of its CPU emulation, as it is today, on a GPU. `make test-gpu`
    writes the file."""
    recorded = json.loads(CONFIRMED.read_text(encoding="utf-8"))["primitives"]
    return frozenset(
        name for name in primitives() & recorded.keys() if recorded[name]["digest"] == primitive_digest(name)
    )


@cache
def _text(header: str) -> str:
    return (DEVICE / header).read_text(encoding="utf-8")
