"""The rules: what may be wrong on a line of CUDA. Each takes a line and names replacements within it; whether one
compiles, and what it changes, is for others to see."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """`code`: without its comment. `begins`: a statement begins with it. `names`: identifiers of the whole file."""

    code: str
    begins: bool
    names: Collection[str]

    @property
    def here(self) -> set[str]:
        """Names that are no members."""
        return set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", self.code))


@dataclass(frozen=True, order=True)
class Edit:
    """`old` at `column` becomes `new`."""

    column: int
    old: str
    new: str


Rule = Callable[[Line], Iterator[Edit]]

_NUMBER = re.compile(r"(?<![\w.])(\d+\.\d*(?:e[+-]?\d+)?f?|\d+[uU]?(?:LL|ll)?)(?![\w.])")
_NAME = re.compile(r"[A-Za-z_]\w*")
_COMPARISONS = {
    "<": ("<=", ">"), "<=": ("<", ">"), ">": (">=", "<"), ">=": (">", "<"), "==": ("!=",), "!=": ("==",),
}  # fmt: skip
_OPERATORS = {
    "+": ("-",), "-": ("+",), "*": ("+",), "/": ("*",), "%": ("/",), "&&": ("||",), "||": ("&&",), "<<": (">>",),
    ">>": ("<<",), "&": ("|",), "|": ("&",), "^": ("|",), "+=": ("-=", "="), "-=": ("+=",), "*=": ("+=", "="),
    "/=": ("*=",),
}  # fmt: skip
# Words of names that come in twos: a name with one of them is taken for the name with the other.
_PAIRS = (
    ("m", "n"), ("row", "column"), ("rows", "columns"), ("first", "second"), ("first", "last"), ("h", "w"),
    ("height", "width"), ("x", "y"), ("y", "z"), ("a", "b"), ("low", "high"), ("lo", "hi"), ("min", "max"),
    ("fminf", "fmaxf"), ("least", "greatest"), ("begin", "end"), ("kept", "reduced"), ("q", "k"), ("k", "v"),
    ("queries", "keys"), ("keys", "values"), ("in", "out"), ("input", "output"), ("top", "left"), ("lane", "warp"),
    ("steps", "stages"), ("even", "odd"), ("gamma", "beta"), ("reading", "filling"), ("own", "other"),
    ("state", "other"),
    ("qk", "v"), ("floor", "ceil"), ("exp", "log"), ("mean", "squares"), ("extent", "stride"), ("threads", "lanes"),
    ("image", "filters"), ("blockIdx", "threadIdx"), ("lines", "columns"), ("count", "index"),
)  # fmt: skip
_PARTNERS: dict[str, list[str]] = {}
for _one, _other in _PAIRS:
    _PARTNERS.setdefault(_one, []).append(_other)
    _PARTNERS.setdefault(_other, []).append(_one)
# Words of what says how long or how far apart something is.
_EXTENTS = frozenset((
    "rows", "columns", "extent", "extents", "stride", "strides", "pitch", "outputs", "units", "steps", "chunk",
    "slices", "height", "width", "channels", "batch", "count", "length", "lines", "window", "pad", "dilation",
    "group", "seq", "tile", "ld", "k", "m", "n", "heads", "tiles", "dim", "capacity", "size", "parts", "planes",
))  # fmt: skip
# The first two arguments of which may change places.
_SYMMETRIC = r"\b(fma|multiply_add|maximum|minimum|smaller|larger|plus|times|fmaxf|fminf|min|max)"
_KEYWORDS = frozenset((
    "return", "if", "else", "for", "while", "switch", "case", "using", "template", "struct", "class", "enum",
    "namespace", "static", "constexpr", "const", "public", "private", "typename", "goto", "do", "default",
    "break", "continue", "sizeof", "operator", "inline", "extern", "union", "typedef",
))  # fmt: skip


def constants(line: Line) -> Iterator[Edit]:
    """Off by one; a factor or a share twice as large."""
    for match in _NUMBER.finditer(line.code):
        number = match[0]
        if "." in number:
            value = float(number.rstrip("f"))
            others = [value + 1.0, value * 2.0] if value not in (0.0,) else [1.0]
            for other in dict.fromkeys(others):
                yield Edit(match.start(), number, f"{other!r}f")
        else:
            value = int(re.sub(r"\D", "", number))
            suffix = re.sub(r"\d", "", number)
            yield Edit(match.start(), number, f"{value + 1}{suffix}")
            if value:
                yield Edit(match.start(), number, f"{value - 1}{suffix}")
    for match in re.finditer(r"\b(true|false)\b", line.code):
        yield Edit(match.start(), match[0], "false" if match[0] == "true" else "true")


def comparisons(line: Line) -> Iterator[Edit]:
    # The formatter puts blanks around operators, and none within the brackets of templates.
    for match in re.finditer(r"(?<= )(<=|>=|==|!=|<|>)(?= )", line.code):
        for other in _COMPARISONS[match[0]]:
            yield Edit(match.start(), match[0], other)


def operators(line: Line) -> Iterator[Edit]:
    for match in re.finditer(r"(?<= )(\+=|-=|\*=|/=|&&|\|\||<<|>>|[-+*/%&|^])(?= )", line.code):
        for other in _OPERATORS[match[0]]:
            yield Edit(match.start(), match[0], other)
    for match in re.finditer(r"\+\+(?=\w)|--(?=\w)", line.code):
        yield Edit(match.start(), match[0], "--" if match[0] == "++" else "++")
    for match in re.finditer(r"(?<![\w)\]!=<>&|] )(?<=[ (\[,])([-!])(?=[\w(])", line.code):
        yield Edit(match.start(), match[1], "")


def operands(line: Line) -> Iterator[Edit]:
    """The other one of a pair: of names, of a call's first two arguments, of a choice."""
    for match in _NAME.finditer(line.code):
        words = re.split(r"(_)", match[0])
        for place, word in enumerate(words):
            for partner in _PARTNERS.get(word, ()):
                other = "".join([*words[:place], partner, *words[place + 1 :]])
                near = (
                    line.here if len(other) == 1 and line.code[match.start() - 1 : match.start()] != "." else line.names
                )
                if other in near:
                    yield Edit(match.start(), match[0], other)
    for match in re.finditer(r"[\w>]\(", line.code):
        if re.search(_SYMMETRIC + r"$", line.code[: match.end() - 1]):
            continue
        inside = _within(line.code, match.end() - 1)
        parts = _split(inside) if inside is not None else []
        # A declaration's parameters are no arguments.
        if len(parts) >= 2 and parts[0] != parts[1] and not re.search(r"[\w>&*] [\w&*]", parts[0]):
            yield Edit(match.end(), inside or "", ", ".join([parts[1], parts[0], *parts[2:]]))
    for match in re.finditer(r" \? ([\w.:\[\]]+) : ([\w.:\[\]]+)", line.code):
        yield Edit(match.start(), match[0], f" ? {match[2]} : {match[1]}")


def statements(line: Line) -> Iterator[Edit]:
    """One that is missing."""
    code = line.code.rstrip()
    for start, statement in _statements(line, code):
        if _is_expression(statement):
            yield Edit(start, statement, ";")


def extents(line: Line) -> Iterator[Edit]:
    """Of an extent or a stride one more, one less, or that of a neighbour."""
    for match in _NAME.finditer(line.code):
        words = set(match[0].lower().split("_"))
        before, after = line.code[: match.start()], line.code[match.end() :]
        declared = re.search(r"(\w|[>&*])\s*$", before) and not re.search(r"\b(return|case|else)\s*$", before)
        if not words & _EXTENTS or declared or re.match(r"\s*(=(?!=)|[-+*/]=|\(|<\w|::|\.|->|\[|\+\+|--)", after):
            continue
        # A member begins with its object.
        owner = re.search(r"(?:[A-Za-z_]\w*(?:\.|->|::))*$", before)
        start = owner.start() if owner else match.start()
        whole = line.code[start : match.end()]
        if re.search(r"(&|\+\+|--)$", line.code[:start]):
            continue
        yield Edit(start, whole, f"({whole} + 1)")
        yield Edit(start, whole, f"({whole} - 1)")


def elements(line: Line) -> Iterator[Edit]:
    """A neighbour of an array's element, or always the first."""
    for match in re.finditer(r"[\w\])]\[", line.code):
        inside = _within(line.code, match.end() - 1)
        name = re.search(r"[\w.:>\])-]*$", line.code[: match.end() - 1])
        declared = name and re.search(r"[\w>&*] $", line.code[: name.start()])
        if not inside or (
            declared and not re.search(r"\b(return|else|case) $", line.code[: name.start() if name else 0])
        ):
            continue
        for other in (f"({inside}) ^ 1", "0") if inside != "0" else ("1",):
            yield Edit(match.end(), inside, other)


def initial_values(line: Line) -> Iterator[Edit]:
    """One more than it should be."""
    pattern = r"(?:\(|^\s*|; )(?:static )?(?:constexpr )?(?:const )?[A-Za-z_][\w:]*(?:<[^;=]*>)? \w+ = ([^;{}]+);"
    for match in re.finditer(pattern, line.code):
        if line.begins and match[1] not in ("true", "false"):
            yield Edit(match.start(1), match[1], f"({match[1]}) + 1")


def cases(line: Line) -> Iterator[Edit]:
    """One that is dropped, or taken for granted."""
    for match in re.finditer(r"\bif (constexpr )?\(", line.code):
        inside = _within(line.code, match.end() - 1)
        if inside and inside not in ("true", "false"):
            yield Edit(match.end(), inside, "true")
            yield Edit(match.end(), inside, "false")
    for match in re.finditer(r" \? ", line.code):
        before = re.search(r"([\w.:\[\]]+ (?:[<>!=]=|[<>]) [\w.:]+|[\w.:]+)$", line.code[: match.start()])
        if before:
            yield Edit(before.start(), before[0], "true")
            yield Edit(before.start(), before[0], "false")
    for match in re.finditer(r"\bceil_div\(", line.code):
        inside = _within(line.code, match.end() - 1)
        parts = _split(inside) if inside is not None else []
        if len(parts) == 2:
            yield Edit(match.start(), f"ceil_div({inside})", f"(({parts[0]}) / ({parts[1]}))")


def wide_offsets(line: Line) -> Iterator[Edit]:
    """32 bits where there are 64."""
    for match in re.finditer(r"\bint64_t\(|static_cast<int64_t>\(|\bint64_t (?=\w+ [=])", line.code):
        yield Edit(match.start(), match[0], match[0].replace("int64_t", "int"))


RULES: dict[str, Rule] = {
    "constant": constants,
    "comparison": comparisons,
    "operator": operators,
    "operand": operands,
    "statement": statements,
    "extent": extents,
    "element": elements,
    "initial value": initial_values,
    "case": cases,
    "32-bit offset": wide_offsets,
}


def _within(code: str, opening: int) -> str | None:
    """What the bracket at `opening` encloses; null where it closes on another line."""
    depth = 0
    for at in range(opening, len(code)):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(code[at], 0)
        if depth == 0:
            return code[opening + 1 : at]
    return None


def _split(inside: str) -> list[str]:
    """A call's arguments."""
    depth, parts = 0, [""]
    for at, character in enumerate(inside):
        before = inside[at - 1 : at]
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        # Of a template: no blank before it.
        depth += (character == "<" and before not in (" ", "<")) - (character == ">" and before not in (" ", "-"))
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _statements(line: Line, code: str) -> Iterator[tuple[int, str]]:
    """The whole statements of a line, and where they begin: its own, that behind a condition, that behind a brace."""
    start = len(code) - len(code.lstrip())
    if not line.begins or not code.endswith((";", "}")):
        return
    while match := re.match(r"\s*(?:else )?(?:if|for) (?:constexpr )?\(|\s*else ", code[start:]):
        if match[0].endswith("("):
            inside = _within(code, start + match.end() - 1)
            if inside is None:
                return
            start += match.end() + len(inside) + 1
        else:
            start += match.end()
    rest = code[start:]
    start += len(rest) - len(rest.lstrip())
    if code[start:].endswith(";") and _balanced(code[start:]):
        yield start, code[start:]


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0


def _is_expression(statement: str) -> bool:
    """An assignment, a call or a jump, and no declaration."""
    if statement in ("continue;", "break;", "return;") or re.match(r"(\+\+|--)\w", statement):
        return True
    bare = statement
    while (shorter := re.sub(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}|<[^<> ]*>|<[^<>;=]*>(?=\()", "", bare)) != bare:
        bare = shorter
    first = _NAME.match(bare)
    if first and first[0] in _KEYWORDS:
        return False
    return bool(re.match(r"\*?[\w.:>-]+(\+\+|--)?( (=|\+=|-=|\*=|/=|\|=|&=|\^=|<<=|>>=) .*)?;$", bare))
