"""Random blocks of every packed type, and gguf-py's decode of them.

A block's payload may be any bytes; its half-float fields are drawn by `scales`:
"sane" (finite, about 0.01), or "wild" (every half: zero, subnormal, infinite, NaN).
"""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as T

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

Q2_0 = 42  # newer than the gguf package

# Byte offsets of the half-float fields of a block, from ggml-common.h by way of gguf-py's decoders.
HALVES: dict[int, list[int]] = {
    T.Q4_0: [0],
    T.Q4_1: [0, 2],
    T.Q5_0: [0],
    T.Q5_1: [0, 2],
    T.Q8_0: [0],
    T.Q2_K: [80, 82],
    T.Q3_K: [108],
    T.Q4_K: [0, 2],
    T.Q5_K: [0, 2],
    T.Q6_K: [208],
    T.IQ2_XXS: [0],
    T.IQ2_XS: [0],
    T.IQ2_S: [0],
    T.IQ3_XXS: [0],
    T.IQ3_S: [0],
    T.IQ1_S: [0],
    T.IQ1_M: [],  # its half is strewn over the scales; random bytes reach every value
    T.IQ4_NL: [0],
    T.IQ4_XS: [0],
    T.TQ1_0: [52],
    T.TQ2_0: [64],
    T.MXFP4: [],  # an exponent byte: all 256 values are legal
    T.NVFP4: [],  # e4m3 bytes
    T.Q1_0: [0],
    Q2_0: [0],
}

# Blocks' sizes of the types that gguf-py does not list.
EXTRA_SIZES: dict[int, tuple[int, int]] = {Q2_0: (64, 18)}


def sizes(type_id: int) -> tuple[int, int]:
    """Values and bytes per block."""
    return EXTRA_SIZES.get(type_id) or gguf.GGML_QUANT_SIZES[T(type_id)]


def random_halves(rng: np.random.Generator, n: int, wild: bool) -> npt.NDArray[np.uint16]:
    if wild:
        return rng.integers(0, 1 << 16, n, dtype=np.uint16)
    return (rng.standard_normal(n) * 0.01).astype(np.float16).view(np.uint16)


def random_blocks(rng: np.random.Generator, type_id: int, n_blocks: int, wild: bool = False) -> Bytes:
    """(n_blocks, bytes per block) random blocks."""
    blocks = rng.integers(0, 256, (n_blocks, sizes(type_id)[1]), dtype=np.uint8)
    for at in HALVES[type_id]:
        blocks[:, at : at + 2] = random_halves(rng, n_blocks, wild)[:, None].view(np.uint8)
    return blocks


def halves_at(blocks: Bytes, at: int) -> Floats:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def decode_q1_0(blocks: Bytes) -> Floats:
    """ggml's block_q1_0: half d, 128 bits, the first in bit 0; a bit is +d, its absence -d."""
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    d = halves_at(blocks, 0)
    return np.where(bits == 1, d, -d)


def decode_q2_0(blocks: Bytes) -> Floats:
    """ggml's block_q2_0: half d, 64 pairs of bits, the first in bits 0 and 1; (pair - 1) * d."""
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(len(blocks), 64, 2)
    pairs = bits[..., 0].astype(np.float32) + 2 * bits[..., 1].astype(np.float32)
    return (pairs - np.float32(1)) * halves_at(blocks, 0)


def reference(type_id: int, blocks: Bytes) -> Floats:
    """(n_blocks, values per block) as gguf-py decodes them."""
    with np.errstate(all="ignore"):
        if type_id == T.Q1_0:
            return decode_q1_0(blocks)
        if type_id == Q2_0:
            return decode_q2_0(blocks)
        return gguf.quants.dequantize(blocks, T(type_id))
