"""Counters in Prometheus's text format (0.0.4). Knows nothing of requests but what it is told."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

Labels = tuple[tuple[str, str], ...]


class Counter:
    """Only grows."""

    def __init__(self, name: str, help: str, *, where_known: bool = False) -> None:
        """where_known: nothing is shown, not 0, until something has been counted."""
        self.name, self.help = name, help
        self._where_known = where_known
        self._values: dict[Labels, float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        """Count."""
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0) + amount

    def value(self, **labels: str) -> float:
        """The count so far."""
        return self._values.get(tuple(labels.items()), 0)

    def lines(self) -> Iterable[str]:
        """The exposition."""
        if self._where_known and not self._values:
            return
        yield from _head(self.name, self.help, "counter")
        for labels, value in (self._values or {(): 0.0}).items():
            yield f"{self.name}{_braces(labels)} {_number(value)}"


class Histogram:
    """How often a duration in seconds fell below each bound."""

    def __init__(self, name: str, help: str, bounds: Sequence[float] = _SECONDS) -> None:
        self.name, self.help = name, help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def lines(self) -> Iterable[str]:
        """The exposition."""
        yield from _head(self.name, self.help, "histogram")
        so_far = 0
        for bound, n in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            so_far += n
            yield f'{self.name}_bucket{{le="{bound}"}} {so_far}'
        yield f"{self.name}_sum {_number(self._sum)}"
        yield f"{self.name}_count {so_far}"


class Metrics:
    """All that is counted here."""

    def __init__(self) -> None:
        self.requests = Counter("reflex_requests_total", "Answers, by route and HTTP status.")
        self.prompt_tokens = Counter("reflex_prompt_tokens_total", "Tokens of prompts that the worker read.")
        self.completion_tokens = Counter("reflex_completion_tokens_total", "Tokens that the worker wrote.")
        self.cached_tokens = Counter("reflex_cached_tokens_total", "Prompt tokens that needed no work.")
        self.cancelled = Counter("reflex_cancelled_total", "Requests whose client went away first.")
        self.templates = Counter(
            "reflex_plain_prompts_total", "Chats rendered without the chat template, by reason."
        )
        self.energy = Counter(
            "reflex_energy_joules_total",
            "Energy of the device while requests ran, by meter, where the worker has one.",
            where_known=True,
        )
        self.queue_wait = Histogram("reflex_queue_wait_seconds", "Time in line for the worker.")
        self.first_token = Histogram(
            "reflex_time_to_first_token_seconds", "From the request to its first token."
        )
        self.worker_phase = Counter(
            "reflex_worker_phase_seconds_total", "Time of requests in the worker, by phase."
        )

    def note_timings(self, timings: Mapping[str, float]) -> None:
        """A final answer's timings, in milliseconds."""
        for name, value in timings.items():
            if name in ("tokenize", "prompt_eval", "decode"):
                self.worker_phase.add(value / 1000, phase=name)

    def note_energy(self, joules: Mapping[str, float]) -> None:
        """A final answer's joules by meter."""
        for meter, value in joules.items():
            self.energy.add(value, meter=meter)

    def lines(self) -> Iterable[str]:
        """The exposition of all."""
        for one in vars(self).values():
            yield from one.lines()


def gauge(
    name: str, help: str, values: Mapping[Labels, float], kind: Literal["gauge", "counter"] = "gauge"
) -> Iterable[str]:
    """The exposition of a value that is read when asked for."""
    yield from _head(name, help, kind)
    for labels, value in values.items():
        yield f"{name}{_braces(labels)} {_number(value)}"


def _head(name: str, help: str, kind: str) -> Iterable[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{k}="{_escaped(v)}"' for k, v in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.9g}"
