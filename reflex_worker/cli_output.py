"""Result lines: `REFLEX_X_OK key=value ...`, or one JSON object per line."""

from __future__ import annotations

from _json import encode_basestring  # the C function alone: json.encoder would import re

SCHEMA_VERSION = 1


def value_text(v):
    """One value as JSON; floats to a microsecond or six significant digits."""
    if isinstance(v, str):
        return encode_basestring(v)
    if v is None:
        return "null"
    if v is True or v is False:
        return "true" if v else "false"
    if isinstance(v, float):
        if v != v or v in (float("inf"), float("-inf")):
            return "null"
        return repr(round(v, 6))
    if isinstance(v, (list, tuple)):
        return "[" + ",".join(map(value_text, v)) + "]"
    if isinstance(v, dict):
        return "{" + ",".join(f"{encode_basestring(str(k))}:{value_text(x)}" for k, x in v.items()) + "}"
    return str(v)


def result_line(tag, fields, as_json):
    """fields: dict in print order. Text values are quoted; words without spaces in enums are not special."""
    if as_json:
        return value_text({"schema_version": SCHEMA_VERSION, "event": tag, **fields}) + "\n"
    return tag + "".join(f" {k}={value_text(v)}" for k, v in fields.items()) + "\n"


def phase_fields(engine, timings):
    """Milliseconds of every phase of the start, in the order they happen."""
    p = engine.phases
    return {
        "launch_ms": p["launch"],
        "gguf_open_ms": p["gguf_open"],
        "cuda_init_ms": p["cuda_init"],
        "model_load_ms": p["model_load"],
        "tokenizer_ms": p["tokenizer"],
        "tokenize_ms": timings["tokenize"],
        "prompt_eval_ms": timings["prompt_eval"],
        "first_kernel_at_ms": p["first_kernel_at"],
        "weights_loaded_at_ms": p["weights_loaded_at"],
        "device": engine.info["device"],
        # since process start; empty on the CPU
        "device_stages_ms": p["device_stages"],
    }
