#!/usr/bin/env python3
"""Make fixtures/bpe.json and fixtures/spm.json: small vocabularies that exercise every rule.

usage: python -m tests.tokenizer.make_fixtures      (needs tokenizers and sentencepiece)

bpe.json is trained without any pre-tokenizer, so that its merges reach across spaces, digits,
punctuation and lines: a word border in the wrong place then shows in the ids, whichever
pre-tokenizer is laid over it. spm.json is a SentencePiece model with byte fallback as Llama's,
with ids of that library for lines of text: the tests have no SentencePiece to ask.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from . import corpus

HERE = Path(__file__).parent / "fixtures"
N_MERGES = 700
N_PIECES = 900
TRAINING_BYTES = 300_000
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

# Said over and over in training, for merges of digits, of marks with letters, and inside and out
# of CJK, which random text has too rarely.
PHRASES = [
    "In 2024 and 2025, 1000 of 100000 (12345.6789) 111 2222 33333",
    "cafe\u0301s nai\u0308ve e\u0301te\u0301 n\u0303",
    "你好世界。中文中国です・ます、する",
    "हिन्दी में नमस्ते",
    "สวัสดี ครับ",
    "  \n    \t\t  \r\n\r\n \u3000\u3000\u00a0",
    "a1b2 c3d4 x=10;",
]
N_PHRASES = 400

# (spelling, type). The <a> family overlaps in every way that leftmost-longest has to settle.
MARKED = [
    ("<|endoftext|>", CONTROL),
    ("<|im_start|>", CONTROL),
    ("<|im_end|>", CONTROL),
    ("<a>", CONTROL),
    ("<a>b", CONTROL),
    ("b<a", CONTROL),
    ("a>b<a>c", CONTROL),
    ("c>", CONTROL),
    ("<｜end▁of▁sentence｜>", CONTROL),
    ("<tool>", USER_DEFINED),
    (" \n ", USER_DEFINED),
    ("日本", USER_DEFINED),
]
# Tokens that no merge makes: taken only where a word that is a token is taken whole.
UNREACHABLE = ["ĠParis", "zqx", "!!!zq"]


def in_spm_alphabet(c: str) -> bool:
    """SentencePiece wants a piece for every character it is trained on; the others fall to bytes."""
    return c < "\u0250" or "\u3040" <= c <= "\u30ff"


def training_text() -> list[str]:
    r = random.Random(5)
    lines = [line for line in corpus.mixed(TRAINING_BYTES, seed=7).split("\n\n") if line]
    return lines + ["".join(r.choices(PHRASES, k=3)) for _ in range(N_PHRASES)]


def bpe() -> dict[str, object]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=256 + N_MERGES,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=6,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = [*vocab, *UNREACHABLE, *(t for t, _ in MARKED)]
    assert len(set(tokens)) == len(tokens)
    return {
        "tokens": tokens,
        "types": [NORMAL] * (len(vocab) + len(UNREACHABLE)) + [kind for _, kind in MARKED],
        "merges": [" ".join(m) for m in model["merges"]],
    }


def spm() -> dict[str, object]:
    import sentencepiece

    with tempfile.TemporaryDirectory() as folder:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["".join(filter(in_spm_alphabet, line)) for line in training_text()]),
            model_prefix=f"{folder}/m",
            model_type="bpe",
            vocab_size=256 + 3 + N_PIECES,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.98,
            max_sentence_length=100_000,
            num_threads=1,
            minloglevel=2,
        )
        model = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/m.model")
    ids = range(model.get_piece_size())
    types = [
        UNKNOWN
        if model.is_unknown(i)
        else CONTROL
        if model.is_control(i)
        else BYTE
        if model.is_byte(i)
        else NORMAL
        for i in ids
    ]
    r = random.Random(11)
    texts = ["", " ", "  ", "a", " a", "a ", "Hello world", "\n", "\t a", "▁", "a▁b", "<s>", "<0x41>", "\x00"]
    for make, weight in corpus.KINDS:
        texts += [make(r) for _ in range(4 * weight)]
    return {
        "tokens": [model.id_to_piece(i) for i in ids],
        "types": types,
        "scores": [model.get_score(i) for i in ids],
        "texts": texts,
        "ids": [model.encode(t) for t in texts],
    }


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name, make in (("bpe", bpe), ("spm", spm)):
        lines = [f'"{k}": {json.dumps(v, ensure_ascii=True)}' for k, v in make().items()]
        (HERE / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")


if __name__ == "__main__":
    main()
