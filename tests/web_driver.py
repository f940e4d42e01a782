"""A headless Chromium, driven over the WebDriver protocol, which is JSON over HTTP (https://www.w3.org/TR/webdriver2)."""

import contextlib
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

DRIVER, BROWSER = "chromedriver", ("chromium", "chromium-browser", "google-chrome")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, as the standard has it


class Page:
    """What a browser shows. url: of its session."""

    def __init__(self, url: str):
        self._url = url

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return ask(self._url + path, body)

    def open(self, address: str) -> None:
        """Loads a page, and waits until it is there."""
        self._ask("/url", {"url": address})

    def run(self, script: str) -> Any:
        """What a function of this body returns in the page."""
        return self._ask("/execute/sync", {"script": script, "args": []})

    def click(self, selector: str) -> None:
        """Clicks the middle of the first element of a CSS selector, where the browser lets a person click it."""
        found = self._ask("/element", {"using": "css selector", "value": selector})
        self._ask(f"/element/{found[ELEMENT]}/click", {})

    def press(self, key: str) -> None:
        """Presses a key, of the standard's code points."""
        keys = [{"type": action, "value": key} for action in ("keyDown", "keyUp")]
        self._ask("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": keys}]})

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements of a CSS selector, as they are shown."""
        return self.run(f"return [...document.querySelectorAll({json.dumps(selector)})].map((node) => node.innerText)")

    def problems(self) -> list[str]:
        """What the console has had since the last call: errors and warnings."""
        return [entry["message"] for entry in self._ask("/se/log", {"type": "browser"})]


def ask(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    """The value that the driver answers."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=60) as answer:
        return json.load(answer)["value"]


@contextlib.contextmanager
def browser(*, width: int = 1300, height: int = 1000) -> Iterator[Page]:
    """A window of this size in pixels; the test is skipped where no browser is installed."""
    binary = next(filter(None, map(shutil.which, BROWSER)), None)
    if binary is None or shutil.which(DRIVER) is None:
        pytest.skip(
            f"needs a browser and its driver: apt-get install chromium chromium-driver ({DRIVER} or {', '.join(BROWSER)} is missing)"
        )
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            started = next(line for line in driver.stdout if "was started successfully" in line)
            root = f"http://127.0.0.1:{re.search('port ([0-9]+)', started)[1]}/session"
            options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--window-size={width},{height}"]
            wanted = {"goog:chromeOptions": {"binary": binary, "args": options}, "goog:loggingPrefs": {"browser": "WARNING"}}
            url = f"{root}/{ask(root, {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"
            try:
                yield Page(url)
            finally:
                ask(url, method="DELETE")
        finally:
            driver.terminate()
