"""What a message must satisfy beyond its types, as pure functions of the message alone.

Says nothing about what depends on a model (vocabulary, context) or on what a worker can do.
Every problem names the field, what was expected and what was found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from .messages import (
    PROTOCOL_VERSION,
    ClientMessage,
    Detokenize,
    Hello,
    Load,
    LoraAdapter,
    Request,
    Sampling,
    Tokenize,
)

# The native side counts in 32 bits; a seed has 64.
INT32_MAX: Final = 2**31 - 1
SEED_MAX: Final = 2**64 - 1
# It draws by floats of 32 bits: more than this would be infinite there.
FLOAT32_MAX: Final = 3.4028234663852886e38
# Alternatives beyond this are a dump of the vocabulary, not a log-probability.
MAX_LOGPROBS: Final = 1000


class Problem(NamedTuple):
    """Why a message is refused."""

    kind: str
    message: str


class _Refused(Exception):
    """Leaves the checks at the first problem; never leaves this module."""


def check(message: ClientMessage) -> Problem | None:
    """The first thing wrong with a decoded message, or None."""
    try:
        if isinstance(message, Request):
            _request(message)
        elif isinstance(message, Tokenize):
            _spans(message.literal_spans, message.text, "text")
        elif isinstance(message, Detokenize):
            _ids(message.token_ids, "token_ids")
        elif isinstance(message, Load):
            _load(message)
        elif isinstance(message, Hello):
            return _version(message.protocol)
    except _Refused as e:
        return Problem("invalid_input", str(e))
    return None


def _fail(where: str, expected: str, found: object) -> None:
    raise _Refused(f"{where}: expected {expected}, found {found}")


def _request(r: Request) -> None:
    if (r.prompt is None) == (r.prompt_token_ids is None):
        found = "neither" if r.prompt is None else "both"
        raise _Refused(f"prompt: expected exactly one of prompt and prompt_token_ids, found {found}")
    if r.prompt_token_ids is not None:
        _ids(r.prompt_token_ids, "prompt_token_ids")
        if not r.prompt_token_ids:
            _fail("prompt_token_ids", "at least one id", "none")
    _spans(r.literal_spans, r.prompt, "prompt")
    _between(r.timeout_ms, 0, INT32_MAX, "timeout_ms")
    if r.scores:
        _system1(r)
    else:
        _generate(r)


# Fields that say something about one kind of request only, with the value that says nothing.
# Another value with the other kind would be ignored in silence, so it is refused instead.
_GENERATE_ONLY: Final = (
    ("max_tokens", 32),
    ("sampling", None),
    ("stream", False),
    ("stop", []),
    ("stop_token_ids", []),
    ("ignore_eos", False),
    ("logprobs", None),
    ("prompt_logprobs", None),
    ("constraint", None),
)
_SYSTEM1_ONLY: Final = (("temperature", 1.0), ("score", "auto"), ("score_from", []))
_HINT: Final = {"temperature": " (sampling.temperature is that of generate)"}


def _only(r: Request, fields: Sequence[tuple[str, object]], kind: str) -> None:
    for name, neutral in fields:
        if getattr(r, name) != neutral:
            raise _Refused(f"{name}: expected only in a {kind} request{_HINT.get(name, '')}, found here")


def _system1(r: Request) -> None:
    _only(r, _GENERATE_ONLY, "generate")
    if r.candidates is not None and r.candidate_token_ids is not None:
        raise _Refused("candidates: expected exactly one of candidates and candidate_token_ids, found both")
    if r.candidates is not None:
        if not r.candidates:
            _fail("candidates", "at least one", "none")
        for i, text in enumerate(r.candidates):
            if not text:
                _fail(f"candidates[{i}]", "a non-empty string", "an empty one")
    else:
        lists = r.candidate_token_ids or []
        if not lists:
            _fail("candidate_token_ids", "at least one list", "none")
        for i, ids in enumerate(lists):
            if not ids:
                _fail(f"candidate_token_ids[{i}]", "at least one id", "none")
            _ids(ids, f"candidate_token_ids[{i}]")
    _score_from(r)
    if not (math.isfinite(r.temperature) and r.temperature > 0):
        _fail("temperature", "a finite number above 0", r.temperature)


def _score_from(r: Request) -> None:
    candidates = r.candidates if r.candidates is not None else r.candidate_token_ids
    if r.score_from and len(r.score_from) != len(candidates or []):
        _fail("score_from", f"one number per candidate ({len(candidates or [])})", len(r.score_from))
    for i, start in enumerate(r.score_from):
        most = INT32_MAX if r.candidate_token_ids is None else len(r.candidate_token_ids[i]) - 1
        _between(start, 0, most, f"score_from[{i}]")


def _generate(r: Request) -> None:
    _only(r, _SYSTEM1_ONLY, "system1")
    _between(r.max_tokens, 0, INT32_MAX, "max_tokens")
    _between(r.logprobs, 0, MAX_LOGPROBS, "logprobs")
    _between(r.prompt_logprobs, 0, MAX_LOGPROBS, "prompt_logprobs")
    for i, text in enumerate(r.stop):
        if not text:
            _fail(f"stop[{i}]", "a non-empty string", "an empty one")
    _ids(r.stop_token_ids, "stop_token_ids")
    if r.sampling is not None:
        _sampling(r.sampling)


def _sampling(s: Sampling) -> None:
    if not 0 <= s.temperature <= FLOAT32_MAX:
        _fail("sampling.temperature", f"a number from 0 to {FLOAT32_MAX:g}", s.temperature)
    _between(s.top_k, 0, INT32_MAX, "sampling.top_k")
    if not 0 < s.top_p <= 1:
        _fail("sampling.top_p", "a number in (0, 1]", s.top_p)
    if not 0 <= s.min_p <= 1:
        _fail("sampling.min_p", "a number in [0, 1]", s.min_p)
    _between(s.seed, 0, SEED_MAX, "sampling.seed")
    if not 0 < s.repetition_penalty <= FLOAT32_MAX:
        expected = f"a number above 0, at most {FLOAT32_MAX:g}"
        _fail("sampling.repetition_penalty", expected, s.repetition_penalty)
    for name in ("frequency_penalty", "presence_penalty"):
        _float32(getattr(s, name), f"sampling.{name}")
    for token_id, bias in (s.logit_bias or {}).items():
        _between(token_id, 0, INT32_MAX, "sampling.logit_bias: a key")
        _float32(bias, f"sampling.logit_bias[{token_id}]")


def _load(m: Load) -> None:
    if not m.model:
        _fail("model", "a path", "an empty string")
    for i, adapter in enumerate(m.lora):
        path, scale = (adapter.path, adapter.scale) if isinstance(adapter, LoraAdapter) else (adapter, 1.0)
        if not path:
            _fail(f"lora[{i}]", "a path", "an empty string")
        if not math.isfinite(scale):
            _fail(f"lora[{i}].scale", "a finite number", scale)


def _version(found: str) -> Problem | None:
    major = PROTOCOL_VERSION.partition(".")[0]
    if found.partition(".")[0] == major:
        return None
    return Problem("unsupported", f"protocol: expected {major}.x, found '{found}'")


def _between(value: int | None, low: int, high: int, where: str) -> None:
    if value is not None and not low <= value <= high:
        _fail(where, f"a whole number from {low} to {high}", value)


def _float32(value: float, where: str) -> None:
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX:
        _fail(where, f"a number from {-FLOAT32_MAX:g} to {FLOAT32_MAX:g}", value)


def _ids(ids: Sequence[int], where: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) <= INT32_MAX):
        for i, token_id in enumerate(ids):
            _between(token_id, 0, INT32_MAX, f"{where}[{i}]")


def _spans(spans: Sequence[tuple[int, int]], text: str | None, what: str) -> None:
    if spans and text is None:
        raise _Refused(f"literal_spans: expected only beside a {what} given as text, found here")
    for i, (start, end) in enumerate(spans):
        if not 0 <= start <= end <= len(text or ""):
            _fail(
                f"literal_spans[{i}]",
                f"0 <= start <= end <= {len(text or '')} (code points of {what})",
                f"[{start}, {end})",
            )
