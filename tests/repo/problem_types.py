"""Writes `client/cukiln/types/problems.py`, the operators' problems as types: `python -m tests.repo.problem_types`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from codegen.operators import operators

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
    names = [
        _typed_dict(types, operator.schema(), f"{_camel(name)}Problem", _camel(name))
        for name, operator in sorted(operators().items())
        if operator.name in BUILT_IN
    ]
    classes = "\n\n".join(f"\nclass {name}{body}" for name, body in types.texts.items())
    return f"{HEAD}\n{classes}\n\nProblem = {' | '.join(names)}\n"


BUILT_IN = frozenset(path.name for path in (Path(__file__).parents[2] / "codegen" / "operators").iterdir())


def _typed_dict(types: Types, schema: dict[str, Any], name: str, prefix: str) -> str:
    """The name of the type, which `types` has."""
    definitions = schema.get("$defs", {})
    done: dict[str, str] = {}

    def type_of(part: dict[str, Any]) -> str:
        if "$ref" in part:
            return named(part["$ref"].rpartition("/")[2])
        for key in ("anyOf", "oneOf"):
            if key in part:
                return " | ".join(dict.fromkeys(type_of(choice) for choice in part[key]))
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
            done[definition] = body_of(part, definition, "TypedDict") if "properties" in part else type_of(part)
        return done[definition]

    def body_of(part: dict[str, Any], title: str, base: str) -> str:
        lines = []
        for field, of_field in part["properties"].items():
            kind = type_of(of_field)
            required = field in part.get("required", ()) or field in TELLS_KIND
            lines.append(f"    {field}: {f'Required[{kind}]' if required else kind}")
        return types.add(title, f"({base}, total=False):\n" + "\n".join(lines), prefix)

    return body_of(schema, name, "ProblemHead")


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


if __name__ == "__main__":
    FILE.write_text(problem_types(), encoding="utf-8")
