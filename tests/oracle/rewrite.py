"""A fixture's file with keys or tensors changed: what a test of one convention, or of one error, needs.

Owns: copying a GGUF through the gguf package. Refuses: knowing what a key or a tensor means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Key = int | float | bool | str | list[Any] | None  # None: the key is left out
Change = Callable[[np.ndarray], np.ndarray]  # of a tensor's data, (…, rows, row length or bytes)


class Tensors(dict[str, np.ndarray]):
    """A file's tensors by name, in its order: F32 and F16 as numbers, all else as bytes (…, bytes of a row),
    whose type `kinds` has."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, gguf.GGMLQuantizationType] = {}

    def f32(self, name: str) -> np.ndarray:
        """A tensor's values, whatever its type."""
        kind = self.kinds.get(name, gguf.GGMLQuantizationType.F32)
        return gguf.dequantize(self[name], kind).astype(np.float32)


def read_tensors(path: Path) -> Tensors:
    tensors = Tensors()
    for t in gguf.GGUFReader(path).tensors:
        tensors[t.name] = t.data
        if t.data.dtype == np.uint8:
            tensors.kinds[t.name] = t.tensor_type
    return tensors


def rewrite(
    source: Path,
    target: Path,
    keys: Mapping[str, Key] | None = None,
    drop: Sequence[str] = (),
    change: Mapping[str, Change] | None = None,
    remake: Callable[[Tensors], None] | None = None,
) -> Path:
    """Copies source to target. Keys are named without their architecture; tensors by a part of their name, or
    by "^" and the beginning of it.

    remake changes, adds or removes any tensors, after drop and before change.
    """
    reader, keys = gguf.GGUFReader(source), dict(keys or {})
    arch = reader.fields["general.architecture"].contents()
    w = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        value, sub = field.contents(), field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        short = name.removeprefix(f"{arch}.")
        if short in keys:
            value = keys[short]
            if sub is not None and not isinstance(value, list | None):
                continue  # one number where there were many: a new key
            del keys[short]
        if value is not None:
            w.add_key_value(name, value, kind, sub_type=sub)
    for short, value in keys.items():  # those that the file did not have
        name = f"{arch}.{short}"
        if isinstance(value, bool):
            w.add_bool(name, value)
        elif isinstance(value, int):
            w.add_uint32(name, value)
        elif isinstance(value, float):
            w.add_float32(name, value)
        elif isinstance(value, str):
            w.add_string(name, value)
        elif isinstance(value, list):
            w.add_array(name, value)
    tensors = read_tensors(source)
    for name in [n for n in tensors if any(part in f"^{n}" for part in drop)]:
        del tensors[name]
    if remake:
        remake(tensors)
    for name, data in tensors.items():
        for part, f in (change or {}).items():
            data = np.ascontiguousarray(f(data)) if part in f"^{name}" else data
        w.add_tensor(name, data, raw_dtype=tensors.kinds.get(name) if data.dtype == np.uint8 else None)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return target
