"""A real browser: Debian's Chromium, driven with real clicks and keys.

A complaint of the browser (an exception, a breach of the content security policy, a request that fails) fails the test,
and so does a request to another host.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.clients.programs import missing

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
PAGES = (
    "/",
    "/tubes",
    "/tubes/mail",
    "/jobs",
    "/jobs/6",
    "/connections",
    "/users",
    "/policies",
    "/journal",
    "/nodes",
    "/audit",
    "/help",
)
"""Those of the console."""
QUICK = """
const wait = setTimeout;
window.setTimeout = (run, ms, ...rest) => wait(run, ms >= 500 && ms <= 5000 ? ms / 5 : ms, ...rest);
"""
"""The console polls five times as often as for users, so that tests wait less."""


class Browser:
    """A browser, and what a person does with it. Whatever is looked for is waited for."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.url = ""
        self.expected: list[str] = []

    def open(self, url: str, path: str = "/") -> None:
        """Opens a page of the console, as if the address had been typed."""
        self.url = url
        self.driver.get(url + path)
        self.find("header.bar")

    def go(self, path: str) -> None:
        """Another page of the console, as if a link had been followed; when all of it is there."""
        self.run("history.pushState(null, '', arguments[0]); dispatchEvent(new PopStateEvent('popstate'))", path)
        self.loaded()

    def loaded(self) -> None:
        self.wait(lambda: self.run("return !document.querySelector('.late, .plot-room')"), "nothing that still loads")

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
        # Only what never comes takes this long. A busy machine takes its time for what comes.
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                found = condition()
            except StaleElementReferenceException:
                found = None
            if found:
                return found
            assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}\n{self.text('body')[:2000]}"
            time.sleep(0.02)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def find(self, css: str, text: str = "") -> WebElement:
        """The first element that is shown and has this text."""

        def found() -> WebElement | None:
            return next((one for one in self.all(css) if text in one.text and one.is_displayed()), None)

        element: WebElement = self.wait(found, f"{css} {text!r}")
        return element

    def text(self, css: str) -> str:
        return " ".join(one.text for one in self.all(css))

    def has(self, css: str, text: str = "") -> bool:
        return any(text in one.text and one.is_displayed() for one in self.all(css))

    def gone(self, css: str, text: str = "") -> None:
        self.wait(lambda: not self.has(css, text), f"no {css} {text!r}")

    def click(self, css: str, text: str = "") -> None:
        def clicked() -> bool:
            element = self.find(css, text)
            if not element.is_enabled():
                return False
            if css.startswith("tr"):
                self.hover(element)  # rows keep their places while the pointer is over them
            element.click()
            return True

        self.wait(clicked, f"a click on {css} {text!r}")

    def keys(self, *keys: str) -> None:
        """Types, wherever the focus is."""
        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def type(self, css: str, text: str) -> None:
        field = self.find(css)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text)

    def hover(self, element: WebElement) -> None:
        ActionChains(self.driver, duration=0).move_to_element(element).perform()

    def rest(self) -> None:
        """Lets everything that has arrived, and what it sets off within half a second, take effect."""
        self.driver.execute_async_script("setTimeout(arguments[0], 450)")

    def point_away(self) -> None:
        ActionChains(self.driver, duration=0).move_to_element(self.find(".brand")).perform()

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def resize(self, width: int, height: int = 800) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    @contextmanager
    def first(self, script: str) -> Iterator[None]:
        """Runs this script before those of each page."""
        name = self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})["identifier"]
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": name})

    def processor_s(self) -> float:
        """The processor time that the page has taken."""
        self.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        metrics = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))

    def path(self) -> str:
        found = urlsplit(self.driver.current_url)
        return found.path + (f"?{found.query}" if found.query else "")

    def rows(self) -> list[str]:
        """The text of the first cell of each row that is there."""
        found: list[str] = self.run(
            "return [...document.querySelectorAll('table.rows tbody tr[data-key]')].map(row => row.dataset.key)"
        )
        return found

    def check(self) -> None:
        """Fails for complaints of the browser, and for requests to other hosts."""
        log: Any = self.driver.get_log  # carries no types
        complaints = [entry["message"] for entry in log("browser") if entry["level"] == "SEVERE"]
        assert not [text for text in complaints if not any(re.search(one, text) for one in self.expected)], complaints
        hosts = set()
        for entry in log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = urlsplit(message["params"]["request"]["url"])
                if url.scheme not in ("data", "blob", "chrome", "about"):
                    hosts.add(url.hostname)
        assert hosts <= {"127.0.0.1"}, hosts


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        missing("chromium and its driver are not installed")
    options = Options()
    options.binary_location = program
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = Browser(webdriver.Chrome(options=options, service=Service(driver)))
    browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": QUICK})
    yield browser
    browser.driver.quit()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The browser as it is when one begins, wide. It has nothing to complain about before the servers stop."""
    chromium.resize(1280)
    chromium.expected = []
    yield chromium
    chromium.driver.get("about:blank")  # first: a complaint may come after what the test has seen
    chromium.check()
