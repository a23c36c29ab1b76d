"""Keeps one worker running and says in which state it is.

Starts it again, with growing pauses, when it crashes; ends the sidecar with the reason when it
cannot start or crashes over and over; tells slow (it answers pings) from stuck (it does not, and is
killed). Owns the WorkerPipe of the moment. Knows nothing of HTTP and nothing of who waits.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from reflex_protocol.client import WorkerDied, WorkerError
from reflex_protocol.errors import ProtocolError
from reflex_protocol.messages import (
    Detokenize,
    DetokenizeAnswer,
    Hello,
    HelloAnswer,
    Info,
    InfoAnswer,
    Ping,
)

from . import child
from .pipe import Answer, WorkerPipe
from .turns import give_up
from .worker_process import start

State = Literal["loading", "ready", "draining", "gone"]

# Silence of a worker that has something to answer before it is pinged.
PING_AFTER_S: Final = 5.0
WATCH_INTERVAL_S: Final = 1.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 10.0
SHUTDOWN_GRACE_S: Final = 10.0


class WorkerFailed(Exception):
    """There will be no worker: it could not start, or crashed too often. Ends the sidecar."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_status = status


@dataclass(frozen=True)
class ControlToken:
    """A token that steers the model: its spelling in text must not turn into it by accident."""

    id: int
    text: str
    user_defined: bool  # such as <think>: shown in answers, unlike <|im_end|>


@dataclass(frozen=True)
class Facts:
    """What the worker said about itself and its model."""

    name: str = ""
    architecture: str = ""
    device: str = ""
    n_ctx: int = 0
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    end_ids: frozenset[int] = frozenset()
    # None where the worker does not list them.
    control_tokens: tuple[ControlToken, ...] | None = None
    capabilities: frozenset[str] = frozenset()
    max_logprobs: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    server: str = ""


@dataclass
class WorkerPlan:
    """How a worker is started and how much patience it is given."""

    argv: list[str]
    stuck_timeout_s: float
    ready_timeout_s: float
    max_crashes: int
    crash_window_s: float


class Supervisor:
    """The one worker. `run` must be running for anything to happen."""

    def __init__(
        self, plan: WorkerPlan, log: Callable[[str], None], prepare: Callable[[Facts], Awaitable[None]]
    ) -> None:
        """`prepare` is called with what a new worker said before anybody else may use it."""
        self._plan = plan
        self._prepare = prepare
        self._log = log
        self._pipe: WorkerPipe | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._crashes: deque[float] = deque()
        self._leaving = False
        self.state: State = "loading"
        self.facts = Facts()
        self.restarts = 0
        self.ready_at: float | None = None

    # ---- for those who want something of the worker ------------------------------------------

    async def ready(self, timeout_s: float) -> WorkerPipe:
        """The worker, waited for while it loads or is restarted.

        WorkerDied where none will come, TimeoutError where it takes too long.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._pipe is None or self.state == "loading":
            if self.state == "gone":
                raise WorkerDied(None, [])
            changed: asyncio.Future[None] = loop.create_future()
            self._waiting.add(changed)
            timer = loop.call_at(deadline, give_up, changed)
            try:
                await changed
            finally:
                timer.cancel()
                self._waiting.discard(changed)
        return self._pipe

    @property
    def worker_pid(self) -> int | None:
        """Of the process that runs now."""
        return self._pipe.process.pid if self._pipe and self._pipe.process.returncode is None else None

    # ---- the loop ----------------------------------------------------------------------------

    async def run(self, first: subprocess.Popen[bytes]) -> None:
        """Tend the worker until `leave`. Raises WorkerFailed where there will be none any more."""
        process = first
        try:
            while True:
                how = await self._tend(process)
                if self._leaving:
                    return
                self._note_crash(how)
                pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (len(self._crashes) - 1))
                self._log(f"worker: {how}; starting it again in {pause:g} s")
                await asyncio.sleep(pause)
                if self._leaving:
                    return
                self.restarts += 1
                process = start(self._plan.argv)
        except OSError as e:
            raise WorkerFailed(f"the worker cannot be started: {e}", 1) from None
        finally:
            self._set("gone")
            if self._pipe is not None:
                self._pipe.kill()

    async def leave(self, *, now: bool = False) -> None:
        """End the worker: when it has answered what it has been sent, or now."""
        self._leaving = True
        self._set("draining")
        pipe = self._pipe
        if pipe is None:
            return
        if now:
            pipe.kill()
        else:
            pipe.shutdown("drain")
        done, _ = await asyncio.wait([pipe.ended], timeout=SHUTDOWN_GRACE_S)
        if not done:
            pipe.kill()

    async def _tend(self, process: subprocess.Popen[bytes]) -> str:
        """One worker's life; how it ended."""
        pipe = self._pipe = await WorkerPipe.adopt(process, self._on_stderr)
        watch = asyncio.create_task(self._watch(pipe))
        try:
            try:
                self.facts = await asyncio.wait_for(_introduce(pipe), self._plan.ready_timeout_s)
            except asyncio.TimeoutError:
                pipe.kill()
                await pipe.ended
                return f"not ready within {self._plan.ready_timeout_s:g} s"
            except WorkerError as e:
                # It lives but has no model: what it said will not change by starting it again.
                raise WorkerFailed(f"the worker has no model to serve: {e}", 1) from None
            except ProtocolError:
                return self._ended(pipe, await pipe.ended)
            await self._prepare(self.facts)
            if not self._leaving and not pipe.ended.done():
                self.ready_at = time.monotonic()
                self._set("ready")
            return self._ended(pipe, await pipe.ended)
        except BaseException:
            pipe.kill()
            raise
        finally:
            watch.cancel()
            self._pipe = None
            if not self._leaving:
                self._set("loading")

    def _ended(self, pipe: WorkerPipe, why: Exception) -> str:
        """How a worker ended, for people. Raises WorkerFailed for one that never got ready at first."""
        status = pipe.process.returncode
        how = child.how_it_ended(status)
        last = pipe.stderr_tail[-1] if pipe.stderr_tail else ""
        if not isinstance(why, WorkerDied):
            return f"broke the protocol: {why}"
        if self.ready_at is None and not self._leaving:
            reason = f": {last}" if last else ""
            raise WorkerFailed(f"the worker did not start ({how}){reason}", status if status > 0 else 1)
        return f"ended with {how}" + (f" ({last})" if last else "")

    def _note_crash(self, how: str) -> None:
        now = time.monotonic()
        self._crashes.append(now)
        while now - self._crashes[0] > self._plan.crash_window_s:
            self._crashes.popleft()
        if len(self._crashes) >= self._plan.max_crashes:
            window = f"{self._plan.crash_window_s:g} s"
            raise WorkerFailed(
                f"the worker crashed {len(self._crashes)} times within {window}, so this ends here; "
                f"the last time it {how}",
                1,
            )

    async def _watch(self, pipe: WorkerPipe) -> None:
        """Ping a worker that is silent with work in hand; kill one that does not answer."""
        loop = asyncio.get_running_loop()
        patience = self._plan.stuck_timeout_s
        ping: Answer | None = None
        pinged_at = 0.0
        while not pipe.ended.done():
            await asyncio.sleep(min(WATCH_INTERVAL_S, patience / 4))
            if self.state == "loading" or not pipe.open_exchanges:
                continue
            if ping is not None and not ping.exchange.done:
                waited = loop.time() - pinged_at
                if waited >= patience:
                    self._log(f"worker: it has not answered a ping for {waited:.0f} s: stuck, killing it")
                    pipe.kill()
                    return
            elif loop.time() - pipe.last_heard >= min(PING_AFTER_S, patience / 2):
                try:
                    ping, pinged_at = pipe.send(Ping()), loop.time()
                except ProtocolError:
                    return  # it is ending

    def _set(self, state: State) -> None:
        if self.state != "gone":
            self.state = state
        for changed in self._waiting:
            if not changed.done():
                changed.set_result(None)

    def _on_stderr(self, line: str) -> None:
        self._log(f"worker: {line}")


def log_to_stderr(line: str) -> None:
    """The default log."""
    print(line, file=sys.stderr, flush=True)


async def _introduce(pipe: WorkerPipe) -> Facts:
    """Ask who the worker is; its answer to `info` comes when the model is loaded."""
    hello = await pipe.ask(Hello())
    info = await pipe.ask(Info())
    assert isinstance(hello, HelloAnswer) and isinstance(info, InfoAnswer)
    model, special = info.model, info.special_tokens
    return Facts(
        name=str(model.get("name", "")),
        architecture=str(model.get("architecture", "")),
        device=str(model.get("device", "")),
        n_ctx=int(model.get("n_ctx", 0)),
        chat_template=str(model.get("chat_template", "")),
        bos_token=await _spelling(pipe, special.get("bos")),
        eos_token=await _spelling(pipe, special.get("eos")),
        end_ids=frozenset(special.get("end_ids", ())),
        control_tokens=_control_tokens(special.get("control")),
        capabilities=frozenset(hello.capabilities),
        max_logprobs=hello.limits.max_logprobs,
        phases={k: float(v) for k, v in info.phases.items() if isinstance(v, (int, float))},
        server=hello.server,
    )


async def _spelling(pipe: WorkerPipe, token_id: Any) -> str:
    """How a special token is written; templates ask for it."""
    if not isinstance(token_id, int) or token_id < 0:
        return ""
    answer = await pipe.ask(Detokenize(token_ids=[token_id]))
    return answer.text if isinstance(answer, DetokenizeAnswer) else ""


def _control_tokens(listed: Any) -> tuple[ControlToken, ...] | None:
    if not isinstance(listed, list):
        return None
    return tuple(
        ControlToken(int(t["id"]), str(t["text"]), bool(t.get("user_defined", False))) for t in listed
    )
