"""What an answer is bound to: response_format and forced calls of tools, as the worker's `constraint`.

Calls in the JSON spelling are bound by a grammar: free text, then calls whose names and arguments fit
the tools. For the other spellings a forced call is written as bare JSON (`{"name": ..., "arguments":
{...}}`, or for a named tool the arguments alone), and a call of the model's own choice is not bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from reflex_protocol.messages import Constraint, JsonSchemaConstraint, LarkConstraint

from .bodies import ResponseFormat, Tool, ToolChoice
from .errors import bad_request

# Calls in one answer.
MAX_CALLS: Final = 16
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


def of_format(wanted: ResponseFormat | None) -> Constraint | None:
    """The constraint of a response_format."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return JsonSchemaConstraint(schema=closed(wanted.schema or ANY_OBJECT))
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise bad_request(
            "response_format.json_schema.schema: expected a schema, found none",
            param="response_format.json_schema",
        )
    return JsonSchemaConstraint(schema=closed(wanted.json_schema.schema))


def of_calls(use: ToolUse, *, parallel: bool, capable: bool) -> Constraint | None:
    """The grammar of an answer that may, or must, call tools in Qwen's and Hermes's JSON spelling.

    Where nothing is forced and the worker cannot constrain, the model is trusted (None).
    """
    if use.mode == "none" or (use.mode == "auto" and not capable):
        return None
    # A named tool is called once; otherwise the bound keeps a small model from calling for ever.
    most = MAX_CALLS if parallel and use.mode != "named" else 1
    n_calls = f"{{{0 if use.mode == 'auto' else 1},{most}}}"
    schema = msgspec.json.encode({**_any_call(use), "x-guidance": _CALL_SPELLING}).decode()
    text = "TEXT " if use.mode == "auto" else ""
    return LarkConstraint(grammar=_CALLS.format(text=text, n_calls=n_calls, schema=schema))


def of_bare_call(use: ToolUse) -> Constraint | None:
    """A forced call for models with another spelling: its JSON and nothing around it."""
    if not use.forced:
        return None
    if use.mode == "named":
        return JsonSchemaConstraint(schema=_arguments(use.tools[0]))
    return JsonSchemaConstraint(schema=_any_call(use))


# Text is whatever does not open a call; from there on every token is bound.
_CALLS: Final = """\
start: {text}call{n_calls}
TEXT: /(?s:.*)/ & ~/(?s:.*)<tool_call>(?s:.*)/
call: "<tool_call>\\n" body "\\n</tool_call>" /\\n?/
body: %json {schema}
"""
# As the models are trained to write it. Keywords of schemas that the grammar engine lacks are let go.
_CALL_SPELLING: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}


def _any_call(use: ToolUse) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": t.function.name}, "arguments": _arguments(t)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for t in use.tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


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
