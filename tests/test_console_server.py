"""The files of the console, and the console of a real server in a real browser. One browser serves all tests of this
file.
"""

from __future__ import annotations

import gzip
import http.client
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from selenium.webdriver.common.keys import Keys

from geventstalk.http.api.console import PAGES as SERVED
from geventstalk.http.api.console import load
from tests.support.browser import PAGES, Browser
from tests.support.console import Filled
from tests.support.process import ROOT, ServerProcess, free_port
from tests.support.wire import Client

CONSOLE = ROOT / "geventstalk" / "http" / "console"
WIRE_BYTES_MAX = 150_000


# Without a browser


# Bug: The page of users, opened by its address, came with status 404.
def test_every_page_has_an_address() -> None:
    assert {path.split("/")[1] for path in PAGES} - {""} == set(SERVED)


def test_the_vendored_libraries_are_what_was_fetched() -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / "vendor"), "--check"], check=True, timeout=20)


def test_no_file_holds_what_the_content_security_policy_forbids() -> None:
    for path in CONSOLE.rglob("*"):
        if path.suffix in (".js", ".html") and "vendor" not in path.parts:
            text = path.read_text()
            assert not re.search(r"(inner|outer)HTML|insertAdjacentHTML|document\.write|dangerously|\beval\(", text), (
                path
            )
            assert not re.search(r"https?://(?!www\.w3\.org/)", text), path
    page = (CONSOLE / "index.html").read_text()
    assert not re.search(r"<script>|<style|\son[a-z]+=|style=", page)


def test_what_is_sent_is_small() -> None:
    files = load()
    scripts = [name for name in files.names() if name.endswith((".js", ".css", ".svg"))]
    sent = [files.find(files.folder, name) for name in scripts]
    assert sum(len(file.packed or file.plain) for file in sent if file) + len(files.page.packed) < WIRE_BYTES_MAX
    assert all(gzip.decompress(file.packed) == file.plain for file in sent if file and file.packed)


def colours() -> dict[str, tuple[str, str]]:
    """The colours of the style sheet, for light and dark."""
    text = (CONSOLE / "style.css").read_text()
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", text)
    return {name: (light, dark) for name, light, dark in pairs}


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("ground", ["bg", "raised", "sunk", "hover"])
def test_every_colour_of_text_has_the_contrast_of_aa(ground: str) -> None:
    found = colours()
    for name in ("ink", "muted", "accent", "ready", "reserved", "delayed", "buried", "warn", "danger"):
        for colour, behind in zip(found[name], found[ground], strict=True):
            low, high = sorted((luminance(colour), luminance(behind)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, colour, behind)


def test_the_server_hands_out_the_console(start_server: Callable[..., ServerProcess]) -> None:
    port = free_port()
    start_server("--http", str(port), "--name", "Queue <1>", "--name-color", "blue")

    def ask(path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        connection.close()
        return found

    status, headers, page = ask("/tubes/a%2Fb?sort=name")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["cache-control"] == "no-cache" and "script-src 'self'" in headers["content-security-policy"]
    assert ask("/")[2] == page and ask("/", If_None_Match=headers["etag"])[0] == 304
    names = re.findall(r'(?:src|href)="([^"]+)"', page.decode())
    assert len(names) > 20
    for name in names:
        status, headers, plain = ask(name)
        assert (status, headers["cache-control"]) == (200, "public, max-age=31536000, immutable")
        _, headers, packed = ask(name, Accept_Encoding="br, gzip;q=0.5")
        assert plain == (gzip.decompress(packed) if "content-encoding" in headers else packed)
        assert "content-encoding" not in ask(name, Accept_Encoding="gzip;q=0")[1]
    old = re.sub("/assets/[0-9a-f]+/", "/assets/0123456789abcdef/", names[0])
    assert ask(old)[0] == ask("/assets/../openapi.yaml")[0] == ask(names[0] + "/../../app.py")[0] == 404
    # Bug: what is no page was JSON, or the page of another address.
    for path in ("/no-page", "/audit/no-page", "/assets.html"):
        assert ask(path)[1]["content-type"] == "application/problem+json"
        status, headers, shown = ask(path, Accept="text/html,*/*;q=0.8", If_None_Match="*")
        assert (status, shown, headers["content-type"]) == (404, page, "text/html; charset=utf-8"), path
    assert ask("/api/v1/no-page", Accept="text/html")[1]["content-type"] == "application/problem+json"
    told = json.loads(ask("/api/v1/server")[2])
    assert (told["name"], told["name_color"]) == ("Queue <1>", "blue")
    assert ask("/favicon.ico")[1]["content-type"] == "image/svg+xml"


# On a real server


@pytest.fixture
def real(start_server: Callable[..., ServerProcess], browser: Browser) -> Iterator[Callable[..., Filled]]:
    """Starts servers; the browser is away from them before they end."""
    started: list[Filled] = []

    def start(*flags: str) -> Filled:
        port = free_port()
        started.append(Filled(start_server("--http", str(port), *flags), port, tubes=0, jobs=0))
        return started[-1]

    yield start
    try:
        browser.check()
    finally:
        browser.driver.get("about:blank")
        for one in started:
            one.close()


@pytest.mark.slow
def test_from_the_first_job_to_its_end(browser: Browser, real: Callable[..., Filled], tmp_path: Path) -> None:
    server = real("-b", str(tmp_path / "j"))
    browser.expected = ["/jobs/2.* status of 404"]  # when it is gone
    markup = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    browser.open(server.url)
    browser.find(".verdict.well", "The server is well.")
    browser.find(".blank", "No job yet.")
    server.put("a/mail;x", markup.encode())
    browser.keys("g", "t")
    browser.click("tr[data-key='a/mail;x'] a", "a/mail;x")
    browser.find("h1", "a/mail;x")
    assert browser.path() == "/tubes/a%2Fmail%3Bx"
    browser.find(".next", markup[:20])
    browser.click("button", "Put a job…")
    browser.type("dialog textarea", "grüße\n" + markup)
    browser.click("dialog button", "Put the job")
    browser.click(".note a", "job 2")
    browser.find("h1", "2")
    assert browser.find("pre.body").text == "grüße\n" + markup
    assert not browser.all("main img, main script")
    browser.click("button", "Bury")
    browser.find(".state", "buried")
    assert server.tube("a/mail;x")["current-jobs-buried"] == "1"
    browser.click(".note button", "Undo")
    browser.find(".state", "ready")
    browser.click("button", "More")
    browser.click("[role=menuitem]", "Change priority")
    browser.type("dialog input[name=pri]", "7")
    browser.click("dialog button", "Change job 2")
    browser.wait(lambda: server.client.stats(b"stats-job 2")["pri"] == "7", "the priority")
    browser.click("button", "Delete…")
    browser.find("dialog h2", "Delete job 2 of a/mail;x?")
    browser.click("dialog button", "Delete job 2")
    browser.find(".tag", "gone")
    assert server.client.ask(b"stats-job 2") == b"NOT_FOUND\r\n"
    browser.keys("g", "a")
    browser.find("td.c-what", "delete")
    assert [cell.text.split()[0] for cell in browser.all("td.c-what")] == ["delete", "change", "kick", "bury", "put"]
    assert "console" in browser.text("td.c-from")


# Bug: The tubes . and .. had no page.
@pytest.mark.slow
def test_a_tube_whose_name_means_something_in_a_path(browser: Browser, real: Callable[..., Filled]) -> None:
    server = real()
    server.put("..", b"x")
    browser.open(server.url, "/tubes")
    browser.click("tr[data-key='..'] a", "..")
    browser.find("h1", "..")
    browser.driver.refresh()
    browser.find("h1", "..")
    browser.find(".next", "x")
    browser.click("button", "Pause…")
    browser.click("dialog button", "Pause")
    browser.wait(lambda: server.tube("..")["pause"] != "0", "the pause")


@pytest.mark.slow
def test_a_tube_is_paused_kicked_and_emptied(browser: Browser, real: Callable[..., Filled], tmp_path: Path) -> None:
    server = real("-b", str(tmp_path / "j"))
    ids = server.put("mail", *(b"job %d" % n for n in range(150)))
    browser.open(server.url, "/jobs?filter=" + quote("tube:mail body:/[05]$/"))
    browser.find(".tool-line", "30 jobs")
    browser.click("button", "All that match")
    browser.click("[role=menuitem]", "Bury all")
    browser.find("dialog h2", "Bury 30 jobs of mail that match body:/[05]$/?")
    browser.click("dialog button", "Bury 30 jobs")
    browser.find(".note", "Buried 30 jobs in ")
    browser.wait(lambda: set(browser.text("td.c-state").split()) == {"buried"}, "the rows")
    browser.open(server.url, "/tubes/mail")
    browser.click("button", "Kick…")
    browser.type("dialog input", "10")
    browser.click("dialog button", "Kick 10 jobs")
    browser.find(".note", "Kicked 10 jobs in ")
    assert server.tube("mail")["current-jobs-buried"] == "20"
    browser.click("button", "Pause…")
    browser.click("dialog button", "Pause the tube")
    browser.find(".tag.warn", "paused")
    assert server.tube("mail")["pause"] == "3600"
    browser.click("button", "Resume")
    browser.wait(lambda: server.tube("mail")["pause"] == "0", "no pause")
    browser.click("button", "More")
    browser.click("[role=menuitem]", "Delete 130 ready jobs")
    browser.find("dialog h2", "Delete 130 ready jobs of mail?")
    browser.type("dialog input[name=typed]", "mail")
    browser.click("dialog button", "Delete 130 jobs")
    browser.find(".note", "Deleted 130 jobs in ")
    stats = server.tube("mail")
    assert (stats["current-jobs-ready"], stats["current-jobs-buried"]) == ("0", "20")
    assert len(ids) == 150


@pytest.mark.slow
def test_tokens_log_in_and_out(browser: Browser, real: Callable[..., Filled], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("board read read-token-0123456789\nmaria admin admin-token-0123456789\n")
    tokens.chmod(0o600)
    server = real("--http-tokens", str(tokens))
    server.put("mail", b"hello")
    browser.expected = ["status of 401", "status of 403"]
    browser.url = server.url
    browser.driver.get(server.url + "/tubes/mail?a=b")
    browser.type("#token", "read-token-0123456789")
    browser.keys(Keys.ENTER)
    browser.find(".role", "read only")
    assert browser.path() == "/tubes/mail?a=b"
    browser.find(".block", "ready")
    assert not browser.has("main button:not(.charts button)")
    browser.click("button", "Log out")
    browser.type("#token", "no-token-no-token")
    browser.keys(Keys.ENTER)
    browser.find(".problem", "This token is not known.")
    browser.type("#token", "admin-token-0123456789")
    browser.keys(Keys.ENTER)
    browser.find(".health")
    browser.keys("g", "t")
    browser.find("tr[data-key='mail']")
    browser.click("button", "Put a job…")
    browser.type("dialog input[name=tube]", "mail")
    browser.type("dialog textarea", "by maria")
    browser.click("dialog button", "Put the job")
    browser.find(".note", "job 2")
    browser.keys("g", "a")
    browser.find("td.c-who", "maria")


# Bug: A look that was answered 401 while the browser logged out led the next user to the page of the last one.
@pytest.mark.slow
def test_a_logout_leaves_no_page_to_come_back_to(browser: Browser, real: Callable[..., Filled], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("maria admin admin-token-0123456789\n")
    tokens.chmod(0o600)
    server = real("--http-tokens", str(tokens))
    browser.expected = ["status of 401"]
    browser.url = server.url
    browser.driver.get(server.url + "/tubes")
    browser.type("#token", "admin-token-0123456789")
    browser.keys(Keys.ENTER)
    browser.find(".logout")
    browser.run(
        "document.querySelector('.logout').addEventListener('submit', event => event.preventDefault());"
        "const ask = fetch; window.refused = 0;"
        "window.fetch = (...words) => ask(...words).then(answer => (window.refused += answer.status === 401, answer));"
    )
    browser.click("button", "Log out")
    browser.driver.delete_all_cookies()
    browser.wait(lambda: browser.run("return window.refused"), "a look that is refused")
    browser.rest()
    assert browser.path() == "/tubes"


@pytest.mark.slow
def test_ten_thousand_tubes_of_a_real_server(browser: Browser, real: Callable[..., Filled]) -> None:
    server = real()
    put = [b"use tube.%05d\r\nput 9 0 60 1\r\nx\r\n" % n for n in range(10_000)]
    server.client.send(b"".join(put[:5000]))
    for _ in range(10_000):
        server.client.reply()
    server.client.send(b"".join(put[5000:]))
    for _ in range(10_000):
        server.client.reply()
    browser.open(server.url, "/tubes?sort=name&desc=1")
    browser.find(".page-head", "10,001 tubes")
    browser.find("tr[data-key='tube.09999']")
    browser.run("scrollTo(0, document.documentElement.scrollHeight)")
    browser.find("tr[data-key='default']")
    browser.type("#search", "0123")
    browser.wait(lambda: len(browser.rows()) == 11 or "11 of 10,001" in browser.text(".page-head"), "those that match")
    browser.find("tr[data-key='tube.01234']")


@pytest.mark.slow
def test_connections_are_shown_and_closed(browser: Browser, real: Callable[..., Filled]) -> None:
    server = real()
    worker = Client(server.server.connect())
    worker.ask(b"watch mail")
    server.put("mail", b"held")
    assert worker.ask(b"reserve").startswith(b"RESERVED")
    browser.open(server.url, "/connections?sort=reserved&desc=1")
    browser.find("tr[data-key] td.c-watches", "default, mail")
    browser.click("tr[data-index='0'] button", "Close…")
    browser.find("dialog p", "The 1 job that it holds becomes ready again.")
    browser.click("dialog button.danger", "Close connection")
    browser.find(".note", "Closed connection")
    browser.wait(lambda: len(browser.rows()) == 1, "one is left")
    assert server.tube("mail")["current-jobs-ready"] == "1"
    worker.close()
