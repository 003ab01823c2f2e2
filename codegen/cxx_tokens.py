"""C++ text as tokens, as far as the scanner needs: what could hide text from it is an error, not a guess.

Translation phases 2 and 3 of the C++ standard ([lex.phases]): continued lines are joined, comments become blanks.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

from codegen.errors import Unclassified

# Alternative spellings ([lex.digraph]) that would hide a brace or a directive from a naive reader.
_DIGRAPHS = {"<%": "{", "%>": "}", "<:": "[", ":>": "]", "%:": "#"}
_RAW_STRING = re.compile(r'(?:u8|u|U|L)?R"')
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\f\v]+|//[^\n]*|/\*.*?\*/)
      | (?P<newline>\n)
      | (?P<string>(?:u8|u|U|L)?"(?:[^"\\\n]|\\.)*")
      | (?P<character>(?:u8|u|U|L)?'(?:[^'\\\n]|\\.)+')
      | (?P<number>\.?[0-9](?:[eEpP][+-]|'[0-9a-zA-Z]|[0-9a-zA-Z_.])*)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<digraph><%|%>|<:|:>|%:)
      | (?P<operator>::|\.\.\.|->|\#\#|[-+*/%&|^~!=<>?:;,.(){}\[\]\#])
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    """`kind`: name, operator, number, string, character, newline. `line` counts from 1 in the unjoined text."""

    kind: str
    text: str
    line: int


def tokenize(text: str) -> list[Token]:
    """The tokens, newlines included (directives end at them); raises Unclassified where the text is not certain."""
    joined, line_of = _join_lines(text)
    tokens: list[Token] = []
    position = 0
    while position < len(joined):
        line = line_of(position)
        if _RAW_STRING.match(joined, position):
            # Its end depends on text that line joining has changed: nothing generated needs one.
            raise Unclassified(f"line {line}: raw strings are not allowed in generated text")
        match = _TOKEN.match(joined, position)
        if match is None or (match.group() == "/" and joined.startswith("/*", position)):
            raise Unclassified(f"line {line}: cannot read {joined[position : position + 20]!r}")
        kind = match.lastgroup or ""
        if kind == "digraph":
            tokens.append(Token("operator", _DIGRAPHS[match.group()], line))
        elif kind != "blank":
            tokens.append(Token(kind, match.group(), line))
        position = match.end()
    return tokens


def _join_lines(text: str) -> tuple[str, _Lines]:
    if "??" in text and re.search(r"\?\?[=/'()!<>-]", text):
        raise Unclassified("trigraphs are not allowed in generated text")
    # gcc also joins lines whose backslash is followed by blanks.
    pieces = re.split(r"\\[ \t\r\f\v]*\n", text)
    return "".join(pieces), _Lines(pieces)


class _Lines:
    """Line numbers of the unjoined text by position in the joined one."""

    def __init__(self, pieces: list[str]) -> None:
        self._starts: list[int] = [0]
        position = 0
        for index, piece in enumerate(pieces):
            self._starts.extend(position + match.end() for match in re.finditer("\n", piece))
            position += len(piece)
            if index + 1 < len(pieces):
                self._starts.append(position)

    def __call__(self, position: int) -> int:
        return bisect_right(self._starts, position)
