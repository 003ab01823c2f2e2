"""Faults of a request from what its models and codegen said: JSON path, sentence, what is allowed."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ValidationError

from codegen.errors import CodegenError, UnknownOperator
from service.http.errors import MAX_FAULTS, Fault, json_path

Path = tuple[str | int, ...]
Schema = Mapping[str, Any]

_KIND_OF_ERROR = {
    "extra_forbidden": "unknown-field",
    "missing": "missing-field",
    "too_many_elements": "extent-too-large",
}
_JSON_TYPES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("list_type", "tuple_type"), "an array"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    "string_type": "a string",
    "bool_type": "true or false",
}
_SHOWN = frozenset(
    {"type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    | {"pattern", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)


def faults_of(error: ValidationError, model: type[BaseModel], value: Any, at: Path = ()) -> list[Fault]:
    """One per error, one more than are listed at most. `value`: what `model` was given; `at`: its place in the body."""
    errors = error.errors(include_url=False, include_input=False)[: MAX_FAULTS + 1]
    return [_fault(entry, model, value, at) for entry in errors]


def fault_of_codegen(error: CodegenError, at: Path) -> Fault:
    """The fault that codegen found in what stands at `at`; its own field is relative to that."""
    inside = [int(part) if part.isdecimal() else part for part in (error.field or "").split(".") if part]
    kind = "unknown-operator" if isinstance(error, UnknownOperator) else "invalid-value"
    message = error.message
    if not (inside and message.startswith(str(inside[-1]))):  # the name of a field keeps its spelling
        message = message[:1].upper() + message[1:]
    return Fault(kind, _sentence(message), json_path((*at, *inside)), error.allowed)


def _fault(entry: Mapping[str, Any], model: type[BaseModel], value: Any, at: Path) -> Fault:
    kind = _KIND_OF_ERROR.get(entry["type"], "invalid-value")
    inside = _inside(entry["loc"], value, kind, model.model_fields)
    if entry["type"] == "too_short" and "search" in (*at, *inside):
        kind = "empty-search-space"
    field = json_path((*at, *inside))
    if kind == "unknown-field":
        fields = _fields_at(model, value, inside[:-1])
        return Fault(kind, f"{field} is not a field of this object.", field, fields)
    allowed = entry.get("ctx", {}).get("allowed") or _allowed_at(model, value, inside)
    if kind == "missing-field":
        return Fault(kind, f"{field} is missing.", field, allowed)
    return Fault(kind, _sentence(f"{field or 'The body'}{message_of(entry)}"), field, allowed)


def message_of(entry: Mapping[str, Any]) -> str:
    """What pydantic says, as the end of a sentence that begins with the field, in the words of JSON."""
    context = entry.get("ctx", {})
    match entry["type"]:
        case "too_short" | "too_long" if "message" not in context:  # else of ours, by `codegen.problem.refuse`
            at_least = entry["type"] == "too_short"
            bound = context["min_length" if at_least else "max_length"]
            return f" needs at {'least' if at_least else 'most'} {bound} item{'s' if bound != 1 else ''}"
        case "union_tag_not_found":
            return f" needs the field {context['discriminator'].strip(chr(39))}"
        case "union_tag_invalid":
            return f" names an unknown {context['discriminator'].strip(chr(39))} {context['tag']!r:.60}"
    if (expected := _JSON_TYPES.get(entry["type"])) is not None:
        return f" should be {expected}"
    message = str(entry["msg"]).removeprefix("Value error, ")
    for start in ("Input should be ", "String should "):
        if message.startswith(start):
            return f" should {'be ' if start[0] == 'I' else ''}{message.removeprefix(start)}"
    return f": {message[:1].lower()}{message[1:]}"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."


def _inside(loc: Sequence[str | int], value: Any, kind: str, fields: Collection[str]) -> Path:
    """pydantic's location without what is no place in the body: names of union members, `[key]`.

    The last part may be missing from the body: a field that must stand there, or one whose default does not fit."""
    path: list[str | int] = []
    for position, part in enumerate(loc):
        if _has(value, part):
            value = value[part]
        elif position < len(loc) - 1 or not (kind == "missing-field" or (not path and part in fields)):
            continue
        path.append(part)
    return tuple(path)


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


@lru_cache(maxsize=256)
def _schema(model: type[BaseModel]) -> Schema:
    return model.model_json_schema()


def _allowed_at(model: type[BaseModel], value: Any, path: Path) -> Any:
    """What the model's JSON Schema says about the place: its type, bounds and alternatives."""
    return allowed_by(_walk(model, value, path), _schema(model))


def allowed_by(schema: Schema, root: Schema | None = None) -> Any:
    """What a JSON Schema allows, a list for a union; None where it says nothing. References are to `root`."""
    schema = _resolve(root or {}, schema)
    if alternatives := _alternatives(schema):
        allowed = [allowed_by(member, root) for member in alternatives]
        return allowed[0] if len(allowed) == 1 else allowed
    tags = schema.get("discriminator", {}).get("mapping")
    if tags is not None:
        return {schema["discriminator"]["propertyName"]: sorted(tags)}
    shown = {name: part for name, part in schema.items() if name in _SHOWN}
    return (shown.get("enum") if set(shown) <= {"enum", "type"} else None) or shown or None


def _fields_at(model: type[BaseModel], value: Any, path: Path) -> list[str] | None:
    fields = _walk(model, value, path, into=True).get("properties")
    return sorted(fields) if fields else None


def _walk(model: type[BaseModel], value: Any, path: Path, into: bool = False) -> Schema:
    """The schema of the place. With `into`, of the union member that the value there has chosen."""
    root = _schema(model)
    schema = root
    for part in path:
        schema = _member(root, schema, value)
        if isinstance(part, int):
            tuple_items = schema.get("prefixItems", [])
            schema = tuple_items[part] if part < len(tuple_items) else schema.get("items", {})
        else:
            additional = schema.get("additionalProperties", {})
            schema = schema.get("properties", {}).get(part, additional if isinstance(additional, dict) else {})
        value = _item(value, part)
    return _member(root, schema, value) if into else _resolve(root, schema)


def _item(value: Any, part: str | int) -> Any:
    try:
        return value[part]
    except (KeyError, IndexError, TypeError):
        return None  # a missing field has no value


def _resolve(root: Schema, schema: Schema) -> Schema:
    while "$ref" in schema:
        place = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            place = place[name]
        schema = place
    members = _alternatives(schema)
    return _resolve(root, members[0]) if len(members) == 1 else schema


def _alternatives(schema: Schema) -> list[Schema]:
    """The members of a union but null."""
    return [member for member in schema.get("anyOf", []) if member.get("type") != "null"]


def _member(root: Schema, schema: Schema, value: Any) -> Schema:
    schema = _resolve(root, schema)
    discriminator = schema.get("discriminator")
    if discriminator and isinstance(value, dict):
        tag = value.get(discriminator["propertyName"])
        reference = discriminator["mapping"].get(tag) if isinstance(tag, str) else None
        return _resolve(root, {"$ref": reference}) if reference else {}
    if isinstance(value, list):
        return next((member for member in _alternatives(schema) if member.get("type") == "array"), schema)
    return schema
