"""`python -m reflex_sidecar` is `reflex-openai`."""

from __future__ import annotations

from .launch import main

if __name__ == "__main__":
    main()
