"""Writes data/renders.json: what transformers renders. Run it where transformers is installed.

    python make_renders.py FOLDER_OF_TEMPLATES

Each of the folder's *.jinja files, and the templates of conversations.py, over all its cases. A case
that transformers cannot render is null. Long renders are kept as their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from conversations import OWN_TEMPLATES, SPECIALS, cases
from transformers.utils.chat_template_utils import render_jinja_template

OUT = Path(__file__).parent / "data" / "renders.json"
KEPT_CHARS = 400


def kept(text: str) -> str:
    """Short renders as they are, long ones by their hash."""
    return text if len(text) <= KEPT_CHARS else "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def renders_of(source: str) -> dict[str, str | None]:
    out: dict[str, str | None] = {}
    for key, conversation, setting in cases():
        try:
            (text,), _ = render_jinja_template(
                conversations=[conversation],
                tools=setting.get("tools"),
                chat_template=source,
                add_generation_prompt=setting["add_generation_prompt"],
                **SPECIALS,
                **setting.get("kwargs", {}),
            )
            out[key] = kept(text)
        except Exception:  # whatever the template raised: no render
            out[key] = None
    return out


def main() -> None:
    sources = {p.name: p.read_text() for p in sorted(Path(sys.argv[1]).glob("*.jinja"))}
    renders = {name: renders_of(source) for name, source in (OWN_TEMPLATES | sources).items()}
    OUT.write_text(json.dumps(renders, ensure_ascii=False, indent=0) + "\n")
    n = [v for r in renders.values() for v in r.values()]
    print(f"{OUT}: {len(n)} renders, {sum(v is None for v in n)} of them refused")


if __name__ == "__main__":
    main()
