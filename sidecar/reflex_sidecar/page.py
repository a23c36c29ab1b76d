"""The page at `/`: one file that loads nothing, and the policy that keeps it so."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from .web import Call, Handler, Reply


def _hashes(page: bytes, tag: bytes) -> str:
    """The Content-Security-Policy sources that allow exactly the page's own scripts or styles."""
    bodies = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(b).digest()).decode()}'" for b in bodies)


def policy(page: bytes) -> str:
    """No script, style, image or connection but the page's own."""
    return (
        f"default-src 'none'; script-src {_hashes(page, b'script')}; style-src {_hashes(page, b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def page_handler() -> Handler:
    """The handler, with the page read once."""
    page = resources.files("reflex_sidecar").joinpath("page.html").read_bytes()
    headers = {"content-security-policy": policy(page), "x-content-type-options": "nosniff"}

    async def show(call: Call) -> Reply:
        return Reply(page, 200, "text/html; charset=utf-8", headers)

    return show
