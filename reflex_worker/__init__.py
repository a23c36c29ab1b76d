"""Reflex: a GGUF-native inference worker whose one bet is the cold start.

Importing this package costs next to nothing: it loads no native code, sets no environment and
starts no driver. The public API (`Engine`, `ReflexError` ...) comes in on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .api import Engine, ReflexError

__version__ = "0.1.0"
__all__ = ["Engine", "ReflexError", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("Engine", "ReflexError"):
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
