"""What an answer is bound to: response_format and calls of tools, as the worker's `constraint`.

Which tools may be called, and whether one must be; schemas as they are handed to the worker. The
grammars themselves stand in grammars.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from reflex_protocol.messages import Constraint, JsonSchemaConstraint, LarkConstraint

from .bodies import ResponseFormat, Tool, ToolChoice
from .errors import bad_request
from .grammars import MAX_CALLS, CallRules, grammar
from .output.calls import CallFormat

ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}


@dataclass(frozen=True)
class ToolUse:
    """What a request wants of its tools."""

    mode: Literal["none", "auto", "required", "named"]
    tools: tuple[Tool, ...] = ()
    name: str = ""

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.mode in ("required", "named")


def tool_use(tools: list[Tool] | None, choice: ToolChoice | None) -> ToolUse:
    """Tools and tool_choice together. ApiError 400 where they contradict each other."""
    tools = tools or []
    names = [t.function.name for t in tools]
    for i, name in enumerate(names):
        if not name:
            raise bad_request(f"tools[{i}].function.name: expected a name, found none", param="tools")
        if name in names[:i]:
            raise bad_request(f"tools[{i}].function.name: found {name!r} twice", param="tools")
    if choice is None:
        choice = "auto" if tools else "none"
    if isinstance(choice, dict):
        return _named(tools, choice)
    if choice not in ("none", "auto", "required"):
        raise bad_request(
            f"tool_choice: expected none, auto, required or a named function, found {choice[:60]!r}",
            param="tool_choice",
        )
    if choice == "required" and not tools:
        raise bad_request("tool_choice: 'required' needs tools, found none", param="tool_choice")
    if choice == "none" or not tools:
        return ToolUse("none", tuple(tools))
    return ToolUse("auto" if choice == "auto" else "required", tuple(tools))


def _named(tools: list[Tool], choice: dict[str, Any]) -> ToolUse:
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    allowed = choice.get("allowed_tools")
    if choice.get("type") == "allowed_tools" and isinstance(allowed, dict):
        return _allowed(tools, allowed)
    if not isinstance(name, str):
        raise bad_request("tool_choice: expected the name of a function, found none", param="tool_choice")
    for tool in tools:
        if tool.function.name == name:
            return ToolUse("named", (tool,), name)
    raise bad_request(f"tool_choice: no tool is named {name[:60]!r}", param="tool_choice")


def _allowed(tools: list[Tool], allowed: dict[str, Any]) -> ToolUse:
    listed = allowed.get("tools")
    names = {
        t.get("function", t).get("name") if isinstance(t.get("function", t), dict) else None
        for t in (listed if isinstance(listed, list) else [])
        if isinstance(t, dict)
    }
    kept = [t for t in tools if t.function.name in names]
    return tool_use(kept, "required" if allowed.get("mode") == "required" else "auto")


def of_format(wanted: ResponseFormat | None) -> JsonSchemaConstraint | None:
    """The constraint of a response_format."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return JsonSchemaConstraint(schema=closed(wanted.schema or ANY_OBJECT))
    if wanted.json_schema is not None and wanted.json_schema.schema is True:
        return JsonSchemaConstraint(schema={})
    if wanted.json_schema is None or not isinstance(wanted.json_schema.schema, dict):
        raise bad_request(
            "response_format.json_schema.schema: expected a schema, found none",
            param="response_format.json_schema",
        )
    return JsonSchemaConstraint(schema=closed(wanted.json_schema.schema))


def of_calls(
    use: ToolUse,
    *,
    parallel: bool,
    spelling: CallFormat = "json",
    inside_thought: bool = False,
    control: Mapping[str, int] | None = None,
    answer: Any = None,
) -> Constraint | None:
    """The grammar of an answer that may, or must, call tools (grammars.py). `answer`: the schema of
    one that calls none."""
    if use.mode == "none":
        return None
    # A named tool is called once.
    most = MAX_CALLS if parallel and use.mode != "named" else 1
    functions = [{"name": t.function.name, "parameters": _arguments(t)} for t in use.tools]
    rules = CallRules(
        functions,
        spelling,
        forced=use.forced,
        most=most,
        inside_thought=inside_thought,
        control=control or {},
        answer=None if use.forced else answer,
    )
    return LarkConstraint(grammar=grammar(rules))


def _arguments(tool: Tool) -> dict[str, Any]:
    return closed(tool.function.parameters or ANY_OBJECT)


# Where a schema holds values under names of the user's own, and where it holds schemas.
_NAMED: Final = ("properties", "$defs", "definitions")
_NESTED: Final = ("items", "prefixItems", "anyOf", "oneOf")


def closed(schema: Any) -> Any:
    """The schema with no properties but those it names, where it leaves that open.

    What fits the result fits the schema. Left open, a model may go on inventing properties until it
    runs out of tokens. Parts of an allOf stay as they are: closed, they would exclude one another.
    """
    if isinstance(schema, list):
        return [closed(s) for s in schema]
    if not isinstance(schema, dict) or "allOf" in schema:
        return schema
    out = dict(schema)
    for name in _NAMED:
        if isinstance(out.get(name), dict):
            out[name] = {key: closed(value) for key, value in out[name].items()}
    for name in _NESTED:
        if name in out:
            out[name] = closed(out[name])
    open_ended = {
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "$ref",
        "anyOf",
        "oneOf",
    }
    if "properties" in out and not open_ended & set(out):
        out["additionalProperties"] = False
    return out
