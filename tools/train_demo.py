"""Train the bundled demo model and write reflex_worker/data/demo.gguf.

Owns: the vocabulary, the model's shape, the training loop, the export. Refuses: making text
(demo_corpus.py), judging the result (check_demo.py, which reads the GGUF back).

    python tools/train_demo.py --out reflex_worker/data/demo.gguf \\
        --steps 4000 --rows 32 --lr 4e-3 --device cuda

made the bundled file (32.5 M tokens, 125 s on an H200, loss 0.242, on the answers 0.028); without --device
the same run takes some four hours of one CPU core, and with the other defaults an hour makes a weaker one.

Everything is seeded; on a CPU the same machine, thread count and torch give the same file (a GPU adds in no
fixed order: as good, other bytes). The forward here
is Qwen3's (arXiv:2505.09388: pre-norm, GQA, per-head q/k RMS norm before rope, SwiGLU, tied head),
written out because packed documents need their own mask and positions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from demo_corpus import EOT, IM_END, IM_START, documents
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

# The split of Qwen2's tokenizer.json (tokenizer.ggml.pre = "qwen2").
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL_TOKENS = [EOT, IM_START, IM_END]
USER_DEFINED_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # as Qwen3 types them
SEED = 20240607
VOCAB_SEED, VOCAB_DOCUMENTS = 1, 60_000
TRAIN_SEED = 2

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{%- endif %}"
)


@dataclass
class Config:
    """The model's shape. Every row length is a multiple of 32, so that Q8_0 fits."""

    vocab_size: int = 3072
    n_embd: int = 192
    n_layers: int = 6
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    n_ff: int = 576
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    n_ctx: int = 2048


# ---- vocabulary ----------------------------------------------------------------------------


def train_vocabulary(size: int) -> Tokenizer:
    """Byte-level BPE over our own documents; the special tokens come last, as Qwen has them."""
    special = CONTROL_TOKENS + USER_DEFINED_TOKENS
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(special),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = []
    for doc in itertools.islice(documents(VOCAB_SEED), VOCAB_DOCUMENTS):
        text = "".join(s for s, _ in doc)
        for token in special:
            text = text.replace(token, "\n")
        texts.append(text)
    tok.train_from_iterator(texts, trainer)
    tok.add_special_tokens(special)
    return tok


# ---- batches -------------------------------------------------------------------------------


def encoded(tok: Tokenizer, seed: int, block: int = 4096) -> Iterator[tuple[list[int], list[float]]]:
    """(ids, weight of each id as a target) per document."""
    docs = documents(seed)
    while True:
        part = list(itertools.islice(docs, block))
        texts = ["".join(s for s, _ in d) for d in part]
        for doc, enc in zip(part, tok.encode_batch(texts, add_special_tokens=False), strict=True):
            ends = list(itertools.accumulate(len(s) for s, _ in doc))
            weights, k = [], 0
            for start, _ in enc.offsets:
                while start >= ends[k]:
                    k += 1
                weights.append(doc[k][1])
            yield enc.ids, weights


def batches(tok: Tokenizer, seed: int, rows: int, length: int) -> Iterator[tuple[Tensor, ...]]:
    """Whole documents packed first-fit into rows: ids, positions, document number, target, weight."""
    stream = encoded(tok, seed)
    waiting: list[tuple[list[int], list[float]]] = []
    while True:
        ids = np.zeros((rows, length), np.int64)
        pos, doc = np.zeros_like(ids), np.full_like(ids, -1)
        target, weight = np.zeros_like(ids), np.zeros((rows, length), np.float32)
        for r in range(rows):
            at, number = 0, 0
            while True:
                while len(waiting) < 32:
                    waiting.append(next(stream))
                fit = next((i for i, w in enumerate(waiting) if at + len(w[0]) <= length), None)
                if fit is None:
                    break
                tokens, weights = waiting.pop(fit)
                n = len(tokens)
                ids[r, at : at + n], pos[r, at : at + n], doc[r, at : at + n] = tokens, np.arange(n), number
                target[r, at : at + n - 1], weight[r, at : at + n - 1] = tokens[1:], weights[1:]
                at, number = at + n, number + 1
            waiting = [w for w in waiting if len(w[0]) <= length]
        yield tuple(torch.from_numpy(x) for x in (ids, pos, doc, target, weight))


# ---- model ---------------------------------------------------------------------------------


class Block(nn.Module):
    """x (B, T, d) -> x (B, T, d)."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.attn_norm = nn.Parameter(torch.ones(c.n_embd))
        self.ffn_norm = nn.Parameter(torch.ones(c.n_embd))
        self.q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.k_norm = nn.Parameter(torch.ones(c.head_dim))
        self.qkv = nn.Linear(c.n_embd, (c.n_heads + 2 * c.n_kv_heads) * c.head_dim, bias=False)
        self.out = nn.Linear(c.n_heads * c.head_dim, c.n_embd, bias=False)
        self.gate_up = nn.Linear(c.n_embd, 2 * c.n_ff, bias=False)
        self.down = nn.Linear(c.n_ff, c.n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        c, (b, t, _) = self.c, x.shape
        h = F.rms_norm(x, (c.n_embd,), self.attn_norm, c.norm_eps)
        qkv = self.qkv(h).view(b, t, -1, c.head_dim)
        q, k, v = qkv.split([c.n_heads, c.n_kv_heads, c.n_kv_heads], dim=2)
        q = rope(F.rms_norm(q, (c.head_dim,), self.q_norm, c.norm_eps), cos, sin).transpose(1, 2)
        k = rope(F.rms_norm(k, (c.head_dim,), self.k_norm, c.norm_eps), cos, sin).transpose(1, 2)
        k, v = (y.repeat_interleave(c.n_heads // c.n_kv_heads, 1) for y in (k, v.transpose(1, 2)))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        gate, up = self.gate_up(F.rms_norm(x, (c.n_embd,), self.ffn_norm, c.norm_eps)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation; x (B, T, H, hd), cos and sin (B, T, 1, hd/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Model(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embd = nn.Embedding(c.vocab_size, c.n_embd)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layers))
        self.norm = nn.Parameter(torch.ones(c.n_embd))
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 if p is self.embd.weight else 1 / math.sqrt(p.shape[1]))
        for blk in self.layers():  # residual writers start small, so that depth does not blow up x
            for w in (blk.out.weight, blk.down.weight):
                w.data.mul_(1 / math.sqrt(2 * c.n_layers))

    def layers(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def forward(self, ids: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        c = self.c
        dims = torch.arange(0, c.head_dim, 2, dtype=torch.float32, device=pos.device)
        freq = c.rope_theta ** (-dims / c.head_dim)
        angle = (pos[..., None].float() * freq)[:, :, None]
        cos, sin = angle.cos(), angle.sin()
        x = self.embd(ids)
        for blk in self.layers():
            x = blk(x, cos, sin, mask)
        return F.rms_norm(x, (c.n_embd,), self.norm, c.norm_eps)


def weighted_loss(model: nn.Module, head: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """(loss over weighted targets, mean loss of the tokens of full weight: the answers)."""
    ids, pos, doc, target, weight = batch
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    mask = (causal & (doc[:, :, None] == doc[:, None, :]))[:, None]
    counted = weight > 0
    logits = model(ids, pos, mask)[counted] @ head.T
    each = F.cross_entropy(logits, target[counted], reduction="none")
    w = weight[counted]
    return (each * w).sum() / w.sum(), each[w == 1].mean().detach()


def train(c: Config, tok: Tokenizer, a: argparse.Namespace, save: Callable[[Model], None]) -> Model:
    torch.manual_seed(SEED)
    torch.set_num_threads(a.threads)
    model = Model(c).to(a.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=a.lr, betas=(0.9, 0.98), fused=True)
    start, seen, shown = time.time(), 0, [0.0, 0.0]
    for step, batch in enumerate(itertools.islice(batches(tok, TRAIN_SEED, a.rows, a.length), a.steps)):
        batch = tuple(t.to(a.device) for t in batch)
        warm, done = min(1.0, (step + 1) / 100), step / a.steps
        for g in opt.param_groups:  # warm up, then cosine to 2% of the peak
            g["lr"] = a.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        loss, answers = weighted_loss(model, model.embd.weight, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        seen += int((batch[2] >= 0).sum())
        shown = [
            0.98 * s + 0.02 * v.item() if step else v.item()
            for s, v in zip(shown, (loss, answers), strict=True)
        ]
        if step % 100 == 99:
            print(
                f"step {step + 1} loss {shown[0]:.4f} answers {shown[1]:.4f} {seen:,} tokens, "
                f"{time.time() - start:.0f} s wall, {time.process_time():.0f} s of CPU",
                flush=True,
            )
        if a.snapshot and step % a.snapshot == a.snapshot - 1:
            save(model)
    return model


# ---- export --------------------------------------------------------------------------------


def tensors(model: Model) -> dict[str, np.ndarray]:
    """GGUF names -> float32 arrays (rows, row length). The fused matrices are taken apart."""
    c = model.c
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    out = {"token_embd.weight": model.embd.weight, "output_norm.weight": model.norm}
    for i, b in enumerate(model.layers()):
        wq, wk, wv = b.qkv.weight.split([q, kv, kv])
        gate, up = b.gate_up.weight.chunk(2)
        out |= {
            f"blk.{i}.{n}.weight": w
            for n, w in [
                ("attn_norm", b.attn_norm),
                ("attn_q", wq),
                ("attn_k", wk),
                ("attn_v", wv),
                ("attn_output", b.out.weight),
                ("attn_q_norm", b.q_norm),
                ("attn_k_norm", b.k_norm),
                ("ffn_norm", b.ffn_norm),
                ("ffn_gate", gate),
                ("ffn_up", up),
                ("ffn_down", b.down.weight),
            ]
        }
    return {n: w.detach().cpu().numpy().astype(np.float32) for n, w in out.items()}


def write_gguf(path: Path, c: Config, tok: Tokenizer, weights: dict[str, np.ndarray]) -> None:
    """Matrices as Q8_0, norms F32, vocabulary and template with them. Keys as llama.cpp's converter."""
    w = gguf.GGUFWriter(path, "qwen3")
    w.add_name("Reflex demo")
    w.add_description("Facts, sums, moods, routes and short stories; made by tools/train_demo.py")
    w.add_license("apache-2.0")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    w.add_context_length(c.n_ctx)
    w.add_block_count(c.n_layers)
    w.add_embedding_length(c.n_embd)
    w.add_feed_forward_length(c.n_ff)
    w.add_head_count(c.n_heads)
    w.add_head_count_kv(c.n_kv_heads)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_rope_freq_base(c.rope_theta)
    w.add_layer_norm_rms_eps(c.norm_eps)
    add_vocabulary(w, tok)
    w.add_chat_template(CHAT_TEMPLATE)
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, data in weights.items():
        if data.ndim == 1:
            w.add_tensor(name, data)
        else:
            w.add_tensor(name, gguf.quantize(data, q8), raw_dtype=q8)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def add_vocabulary(w: gguf.GGUFWriter, tok: Tokenizer) -> None:
    ids = tok.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    for token in CONTROL_TOKENS:
        kinds[ids[token]] = gguf.TokenType.CONTROL
    for token in USER_DEFINED_TOKENS:
        kinds[ids[token]] = gguf.TokenType.USER_DEFINED
    merges = json.loads(tok.to_str())["model"]["merges"]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    w.add_eos_token_id(ids[IM_END])
    w.add_pad_token_id(ids[EOT])
    w.add_bos_token_id(ids[EOT])
    w.add_add_bos_token(False)


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--steps", type=int, default=4000)
    ap.add_argument("--rows", type=int, default=8)
    ap.add_argument("--length", type=int, default=256)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--snapshot", type=int, default=0, help="write --out every so many steps as well")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--device", default="cpu", help="cpu, or cuda for minutes instead of an hour")
    a = ap.parse_args()
    tok = train_vocabulary(Config.vocab_size)
    c = Config(vocab_size=tok.get_vocab_size())
    print(asdict(c), flush=True)
    a.out.parent.mkdir(parents=True, exist_ok=True)

    def save(model: Model) -> None:
        write_gguf(a.out, c, tok, tensors(model))

    save(train(c, tok, a, save))
    print(f"{a.out}: {a.out.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
