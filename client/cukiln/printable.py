"""Foreign text, such as problems' names and compilers' messages, made safe for terminals, logs and pages."""

import re

# Control characters move the cursor and start commands, C1 ones too (ECMA-48, 5.3); separators break lines; marks of
# direction reorder what follows (Unicode TR 36, 2.5).
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LAYOUT = "\n\t"
_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def printable(text: str, *, lines: bool = False) -> str:
    """With such characters as Python writes them: `\\x1b`. `lines`: line ends and tabs stay."""
    return _UNSAFE.sub(lambda match: match[0] if lines and match[0] in _LAYOUT else _escaped(match[0]), text)


def _escaped(character: str) -> str:
    # Not by the codec `unicode_escape`: it is imported when it is first used, which fails where files cannot be opened.
    number = ord(character)
    return _NAMED.get(character) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")
