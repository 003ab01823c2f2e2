"""Writes `client/cukiln/types/problems.py`, the operators' problems as types: `python -m tests.repo.problem_types`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from codegen.epilogue import PlainNode
from codegen.operators import operators
from codegen.problem import Problem

FILE = Path(__file__).parents[2] / "client" / "cukiln" / "types" / "problems.py"
HEAD = '''"""The operators' problems as types, so that a wrong field or value fails a type check.

Made of the operators' schemas by `python -m tests.repo.problem_types`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict


class ProblemHead(TypedDict, total=False):
    """What any problem may say beside what is computed."""

    name: str
    target: str
    device_class: str
    search: Mapping[str, Any]
'''
TELLS_KIND = ("operator", "op")  # has a default, without which no type checker tells the kinds apart
SCALARS = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "null": "None"}


class Types:
    """The TypedDicts of all operators; equal ones of several operators are one."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def add(self, name: str, body: str, prefix: str) -> str:
        if self.texts.setdefault(name, body) != body:
            name = f"{prefix}{name}"
            self.texts[name] = body
        return name


def problem_types() -> str:
    types = Types()
    kinds = {name: kind for name, kind in sorted(operators().items()) if name in BUILT_IN}
    fields = {kind.problem_type: _fields(types, kind.schema(), _camel(name)) for name, kind in kinds.items()}
    names = []
    for name, kind in kinds.items():
        base, inherited = "ProblemHead", set[str]()
        for parent in reversed(kind.problem_type.mro()[1:]):
            members = [of for of in fields if issubclass(of, parent)]
            shared = {line for line in fields[kind.problem_type] if all(line in fields[of] for of in members)}
            if issubclass(parent, Problem) and len(members) > 1 and shared - inherited:
                lines = [line for line in fields[kind.problem_type] if line in shared - inherited]
                base = types.add(f"{parent.__name__.removesuffix('Problem')}Fields", _body(base, lines), "")
                inherited |= shared
        own = [line for line in fields[kind.problem_type] if line not in inherited]
        names.append(types.add(f"{_camel(name)}Problem", _body(base, own), ""))
    classes = "\n\n".join(
        text if text.startswith(PLAIN) else f"\nclass {name}{text}" for name, text in types.texts.items()
    )
    return f"{HEAD}\n{classes}\n\nProblem = {' | '.join(names)}\n"


BUILT_IN = frozenset(path.name for path in (Path(__file__).parents[2] / "codegen" / "operators").iterdir())
PLAIN = "PlainNode"
PLAIN_NODES = " | ".join(node.__name__ for node in get_args(PlainNode))


def _body(base: str, lines: list[str]) -> str:
    return f"({base}, total=False):\n" + "\n".join(lines)


def _fields(types: Types, schema: dict[str, Any], prefix: str) -> list[str]:
    """Each field with its type. Other types that it names are added to `types`."""
    definitions = schema.get("$defs", {})
    done: dict[str, str] = {}

    def type_of(part: dict[str, Any]) -> str:
        if "$ref" in part:
            return named(part["$ref"].rpartition("/")[2])
        for key in ("anyOf", "oneOf"):
            if key in part:
                union = " | ".join(dict.fromkeys(type_of(choice) for choice in part[key]))
                if PLAIN_NODES in union:
                    types.add(PLAIN, f"{PLAIN} = {PLAIN_NODES}", prefix)
                return union.replace(PLAIN_NODES, PLAIN)
        if "const" in part or "enum" in part:
            values = part.get("enum", [part.get("const")])
            return f"Literal[{', '.join(_literal(value) for value in values)}]"
        kind = part.get("type")
        if kind == "array":
            return f"Sequence[{type_of(part['items']) if 'items' in part else 'Any'}]"
        if kind == "object":
            return "Mapping[str, Any]"
        return SCALARS.get(str(kind), "Any")

    def named(definition: str) -> str:
        if definition not in done:
            part = definitions[definition]
            done[definition] = definition  # of one that names itself
            is_type = "properties" in part
            done[definition] = (
                types.add(definition, _body("TypedDict", lines_of(part)), prefix) if is_type else type_of(part)
            )
        return done[definition]

    def lines_of(part: dict[str, Any]) -> list[str]:
        lines = []
        for field, of_field in part["properties"].items():
            kind = type_of(of_field)
            required = field in part.get("required", ()) or field in TELLS_KIND
            lines.append(f"    {field}: {f'Required[{kind}]' if required else kind}")
        return lines

    return lines_of(schema)


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


if __name__ == "__main__":
    FILE.write_text(problem_types(), encoding="utf-8")
