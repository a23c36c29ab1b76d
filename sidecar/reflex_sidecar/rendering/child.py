"""The render process: compiles one chat template and renders conversations with it.

Frames on stdin and stdout, each four bytes of length (big endian) and JSON. Imports Jinja and the
standard library, nothing else of ours but this folder. The template is hostile until proven
otherwise: before it is compiled, the process gives up opening files, sockets and processes, and more
memory than it was allowed. Time is bounded by the parent, which kills.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from typing import Any, BinaryIO, Final

import jinja2.debug  # noqa: F401 (Jinja imports it at the first error, when no file can be opened)
from jinja2.exceptions import TemplateError

from .environment import Clock, make_environment
from .marking import (
    CannotMark,
    Spellings,
    any_spelled,
    choose_marks,
    mark,
    spans_between,
)

LENGTH: Final = struct.Struct(">I")
MIB: Final = 1 << 20
# Put after the text to be continued; the prompt ends where it came to stand. (As transformers does.)
CONTINUE_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
# Touches what Jinja and json import late, while files can still be opened.
WARM_UP: Final = (
    "{% set ns = namespace(a=1) %}{% for m in messages %}{{ m.content | trim }}{{ m | tojson(indent=2) }}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ strftime_now('%d %b %Y') }}{{ x is defined }}"
    "{% macro f(a) %}{{ a }}{% endmacro %}{{ f('b') }}{{ 'a,b'.split(',') | join('-') }}"
    "{% generation %}{% endgeneration %}"
)


class Failed(Exception):
    """An answer that is no prompt: `template` failed, its prompt is `too_long` or `unsafe`, or
    `memory` ran out (the parent then ends this process: its heap is as large as it may get)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class TemplateRenderer:
    """One compiled template."""

    def __init__(self, source: str, controls: list[tuple[str, bool]] | None) -> None:
        self._clock = Clock()
        self._template = make_environment(self._clock).from_string(source)
        self._spellings = Spellings(controls)

    def render(self, job: dict[str, Any]) -> dict[str, Any]:
        """The prompt of a conversation, and the ranges of it in which content spells control tokens.

        Content that templates disagree on (an absent text, a call's arguments) is offered in the
        spellings that they are known to expect, the request's own first.
        """
        self._clock.tick()
        first: Exception | None = None
        for messages in _spellings_of(_alias_reasoning(job["messages"])):
            try:
                return self._render(messages, job)
            except (Failed, MemoryError):
                raise
            except Exception as e:  # whatever a template manages to raise
                first = first or e
        assert first is not None
        raise Failed("template", _explain(first)) from first

    def _render(self, messages: list[Any], job: dict[str, Any]) -> dict[str, Any]:
        if job.get("continue"):
            messages = _tagged(messages)
        others = [job.get("tools"), job.get("documents"), job.get("kwargs") or {}]
        prompt = self._once(messages, others, job)
        spans: list[tuple[int, int]] = []
        if any_spelled(messages, others, self._spellings) and self._spellings.find(prompt):
            try:
                marks = choose_marks(messages, others)
                marked = self._once(*mark(messages, others, self._spellings, marks), job)
                if job.get("continue"):
                    marked = _cut_at_tag(marked)
                    prompt = _cut_at_tag(prompt)
                spans = spans_between(marked, prompt, marks)
            except CannotMark as e:
                raise Failed("unsafe", str(e)) from e
        elif job.get("continue"):
            prompt = _cut_at_tag(prompt)
        return {"prompt": prompt, "spans": spans}

    def _once(self, messages: list[Any], others: list[Any], job: dict[str, Any]) -> str:
        tools, documents, kwargs = others
        text = self._template.render(
            **{
                **job["specials"],
                **kwargs,
                "messages": messages,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": job["add_generation_prompt"],
            }
        )
        if len(text) > job["max_chars"]:
            raise Failed("too_long", f"expected at most {job['max_chars']} characters, found {len(text)}")
        return text


def _alias_reasoning(messages: list[Any]) -> list[Any]:
    """Reasoning under the two names that templates read (as transformers does)."""
    out = []
    for message in messages:
        if isinstance(message, dict):
            reasoning = next((message[k] for k in _REASONING if message.get(k) is not None), None)
            if reasoning is not None:
                message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        out.append(message)
    return out


def _spellings_of(messages: list[Any]) -> list[list[Any]]:
    """The conversation as it came, then with "" for an absent text, arguments as JSON text, and both."""
    out = [messages]
    calls = any(isinstance(m, dict) and m.get("tool_calls") for m in messages)
    silent = any(isinstance(m, dict) and m.get("content") is None for m in messages)
    if silent:
        out.append([_with_text(m) for m in messages])
    if calls:
        out += [[_with_json_arguments(m) for m in variant] for variant in list(out)]
    return out


def _with_text(message: Any) -> Any:
    if isinstance(message, dict) and message.get("content") is None:
        return {**message, "content": ""}
    return message


def _with_json_arguments(message: Any) -> Any:
    if not isinstance(message, dict) or not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", {})
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            call = {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _tagged(messages: list[Any]) -> list[Any]:
    last = messages[-1]
    return [*messages[:-1], {**last, "content": (last.get("content") or "") + CONTINUE_TAG}]


def _cut_at_tag(text: str) -> str:
    at = text.rfind(CONTINUE_TAG.strip())
    if at < 0:
        raise Failed("template", "the template does not show the message that is to be continued")
    kept = text[:at]
    # A template that trimmed the tag's own space would have trimmed the text's end too.
    return kept if text.startswith(CONTINUE_TAG, at) else kept.rstrip()


def _explain(error: Exception) -> str:
    name = type(error).__name__
    text = str(error)
    if isinstance(error, TemplateError) and text:
        return text
    return f"{name}: {text}" if text else name


def lock_down(memory_mib: int) -> None:
    """No file, socket or process from here on, and so much memory beyond what is in use."""
    with open("/proc/self/statm") as f:
        in_use = int(f.read().split()[0]) * resource.getpagesize()
    limit = in_use + memory_mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    except (OSError, ValueError):
        pass  # not everywhere; without file descriptors a process is of little use


def _read_exactly(stream: BinaryIO, n: int) -> bytes:
    data = bytearray()
    while len(data) < n:
        part = stream.read(n - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _read_frame(stream: BinaryIO) -> dict[str, Any]:
    (n,) = LENGTH.unpack(_read_exactly(stream, LENGTH.size))
    return json.loads(_read_exactly(stream, n))


def _write_frame(stream: BinaryIO, value: dict[str, Any]) -> None:
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def _compile(job: dict[str, Any]) -> TemplateRenderer:
    controls = job["controls"]
    try:
        return TemplateRenderer(job["template"], None if controls is None else [tuple(c) for c in controls])
    except MemoryError:
        raise
    except Exception as e:  # whatever the compiler makes of hostile text
        raise Failed("template", _explain(e)) from e


def serve(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Answer frames until their end. The first compiles, all others render."""
    renderer: TemplateRenderer | None = None
    while True:
        try:
            job = _read_frame(stdin)
        except EOFError:
            return
        try:
            if renderer is None:
                renderer = _compile(job)
                answer: dict[str, Any] = {"ready": True}
            else:
                answer = renderer.render(job)
        except Failed as e:
            answer = {"failed": e.kind, "message": str(e)}
        except MemoryError:
            answer = {"failed": "memory", "message": "the chat template ran out of memory"}
        except RecursionError:
            answer = {"failed": "template", "message": "the conversation is nested too deeply"}
        _write_frame(stdout, answer)


def main(memory_mib: int) -> None:
    """The process."""
    warm = TemplateRenderer(WARM_UP, [("<x>", False)])
    warm.render(
        {
            "messages": [{"role": "user", "content": "a <x> é", "tool_calls": []}],
            "specials": {},
            "add_generation_prompt": True,
            "max_chars": MIB,
        }
    )
    stdin, stdout = os.fdopen(0, "rb"), os.fdopen(1, "wb")
    lock_down(memory_mib)
    serve(stdin, stdout)
    stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
