"""Every message of the protocol as a msgspec struct: what goes to the worker, what comes back.

Requests and control lines refuse unknown fields, so that a typo is never silent. Answers accept
them, so that an older client can read a newer worker. New fields always have a default, and no
field ever changes its meaning. Types only: what values must satisfy stands in validate.py.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

from msgspec import UNSET, Raw, Struct, UnsetType

PROTOCOL_VERSION: Final = "1.0"

ScoreKind = Literal["auto", "logit_sum", "logprob_sum", "logprob_mean"]
FinishReason = Literal["stop", "length", "timeout"]
ShutdownMode = Literal["drain", "now"]
Experts = Literal["auto", "lazy", "eager"]
WorkerState = Literal["no_model", "loading", "ready", "running", "draining"]


# ---- to the worker -------------------------------------------------------------------------


class ToWorker(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Whatever a client may write: unknown fields are errors, defaults need not be sent."""


class Sampling(ToWorker, kw_only=True):
    """How a token is drawn; the defaults are greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None


class JsonSchemaConstraint(ToWorker, kw_only=True, tag_field="type", tag="json_schema"):
    """The output is JSON that a schema allows."""

    schema: Any


class RegexConstraint(ToWorker, kw_only=True, tag_field="type", tag="regex"):
    """The output matches a regular expression as a whole."""

    pattern: str


class LarkConstraint(ToWorker, kw_only=True, tag_field="type", tag="lark"):
    """The output is a sentence of a Lark grammar."""

    grammar: str


Constraint: TypeAlias = JsonSchemaConstraint | RegexConstraint | LarkConstraint


class Request(ToWorker, kw_only=True):
    """A line without `type`: generate, or with candidates system1."""

    id: str | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    candidates: list[str] | None = None
    candidate_token_ids: list[list[int]] | None = None
    max_tokens: int = 32
    temperature: float = 1.0
    sampling: Sampling | None = None
    stream: bool = False
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    score: ScoreKind = "auto"
    score_from: list[int] = []
    parse_special: bool = True
    literal_spans: list[tuple[int, int]] = []
    skip_special: bool = True
    add_bos: bool | None = None
    import_kv: str | None = None
    export_kv: str | None = None
    constraint: Constraint | None = None
    timeout_ms: int | None = None
    progress: bool = False
    energy: bool = False

    @property
    def scores(self) -> bool:
        """Whether this is a system1 request."""
        return self.candidates is not None or self.candidate_token_ids is not None


class Hello(ToWorker, kw_only=True, tag_field="type", tag="hello"):
    """Who are you? Answered at once, even while a request runs."""

    id: str | None = None
    protocol: str = PROTOCOL_VERSION


class Info(ToWorker, kw_only=True, tag_field="type", tag="info"):
    """What is this model? Answered in its place in the order."""

    id: str | None = None


class Ping(ToWorker, kw_only=True, tag_field="type", tag="ping"):
    """Answered at once by `pong`."""

    id: str | None = None


class Tokenize(ToWorker, kw_only=True, tag_field="type", tag="tokenize"):
    """Text to ids, by the rules of a request's `prompt`."""

    text: str
    id: str | None = None
    parse_special: bool = True
    literal_spans: list[tuple[int, int]] = []
    add_bos: bool | None = None


class Detokenize(ToWorker, kw_only=True, tag_field="type", tag="detokenize"):
    """Ids to text."""

    token_ids: list[int]
    id: str | None = None
    skip_special: bool = False


class LoraAdapter(ToWorker, kw_only=True):
    """One adapter file and the weight it is applied with."""

    path: str
    scale: float = 1.0


class Load(ToWorker, kw_only=True, tag_field="type", tag="load"):
    """Load a model into a worker that was started without one; once per process."""

    model: str
    id: str | None = None
    lora: list[str | LoraAdapter] = []
    experts: Experts | None = None


class Cancel(ToWorker, kw_only=True, tag_field="type", tag="cancel"):
    """Cancel the oldest unfinished request of that id. Has no answer of its own."""

    target: str
    id: str | None = None


class Shutdown(ToWorker, kw_only=True, tag_field="type", tag="shutdown"):
    """Leave: after what was read before ("drain"), or without finishing it ("now")."""

    id: str | None = None
    mode: ShutdownMode = "drain"


ControlLine: TypeAlias = Hello | Info | Ping | Tokenize | Detokenize | Load | Cancel | Shutdown
ClientMessage: TypeAlias = Request | ControlLine

CONTROL_TYPES: Final[dict[str, type[Struct]]] = {
    "hello": Hello,
    "info": Info,
    "ping": Ping,
    "tokenize": Tokenize,
    "detokenize": Detokenize,
    "load": Load,
    "cancel": Cancel,
    "shutdown": Shutdown,
}


# ---- from the worker -----------------------------------------------------------------------


class FromWorker(Struct):
    """Whatever the worker may write. `id` is that of the line it answers."""


class TopLogprob(FromWorker, kw_only=True):
    """One alternative: a token, the bytes it stands for, its log-probability (natural logarithm)."""

    token_id: int
    logprob: float
    bytes: list[int] | UnsetType = UNSET


class TokenLogprob(FromWorker, kw_only=True):
    """A token's log-probability under the model's own distribution, and the likeliest others."""

    token_id: int
    logprob: float
    top_logprobs: list[TopLogprob] = []
    bytes: list[int] | UnsetType = UNSET


class Usage(FromWorker, kw_only=True):
    """Counts of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class TokenEvent(FromWorker, kw_only=True, tag_field="event", tag="token"):
    """One token, when streaming; `text` is the whole characters that are now certain."""

    id: str | None = None
    token_id: int
    text: str
    logprob: float | UnsetType = UNSET
    top_logprobs: list[TopLogprob] | UnsetType = UNSET
    bytes: list[int] | UnsetType = UNSET


class ProgressEvent(FromWorker, kw_only=True, tag_field="event", tag="progress"):
    """Prompt tokens evaluated so far."""

    id: str | None = None
    done: int
    total: int


class GenerateFinal(FromWorker, kw_only=True, tag_field="event", tag="final"):
    """The end of a generate request; `energy` is in joules, by meter, where asked for and known."""

    id: str | None = None
    ok: Literal[True] = True
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_match: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    seed: int | None = None
    usage: Usage
    timings: dict[str, float] = {}
    energy: dict[str, float] | UnsetType = UNSET


class CandidateScore(FromWorker, kw_only=True):
    """One candidate; `probability` is relative to this set alone."""

    text: str
    token_ids: list[int]
    score: float
    probability: float


class ScoreFinal(FromWorker, kw_only=True, tag_field="event", tag="final"):
    """The end of a system1 request; `entropy` is in bits, `energy` as of generate."""

    id: str | None = None
    ok: Literal[True] = True
    candidates: list[CandidateScore]
    entropy: float
    best_index: int
    score: ScoreKind
    usage: Usage
    timings: dict[str, float] = {}
    energy: dict[str, float] | UnsetType = UNSET


class ErrorFinal(FromWorker, kw_only=True, tag_field="event", tag="final"):
    """The end of a request, or of a line, that failed; `error_kind` is for programs."""

    id: str | None = None
    ok: Literal[False] = False
    error: str
    error_kind: str
    token_ids: list[int] | UnsetType = UNSET
    text: str | UnsetType = UNSET


class Limits(FromWorker, kw_only=True):
    """Bounds in force; 0 where a model must be loaded first."""

    max_line_bytes: int
    read_ahead_bytes: int
    max_logprobs: int
    n_ctx: int = 0


class ModelSummary(FromWorker, kw_only=True):
    """Which model answers."""

    path: str
    name: str = ""
    architecture: str = ""
    device: str = ""
    n_ctx: int = 0
    n_vocab: int = 0


class HelloAnswer(FromWorker, kw_only=True, tag_field="event", tag="hello"):
    """Who answers, what it can do, and what it is doing."""

    id: str | None = None
    protocol: str = PROTOCOL_VERSION
    server: str
    capabilities: list[str]
    limits: Limits
    model: ModelSummary | None = None
    state: WorkerState


class InfoAnswer(FromWorker, kw_only=True, tag_field="event", tag="info"):
    """The model's facts, under the names of `reflex info --json`."""

    id: str | None = None
    model: dict[str, Any]
    special_tokens: dict[str, Any]
    phases: dict[str, Any] = {}


class Pong(FromWorker, kw_only=True, tag_field="event", tag="pong"):
    """The answer to a ping."""

    id: str | None = None


class TokenizeAnswer(FromWorker, kw_only=True, tag_field="event", tag="tokenize"):
    """The ids of a text."""

    id: str | None = None
    token_ids: list[int]


class DetokenizeAnswer(FromWorker, kw_only=True, tag_field="event", tag="detokenize"):
    """The text of ids."""

    id: str | None = None
    text: str


class Loaded(FromWorker, kw_only=True, tag_field="event", tag="loaded"):
    """The model is ready; `phases` are milliseconds, some of them grouped."""

    id: str | None = None
    model: ModelSummary
    phases: dict[str, Any] = {}


AnyFinal: TypeAlias = GenerateFinal | ScoreFinal | ErrorFinal
WorkerMessage: TypeAlias = (
    TokenEvent
    | ProgressEvent
    | GenerateFinal
    | ScoreFinal
    | ErrorFinal
    | HelloAnswer
    | InfoAnswer
    | Pong
    | TokenizeAnswer
    | DetokenizeAnswer
    | Loaded
)

# `final` is missing: which of its three shapes a line has is told by `ok` and `candidates`.
EVENT_TYPES: Final[dict[str, type[Struct]]] = {
    "token": TokenEvent,
    "progress": ProgressEvent,
    "hello": HelloAnswer,
    "info": InfoAnswer,
    "pong": Pong,
    "tokenize": TokenizeAnswer,
    "detokenize": DetokenizeAnswer,
    "loaded": Loaded,
}

# The fields of a line, undecoded.
Fields = dict[str, Raw]
