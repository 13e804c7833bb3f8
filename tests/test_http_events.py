"""Streams of events: what they tell, that it is made once, and how they end. Most of it within this process."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gevent
import pytest
from jsonschema_rs import Draft202012Validator

from geventstalk.http import events, views
from geventstalk.http.access import Who
from geventstalk.http.events import STREAMS_MAX, Events, Stream
from geventstalk.http.tokens import Tokens
from tests.support.process import ServerProcess, free_port
from tests.support.web import DOCUMENT, Web, Wired, cycles_of, puts

READ, ADMIN = "read-token-0123456789", "admin-token-0123456789"
Told = tuple[str, Any]


class Listener:
    """Reads a stream: `told` gives the next event, with its data."""

    def __init__(self, sock: Any, query: str = "", **headers: str) -> None:
        self.sock = sock
        self._data = b""
        self._text = ""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        sock.sendall(f"GET /api/v1/events{query} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
        head = self._until(b"\r\n\r\n").decode()
        self.status = int(head.split()[1])
        self.head = head.lower()

    def _until(self, end: bytes) -> bytes:
        while end not in self._data:
            more = self.sock.recv(65536)
            if not more:
                raise EOFError
            self._data += more
        found, _, self._data = self._data.partition(end)
        return found

    def _piece(self) -> str:
        """One chunk; EOFError at the end, which has to be a proper one."""
        size = int(self._until(b"\r\n"), 16)
        while len(self._data) < size + 2:
            self._data += self.sock.recv(65536) or b"?"
        piece, self._data = self._data[:size], self._data[size + 2 :]
        if not size:
            raise EOFError
        return piece.decode()

    def block(self) -> str:
        """Returns what stands between two empty lines."""
        while "\n\n" not in self._text:
            self._text += self._piece()
        found, _, self._text = self._text.partition("\n\n")
        return found

    def told(self, *kinds: str) -> Told:
        """The next event of these kinds."""
        while True:
            lines = self.block().split("\n")
            if lines[0].startswith("event: ") and lines[0][7:] in (kinds or ("figures", "audit", "bulk")):
                assert len(lines) == 2 and lines[1].startswith("data: ")
                return lines[0][7:], json.loads(lines[1][6:])

    def ends(self) -> None:
        """Reads until the end, which has to be that of a whole answer."""
        with pytest.raises(EOFError):
            while True:
                self.block()


class World(Wired):
    """The application with its streams."""

    @property
    def events(self) -> Events:
        found: Any = self.backend.audit.listeners[0]
        assert isinstance(found.__self__, Events)
        return found.__self__

    def __init__(self, tokens: Tokens | None = None) -> None:
        super().__init__(tokens)
        self._clients: list[Any] = []

    def connect(self) -> Any:
        self._clients.append(super().connect())
        return self._clients[-1]

    def listen(self, query: str = "", **headers: str) -> Listener:
        return Listener(self.connect(), query, **headers)

    def end(self) -> None:
        """Stops, and checks that nothing is left."""
        self.site.stop()
        for client in self._clients:
            client.close()
        self.check()
        assert not self.events.streams and not self.events._runs


def hold(schema: str, value: object) -> None:
    """Holds a value against a schema of the document."""
    found = {"$ref": f"#/components/schemas/{schema}", "components": DOCUMENT["components"]}
    Draft202012Validator(found).validate(value)


def until(condition: Callable[[], object]) -> None:
    with gevent.Timeout(5):
        while not condition():
            gevent.sleep(0.002)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures come 50 times a second."""
    monkeypatch.setattr(events, "PERIOD_NS", 20_000_000)


@pytest.fixture
def world(quick: None, caplog: pytest.LogCaptureFixture) -> Iterator[World]:
    world = World()
    with caplog.at_level(logging.DEBUG):
        yield world
    world.end()
    assert "Traceback" not in caplog.text


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns what figures were made of, each time."""
    made: list[str] = []
    server, tube = views.server, views.tube

    def make_server(*arguments: Any) -> Any:
        made.append("server")
        return server(*arguments)

    def make_tube(backend: Any, which: Any, *arguments: Any) -> Any:
        made.append(which.name.decode())
        return tube(backend, which, *arguments)

    monkeypatch.setattr(views, "server", make_server)
    monkeypatch.setattr(views, "tube", make_tube)
    return made


def test_figures_are_those_of_the_server_and_of_tubes(world: World) -> None:
    world.session(puts(["a", "a/+;", "b"]))
    listener = world.listen("?tubes=a%2F%2B;,none,a,a")
    assert listener.status == 200
    for header in ("content-type: text/event-stream\r\n", "cache-control: no-store", "x-accel-buffering: no"):
        assert header in listener.head
    _, first = listener.told()
    assert set(first["server"]) == set(world.json("GET", "/api/v1/server"))
    assert first["server"]["jobs"]["ready"] == 3
    shown = world.json("GET", "/api/v1/tubes?match=a")["tubes"]
    wanted = {tube["name"]: set(tube) for tube in shown if tube["name"] != "default"}
    assert [(tube["name"], set(tube)) for tube in first["tubes"]] == [(n, wanted[n]) for n in ("a/+;", "a")]
    world.session(puts(["a"]))
    until(lambda: listener.told()[1]["tubes"][1]["jobs"]["ready"] == 2)
    assert world.listen().told()[1]["tubes"] == []


def test_the_documents_schemas_hold(world: World) -> None:
    world.session(puts(["a"]))
    listener = world.listen("?tubes=a")
    figures = listener.told()[1]
    hold("Server", figures["server"])
    hold("Tube", figures["tubes"][0])
    world.backend.audit.record(events_author(), "drain", 1)
    hold("AuditEntry", listener.told("audit")[1])


def test_figures_are_made_once_for_all_pages_and_not_without_one(world: World, made: list[str]) -> None:
    world.session(puts(["a", "b", "c"]))
    listeners = [world.listen(query) for query in ("?tubes=a", "?tubes=a,b", "?tubes=a,b", "", "")]
    times = [[listener.told()[1]["server"]["now"] for listener in listeners] for _ in range(5)]
    assert made.count("server") <= 7 and times[0][0] < times[-1][0]
    assert made.count("a") <= 7 and made.count("b") <= 7 and "c" not in made
    assert len({tuple(each) for each in times}) == 5
    for listener in listeners:
        listener.sock.close()
    until(lambda: not world.events.streams and not world.events._runs)
    made.clear()
    world.backend.audit.record(events_author(), "drain", 1)
    gevent.sleep(0.06)
    assert not made and world.events._figures is None
    world.listen().told()
    assert made == ["server"]


def events_author() -> Any:
    return type("Who", (), {"name": "maria", "role": "admin", "address": "here", "via": "api"})()


def test_changes_are_told_when_they_happen(world: World) -> None:
    one, two = world.listen(), world.listen()
    one.told(), two.told()
    world.json("PATCH", "/api/v1/server", {"draining": True})
    world.json("PATCH", "/api/v1/server", {"draining": False})
    entries = world.get("/audit")["entries"]
    for listener in (one, two):
        assert [listener.told("audit")[1] for _ in range(2)] == entries[::-1]


def test_work_on_many_jobs_is_told(world: World) -> None:
    world.session(puts(["a", "a", "b"]))
    listener = world.listen()
    listener.told()
    began = world.json("POST", "/api/v1/bulk", {"filter": "tube:a", "action": "delete"})
    bulk = began
    while bulk["state"] == "running":
        bulk = listener.told("bulk")[1]
    assert (bulk["number"], bulk["state"], bulk["done"]) == (began["number"], "done", 2)
    hold("Bulk", bulk)
    assert listener.told()[1]["server"]["jobs"]["ready"] == 1


def test_a_page_that_does_not_read_is_dropped_and_delays_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch, made: list[str]
) -> None:
    names = [f"t{number}" for number in range(200)]
    client = world.session(puts(names))
    while client.unfinished:
        client.run(time.monotonic_ns())
    query = "?tubes=" + ",".join(names)
    slow, other = world.listen(query), world.listen()
    for _ in range(3):
        other.told()
    assert len(world.events.streams) == 2
    sockets = [handler.__dict__["socket"] for handler in (*world.site._working, *world.site._sending)]
    assert [each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for each in sockets] == [2 << 16] * 2
    monkeypatch.setattr(events, "SLOW_NS", 200_000_000)
    until(lambda: bool(other.told()) and len(world.events.streams) == 1)
    other.told()
    with pytest.raises((EOFError, OSError, AssertionError)):
        while True:
            slow.told()


def test_newer_figures_replace_those_that_wait(world: World) -> None:
    stream = Stream(world.events, (), lambda now_ns: True, lambda: None, Who("local", "admin", ""))
    assert next(stream).startswith(b"retry: 2000\n\nevent: figures\n")
    for number in range(1000):
        stream.tell("figures", b"f%d;" % number)
        stream.tell(("bulk", 1), b"b%d;" % number)
        stream.tell(("bulk", number % 3), b"c%d;" % number)
    assert next(stream) == b"f999;b999;c999;c998;"
    assert stream.sending_ns
    for number in range(300):
        stream.tell(number, b"x")
    assert list(stream) == []


def test_a_stream_shows_that_it_lives(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PERIOD_NS", 10**10)
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.01)
    listener = world.listen()
    assert listener.block() == "retry: 2000"
    listener.told()
    assert [listener.block() for _ in range(3)] == [":"] * 3


def test_so_many_streams_and_no_more(world: World) -> None:
    listeners = [world.listen() for _ in range(STREAMS_MAX)]
    late = world.listen()
    assert late.status == 503 and "retry-after: 5\r\n" in late.head
    assert world.status("GET", "/api/v1/server") == 200
    for listener in listeners:
        listener.told()
        listener.told()
    listeners[0].sock.close()
    until(lambda: len(world.events.streams) < STREAMS_MAX)
    assert world.listen().told()


def test_figures_that_take_long_come_seldomer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    server = views.server

    def take_long(*arguments: Any) -> Any:
        time.sleep(0.02)
        return server(*arguments)

    monkeypatch.setattr(views, "server", take_long)
    listener = world.listen()
    listener.told()
    begun_s = time.monotonic()
    for _ in range(4):
        listener.told()
    assert time.monotonic() - begun_s > 0.25, "not more than a fifth of the time"


def test_streams_end_at_a_stop(world: World) -> None:
    listeners = [world.listen() for _ in range(3)]
    for listener in listeners:
        listener.told()
    begun_s = time.monotonic()
    world.site.stop()
    assert time.monotonic() - begun_s < 0.5 and not world.events.streams
    for listener in listeners:
        listener.ends()
    stream = world.events.join((), lambda now_ns: True, lambda: None, Who("local", "admin", ""))
    assert list(stream) == []
    stream.close()


def test_streams_leave_no_cycle_behind(world: World) -> None:
    """The server collects no cycles while it runs, so what a stream made must go by itself."""

    def listen() -> None:
        listener = world.listen("?tubes=default")
        listener.told()
        listener.told()
        listener.sock.close()
        until(lambda: not world.events.streams and not world.events._runs)

    listen()
    assert cycles_of(listen, 5) == {}


def test_a_fault_ends_the_streams_and_nothing_else(
    quick: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    listener = world.listen()
    listener.told()
    with monkeypatch.context() as patch:
        patch.setattr(views, "server", None)
        listener.ends()
    assert caplog.text.count("the streams of events end here") == 1
    assert world.listen().told()
    world.end()


@pytest.mark.parametrize("query", ["?tubes=a&tubes=b", "?tubes=-a", "?tubes=a,%3Cb%3E", "?tube=a"])
def test_what_is_asked_wrongly_is_a_problem(world: World, query: str) -> None:
    assert world.listen(query).status == 400


def test_names_of_so_many_tubes_and_no_more(world: World) -> None:
    names = ",".join(f"t{number}" for number in range(201))
    assert world.listen(f"?tubes={names}").status == 400
    assert world.listen(f"?tubes={names.removesuffix(',t200')}").status == 200
    assert world.listen("?tubes=").status == 200
    assert world.listen("?tubes=" + ",".join(["t"] * 201)).status == 400


def test_a_head_is_answered_and_leaves_no_stream(world: World) -> None:
    client = world.connect()
    client.sendall(b"HEAD /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"text/event-stream" in client.recv(4096)
    until(lambda: not world.events.streams)


@pytest.mark.parametrize("how", ["token", "session", "file"])
def test_who_may_no_longer_read_hears_no_more(
    how: str, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "CHECK_NS", 20_000_000)
    monkeypatch.setattr("geventstalk.http.access._LOOK_EVERY_NS", 0)
    path = tmp_path / "tokens"
    path.write_text(f"grafana read {READ}\nmaria admin {ADMIN}\n")
    path.chmod(0o600)
    world = World(tokens=Tokens(str(path), os.getuid()))
    assert world.listen().status == 401
    reader = world.listen(Authorization=f"Bearer {READ}")
    form = urlencode({"token": ADMIN}).encode()
    _, headers, _ = world.send("POST", "/login", form, {"Content-Type": "application/x-www-form-urlencoded"})
    cookie = headers["set-cookie"].partition(";")[0]
    browser = world.listen(Cookie=cookie)
    for _ in range(6):  # it is checked in between, and all is well
        reader.told()
        browser.told()
    if how == "token":
        path.write_text(f"maria admin {ADMIN}\n")
        reader.ends()
        assert browser.told()
    elif how == "session":
        assert world.send("POST", "/logout", b"", {"Cookie": cookie})[0] == 303
        browser.ends()
        assert reader.told()
    else:
        path.write_text("others read 0123456789abcdef\n")
        reader.ends()
        browser.ends()
    world.end()


def test_streams_of_a_server_end_with_it(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"grafana read {READ}\nmaria admin {ADMIN}\n")
    path.chmod(0o600)
    port = free_port()
    server = start_server("--http", str(port), "--http-tokens", str(path))
    assert Web(port).status("GET", "/api/v1/events") == 401
    listeners = []
    for token in (READ, ADMIN):
        sock = socket.create_connection(("127.0.0.1", port), 20)
        listeners.append(Listener(sock, "?tubes=default", Authorization=f"Bearer {token}"))
    begun_s = time.monotonic()
    for listener in listeners:
        assert listener.told()[1]["tubes"][0]["name"] == "default"
    assert time.monotonic() - begun_s < 1, "the first figures come at once"
    Web(port, ADMIN).json("PATCH", "/api/v1/server", {"draining": True})
    for listener in listeners:
        assert listener.told("audit")[1]["action"] == "drain"
        assert listener.told("figures")[1]["server"]["draining"]
    begun_s = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begun_s < 5
    for listener in listeners:
        listener.ends()
        listener.sock.close()
