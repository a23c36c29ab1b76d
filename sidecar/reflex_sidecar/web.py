"""HTTP around the routes: bodies, replies, request ids, the key, hung-up clients. ASGI, no framework.

`Endpoint` turns a function from `Call` to `Reply` or `Stream` into an ASGI application. `Front` is
what all requests pass first.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from .errors import ApiError, too_large
from .services import Services
from .sse import Stream

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON: Final = "application/json"
# Where an endpoint leaves its name for the counters, and where a request's id is found.
_ROUTE: Final = "reflex.route"
_ID: Final = "reflex.request_id"
_GOOD_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# How long a cancelled request may take to notice before it is cancelled again.
_NOTICE_SECONDS: Final = 1.0


@dataclass
class Call:
    """One request, its body read."""

    services: Services
    path_params: dict[str, str]
    body: bytes
    headers: dict[bytes, bytes]
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass
class Reply:
    """A whole answer."""

    body: bytes
    status: int = 200
    media_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


Handler = Callable[[Call], Awaitable[Reply | Stream]]


def json_reply(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    """An answer in JSON."""
    return Reply(msgspec.json.encode(value), status, headers=headers or {})


class ClientGone(Exception):
    """The client hung up while it was still sending."""


class Endpoint:
    """An ASGI application around a handler. A client that hangs up cancels its handler."""

    def __init__(self, services: Services, name: str, handler: Handler) -> None:
        self._services = services
        self._name = name
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_ROUTE] = self._name
        try:
            body = await _read_body(scope, receive, self._services.options.max_body_bytes)
        except ClientGone:
            return
        except ApiError as e:
            # The rest of the body is not read, so the connection cannot be used again.
            e.headers["connection"] = "close"
            await send_error(send, e)
            return
        call = Call(self._services, scope.get("path_params", {}), body, dict(scope["headers"]))
        work = asyncio.ensure_future(self._work(call, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._services.metrics.cancelled.add()
        finally:
            gone.cancel()
            while not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=_NOTICE_SECONDS)
        if not work.cancelled():
            work.result()

    async def _work(self, call: Call, send: Send) -> None:
        try:
            reply = await self._handler(call)
        except ApiError as e:
            await send_error(send, e)
            return
        except Exception as e:
            self._services.log("error: " + "".join(traceback.format_exception(e)).rstrip())
            await send_error(
                send, ApiError(500, f"internal error: {type(e).__name__}", code="internal_error")
            )
            return
        if isinstance(reply, Stream):
            await self._send_stream(send, reply)
        else:
            await send_reply(send, reply)

    async def _send_stream(self, send: Send, stream: Stream) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **stream.headers}
        try:
            await send(_start(200, "text/event-stream; charset=utf-8", headers))
            await send({"type": "http.response.body", "body": stream.first, "more_body": True})
            async for chunk in stream.rest:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            await stream.rest.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > limit:
            raise too_large("the body", limit)
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large("the body", limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, media_type: str, headers: dict[str, str]) -> Message:
    raw = [(b"content-type", media_type.encode())]
    raw += [(k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


async def send_reply(send: Send, reply: Reply) -> None:
    """Write a whole answer."""
    headers = {"content-length": str(len(reply.body)), **reply.headers}
    await send(_start(reply.status, reply.media_type, headers))
    await send({"type": "http.response.body", "body": reply.body, "more_body": False})


async def send_error(send: Send, error: ApiError) -> None:
    """Write an error."""
    await send_reply(send, Reply(error.body(), error.status, headers=error.headers))


# Paths that tell only whether the server lives: they are asked by machines that have no key.
OPEN_PATHS: Final = frozenset(
    {"/", "/health", "/v1/health", "/healthz", "/ping", "/livez", "/openapi.json", "/favicon.ico"}
)


class WithId:
    """Gives every answer an x-request-id: the client's own, if it is one, or a new one. Outermost."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"x-request-id"), None)
        request_id = scope[_ID] = _request_id(given)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


class Front:
    """Asks for the key, counts, and refuses strangers' web pages."""

    def __init__(self, app: App, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        services, started = self._services, time.monotonic()
        headers = dict(scope["headers"])
        status = 0

        async def send_and_see(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        services.active += 1
        try:
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                await send_error(send_and_see, refusal)
            else:
                await self._app(scope, receive, send_and_see)
        finally:
            services.active -= 1
            route = scope.get(_ROUTE, "other")
            services.metrics.requests.add(route=route, status=str(status or 499))
            if services.options.log_requests:
                took = (time.monotonic() - started) * 1000
                services.log(f"{scope['method']} {scope['path']} {status or 499} {took:.1f} ms {scope[_ID]}")

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        options = self._services.options
        if scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS:
            return None
        if headers.get(b"sec-fetch-site") == b"cross-site" and not options.cors_origins:
            # A browser says that a page of another site sends this; nobody asked for such pages.
            return ApiError(
                403,
                "pages of other sites may not call this server; --cors-origin allows them",
                code="cross_site_request",
                kind="permission_error",
            )
        if options.api_key is not None:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            sent = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
            if not hmac.compare_digest(sent, options.api_key.encode()):
                return ApiError(
                    401,
                    "expected this server's API key as a bearer token",
                    code="invalid_api_key",
                    kind="authentication_error",
                    headers={"www-authenticate": "Bearer"},
                )
        return None


def _request_id(given: bytes | None) -> str:
    text = given.decode("latin-1") if given else ""
    return text if _GOOD_ID.fullmatch(text) else f"req_{uuid.uuid4().hex}"


def new_id(prefix: str) -> str:
    """An id for an answer: `chatcmpl-...`."""
    return f"{prefix}{uuid.uuid4().hex}"
