"""Conversations that templates are held against transformers with, and templates of our own.

Plain data and nothing else: make_renders.py renders it with transformers, test_templates.py with us.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

SYSTEM = {"role": "system", "content": "You are brief."}
LONG = "\n\n".join(f"Paragraph {i}: the quick brown fox jumps over the lazy dog." for i in range(5))

TEXTS = [
    "Hello!",
    "",
    "  spaces around  ",
    "\nnewline first and last\n",
    "two\n\n\nnewlines\r\nand a carriage return",
    'quotes " and \' and \\ backslash, <html> & "json": {"a": [1, 2]}',
    "emoji 🙂 family 👩‍👩‍👧‍👦, CJK 中文, Hindi हिन्दी, combining é, RTL עברית",
    "{{ messages }} {% if true %}not a template{% endif %} {# nor this #}",
    "control-like <|im_end|> <|im_start|>system <think> </think> <｜User｜>",
    "<tool_response>a tool's answer by a user</tool_response>",
    LONG,
]


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "c1", "function": {"name": name, "arguments": arguments}}


WEATHER_CALL = _call("get_weather", city="Paris", days=3, metric=True, note='a "quoted" é')
TIME_CALL = _call("get_time")

CONVERSATIONS: list[list[dict[str, Any]]] = [
    *([{"role": "user", "content": text}] for text in TEXTS),
    *([SYSTEM, {"role": "user", "content": text}] for text in TEXTS[:4]),
    [
        {"role": "user", "content": "One."},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three."},
    ],
    [
        SYSTEM,
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "<think>\n2+2 is 4\n</think>\n\nFour."},
        {"role": "user", "content": "And 3+3?"},
    ],
    [
        {"role": "user", "content": "Think."},
        {"role": "assistant", "content": "Done.", "reasoning_content": "I have thought.\n"},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": "</think> stray </think> tags"},
    ],
    [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [WEATHER_CALL]},
        {"role": "tool", "content": '{"temp": 21}', "tool_call_id": "c1"},
    ],
    [
        SYSTEM,
        {"role": "user", "content": "Weather and time?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [WEATHER_CALL, TIME_CALL]},
        {"role": "tool", "content": "21 degrees"},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "It is noon and 21 degrees."},
        {"role": "user", "content": "Thanks!"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [WEATHER_CALL]},
        {"role": "tool", "content": "sunny"},
        {"role": "user", "content": "Is that good?"},
    ],
    [
        {"role": "user", "content": "Hi"},
        SYSTEM,
        {"role": "user", "content": "A system message in the middle."},
    ],
    [SYSTEM, {"role": "system", "content": "And kind."}, {"role": "user", "content": "Two system messages."}],
    [{"role": "user", "content": str(i)} for i in range(5)],
    [
        {"role": ("user", "assistant")[i % 2], "content": f"Turn {i}. {TEXTS[i % len(TEXTS)]}"}
        for i in range(21)
    ],
]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather in a city. Says "sunny" & <b>more</b> — é.',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Which city"},
                    "days": {"type": "integer", "minimum": 1},
                    "metric": {"type": "boolean", "default": True},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
    },
]

SETTINGS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "kwargs": {"enable_thinking": False}},
    {"add_generation_prompt": True, "kwargs": {"thinking": True}},
    {"add_generation_prompt": True, "tools": TOOLS},
]

SPECIALS = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}

# What transformers' environment offers, each feature once.
OWN_TEMPLATES = {
    "chatml": (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    "features": (
        "{{ bos_token }}\n"
        "{% for m in messages %}\n"
        "    {% if loop.index0 == 6 %}{% break %}{% endif %}\n"
        "    {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "  {{ loop.index }}:{{ m | tojson }}|{{ m.content | default('', true) | trim | upper }}\n"
        "  {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}\n"
        "{% endfor %}\n"
        "{%- set ns = namespace(n=0, seen=[]) -%}\n"
        "{%- for m in messages %}{% set ns.n = ns.n + (m.content or '') | length %}{% endfor %}{{ ns.n }}\n"
        "{{ tools | tojson(indent=2) if tools else 'no tools' }}\n"
        "{{ dict(a=1, b=[1, 2]) | tojson(separators=(',', ':'), sort_keys=true) }}\n"
        "{{ '%s-%d' | format('x', 3) }} {{ 'abc'[::-1] }} {{ [3, 1, 2] | sort | join(',') }}\n"
        "{% macro tag(x) %}<{{ x }}>{% endmacro %}{{ tag('t') }}\n"
        "{{ missing is defined }} {{ none is none }} {{ 7 // 2 }} {{ 'é' | tojson }}\n"
        "{% if strftime_now is defined %}{{ strftime_now('%Y') | length }}{% endif %}\n"
        "{{ eos_token }}"
    ),
    "raises": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages | length }}"
    ),
}


def cases() -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """(key, conversation, setting) of every render of a template."""
    for (i, conversation), (j, setting) in itertools.product(enumerate(CONVERSATIONS), enumerate(SETTINGS)):
        # Every conversation with a generation prompt; the other settings with every second one.
        if j == 0 or (i + j) % 2 == 0 or any(m.get("tool_calls") for m in conversation):
            yield f"{i}/{j}", conversation, setting
