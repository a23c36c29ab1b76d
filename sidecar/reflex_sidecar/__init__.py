"""The OpenAI HTTP API in front of one Reflex worker. Talks to the worker over its pipe alone.

Nothing is imported here: `launch` starts the worker before anything that takes time to import.
"""

from __future__ import annotations

__version__ = "0.1.0"
