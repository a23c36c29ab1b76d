"""The worker's core, driven by hand around the fake engine: no process, no descriptors."""

from __future__ import annotations

import json
from typing import Any

from reflex_protocol import decode_answer
from reflex_protocol.messages import WorkerMessage

from reflex_worker.energy import Meters
from reflex_worker.worker import Worker

from .fake_engine import FakeEngine

MAX_LINE_BYTES = 1 << 16
FINAL = "final"


class Harness:
    """`tell` it lines, let it `run`, look at what it `heard`."""

    def __init__(
        self,
        *,
        model: bool = True,
        max_line_bytes: int = MAX_LINE_BYTES,
        meters: Meters | None = None,
        **engine: Any,
    ) -> None:
        self.loads: list[str] = []
        self.worker = Worker(
            max_line_bytes=max_line_bytes,
            start_load=lambda path, _: self.loads.append(path),
            meters=meters or Meters(),
        )
        self.heard: list[WorkerMessage] = []
        self._engine_options = engine
        if model:
            self.worker.load_at_start()
            self.loaded()

    def loaded(self, path: str = "fake.gguf") -> None:
        """A load has ended well."""
        self.worker.load_finished(FakeEngine(path, self._engine_options))

    def send(self, data: bytes) -> None:
        self.worker.receive(data)
        self._listen()

    def tell(self, **line: Any) -> None:
        """One line; nothing is worked on yet."""
        self.send(json.dumps(line).encode() + b"\n")

    def step(self, n: int = 1) -> None:
        """n units of work."""
        for _ in range(n):
            self.worker.work()
        self._listen()

    def run(self) -> list[WorkerMessage]:
        """Work until there is nothing to do; everything heard so far."""
        while self.worker.has_work:
            self.step()
        self._listen()
        return self.heard

    def take(self) -> list[WorkerMessage]:
        """What was heard, which is then forgotten."""
        heard, self.heard = self.heard, []
        return heard

    def _listen(self) -> None:
        lines = self.worker.take_output().split(b"\n")
        assert lines.pop() == b"", "a line was cut"
        self.heard += [decode_answer(line) for line in lines]


def shape(messages: list[WorkerMessage]) -> list[tuple[str, str | None, str | None]]:
    """(event, id, error_kind) of each."""
    return [(str(m.__struct_config__.tag), m.id, getattr(m, "error_kind", None)) for m in messages]
