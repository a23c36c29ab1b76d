#!/usr/bin/env python3
"""Seeds of fuzz_tokenizer: small files with every pre-tokenizer, text behind them.

usage: tokenizer_seeds.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gguf.writer import Gguf  # noqa: E402

PRE = [
    "qwen2",
    "qwen35",
    "llama-bpe",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "gpt-2",
    "smollm",
    "default",
]
TEXT = "It's <a>b<a>c  1234 \r\n 中文、ア・ é e\u0301 \U0001f600 <|im_end|> the"
MERGES = 40  # of the fixture's; small inputs are fuzzed faster


def main() -> None:
    folder = Path(sys.argv[1])
    bpe = json.loads((ROOT / "tests/tokenizer/fixtures/bpe.json").read_text())
    made = {m.replace(" ", "") for m in bpe["merges"][:MERGES]}
    keep = [i for i, t in enumerate(bpe["tokens"]) if i < 256 or t in made or bpe["types"][i] != 1]
    for pre in PRE:
        file = Gguf().add("tokenizer.ggml.model", "string", "gpt2").add("tokenizer.ggml.pre", "string", pre)
        file.add("tokenizer.ggml.tokens", "[string]", [bpe["tokens"][i] for i in keep])
        file.add("tokenizer.ggml.token_type", "[i32]", [bpe["types"][i] for i in keep])
        file.add("tokenizer.ggml.merges", "[string]", bpe["merges"][:MERGES])
        file.add("tokenizer.ggml.eos_token_id", "u32", 1)
        (folder / f"bpe-{pre}").write_bytes(file.bytes() + TEXT.encode())
    spm = json.loads((ROOT / "tests/tokenizer/fixtures/spm.json").read_text())
    file = Gguf().add("tokenizer.ggml.model", "string", "llama")
    file.add("tokenizer.ggml.tokens", "[string]", spm["tokens"][:400])
    file.add("tokenizer.ggml.token_type", "[i32]", spm["types"][:400])
    file.add("tokenizer.ggml.scores", "[f32]", spm["scores"][:400])
    (folder / "spm").write_bytes(file.bytes() + TEXT.encode())


if __name__ == "__main__":
    main()
