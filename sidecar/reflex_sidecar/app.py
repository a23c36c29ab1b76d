"""The Starlette application: which path goes where, and errors outside of any route."""

from __future__ import annotations

from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from . import openapi
from .errors import ApiError
from .page import page_handler
from .routes import chat, classify, completions, responses, status, systemone, text
from .services import Services
from .web import App, Call, Endpoint, Front, Handler, Reply, WithId, json_reply

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat.chat),
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/responses", responses.responses),
    ("POST", "/v1/classify", classify.classify),
    ("POST", "/v1/systemone", systemone.systemone),
    ("GET", "/v1/models", status.models),
    ("GET", "/v1/models/{model_id:path}", status.model),
    ("POST", "/tokenize", text.tokenize),
    ("POST", "/detokenize", text.detokenize),
    ("POST", "/apply-template", text.apply_template),
    ("GET", "/health", status.health),
    ("GET", "/v1/health", status.health),
    ("GET", "/healthz", status.probe),
    ("GET", "/ping", status.probe),
    ("GET", "/livez", status.live),
    ("GET", "/metrics", status.metrics),
)


def make_app(services: Services) -> App:
    """The ASGI application."""

    async def show_openapi(call: Call) -> Reply:
        return json_reply(openapi.document())

    own: tuple[tuple[str, str, Handler], ...] = (
        ("GET", "/", page_handler()),
        ("GET", "/openapi.json", show_openapi),
    )
    routes = [
        Route(path, cast(Any, Endpoint(services, path, handler)), methods=[method])
        for method, path, handler in (*ROUTES, *own)
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
    front: App = Front(cast(App, app), services)
    if services.options.cors_origins:
        front = cast(
            App,
            CORSMiddleware(
                cast(Any, front),
                allow_origins=list(services.options.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "x-reflex-template", "retry-after"],
            ),
        )
    return WithId(front)


def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 in the same shape as all other errors."""
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    what = "no such path" if error.status_code == 404 else str(error.detail)
    shown = ApiError(
        error.status_code,
        f"{what}: {request.method} {request.url.path}",
        code=codes.get(error.status_code, "http_error"),
    )
    headers = {**shown.headers, **dict(error.headers or {})}
    return Response(shown.body(), error.status_code, headers, "application/json")
