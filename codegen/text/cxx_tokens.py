"""C++ text as tokens, as far as the scanner needs: what could hide text from it is an error, not a guess.

Translation phases 2 and 3 of the C++ standard ([lex.phases]): continued lines are joined, comments become blanks."""

import re
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from codegen.errors import Unclassified

# Alternative spellings ([lex.digraph]) that would hide a brace or a directive from a naive reader.
_DIGRAPHS = {"<%": "{", "%>": "}", "<:": "[", ":>": "]", "%:": "#"}
# Blanks lead so that they cost no match of their own; what is common stands first where the order does not matter.
_TOKEN = re.compile(
    r"""[ \t\r\f\v]*(?:
        (?P<raw>(?:u8|u|U|L)?R")
      | (?P<string>(?:u8|u|U|L)?"(?:[^"\\\n]|\\.)*")
      | (?P<character>(?:u8|u|U|L)?'(?:[^'\\\n]|\\.)+')
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<newline>\n)
      | (?P<number>\.?[0-9](?:[eEpP][+-]|'[0-9a-zA-Z]|[0-9a-zA-Z_.])*)
      | (?P<comment>//[^\n]*|/\*.*?\*/)
      | (?P<unfinished>/\*)
      | (?P<digraph><%|%>|<:|:>|%:)
      | (?P<operator>::|\.\.\.|->|\#\#|[-+*/%&|^~!=<>?:;,.(){}\[\]\#])
      | (?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """`kind`: name, operator, number, string, character, newline. `line` counts from 1 in the unjoined text."""

    kind: str
    text: str
    line: int


def tokenize(text: str, first_line: int = 1) -> list[Token]:
    """The tokens, newlines included (directives end at them); raises Unclassified where the text is not certain.
    `first_line` is the number of the text's first line."""
    joined, line_of = _join_lines(text, first_line)
    tokens: list[Token] = []
    position, match_next = 0, _TOKEN.scanner(joined).match  # type: ignore[attr-defined]  # not in typeshed
    while (match := match_next()) is not None:
        kind, position = match.lastgroup, match.end()
        if kind == "comment":
            continue
        if kind == "end":
            return tokens
        spelled, line = match[kind], line_of(match.start(kind))
        if kind == "raw":
            # Its end depends on text that line joining has changed: nothing generated needs one.
            raise Unclassified(f"line {line}: raw strings are not allowed in generated text")
        if kind == "unfinished":
            raise Unclassified(f"line {line}: a comment that does not end")
        if kind == "digraph":
            kind, spelled = "operator", _DIGRAPHS[spelled]
        tokens.append(Token(kind, spelled, line))
    raise Unclassified(f"line {line_of(position)}: cannot read {joined[position : position + 20]!r}")


def _join_lines(text: str, first_line: int) -> tuple[str, Callable[[int], int]]:
    """The joined text, and the line of the unjoined one that a place of it is from."""
    if "??" in text and re.search(r"\?\?[=/'()!<>-]", text):
        raise Unclassified("trigraphs are not allowed in generated text")
    # gcc also joins lines whose backslash is followed by blanks.
    pieces = re.split(r"\\[ \t\r\f\v]*\n", text)
    starts, position = [0], 0
    for index, piece in enumerate(pieces):
        starts.extend(position + match.end() for match in re.finditer("\n", piece))
        position += len(piece)
        if index + 1 < len(pieces):
            starts.append(position)
    return "".join(pieces), lambda at: first_line - 1 + bisect_right(starts, at)


CONDITIONALS = frozenset({"if", "ifdef", "ifndef", "elif", "else", "endif", "error", "undef"})
_CLOSING = {")": "(", "]": "[", "}": "{"}


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
