"""Writes iq_grids.h beside this file: the IQ types' grids, from gguf-py's packed tables.

Usage: python native/quant/make_iq_grids.py > native/quant/iq_grids.h

gguf-py (quants.py: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S) keeps each grid as hex, a few
bits per entry; a row of the grid (8 entries of 2 bits, or 4 of 4 bits) is 16 bits. We keep these
words as they are: a quarter of the cache that one byte per value would take.
"""

from __future__ import annotations

import sys

from gguf import quants

# Our name, gguf-py's class, what a row holds.
GRIDS = [
    ("iq1", quants.IQ1_S, "8 values -1, 0, 1 as 2-bit 0, 1, 2"),
    ("iq2xxs", quants.IQ2_XXS, "8 values 8, 25, 43 as 2-bit 0, 1, 2"),
    ("iq2xs", quants.IQ2_XS, "8 values 8, 25, 43 as 2-bit 0, 1, 2"),
    ("iq2s", quants.IQ2_S, "8 values 8, 25, 43 as 2-bit 0, 1, 2"),
    ("iq3xxs", quants.IQ3_XXS, "4 values 4, 12, 20, 28, 36, 44, 52, 62 as nibbles 0 to 7"),
    ("iq3s", quants.IQ3_S, "4 values 1, 3, 5 .. 15 as nibbles 0 to 7"),
]
WORDS_PER_LINE = 13  # what clang-format makes of it

HEADER = """\
// Grids of the IQ types, written by make_iq_grids.py from gguf-py's quants.py; do not edit.
// Row r of a grid is one 16-bit word, its first value in the low bits.
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

"""
FOOTER = """\
REFLEX_QUANT_END
"""


def grid(name: str, cls: type, what: str) -> str:
    data = bytes.fromhex(cls.grid_hex.decode())
    words = [data[i] | data[i + 1] << 8 for i in range(0, len(data), 2)]
    assert len(words) == cls.grid_shape[0]
    lines = [f"/// Row `row` of {len(words)}: {what}."]
    lines.append(f"REFLEX_HD uint32_t {name}_row(uint32_t row) {{")
    lines.append(f"  static constexpr uint16_t kRows[{len(words)}] = {{")
    for i in range(0, len(words), WORDS_PER_LINE):
        lines.append("      " + ", ".join(f"0x{w:04x}" for w in words[i : i + WORDS_PER_LINE]) + ",")
    lines[-1] = lines[-1].removesuffix(",") + "};"
    lines += ["  return kRows[row];", "}", ""]
    return "\n".join(lines) + "\n"


def header() -> str:
    return HEADER + "".join(grid(*g) for g in GRIDS) + FOOTER


if __name__ == "__main__":
    sys.stdout.write(header())
