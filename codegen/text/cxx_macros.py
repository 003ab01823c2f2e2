"""Preprocessor directives as the scanner sees them: every branch of a conditional counts, nothing is ever undefined.

That errs on the side of seeing more than the compiler does: what is not there cannot clash.
"""

from dataclasses import dataclass, field

from codegen.errors import Unclassified
from codegen.text.cxx_tokens import Token, tokenize

CONDITIONALS = frozenset({"if", "ifdef", "ifndef", "elif", "else", "endif", "error", "undef"})
_CLOSING = {")": "(", "]": "[", "}": "{"}


@dataclass(frozen=True)
class Macro:
    """`parameters` is None for an object-like macro."""

    parameters: tuple[str, ...] | None
    body: tuple[Token, ...]


@dataclass
class Macros:
    """All macros of a text; one name may have a definition per branch of a conditional."""

    by_name: dict[str, list[Macro]] = field(default_factory=dict)

    def define(self, tokens: list[Token]) -> None:
        """From the tokens after `define`. An unbalanced body could open or close a scope unseen: that is refused."""
        if not tokens or tokens[0].kind != "name":
            raise Unclassified(f"line {tokens[0].line if tokens else '?'}: cannot read this #define")
        name, rest = tokens[0], tokens[1:]
        # Whether "(" touches the name decides between the two kinds; a body that begins with one is refused either way.
        parameters: tuple[str, ...] | None = None
        if rest and rest[0].text == "(":
            end = next((index for index, token in enumerate(rest) if token.text == ")"), None)
            if end is None:
                raise Unclassified(f"line {name.line}: cannot read the parameters of macro {name.text}")
            parameters = tuple(token.text for token in rest[1:end] if token.text != ",")
            rest = rest[end + 1 :]
        require_balanced(rest, f"the body of macro {name.text}")
        self.by_name.setdefault(name.text, []).append(Macro(parameters, tuple(rest)))

    def expand(self, name: str, arguments: list[list[Token]], line: int) -> list[list[Token]]:
        """The expansion of each definition of a function-like macro."""
        expansions = []
        for macro in self.by_name[name]:
            if macro.parameters is None or len(macro.parameters) != len(arguments):
                raise Unclassified(f"line {line}: macro {name} is not used as it is defined")
            expansions.append(_substitute(macro, dict(zip(macro.parameters, arguments, strict=True)), line))
        return expansions


def require_balanced(tokens: list[Token], what: str) -> None:
    """Raises Unclassified unless brackets close in the order in which they opened."""
    opened: list[str] = []
    for token in tokens:
        if token.kind != "operator":
            continue
        if token.text in "([{":
            opened.append(token.text)
        elif token.text in _CLOSING and (not opened or opened.pop() != _CLOSING[token.text]):
            raise Unclassified(f"line {token.line}: {what} closes a bracket that it did not open")
    if opened:
        raise Unclassified(f"line {tokens[0].line}: {what} leaves a bracket open")


def _substitute(macro: Macro, arguments: dict[str, list[Token]], line: int) -> list[Token]:
    text: list[str] = []
    paste = False
    for index, token in enumerate(macro.body):
        if token.text == "##":
            paste = True
            continue
        if token.text == "#" and index + 1 < len(macro.body) and macro.body[index + 1].text in arguments:
            text.append('""')
            continue
        piece = " ".join(argument.text for argument in arguments[token.text]) if token.text in arguments else token.text
        text.append(piece if paste or not text else f" {piece}")
        paste = False
    return [Token(token.kind, token.text, line) for token in tokenize("".join(text)) if token.kind != "newline"]
