"""A tool's parameters, as the grammars and the reader of calls need them: which there are, and whether
a value is written as plain text or as JSON. Pure.

In the XML spelling of calls (output/calls.py) a string stands as it is, anything else as JSON; which
of the two it is follows from the parameter's schema alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

# text: a string as it is. either: a string, or JSON that is null, a list or an object. json: JSON.
Kind = Literal["text", "either", "json"]

# How far references are followed: a schema may refer to itself.
_MAX_DEPTH: Final = 8
_DEFINITIONS: Final = ("$defs", "definitions")
_TYPES: Final[dict[type, str]] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


@dataclass(frozen=True)
class Parameter:
    """One parameter; `schema` stands by itself (definitions that it refers to are in it)."""

    name: str
    schema: Any
    required: bool
    types: frozenset[str]  # of JSON Schema; empty where anything goes

    @property
    def kind(self) -> Kind:
        """How a value is written."""
        if not self.types or self.types == {"string"}:
            return "text"
        return "either" if "string" in self.types else "json"

    @property
    def words(self) -> list[str] | None:
        """The strings it may be, where it is one of a few."""
        schema = _resolved(self.schema, self.schema)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if self.kind != "text" or not isinstance(values, list) or not values:
            return None
        return values if all(isinstance(v, str) for v in values) else None

    @property
    def lengths(self) -> tuple[int, int | None]:
        """The least and the most characters of a string."""
        schema = _resolved(self.schema, self.schema)
        least, most = schema.get("minLength"), schema.get("maxLength")
        return least if isinstance(least, int) else 0, most if isinstance(most, int) else None


@dataclass(frozen=True)
class Parameters:
    """All parameters of a tool. `more`: whether others than those listed may be given."""

    listed: tuple[Parameter, ...]
    more: bool


def parameters_of(function: dict[str, Any]) -> Parameters:
    """Of a tool's `function` object. Schemas are closed where they leave it open (constraints.py)."""
    root = function.get("parameters")
    if not isinstance(root, dict) or not root:
        return Parameters((), more=True)
    resolved = _resolved(root, root)
    properties = resolved.get("properties")
    if not isinstance(properties, dict):
        return Parameters((), more=True)
    required = resolved.get("required")
    required = required if isinstance(required, list) else []
    shared = {name: root[name] for name in _DEFINITIONS if name in root}
    listed = []
    for name, schema in properties.items():
        whole = {**schema, **shared} if isinstance(schema, dict) else schema
        if _leads_elsewhere(whole):  # to the root or a neighbour: by itself it can bind no more than types
            whole = {}
        listed.append(Parameter(name, whole, name in required, frozenset(_types(schema, root, 0))))
    more = bool(resolved.get("additionalProperties")) or bool(resolved.get("patternProperties"))
    return Parameters(tuple(listed), more)


def value_of(text: str, types: frozenset[str]) -> Any:
    """What a parameter's text stands for."""
    kind = Parameter("", None, False, types).kind
    if kind == "text":
        return text
    word = text.strip()
    if "boolean" in types and word in ("True", "False"):
        return word == "True"
    if "null" in types and word == "None":
        return None
    try:
        parsed = msgspec.json.decode(word)
    except (msgspec.DecodeError, RecursionError):
        return text
    return text if kind == "either" and not isinstance(parsed, (type(None), list, dict)) else parsed


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """A schema with a local reference followed."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict):
            return {}
        target = schema.get("$ref")
        if not isinstance(target, str) or not target.startswith("#/"):
            return schema
        found: Any = root
        for step in target[2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = found
    return {}


def _leads_elsewhere(schema: Any) -> bool:
    """Whether a reference in it leads to anything but its definitions."""
    if isinstance(schema, list):
        return any(map(_leads_elsewhere, schema))
    if not isinstance(schema, dict):
        return False
    target = schema.get("$ref")
    if isinstance(target, str) and not target.startswith(tuple(f"#/{d}/" for d in _DEFINITIONS)):
        return True
    return any(map(_leads_elsewhere, schema.values()))


def _types(schema: Any, root: Any, depth: int) -> set[str]:
    """The JSON types that a schema allows; empty for all of them."""
    schema = _resolved(schema, root)
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {t for t in declared if isinstance(t, str)}
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return {_TYPES[type(v)] for v in values if type(v) in _TYPES}
    for name in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(name)
        if isinstance(branches, list) and branches and depth < _MAX_DEPTH:
            found = [_types(b, root, depth + 1) for b in branches]
            if name == "allOf":
                return next((f for f in found if f), set())
            return set().union(*found) if all(found) else set()
    return set()
