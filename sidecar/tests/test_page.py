"""The page at `/` in a real browser, in front of the fake worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMEDRIVER, CHROMIUM, Browser
from servers import Server, StartServer

needs_browser = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER),
    reason="no chromium and chromedriver here (Debian: chromium chromium-driver)",
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser


def test_the_page_loads_nothing_from_elsewhere(server: Server):
    r = server.http.get("/")
    assert r.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in r.headers["content-security-policy"]
    assert "unsafe" not in r.headers["content-security-policy"]
    for outside in ("http://", "https://", "src=", "@import", "url("):
        assert outside not in r.text, outside


@needs_browser
def test_a_chat_streams_into_the_page(server: Server, browser: Browser):
    browser.open(server.url)
    browser.until("return document.getElementById('state').textContent === 'ready'")
    browser.type("#say", "[[say:<think>hm</think>Hé 🙂 <b>x</b>]]")
    browser.click("#send")
    browser.until("return document.getElementById('speed').textContent.includes('tokens')")
    turn = browser.run("return document.querySelector('.turn.assistant > span').textContent")
    assert turn == "Hé 🙂 <b>x</b>"  # as text, not as markup
    assert browser.run("return document.querySelector('.turn.assistant details div').textContent") == "hm"
    # The second message carries the first along.
    browser.type("#say", "again")
    browser.click("#send")
    browser.until("return document.querySelectorAll('.turn.assistant > span').length === 2")
    browser.until("return !document.getElementById('send').disabled")
    assert browser.console() == []
    asked = browser.requests()
    assert asked and all(url.startswith(server.url) for url in asked), asked


@needs_browser
def test_stopping_cancels_in_the_worker(server: Server, browser: Browser):
    browser.open(server.url)
    browser.until("return document.getElementById('state').textContent === 'ready'")
    browser.type("#say", "[[say:x]][[never-end]][[slow:30]]")
    browser.click("#send")
    browser.until("return document.querySelector('.turn.assistant > span').textContent.length > 2")
    browser.click("#stop")
    server.until(lambda: not server.health()["busy"])
    assert browser.run("return document.querySelector('.turn.error')") is None


@needs_browser
def test_candidates_become_bars(server: Server, browser: Browser):
    browser.open(server.url)
    browser.click("#score")
    browser.until("return document.querySelectorAll('.bar').length === 4")
    shares = browser.run(
        "return [...document.querySelectorAll('.bar .value')].map(x => parseFloat(x.textContent))"
    )
    assert abs(sum(shares) - 100) < 0.5
    assert len(browser.run("return [...document.querySelectorAll('.bar.best')].map(x => x.title)")) == 1
    assert "bits" in browser.text("#verdict")


@needs_browser
def test_errors_are_shown(start_server: StartServer, browser: Browser):
    server = start_server("--api-key", "k")
    browser.open(server.url)
    browser.type("#say", "x")
    browser.click("#send")
    assert "API key" in browser.until("return document.querySelector('.turn.error')?.textContent")
    browser.type("#key", "k")  # shown now
    browser.type("#say", "[[say:ok]]")
    browser.click("#send")
    browser.until(
        "return [...document.querySelectorAll('.turn.assistant > span')].some(x => x.textContent === 'ok')"
    )


@needs_browser
def test_the_start_is_a_timeline_and_the_end_is_seen(start_server: StartServer, browser: Browser):
    server = start_server()
    browser.open(server.url)
    browser.until("return document.querySelectorAll('.lane').length === 2")
    assert "imports" in browser.text("#legend") and "model load" in browser.text("#legend")
    assert "reflex-demo" in browser.text("#model")
    server.kill()
    browser.until("return document.getElementById('state').textContent === 'unreachable'")


@needs_browser
def test_it_fits_a_phone(server: Server, browser: Browser):
    browser.resize(500, 900)
    browser.open(server.url)
    browser.until("return document.querySelectorAll('.lane').length === 2")
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
