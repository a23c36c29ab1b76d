"""One request on its way: what the engine is asked, and what its steps say in protocol words.

Pure but for the engine it drives: an engine is anything with the calls of `api.Engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET, UnsetType
from reflex_protocol.messages import (
    CandidateScore,
    Constraint,
    ErrorFinal,
    GenerateFinal,
    JsonSchemaConstraint,
    ModelSummary,
    ProgressEvent,
    RegexConstraint,
    Request,
    ScoreFinal,
    TokenEvent,
    TokenLogprob,
    TopLogprob,
    Usage,
    WorkerMessage,
)

from .energy import Meters, spent

SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
)


# Of the engine's phases, those that every final tells (docs/protocol.md).
START_PHASES = ("launch", "gguf_open", "cuda_init", "model_load", "first_kernel_at")


class Run:
    """A request that the engine has accepted. `step()` until it gives the final line."""

    def __init__(self, engine: Any, request: Request, meters: Meters) -> None:
        """Raises what the engine raises: nothing has run then."""
        self.request = request
        self._meters = meters
        self._joules = meters.read() if request.energy else {}
        self._engine = engine
        self._bytes: Callable[[int], bytes] = engine.token_bytes
        self._task = _score(engine, request) if request.scores else _generate(engine, request)

    def step(self) -> WorkerMessage | None:
        """One prefill chunk or one token, and the line to write for it, if any."""
        event = self._task.step()
        request = self.request
        if event.kind == "token":
            if not request.stream:
                return None
            line = TokenEvent(id=request.id, token_id=event.token_id, text=event.text)
            if request.logprobs is not None:
                line.logprob = event.logprob
                line.top_logprobs = self._top(event.top_logprobs)
                line.bytes = list(self._bytes(event.token_id))
            return line
        if event.kind == "progress":
            if not request.progress:
                return None
            return ProgressEvent(id=request.id, done=event.done, total=event.total)
        return self._score_final() if request.scores else self._generate_final()

    def so_far(self) -> tuple[list[int], str]:
        """Ids and text of what has been generated."""
        return ([], "") if self.request.scores else (self._task.token_ids, self._task.text)

    def _generate_final(self) -> GenerateFinal:
        task, request = self._task, self.request
        wants, wants_prompt = request.logprobs is not None, request.prompt_logprobs is not None
        return GenerateFinal(
            id=request.id,
            token_ids=task.token_ids,
            text=task.text,
            finish_reason=task.finish_reason,
            stop_match=task.stop_match,
            logprobs=self._logprobs(task.logprobs) if wants else None,
            prompt_logprobs=self._logprobs(task.prompt_logprobs) if wants_prompt else None,
            seed=task.seed,
            usage=Usage(**task.usage),
            timings=self._timings(),
            energy=self._energy(),
        )

    def _energy(self) -> dict[str, float] | UnsetType:
        """Joules since the request began, where it asks and a meter knows."""
        return spent(self._joules, self._meters.read()) or UNSET if self._joules else UNSET

    def _timings(self) -> dict[str, float]:
        """The request's own milliseconds, behind those of the start it came after."""
        phases = self._engine.phases
        return {**{name: phases[name] for name in START_PHASES if name in phases}, **self._task.timings}

    def _score_final(self) -> ScoreFinal:
        task = self._task
        return ScoreFinal(
            id=self.request.id,
            candidates=[
                CandidateScore(text=text, token_ids=ids, score=score, probability=probability)
                for text, ids, score, probability in task.candidates
            ],
            entropy=task.entropy,
            best_index=task.best_index,
            score=task.score_kind,
            usage=Usage(**task.usage),
            timings=self._timings(),
            energy=self._energy(),
        )

    def _top(self, pairs: list[tuple[int, float]]) -> list[TopLogprob]:
        return [TopLogprob(token_id=i, logprob=p, bytes=list(self._bytes(i))) for i, p in pairs]

    def _logprobs(self, entries: list[tuple[int, float, list[tuple[int, float]]]]) -> list[TokenLogprob]:
        return [
            TokenLogprob(token_id=i, logprob=p, top_logprobs=self._top(top), bytes=list(self._bytes(i)))
            for i, p, top in entries
        ]


def _generate(engine: Any, r: Request) -> Any:
    drawn = {name: getattr(r.sampling, name) for name in SAMPLING_FIELDS} if r.sampling else {}
    return engine.generate(
        r.prompt,
        prompt_token_ids=r.prompt_token_ids,
        parse_special=r.parse_special,
        literal_spans=r.literal_spans,
        add_bos=r.add_bos,
        max_tokens=r.max_tokens,
        stop=r.stop,
        stop_token_ids=r.stop_token_ids,
        ignore_eos=r.ignore_eos,
        logprobs=r.logprobs,
        prompt_logprobs=r.prompt_logprobs,
        skip_special=r.skip_special,
        timeout_ms=r.timeout_ms,
        constraint=_constraint(r.constraint) if r.constraint else None,
        **drawn,
    )


def _constraint(c: Constraint) -> tuple[str, Any]:
    if isinstance(c, JsonSchemaConstraint):
        return "json_schema", c.schema
    if isinstance(c, RegexConstraint):
        return "regex", c.pattern
    return "lark", c.grammar


def _score(engine: Any, r: Request) -> Any:
    return engine.score(
        r.prompt,
        r.candidates,
        prompt_token_ids=r.prompt_token_ids,
        candidate_token_ids=r.candidate_token_ids,
        parse_special=r.parse_special,
        literal_spans=r.literal_spans,
        add_bos=r.add_bos,
        score_from=r.score_from,
        score=r.score,
        temperature=r.temperature,
        timeout_ms=r.timeout_ms,
    )


def kind_of(error: BaseException) -> str:
    """The error_kind of whatever an engine raised."""
    if isinstance(error, MemoryError):
        return "out_of_memory"
    kind = getattr(error, "kind", None)
    if isinstance(kind, str):
        return kind
    return "io" if isinstance(error, OSError) else "other"


def error_final(line_id: str | None, error: BaseException) -> ErrorFinal:
    """The final line of whatever an engine raised."""
    kind = kind_of(error)
    text = str(error) or type(error).__name__
    if kind == "other":
        text = f"{type(error).__name__}: {text}" if text != type(error).__name__ else text
    return ErrorFinal(id=line_id, error=utf8(text), error_kind=kind)


def utf8(text: str) -> str:
    """text with what no line can carry (file names that are no UTF-8) replaced."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def summary(info: dict[str, Any]) -> ModelSummary:
    """Which model it is, from the engine's facts."""
    return ModelSummary(
        path=utf8(info["path"]),
        name=info["name"],
        architecture=info["architecture"],
        device=info["device"],
        n_ctx=info["n_ctx"],
        n_vocab=info["n_vocab"],
    )
