"""The parent's side of the render process: one warm process, killed when it takes too long.

A render is one round trip over a pipe. One at a time: a render takes a fraction of a millisecond and
the worker behind it takes one request at a time anyway. A template that keeps being killed rests for
a while, so that a hanging one cannot slow every request down.
"""

from __future__ import annotations

import asyncio
import struct
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec

from .boot import start

_LENGTH: Final = struct.Struct(">I")
# Kills in a row after which the template rests, and how long.
REST_AFTER: Final = 3
REST_SECONDS: Final = 60.0
# Starting the process and compiling may take this much longer than a render.
START_SECONDS: Final = 30.0
# A character of the prompt takes at most this many bytes in the answer (JSON escapes of control codes).
_BYTES_PER_CHAR: Final = 6
_FRAME_SLACK: Final = 1 << 20


class RenderFailed(Exception):
    """No prompt from the template. `kind`: template, too_long, unsafe, memory, killed or none."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Rendered:
    """A prompt, and the ranges of it (in code points) that are content spelling control tokens."""

    prompt: str
    spans: list[tuple[int, int]]


class Renderer:
    """Renders conversations with one template, or says why not."""

    def __init__(self, timeout_s: float, memory_mib: int, max_chars: int) -> None:
        self._timeout_s = timeout_s
        self._memory_mib = memory_mib
        self._max_chars = max_chars
        self._lock = asyncio.Lock()
        self._source: str | None = None
        self._controls: Sequence[tuple[str, bool]] | None = None
        self._specials: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._spare: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._reading: asyncio.BaseTransport | None = None
        self._collecting: set[asyncio.Future[int]] = set()
        self._kills = 0
        self._resting_until = 0.0
        self.broken: str | None = None  # why the template is not used at all

    def adopt(self, process: subprocess.Popen[bytes]) -> None:
        """Take a process that was started early; it is used first."""
        self._spare = process

    @property
    def has_template(self) -> bool:
        """Whether there is a template that is worth trying."""
        return self._source is not None and self.broken is None

    @property
    def source(self) -> str:
        """The template's text; "" where there is none."""
        return self._source or ""

    async def use(
        self, source: str | None, controls: Sequence[tuple[str, bool]] | None, specials: dict[str, str]
    ) -> None:
        """The template to use from now on (None or "": none). Compiles it; `broken` tells how that went."""
        async with self._lock:
            same = (source or None, controls, specials) == (self._source, self._controls, self._specials)
            if same and self._process is not None:
                return
            self._source, self._controls, self._specials = source or None, controls, specials
            self.broken, self._kills, self._resting_until = None, 0, 0.0
            if self._process is not None:
                self._end()
            if self._source is None:
                return
            try:
                await self._start()
            except RenderFailed as e:
                self.broken = str(e)

    async def render(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> Rendered:
        """The prompt of a conversation. Raises RenderFailed."""
        if self._source is None:
            raise RenderFailed("none", "the model has no chat template")
        job = {
            "messages": messages,
            "tools": tools,
            "kwargs": kwargs or {},
            "specials": self._specials,
            "add_generation_prompt": add_generation_prompt,
            "continue": continue_final,
            "max_chars": self._max_chars,
        }
        async with self._lock:
            if self.broken is not None:
                raise RenderFailed("template", self.broken)
            if time.monotonic() < self._resting_until:
                raise RenderFailed(
                    "killed", f"the chat template had to be stopped {self._kills} times in a row"
                )
            if self._process is None:
                await self._start()
            answer = await self._ask(job, self._timeout_s)
            if answer.get("failed") != "memory":
                self._kills = 0
        if "prompt" in answer:
            return Rendered(answer["prompt"], [(a, b) for a, b in answer["spans"]])
        raise RenderFailed(answer["failed"], answer["message"])

    async def close(self) -> None:
        """End the process."""
        self._end()
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill()
            for pipe in (spare.stdin, spare.stdout):
                if pipe is not None:
                    pipe.close()
            self._collect(spare)
        await asyncio.gather(*self._collecting)

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        process, self._spare = self._spare or start(self._memory_mib), None
        self._process = process
        reader = self._reader = asyncio.StreamReader(limit=_FRAME_SLACK)
        self._reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        self._writer = cast(asyncio.WriteTransport, writer)
        answer = await self._ask({"template": self._source, "controls": self._controls}, START_SECONDS)
        if "failed" in answer:
            self._end()
            self.broken = f"the chat template does not compile: {answer['message']}"
            raise RenderFailed("template", self.broken)

    async def _ask(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One round trip. Whatever goes wrong with the process, it is gone afterwards."""
        data = msgspec.json.encode(job)
        assert self._writer is not None
        done = False
        try:
            self._writer.write(_LENGTH.pack(len(data)) + data)
            answer = await asyncio.wait_for(self._read(), timeout_s)
            if answer.get("failed") == "memory":
                self._count_kill()
            else:
                done = True
            return answer
        except asyncio.TimeoutError:
            self._count_kill()
            raise RenderFailed("killed", f"the chat template took longer than {timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError) as e:
            self._count_kill()
            raise RenderFailed(
                "killed", f"the chat template ended its process ({type(e).__name__})"
            ) from None
        finally:
            if not done:
                self._end()

    async def _read(self) -> dict[str, Any]:
        assert self._reader is not None
        (n,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if n > self._max_chars * _BYTES_PER_CHAR + _FRAME_SLACK:
            raise msgspec.DecodeError("too long")
        return msgspec.json.decode(await self._reader.readexactly(n))

    def _count_kill(self) -> None:
        self._kills += 1
        if self._kills >= REST_AFTER:
            self._resting_until = time.monotonic() + REST_SECONDS

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for transport in (self._reading, self._writer):
            if transport is not None:
                transport.close()
        self._reading = self._writer = self._reader = None
        self._collect(process)

    def _collect(self, process: subprocess.Popen[bytes]) -> None:
        """Reap a process that has been killed."""
        reaped = asyncio.get_running_loop().run_in_executor(None, process.wait)
        self._collecting.add(reaped)
        reaped.add_done_callback(self._collecting.discard)
