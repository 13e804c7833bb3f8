"""Whatever reads bytes of clients takes time that grows with their length, and not with its square.

Each test doubles an input that is made to hurt, and compares the processor time of this thread within one run. A square
takes four times as long, and with these sizes some tens of milliseconds at the least.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import partial
from math import inf
from time import thread_time

import gevent
import pytest

from geventstalk import filters
from geventstalk.filters import FilterError
from geventstalk.front.frames import DATA, Cutter, frame
from geventstalk.http import access, patterns
from geventstalk.http.patterns import PatternError
from geventstalk.http.search import Search
from geventstalk.http.tokens import Tokens
from geventstalk.http.wire import Refused, parse_head
from tests.support.web import Inside, Wired, puts

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
SPARE_S = 0.003
"""So little says nothing: a switch of threads in the wrong moment takes as long."""


ROUNDS = 8
"""A neighbour of a virtual machine makes some runs slower. A square is too slow in each round."""


def time_of(run: Callable[[], object]) -> float:
    """Returns how long a run takes, in seconds of this thread's own."""
    begun = thread_time()
    run()
    return thread_time() - begun


def require_linear(run: Callable[[int], object], size: int) -> None:
    """`run` takes at most three times as long for twice the size, by the quickest runs so far of each."""
    once = twice = inf
    gc.disable()  # a collection in the wrong moment takes as long as the rest
    try:
        for _ in range(ROUNDS):
            once, twice = min(once, time_of(partial(run, size))), min(twice, time_of(partial(run, 2 * size)))
            if twice < 3 * once + SPARE_S:
                return
    finally:
        gc.enable()
    pytest.fail(f"{size}: {once:.6f} s, twice as much: {twice:.6f} s")


# Heads

LINES: dict[str, Callable[[int], bytes]] = {
    "spaces": lambda size: b"X:" + b" " * size,
    "spaces before what is wrong": lambda size: b"X:" + b" " * size + b"\x01",
    "spaces in between": lambda size: b"X: a" + b" " * size + b"b",
    "spaces and what is wrong in between": lambda size: b"X: a" + b" " * size + b"\x01b",
    "words and spaces": lambda size: b"X: " + b"a \t" * (size // 3) + b"\x01",
    "no colon": lambda size: b"x" * size,
    "colons": lambda size: b"X" + b":" * size + b"\x7f",
    "a long name": lambda size: b"x" * size + b" : 1",
    "a long length": lambda size: b"Content-Length: " + b"0" * size + b"x",
    "a long host": lambda size: b"X: 1\r\nHost: " + b"a." * (size // 2),
    "other ends of lines": lambda size: b"X: " + b"\n\r" * (size // 2),
    "many lines": lambda size: b"\r\n".join([b"a: 1"] * (size // 6)),
}


# Bug: One header of 16 kB held up the server for hours: one expression had three runs of white space.
@pytest.mark.parametrize("name", LINES)
def test_a_head(name: str) -> None:
    def parse(size: int) -> None:
        with contextlib.suppress(Refused):
            parse_head(b"GET / HTTP/1.1\r\nHost: a\r\n" + LINES[name](size) + b"\r\n")

    require_linear(parse, 7000)


@pytest.mark.parametrize(
    "target", [b"http://" + b"a" * 4000, b"/?" + b"&" * 4000, b"http://a" + b"/" * 4000, b"a" * 4000]
)
@pytest.mark.parametrize("end", [b" HTTP/1.1", b" HTTP/1.1 ", b" ", b"\xff"])
def test_the_first_line_of_a_head(target: bytes, end: bytes) -> None:
    def parse(size: int) -> None:
        with contextlib.suppress(Refused):
            parse_head(b"GET " + target * (size // 4000) + end + b"\r\nHost: a\r\n")

    require_linear(parse, 4000)


# What a whole request meets: the head, pywsgi's environment, access, falcon, and the resource


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> Wired:
    monkeypatch.setattr(access, "_GUESS_DELAY_S", 0.0)

    class Nobody(Tokens):
        def __init__(self) -> None:
            self._tokens = ()

        def has_changed(self) -> bool:
            return False

    return Wired(Nobody())


def served(wired: Wired, data: bytes) -> None:
    answer = wired.all_of(data, end=True)
    gevent.joinall(wired.greenlets, raise_error=True)
    wired.greenlets.clear()
    assert answer.startswith(b"HTTP/1.1 ") and not answer.startswith(b"HTTP/1.1 500")


VALUES: dict[str, Callable[[int], bytes]] = {
    "quotes and backslashes": lambda size: b'geventstalk="' + b"\\" * size + b'"',
    "escaped quotes": lambda size: b'geventstalk="' + b'\\"' * (size // 2) + b'"',
    "escaped digits": lambda size: b'geventstalk="' + b"\\101" * (size // 4) + b'"',
    "semicolons": lambda size: b"a=b; " * (size // 5),
    "commas": lambda size: b"a;q=0, " * (size // 7),
    "quotes": lambda size: b'W/"' + b'"' * size,
    "digits": lambda size: b"1" * size,
    "colons": lambda size: b":" * size,
    "a port": lambda size: b"a:" + b"1" * size + b"a",
    "an origin": lambda size: b"http://" + b"a" * size + b"/",
    "spaces": lambda size: b"Bearer" + b" " * size + b"x",
    "percents": lambda size: b"%41" * (size // 3),
}
NAMES = (
    b"Cookie",
    b"Origin",
    b"Authorization",
    b"Accept",
    b"Accept-Encoding",
    b"If-None-Match",
    b"Content-Type",
    b"Connection",
    b"Expect",
    b"Forwarded",
    b"X-Forwarded-Proto",
)


# Bug: A cookie of 16 kB took a second in http.cookies before Python 3.11.10.
@pytest.mark.parametrize("value", VALUES)
def test_a_request(wired: Wired, value: str) -> None:
    """Each header of this value in a request of its own, to a page that looks at cookies, and to one of the console."""

    def serve(size: int) -> None:
        text = VALUES[value](size)
        host = b"Host: " + text + b"\r\nX: "
        for request in (b"GET /login", b"GET /metrics"):
            for name in NAMES:
                served(wired, request + b" HTTP/1.1\r\nHost: localhost\r\n" + name + b": " + text + b"\r\n\r\n")
        served(wired, b"GET /login HTTP/1.1\r\n" + host + b"\r\n\r\n")

    require_linear(serve, 3000)


@pytest.mark.parametrize("piece", [b"&a=1", b"&&", b"%", b"%41", b"+", b"/", b"%2f", b";", b"?"])
def test_an_address(wired: Wired, piece: bytes) -> None:
    def serve(size: int) -> None:
        for start in (b"/login?next=", b"/api/v1/tubes/", b"/assets/", b"/jobs/", b"/login?a"):
            served(wired, b"GET " + start + piece * (size // len(piece)) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")

    require_linear(serve, 3500)


def test_a_form(wired: Wired) -> None:
    def serve(size: int) -> None:
        for piece in (b"&", b"&a=%41", b"%", b"token="):
            body = b"token=" + piece * (size // len(piece))
            served(wired, b"POST /login HTTP/1.1\r\nHost: a.localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    require_linear(serve, 2000)


CHUNKS: dict[str, Callable[[int], bytes]] = {
    "of one byte": lambda size: b"1\r\nx\r\n" * (size // 6) + b"0\r\n\r\n",
    "an extension": lambda size: b"1;" + b" " * size + b"\n",
    "zeros": lambda size: b"0" * size,
    "trailers": lambda size: b"0\r\n" + b"a: b\r\n" * (size // 6) + b"\r\n",
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks(wired: Wired, name: str) -> None:
    head = b"PATCH /api/v1/server HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    require_linear(lambda size: served(wired, head + CHUNKS[name](size)), 8000)


def test_a_head_that_comes_in_drops(wired: Wired) -> None:
    def serve(size: int) -> None:
        client = wired.connect()
        for at in range(0, size, 8):
            client.sendall(b"X: 11\r\n " if at else HEAD)
            gevent.sleep(0)
        client.close()
        gevent.joinall(wired.greenlets)
        wired.greenlets.clear()

    require_linear(serve, 6000)


def test_empty_lines_before_a_request_have_an_end(wired: Wired) -> None:
    assert wired.all_of(b"\r\n" * 20 + HEAD + b"\r\n", end=True).startswith(b"HTTP/1.1 200")
    require_linear(lambda size: wired.all_of(b"\r\n" * (size // 2) + HEAD + b"\r\n", end=True), 7000)
    assert not wired.all_of(b"\r\n" * 100_000 + HEAD + b"\r\n", end=True).startswith(b"HTTP/1.1 200")


BODIES: dict[str, Callable[[int], bytes]] = {
    "digits": lambda size: b'{"pri": ' + b"1" * size + b"}",
    "nested": lambda size: b'{"body":' + b"[" * size,
    "backslashes": lambda size: b'{"body":"' + b"\\\\" * (size // 2) + b'"}',
    "halves of characters": lambda size: b'{"body":"' + b"\\ud800" * (size // 6) + b'"}',
    "one name": lambda size: b'{"a":1' + b',"a":1' * (size // 6) + b"}",
    "spaces": lambda size: b" " * size,
    "base64": lambda size: b'{"tube": "a", "body_base64":"' + b"=" * size + b'"}',
}


@pytest.mark.parametrize("name", BODIES)
def test_json(name: str) -> None:
    inside = Inside()
    headers = {"Content-Type": "application/json"}

    def ask(size: int) -> None:
        assert inside.send("POST", "/api/v1/jobs", BODIES[name](size), headers)[0] in (400, 413, 422)

    require_linear(ask, 30_000)


# Filters and patterns, which are bounded


@pytest.mark.parametrize(
    "piece", ["a", " ", "*", "a*,", "tube:", '"', '\\"', "/", "\\", ":", "-", "9", "1..", "id:1 ", "<"]
)
def test_a_filter(piece: str) -> None:
    def parse(size: int) -> None:
        for start in ("", "tube:", '"', "/", "id:", "body:/", "age>", "state:"):
            with contextlib.suppress(FilterError):
                filters.parse(start + piece * ((size - len(start)) // len(piece)))

    require_linear(parse, filters.FILTER_CHARS_MAX // 2)


@pytest.mark.parametrize("piece", ["{", "{1", "[", "[^", "(", "(a", "a{9}", "\\p{", "\\", "a*", ".*", "(?i)", "|", ")"])
def test_a_pattern(piece: str) -> None:
    def read(size: int) -> None:
        with contextlib.suppress(PatternError):
            patterns.Pattern(piece * (size // len(piece)), True)

    require_linear(read, filters.PATTERN_CHARS_MAX // 2)


# Bug: 500 globs for 64 tubes, or 50 words in a body of 60 kB, ran in one piece of 30 ms.
def test_many_globs_and_many_words_are_looked_for_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tubes with all globs, and a body with all words, are products of two lengths that a client chooses."""
    inside = Inside()
    session = inside.session(puts(f"{'a' * 190}{number}" for number in range(512)))
    body = b"a" * 60_000
    session.receive(b"put 0 0 9 %d\r\n%s\r\n" % (len(body), body), inside.clock())
    while session.unfinished:
        session.take_out()
        session.run(inside.clock())
    globs = ",".join(f"*{number}b*" for number in range(300))
    words = " ".join(f'-"{"a" * 20}b{number}"' for number in range(filters.TERMS_MAX))
    for text, least in ((f"-tube:{globs}", 100), (words, filters.TERMS_MAX)):
        search = Search(inside.backend, filters.parse(text))
        steps: list[None] = []
        monkeypatch.setattr(search, "step", partial(steps.append, None))
        found = sum(len(page) for page in search.pages())
        assert found == 513 and len(steps) >= least, len(steps)


# The beanstalk port, and the link of front-end processes

COMMANDS: dict[str, Callable[[int], bytes]] = {
    "spaces": lambda size: b"put" + b" " * size + b"\r\n",
    "digits": lambda size: b"put 0 0 0 " + b"9" * size + b"\r\n",
    "many numbers": lambda size: b"delete 1\r\n" * (size // 10),
    "empty lines": lambda size: b"\r\n" * (size // 2),
    "carriage returns": lambda size: b"\r" * size,
    "line feeds": lambda size: b"\n" * size,
    "a long name": lambda size: b"use " + b"a" * size + b"\r\n",
    "lines that are too long": lambda size: (b"x" * 300 + b"\r\n") * (size // 302),
    "lines that are nearly too long": lambda size: (b"kick " + b" " * 217 + b"\r\n") * (size // 224),
    "jobs": lambda size: b"put 0 0 0 1\r\na\r\n" * (size // 16),
}


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in drops"])
@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str, whole: bool) -> None:
    inside = Inside()
    now_ns = inside.clock()

    def say(size: int) -> None:
        session = inside.session()
        data = COMMANDS[name](size)
        for at in range(0, size, size if whole else 16):
            session.receive(data[at : at + (size if whole else 16)], now_ns)
            while session.take_out() and session.unfinished:
                session.run(now_ns)
        session.hang_up(now_ns)

    require_linear(say, 12_000 if whole else 6_000)


def test_commands_that_wait_behind_a_reserve() -> None:
    inside = Inside()
    now_ns = inside.clock()

    def say(size: int) -> None:
        session = inside.session(b"reserve\r\n")
        for _ in range(0, size, 1024):
            session.receive(b"delete 1\r\n" * 102, now_ns)
        session.hang_up(now_ns)
        while session.take_out() and session.unfinished:
            session.run(now_ns)

    require_linear(say, 16_000)


def test_frames() -> None:
    def cut(size: int) -> None:
        cutter = Cutter()
        for begin in range(0, size, 100):
            cutter.feed((frame(1, DATA) * 13)[begin % 8 :])
            cutter._at = 0
            while cutter.take():
                pass

    require_linear(cut, 20_000)
