"""The messages as JSON Schema (2020-12). Pure; `protocol/make_schema.py` writes schema.json."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from .errors import ERROR_KINDS
from .messages import (
    CONTROL_TYPES,
    EVENT_TYPES,
    PROTOCOL_VERSION,
    ErrorFinal,
    GenerateFinal,
    Request,
    ScoreFinal,
)

REF: Final = "#/$defs/{name}"


def build() -> dict[str, Any]:
    """The schema of a line in either direction: `$defs/ClientMessage` and `$defs/WorkerMessage`."""
    to_worker = [Request, *CONTROL_TYPES.values()]
    from_worker = [*EVENT_TYPES.values(), GenerateFinal, ScoreFinal, ErrorFinal]
    refs, defs = msgspec.json.schema_components([*to_worker, *from_worker], ref_template=REF)
    refs = list(refs)
    for cls in from_worker:
        # msgspec fills in fields that have a default, but the worker writes every field it has.
        defs[cls.__name__]["required"] = _always_written(cls)
    defs["ErrorFinal"]["properties"]["error_kind"]["examples"] = list(ERROR_KINDS)
    defs["ClientMessage"] = {
        "description": "A line to the worker: a request, or with `type` a control line.",
        "anyOf": refs[: len(to_worker)],
    }
    defs["WorkerMessage"] = {
        "description": "A line from the worker; a newer worker may add fields.",
        "anyOf": refs[len(to_worker) :],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Reflex worker protocol {PROTOCOL_VERSION}",
        "anyOf": [{"$ref": REF.format(name=n)} for n in ("ClientMessage", "WorkerMessage")],
        "$defs": dict(sorted(defs.items())),
    }


def text() -> str:
    """schema.json, byte for byte."""
    return msgspec.json.format(msgspec.json.encode(build()), indent=2).decode() + "\n"


def _always_written(cls: type[msgspec.Struct]) -> list[str]:
    fields = [f.encode_name for f in msgspec.structs.fields(cls) if f.default is not msgspec.UNSET]
    tag = cls.__struct_config__.tag_field
    return sorted([*fields, *([tag] if tag else [])])
