"""The web server around the application: readiness, draining, the end. Runs until it is told to stop.

Order of an end: SIGTERM -> no new requests (503), those in hand finish, the worker finishes and
leaves, the server closes. A second signal ends at once. A worker that cannot be kept alive ends the
server with a message and a status that is not 0.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn
import uvloop

from .app import make_app
from .http import Protocol
from .metrics import Metrics
from .options import Options
from .rendering.renderer import Renderer
from .services import Services
from .supervise import Facts, Supervisor, WorkerFailed, WorkerPlan, log_to_stderr
from .turns import Turns

_DRAIN_POLL_S = 0.02


@dataclass
class Started:
    """What launch.py has started and measured before this was imported."""

    options: Options
    listening: socket.socket
    worker: subprocess.Popen[bytes]
    renderer: subprocess.Popen[bytes] | None
    template: str | None  # of --chat-template
    process_start: float  # all three times on the clock of time.monotonic()
    main_at: float
    spawned_at: float


def run(started: Started) -> int:
    """Serve; the exit status."""
    return uvloop.run(_Server(started).run())


class _Uvicorn(uvicorn.Server):
    """Hands signals to us instead of closing at once."""

    def __init__(self, config: uvicorn.Config, on_signal: asyncio.Event) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._on_signal.is_set():
            self.force_exit = True
            self.should_exit = True
        self._on_signal.set()


class _Server:
    def __init__(self, started: Started) -> None:
        self._started = started
        self._stop = asyncio.Event()

    async def run(self) -> int:
        started, options = self._started, self._started.options
        imported_at = time.monotonic()
        services = self._services = _services(options, self._use_template)
        config = uvicorn.Config(
            make_app(services),
            loop="none",
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
            backlog=2048,
        )
        server = self._server = _Uvicorn(config, self._stop)
        if started.renderer is not None:
            services.renderer.adopt(started.renderer)
        supervising = asyncio.create_task(services.supervisor.run(started.worker))
        serving = asyncio.create_task(server.serve(sockets=[started.listening]))
        readying = asyncio.create_task(self._say_ready(imported_at))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({supervising, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if supervising.done() and not self._stop.is_set():
                return self._worker_failed(supervising.exception())
            await self._drain()
            return 0
        finally:
            readying.cancel()
            stopping.cancel()
            await services.renderer.close()
            server.should_exit = True
            await asyncio.wait({serving}, timeout=5)
            supervising.cancel()
            await asyncio.gather(supervising, serving, readying, stopping, return_exceptions=True)

    async def _say_ready(self, imported_at: float) -> None:
        """One line on stderr, once, when requests are served."""
        services, started = self._services, self._started
        await services.supervisor.ready(started.options.ready_timeout_s)
        # What was imported stays: full collections need not walk it for every few thousand tokens.
        gc.freeze()
        zero = started.process_start
        services.launch = {
            "python": _ms(started.main_at - zero),
            "worker_spawned": _ms(started.spawned_at - zero),
            "imported": _ms(imported_at - zero),
            "ready": _ms(time.monotonic() - zero),
        }
        host, port = started.listening.getsockname()[:2]
        services.log(
            f"REFLEX_OPENAI_READY url=http://{_in_url(host)}:{port} model={services.model_id} "
            f"process_start_to_ready_ms={services.launch['ready']:.0f}"
        )

    async def _use_template(self, facts: Facts) -> None:
        services = self._services
        if services.options.no_chat_template:
            return
        controls = facts.control_tokens
        await services.renderer.use(
            self._started.template or facts.chat_template,
            None if controls is None else [(t.text, t.user_defined) for t in controls],
            {"bos_token": facts.bos_token, "eos_token": facts.eos_token},
        )
        if services.renderer.broken:
            services.log(f"warning: {services.renderer.broken}; prompts are written with role labels")
        elif not services.renderer.source:
            services.log("warning: the model has no chat template; prompts are written with role labels")

    async def _drain(self) -> None:
        services = self._services
        services.draining = True
        services.log(f"stopping: {services.active} requests in hand")
        deadline = time.monotonic() + services.options.drain_timeout_s
        while services.active and time.monotonic() < deadline and not self._server.force_exit:
            await asyncio.sleep(_DRAIN_POLL_S)
        # Whoever is still there has been waited for long enough.
        await services.supervisor.leave(now=services.active > 0)

    def _worker_failed(self, why: BaseException | None) -> int:
        if isinstance(why, WorkerFailed):
            print(f"reflex-openai: {why}", file=sys.stderr, flush=True)
            return why.exit_status
        if why is not None:
            raise why
        return 1


def _services(options: Options, prepare: Callable[[Facts], Awaitable[None]]) -> Services:
    plan = WorkerPlan(
        argv=options.worker_argv,
        stuck_timeout_s=options.stuck_timeout_s,
        ready_timeout_s=options.ready_timeout_s,
        max_crashes=options.max_crashes,
        crash_window_s=options.crash_window_s,
    )
    return Services(
        options=options,
        supervisor=Supervisor(plan, log_to_stderr, prepare),
        renderer=Renderer(options.template_timeout_s, options.template_memory_mib, options.max_prompt_bytes),
        turns=Turns(options.max_queue),
        metrics=Metrics(),
        log=log_to_stderr,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
