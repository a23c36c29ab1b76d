"""The native core (nanobind). Every call that computes or reads a file releases the GIL."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

class ReflexError(Exception):
    """Any failure of the core. `kind` is the protocol's error_kind."""

    kind: str

class Event:
    """What one step brought: kind 'progress' (done, total), 'token' or 'done'."""

    kind: Literal["progress", "token", "done"]
    done: int
    total: int
    token_id: int
    text: str
    logprob: float | None
    top_logprobs: list[tuple[int, float]]

class Generation:
    """A running generate request. Drop it to cancel."""

    def step(self) -> Event:
        """Run one prefill chunk or one token."""
    def allow(self, mask: bytes) -> None:
        """Only tokens whose bit is set (bit i % 8 of byte i // 8) may be drawn next; holds for one draw."""
    def finish(self) -> None:
        """End at the next step with finish_reason 'stop'."""
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_match: str | None
    logprobs: list[tuple[int, float, list[tuple[int, float]]]]
    prompt_logprobs: list[tuple[int, float, list[tuple[int, float]]]]
    seed: int
    usage: dict[str, int]
    timings: dict[str, float]

class Scoring:
    """A running system1 request. Drop it to cancel."""

    def step(self) -> Event: ...
    candidates: list[tuple[str, list[int], float, float]]  # text, token_ids, score, probability
    entropy: float
    best_index: int
    score_kind: str
    usage: dict[str, int]
    timings: dict[str, float]

class Engine:
    """A loaded model. One request at a time."""

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        threads: int = 0,
        ctx: int = 0,
        exact: bool = False,
        isa: str = "",
        chunk: int = 512,
        load_mode: str = "",
        experts: str = "",
        poll: Callable[[], None] | None = None,
    ) -> None: ...
    info: dict[str, Any]
    special_tokens: dict[str, Any]  # bos eos eot eom unk pad (-1: none), add_bos, end_ids
    phases: dict[str, Any]  # milliseconds; device_stages is a dict of them
    load_progress: tuple[int, int, bool]  # bytes of weights on the device, of how many, all there
    def tokenize(
        self,
        text: str,
        *,
        parse_special: bool = True,
        literal_spans: Sequence[tuple[int, int]] = (),
        add_bos: bool | None = None,
    ) -> list[int]: ...
    def vocabulary(self) -> list[bytes]:
        """The raw bytes of every token; control tokens by their spelling."""
    def token_types(self) -> bytes:
        """One byte per token: its tokenizer.ggml.token_type (1 normal, 3 control, 4 user-defined ...)."""
    def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str: ...
    def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        parse_special: bool = True,
        literal_spans: Sequence[tuple[int, int]] = (),
        add_bos: bool | None = None,
        max_tokens: int = 32,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        logit_bias: dict[int, float] | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        skip_special: bool = True,
        timeout_ms: int | None = None,
    ) -> Generation:
        """Check the request (ReflexError before any work) and ready it; step() runs it."""
    def score(
        self,
        prompt: str | None = None,
        candidates: Sequence[str] | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        candidate_token_ids: Sequence[Sequence[int]] | None = None,
        parse_special: bool = True,
        literal_spans: Sequence[tuple[int, int]] = (),
        add_bos: bool | None = None,
        score_from: Sequence[int] = (),
        score: str = "auto",
        temperature: float = 1.0,
        timeout_ms: int | None = None,
    ) -> Scoring: ...
    def logits(
        self, token_ids: Sequence[int], outputs: Sequence[int], *, chunk: int = 0
    ) -> list[list[float]]:
        """Raw logits of the given rows of a prompt (tests, `reflex check`)."""
    def warm_up(self, interrupt: Callable[[], bool] | None = None) -> None:
        """One hidden step; interrupt() is asked now and then while it waits for weights: True gives it up."""

def stand_by(*, device: str = "auto", exact: bool = False, isa: str = "", load_mode: str = "") -> None:
    """Make ready what the engine that is loaded next by these options needs before it sees a file."""

def report_lost_files() -> None:
    """From now on a model file that is lost while it is read ends the process with a line on stderr and
    status 4, in place of SIGBUS. For commands: a library leaves the signal to its host."""

def set_last_words(fd: int, words: bytes) -> None:
    """What such an end says to fd first; b"" nothing."""

def gguf_info(path: str) -> dict[str, Any]:
    """Metadata, tensor types and whether Reflex will run the file, without loading it. Where runs holds but
    tokenizer_known does not, text needs the fallback: api.describe has the last word."""

def gguf_array(path: str, key: str) -> list[bytes] | list[int] | None:
    """A metadata array: strings as bytes, or whole numbers. None when there is no such key."""

def adopt_boot(capsule: object) -> bool:
    """Use the driver that `_boot.start()` is starting; False where it is of another version."""

def build_facts() -> dict[str, str]:
    """cuda_archs (e.g. "75 80 90a") and nvcc (e.g. "13.0.88") of this build; empty without CUDA kernels."""

def now_ms() -> float: ...
def process_start_ms() -> float: ...
