"""HTTP/1.1 on one connection: gevent's pywsgi, with limits for everything that a client sends.

This module must not know resources. pywsgi writes the responses and reads the bodies; this module reads the heads of
requests strictly: an ambiguous head is refused. A malformed request costs an answer, at most a line of the log, and
never a traceback. Invariant: for any behaviour of a client, its connection ends in bounded time and takes bounded
memory, and the work for a head grows with its length only.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any, Final
from weakref import proxy, ref

import gevent
from gevent import pywsgi

IDLE_S: Final = 60.0
"""The most time without a request."""
HEAD_S: Final = 10.0
"""The most time for the head of a request, from its first byte on."""
BODY_S: Final = 10.0
"""The most time for a body, and a second more for each BODY_BYTES_A_SECOND."""
BODY_BYTES_A_SECOND: Final = 1 << 14
SEND_S: Final = 30.0
"""The most time for one piece of a response."""
HEAD_BYTES_MAX: Final = 1 << 14
HEADERS_MAX: Final = 64
LINE_BYTES_MAX: Final = 1 << 13
BODY_BYTES_MAX: Final = 1 << 16
"""The largest body of a request that puts no job."""
_READ_BYTES: Final = 1 << 14
DISCARD_S: Final = 1.0
"""The most time for the rest of an unread body, to keep its connection."""
LINGER_S: Final = 10.0
"""The most time to read and drop what a client sends after the last answer, LINGER_BYTES at the most."""
LINGER_BYTES: Final = 1 << 26
LINGER_IDLE_S: Final = 2.0
"""The longest pause of the client meanwhile."""
_READS_A_SLICE: Final = 256
"""Chunks of a body are read byte by byte. This many reads take less than a millisecond."""

_DROPPED: Final = bytearray(1 << 16)
"""The buffer for dropped bytes."""

# Why no library parses heads here, as measured in 2026: h11 0.16 takes time that grows with the square of a header
# (1.3 s for one of 16 kB) and of a chunk's extension, and accepts bare LF, folded lines, control characters, and a
# length beside chunks, so it would need all the checks below before it. pywsgi's own parser is that of email, which
# accepts more still. llhttp (httptools 0.9) is strict and linear, but a compiled package more; it runs on through all
# requests that one read brings, where this server reads a body only when it needs it, and it knows no limit for a
# head. The half page below stays, and pywsgi goes on reading chunks, which it does strictly and byte by byte.
_REQUEST_LINE: Final = re.compile(rb"([A-Z]{1,16}) ([!-~]+) HTTP/(1\.[01])")
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")
"""No two parts of an expression here may match the same byte: with that, time grows with the length only."""
_ONCE: Final = frozenset({"host", "content-length", "content-type", "authorization", "transfer-encoding", "origin"})


class Refused(Exception):
    """A request that does not reach the application. With status 0 it gets no answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


class Input:
    """A client's bytes, as pywsgi reads them: from the socket, against the clock, within limits."""

    closed = False

    def __init__(self, sock: Any, yield_now: Callable[[], None]) -> None:
        self._socket = sock
        self._yield_now = yield_now
        self._buffer = b""  # empty when all of it is read
        self._at = 0  # how many bytes of it are read
        self._end_s = 0.0
        self._left = 0
        self._reads = 0

    def expect(self, seconds: float, size: int) -> None:
        """Sets the time and the bytes of the next part."""
        self._end_s = monotonic() + seconds
        self._left = size

    def hurry(self, seconds: float) -> None:
        """Shortens the time of the next part."""
        self._end_s = min(self._end_s, monotonic() + seconds)

    def wait(self, seconds: float) -> bool:
        """Waits for the first byte of a request. Returns False when there will be none."""
        self.expect(seconds, HEAD_BYTES_MAX)
        try:
            return bool(self._buffer) or self._fill()
        except Refused:
            return False

    def _fill(self) -> bool:
        """Reads from the socket. Returns False at the end."""
        left_s = self._end_s - monotonic()
        if left_s <= 0:
            raise Refused(408, "the request took too long")
        self._socket.settimeout(left_s)
        try:
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            raise Refused(408, "the request took too long") from None
        except OSError:
            raise Refused(0, "the client is gone") from None
        self._buffer = self._buffer[self._at :] + data
        self._at = 0
        return bool(data)

    def _take(self, size: int) -> bytes:
        data = self._buffer[self._at : self._at + size]
        self._at += len(data)
        if self._at == len(self._buffer):
            self._buffer, self._at = b"", 0
        self._left -= len(data)
        return data

    def read_head(self) -> bytes:
        """Returns all lines of a request's head with their CRLF, without the empty one."""
        looked = 0
        while True:
            while self._left > 0 and self._buffer.startswith(
                b"\r\n", self._at
            ):  # behind an earlier body, by old clients
                self._take(2)
            end = self._buffer.find(b"\r\n\r\n", max(self._at, looked)) - self._at
            size = len(self._buffer) - self._at
            if end > HEAD_BYTES_MAX or (end < 0 and (size >= HEAD_BYTES_MAX or self._left <= 0)):
                raise self._too_long()
            if end >= 0:
                break
            looked = max(0, size - 3)
            if not self._fill():
                raise Refused(0, "the client is gone")
        head = self._take(end + 2)
        self._take(2)
        return head

    def _too_long(self) -> Refused:
        if b"\r\n" not in self._buffer[self._at : self._at + LINE_BYTES_MAX]:
            return Refused(414, "the address of the request is too long")
        return Refused(431, "the headers of the request are too long")

    # --- for pywsgi, which reads bodies and their chunks

    def read(self, size: int) -> bytes:
        """Returns this many bytes, or less at the end. Lets other greenlets run now and then."""
        self._reads += 1
        if not self._reads % _READS_A_SLICE:
            self._yield_now()
        if size > self._left:
            raise Refused(413, "the body of the request is too large")
        pieces = []
        while size > 0 and (self._buffer or self._fill()):
            piece = self._take(size)
            size -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def drop(self) -> None:
        """Reads the rest, within limits: with unread bytes the client's kernel drops the answer."""
        self._buffer, self._at = b"", 0
        self.expect(LINGER_S, LINGER_BYTES)
        with suppress(OSError):
            while self._left > 0 and (left_s := self._end_s - monotonic()) > 0:
                self._socket.settimeout(min(left_s, LINGER_IDLE_S))
                size = self._socket.recv_into(_DROPPED)
                if not size:
                    return
                self._left -= size
                self._yield_now()


class Headers:
    """The headers of a request, with pywsgi's interface; names are in lower case."""

    status = ""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self.pairs = pairs
        self._first: dict[str, str] = {}
        for name, value in pairs:
            self._first.setdefault(name, value)

    def get(self, name: str, default: str | None = None) -> str | None:
        return self._first.get(name.lower(), default)

    getheader = get

    @property
    def typeheader(self) -> str | None:
        return self._first.get("content-type")


def parse_head(head: bytes) -> tuple[str, str, str, Headers]:
    """Returns method, target, version and headers. Raises Refused."""
    lines = head.split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(lines[0])
    if found is None:
        raise Refused(400, "the first line is no request of HTTP/1.1")
    if len(lines[0]) > LINE_BYTES_MAX:
        raise Refused(414, "the address of the request is too long")
    if len(lines) - 2 > HEADERS_MAX:
        raise Refused(431, "the request has too many headers")
    method, target, version = (part.decode("ascii") for part in found.groups())
    if not target.startswith("/") and target != "*":
        target = _without_origin(target)
    pairs = [_parse_header(line) for line in lines[1:-1]]
    headers = Headers(pairs)
    _require_one_meaning(headers, version)
    return method, target, f"HTTP/{version}", headers


def _parse_header(line: bytes) -> tuple[str, str]:
    name, colon, value = line.partition(b":")
    if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise Refused(400, "a header is not right")
    return name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")


def _without_origin(target: str) -> str:
    """Returns the path of a target that names its server, too, as for a proxy."""
    found = re.fullmatch(r"(?i:https?://[^/?#]+)(/.*)?", target)
    if found is None:
        raise Refused(400, "the address of the request is not right")
    return found[1] or "/"


def _require_one_meaning(headers: Headers, version: str) -> None:
    """Refuses a head that a proxy could read differently, so that no request can hide in another."""
    names = [name for name, _ in headers.pairs]
    for name in _ONCE:
        if names.count(name) > 1:
            raise Refused(400, f"the header {name} is there twice")
    if version == "1.1" and "host" not in names:
        raise Refused(400, "the header host is missing")
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is None:
        is_clear = length is None or re.fullmatch(r"[0-9]{1,18}", length) is not None
    else:
        is_clear = coding.lower() == "chunked" and length is None and version != "1.0"
    if not is_clear:
        raise Refused(400, "the length of the body is not clear")


class Body(pywsgi.Input):
    """The body of one request, `left` bytes at the most. Raises Refused for a malformed body."""

    left = 0
    handler: ref[Handler]  # weak: the handler holds this body, and there is no collector of cycles

    def read(self, length: int | None = None) -> bytes:
        base: Any = super()
        handler: Any = self.handler()
        service = handler.server
        service.set_idle(handler)  # it may be closed for others until its request is whole
        try:
            data: bytes = base.read(length)
        except OSError as error:
            raise Refused(400, f"the body of the request is not right: {error}") from None
        finally:
            service.set_working(handler)
        self.left -= len(data)
        if self.left < 0:
            raise Refused(413, "the body of the request is too large")
        return data

    def _discard(self) -> None:
        this: Any = self
        if this.socket is None:  # otherwise the client waits for a 100 Continue that was not sent
            this.rfile.hurry(DISCARD_S)
            base: Any = super()
            base._discard()


class Handler(pywsgi.WSGIHandler):
    """One connection and its requests. Its server is a Service of site.py."""

    def __init__(self, sock: Any, peer: str, service: Any, *, secure: bool = False) -> None:
        self._secure = secure
        self.input = Input(sock, service.yield_now)
        self.head = False
        self._peer = peer
        base: Any = super()
        base.__init__(sock, peer, service, rfile=self.input)

    # --- requests

    def handle_one_request(self) -> Any:
        """Reads a request and answers it. Returns True when another may follow, as pywsgi wants it."""
        this: Any = self
        service = this.server
        service.set_idle(self)
        if service.stopping or not self.input.wait(IDLE_S):
            return None
        try:
            service.yield_now()
            self.input.expect(HEAD_S, HEAD_BYTES_MAX + 4)
            head = self.input.read_head()
            service.set_working(self)  # only now: a connection with half a request may be closed for others
            this.command, this.path, this.request_version, this.headers = parse_head(head)
            self._expect_body()
            this.environ = self.get_environ()
        except Refused as refused:
            self._refuse(refused)
            self._linger()
            return None
        this.application = service.application
        this.response_length = 0
        this.handle_one_response()
        if this.close_connection:
            self._linger()
            return None
        return True

    def _expect_body(self) -> None:
        this: Any = self
        length = this.headers.get("content-length")
        this.content_length = None if length is None else int(length)
        most = this.server.body_bytes_max(this.command, this.path)
        if length is not None and int(length) > most:
            raise Refused(413, f"the body of the request has more than {most} bytes")
        # Chunks have lines of their own.
        size = int(length) if length is not None else 2 * most if this.headers.get("transfer-encoding") else 0
        self.input.expect(BODY_S + size / BODY_BYTES_A_SECOND, size)
        connection = (this.headers.get("connection") or "").lower()
        this.close_connection = "close" in connection or (
            this.request_version == "HTTP/1.0" and "keep-alive" not in connection
        )

    def get_environ(self) -> dict[str, Any]:
        this: Any = self
        base: Any = super()
        environ: dict[str, Any] = base.get_environ()
        environ["geventstalk.peer"] = self._peer
        if self._secure:
            environ["wsgi.url_scheme"] = "https"
        environ["geventstalk.connection"] = proxy(self)  # weak: there is no collector of cycles
        self.head = environ["REQUEST_METHOD"] == "HEAD"
        if self.head:
            environ["REQUEST_METHOD"] = "GET"
        asked = environ.get("HTTP_EXPECT", "").lower() == "100-continue"
        chunked = "HTTP_TRANSFER_ENCODING" in environ
        body: Any = Body
        this.wsgi_input = environ["wsgi.input"] = body(
            self.input, this.content_length, socket=this.socket if asked else None, chunked_input=chunked
        )
        this.wsgi_input.handler = ref(self)
        this.wsgi_input.left = this.server.body_bytes_max(this.command, this.path)
        this.close_connection = this.close_connection or asked
        return environ

    def _headers(self) -> Iterator[tuple[str, str]]:
        this: Any = self
        for name, value in this.headers.pairs:
            # An underscore would make two names one.
            if name not in ("content-type", "content-length") and "_" not in name:
                yield "HTTP_" + name.replace("-", "_").upper(), value

    def _connection_upgrade_requested(self) -> bool:
        return False

    def hang_up(self) -> None:
        """Ends the connection from another greenlet."""
        this: Any = self
        sock = this.__dict__.get("socket")
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(2)

    def keep_unsent(self, size: int) -> None:
        """Has the kernel keep about this many bytes that the client has not read, so that this greenlet waits less."""
        this: Any = self
        this.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)

    # --- responses

    def process_result(self) -> None:
        this: Any = self
        if self.head:
            if not this.headers_sent:
                this._write_with_headers(b"")
            return
        for data in this.result:
            if data:
                this.write(data)
        if this.status and not this.headers_sent:
            this.write(b"")
        if this.response_use_chunked:
            this._sendall(b"0\r\n\r\n")

    def finalize_headers(self) -> None:
        this: Any = self
        base: Any = super()
        base.finalize_headers()
        if this.close_connection and this.request_version == "HTTP/1.1":
            this.response_headers.append((b"Connection", b"close"))

    def _sendall(self, data: Any) -> None:
        this: Any = self
        this.socket.settimeout(SEND_S)
        base: Any = super()
        this.server.set_sending(self)  # a client that does not read may be closed for others
        try:
            base._sendall(data)
        finally:
            this.server.set_working(self)

    # --- failures

    def handle_error(self, kind: Any, error: Any, trace: Any) -> None:
        """Handles exceptions that the application did not answer. pywsgi calls this in the middle of a response."""
        this: Any = self
        this.close_connection = True
        if isinstance(error, Refused):
            if not this.headers_sent:
                self._refuse(error)
        elif not isinstance(error, (OSError, gevent.GreenletExit)):
            this.server.tell_fault(f"{this.command} {this.path}", error)
            if not this.headers_sent:
                self._answer(Refused(500, "The server has a fault; its log says which."))

    def log_request(self) -> None:
        """Does nothing: the log would fill."""

    def log_error(self, message: str, *arguments: object) -> None:
        """Does nothing: malformed bodies raise Refused."""

    def _refuse(self, refused: Refused) -> None:
        """Answers a request that does not reach the application. The connection ends then."""
        this: Any = self
        if not refused.status:
            return
        this.server.log_refused(this.client_address, refused)
        self._answer(refused)

    def _answer(self, refused: Refused) -> None:
        this: Any = self
        data = this.server.refusal(refused.status, refused.why)
        this.socket.settimeout(1.0)
        with suppress(OSError):
            this.socket.sendall(data)

    def _linger(self) -> None:
        """Waits until the client has read the last answer. The connection may be closed to admit others."""
        this: Any = self
        this.server.set_idle(self)
        with suppress(OSError):
            this.socket.shutdown(socket.SHUT_WR)
            self.input.drop()
