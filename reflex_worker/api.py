"""The Python API: a loaded model, and its two kinds of request.

    from reflex_worker import Engine

    engine = Engine("model.gguf")
    print(engine.generate("Once upon a time", max_tokens=16).run().text)
    for event in engine.generate("Once upon a time"):
        print(event.text, end="", flush=True)
    decision = engine.score("The capital of France is", [" Paris", " Rome"]).run()
    print(decision.best_index, decision.candidates)

A thin layer over the native core: conversions, iteration, and the fallback tokenizer for files
whose pre-tokenizer the core does not know. Importing it starts nothing and sets no environment.
"""

from __future__ import annotations

from ._native import Engine as _NativeEngine
from ._native import ReflexError, gguf_info

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from typing_extensions import Self

    from ._native import Event
    from ._native import Generation as _NativeGeneration
    from ._native import Scoring as _NativeScoring
    from .constraint import Constrained, Grammars
    from .fallback_tokenizer import FallbackTokenizer

__all__ = ["Engine", "Generation", "ReflexError", "Scoring", "describe"]


def refuse(kind: str, message: str) -> ReflexError:
    """A ReflexError of a kind, as the core itself would raise it."""
    error = ReflexError(message)
    error.kind = kind
    return error


# What the core's int holds, and a place in a text; other whole numbers with a narrower range.
_INT = (0, 2**31 - 1)
_RANGES = {
    "seed": (0, 2**64 - 1),
    "logprobs": (0, 1000),
    "prompt_logprobs": (0, 1000),
    "literal_spans": (0, 2**63 - 1),
}


def _ranged(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """call(...). A whole number that the core's types do not hold ends in a TypeError that names neither it
    nor its range: found here, it is invalid_input as any other."""
    try:
        return call(*args, **named)
    except (TypeError, RuntimeError):  # RuntimeError: of a dict's keys
        for name, value in named.items():
            problem = _beyond(name, value, *_RANGES.get(name, _INT))
            if problem is not None:
                raise refuse("invalid_input", problem) from None
        raise


def _beyond(where: str, value: Any, low: int, high: int) -> str | None:
    """What is wrong with the first whole number in value, lists and keys of a dict too, out of its range."""
    if isinstance(value, int):
        if not low <= value <= high:
            return f"{where}: expected a whole number from {low} to {high}, found {value}"
    elif isinstance(value, (list, tuple, dict)):
        what = f"{where}: a key" if isinstance(value, dict) else ""
        found = (_beyond(what or f"{where}[{i}]", item, low, high) for i, item in enumerate(value))
        return next((f for f in found if f is not None), None)
    return None


class _Task:
    """What both kinds of request are: ready, to be stepped, iterated over or run whole."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.step: Callable[[], Event] = native.step  # one prefill chunk, or one token

    def __iter__(self) -> Iterator[Event]:
        """Its events, up to one of kind "done"."""
        while True:
            event = self.step()
            yield event
            if event.kind == "done":
                return

    def run(self) -> Self:
        """Run it to its end; returns itself."""
        for _ in self:
            pass
        return self

    @property
    def usage(self) -> dict[str, int]:
        """Tokens: prompt_tokens, completion_tokens, cached_tokens."""
        return self._native.usage

    @property
    def timings(self) -> dict[str, float]:
        """Milliseconds by phase (docs/protocol.md)."""
        return self._native.timings


class Generation(_Task):
    """A generate request, ready to run. Its events are "progress" per prefill chunk, "token" per token,
    and at last "done".

    An event has kind, done and total (tokens of the prompt, of "progress"), token_id, text, and where asked
    logprob and top_logprobs. Attributes are those so far, and final once an event of kind "done" has come:
    T tokens are out of a prompt of P; log-probabilities are natural logarithms. Drop it to cancel it. One
    request of an engine runs at a time: a new one ends the state of those before.

    A step raises ReflexError (kinds: cuda, fatal, out_of_memory, kv_cache where another request took the
    engine).
    """

    def __init__(self, native: _NativeGeneration | Constrained) -> None:
        super().__init__(native)
        self._native = native

    @property
    def token_ids(self) -> list[int]:
        """(T)."""
        return self._native.token_ids

    @property
    def text(self) -> str:
        """Whole characters, up to a stop string."""
        return self._native.text

    @property
    def finish_reason(self) -> str:
        """Why it ended: "stop", "length" or "timeout"; "" before."""
        return self._native.finish_reason

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended it."""
        return self._native.stop_match

    @property
    def logprobs(self) -> list[tuple[int, float, list[tuple[int, float]]]]:
        """(T) of (token_id, logprob, the likeliest [(token_id, logprob)]); [] where not asked for."""
        return self._native.logprobs

    @property
    def prompt_logprobs(self) -> list[tuple[int, float, list[tuple[int, float]]]]:
        """(P - 1) likewise, of the prompt's tokens from the second on."""
        return self._native.prompt_logprobs

    @property
    def seed(self) -> int:
        """What was drawn from, given or not."""
        return self._native.seed


class Scoring(_Task):
    """A system1 request, ready to run. Its events are "progress" per chunk, and at last "done".

    Its attributes, of N candidates, hold once an event of kind "done" has come. Drop it to cancel it. A step
    raises as one of Generation.
    """

    def __init__(self, native: _NativeScoring, texts: Sequence[str] | None) -> None:
        super().__init__(native)
        self._native = native
        self._texts = texts  # where the core saw ids only

    @property
    def candidates(self) -> list[tuple[str, list[int], float, float]]:
        """(N), in the order given, of (text, token_ids, score as score_kind says, probability): the softmax
        of score / temperature, which sums to 1."""
        found = self._native.candidates
        if self._texts is None:
            return found
        return [(text, *c[1:]) for text, c in zip(self._texts, found, strict=True)]

    @property
    def entropy(self) -> float:
        """Of the probabilities, in bits."""
        return self._native.entropy

    @property
    def best_index(self) -> int:
        """Of the best score, the first where several are."""
        return self._native.best_index

    @property
    def score_kind(self) -> str:
        """What a score is: "logit_sum", "logprob_sum" or "logprob_mean" (docs/protocol.md)."""
        return self._native.score_kind


def describe(path: str) -> dict[str, Any]:
    """What a GGUF file holds and whether it will run here, without loading it.

    Facts under the names of `reflex info --json`: `runs`, and where it does not, `error_kind` and `error`,
    those that Engine(path), or the first text given to it, would raise. Where the core does not know the
    pre-tokenizer (`tokenizer_known` False) the fallback is tried.
    Raises ReflexError where the file is no GGUF.
    """
    info = gguf_info(path)
    if info["runs"] and not info["tokenizer_known"]:
        from .fallback_tokenizer import FallbackTokenizer

        try:
            FallbackTokenizer(path)
        except ReflexError as e:
            info.update(runs=False, error_kind=e.kind, error=str(e))
    return info


# tokenizer.ggml.token_type values.
_CONTROL, _USER_DEFINED = 3, 4


class Engine:
    """A loaded model. One request at a time; not to be used from two threads at once.

    model: a GGUF file (of a split one, any part). device: auto, cpu, cuda or cuda:N. threads: of
    the CPU backend, 0 for what the machine and its cgroup allow. ctx: a cap on the context in
    tokens, 0 for the model's own. exact: float32 activations and KV. isa: force a CPU instruction
    set. load_mode: how a GPU's weights are read: ring, map, read or direct. experts: when a mixture's experts
    come to a GPU: lazy, as routers choose them with the rest behind, or eager, before the first token;
    auto decides by their size. poll: called now and then while the model loads; what it raises ends
    the loading.

    Raises ReflexError, whose `kind` is the protocol's error_kind.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        threads: int = 0,
        ctx: int = 0,
        exact: bool = False,
        isa: str = "",
        load_mode: str = "",
        experts: str = "",
        poll: Callable[[], None] | None = None,
    ) -> None:
        native = _ranged(
            _NativeEngine,
            model,
            device=device,
            threads=threads,
            ctx=ctx,
            exact=exact,
            isa=isa,
            load_mode=load_mode,
            experts=experts,
            poll=poll,
        )
        self._wrap(native, model)

    @classmethod
    def around(cls, native: _NativeEngine, model: str) -> Engine:
        """An engine on what the core has loaded already from the file `model`."""
        engine = cls.__new__(cls)
        engine._wrap(native, model)
        return engine

    def _wrap(self, native: _NativeEngine, model: str) -> None:
        self._native = native
        self._model = model
        self._fallback_tokenizer: FallbackTokenizer | None = None
        self._native_tokenizes: bool | None = None
        self._grammars: Grammars | None = None
        self._vocabulary: list[bytes] | None = None

    @property
    def info(self) -> dict[str, Any]:
        """Facts of the model and the device, under the names of `reflex info --json`."""
        return self._native.info

    @property
    def special_tokens(self) -> dict[str, Any]:
        """bos, eos, eot, eom, unk, pad (-1: none), add_bos, end_ids."""
        return self._native.special_tokens

    @property
    def control_tokens(self) -> list[dict[str, Any]]:
        """What text may spell and mean a control token by: id, text and whether it is user-defined
        (such as <think>: shown in answers)."""
        types = self._native.token_types()
        found = [i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
        return [
            {"id": i, "text": self.detokenize([i]), "user_defined": types[i] == _USER_DEFINED} for i in found
        ]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, those of an unfinished character too. Raises ReflexError
        (invalid_input) for an id that is not in the vocabulary."""
        if self._vocabulary is None:
            self._vocabulary = self._native.vocabulary()
        if not 0 <= token_id < len(self._vocabulary):
            expected = f"token_id: expected a token id in [0, {len(self._vocabulary)})"
            raise refuse("invalid_input", f"{expected}, found {token_id}")
        return self._vocabulary[token_id]

    @property
    def phases(self) -> dict[str, Any]:
        """Milliseconds of each phase of the start; device_stages is a dict of them."""
        return self._native.phases

    def tokenize(
        self,
        text: str,
        *,
        parse_special: bool = True,
        literal_spans: Sequence[tuple[int, int]] = (),
        add_bos: bool | None = None,
    ) -> list[int]:
        """The ids of a text. parse_special: whether text may spell control tokens; literal_spans: ranges
        [start, end), in code points, in which it may not. add_bos None: as the model says.

        Raises ReflexError (tokenizer, invalid_input)."""
        fallback = self._fallback()
        tokenizer = self._native if fallback is None else fallback
        return _ranged(
            tokenizer.tokenize,
            text,
            parse_special=parse_special,
            literal_spans=literal_spans,
            add_bos=add_bos,
        )

    def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of ids, without control tokens where skip_special; bytes that are no UTF-8 come out as
        U+FFFD. Raises ReflexError (invalid_input) for an id that is not in the vocabulary."""
        return _ranged(self._native.detokenize, token_ids=token_ids, skip_special=skip_special)

    def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        parse_special: bool = True,
        literal_spans: Sequence[tuple[int, int]] = (),
        add_bos: bool | None = None,
        constraint: tuple[str, Any] | None = None,
        **options: Any,
    ) -> Generation:
        """Check a generate request and ready it; nothing runs before its first step.

        constraint: what the output must be: ("json_schema", schema), ("regex", pattern) or
        ("lark", grammar); needs the llguidance package.

        options, with their defaults: max_tokens 32, temperature 0 (greedy), top_k 0, top_p 1,
        min_p 0, seed None (drawn, and told), repetition_penalty 1, frequency_penalty 0,
        presence_penalty 0, logit_bias None ({id: bias}), stop (), stop_token_ids (), ignore_eos
        False, logprobs None, prompt_logprobs None, skip_special True, timeout_ms None. Their
        meaning is that of the protocol's fields of the same names (docs/protocol.md).

        Raises ReflexError (invalid_input, context_overflow, tokenizer, unsupported).
        """
        if prompt is not None and prompt_token_ids is None and self._fallback() is not None:
            prompt_token_ids = self.tokenize(
                prompt, parse_special=parse_special, literal_spans=literal_spans, add_bos=add_bos
            )
            prompt, literal_spans = None, ()
        native = _ranged(
            self._native.generate,
            prompt,
            prompt_token_ids=prompt_token_ids,
            parse_special=parse_special,
            literal_spans=literal_spans,
            add_bos=add_bos,
            **options,
        )
        if constraint is None:
            return Generation(native)
        if self._grammars is None:
            from .constraint import Grammars

            self._grammars = Grammars(self._native)
        return Generation(self._grammars.constrain(native, *constraint))

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
    ) -> Scoring:
        """Check a system1 request and ready it; nothing runs before its first step.

        candidates: N texts that could follow the prompt, or candidate_token_ids. score: what is compared,
        "logit_sum", "logprob_sum", "logprob_mean", or "auto", the first where every candidate is one token,
        else the second. temperature: of the softmax over the scores. score_from: per candidate, the first
        of its tokens that counts; those before it are read as context only. Empty: every token counts.
        timeout_ms: of the whole request, None for no end.

        Raises ReflexError (invalid_input: none, an empty one, or one whose first characters merge with the
        prompt's end; context_overflow, tokenizer).
        """
        texts = None
        if self._fallback() is not None:
            how = {"parse_special": parse_special, "literal_spans": literal_spans, "add_bos": add_bos}
            if candidates is not None and candidate_token_ids is None:
                texts = candidates
                candidate_token_ids = self._join(prompt, candidates, how)
                candidates = None
            if prompt is not None and prompt_token_ids is None:
                prompt_token_ids = self.tokenize(prompt, **how)
                prompt, literal_spans = None, ()
        native = _ranged(
            self._native.score,
            prompt,
            candidates,
            prompt_token_ids=prompt_token_ids,
            candidate_token_ids=candidate_token_ids,
            parse_special=parse_special,
            literal_spans=literal_spans,
            add_bos=add_bos,
            score_from=list(score_from),
            score=score,
            temperature=temperature,
            timeout_ms=timeout_ms,
        )
        return Scoring(native, texts)

    def warm_up(self, interrupt: Callable[[], bool] | None = None) -> None:
        """One hidden step, so that the first request is as fast as the second. interrupt: asked about once a
        millisecond while the step waits for weights on their way to a GPU; True gives it up."""
        self._native.warm_up(interrupt)

    def _fallback(self) -> FallbackTokenizer | None:
        """The tokenizer of another package, where the core does not know this file's pre-tokenizer. Of a
        vocabulary that makes no sense the core tells itself, with the first text."""
        if self._native_tokenizes is None:
            info = self.info
            self._native_tokenizes = bool(info["tokenizer_known"] or info["tokenizer_error"])
        if self._native_tokenizes:
            return None
        if self._fallback_tokenizer is None:
            from .fallback_tokenizer import FallbackTokenizer

            self._fallback_tokenizer = FallbackTokenizer(self._model)
        return self._fallback_tokenizer

    def _join(self, prompt: str | None, candidates: Sequence[str], how: dict[str, Any]) -> list[list[int]]:
        """Each candidate's ids: those of prompt + candidate with the prompt's cut off the front."""
        if prompt is None:  # nothing to join: encoded alone
            return [self.tokenize(c, parse_special=how["parse_special"], add_bos=False) for c in candidates]
        before = self.tokenize(prompt, **how)
        found = []
        for i, candidate in enumerate(candidates):
            ids = self.tokenize(prompt + candidate, **how)
            if ids[: len(before)] != before:
                raise refuse(
                    "invalid_input",
                    f"candidates[{i}]: its first characters merge with the end of the prompt "
                    f"({candidate!r} does not begin a token there)",
                )
            found.append(ids[len(before) :])
        return found
