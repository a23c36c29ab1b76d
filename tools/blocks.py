"""Matrices in any GGML type: quantised where the gguf package can, else of random blocks that decode to the
same spread. Owns the types' layouts as far as that needs. Refuses: knowing what a matrix is for.
"""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

# Where a block keeps its f16 scale, and its f16 minimum where it has one (bytes; ggml-common.h).
SCALE_OFFSETS: dict[Type, tuple[int, int | None]] = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108, None),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208, None),
    Type.IQ2_XXS: (0, None),
    Type.IQ2_XS: (0, None),
    Type.IQ2_S: (0, None),
    Type.IQ3_XXS: (0, None),
    Type.IQ3_S: (0, None),
    Type.IQ1_S: (0, None),
    Type.IQ4_NL: (0, None),
    Type.IQ4_XS: (0, None),
}
UNIT = 2.0**-8  # a scale with which no decode overflows or rounds to nothing


def random_blocks(kind: Type, rows: int, width: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """Random blocks (rows, bytes per row) that decode to about mean 0 and the given std.

    For types that the gguf package decodes but cannot make: every bit but the scales is drawn, so
    that all codes, sub-scales and sign patterns occur.
    """
    if kind == Type.IQ1_M:
        return random_iq1_m(rows, width, std, rng)
    if kind == Type.NVFP4:
        return random_nvfp4(rows, width, std, rng)
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    d_at, m_at = SCALE_OFFSETS[kind]
    raw = rng.integers(0, 256, (rows * width // per_block, size), dtype=np.uint8)

    def put(at: int | None, value: np.ndarray | float) -> None:
        if at is not None:
            halves = np.broadcast_to(np.asarray(value, np.float16), (len(raw),))
            raw[:, at : at + 2] = np.ascontiguousarray(halves).view(np.uint8).reshape(-1, 2)

    def decoded() -> np.ndarray:
        return gguf.dequantize(raw.reshape(rows, -1), kind).astype(np.float64)

    put(d_at, UNIT)
    put(m_at, 0.0)
    scaled, ratio = decoded(), 0.0
    if m_at is not None:  # value = d * a - m * b: the m that brings the mean to 0
        put(d_at, 0.0)
        put(m_at, UNIT)
        ratio = float(scaled.mean() / -decoded().mean())
        scaled = scaled + ratio * decoded()
    spread = rng.uniform(0.8, 1.2, len(raw)) * UNIT * std / scaled.std()
    put(d_at, spread)
    put(m_at, spread * ratio)
    return raw.reshape(rows, -1)


def random_iq1_m(rows: int, width: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """IQ1_M spreads its f16 scale over the high nibbles of four 16-bit words of sub-scales."""
    per_block, size = gguf.GGML_QUANT_SIZES[Type.IQ1_M]
    raw = rng.integers(0, 256, (rows * width // per_block, size), dtype=np.uint8)

    def put(value: float) -> None:
        bits = int(np.float16(value).view(np.uint16))
        words = raw[:, size - 8 :].copy().view(np.uint16)
        for i in range(4):
            words[:, i] = (words[:, i] & 0x0FFF) | ((bits >> (4 * i) & 0xF) << 12)
        raw[:, size - 8 :] = words.view(np.uint8)

    put(UNIT)
    put(UNIT * std / gguf.dequantize(raw.reshape(rows, -1), Type.IQ1_M).std())
    return raw.reshape(rows, -1)


def random_nvfp4(rows: int, width: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """NVFP4 has four scales a block, each 3 bits of mantissa below 4 of exponent: of the sixteen ranges of
    scales that one exponent spans, the one that comes nearest."""
    per_block, size = gguf.GGML_QUANT_SIZES[Type.NVFP4]
    raw = rng.integers(0, 256, (rows * width // per_block, size), dtype=np.uint8)
    mantissas = rng.integers(0, 8, (len(raw), 4), dtype=np.uint8)

    def decoded(exponent: int) -> np.ndarray:
        raw[:, :4] = mantissas + 8 * exponent
        return gguf.dequantize(raw.reshape(rows, -1), Type.NVFP4)

    best = min(range(1, 15), key=lambda e: abs(float(np.log(decoded(e).std() / std))))
    decoded(best)
    return raw.reshape(rows, -1)


def encode(data: np.ndarray, kind: Type, rng: np.random.Generator) -> np.ndarray:
    """The bytes of a matrix or stack in the given type: quantised where gguf can, else drawn."""
    if kind == Type.F32:
        return data
    try:
        return gguf.quantize(data, kind)
    except NotImplementedError:
        rows = data.size // data.shape[-1]
        blocks = random_blocks(kind, rows, data.shape[-1], float(data.std()), rng)
        return blocks.reshape(*data.shape[:-1], -1)
