"""An OpenAPI 3.1 description, made from the bodies' own types: what is accepted is what is described."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import Struct

from . import __version__
from .bodies import (
    ChatBody,
    ClassifyBody,
    CompletionBody,
    DetokenizeBody,
    ResponsesBody,
    SystemOneBody,
    TemplateBody,
    TokenizeBody,
)

_POSTS: Final[dict[str, type[Struct]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/classify": ClassifyBody,
    "/v1/systemone": SystemOneBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/apply-template": TemplateBody,
}
_STREAMS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_GETS: Final = {
    "/v1/models": ("application/json", ("200",)),
    "/health": ("application/json", ("200", "503")),
    "/v1/health": ("application/json", ("200", "503")),
    "/healthz": ("text/plain", ("200", "204", "503")),
    "/ping": ("text/plain", ("200", "204", "503")),
    "/livez": ("text/plain", ("200",)),
    "/metrics": ("text/plain", ("200",)),
}
_ERRORS: Final = {
    "400": "The request is wrong.",
    "401": "The API key is missing or wrong.",
    "403": "A page of another site may not ask.",
    "413": "The body is too large.",
    "429": "Too many requests wait already.",
    "500": "A fault of the server.",
    "503": "No worker now.",
    "504": "It took too long.",
}
_ERROR_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The description."""
    _, components = msgspec.json.schema_components(
        _POSTS.values(), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {path: {"post": _post(path, kind)} for path, kind in _POSTS.items()}
    paths |= {path: {"get": _get(*about)} for path, about in _GETS.items()}
    paths["/v1/models/{model_id}"] = {
        "get": {
            "parameters": [
                {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
            ],
            "responses": {**_answer("application/json"), "404": _error("There is no such model.")},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Reflex", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR_SCHEMA}},
    }


def _post(path: str, kind: type[Struct]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    answer = _answer("application/json")
    if path in _STREAMS:
        answer["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": (kind.__doc__ or "").splitlines()[0],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {**answer, **{status: _error(text) for status, text in _ERRORS.items()}},
    }


def _get(media_type: str, statuses: tuple[str, ...]) -> dict[str, Any]:
    responses = {}
    for status in statuses:
        responses[status] = {"description": "Its state."}
        if status != "204":
            responses[status]["content"] = {media_type: {}}  # type: ignore[assignment]
    return {"responses": responses}


def _answer(media_type: str) -> dict[str, Any]:
    return {"200": {"description": "The answer.", "content": {media_type: {"schema": {"type": "object"}}}}}


def _error(description: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
