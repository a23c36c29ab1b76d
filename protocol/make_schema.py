"""Writes reflex_protocol/schema.json from the messages: `python protocol/make_schema.py`."""

from pathlib import Path

from reflex_protocol import schema

if __name__ == "__main__":
    path = Path(schema.__file__).with_name("schema.json")
    path.write_text(schema.text(), encoding="utf-8")
    print(f"wrote {path}")
