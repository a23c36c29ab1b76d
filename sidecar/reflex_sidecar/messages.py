"""Chat messages: checked as they come in, and in the form that templates expect.

Templates read text contents, parsed arguments of calls, and the role `system`; clients send lists of
parts, arguments as JSON text, and `developer`. Fields that nobody knows go through to the template.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from .errors import ApiError, bad_request

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS: Final = ("text", "input_text", "output_text")
MAX_MESSAGES: Final = 10_000


def normalise(messages: list[Any], *, keep_developer: bool = False) -> list[dict[str, Any]]:
    """Checked copies of a request's messages. ApiError 400 names the one that is wrong."""
    if not messages:
        raise bad_request("messages: expected at least one, found none", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(
            f"messages: expected at most {MAX_MESSAGES}, found {len(messages)}", param="messages"
        )
    return [_message(m, f"messages[{i}]", keep_developer) for i, m in enumerate(messages)]


def _message(message: Any, where: str, keep_developer: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_request(f"{where}: expected an object, found {kind_of(message)}", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(
            f"{where}.role: expected one of {', '.join(ROLES)}, found {shown(role)}", param=where
        )
    out = dict(message)
    if role == "developer" and not keep_developer:
        out["role"] = "system"
    elif role == "function":
        out["role"] = "tool"
    content = text_of(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls")
    if calls is None:
        out.pop("tool_calls", None)
    else:
        out["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    if content is None and role != "assistant":
        raise bad_request(f"{where}.content: expected text, found nothing", param=where)
    if content is None and not calls and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    if content is None and not calls:
        raise bad_request(f"{where}: expected content or tool_calls, found neither", param=where)
    out["content"] = content
    for name in ("reasoning_content", "reasoning", "name", "tool_call_id"):
        value = message.get(name)
        if value is None:
            out.pop(name, None)
        elif not isinstance(value, str):
            raise bad_request(f"{where}.{name}: expected text, found {kind_of(value)}", param=where)
    if "reasoning" in out:
        out.setdefault("reasoning_content", out["reasoning"])
    return out


def text_of(content: Any, where: str) -> str | None:
    """A content as one text: parts are joined by newlines."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: expected text or a list of parts, found {kind_of(content)}", param=where)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        key = "refusal" if kind == "refusal" else "text"
        if kind not in (*TEXT_PARTS, "refusal"):
            message = f"{where}[{i}].type: expected 'text' (this model reads text only), found {shown(kind)}"
            raise ApiError(400, message, code="unsupported_content", param=where)
        if not isinstance(part.get(key), str):
            raise bad_request(
                f"{where}[{i}].{key}: expected text, found {kind_of(part.get(key))}", param=where
            )
        texts.append(part[key])
    return "\n".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_request(f"{where}: expected a list, found {kind_of(calls)}", param=where)
    out = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where}[{i}].function.name: expected text, found none", param=where)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"{where}[{i}].function.arguments")
        out.append({"type": "function", **call, "function": {**function, "arguments": arguments or {}}})
    return out


def _parsed(arguments: str, where: str) -> Any:
    """Arguments as templates want them; text that is no JSON stays text (a model wrote it so)."""
    if not arguments.strip():
        return {}
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    except RecursionError:
        raise bad_request(f"{where}: nested too deeply", param=where) from None


def plain_prompt(
    messages: list[dict[str, Any]], *, continue_final: bool
) -> tuple[str, list[tuple[int, int]]]:
    """The conversation with role labels, for models without a usable template.

    Returns the prompt and the ranges that are content (literal spans: a control token spelled there
    stays text).
    """
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0

    def write(text: str, content: bool = False) -> None:
        nonlocal length
        if content and text:
            spans.append((length, length + len(text)))
        parts.append(text)
        length += len(text)

    for i, message in enumerate(messages):
        write(f"{str(message['role']).capitalize()}: ")
        write(message["content"] or "", content=True)
        for call in message.get("tool_calls", []):
            write("\n")
            write(msgspec.json.encode(call["function"]).decode(), content=True)
        if not (continue_final and i == len(messages) - 1):
            write("\n\n")
    if not continue_final:
        write("Assistant:")
    return "".join(parts), spans


# Where a plain prompt's answer ends: the next label.
PLAIN_STOPS: Final = ("\n\nUser:", "\nUser:", "\n\nSystem:", "\n\nTool:")


def kind_of(value: Any) -> str:
    """A JSON value's type in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    for kind, word in ((str, "text"), ((int, float), "a number"), (list, "a list"), (dict, "an object")):
        if isinstance(value, kind):
            return word
    return type(value).__name__


def shown(value: Any, limit: int = 60) -> str:
    """A value for an error message, short."""
    if value is None:
        return "nothing"
    text = repr(value) if isinstance(value, str) else kind_of(value)
    return text if len(text) <= limit else text[:limit] + "..."
