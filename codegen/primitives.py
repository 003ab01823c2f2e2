"""The primitives that kernels are written in: where they are defined, and a digest of what each of them is.

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
EMULATION_HEADERS = (
    "cpu/barriers.h",
    "cpu/emulation.h",
    "cpu/async_copy.h",
    "cpu/convert.h",
    "cpu/warp.h",
    "cpu/tensor_sums.h",
    "cpu/matrix.h",
)
CONFIRMED = DEVICE / "confirmed.json"
BARRIER = "__syncthreads"
# How tensor cores add (`cpu/tensor_sums.h`): those of Turing, Ampere and Ada, and those of Hopper and Blackwell.
TURING_SUMS, HOPPER_SUMS = 75, 90
_SUMS = "CUKILN_TENSOR_SUMS"

# A primitive is a function that such a header defines at the start of a line; its CPU emulation has the same name.
_DEFINED = re.compile(r"^__device__ __forceinline__ (?:constexpr )?[\w<>, ]+?[ *]+(\w+)\(", re.MULTILINE)
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', re.DOTALL)
_DEFINE = re.compile(r"^#define (\w+)(?:.*\\\n)*.*$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^#.*$", re.MULTILINE)
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
_WORD = re.compile(r"\w+")
_PIECE = re.compile(r'"(?:\\.|[^"\\\n])*"|[{};]|[^"{};]+')
_NAMESPACE = re.compile(r"\s*namespace \w+\s*\Z")
_ATTRIBUTE = re.compile(r"\[\[\w+\]\]|(?:__attribute__|alignas|__align__)\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_ANGLES = re.compile(r"<[^<>]*>")
_NAMES = (  # of a type, of a function, of a variable or an alias
    re.compile(r"^(?:template )?(?:struct|class|enum class|enum|union) (\w+)"),
    re.compile(r"(\w+) ?\("),
    re.compile(r"(\w+) ?(?:\[.*)?$"),
)


@cache
def primitives() -> frozenset[str]:
    """The names of all primitives."""
    return frozenset({name for header in PRIMITIVE_HEADERS for name in _DEFINED.findall(_text(header))} | {BARRIER})


@cache
def primitive_digest(name: str) -> str:
    """Of the code of a primitive and of its CPU emulation, with all that they use of the headers of both.
    Comments and line breaks do not count."""
    sides = (("launch.h", *PRIMITIVE_HEADERS), ("launch.h", *EMULATION_HEADERS))
    labelled = "\0\0".join("\0".join(_needed(name, side)) for side in sides)
    return hashlib.sha256(f"{name}\0\0{labelled}".encode()).hexdigest()


@cache
def confirmed_primitives(sums: int = TURING_SUMS) -> frozenset[str]:
    """Those whose PTX, as it is today, gave the results of its CPU emulation, as it is today, on a GPU; of `mma` one
    whose tensor cores add like those of `sums`. `make test-gpu` writes the file."""
    recorded = json.loads(CONFIRMED.read_text(encoding="utf-8"))["primitives"]
    return frozenset(
        name
        for name in primitives() & recorded.keys()
        if recorded[name]["digest"] == primitive_digest(name)
        and (not _adds(name) or tensor_sums(recorded[name].get("arch", "")) == sums)
    )


def tensor_sums(arch: str) -> int:
    """The oldest compute capability whose tensor cores add as those of this architecture (`sm_80`) do; 0 of none."""
    digits = "".join(character for character in arch if character.isdigit())
    return 0 if not digits else HOPPER_SUMS if int(digits) >= HOPPER_SUMS else TURING_SUMS


@cache
def _adds(name: str) -> bool:
    """Whether its emulation depends on whose tensor cores are meant."""
    return any(_SUMS in text for text in _needed(name, ("launch.h", *EMULATION_HEADERS)))


def _needed(name: str, headers: tuple[str, ...]) -> list[str]:
    """The declarations of `name` and, again and again, of the names that they mention."""
    declarations = _declarations(headers)
    needed: set[str] = set()
    waiting = {name} & declarations.keys()
    while waiting:
        needed |= waiting
        words = {
            word for used in waiting for text in declarations[used] for word in _WORD.findall(_STRING.sub("", text))
        }
        waiting = (words & declarations.keys()) - needed
    return sorted(text for used in needed for text in declarations[used])


@cache
def _declarations(headers: tuple[str, ...]) -> dict[str, list[str]]:
    """What the headers declare at namespace scope, macros included: by name, in order, without comments."""
    by_name: dict[str, list[str]] = {}
    for header in headers:
        text = _COMMENT.sub(lambda match: match[1] or "", _text(header))
        for match in _DEFINE.finditer(text):
            by_name.setdefault(match[1], []).append(_normal(match[0]))
        for declaration in _split(_DIRECTIVE.sub("", _DEFINE.sub("", text))):
            by_name.setdefault(_name(declaration), []).append(declaration)
    return by_name


def _split(text: str) -> list[str]:
    """The declarations of a text that has no comments and no directives; namespaces are looked through."""
    declarations: list[str] = []
    depth, current, ended = 0, "", False
    for piece in _PIECE.findall(text):
        if ended and (piece != ";" and piece.strip()):  # what ended with a brace takes a semicolon that follows along
            declarations.append(current)
            current, ended = "", False
        if piece == "{":
            if depth == 0 and _NAMESPACE.match(current):
                current = ""
                continue
            depth += 1
        elif piece == "}":
            if depth == 0:
                continue  # of a namespace
            depth -= 1
            ended = depth == 0
        current += piece
        if piece == ";" and depth == 0:
            declarations.append(current)
            current, ended = "", False
    return [_normal(declaration) for declaration in (*declarations, current) if declaration.strip()]


def _name(declaration: str) -> str:
    head = _ATTRIBUTE.sub("", re.split(r"[{;=]", declaration)[0])
    while (plain := _ANGLES.sub("", head)) != head:
        head = plain
    head = _normal(head)
    for pattern in _NAMES:
        if match := pattern.search(head):
            return match[1]
    raise ValueError(f"no name in {declaration[:80]!r}")


def _normal(text: str) -> str:
    return " ".join(text.split())


@cache
def _text(header: str) -> str:
    return (DEVICE / header).read_text(encoding="utf-8")
