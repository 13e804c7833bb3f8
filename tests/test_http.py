"""HTTP of a real server: what answers where, and what keeps others out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlencode

import pytest

from geventstalk.core.job import READY, Job
from geventstalk.durable.records import ClockOffset, encode_whole
from geventstalk.http import wire
from geventstalk.http.tokens import Tokens
from journal import Journal
from journal.log import FULL
from tests.support.clients import until
from tests.support.clock import ManualClock
from tests.support.process import GEVENTSTALK, ROOT, ServerProcess, free_port
from tests.support.web import Answer, Inside, Web
from tests.support.wire import Client

Start = Callable[..., ServerProcess]

READ, ADMIN = "read-token-0123456789", "admin-token-0123456789"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# who may\n\ngrafana read {READ}\noperator admin {ADMIN}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    """HTTP of a server without tokens, which all tests of this file use."""
    port = free_port()
    server = ServerProcess(GEVENTSTALK, ["--http", str(port)])
    try:
        server.wait_ready()
        yield Web(port)
    finally:
        server.stop()


def test_health_and_readiness(start_server: Start, tmp_path: Path) -> None:
    port = free_port()
    server = start_server("--http", f"localhost:{port}", "-b", str(tmp_path / "j"), "--max-journal-bytes", "1048576")
    web = Web(port)
    assert web.ask("GET", "/healthz")[::2] == (200, b"ok\n")
    assert web.ask("GET", "/readyz")[::2] == (200, b"ok\n")
    web.json("PATCH", "/api/v1/server", {"draining": True})
    assert web.ask("GET", "/readyz")[::2] == (503, b"the server is draining\n")
    web.json("PATCH", "/api/v1/server", {"draining": False})
    with Client(server.connect()) as client:
        while client.ask(b"put 0 0 1 60000\r\n" + b"x" * 60000) != b"OUT_OF_MEMORY\r\n":
            pass
    # A small put may still find room where a large one does not.
    with Client(server.connect()) as client:
        while client.ask(b"put 0 0 1 1\r\nx") != b"OUT_OF_MEMORY\r\n":
            pass
    assert web.ask("GET", "/readyz")[::2] == (503, b"the journal has no room for puts\n")
    assert web.status("GET", "/healthz") == 200


def test_stats_say_where_http_is(start_server: Start, tmp_path: Path) -> None:
    port, path = free_port(), tmp_path / "s"
    server = start_server("--http", str(port), "--http", f"unix:{path}")
    with Client(server.connect()) as client:
        assert f'\nhttp: "127.0.0.1:{port}, unix:{path}"\n'.encode() in client.ask(b"stats")


def test_tokens_have_roles(start_server: Start, tokens: Path) -> None:
    port = free_port()
    start_server("--http", f"0.0.0.0:{port}", "--http-insecure", "--http-tokens", str(tokens))
    stranger, reader, admin, liar = (Web(port, token) for token in (None, READ, ADMIN, READ[:-1] + "x"))
    assert stranger.status("GET", "/api/v1/server") == 401
    assert liar.status("GET", "/api/v1/server") == 401
    told = {"role": "read", "name": "grafana", "csrf": None, "users": False, "sees_all": True, "rights": None}
    assert reader.json("GET", "/api/v1/session") == told
    assert admin.json("GET", "/api/v1/session")["role"] == "admin"
    assert reader.status("PATCH", "/api/v1/server", {"draining": True}) == 403
    assert admin.status("PATCH", "/api/v1/server", {"draining": True}) == 200
    assert stranger.status("GET", "/readyz") == 503
    assert stranger.status("GET", "/healthz") == 200


def test_without_tokens_only_this_host_is_served(tmp_path: Path) -> None:
    for address in ("0.0.0.0:0", "[::]:0"):
        server = ServerProcess(GEVENTSTALK, ["--http", address], stderr=tmp_path / "log")
        assert server.process.wait(20) == 5
        server.read_log()
    said = (tmp_path / "log").read_text()
    assert said.count("that can reach") == 2 and said.count("--http-tokens") == 2


def test_a_name_that_is_not_ours_is_refused(start_server: Start) -> None:
    port = free_port()
    start_server("--http", str(port), "--http-host", "queue.example")
    web = Web(port)
    for host in (
        "localhost",
        "localhost.:80",
        f"127.0.0.1:{port}",
        "[::1]:1",
        "10.0.0.7",
        "Queue.Example",
        "QUEUE.example:443",
    ):
        assert web.status("GET", "/api/v1/server", Host=host) == 200, host
    for host in (
        "evil.example",
        "evil.example.",
        "[::1].evil",
        "localhost.evil.example",
        "127.0.0.1.evil.example:80",
        "",
        "a b",
        "1.2.3.4@evil",
    ):
        assert web.status("GET", "/api/v1/server", Host=host) in (400, 421), host
    assert web.status("GET", "/healthz", Host="evil.example") == 421


# Bug: A page of another site could take all streams by frames.
@pytest.mark.parametrize(
    ("headers", "get", "patch"),
    [
        ({}, 200, 200),
        ({"Origin": "http://127.0.0.1:PORT"}, 200, 200),
        ({"Origin": "http://evil.example"}, 200, 403),
        ({"Origin": "null"}, 200, 403),
        ({"Origin": "http://127.0.0.1:1"}, 200, 403),
        ({"Origin": "http://localhost:PORT"}, 200, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200, 200),
        ({"Sec_Fetch_Site": "none"}, 200, 200),
        ({"Sec_Fetch_Site": "same-site"}, 403, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}, 200, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}, 200, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"}, 403, 403),
    ],
)
def test_pages_of_other_sites_change_nothing(web: Web, headers: dict[str, str], get: int, patch: int) -> None:
    headers = {name: value.replace("PORT", str(web.port)) for name, value in headers.items()}
    assert web.status("GET", "/api/v1/server", **headers) == get
    assert web.status("PATCH", "/api/v1/server", {"draining": False}, **headers) == patch


def test_changes_are_in_the_audit_file(start_server: Start, tokens: Path, tmp_path: Path) -> None:
    port, path = free_port(), tmp_path / "audit.jsonl"
    start_server("--http", str(port), "--http-tokens", str(tokens), "--audit", str(path))
    admin = Web(port, ADMIN)
    admin.json("PATCH", "/api/v1/server", {"draining": True}, X_Geventstalk_Via="cli")
    path.rename(tmp_path / "audit.1")
    admin.json("PATCH", "/api/v1/server", {"draining": False})
    first, second = (json.loads(each.read_text()) for each in (tmp_path / "audit.1", path))
    assert {k: first[k] for k in ("number", "who", "role", "via", "action", "count")} == {
        "number": 1,
        "who": "operator",
        "role": "admin",
        "via": "cli",
        "action": "drain",
        "count": 1,
    }
    assert first["from"].startswith("127.0.0.1:")
    assert (second["number"], second["via"], second["action"]) == (2, "api", "end draining")
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_without_http_nothing_of_it_is_imported() -> None:
    program = "import geventstalk.serving.server, sys; print(*(name for name in sys.modules if 'http' in name))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    names = set(done.stdout.split())
    assert done.returncode == 0 and not {name for name in names if name.startswith("geventstalk.")}, done


class Browser(Web):
    """A client with a cookie."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.cookie = ""

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        return super().ask(method, path, body, Cookie=self.cookie, **headers)

    def log_in(self, token: str, target: str = "/", **headers: str) -> Answer:
        form = urlencode({"token": token, "next": target}).encode()
        sent = {"Content-Type": "application/x-www-form-urlencoded", "Cookie": self.cookie, **headers}
        status, found, content = self.send("POST", "/login", form, sent)
        self.cookie = found.get("set-cookie", "").partition(";")[0]
        return status, found, content


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of HTTP of a server with tokens, which all tests of this file use."""
    path = tmp_path_factory.mktemp("guarded") / "tokens"
    path.write_text(f"grafana read {READ}\noperator admin {ADMIN}\n")
    path.chmod(0o600)
    port = free_port()
    server = ServerProcess(GEVENTSTALK, ["--http", str(port), "--http-tokens", str(path)])
    try:
        server.wait_ready()
        yield port
    finally:
        server.stop()


# Bug: A second login left the first session valid.
def test_a_browser_logs_in_and_out(guarded: int) -> None:
    browser = Browser(guarded)
    status, headers, page = browser.ask("GET", "/login?next=/tubes")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert b"<script" not in page and b" style=" not in page and b'value="/tubes"' in page
    assert browser.ask("GET", "/login.css")[0] == 200
    status, headers, _ = browser.log_in(ADMIN, "/tubes?x=1")
    assert (status, headers["location"]) == (303, "/tubes?x=1")
    assert re.fullmatch(rf"geventstalk-{guarded}=[\w-]{{43}}; HttpOnly; Path=/; SameSite=Strict", headers["set-cookie"])
    said = browser.json("GET", "/api/v1/session")
    assert (said["role"], said["name"]) == ("admin", "operator") and len(said["csrf"]) == 32
    assert browser.ask("GET", "/login?next=//evil.example")[1]["location"] == "/"
    cookie = browser.cookie
    status, headers, _ = browser.ask("POST", "/logout")
    assert (status, headers["location"]) == (303, "/login") and "expires=" in headers["set-cookie"]
    browser.cookie = cookie
    assert browser.status("GET", "/api/v1/session") == 401


def test_a_session_changes_something_only_with_its_csrf_token(guarded: int) -> None:
    browser, other = Browser(guarded), Browser(guarded)
    browser.log_in(ADMIN)
    other.log_in(ADMIN)
    csrf = browser.json("GET", "/api/v1/session")["csrf"]
    strange = other.json("GET", "/api/v1/session")["csrf"]
    change = ("PATCH", "/api/v1/server", {"draining": False})
    assert browser.status(*change) == 403
    assert browser.status(*change, X_CSRF_Token=strange) == 403
    assert browser.status(*change, X_CSRF_Token=csrf, Origin="http://evil.example") == 403
    assert browser.status(*change, X_CSRF_Token=csrf) == 200
    old = browser.cookie
    browser.log_in(READ)
    new, browser.cookie = browser.cookie, old
    assert browser.status("GET", "/api/v1/session") == 401, "a browser has one session"
    browser.cookie = new
    csrf = browser.json("GET", "/api/v1/session")["csrf"]
    assert browser.status(*change, X_CSRF_Token=csrf) == 403


# Bug: A login form of many fields was a fault with a traceback.
def test_a_wrong_token_does_not_log_in_and_others_do_not_wait(guarded: int) -> None:
    browser = Browser(guarded)
    with ThreadPoolExecutor(40) as pool:
        begun_s = time.monotonic()
        guesses = [pool.submit(Browser(guarded).log_in, f"{number:020}") for number in range(30)]
        assert Web(guarded, ADMIN).status("GET", "/api/v1/server") == 200
        assert {guess.result()[0] for guess in guesses} == {403}
        assert time.monotonic() - begun_s > 0.5
    status, headers, page = browser.log_in("x" * 20, '"><script>')
    assert status == 403 and "set-cookie" not in headers
    assert b"not known" in page and b"<script" not in page
    assert browser.log_in(ADMIN, "/", Origin="http://evil.example")[0] == 403
    assert browser.send("POST", "/login", b"a=1&" * 20, {})[0] == 400
    status, headers, _ = browser.log_in(ADMIN, "//evil.example", **{"X-Forwarded-Proto": "https"})
    assert headers["location"] == "/" and "Secure" in headers["set-cookie"]


def test_a_token_that_is_taken_out_of_the_file_ends(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    inside = Inside(tokens=Tokens(str(tokens), os.getuid()), clock=lambda: clock.ns)
    form = urlencode({"token": READ}).encode()
    cookie = inside.send("POST", "/login", form, {})[1]["set-cookie"].partition(";")[0]

    def statuses() -> list[int]:
        """Of the session, of its token, and of the other token, when the file was looked at again."""
        clock.pass_s(2.5)
        senders = ({"Cookie": cookie}, *({"Authorization": f"Bearer {token}"} for token in (READ, ADMIN)))
        return [inside.send("GET", "/api/v1/server", None, headers)[0] for headers in senders]

    assert statuses() == [200, 200, 200]
    for content in ("half a li", None, ""):  # cut, gone, and empty
        tokens.unlink(missing_ok=True)
        if content is not None:
            tokens.write_text(content)
            tokens.chmod(0o600)
        caplog.clear()
        assert statuses() == statuses() == [200, 200, 200]
        assert caplog.text.count("the tokens stay as they were") == 1
    tokens.write_text(f"operator admin {ADMIN}\n")
    assert statuses() == [401, 401, 200]


def connect(server: ServerProcess, *lines: bytes) -> Client:
    """A client that has said these lines, whose replies it has read."""
    client = Client(server.connect())
    for line in lines:
        client.ask(line)
    return client


def test_connections_are_listed_and_can_be_closed(start_server: Start, tmp_path: Path) -> None:
    port, path = free_port(), str(tmp_path / "s")
    server = start_server("--http", str(port), "-l", f"unix:{path}")
    web = Web(port)
    producer = connect(server, b"use a", b"put 0 0 60 1\r\nx", b"put 0 0 60 1\r\nx")
    worker = connect(server, *[b"watch t%d" % n for n in range(30)], b"watch a", b"reserve")
    waiter = connect(server, b"watch c", b"ignore default")
    waiter.send(b"reserve\r\n")
    local = socket.socket(socket.AF_UNIX)
    local.connect(path)
    until(lambda: web.get("/connections")["total"] >= 4, "four connections")
    listed = web.get("/connections")["connections"]
    first, second, third, fourth = sorted(listed, key=lambda each: int(each["number"]))[-4:]
    assert first["address"] == f"127.0.0.1:{producer.sock.getsockname()[1]}"
    assert first["listener"] == f"127.0.0.1:{server.port}"
    assert (first["uses"], first["producer"], first["worker"]) == ("a", True, False)
    assert (second["watching"], len(second["watches"]), second["reserved"]) == (32, 20, 1)
    assert second["waiting_s"] is None and second["worker"]
    assert 0 <= third["waiting_s"] < 20 and third["watches"] == ["c"]
    assert fourth["address"] == f"process {os.getpid()}, user {os.getuid()}, group {os.getgid()}"
    assert fourth["listener"] == f"unix:{path}"
    numbers = [each["number"] for each in (first, second, third)]
    assert [each["number"] for each in web.get("/connections?tube=a")["connections"]] == numbers[:2]
    by_reserved = web.get("/connections?sort=reserved&descending=true&limit=1")
    assert [each["number"] for each in by_reserved["connections"]] == [numbers[1]]
    by_waiting = web.get("/connections?sort=waiting&descending=true&limit=1")
    assert [each["number"] for each in by_waiting["connections"]] == [numbers[2]]
    assert web.get("/connections?tube=unused")["total"] == 0
    one = f"/api/v1/connections/{numbers[1]}"
    assert web.json("GET", one)["number"] == numbers[1]
    assert web.ask("DELETE", one)[0] == 204
    assert web.status("GET", one) == web.status("DELETE", one) == 404
    assert worker.sock.recv(10) == b""
    assert web.json("GET", "/api/v1/tubes/a")["jobs"]["ready"] == 2, "what it held is given back"
    assert web.status("DELETE", f"/api/v1/connections/{numbers[2]}") == 204
    assert waiter.sock.recv(10) in (b"", b"TIMED_OUT\r")
    for wrong in ("0", "x", "-1", "1" * 30, "%D9%A5"):
        assert web.status("GET", f"/api/v1/connections/{wrong}") == 400
    actions = [(entry["action"], entry["count"]) for entry in web.get("/audit")["entries"]]
    assert actions == [("close connection", 1)] * 2
    for client in (producer, worker, waiter):
        client.close()
    local.close()


def test_the_journal_and_its_segments(start_server: Start, tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "j"
    server = start_server("--http", str(port), "-b", str(folder), "-f0", "-s", "65536")
    web = Web(port)
    before = web.get("/journal")
    assert (before["directory"], before["policy"], before["last_fsync"]) == (str(folder), "-f0", None)
    with Client(server.connect()) as client:
        for _ in range(50):
            client.put(b"x" * 4000)
    after = web.get("/journal")
    assert after["commits"] == {"count": 50, "records": 50, "records_max": 1}
    assert after["fsyncs"]["count"] >= 50 and abs(after["last_fsync"] - time.time()) < 20
    assert after["live_bytes"] >= 200_000 and after["dead_bytes"] == after["bytes"] - after["live_bytes"]
    states = [segment["state"] for segment in after["segments"] if segment["state"] != "spare"]
    assert len(states) > 2 and set(states[:-1]) == {"sealed"} and states[-1] == "current"
    assert sum(segment["live_bytes"] for segment in after["segments"]) == after["live_bytes"]
    assert sum(segment["records"] for segment in after["segments"]) == 50
    short = web.json("GET", "/api/v1/server")["journal"]
    assert (short["policy"], short["budget_bytes"], short["writable"]) == ("-f0", None, True)
    assert short["fsync_p99_s"] == after["fsyncs"]["p99"] > 0


def test_without_a_journal_there_is_none(web: Web) -> None:
    answer = web.get("/journal")
    assert answer["directory"] is answer["policy"] is answer["disk_free_bytes"] is None
    assert answer["segments"] == []
    assert web.json("GET", "/api/v1/server")["journal"] is None


def test_thousands_of_connections_leave_room_for_other_clients(start_server: Start, tmp_path: Path) -> None:
    port = free_port()
    server = start_server("--http", str(port), stderr=tmp_path / "log")
    web = Web(port)
    with contextlib.ExitStack() as stack:
        for number in range(2000):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            if number % 3 == 0:
                connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"[: 10 + number % 50])
            if number % 500 == 499:
                with Client(server.connect()) as client:
                    assert client.ask(b"list-tube-used") == b"USING default\r\n"
        assert len(os.listdir(f"/proc/{server.pid}/fd")) < 300
        begun_s = time.monotonic()
        assert web.status("GET", "/healthz") == 200
        assert time.monotonic() - begun_s < wire.HEAD_S / 2, "half requests give way, and no client waits for their end"
    said = (tmp_path / "log").read_text()
    assert "Traceback" not in said and said.count("cannot accept") <= 1


def test_few_descriptors_are_for_clients_first(start_server: Start, tmp_path: Path) -> None:
    port = free_port()
    few = ["bash", "-c", 'ulimit -n 30; exec "$@"', "bash", *GEVENTSTALK]
    server = ServerProcess(few, ["--http", str(port)], stderr=tmp_path / "log")
    try:
        server.wait_ready()
        with contextlib.ExitStack() as stack:
            for _ in range(50):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            clients = [stack.enter_context(Client(server.connect())) for _ in range(12)]
            for client in clients:
                assert client.ask(b"list-tube-used") == b"USING default\r\n"
            assert Web(port).status("GET", "/healthz") == 200
    finally:
        assert server.stop() == 0
    assert (tmp_path / "log").read_text().count("there are as many HTTP connections as there may be") <= 1


# Bug: The server closed while the body still came: clients saw a broken pipe and no 413.
@pytest.mark.parametrize("size", [70_000, 2_000_000, 30_000_000])
def test_usual_clients_see_that_a_body_is_too_large(web: Web, size: int, tmp_path: Path) -> None:
    """They send all of it before they look for an answer."""
    body, headers = b"x" * size, {"Content-Type": "application/json"}
    for data in (body, iter([body[: size // 2], body[size // 2 :]])):
        status, _, content = web.send("PATCH", "/api/v1/server", data, headers)
        assert (status, json.loads(content)["status"]) == (413, 413)
    if shutil.which("curl"):
        (tmp_path / "body").write_bytes(body)
        address = f"http://127.0.0.1:{web.port}/api/v1/server"
        ask = ["curl", "-sS", "-X", "PATCH", "-w", "%{http_code}", "-o", "/dev/null", "--json", f"@{tmp_path}/body"]
        for more in ([], ["-H", "Expect:"], ["-H", "Transfer-Encoding: chunked", "-H", "Expect:"]):
            done = subprocess.run([*ask, *more, address], capture_output=True, text=True, timeout=20)
            assert (done.returncode, done.stdout) == (0, "413"), done


@pytest.mark.parametrize("path", ["/../etc/passwd", "/..%2f..%2fetc/passwd", "//etc/passwd", "/%2e%2e/", "/%00", "/\\"])
def test_paths_lead_nowhere_else(web: Web, path: str) -> None:
    assert web.status("GET", path) == 404
    assert web.status("GET", "/api/v1" + path) == 404


def test_a_stop_is_clean_while_http_is_busy(start_server: Start, tmp_path: Path) -> None:
    port, path = free_port(), tmp_path / "s"
    server = start_server("--http", str(port), "--http", f"unix:{path}", stderr=tmp_path / "log")
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            connection.sendall(b"GET /api/v1/server HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        begun_s = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun_s < 10
    assert not path.exists()


def write_jobs(folder: Path, count: int) -> None:
    """A journal with this many jobs."""
    journal = Journal(str(folder), segment_bytes=10_000_000)
    assert not list(journal.replay())
    journal.start()
    job = Job(1, 0, 0, 0, 60)
    job.body = b"x\r\n"
    job.state = READY
    payload = encode_whole(job, b"t", ClockOffset(0, 0))
    for id in range(1, count + 1):
        journal.append(id, FULL, payload)
        if id % 1000 == 0:
            journal.commit()
    journal.close()


def test_while_the_journal_is_replayed_http_says_so(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "j"
    write_jobs(folder, 200_000)
    server = ServerProcess(GEVENTSTALK, ["--http", str(port), "-b", str(folder)], stderr=tmp_path / "log")
    web = Web(port)
    seen: list[tuple[int, bytes]] = []
    try:
        while not seen or seen[-1][0] != 200:
            with contextlib.suppress(OSError):
                seen.append(web.ask("GET", "/readyz")[::2])
                seen.append(web.ask("GET", "/api/v1/server")[::2])
            assert server.process.poll() is None
        assert web.ask("GET", "/readyz")[::2] == (200, b"ok\n")
        assert web.json("GET", "/api/v1/server")["jobs"]["ready"] == 200_000
    finally:
        server.stop()
    assert seen[0] == (503, b"the journal is being replayed\n"), seen
    assert {status for status, _ in seen} == {503, 200}
