"""What the server says about itself: health, models, metrics. Nothing here waits for the worker."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ..errors import ApiError
from ..metrics import gauge
from ..services import Services
from ..web import Call, Reply, json_reply


async def health(call: Call) -> Reply:
    """200 when requests are served, else 503; the page reads its figures here."""
    services = call.services
    body: dict[str, Any] = {"status": "ok" if services.ready else _state(services), **_details(services)}
    if not services.ready:
        error = services.not_ready()
        body["error"] = {"message": error.message, "type": error.kind, "param": None, "code": error.code}
    return json_reply(body, status=200 if services.ready else 503, headers={"cache-control": "no-store"})


async def probe(call: Call) -> Reply:
    """/healthz and /ping: 200 ready, 204 loading, 503 gone or going."""
    state = _state(call.services)
    if state == "loading":
        return Reply(b"", 204)
    return Reply(state.encode(), 200 if state == "ready" else 503, "text/plain; charset=utf-8")


async def live(call: Call) -> Reply:
    """/livez: this process answers."""
    return Reply(b"ok", 200, "text/plain; charset=utf-8")


async def models(call: Call) -> Reply:
    """GET /v1/models."""
    return json_reply({"object": "list", "data": [_model(call.services)]})


async def model(call: Call) -> Reply:
    """GET /v1/models/{id}."""
    wanted = call.path_params.get("model_id", "")
    if wanted != call.services.model_id:
        raise ApiError(
            404, f"the model {wanted!r} does not exist here", code="model_not_found", param="model"
        )
    return json_reply(_model(call.services))


async def metrics(call: Call) -> Reply:
    """GET /metrics."""
    text = "\n".join([*call.services.metrics.lines(), *_gauges(call.services), ""])
    return Reply(text.encode(), 200, "text/plain; version=0.0.4; charset=utf-8")


def _state(services: Services) -> str:
    return "draining" if services.draining else services.supervisor.state


def _model(services: Services) -> dict[str, Any]:
    facts = services.facts
    return {
        "id": services.model_id,
        "object": "model",
        "created": services.started_unix,
        "owned_by": "reflex",
        "max_model_len": facts.n_ctx,
        "meta": {"name": facts.name, "architecture": facts.architecture, "device": facts.device},
    }


def _details(services: Services) -> dict[str, Any]:
    facts, last = services.facts, services.last
    return {
        "model": services.model_id,
        "device": facts.device,
        "queue": {"waiting": services.turns.waiting, "limit": services.turns.max_waiting},
        "busy": services.turns.busy,
        "restarts": services.supervisor.restarts,
        "uptime_s": round(time.time() - services.started_unix, 1),
        "template": _template(services),
        "start": {"worker": facts.phases, "sidecar": services.launch},
        "last": {
            "prompt_tokens": last.prompt_tokens,
            "completion_tokens": last.completion_tokens,
            "timings": last.timings,
        },
    }


def _template(services: Services) -> str:
    if services.options.no_chat_template or not services.renderer.source:
        return "plain"
    if services.renderer.broken:
        return f"plain: {services.renderer.broken}"
    return "file" if services.options.chat_template else "model"


def _gauges(services: Services) -> Iterable[str]:
    state = _state(services)
    states = {(("state", s),): float(s == state) for s in ("loading", "ready", "draining", "gone")}
    yield from gauge("reflex_state", "1 for the state the server is in.", states)
    yield from gauge("reflex_queue_waiting", "Requests in line.", {(): services.turns.waiting})
    yield from gauge("reflex_queue_limit", "Places in line.", {(): services.turns.max_waiting})
    yield from gauge("reflex_busy", "1 while the worker works on a request.", {(): services.turns.busy})
    yield from gauge(
        "reflex_turn_seconds", "Running mean of a request's time.", {(): services.turns.mean_turn_s}
    )
    yield from gauge(
        "reflex_worker_restarts_total",
        "Times the worker was started again.",
        {(): services.supervisor.restarts},
        "counter",
    )
    phases = {(("phase", k),): v / 1000 for k, v in services.facts.phases.items()}
    yield from gauge("reflex_start_phase_seconds", "Phases of the worker's last start.", phases)
