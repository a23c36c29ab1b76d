"""Reads the golden examples."""

import json
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "golden"


def examples(name):
    """Those of one file, as parameters of a test; `values[0]` is the example."""
    with open(GOLDEN / name, encoding="utf-8") as f:
        return [pytest.param(e, id=e["note"].replace(" ", "_")) for e in map(json.loads, f)]


def line_of(example):
    """The bytes of its line, without the newline."""
    return bytes.fromhex(example["hex"]) if "hex" in example else example["line"].encode()
