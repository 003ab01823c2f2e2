"""Mutants of an operator's text: what must be wrong when a barrier, a wait, a check, a swizzle or a stage is.

The sites are found in the text alone; all mutants are then compiled at once, each behind a switch that decides while
the kernel runs ("mutant schemata": Untch, Offutt and Harrold, ISSTA 1993), because g++ takes much longer than a run.

| in the text                          | mutants                                                  |
|--------------------------------------|----------------------------------------------------------|
| `__syncthreads();`                   | deleted                                                  |
| `warp_barrier();`                    | deleted                                                  |
| `cp_async_commit();`                 | deleted                                                  |
| `cp_async_wait<N>();`                | deleted; one group more may be under way                 |
| `in_bounds(i, n)` `// bounds: name`  | always true; one more is allowed                         |
| `swizzle(row)` `// swizzle: name`    | of the next row                                          |
| `stage_at<F>(s, i)` `// stage: name` | the next stage, or the place behind the last one         |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from codegen.operators import operator
from tests.support.kernels.cpu_helpers import loaded

_STATEMENTS = {
    "barrier": re.compile(r"__syncthreads\(\);"),
    "warp barrier": re.compile(r"\bwarp_barrier\(\);"),
    "commit": re.compile(r"\bcp_async_commit\(\);"),
    "wait": re.compile(r"\bcp_async_wait<(.+)>\(\);"),
}
# What is called on a line that has the mark `// kind: name`, and on no other.
_CALLS = {
    "bounds": re.compile(r"\bin_bounds\("),
    "swizzle": re.compile(r"\bswizzle\("),
    "stage": re.compile(r"\bstage_at<\w+>\("),
}
KINDS = (*_STATEMENTS, *_CALLS)
_MARK = re.compile(rf"// ({'|'.join(_CALLS)}): (.+)$")
# Line 1 of a file is a comment: this goes before it, so that no line of the text moves.
_SWITCH = (
    'extern "C" { __attribute__((visibility("default"))) int cukiln_mutant = -1; '
    '__attribute__((visibility("default"))) unsigned char cukiln_reached[1024]; } '
    "static __attribute__((noinline)) bool mutant(int number) "
    "{ cukiln_reached[number] = 1; return cukiln_mutant == number; } "
)


@dataclass(frozen=True)
class Site:
    """One place of the text and what becomes of it. `mutants`: (what, text instead of `old`). `switched` holds all of
    them, with `#0`, `#1`, … where their switches belong."""

    kind: str
    name: str
    file: str
    line: int
    old: str
    mutants: tuple[tuple[str, str], ...]
    switched: str


@dataclass(frozen=True)
class Mutant:
    """`name` does not depend on line numbers; `number` is the position among all mutants of the text."""

    number: int
    name: str
    kind: str
    file: str
    line: int
    old: str
    new: str


def find_sites(texts: Mapping[str, str]) -> list[Site]:
    """All sites of an operator's files. Raises where a call lacks its mark, or a mark its call."""
    return [site for file, text in texts.items() for site in _sites_of(file, text)]


def mutants(sites: Sequence[Site]) -> list[Mutant]:
    every = [(site, what, new) for site in sites for what, new in site.mutants]
    return [
        Mutant(number, f"{site.name} {what}".strip(), site.kind, site.file, site.line, site.old, new)
        for number, (site, what, new) in enumerate(every)
    ]


def with_switches(texts: Mapping[str, str], sites: Sequence[Site]) -> dict[str, str]:
    """The files with every mutant in them: `cukiln_mutant` names the one that is on, `cukiln_reached` says which
    switches were asked. Line numbers stay."""
    lines = {file: text.splitlines() for file, text in texts.items()}
    number = 0
    for site in sites:
        switched = site.switched
        for index in range(len(site.mutants)):
            switched = switched.replace(f"#{index}", f"mutant({number})")
            number += 1
        line = lines[site.file][site.line - 1]
        # Of sites that share a text, a later one is put around an earlier one: inside its last mention of the text.
        assert site.old in line, (site.name, line)
        lines[site.file][site.line - 1] = switched.join(line.rsplit(site.old, 1))
    first = next(iter(lines))
    lines[first][0] = _SWITCH + lines[first][0]
    return {file: "\n".join(texts) + "\n" for file, texts in lines.items()}


def _sites_of(file: str, text: str) -> Iterator[Site]:
    counts = dict.fromkeys(_STATEMENTS, 0)
    for number, line in enumerate(text.splitlines(), 1):
        code = line.partition("//")[0]
        for kind, pattern in _STATEMENTS.items():
            for match in pattern.finditer(code):
                name = f"{file}: {kind} {counts[kind]}"
                counts[kind] += 1
                yield Site(kind, name, file, number, match[0], *_statement(kind, match))
        kind, name = _mark(line, code)
        if kind:
            called, arguments = _call(code, _CALLS[kind])
            yield Site(kind, f"{file}: {kind} {name}", file, number, called, *_changed_call(kind, called, arguments))


def _statement(kind: str, match: re.Match[str]) -> tuple[tuple[tuple[str, str], ...], str]:
    if kind != "wait":
        return (("deleted", ";"),), f"{{ if (!#0) {match[0]} }}"
    later = f"cp_async_wait<({match[1]}) + 1>();"
    return (("deleted", ";"), ("one later", later)), f"{{ if (#1) {later} else if (!#0) {match[0]} }}"


def _changed_call(kind: str, called: str, arguments: list[str]) -> tuple[tuple[tuple[str, str], ...], str]:
    before, last = (
        called[: called.index("(") + 1] + "".join(f"{argument}, " for argument in arguments[:-1]),
        arguments[-1],
    )
    next_one = f"{before}{last} + 1)"
    if kind == "bounds":
        return (("deleted", "true"), ("off by one", next_one)), f"(#0 || {before}{last} + #1))"
    return (("shifted", next_one),), f"{before}{last} + #0)"


def _mark(line: str, code: str) -> tuple[str, str]:
    """The kind and name of a line's mark; empty where it has none and needs none."""
    match = _MARK.search(line)
    # A definition has a `__forceinline__` and is no call.
    needed = [] if "__forceinline__" in code else [kind for kind, call in _CALLS.items() if call.search(code)]
    if needed != ([match[1]] if match else []):
        words = ", ".join(f"'// {kind}: name'" for kind in needed) or "a call"
        raise ValueError(f"a marked call and its mark belong on one line; {words} is missing: {line.strip()}")
    return (match[1], match[2].strip()) if match else ("", "")


def _call(code: str, pattern: re.Pattern[str]) -> tuple[str, list[str]]:
    """The text of the one call on a line, and its arguments."""
    (match,) = pattern.finditer(code)
    depth, arguments = 0, [""]
    for index in range(match.end() - 1, len(code)):
        depth += {"(": 1, ")": -1}.get(code[index], 0)
        if depth == 0:
            return code[match.start() : index + 1], [argument.strip() for argument in arguments]
        if depth == 1 and code[index] == ",":
            arguments.append("")
        elif index >= match.end():
            arguments[-1] += code[index]
    raise ValueError(f"a marked call must end on its line: {code.strip()}")


def changed(texts: Mapping[str, str], name: str, file: str, old: str, new: str) -> Site:
    """A site of one's own: `old`, which stands once in `file`, becomes `new`; both are expressions, or both statements,
    which end with `;`."""
    places = [number for number, line in enumerate(texts[file].splitlines(), 1) for _ in range(line.count(old))]
    if len(places) != 1:
        raise ValueError(f"{name}: {old!r} stands {len(places)} times in {file}, not once")
    switched = f"{{ if (#0) {{ {new} }} else {{ {old} }} }}" if old.endswith(";") else f"(#0 ? ({new}) : ({old}))"
    return Site("wrong", name, file, places[0], old, (("", new),), switched)


@contextmanager
def switched_operator(base: str, class_name: str, folder: Path, name: str, sites: Sequence[Site]) -> Iterator[None]:
    """The operator `base` under another name for a while, with every replacement of the sites behind a switch."""
    switched = with_switches(operator(base).kernel_texts, sites)
    with loaded([write_operator(folder, base, class_name, name, switched)]):
        yield


def switched_matmul(folder: Path, name: str, sites: Sequence[Site]) -> AbstractContextManager[None]:
    return switched_operator("matmul", "Matmul", folder, name, sites)


def write_operator(folder: Path, base: str, class_name: str, name: str, changed: Mapping[str, str]) -> Path:
    """An operator folder like the packaged `base`, under another name and with other text in the files `changed`. What
    `base` shares with others becomes its own."""
    texts = operator(base).kernel_texts
    assert changed.keys() <= texts.keys(), changed.keys() - texts.keys()
    for file, text in {**texts, **changed}.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text.replace(f"namespace {base}", f"namespace {name}"))
    (folder / "__init__.py").write_text(
        f"from pathlib import Path\n\nfrom codegen.operators.{base} import {class_name}\n\n\n"
        f"class Mutant({class_name}):\n    name = {name!r}\n    folder = Path(__file__).parent\n"
        f"    shared, files = (), {tuple(texts)!r}\n\n\n"
        "OPERATOR = Mutant()\n"
    )
    return folder
