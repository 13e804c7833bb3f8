"""TLS: the stream, the handshakes, the files, and servers that clients of OpenSSL and of Python talk to."""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import os
import random
import re
import select
import shutil
import signal
import socket
import ssl
import subprocess
import termios
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import pytest

from geventstalk.client import Client as LibraryClient
from geventstalk.client import aio
from geventstalk.config import ConfigError
from geventstalk.config_listeners import Listener, Tls
from geventstalk.serving import handshakes as shaking
from geventstalk.serving.handshakes import HANDSHAKE_S, Handshakes
from geventstalk.serving.tls import RECORD_BYTES, Certificate, TlsStream
from geventstalk.stream import Stream
from tests.clients.programs import missing
from tests.support.clients import burst, fronts_of, number, until
from tests.support.pki import Authority, Pair
from tests.support.process import ServerProcess, free_port
from tests.support.wire import Client
from tests.test_cli import run
from tests.test_fd_limits import server_with

LOG = logging.getLogger("tests.tls")


class Pki:
    """The certificates of the tests in this file."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder, "authority")
        self.stranger = Authority(folder, "stranger")
        self.server = self.authority.certify("server")
        self.client = self.authority.certify("client")
        self.expired = self.authority.certify("expired", days=-1)
        self.unknown = self.stranger.certify("unknown")

    def flags(self, port: int, *, client_ca: bool = False) -> list[str]:
        """Returns the flags of a server that serves TLS on this port."""
        files = ["--tls-cert", str(self.server.certificate), "--tls-key", str(self.server.key)]
        more = ["--tls-client-ca", str(self.authority.trusted)] if client_ca else []
        return ["--tls-listen", f"127.0.0.1:{port}", *files, *more]


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    if shutil.which("openssl") is None:
        missing("openssl is not installed")
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def listener(pki: Pki) -> Listener:
    return Listener("127.0.0.1:1", Tls(str(pki.server.certificate), str(pki.server.key)))


def tls_of(listener: Listener) -> Tls:
    assert listener.tls is not None
    return listener.tls


# The stream


class Peer:
    """The client's end of a socket, byte by byte if wanted: nothing is sent or read but by a call."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self.sock = sock
        sock.setblocking(False)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")

    def shake(self) -> bool:
        """Goes on with the handshake. Returns whether it is over for the client; its last message is not sent then."""
        self.hear()
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self.sock.sendall(self.ciphertext())
            return False
        return True

    def ciphertext(self, data: bytes = b"") -> bytes:
        """Returns what is to be sent for these bytes, behind what is to be sent anyway."""
        for at in range(0, len(data), RECORD_BYTES):
            self._tls.write(data[at : at + RECORD_BYTES])
        return self._outgoing.read()

    def farewell(self) -> bytes:
        """Returns the ciphertext of `close_notify`."""
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.unwrap()
        return self._outgoing.read()

    def read_all(self) -> bytes:
        """Returns everything up to the farewell. Raises SSLError without one."""
        pieces: list[bytes] = []
        while True:
            try:
                if not (piece := self.read()):
                    return b"".join(pieces)
                pieces.append(piece)
            except ssl.SSLWantReadError:
                assert select.select([self.sock], [], [], 30)[0], "silence"

    def hear(self) -> None:
        try:
            while data := self.sock.recv(1 << 20):
                self._incoming.write(data)
            self._incoming.write_eof()
        except BlockingIOError:
            pass

    def read(self) -> bytes:
        """Returns what has come; raises SSLWantReadError for nothing, SSLError for a cut. Empty is the farewell."""
        self.hear()
        try:
            return self._tls.read(1 << 20)
        except ssl.SSLZeroReturnError:  # the farewell of a server that was given one
            return b""


@contextmanager
def shaken(pki: Pki, rest: bytes = b"", **sizes: int) -> Iterator[tuple[TlsStream, Peer]]:
    """Both ends behind their handshake; these bytes come in one piece with its end."""
    ours, theirs = socket.socketpair()
    for name, size in sizes.items():
        ours.setsockopt(socket.SOL_SOCKET, getattr(socket, name), size)
    with closing(ours), closing(theirs):
        ours.setblocking(False)
        context = Certificate(Tls(str(pki.server.certificate), str(pki.server.key))).context
        stream, peer = TlsStream(ours, context), Peer(theirs, pki.authority.context())
        while not peer.shake():
            assert stream.shake_hands() == 1
        theirs.sendall(peer.ciphertext(rest))
        assert stream.shake_hands() == 0
        if not rest:
            with pytest.raises(BlockingIOError):
                stream.get(1000)
        yield stream, peer


def test_bytes_that_come_with_the_end_of_a_handshake_are_input(pki: Pki) -> None:
    with shaken(pki, b"stats\r\n") as (stream, peer):
        assert stream.holds_input, "the socket has nothing that could be waited for"
        assert stream.get(1000) == b"stats\r\n"
        with pytest.raises(BlockingIOError):
            stream.get(1000)
        assert stream.put(b"OK\r\n") == 4
        assert peer.read() == b"OK\r\n"


def test_bytes_arrive_whole_and_in_order_however_small_the_pieces(pki: Pki, seed: int) -> None:
    drawn = random.Random(seed)
    sent = drawn.randbytes(60_000)
    with shaken(pki) as (stream, peer):
        cipher = peer.ciphertext(sent[:40_000]) + peer.ciphertext(sent[40_000:])
        got = b""
        while cipher:
            size = drawn.choice((1, 3, 300, 17_000))
            peer.sock.sendall(cipher[:size])
            cipher = cipher[size:]
            while select.select([stream.fd], [], [], 0)[0]:  # some of a record may be read before the rest
                with suppress(BlockingIOError):
                    piece = stream.get(drawn.choice((1, 960, 1 << 16)))
                    assert piece
                    got += piece
        assert got == sent


def test_what_the_socket_does_not_take_leaves_later(pki: Pki, seed: int) -> None:
    """Each byte counts as gone once, when all of its ciphertext has gone."""
    drawn = random.Random(seed)
    pieces = [drawn.randbytes(drawn.choice((1, 100, 16_384, 16_385, 70_000))) for _ in range(20)]
    with shaken(pki, SO_SNDBUF=4096) as (stream, peer):
        gone = [stream.send(piece) for piece in pieces]
        assert sum(gone) + stream.unsent_bytes == sum(map(len, pieces)) and stream.unsent
        got = b""
        while len(got) < sum(map(len, pieces)):
            with pytest.raises(ssl.SSLWantReadError):
                while True:
                    got += peer.read()
            gone.append(stream.flush(drawn.choice((1, 20_000, 1 << 18))))
        assert got == b"".join(pieces) and sum(gone) == len(got) and not stream.unsent


def test_the_end_of_input_comes_with_a_farewell_or_without_it(pki: Pki) -> None:
    for farewell in (True, False):
        with shaken(pki) as (stream, peer):
            peer.sock.sendall(peer.ciphertext(b"one\r\ntw"))
            if farewell:
                peer.sock.sendall(peer.farewell() + b"no TLS")
            else:
                peer.sock.shutdown(socket.SHUT_WR)
            assert stream.get(1000) == b"one\r\ntw"
            assert [stream.get(1000) for _ in range(3)] == 3 * [b""], "as often as an owner asks"
            assert stream.put(b"OK\r\n") == 4, "the other direction is open"
            assert peer.read() == b"OK\r\n"
            stream.close()
            assert peer.read() == b""


def test_input_that_is_no_tls_ends_the_connection(pki: Pki) -> None:
    with shaken(pki) as (stream, peer):
        peer.sock.sendall(peer.ciphertext(b"stats\r\n")[:-1] + b"?")
        with pytest.raises(ssl.SSLError, match="DECRYPTION_FAILED"):
            stream.get(1000)
        with pytest.raises(ssl.SSLError, match="BAD_RECORD_MAC"):
            peer.read()


def test_a_client_hears_whether_it_has_got_everything(pki: Pki) -> None:
    with shaken(pki) as (stream, peer):
        stream.send(b"bye")
        stream.end_output()
        assert [peer.read(), peer.read()] == [b"bye", b""]
    with shaken(pki, SO_SNDBUF=4096) as (stream, peer):
        stream.send(bytes(100_000))
        assert stream.unsent
        stream.forget()
        stream.close()
        with pytest.raises(ssl.SSLError, match=r"(?i)eof"):
            while peer.read():
                pass


# A read that went on while it found messages of TLS alone would hold up all other clients, if one sent many of those.
def test_a_read_takes_a_bounded_piece_in(pki: Pki) -> None:
    with shaken(pki) as (stream, peer):
        cipher = b"".join(peer.ciphertext(b"x") for _ in range(2000))
        peer.sock.sendall(cipher)
        assert stream.get(960) and stream.get(1 << 20)
        left = array.array("i", [0])
        fcntl.ioctl(stream.fd, termios.FIONREAD, left)
        assert left[0] >= len(cipher) - 960 - RECORD_BYTES - 320


# The handshakes


@pytest.fixture
def connect() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    with ExitStack() as opened:

        def make() -> tuple[socket.socket, socket.socket]:
            ours, theirs = socket.socketpair()
            for sock in (ours, theirs):
                sock.setblocking(False)
                opened.enter_context(closing(sock))
            return ours, theirs

        yield make


def shake(peer: Peer, shakes: Any) -> Stream | None:
    """Shakes hands over the event loop. Returns what the server's end came to."""
    peer_done = False
    while not shakes.ready():
        if not peer_done and peer.shake():
            peer_done = True
            peer.sock.sendall(peer.ciphertext())
        gevent.sleep(0.001)
    stream: Stream | None = shakes.get()
    return stream


def test_connections_that_do_not_shake_hands_are_closed(
    pki: Pki,
    listener: Listener,
    connect: Callable[[], tuple[socket.socket, socket.socket]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Silent ones, slow ones, those that go away, and those that speak something else."""
    monkeypatch.setattr(shaking, "HANDSHAKE_S", 0.2)
    handshakes = Handshakes([tls_of(listener)], LOG)
    pairs = [connect() for _ in range(4)]
    runs = [gevent.spawn(handshakes.run, ours, listener) for ours, _ in pairs]
    gevent.sleep(0.01)
    assert handshakes.unfinished == 4
    _silent, slow, gone, plain = (theirs for _, theirs in pairs)
    gone.close()
    plain.sendall(b"stats\r\n" * 10)
    hello = Peer(connect()[0], pki.authority.context())
    hello.shake()
    sent = 0
    while not all(one.ready() for one in runs):
        if not runs[1].ready():
            sent += slow.send(b"\x16\x03\x01\x02\x00\x01"[sent : sent + 1] or b"\0")
        gevent.sleep(0.02)
    assert [one.get() for one in runs] == 4 * [None] and all(ours.fileno() < 0 for ours, _ in pairs)
    assert (handshakes.unfinished, handshakes.failed, handshakes.done) == (0, 4, 0)
    assert 2 < sent < 200, "each byte begins no new time"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "a TLS handshake failed: wrong version number; for a minute no other one is told of"


def test_the_newest_of_too_many_are_closed_at_once(
    pki: Pki, listener: Listener, connect: Callable[[], tuple[socket.socket, socket.socket]]
) -> None:
    handshakes = Handshakes([tls_of(listener)], LOG)
    handshakes.unfinished_max = 2
    pairs = [connect() for _ in range(3)]
    first, second = (gevent.spawn(handshakes.run, ours, listener) for ours, _ in pairs[:2])
    gevent.sleep(0)
    assert handshakes.run(pairs[2][0], listener) is None and pairs[2][0].fileno() < 0
    assert (handshakes.refused, handshakes.failed) == (1, 0)
    assert shake(Peer(pairs[0][1], pki.authority.context()), first)
    ours, theirs = connect()
    assert shake(Peer(theirs, pki.authority.context()), gevent.spawn(handshakes.run, ours, listener)), "there is room"
    assert (handshakes.unfinished, handshakes.done) == (1, 2)
    second.kill()


def test_handshakes_leave_the_event_loop_to_others(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are ready: a share of each pass of the event loop, and one step at least."""
    now_ns = [0]
    monkeypatch.setattr(shaking, "monotonic_ns", lambda: now_ns[0])
    handshakes = Handshakes([tls_of(listener)], LOG)
    passes: list[int] = [0]

    class Step:
        def __init__(self, takes_ns: int) -> None:
            self.takes_ns = takes_ns

        def go_on(self) -> None:
            now_ns[0] += self.takes_ns
            passes[-1] += 1

    steps: list[Any] = [Step(shaking.SHARE_NS // 2) for _ in range(4)] + [Step(5 * shaking.SHARE_NS)] * 2
    for step in steps:
        handshakes.queue(step)
    each_pass: Any = gevent.get_hub().loop.check()
    each_pass.start(passes.append, 0)
    with gevent.Timeout(30):
        while sum(passes) < len(steps):
            gevent.sleep(0.0001)
    each_pass.stop()
    each_pass.close()
    assert [count for count in passes if count] == [2, 2, 1, 1]


# The files


def test_files_that_are_no_certificate_or_key_are_refused(pki: Pki, tmp_path: Path) -> None:
    good, key = pki.server
    sealed, empty, open_key = tmp_path / "sealed.key", tmp_path / "empty", tmp_path / "open.key"
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes128", "-passout", "pass:secret", "-out", sealed], check=True, timeout=60
    )
    sealed.chmod(0o600)
    empty.write_bytes(b"")
    empty.chmod(0o600)
    open_key.write_bytes(key.read_bytes())
    none = tmp_path / "none"
    cases = [
        (Tls(str(none), str(key)), f"cannot read {none}: No such file or directory"),
        (Tls(str(tmp_path), str(key)), f"{tmp_path} is no file of a certificate or key"),
        (Tls("/dev/zero", str(key)), "/dev/zero is no file of a certificate or key"),
        (Tls(str(empty), str(key)), f"cannot use certificate {empty} with key {key}: "),
        (Tls(str(good), str(empty)), f"cannot use certificate {good} with key {empty}: "),
        (Tls(str(good), str(sealed)), f"cannot use certificate {good} with key {sealed}: "),
        (Tls(str(good), str(pki.client.key)), "key values mismatch"),
        (Tls(str(good), str(key), str(key)), f"cannot use {key} as authority of clients: "),
        (Tls(str(good), str(key), str(empty)), f"cannot use {empty} as authority of clients: "),
    ]
    for mode in (0o604, 0o602, 0o620):
        words = f"others can read or replace the key {open_key}: its mode is {mode:04o}; chmod 600 is fine"
        cases.append((Tls(str(good), str(open_key)), words))
    for files, words in cases:
        if files.key == str(open_key):
            open_key.chmod(int(words.partition(" mode is 0")[2][:3], 8))
        with pytest.raises(ConfigError) as caught:
            Certificate(files)
        assert words in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 5
    both = tmp_path / "both.pem"
    both.write_bytes(good.read_bytes() + key.read_bytes())
    both.chmod(0o604)
    with pytest.raises(ConfigError, match="others can read or replace the key"):
        Certificate(Tls(str(both), str(both)))
    both.chmod(0o640)
    assert Certificate(Tls(str(both), str(both))).context.verify_mode == ssl.CERT_NONE
    assert Certificate(Tls(str(both), str(both), str(good))).context.verify_mode == ssl.CERT_REQUIRED


def test_a_start_with_bad_files_is_refused_before_anything_listens(pki: Pki) -> None:
    port = free_port()
    words = ["-l", "127.0.0.1", "-p", "0", *pki.flags(port), "--tls-key", str(pki.client.key)]
    refused = f"cannot use certificate {pki.server.certificate} with key {pki.client.key}: key values mismatch"
    for more in ([], ["--check-config"]):
        code, out, err = run(*words, *more)
        assert (code, out, err) == (5, "", f"geventstalk: {refused}\n")
    code, out, err = run("-l", "127.0.0.1", "-p", "0", *pki.flags(port), "--check-config")
    assert (code, out, err) == (0, "geventstalk: configuration is fine\n", "")


# Servers


class Served:
    """A running server with TLS, and clients of it."""

    def __init__(self, server: ServerProcess, port: int, pki: Pki, log: Path) -> None:
        self.log = log
        self.server = server
        self.port = port
        self.pki = pki

    def connect(self, context: ssl.SSLContext | None = None, **options: Any) -> ssl.SSLSocket:
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            return (context or self.pki.authority.context()).wrap_socket(raw, server_hostname="127.0.0.1", **options)
        except BaseException:
            raw.close()
            raise

    @contextmanager
    def peer(self) -> Iterator[Peer]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as sock:
            peer = Peer(sock, self.pki.authority.context())
            while not peer.shake():
                assert select.select([sock], [], [], 30)[0], "silence"
            sock.sendall(peer.ciphertext())
            yield peer

    def trusts(self, authority: Authority) -> bool:
        """Returns whether a certificate of this authority is served."""
        try:
            self.connect(authority.context()).close()
        except ssl.SSLCertVerificationError:
            return False
        return True

    def refusal(self, context: ssl.SSLContext) -> str:
        """Returns what a client is told that may not come in; with TLS 1.3 it hears that behind its own handshake."""
        with pytest.raises(ssl.SSLError) as caught, self.connect(context) as sock:
            sock.recv(1)
        return str(caught.value.reason)

    def s_client(self, *words: str, says: Iterable[tuple[str, str]]) -> str:
        """Returns what `openssl s_client` printed. It gets each text once the words before it are printed."""
        printed = self.log.with_name("s_client")
        command = ["stdbuf", "-oL", "openssl", "s_client", "-connect", f"127.0.0.1:{self.port}"]
        command += ["-CAfile", str(self.pki.authority.trusted), "-verify_return_error", *words]
        with printed.open("w") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        assert process.stdin is not None
        try:
            for seen, text in says:
                until(partial(contains, printed, seen), f"s_client prints {seen}", 10)
                process.stdin.write(text)
                process.stdin.flush()
            process.wait(10)
        finally:
            process.kill()
            process.communicate()
        return printed.read_text()


def contains(file: Path, text: str) -> bool:
    return text in file.read_text()


@pytest.fixture
def serve(pki: Pki, start_server: Callable[..., ServerProcess], tmp_path: Path) -> Callable[..., Served]:
    def start(*flags: str, client_ca: bool = False) -> Served:
        port = free_port()
        server = start_server(*pki.flags(port, client_ca=client_ca), *flags, stderr=tmp_path / "log")
        return Served(server, port, pki, tmp_path / "log")

    return start


@pytest.mark.slow
def test_clients_of_each_version_are_served(serve: Callable[..., Served]) -> None:
    served = serve("--http", str(http := free_port()))
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = served.pki.authority.context()
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2", "beanstalk"])
        with Client(served.connect(context)) as client:
            job = client.put(b"hello")
            assert client.ask(b"reserve") == b"RESERVED %d 5\r\nhello\r\n" % job
            assert client.ask(b"delete %d" % job) == b"DELETED\r\n"
            assert isinstance(client.sock, ssl.SSLSocket)
            assert client.sock.selected_alpn_protocol() is None
            ticket = client.sock.session
        with Client(served.connect(context, session=ticket)) as client:
            client.sync()
            assert isinstance(client.sock, ssl.SSLSocket) and client.sock.session_reused
    old = served.pki.authority.context()
    with pytest.warns(DeprecationWarning):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    assert served.refusal(old) == "TLSV1_ALERT_PROTOCOL_VERSION"
    with Client(served.server.connect()) as client:
        assert client.ask(b"list-tube-used") == b"USING default\r\n", "beside TLS, the port without it"
        assert number(client, "total-connections") == 6, "the handshake that failed counts for nothing"
    page = urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics", timeout=30).read().decode()
    found = dict(re.findall(r'^geventstalk_tls_handshakes_(total\{result="\w+"\}|unfinished) (\S+)$', page, re.M))
    assert found == {
        'total{result="done"}': "4.0",
        'total{result="failed"}': "1.0",
        'total{result="refused"}': "0.0",
        "unfinished": "0.0",
    }


@pytest.mark.slow
def test_streams_are_as_without_tls(serve: Callable[..., Served], times: int) -> None:
    """Pipelines, a client that reads slowly, half-closed connections, cut ones, and large bodies."""
    served = serve("-z", "110000000")
    with Client(served.connect()) as client:
        assert len(burst(client, [b"put 0 0 60 1\r\nx\r\n"] * 3000)) == 3000
        assert len(burst(client, [b"reserve\r\n"] * 1500)) == 1500
        body = os.urandom(25_000_000 * times)
        big = client.put(body, pri=0)
        client.send(b"peek %d\r\n" % big)
        with Client(served.connect()) as other:
            before = number(other, "total-jobs")
            assert before == 3001, "a client that does not read holds no other up"
        assert client.reply() == b"FOUND %d %d\r\n%b\r\n" % (big, len(body), body)
    said = b"use half\r\nput 0 0 60 1\r\nh\r\nput 0 0 60 5\r\nhal"
    for id, farewell in ((before + 1, True), (before + 3, False)):  # half a put takes an id, too
        with served.peer() as peer:
            peer.sock.sendall(peer.ciphertext(said) + (peer.farewell() if farewell else b""))
            if not farewell:
                peer.sock.shutdown(socket.SHUT_WR)
            assert peer.read_all() == b"USING half\r\nINSERTED %d\r\n" % id
    with served.peer() as peer, Client(served.connect()) as other:
        peer.sock.sendall(peer.ciphertext(b"watch none\r\nignore default\r\nreserve\r\n"))
        until(lambda: number(other, "current-waiting") == 1, "the reserve waits")
        peer.sock.sendall(peer.farewell())
        assert peer.read_all() == b"WATCHING 2\r\nWATCHING 1\r\nTIMED_OUT\r\n"
        assert number(other, "current-jobs-ready", b"stats-tube half") == 2, "a half put is none"


@pytest.mark.slow
def test_only_clients_of_the_authority_come_in(serve: Callable[..., Served], pki: Pki) -> None:
    served = serve(client_ca=True)
    for own, reason in (
        (None, "TLSV13_ALERT_CERTIFICATE_REQUIRED"),
        (pki.expired, "SSLV3_ALERT_CERTIFICATE_EXPIRED"),
        (pki.unknown, "TLSV1_ALERT_UNKNOWN_CA"),
    ):
        assert served.refusal(pki.authority.context(own)) == reason
    with pytest.raises(ssl.SSLCertVerificationError):
        served.connect(pki.stranger.context(pki.client))
    trusted = pki.authority.context(pki.client)
    with LibraryClient(f"127.0.0.1:{served.port}", tls=trusted) as client:
        client.put(b"one")

    async def work() -> bytes:
        async with aio.Client(f"127.0.0.1:{served.port}", tls=trusted) as client:
            return (await client.reserve()).body

    assert asyncio.run(work()) == b"one"
    assert (served.log.read_text().count("a TLS handshake failed: "), served.server.stop()) == (1, 0)


NODE = """
const tls = require("tls"), fs = require("fs");
const [port, trusted] = process.argv.slice(1);
const client = tls.connect({port, host: "127.0.0.1", ca: fs.readFileSync(trusted)}, () => {
  client.write("put 0 0 60 200000\\r\\n" + "x".repeat(200000) + "\\r\\nreserve\\r\\n");
});
let seen = 0, version = "";
client.on("data", (data) => {
  version = client.getProtocol();
  seen += data.length;
  if (seen > 200000 + 30) client.end();
});
client.on("close", () => console.log(version, seen));
"""


@pytest.mark.slow
def test_node_finds_its_way_in(serve: Callable[..., Served], pki: Pki) -> None:
    if shutil.which("node") is None:
        missing("node is not installed")
    served = serve("-z", "200000")
    words = ["node", "-e", NODE, str(served.port), str(pki.authority.trusted)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    told = len(b"INSERTED 1\r\nRESERVED 1 200000\r\n") + 200_002
    assert done.stdout.split() == ["TLSv1.3", str(told)], done


@pytest.mark.slow
def test_a_client_without_tls_comes_through_stunnel(serve: Callable[..., Served], pki: Pki, tmp_path: Path) -> None:
    if shutil.which("stunnel4") is None:
        missing("stunnel is not installed")
    served, port = serve(client_ca=True), free_port()
    files = f"CAfile = {pki.authority.trusted}\ncert = {pki.client.certificate}\nkey = {pki.client.key}\n"
    ends = f"accept = 127.0.0.1:{port}\nconnect = 127.0.0.1:{served.port}\n"
    settings = tmp_path / "stunnel.conf"
    settings.write_text(f"foreground = yes\npid =\n[queue]\nclient = yes\nverifyChain = yes\n{files}{ends}")
    stunnel = subprocess.Popen(["stunnel4", str(settings)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(partial(listens, port), "stunnel listens")
        with LibraryClient(f"127.0.0.1:{port}") as client:
            ids = [client.put(bytes([number]) * 60_000) for number in range(20)]
            for number, id in enumerate(ids):
                job = client.reserve_with_timeout(5)
                assert (job.id, job.body) == (id, bytes([number]) * 60_000)
                client.delete(job.id)
    finally:
        stunnel.terminate()
        stunnel.wait(10)


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.mark.slow
def test_openssl_finds_its_way_in_and_has_no_other(serve: Callable[..., Served], pki: Pki) -> None:
    served = serve()
    quit = "list-tube-used\r\nquit\r\n"
    assert "USING default" in served.s_client("-tls1_2", says=[("Verify return code", quit)])
    new_keys = [("Verify return code", "K\n"), ("KEYUPDATE", quit)]
    assert "USING default" in served.s_client("-tls1_3", says=new_keys)
    renegotiates = [("Verify return code", "R\n"), ("RENEGOTIATING", "")]
    assert "no renegotiation" in served.s_client("-tls1_2", says=renegotiates)


@pytest.mark.slow
def test_many_silent_connections_keep_no_client_out(serve: Callable[..., Served]) -> None:
    """300 are enough for a change; the bound of 1,024 has its own test above."""
    served = serve("--io-processes", "1")
    with ExitStack() as opened:
        for _ in range(300):
            opened.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=30))
        with Client(served.connect()) as one, Client(served.server.connect()) as other:
            job = one.put(b"x")
            assert other.ask(b"reserve") == b"RESERVED %d 1\r\nx\r\n" % job, (
                "they share the jobs, behind a front or not"
            )
            assert number(other, "current-connections") == 2
        assert len(fronts_of(served.server)) == 1


# Bug: clients that began no handshake took all descriptors, and the port without TLS served no client for ten seconds.
@pytest.mark.slow
def test_unfinished_handshakes_leave_descriptors_to_others(pki: Pki, tmp_path: Path) -> None:
    port = free_port()
    with server_with(100, *pki.flags(port), tmp_path=tmp_path) as server, ExitStack() as opened:
        server.wait_ready()
        silent = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(120)]
        log = tmp_path / "log"
        until(lambda: contains(log, "cannot accept") or select.select(silent, [], [], 0)[0], "there are too many")
        begun_s = time.monotonic()
        with Client(server.connect()) as client:
            client.sync()
        assert time.monotonic() - begun_s < HANDSHAKE_S / 2, "not when the handshakes are given up"


@pytest.mark.slow
def test_files_are_read_again(serve: Callable[..., Served], pki: Pki, tmp_path: Path) -> None:
    """When they change, and on SIGHUP; new connections get what was read, and old ones go on."""
    mine = Pair(tmp_path / "mine.pem", tmp_path / "mine.key")

    def become(name: Pair) -> None:
        for source, target in zip(name, mine, strict=True):
            shutil.copy(source, tmp_path / "next")
            os.replace(tmp_path / "next", target)

    become(pki.server)
    served = serve("--tls-cert", str(mine.certificate), "--tls-key", str(mine.key))
    with Client(served.connect()) as old:
        become(pki.unknown)
        until(lambda: served.trusts(pki.stranger), "the files are read because they changed")
        mine.key.write_bytes(b"no key")
        served.server.process.send_signal(signal.SIGHUP)
        until(lambda: "what is in use stays" in served.log.read_text(), "the failure is told")
        assert served.trusts(pki.stranger)
        before = served.log.read_text().count("and its key again")
        become(pki.unknown)
        until(
            lambda: served.trusts(pki.stranger) and served.log.read_text().count("and its key again") > before, "again"
        )
        before = served.log.read_text().count("and its key again")
        served.server.process.send_signal(signal.SIGHUP)
        until(lambda: served.log.read_text().count("and its key again") > before, "SIGHUP reads what has not changed")
        old.sync()
    assert served.server.stop() == 0


@pytest.mark.slow
def test_a_stop_says_everything_and_farewell(serve: Callable[..., Served]) -> None:
    served = serve()
    with served.peer() as peer, served.peer() as late:
        peer.sock.sendall(peer.ciphertext(b"list-tube-used\r\n"))
        until(lambda: select.select([peer.sock], [], [], 0)[0], "the answer is there")
        assert served.server.stop() == 0
        assert peer.read_all() == b"USING default\r\n"
        assert late.read_all() == b""
