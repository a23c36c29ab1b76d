"""A worker that speaks the protocol and has no model: what it says follows from the prompt alone.

Tokens are bytes (so that every emoji is split), control tokens come after them. Words in double
brackets, the last of each in the prompt, tell it what to do:

    [[say:TEXT]]      answer TEXT (\\n, \\[ and \\] are escapes); [[slow:MS]] that long before each token
    [[never-end]]     go on to max_tokens
    [[prefill:N]]     N chunks of prefill, each [[chunk:MS]] long
    [[until:PATH]]    after the first chunk or token, wait until that file is there
    [[hang]]          never answer again, not even pings
    [[crash]]         die at once; [[crash-after:N]] die after N tokens
    [[error:KIND]]    end with that error
    [[tell:FIELD]]    answer with a field of the request as it came (sampling.seed, constraint.grammar)

Environment: FAKE_LOAD_GATE (a file that loading waits for), FAKE_LOAD_FAIL, FAKE_TEMPLATE, FAKE_LOG
(lines received go there), FAKE_CONSTRAINT (it says that it can constrain, and lets everything
through), FAKE_JOULES (what each request uses), FAKE_CRASH_AT_START (a file: while it holds a number
above 0, that is decreased and the worker dies).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import select
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from msgspec import UNSET
from reflex_protocol import LineError, LineSplitter, check, decode_line, encode
from reflex_protocol.messages import (
    Cancel,
    CandidateScore,
    Detokenize,
    DetokenizeAnswer,
    ErrorFinal,
    GenerateFinal,
    Hello,
    HelloAnswer,
    Info,
    InfoAnswer,
    Limits,
    Ping,
    Pong,
    ProgressEvent,
    Request,
    ScoreFinal,
    Shutdown,
    TokenEvent,
    Tokenize,
    TokenizeAnswer,
    TokenLogprob,
    TopLogprob,
    Usage,
)

N_CTX = 4096
CONSTRAINS = bool(os.environ.get("FAKE_CONSTRAINT"))
JOULES = float(os.environ.get("FAKE_JOULES", "0"))
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
SPECIAL = {text: 256 + i for i, text in enumerate(CONTROL + USER_DEFINED)}
BY_ID = {i: t for t, i in SPECIAL.items()}
END_IDS = {SPECIAL["<|im_end|>"], SPECIAL["<|endoftext|>"]}
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)
SPLIT = re.compile("|".join(map(re.escape, SPECIAL)))


def tokenize(text: str, parse_special: bool = True, spans: list[tuple[int, int]] | None = None) -> list[int]:
    ids: list[int] = []
    at = 0
    literal = deque(sorted(spans or ()))
    for m in SPLIT.finditer(text) if parse_special else ():
        while literal and literal[0][1] <= m.start():
            literal.popleft()
        if literal and literal[0][0] < m.end():
            continue
        ids += [*text[at : m.start()].encode(), SPECIAL[m[0]]]
        at = m.end()
    return [*ids, *text[at:].encode()]


def piece(token: int) -> bytes:
    return BY_ID[token].encode() if token in BY_ID else bytes([token])


def detokenize(ids: list[int], skip_special: bool = False) -> str:
    shown = [i for i in ids if not (skip_special and BY_ID.get(i) in CONTROL)]
    return b"".join(map(piece, shown)).decode("utf-8", "replace")


def directive(prompt: str, name: str) -> str | None:
    found = re.findall(rf"\[\[{name}(?::((?:\\.|[^\]\\])*))?\]\]", prompt, re.DOTALL)
    return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], found[-1]) if found else None


def number(prompt: str, name: str) -> float:
    return float(directive(prompt, name) or 0)


def fake_logprob(token: int) -> float:
    return -0.1 - (token % 7) / 10


class FakeWorker:
    def __init__(self) -> None:
        self.splitter = LineSplitter()
        self.queue: deque[Any] = deque()
        self.cancelled: set[str] = set()
        self.leaving = False
        self.eof = False
        self.running: str | None = None
        self.gate = os.environ.get("FAKE_LOAD_GATE")
        self.log: Any = None
        if path := os.environ.get("FAKE_LOG"):
            self.log = open(path, "ab", buffering=0)  # noqa: SIM115 (as long as the process)

    def say(self, message: Any) -> None:
        data = encode(message)
        while data:
            data = data[os.write(1, data) :]

    def look(self, wait_s: float, *, until_work: bool = False) -> None:
        """Read what arrives for so long, or with until_work until there is something to do."""
        deadline = time.monotonic() + wait_s
        while not self.eof and not (until_work and (self.queue or self.leaving)):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([0], [], [], max(0.0, left))
            if not ready:
                return
            data = os.read(0, 1 << 16)
            if not data:
                self.eof = True
                return
            for line in self.splitter.feed(data):
                if self.log and isinstance(line, bytes):
                    self.log.write(line + b"\n")
                self.take(line)

    def take(self, line: bytes | LineError) -> None:
        message = line if isinstance(line, LineError) else decode_line(line)
        if isinstance(message, LineError):
            self.queue.append(message.final())
            return
        problem = check(message)
        if isinstance(message, Hello):
            limits = Limits(max_line_bytes=16 << 20, read_ahead_bytes=1 << 20, max_logprobs=1000)
            self.say(
                HelloAnswer(
                    id=message.id,
                    server="fake",
                    capabilities=[
                        *("generate", "system1", "score_from"),
                        *(["constraint"] if CONSTRAINS else []),
                        *(["energy"] if JOULES else []),
                    ],
                    limits=limits,
                    state="ready",
                )
            )
        elif isinstance(message, Ping):
            self.say(Pong(id=message.id))
        elif isinstance(message, Cancel):
            self.cancelled.add(message.target)
        elif isinstance(message, Shutdown):
            self.leaving = True
        elif problem:
            self.queue.append(ErrorFinal(id=message.id, error=problem.message, error_kind=problem.kind))
        else:
            self.queue.append(message)

    def serve(self) -> None:
        while self.gate and not Path(self.gate).exists():
            self.look(0.01)
        if kind := os.environ.get("FAKE_LOAD_FAIL"):
            print(f"reflex: error [{kind}]: the model cannot be loaded", file=sys.stderr, flush=True)
            sys.exit(3)
        print("REFLEX_STDIO_READY model=fake", file=sys.stderr, flush=True)
        while True:
            while self.queue:
                self.answer(self.queue.popleft())
            if self.eof or self.leaving:
                return
            self.look(3600, until_work=True)

    def answer(self, m: Any) -> None:
        if isinstance(m, ErrorFinal):
            self.say(m)
        elif isinstance(m, Info):
            template = os.environ.get("FAKE_TEMPLATE", CHATML)
            facts = {"name": "Fake", "architecture": "fake", "n_ctx": N_CTX, "chat_template": template}
            control = [{"id": i, "text": t, "user_defined": t in USER_DEFINED} for t, i in SPECIAL.items()]
            special = {
                "bos": -1,
                "eos": SPECIAL["<|im_end|>"],
                "end_ids": sorted(END_IDS),
                "control": control,
            }
            self.say(InfoAnswer(id=m.id, model=facts, special_tokens=special, phases={"model_load": 1.5}))
        elif isinstance(m, Tokenize):
            self.say(TokenizeAnswer(id=m.id, token_ids=tokenize(m.text, m.parse_special, m.literal_spans)))
        elif isinstance(m, Detokenize):
            bad = [i for i in m.token_ids if i >= 256 + len(SPECIAL)]
            if bad:
                self.error(m, "invalid_input", f"token_ids: {bad[0]} is not in the vocabulary")
            else:
                self.say(DetokenizeAnswer(id=m.id, text=detokenize(m.token_ids, m.skip_special)))
        elif isinstance(m, Request):
            self.running = m.id
            self.run(m)
            self.running = None
            self.cancelled.discard(m.id or "")

    def error(self, m: Any, kind: str, text: str) -> None:
        self.say(ErrorFinal(id=m.id, error=text, error_kind=kind))

    def is_cancelled(self, m: Request) -> bool:
        if m.id not in self.cancelled:
            return False
        self.say(ErrorFinal(id=m.id, error="cancelled", error_kind="cancelled", token_ids=[], text=""))
        if self.log:
            self.log.write(b'{"cancelled":true}\n')
        return True

    def run(self, m: Request) -> None:
        ids = m.prompt_token_ids
        if ids is None:
            ids = tokenize(m.prompt or "", m.parse_special, m.literal_spans)
        prompt = m.prompt if m.prompt is not None else detokenize(ids)
        if m.constraint is not None and not CONSTRAINS:
            return self.error(m, "unsupported", "constraint: this worker cannot do it")
        if len(ids) > N_CTX:
            return self.error(
                m, "context_overflow", f"the prompt's {len(ids)} tokens do not fit the context of {N_CTX}"
            )
        if directive(prompt, "crash") is not None:
            print("fake: crashing as told", file=sys.stderr, flush=True)
            os._exit(70)
        if kind := directive(prompt, "error"):
            return self.error(m, kind, f"as told: {kind}")
        if directive(prompt, "hang") is not None:
            time.sleep(3600)
        chunks = int(number(prompt, "prefill") or 1)
        for i in range(chunks):
            self.look(number(prompt, "chunk") / 1000)
            if self.is_cancelled(m):
                return
            if m.progress:
                self.say(ProgressEvent(id=m.id, done=len(ids) * (i + 1) // chunks, total=len(ids)))
            if chunks > 1 and self.held(m, prompt):
                return
        if m.scores:
            return self.score(m, ids)
        self.generate(m, prompt, ids)

    def held(self, m: Request, prompt: str) -> bool:
        """Wait for the file of `until`; whether it is cancelled meanwhile."""
        path = directive(prompt, "until")
        while path is not None and not self.eof and not Path(path).exists():
            self.look(0.01)
            if self.is_cancelled(m):
                return True
        return False

    def planned(self, m: Request, prompt: str, ids: list[int]) -> list[int]:
        """The tokens that the prompt asks for."""
        said = directive(prompt, "say")
        if asked := directive(prompt, "tell"):
            value: Any = m
            for step in asked.split("."):
                value = getattr(value, step)
            said = str(value)
        if said is None:
            seed = m.sampling.seed if m.sampling else None
            said = (
                f"I read {len(ids)} tokens ({hashlib.sha256(repr((prompt, seed)).encode()).hexdigest()[:8]})."
            )
        planned = tokenize(said)
        if directive(prompt, "never-end") is not None:
            planned = planned * (m.max_tokens // max(1, len(planned)) + 1)
        return planned

    def generate(self, m: Request, prompt: str, ids: list[int]) -> None:
        planned = self.planned(m, prompt, ids)
        slow, crash_after = number(prompt, "slow") / 1000, directive(prompt, "crash-after")
        room = min(m.max_tokens, N_CTX - len(ids))
        out: list[int] = []
        text, pending, streamed = "", b"", 0
        match = None
        hold = max((len(s) for s in m.stop), default=1) - 1
        for token in planned[:room]:
            self.look(slow)
            if self.is_cancelled(m) or (out and self.held(m, prompt)):
                return
            if crash_after is not None and len(out) >= int(crash_after):
                os._exit(71)
            out.append(token)
            if not (m.skip_special and BY_ID.get(token) in CONTROL):
                pending += piece(token)
            try:
                text, pending = text + pending.decode(), b""
            except UnicodeDecodeError:
                pass
            match = next((s for s in m.stop if s in text), None)
            if match is not None:
                text = text[: text.index(match)]
                break
            sure = text[: max(0, len(text) - hold)]
            if m.stream:
                line = TokenEvent(id=m.id, token_id=token, text=sure[streamed:])
                streamed = max(streamed, len(sure))
                if m.logprobs is not None:
                    line.logprob, line.top_logprobs = fake_logprob(token), top(token, m.logprobs)
                    name(line)
                self.say(line)
        ended = match is not None or len(planned) <= room
        text += pending.decode("utf-8", "replace") if match is None else ""
        scored = [
            name(TokenLogprob(token_id=t, logprob=fake_logprob(t), top_logprobs=top(t, m.logprobs or 0)))
            for t in out
        ]
        prompts = [
            name(
                TokenLogprob(token_id=t, logprob=fake_logprob(t), top_logprobs=top(t, m.prompt_logprobs or 0))
            )
            for t in ids[1:]
        ]
        self.say(
            GenerateFinal(
                id=m.id,
                token_ids=out,
                text=text,
                finish_reason="stop" if ended else "length",
                stop_match=match,
                logprobs=scored if m.logprobs is not None else None,
                prompt_logprobs=prompts if m.prompt_logprobs is not None else None,
                seed=1,
                usage=Usage(prompt_tokens=len(ids), completion_tokens=len(out)),
                timings={"prompt_eval": 1.0, "decode": 2.0},
                energy={"cpu": JOULES} if m.energy and JOULES else UNSET,
            )
        )

    def score(self, m: Request, ids: list[int]) -> None:
        candidates = m.candidate_token_ids or [tokenize(c) for c in m.candidates or []]
        scores = []
        for c, start in zip(candidates, m.score_from or [0] * len(candidates), strict=True):
            # A sum over tokens, each depending on all before it, as a model's would.
            path, total = hashlib.sha256(bytes(str(ids), "ascii")), 0.0
            for k, t in enumerate(c):
                path.update(str(t).encode())
                total -= path.digest()[0] / 64 if k >= start else 0
            scores.append(total)
        top_score = max(scores)
        weights = [math.exp((s - top_score) / m.temperature) for s in scores]
        p = [w / sum(weights) for w in weights]
        self.say(
            ScoreFinal(
                id=m.id,
                candidates=[
                    CandidateScore(text=detokenize(c), token_ids=c, score=s, probability=q)
                    for c, s, q in zip(candidates, scores, p, strict=True)
                ],
                entropy=-sum(q * math.log2(q) for q in p if q > 0),
                best_index=scores.index(top_score),
                score="logprob_sum",
                energy={"cpu": JOULES} if m.energy and JOULES else UNSET,
                usage=Usage(prompt_tokens=len(ids)),
            )
        )


def top(token: int, n: int) -> list[TopLogprob]:
    return [name(TopLogprob(token_id=(token + k) % 128, logprob=fake_logprob(token) - k)) for k in range(n)]


def name(scored: Any) -> Any:
    """Adds the token's bytes."""
    scored.bytes = list(piece(scored.token_id))
    return scored


def crash_at_start() -> None:
    path = os.environ.get("FAKE_CRASH_AT_START")
    if path and Path(path).exists() and (left := int(Path(path).read_text())) > 0:
        Path(path).write_text(str(left - 1))
        sys.exit("fake: crashing at start as told")


if __name__ == "__main__":
    crash_at_start()
    FakeWorker().serve()
