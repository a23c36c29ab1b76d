"""Chat templates: rendered in a process of their own that can be killed, see renderer.py."""

from __future__ import annotations
