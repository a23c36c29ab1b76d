"""A real-shape file with random weights, larger than one cares to carry about: its header made where the
`gguf` package is, its tensors filled in where it is needed, at the speed of memory.

usage: big_gguf.py header SYNTH VOCAB OUT.head [--shape qwen3-30b-a3b] [--type Q4_K_M] [--layers N]
       big_gguf.py fill OUT.head OUT.gguf

SYNTH is a synth_gguf.py that knows the shapes. Only for timing: a tensor repeats a few megabytes of random
blocks, whose period no expert's size is a multiple of, so that experts differ. `fill` needs numpy alone.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

PERIOD_BLOCKS = 4093  # a prime
SAMPLE_COLS = 4096
PLAIN_BYTES = 1 << 16  # of a plain tensor that the header carries; larger ones are drawn again
MAGIC_ALIGN = 32
THREADS = 8


def header(synth: Path, vocab: str, out: Path, options: list[str]) -> None:
    """The file up to its tensors' data, and what the data is to be, as one file."""
    spec = importlib.util.spec_from_file_location("synth_gguf", synth)
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tensors: list[dict[str, Any]] = []
    samples: dict[str, np.ndarray] = {}
    plain = module.blocks

    def few_blocks(t: Any, n_rows: int, n_cols: int, rng: Any, std: float) -> Any:
        """The shape alone, with a sample of the type beside it."""
        size, bytes_ = module.GGML_QUANT_SIZES[t]
        key = f"{t.name} {std:.9g}"
        if key not in samples:
            need = PERIOD_BLOCKS * size
            got = plain(t, -(-need // SAMPLE_COLS), SAMPLE_COLS, rng, std)
            flat = np.ascontiguousarray(got).view(np.uint8).reshape(-1)
            samples[key] = flat[: PERIOD_BLOCKS * bytes_]
        return np.lib.stride_tricks.as_strided(
            np.zeros(1, np.uint8), (n_rows, n_cols // size * bytes_), (0, 0), writeable=False
        ), key

    class Writer(module.GGUFWriter):
        def add_tensor(self, name: str, tensor: Any, raw_shape: Any = None, raw_dtype: Any = None) -> None:
            key = None
            if isinstance(tensor, tuple):
                tensor, key = tensor
            tensors.append({"name": name, "key": key, "nbytes": int(tensor.nbytes)})
            if key is None and tensor.nbytes <= PLAIN_BYTES:
                tensors[-1]["data"] = np.ascontiguousarray(tensor).tobytes().hex()
            elif key is None:
                tensors[-1] |= {"std": float(tensor.std()), "seed": len(tensors)}
            self.add_tensor_info(name, tensor.shape, tensor.dtype, tensor.nbytes, raw_dtype)

        def write_tensors_to_file(self, *, progress: bool = False) -> None:
            self.write_ti_data_to_file()

    class Shape(tuple):
        """What few_blocks returns, reshaped as synth_gguf.py does with experts."""

        def reshape(self, *shape: int) -> Shape:
            n, rows, _ = shape
            return Shape((np.broadcast_to(self[0][:1], (n, rows, self[0].shape[1])), self[1]))

    module.blocks = lambda *a: Shape(few_blocks(*a))
    module.GGUFWriter = Writer
    part = out.with_suffix(".part")
    sys.argv = ["synth_gguf.py", vocab, str(part), *options]
    module.main()
    begin = part.read_bytes()
    part.unlink()
    begin += bytes(-len(begin) % MAGIC_ALIGN)
    at = len(begin)
    for t in tensors:
        t["at"] = at
        at += t["nbytes"] + -t["nbytes"] % MAGIC_ALIGN
    facts = json.dumps({"size": at, "begin": len(begin), "tensors": tensors}).encode()
    with out.open("wb") as f:
        np.savez(f, begin=np.frombuffer(begin, np.uint8), facts=np.frombuffer(facts, np.uint8), **samples)  # pyright: ignore[reportArgumentType]
    print(f"wrote {out}: {at / 1e9:.2f} GB to fill, {len(tensors)} tensors")


def fill(head: Path, out: Path) -> None:
    """The whole file, by several threads."""
    with np.load(head) as z:
        facts = json.loads(z["facts"].tobytes())
        begin = z["begin"]
        samples = {key: z[key] for key in z.files if key not in ("begin", "facts")}
    with out.open("wb+") as f:
        os.truncate(f.fileno(), facts["size"])
        with mmap.mmap(f.fileno(), facts["size"]) as m:
            whole = np.frombuffer(m, np.uint8)
            whole[: len(begin)] = begin

            def one(t: dict[str, Any], whole: np.ndarray = whole) -> None:
                to = whole[t["at"] : t["at"] + t["nbytes"]]
                if "std" in t:
                    drawn = np.random.default_rng(t["seed"]).standard_normal(len(to) // 4, np.float32)
                    to[:] = (drawn * np.float32(t["std"])).view(np.uint8)
                    return
                if t["key"] is None:
                    to[:] = np.frombuffer(bytes.fromhex(t["data"]), np.uint8)
                    return
                sample = samples[t["key"]]
                for i in range(0, len(to), len(sample)):
                    n = min(len(sample), len(to) - i)
                    to[i : i + n] = sample[:n]

            with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(one, facts["tensors"]))
            del whole, one  # the mapping ends with its last view
    print(f"wrote {out}: {facts['size'] / 1e9:.2f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    h = commands.add_parser("header")
    h.add_argument("synth", type=Path)
    h.add_argument("vocab")
    h.add_argument("out", type=Path)
    f = commands.add_parser("fill")
    f.add_argument("head", type=Path)
    f.add_argument("out", type=Path)
    given, rest = parser.parse_known_args()
    if given.command == "header":
        header(given.synth, given.vocab, given.out, rest)
    else:
        fill(given.head, given.out)


if __name__ == "__main__":
    main()
