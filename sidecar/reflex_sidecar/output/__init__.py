"""What a model wrote, taken apart as it comes: thoughts, text, calls of tools. Pure; no I/O."""

from __future__ import annotations
