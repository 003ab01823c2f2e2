"""Which functions a generated text defines, from the text alone.

Everything at namespace scope is classified; what cannot be is an error, because it might define a function unseen.
The shared headers (namespace `cukiln`) come first and may have overloads, and macros that bodies use. From the first
other namespace on, every namespace is one kernel's: opened once, without directives, macros, friends, assembly or
declarations.
"""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from codegen.errors import NotUnique, Unclassified
from codegen.text.cxx_tokens import CONDITIONALS, Token, require_balanced, tokenize

SHARED = "cukiln"
_FIRST_KERNEL = "\nnamespace kernel_"
_PIECE = re.compile(r"^namespace ", re.MULTILINE)
# Names that take parentheses in a declaration without being its name.
_WITH_PARENTHESES = frozenset(
    {"__launch_bounds__", "__maxnreg__", "alignas", "__align__", "__attribute__", "decltype", "noexcept"}
)
# What the CPU emulation defines away: the only macros that may stand in a kernel's namespace.
_QUALIFIERS = frozenset(
    {
        "__device__", "__host__", "__global__", "__forceinline__", "__launch_bounds__", "__maxnreg__", "__restrict__",
        "__align__",
    }
)  # fmt: skip
_NEVER = frozenset({"friend", "_Pragma", "import", "module", "export"})
_NEVER_IN_A_KERNEL = frozenset({"asm", "__asm__", "__asm", "extern", "__attribute__", "template", "namespace", "using"})
_CLASSES = frozenset({"struct", "class", "union", "enum"})
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")


@dataclass(frozen=True)
class Function:
    """A function definition at namespace scope; `name` is `outer::inner::function`, `::function` at global scope."""

    name: str
    line: int

    @property
    def shared(self) -> bool:
        return self.name.startswith(f"{SHARED}::")


def scan_functions(text: str) -> list[Function]:
    """Every function definition at namespace scope, in order, overloads one by one."""
    scanner = _Scanner(tokens_of(text))
    scanner.run()
    return scanner.functions


def tokens_of(text: str) -> list[Token]:
    """As `tokenize(text)`. Groups share their headers, whose tokens are most of the work, so those are kept. No token
    reaches over the end of a line, but for a comment (`tokenize` refuses one that does not end) and joined lines."""
    end = text.find(_FIRST_KERNEL) + 1
    headers = text[:end]
    if not end or headers.rstrip(" \t\r\f\v\n").endswith("\\"):
        return tokenize(text)
    try:
        return [*read_headers(headers), *tokenize(text[end:], headers.count("\n") + 1)]
    except Unclassified:  # perhaps only because a comment reaches over the cut: the whole text decides
        return tokenize(text)


@lru_cache(maxsize=64)  # more than there are operators: turns through fewer would find each forgotten
def read_headers(headers: str) -> tuple[Token, ...]:
    """The tokens of what many texts begin with; a worker reads those of every operator once, before its forks.
    Operators share most of them: what stands in the same lines of two is read once. Cut as in `tokens_of`."""
    cuts = [0, *(match.start() for match in _PIECE.finditer(headers)), len(headers)]
    pieces = [headers[begin:end] for begin, end in pairwise(cuts)]
    if any(piece.rstrip(" \t\r\f\v\n").endswith("\\") for piece in pieces):
        return tuple(tokenize(headers))
    tokens: list[Token] = []
    line = 1
    try:
        for piece in pieces:
            tokens += _read_piece(piece, line)
            line += piece.count("\n")
    except Unclassified:
        return tuple(tokenize(headers))
    return tuple(tokens)


@lru_cache(maxsize=1024)
def _read_piece(piece: str, line: int) -> list[Token]:
    return tokenize(piece, line)


def assert_unique(text: str, expected: Collection[str]) -> None:
    """Raises NotUnique unless the functions outside the shared headers are exactly `expected`, each defined once."""
    counts = Counter(function.name for function in scan_functions(text) if not function.shared)
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        raise NotUnique(f"defined more than once: {', '.join(repeated)}")
    if unexpected := sorted(counts.keys() - set(expected)):
        raise NotUnique(f"defined, but not expected: {', '.join(unexpected)}")
    if missing := sorted(set(expected) - counts.keys()):
        raise NotUnique(f"expected, but not defined: {', '.join(missing)}")


@dataclass
class _Scanner:
    """Recursive descent over declarations. Directives are taken out first; their order against the text is kept."""

    raw: list[Token]
    functions: list[Function] = field(default_factory=list)
    macros: set[str] = field(default_factory=set)
    kernels: set[str] = field(default_factory=set)

    def run(self) -> None:
        tokens = self._without_directives()
        require_balanced(tokens, "the text")
        self._scope(tokens, ())

    def _without_directives(self) -> list[Token]:
        tokens: list[Token] = []
        first_kernel_line = self._first_kernel_line()
        at_line_start, index = True, 0
        while index < len(self.raw):
            token = self.raw[index]
            if token.kind == "newline":
                at_line_start = True
            elif at_line_start and token.text == "#":
                end = next((i for i in range(index, len(self.raw)) if self.raw[i].kind == "newline"), len(self.raw))
                self._directive(self.raw[index + 1 : end], first_kernel_line)
                index = end
                continue
            else:
                at_line_start = False
                tokens.append(token)
                if token.line >= first_kernel_line and token.text in self.macros - _QUALIFIERS:
                    raise Unclassified(f"line {token.line}: macro {token.text} after the shared headers")
            index += 1
        return tokens

    def _first_kernel_line(self) -> int:
        """The line of the first namespace that is not the shared one; nested ones are `cukiln`'s own."""
        depth = 0
        for index, token in enumerate(self.raw):
            if token.kind != "operator" and not (depth == 0 and token.text == "namespace"):
                continue
            if token.text == "{":
                depth += 1
            elif token.text == "}":
                depth -= 1
            elif token.text == "namespace" and index + 1 < len(self.raw) and self.raw[index + 1].text != SHARED:
                return token.line
        return 2**62

    def _directive(self, tokens: list[Token], first_kernel_line: int) -> None:
        if not tokens:
            return
        name, rest = tokens[0], tokens[1:]
        texts = [token.text for token in rest]
        if name.text == "pragma" and texts[:1] in (["unroll"], ["once"]):
            return
        if name.line >= first_kernel_line:
            raise Unclassified(f"line {name.line}: #{name.text} after the shared headers")
        if name.text == "define":
            self._define(name, rest)
        elif name.text == "include":
            if texts[:1] != ["<"]:
                raise Unclassified(f"line {name.line}: only system headers may be included")
        elif name.text == "pragma":
            if texts[:2] != ["GCC", "diagnostic"]:
                raise Unclassified(f"line {name.line}: #pragma {' '.join(texts)[:40]}")
        elif name.text not in CONDITIONALS:
            raise Unclassified(f"line {name.line}: #{name.text} is not allowed in generated text")

    def _define(self, at: Token, tokens: list[Token]) -> None:
        """Never undefined, and known in every branch. An unbalanced body could open or close a scope unseen."""
        if not tokens or tokens[0].kind != "name":
            raise Unclassified(f"line {at.line}: cannot read this #define")
        require_balanced(tokens[1:], f"macro {tokens[0].text}")
        self.macros.add(tokens[0].text)

    def _scope(self, tokens: list[Token], inside: tuple[str, ...]) -> None:
        index = 0
        while index < len(tokens):
            index = self._declaration(tokens, index, inside)

    def _declaration(self, tokens: list[Token], index: int, inside: tuple[str, ...]) -> int:
        """Classifies the declaration at `index` and returns where the next one begins."""
        token = tokens[index]
        if token.text == ";":
            return index + 1
        if token.text == "namespace":
            return self._namespace(tokens, index, inside)
        if token.text in self.macros - _QUALIFIERS:
            raise Unclassified(f"line {token.line}: macro {token.text} used at namespace scope")
        start = self._after_template(tokens, index)
        end = self._head_end(tokens, start)
        head, ends_with = tokens[start:end], tokens[end].text
        self._require_plain(head, inside)
        first = head[0].text if head else ""
        if first in _CLASSES and not self._is_function(head):
            return self._class(tokens, head, end, inside)
        if first == "static_assert" and ends_with == ";":
            return end + 1
        if ends_with == ";" and self._is_name(head, inside):
            return end + 1
        if self._is_function(head):
            return self._function(tokens, head, end, inside)
        if self._is_variable(head, inside):
            return self._variable_end(tokens, end)
        raise self._unclassified(token, head)

    def _namespace(self, tokens: list[Token], index: int, inside: tuple[str, ...]) -> int:
        names, at = [], index + 1
        while tokens[at].kind == "name":
            names.append(tokens[at].text)
            at += 2 if tokens[at + 1].text == "::" else 1
        if not names or tokens[at].text != "{":
            raise Unclassified(f"line {tokens[index].line}: only plain namespaces with a name are allowed")
        if not inside:
            self._enter(names[0], tokens[index].line)
        elif inside[0] != SHARED:
            raise Unclassified(f"line {tokens[index].line}: a namespace inside the kernel namespace {inside[0]}")
        end = _matching(tokens, at)
        self._scope(tokens[at + 1 : end], (*inside, *names))
        return end + 1

    def _enter(self, name: str, line: int) -> None:
        if name in self.kernels:
            raise NotUnique(f"line {line}: the namespace {name} is opened twice")
        if name != SHARED:
            self.kernels.add(name)
        elif self.kernels:
            raise Unclassified(f"line {line}: the shared namespace {SHARED} is opened after the first kernel")

    def _after_template(self, tokens: list[Token], index: int) -> int:
        while tokens[index].text == "template":
            if index + 1 == len(tokens) or tokens[index + 1].text != "<":
                raise Unclassified(f"line {tokens[index].line}: an explicit instantiation")
            depth, index = 0, index + 1
            while True:
                text = tokens[index].text
                if text in _OPENING:
                    index = _matching(tokens, index)
                depth += (text == "<") - (text == ">")
                index += 1
                if depth == 0:
                    break
                if index >= len(tokens):
                    raise Unclassified(f"line {tokens[-1].line}: a template's parameters do not end")
            if index == len(tokens):
                raise Unclassified(f"line {tokens[-1].line}: a template of nothing")
        return index

    def _head_end(self, tokens: list[Token], index: int) -> int:
        """Where the declaration's `;` or `{` at depth 0 stands."""
        start = index
        while index < len(tokens):
            text = tokens[index].text
            if text in (";", "{"):
                return index
            index = _matching(tokens, index) + 1 if text in _OPENING else index + 1
        raise self._unclassified(tokens[start], tokens[start:])

    def _require_plain(self, head: list[Token], inside: tuple[str, ...]) -> None:
        for token in head:
            if token.kind == "name" and token.text in (*_NEVER, "extern"):
                raise self._unclassified(token, head)
            if token.text in self.macros - _QUALIFIERS:
                raise Unclassified(f"line {token.line}: macro {token.text} in a declaration")

    def _class(self, tokens: list[Token], head: list[Token], end: int, inside: tuple[str, ...]) -> int:
        if tokens[end].text == ";":
            return end + 1
        close = _matching(tokens, end)
        for token in tokens[end:close]:
            if token.text in _NEVER:
                raise Unclassified(
                    f"line {token.line}: {token.text} inside {head[0].text} may define a function outside it"
                )
        if inside and inside[0] != SHARED:
            self._require_kernel_body(tokens[end:close], frozenset({"using", "template"}))
        if close + 1 == len(tokens) or tokens[close + 1].text != ";":
            raise Unclassified(f"line {tokens[close].line}: text between {head[0].text} and its semicolon")
        return close + 2

    def _is_name(self, head: list[Token], inside: tuple[str, ...]) -> bool:
        """`using T = int;`, and in shared headers `using a::b;`: another name of what is defined elsewhere."""
        if len(head) < 3 or head[0].text != "using":
            return False
        return head[2].text == "=" or (inside[:1] == (SHARED,) and head[1].text != "namespace")

    def _is_function(self, head: list[Token]) -> bool:
        return _parameters(head) is not None and "=" not in [t.text for t in head[: _parameters(head) or 0]]

    def _function(self, tokens: list[Token], head: list[Token], end: int, inside: tuple[str, ...]) -> int:
        opens = _parameters(head) or 0
        name = head[opens - 1]
        before, after = head[: opens - 1], head[_matching(head, opens) + 1 :]
        if not before or before[-1].text in ("::", "~", "operator") or name.text == "operator":
            # A qualified name defines something outside this namespace; nothing before a name is a macro's use.
            raise self._unclassified(name, head)
        if any(token.text not in ("const", "noexcept") for token in after):
            raise self._unclassified(name, head)
        kernel = bool(inside) and inside[0] != SHARED
        if tokens[end].text == ";":
            if kernel or not inside:
                raise Unclassified(f"line {name.line}: {name.text} is declared, but not defined")
            return end + 1
        close = _matching(tokens, end)
        if kernel:
            self._require_kernel_body(tokens[end : close + 1])
        self.functions.append(Function("::".join((*inside, name.text)) if inside else f"::{name.text}", name.line))
        return close + 1

    def _require_kernel_body(self, tokens: list[Token], allowed: frozenset[str] = frozenset()) -> None:
        for token in tokens:
            if token.text in _NEVER_IN_A_KERNEL - allowed:
                raise Unclassified(f"line {token.line}: {token.text} in a kernel's namespace")

    def _is_variable(self, head: list[Token], inside: tuple[str, ...]) -> bool:
        texts = [token.text for token in head]
        before_value = texts[: texts.index("=")] if "=" in texts else texts
        return (
            len(before_value) > 1
            and "(" not in before_value
            and ("constexpr" in texts or (bool(inside) and inside[0] == SHARED and "=" in texts))
        )

    def _variable_end(self, tokens: list[Token], end: int) -> int:
        """Past the `;` that ends a variable, over its braced initialiser if it has one."""
        while tokens[end].text != ";":
            end = _matching(tokens, end) + 1 if tokens[end].text in _OPENING else end + 1
            if end >= len(tokens):
                raise Unclassified(f"line {tokens[-1].line}: a variable does not end")
        return end + 1

    def _unclassified(self, at: Token, head: list[Token]) -> Unclassified:
        shown = " ".join(token.text for token in head[:12])
        return Unclassified(f"line {at.line}: cannot classify {shown!r} at namespace scope")


def _parameters(head: list[Token]) -> int | None:
    """Where the parameter list of a function's head opens; None where it has none."""
    index = 0
    while index < len(head):
        if head[index].text == "(":
            if index == 0:
                return None
            if head[index - 1].text not in _WITH_PARENTHESES:
                return index if head[index - 1].kind == "name" else None
        index = _matching(head, index) + 1 if head[index].text in _OPENING else index + 1
    return None


def _matching(tokens: list[Token], index: int) -> int:
    """Where the bracket that opens at `index` closes; the text is known to be balanced."""
    depth = 0
    for at in range(index, len(tokens)):
        depth += (tokens[at].text in _OPENING) - (tokens[at].text in _CLOSING)
        if depth == 0:
            return at
    raise Unclassified(f"line {tokens[index].line}: a bracket does not close")
