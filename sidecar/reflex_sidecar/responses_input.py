"""The Responses API's input as chat messages, its tools and formats as those of a chat. Pure.

Stateless: whatever refers to something stored is refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .bodies import ChatBody, Function, JsonSchema, ResponseFormat, ResponsesBody, Tool
from .errors import ApiError, bad_request
from .messages import kind_of, shown, text_of


def chat_body(body: ResponsesBody) -> ChatBody:
    """The same request as a chat. ApiError 400 for what cannot be one."""
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise _unsupported(f"{name}: nothing is stored here; send the whole conversation as input", name)
    if body.background:
        raise _unsupported("background: only answers that are waited for", "background")
    messages = _messages(body.input)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    return ChatBody(
        messages=messages,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=True if body.top_logprobs else None,
        top_logprobs=body.top_logprobs or None,
        tools=_tools(body.tools),
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        response_format=_format(body),
    )


def _unsupported(message: str, param: str) -> ApiError:
    return ApiError(400, message, code="unsupported", param=param)


def _messages(given: str | list[Any]) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    out: list[dict[str, Any]] = []
    thought: str | None = None
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise bad_request(f"{where}: expected an object, found {kind_of(item)}", param=where)
        kind = item.get("type", "message")
        if kind == "message":
            message = {"role": item.get("role"), "content": item.get("content")}
        elif kind == "function_call":
            message = _call(item, where)
        elif kind == "function_call_output":
            message = _call_output(item, where)
        elif kind == "reasoning":
            thought = _thought(item, where)
            continue
        else:
            raise _unsupported(f"{where}.type: found {shown(kind)}, which is not supported", where)
        if thought and message["role"] == "assistant":
            message["reasoning_content"] = thought
        thought = None
        last = out[-1] if out else None
        if kind == "function_call" and last and last["role"] == "assistant":
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            out.append(message)
    return out


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise bad_request(f"{where}: expected name and arguments as text", param=where)
    call = {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _call_output(item: dict[str, Any], where: str) -> dict[str, Any]:
    output = item.get("output")
    if isinstance(output, dict):
        output = msgspec.json.encode(output).decode()
    text = text_of(output, f"{where}.output")
    message: dict[str, Any] = {"role": "tool", "content": text or ""}
    if isinstance(item.get("call_id"), str):
        message["tool_call_id"] = item["call_id"]
    return message


def _thought(item: dict[str, Any], where: str) -> str:
    parts = [*(item.get("content") or []), *(item.get("summary") or [])]
    texts = [p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)]
    return "\n".join(texts)


def _tools(tools: list[dict[str, Any]] | None) -> list[Tool] | None:
    if not tools:
        return None
    out = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type") != "function":
            raise _unsupported(
                f"{where}.type: only functions are supported, found {shown(tool.get('type'))}", where
            )
        flat = tool.get("function", tool)
        try:
            out.append(Tool(function=msgspec.convert(flat, Function)))
        except msgspec.ValidationError as e:
            raise bad_request(f"{where}: {e}", param=where, code="invalid_type") from None
    return out


def _format(body: ResponsesBody) -> ResponseFormat | None:
    wanted = body.text.format if body.text else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(name=wanted.name, schema=wanted.schema))
