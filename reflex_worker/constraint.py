"""Constrained decoding: a JSON schema, a regular expression or a Lark grammar decides which tokens
may come next. The grammar engine is llguidance, imported on first use; the core applies its masks.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ._native import ReflexError


def _refuse(kind: str, message: str) -> ReflexError:
    error = ReflexError(message)
    error.kind = kind
    return error


class _Vocabulary:
    """What llguidance asks of a tokenizer: bytes of every token, which are special, bytes -> ids."""

    def __init__(self, engine: Any) -> None:
        special = engine.special_tokens
        self._engine = engine
        self.tokens = engine.vocabulary()
        self.special_token_ids = [i for i, t in enumerate(engine.token_types()) if t in _CONTROL]
        self.eos_token_id = special["eos"] if special["eos"] >= 0 else special["end_ids"][0]
        self.bos_token_id = special["bos"] if special["bos"] >= 0 else None

    def __call__(self, data: bytes | str) -> list[int]:
        text = data if isinstance(data, str) else data.decode("utf-8", "replace")
        return self._engine.tokenize(text, parse_special=False, add_bos=False)


# One spelling of JSON, json.dumps's own: where white space is free, a small model may write nothing
# else until it runs out of tokens. A schema's "x-guidance" may say otherwise.
_JSON_SPELLING: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}

# Token types that never spell text: unknown, control, unused.
_CONTROL = {2, 3, 5}


# Of the engine's errors: the lines of the grammar that it quotes, and where in them it stands.
_QUOTED = re.compile(r"^ *(?:\d+ \||\^).*$", re.MULTILINE)


def _words(error: str) -> str:
    """What llguidance says is wrong, in one line, without its state and the grammar's text."""
    return " ".join(_QUOTED.sub("", error.partition("<state>")[0]).split())


class Grammars:
    """The compiled vocabulary of one engine, made on the first constraint and kept."""

    def __init__(self, engine: Any) -> None:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            raise _refuse(
                "unsupported",
                "constraint: expected the llguidance package "
                "(pip install 'reflex-worker[constraint]'), found none",
            ) from None
        end_ids = engine.special_tokens["end_ids"]
        if not end_ids:
            raise _refuse("unsupported", "constraint: expected a model with an end token, found none")
        self._end_ids = set(end_ids)
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(engine)), eos_token=list(end_ids))

    def constrain(self, generation: Any, kind: str, body: Any) -> Constrained:
        """generation, bound to a json_schema, regex or lark body. Raises ReflexError (invalid_input)
        with the grammar engine's own words when the body is wrong."""
        from llguidance import LLMatcher

        try:
            if kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(json.dumps(body), defaults=_JSON_SPELLING)
            elif kind == "regex":
                grammar = LLMatcher.grammar_from_regex(body)
            else:
                grammar = LLMatcher.grammar_from_lark(body)
        except (ValueError, TypeError) as e:
            raise _refuse("invalid_input", f"constraint: {e}") from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            words = _words(matcher.get_error())
            raise _refuse("invalid_input", f"constraint: expected a valid {kind}, found: {words}")
        return Constrained(generation, matcher, self._end_ids)


class Constrained:
    """A generation whose every draw is masked; has the generation's own attributes."""

    def __init__(self, generation: Any, matcher: Any, end_ids: set[int]) -> None:
        self._generation = generation
        self._matcher = matcher
        self._end_ids = end_ids
        self._mask()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generation, name)

    def _mask(self) -> None:
        mask = self._matcher.compute_bitmask()
        self._check()
        self._generation.allow(mask)

    def _check(self) -> None:
        """A grammar too large to follow is the request's fault; llguidance adds its state to the words."""
        if self._matcher.is_error():
            raise _refuse("invalid_input", f"constraint: {_words(self._matcher.get_error())}")

    def step(self) -> Any:
        """One step of the generation; the next draw's mask follows from its token."""
        event = self._generation.step()
        if event.kind != "token" or event.token_id in self._end_ids:
            return event
        if not self._matcher.consume_token(event.token_id):
            self._check()
            raise _refuse("other", f"constraint: token {event.token_id} was drawn against the mask")
        if self._matcher.is_stopped():
            self._generation.finish()
        else:
            self._mask()
        return event
