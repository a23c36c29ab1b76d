"""The routes, one module a family. Each is a function from a Call to a Reply or a Stream."""

from __future__ import annotations
