"""Headless Chromium through ChromeDriver's own HTTP interface (W3C WebDriver): no package needed."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's reference, W3C WebDriver 11
# Nothing is asked of the network but the page under test.
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--window-size=1280,900",
]
START_SECONDS = 180.0


class Browser:
    """One browser window. Use as a context manager."""

    def __init__(self, profile: Path, extra_flags: list[str] | None = None) -> None:
        assert CHROMIUM and CHROMEDRIVER
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self._driver = subprocess.Popen(
            [CHROMEDRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_SECONDS)
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}", *(extra_flags or [])]}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        try:
            self._session = f"/session/{self._begin(wanted)}"
        except BaseException:  # a driver that is left behind fails whatever test comes next
            self._leave()
            raise

    def _begin(self, wanted: dict[str, Any]) -> str:
        """A session with a browser of its own; its id."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                answer = self._http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
                return answer.raise_for_status().json()["value"]["sessionId"]
            except httpx.ConnectError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _leave(self) -> None:
        self._http.close()
        self._driver.terminate()
        self._driver.wait()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            self._http.delete(self._session)
        finally:
            self._leave()

    def _post(self, path: str, **body: Any) -> Any:
        answer = self._http.post(self._session + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, url: str) -> None:
        self._post("/url", url=url)

    def run(self, script: str, *args: Any) -> Any:
        """What a script returns."""
        return self._post("/execute/sync", script=script, args=list(args))

    def element(self, selector: str) -> str:
        found = self._post("/element", using="css selector", value=selector)
        return f"/element/{found[ELEMENT]}"

    def click(self, selector: str) -> None:
        self._post(self.element(selector) + "/click")

    def type(self, selector: str, text: str) -> None:
        self._post(self.element(selector) + "/value", text=text)

    def text(self, selector: str) -> str:
        return self._http.get(f"{self._session}{self.element(selector)}/text").json()["value"]

    def until(self, script: str, seconds: float = START_SECONDS) -> Any:
        """Until a script returns something; that."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := self.run(script):
                return value
            time.sleep(0.05)
        raise AssertionError(f"did not come true within {seconds} s: {script}")

    def resize(self, width: int, height: int) -> None:
        self._post("/window/rect", width=width, height=height)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._http.get(self._session + "/screenshot").json()["value"]))

    def console(self) -> list[str]:
        """Messages that the page, or the browser about the page, has logged."""
        return [entry["message"] for entry in self._post("/se/log", type="browser")]

    def requests(self) -> list[str]:
        """URLs that the page has asked for."""
        import json

        events = [
            json.loads(entry["message"])["message"] for entry in self._post("/se/log", type="performance")
        ]
        sent = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if url.startswith("http")]
