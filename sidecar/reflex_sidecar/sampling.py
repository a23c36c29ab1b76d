"""From a body's sampling fields to the worker's: names, ranges, defaults. Pure."""

from __future__ import annotations

import math
from typing import Final

from reflex_protocol.messages import Sampling

from .bodies import SamplingFields
from .errors import bad_request

MAX_N: Final = 64
MAX_STOPS: Final = 64
MAX_TOP_LOGPROBS: Final = 20
SEED_MASK: Final = 2**64 - 1
# top_p 0 is allowed by the API and means: the likeliest token only.
SMALLEST_TOP_P: Final = 1e-9


def sampling_of(body: SamplingFields) -> Sampling:
    """The worker's `sampling`; as the API has it, temperature is 1 where it is not given."""
    repetition = body.repetition_penalty if body.repetition_penalty is not None else body.repeat_penalty
    return Sampling(
        temperature=_between(body.temperature, 0, 100, "temperature", 1.0),
        top_p=max(SMALLEST_TOP_P, _between(body.top_p, 0, 1, "top_p", 1.0)),
        top_k=max(0, _whole(body.top_k, -1, 2**31 - 1, "top_k", 0)),
        min_p=_between(body.min_p, 0, 1, "min_p", 0.0),
        seed=None if body.seed is None else body.seed & SEED_MASK,
        repetition_penalty=_between(repetition, 1e-6, 1e6, "repetition_penalty", 1.0),
        frequency_penalty=_between(body.frequency_penalty, -100, 100, "frequency_penalty", 0.0),
        presence_penalty=_between(body.presence_penalty, -100, 100, "presence_penalty", 0.0),
        logit_bias=_logit_bias(body.logit_bias),
    )


def stops_of(body: SamplingFields) -> list[str]:
    """Stop strings as a list."""
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or [])
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop: expected at most {MAX_STOPS}, found {len(stops)}", param="stop")
    for i, stop in enumerate(stops):
        if not stop:
            raise bad_request(f"stop[{i}]: expected a non-empty string, found an empty one", param="stop")
    return stops


def n_of(body: SamplingFields) -> int:
    """How many answers."""
    return _whole(body.n, 1, MAX_N, "n", 1)


def max_tokens_of(asked: int | None, limit: int, default: int, param: str, *, low: int = 1) -> int:
    """How many tokens an answer may have: what was asked, within the server's limit."""
    if asked is None:
        return min(default, limit)
    if asked < low:
        raise bad_request(f"{param}: expected {low} or more, found {asked}", param=param)
    return min(asked, limit)


def top_logprobs_of(asked: int | None, param: str = "top_logprobs") -> int:
    """How many alternatives with each token."""
    return _whole(asked, 0, MAX_TOP_LOGPROBS, param, 0)


def temperature_of(asked: float | None) -> float:
    """A temperature over candidates: above 0."""
    if asked is None:
        return 1.0
    if not (math.isfinite(asked) and asked > 0):
        raise bad_request(f"temperature: expected a number above 0, found {asked}", param="temperature")
    return asked


def _between(value: float | None, low: float, high: float, param: str, default: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:
        raise bad_request(f"{param}: expected a number from {low:g} to {high:g}, found {value}", param=param)
    return value


def _whole(value: int | None, low: int, high: int, param: str, default: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise bad_request(
            f"{param}: expected a whole number from {low} to {high}, found {value}", param=param
        )
    return value


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    out = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit():
            raise bad_request(
                f"logit_bias: expected token ids as keys, found {key[:40]!r}", param="logit_bias"
            )
        out[int(key)] = value
    return out
