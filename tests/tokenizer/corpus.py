"""Text to hold tokenizers against each other on: deterministic, of every kind that has split words
in two different places somewhere before."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable

WHITESPACE = [*" \t\n\r\v\f\x1c\x1f\x85\xa0"] + [
    chr(c)
    for c in (0x1680, 0x180E, *range(0x2000, 0x200C), 0x2028, 0x2029, 0x202F, 0x205F, 0x2060, 0x3000, 0xFEFF)
]
NEWLINES = ["\n", "\r\n", "\r", "\n\n", "\r\n\r\n", "\n\r", "\v", "\f", "\x85", "\u2028", "\u2029"]
CONTRACTIONS = [
    "'s",
    "'S",
    "'t",
    "'T",
    "'re",
    "'RE",
    "'Re",
    "'ve",
    "'VE",
    "'m",
    "'M",
    "'ll",
    "'LL",
    "'lL",
    "'d",
    "'D",
    "'\u017f",
    "'K",
    "\u2019s",
    "'x",
    "''s",
    "'sS",
    "'l",
    "'r",
    "'v",
    "'",
]
ENGLISH_TEXT = (
    "the of and to in is that it was for on are as with his they be at one have this from or had by not "
    "word but what some we can out other were all there when up use your how said an each she which their "
    "function return import class value index token Once upon a time Hello World capital France Paris"
)
ENGLISH = ENGLISH_TEXT.split()
CODE = [
    "def f(x: int) -> list[int]:\n    return [y ** 2 for y in range(x) if y % 3 == 0]\n",
    "for (size_t i = 0; i + 1 < n; ++i) { a[i] ^= (b[i] << 3) | 0xFFu; }\r\n",
    "SELECT *, COUNT(1) AS n FROM t WHERE a != 'it''s' AND b IS NOT NULL;\n",
    '{"id": 12345, "values": [0.5, -1e-6, 3.14159], "ok": true}\n',
    '\tif err != nil {\n\t\treturn fmt.Errorf("x: %w", err)\n\t}\n',
    "<div class=\"a-b_c\" onclick='go()'>&nbsp;&#8230;</div>\n",
    '$ git commit -m "fix: don\'t" && make -j8 2>&1 | tee out.log\n',
    "camelCaseName snake_case_name SCREAMING_CASE kebab-case __dunder__ x1y2z3 a.b.c->d::e\n",
    "/* ---- ==== **** #### */ // !!! ??? ...;;; ((([[[{{{}}}]]])))\n",
]
# Ranges of code points by kind of script; the fourth field says how words are joined.
SCRIPTS: dict[str, tuple[int, int, int, str]] = {
    "cjk": (0x4E00, 0x9FFF, 20, ""),
    "cjk_rare": (0x3400, 0x4DBF, 6, ""),
    "cjk_astral": (0x20000, 0x2A6DF, 4, ""),
    "kana": (0x3040, 0x30FF, 12, "、"),
    "kana_half": (0xFF61, 0xFF9F, 8, ""),
    "hangul": (0xAC00, 0xD7A3, 5, " "),
    "jamo": (0x1100, 0x11FF, 6, ""),
    "hindi": (0x0900, 0x097F, 7, " "),
    "bengali": (0x0980, 0x09FF, 7, " "),
    "thai": (0x0E00, 0x0E5B, 12, ""),
    "khmer": (0x1780, 0x17FF, 9, ""),
    "arabic": (0x0600, 0x06FF, 6, " "),
    "hebrew": (0x0590, 0x05F4, 6, " "),
    "cyrillic": (0x0400, 0x04FF, 7, " "),
    "greek": (0x0370, 0x03FF, 7, " "),
    "greek_extended": (0x1F00, 0x1FFF, 5, " "),
    "armenian": (0x0530, 0x058F, 6, " "),
    "georgian": (0x10A0, 0x10FF, 6, " "),
    "latin": (0x00C0, 0x024F, 7, " "),
    "latin_more": (0x1E00, 0x1EFF, 7, " "),
    "ipa": (0x0250, 0x02FF, 5, " "),
    "cherokee": (0x13A0, 0x13FF, 4, " "),
    "fullwidth": (0xFF00, 0xFF60, 6, "\u3000"),
    "punctuation": (0x2010, 0x205E, 3, " "),
    "cjk_punctuation": (0x3000, 0x303F, 3, ""),
    "letterlike": (0x2100, 0x218F, 4, " "),
    "symbols": (0x2190, 0x23FF, 3, " "),
    "numbers": (0x2460, 0x24FF, 3, " "),
    "math": (0x1D400, 0x1D7FF, 5, " "),
    "deseret": (0x10400, 0x104FF, 4, " "),
    "adlam": (0x1E900, 0x1E95F, 4, " "),
    "tags": (0xE0000, 0xE01EF, 3, ""),
    "private": (0xE000, 0xE0FF, 3, ""),
    "presentation": (0xFB00, 0xFDFF, 5, " "),
}
EMOJI = [
    "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f44d\U0001f3fd",
    "\u2764\ufe0f\u200d\U0001f525",
    "\U0001f1eb\U0001f1f7",
    "1\ufe0f\u20e3",
    "\U0001f999",
    "\u2705",
    "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "\U0001f937\U0001f3ff\u200d\u2640\ufe0f",
]
COMBINING = [
    chr(c) for c in (*range(0x0300, 0x0310), 0x0345, 0x0483, 0x0488, 0x20DD, 0x20E3, 0x3099, 0x309A, 0xFE0F)
]
DIGITS = ["0123456789", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "０１２３４５６７８９", "Ⅰⅱ²³¼½①㊿〇"]


def words(r: random.Random) -> str:
    text = [r.choice(ENGLISH) + r.choice(["", "", "", *CONTRACTIONS]) for _ in range(r.randrange(3, 25))]
    return r.choice([" ", " ", "  ", "\t"]).join(text) + r.choice([".", "!", "?!", "...", ",", ";", ""])


def script(r: random.Random) -> str:
    first, last, length, joint = r.choice(list(SCRIPTS.values()))
    chars = [chr(c) for c in range(first, last + 1)]
    return joint.join(
        "".join(r.choices(chars, k=r.randrange(1, length + 1))) + r.choice(["", "", "。", ",1", "?"])
        for _ in range(r.randrange(1, 12))
    )


def digits(r: random.Random) -> str:
    runs = [
        "".join(r.choices(r.choice(DIGITS), k=r.choice([1, 2, 3, 4, 5, 6, 7, 9, 12, 40]))) for _ in range(6)
    ]
    return r.choice([" ", ",", ".", "", "x", "-"]).join(runs)


def whitespace(r: random.Random) -> str:
    parts = [
        r.choice(["", "a", ".", "1", "é", "中", "'s"])
        + "".join(r.choices(WHITESPACE if r.random() < 0.5 else [" ", "\n", "\t", "\r"], k=r.randrange(1, 9)))
        for _ in range(r.randrange(1, 10))
    ]
    return "".join(parts) + r.choice(["", "b", "!", "2"])


def combining(r: random.Random) -> str:
    return "".join(
        r.choice("aeioun '1.中") + "".join(r.choices(COMBINING, k=r.randrange(3))) for _ in range(20)
    )


def anything(r: random.Random) -> str:
    """Any scalar values at all, assigned or not."""
    out = []
    for _ in range(r.randrange(1, 30)):
        c = r.randrange(0x110000 if r.random() < 0.3 else 0x3000)
        out.append(chr(c) if not 0xD800 <= c < 0xE000 else " ")
    return "".join(out)


KINDS: list[tuple[Callable[[random.Random], str], int]] = [
    (words, 4),
    (script, 8),
    (digits, 2),
    (whitespace, 3),
    (combining, 1),
    (anything, 1),
    (lambda r: r.choice(CODE), 4),
    (lambda r: "".join(r.choices(EMOJI, k=r.randrange(1, 5))), 1),
    (lambda r: unicodedata.normalize("NFD", script(r)), 1),
    (lambda r: r.choice("!#$%&()*+,-./:;<=>?@[]^_`{|}~\"'\\ ") * r.randrange(1, 40), 1),
]


def mixed(n_bytes: int, seed: int) -> str:
    """At least n_bytes of UTF-8 of all kinds in turn."""
    r = random.Random(seed)
    makers = [make for make, weight in KINDS for _ in range(weight)]
    out: list[str] = []
    size = 0
    while size < n_bytes:
        piece = r.choice(makers)(r) + r.choice(["", " ", *NEWLINES])
        out.append(piece)
        size += len(piece.encode())
    return "".join(out)
