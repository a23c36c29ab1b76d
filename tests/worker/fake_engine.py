"""An engine with the interface of `reflex_worker.api.Engine` and no model: bytes are tokens.

Deterministic: generate repeats the prompt's bytes, score gives each candidate minus its length. The
prompt can ask for trouble:

    refuse:KIND     is refused before anything runs
    raise:KIND      fails in its second step ("memory" and "runtime": Python's own errors)
    print:          a library prints to descriptor 1 in its first step
    hang:           its second step never returns
    slow:           each step takes 20 ms
    until:PATH      likewise, and generation ends with the first token after that file is there
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

BOS, EOS, N_VOCAB = 256, 257, 258
SLOW_SECONDS = 0.02


class FakeError(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Event:
    def __init__(self, kind: str, **fields: Any) -> None:
        self.kind = kind
        self.done = self.total = 0
        self.token_id = -1
        self.text = ""
        self.logprob: float | None = None
        self.top_logprobs: list[tuple[int, float]] = []
        self.__dict__.update(fields)


def whole(data: bytes) -> str:
    """The whole characters at the front of data."""
    return data.decode("utf-8", "ignore")


class FakeTask:
    def __init__(self, engine: FakeEngine, ids: list[int], timeout_ms: int | None) -> None:
        self.ids = ids
        self.prompt = bytes(i for i in ids if i < 256)
        self._chunk = engine.chunk
        self._evaluated = 0
        self._n_steps = 0
        self._deadline: float | None = None
        self._timeout_ms = timeout_ms
        self.timings = {"total": 1.0}

    def _trouble(self) -> None:
        self._n_steps += 1
        if self._deadline is None and self._timeout_ms is not None:
            self._deadline = time.monotonic() + self._timeout_ms / 1000
        word, _, rest = self.prompt.partition(b":")
        if word == b"print" and self._n_steps == 1:
            os.write(1, b"a library talks\n")
            print("and so does Python", flush=True)
        if word in (b"slow", b"until"):
            time.sleep(SLOW_SECONDS)
        if word == b"hang" and self._n_steps == 2:
            time.sleep(3600)
        if word == b"raise" and self._n_steps == 2:
            raise {b"memory": MemoryError(), b"runtime": RuntimeError("a bug")}.get(
                rest, FakeError(rest.decode(), f"trouble of kind {rest.decode()}")
            )

    def _prefill(self) -> Event | None:
        if self._evaluated >= len(self.ids):
            return None
        self._evaluated = min(len(self.ids), self._evaluated + self._chunk)
        return Event("progress", done=self._evaluated, total=len(self.ids))

    def _told_to_end(self) -> bool:
        word, _, path = self.prompt.partition(b":")
        return word == b"until" and os.path.exists(path)

    def _out_of_time(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline


class FakeGeneration(FakeTask):
    def __init__(self, engine: FakeEngine, ids: list[int], options: dict[str, Any]) -> None:
        super().__init__(engine, ids, options.get("timeout_ms"))
        self._o = options
        self._data = b""
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason = ""
        self.stop_match: str | None = None
        self.logprobs: list[tuple[int, float, list[tuple[int, float]]]] = []
        n = options.get("prompt_logprobs")
        self.prompt_logprobs = [] if n is None else [(i, -1.0, self._top(n)) for i in ids[1:]]
        self.seed = options.get("seed") or 12345

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": len(self.ids),
            "completion_tokens": len(self.token_ids),
            "cached_tokens": 0,
        }

    def _top(self, n: int) -> list[tuple[int, float]]:
        return [(i, -float(i + 1)) for i in range(n)]

    def step(self) -> Event:
        self._trouble()
        event = self._prefill()
        if event is not None:
            return event
        if self.finish_reason or self.stop_match is not None:
            self.finish_reason = self.finish_reason or "stop"
            return Event("done")
        enough = len(self.token_ids) >= self._o["max_tokens"] or (self.token_ids and self._told_to_end())
        if self._out_of_time() or enough:
            self.finish_reason = "timeout" if self._out_of_time() else "length"
            return Event("done")
        source = self.prompt or b"."
        token = source[len(self.token_ids) % len(source)]
        self.token_ids.append(token)
        self._data += bytes([token])
        text = whole(self._data)
        for stop in self._o["stop"]:
            if stop in text:
                self.stop_match = stop
                text = text[: text.index(stop)]
        event = Event("token", token_id=token, text=text[len(self.text) :])
        self.text = text
        if self._o["logprobs"] is not None:
            self.logprobs.append((token, -0.5, self._top(self._o["logprobs"])))
            _, event.logprob, event.top_logprobs = self.logprobs[-1]
        return event


class FakeScoring(FakeTask):
    def __init__(self, engine: FakeEngine, ids: list[int], lists: list[list[int]], texts, options) -> None:
        super().__init__(engine, ids, options["timeout_ms"])
        self._lists, self._texts, self._options = lists, texts, options
        self.candidates: list[tuple[str, list[int], float, float]] = []
        self.entropy = 0.0
        self.best_index = 0
        self.score_kind = "logit_sum" if options["score"] == "auto" else options["score"]
        self.usage = {"prompt_tokens": len(ids), "completion_tokens": 0, "cached_tokens": 0}

    def step(self) -> Event:
        self._trouble()
        event = self._prefill()
        if event is not None:
            return event
        n = len(self._lists)
        texts = self._texts or [whole(bytes(ids)) for ids in self._lists]
        self.candidates = [
            (text, ids, -float(len(ids)), 1 / n) for text, ids in zip(texts, self._lists, strict=True)
        ]
        self.best_index = min(range(n), key=lambda i: len(self._lists[i]))
        self.entropy = 1.0
        return Event("done")


class FakeEngine:
    """options: load_ms, gate (a file that loading waits for), load_error (a kind), n_ctx, chunk, hidden_step
    (a file that is made when it begins; it then lasts until it is interrupted)."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        time.sleep(options.get("load_ms", 0) / 1000)
        while "gate" in options and not os.path.exists(options["gate"]):
            time.sleep(0.005)
        if "load_error" in options or path.startswith("bad"):
            raise FakeError(options.get("load_error", "gguf"), f"{path}: will not load")
        self.chunk = options.get("chunk", 16)
        self._n_ctx = options.get("n_ctx", 100_000_000)
        self.warmed_up = False
        self.phases = {"launch": 1.0, "gguf_open": 0.5, "model_load": 2.0, "ready_at": 4.0}
        self.special_tokens = {"bos": BOS, "eos": EOS, "add_bos": False, "end_ids": [EOS]}
        self.control_tokens = [{"id": EOS, "text": "<end>", "user_defined": False}]
        self._path = path
        self._hidden_step = options.get("hidden_step")
        self._modules_at_load = options.get("modules_at_load", [])

    @property
    def info(self) -> dict[str, Any]:
        return {
            "path": self._path,
            "name": "fake",
            "architecture": "none",
            "device": "cpu",
            "n_ctx": self._n_ctx,
            "n_vocab": N_VOCAB,
            "warmed_up": self.warmed_up,
            "modules_at_load": self._modules_at_load,
        }

    def warm_up(self, interrupt: Callable[[], bool] | None = None) -> None:
        if self._hidden_step and interrupt:
            open(self._hidden_step, "wb").close()
            while not interrupt():
                time.sleep(0.001)
            return
        self.warmed_up = True

    def tokenize(
        self,
        text: str,
        *,
        parse_special: bool = True,
        literal_spans: Sequence[tuple[int, int]] = (),
        add_bos: bool | None = None,
    ) -> list[int]:
        return [BOS] * bool(add_bos) + list(text.encode())

    def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        if any(i >= N_VOCAB for i in token_ids):
            raise FakeError("invalid_input", f"token_ids: expected ids below {N_VOCAB}")
        return bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<end>"

    def _ids(self, prompt: str | None, ids: Sequence[int] | None, add_bos: bool | None) -> list[int]:
        found = list(ids) if ids is not None else self.tokenize(prompt or "", add_bos=add_bos)
        if len(found) > self._n_ctx:
            raise FakeError("context_overflow", f"prompt: {len(found)} tokens do not fit {self._n_ctx}")
        if prompt and prompt.startswith("refuse:"):
            raise FakeError(prompt[7:], "refused")
        return found

    def generate(self, prompt: str | None = None, *, prompt_token_ids=None, add_bos=None, **options):
        return FakeGeneration(self, self._ids(prompt, prompt_token_ids, add_bos), options)

    def score(
        self,
        prompt: str | None = None,
        candidates: Sequence[str] | None = None,
        *,
        prompt_token_ids=None,
        candidate_token_ids=None,
        add_bos=None,
        **options,
    ):
        ids = self._ids(prompt, prompt_token_ids, add_bos)
        lists = candidate_token_ids or [list(c.encode()) for c in candidates or []]
        return FakeScoring(self, ids, lists, candidates, options)
