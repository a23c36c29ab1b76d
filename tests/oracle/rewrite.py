"""A fixture's file with a key or a tensor changed: what a test of one convention, or of one error, needs.

Owns: copying a GGUF through the gguf package. Refuses: knowing what a key means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Key = int | float | bool | str | list[Any] | None  # None: the key is left out
Change = Callable[[np.ndarray], np.ndarray]  # of an F32 tensor, (…, rows, row length)


def rewrite(
    source: Path,
    target: Path,
    keys: Mapping[str, Key] | None = None,
    drop: Sequence[str] = (),
    change: Mapping[str, Change] | None = None,
) -> Path:
    """Copies source to target. Keys are named without their architecture; tensors by a part of their name, or
    by "^" and the beginning of it."""
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
            value = keys.pop(short)
        if value is not None:
            w.add_key_value(name, value, kind, sub_type=sub)
    for short, value in keys.items():  # those that the file did not have
        if isinstance(value, bool):
            w.add_bool(f"{arch}.{short}", value)
        elif isinstance(value, int):
            w.add_uint32(f"{arch}.{short}", value)
        elif isinstance(value, float):
            w.add_float32(f"{arch}.{short}", value)
    for t in reader.tensors:
        if any(part in f"^{t.name}" for part in drop):
            continue
        data = t.data
        for part, f in (change or {}).items():
            data = np.ascontiguousarray(f(data)) if part in f"^{t.name}" else data
        own_type = t.tensor_type if data.dtype == t.data.dtype and data.dtype == np.uint8 else None
        w.add_tensor(t.name, data, raw_dtype=own_type)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return target
