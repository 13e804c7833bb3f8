"""TLS between nodes: who is believed to be a node, what it tells of a client, and users of a standby."""

from __future__ import annotations

import json
import os
import pwd
import random
import shutil
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import gevent
import pytest
import yaml

from geventstalk.cluster.relay import ACCEPTED, Stranger, answer_to, ask, greet
from geventstalk.config import ConfigError, Settings, require_fitting
from geventstalk.config_listeners import Tls, listener
from geventstalk.rights import Access, Proof, User, hash_of
from geventstalk.serving import node_links
from geventstalk.serving.node_links import (
    PassedOn,
    StreamSocket,
    is_node,
    link_to_node,
    passed_on,
    take_client,
)
from geventstalk.serving.proxied import NoHeader, header_of, header_of_node
from geventstalk.serving.tls import Certificate, TlsStream
from geventstalk.serving.users import user_of
from geventstalk.stream import Stream
from tests.clients.programs import missing
from tests.support.clients import until
from tests.support.pki import Authority, Pair
from tests.support.postgres import Postgres, have_psycopg, new_schema
from tests.support.process import GEVENTSTALK, ServerProcess, free_port
from tests.support.web import Web
from tests.support.wire import Client, WireError

NODES = ("node-a", "node-b")
TOKEN, OF_BOSS = "t" * 43, "b" * 43
UNAUTHORIZED, FORBIDDEN, NOT_FOUND = b"UNAUTHORIZED\r\n", b"FORBIDDEN\r\n", b"NOT_FOUND\r\n"
PATIENCE_S = 30.0


# What a node tells


def reader_of(data: bytes) -> Callable[[int], bytes]:
    left = bytearray(data)

    def read(size: int) -> bytes:
        if len(left) < size:
            raise ConnectionResetError("closed")
        piece = bytes(left[:size])
        del left[:size]
        return piece

    return read


@pytest.mark.parametrize(
    ("peer", "told"),
    [
        ("203.0.113.7:4321", "203.0.113.7:4321"),
        ("[2001:db8::7]:4321", "[2001:db8::7]:4321"),
        ("[fe80::7%eth0]:4321", "[fe80::7]:4321"),
        ("process 7, user 0, group 0", ""),
        ("gone", ""),
    ],
)
def test_a_header_tells_of_a_client(peer: str, told: str) -> None:
    more = bytes(range(256)) * 200
    assert header_of_node(reader_of(header_of(peer, more))) == (told, more)
    with pytest.raises(NoHeader, match="too many"):
        header_of(peer, bytes(1 << 16))


def test_no_header_but_a_whole_one_is_taken(seed: int) -> None:
    draw = random.Random(seed)
    whole = header_of("203.0.113.7:4321", json.dumps(PassedOn(("token",), "x")._asdict()).encode())
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        cut = bytes(data[: draw.randint(0, len(data))]) if draw.random() < 0.3 else bytes(data)
        try:
            _, told = header_of_node(reader_of(cut))
            passed_on(told)
        except (NoHeader, ConnectionResetError):
            pass
    for wrong in (
        b"[]",
        b"null",
        b"{",
        b'{"identity": 1}',
        b"[" * 60_000,
        b'{"identity":["x"],"names":[],"peer":"","account":""}',
    ):
        with pytest.raises(NoHeader):
            passed_on(wrong)


def test_a_user_is_found_by_what_another_node_tells() -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    users = [
        User("c", Proof(certificate="shop"), {}),
        User("u", Proof(uid=os.getuid()), {}),
        User("a", Proof(networks=(ip_network("10.0.0.0/8"),)), {}),
    ]
    access, (ours, theirs) = Access(users), socket.socketpair()
    with ours, theirs:
        stream = Stream(ours)
        for identity, told, name in (
            ("certificate", PassedOn(names=("x", "shop")), "c"),
            ("certificate", PassedOn(names=("x",)), None),
            ("unix_user", PassedOn(account=me), "u"),
            ("unix_user", PassedOn(account="no such user"), None),
            ("unix_user", PassedOn(account="\0"), None),
            ("unix_user", PassedOn(), None),
            ("address", PassedOn(peer="10.1.2.3:4"), "a"),
            ("address", PassedOn(peer="11.1.2.3:4"), None),
            ("address", PassedOn(peer="gone"), None),
        ):
            stream.passed_on, stream.peer = told, told.peer
            entry = listener({"address": "unix:x"})._replace(identity=(identity,))
            user = user_of(entry, stream, access)
            assert (None if user is None else user.name) == name, told


# Connections between nodes


class Pki:
    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder, "authority")
        self.a, self.b, self.shop = (self.authority.certify(name) for name in (*NODES, "shop"))
        (folder / "strange").mkdir()
        self.expired = self.authority.certify("node-c", days=-1)
        self.stranger = Authority(folder / "strange", "stranger").certify("node-a")

    def certificate(self, pair: Pair) -> Certificate:
        return Certificate(Tls(str(pair.certificate), str(pair.key), str(self.authority.trusted), optional=True))


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    if shutil.which("openssl") is None:
        missing("openssl is not installed")
    return Pki(tmp_path_factory.mktemp("pki"))


def served(context: ssl.SSLContext, sock: socket.socket) -> TlsStream:
    """The stream of the node that was connected to, behind its handshake."""
    sock.setblocking(False)
    stream = TlsStream(sock, context)
    while stream.shake_hands():
        gevent.sleep(0.001)
    return stream


def linked(pki: Pki, own: Pair, other: Pair) -> tuple[StreamSocket, TlsStream]:
    """Both ends of a connection between two nodes with these certificates."""
    near, far = socket.socketpair()
    serving = gevent.spawn(served, pki.certificate(other).context, far)
    link = link_to_node(near, pki.certificate(own).outgoing, NODES, 10)
    return link, serving.get(timeout=10)


def test_a_node_knows_a_node(pki: Pki) -> None:
    link, stream = linked(pki, pki.a, pki.b)
    assert is_node(stream, NODES) and not is_node(stream, ()) and not is_node(stream, ("node-b",))
    hearing = gevent.spawn(take_client, StreamSocket(stream), lambda line: answer_to(line, "b.1"))
    greet(link, "b.1", 10)
    told = PassedOn(("certificate", "token"), "10.0.0.7:4", ("shop",), "ops")
    ask(link, header_of(told.peer, json.dumps(told._asdict()).encode()), ACCEPTED, 10)
    assert hearing.get(timeout=10) == told
    link.sendall(b"stats\r\n")
    assert StreamSocket(stream).recv(100) == b"stats\r\n"
    link.shutdown(socket.SHUT_WR)
    assert StreamSocket(stream).recv(100) == b""
    StreamSocket(stream).sendall(b"behind the end")
    assert link.recv(100) == b"behind the end"
    for each in (link, StreamSocket(stream)):
        each.close()


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("shop", "not that of a node"),
        ("stranger", "unable to get local issuer certificate"),
        ("expired", "certificate has expired"),
    ],
)
def test_another_certificate_is_no_node(pki: Pki, who: str, words: str) -> None:
    pair = {"shop": pki.shop, "stranger": pki.stranger, "expired": pki.expired}[who]
    near, far = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    serving = gevent.spawn(served, context, far)
    with pytest.raises(Stranger, match=words):  # which is logged
        link_to_node(near, pki.certificate(pki.a).outgoing, NODES, 10)
    serving.kill()
    far.close()


def test_a_node_hears_why_the_other_one_does_not_take_its_certificate(pki: Pki) -> None:
    near, far = socket.socketpair()
    serving = gevent.spawn(served, pki.certificate(pki.b).context, far)
    link = link_to_node(near, pki.certificate(pki.expired).outgoing, NODES, 10)
    with pytest.raises(Stranger, match="certificate expired"):  # with TLS 1.3 that comes behind the handshake
        greet(link, "b.1", 10)
    link.close()
    serving.kill()
    far.close()


def test_a_client_with_the_certificate_of_a_user_is_no_node(pki: Pki) -> None:
    near, far = socket.socketpair()
    serving = gevent.spawn(served, pki.certificate(pki.b).context, far)
    link = link_to_node(near, pki.certificate(pki.shop).outgoing, NODES, 10)
    stream = serving.get(timeout=10)
    assert not is_node(stream, NODES) and stream.names_of_peer() == ["shop"]
    link.close()
    stream.close()


def test_what_never_answers_is_given_up(pki: Pki) -> None:
    near, far = socket.socketpair()
    with far, pytest.raises(OSError, match="no handshake in time"):
        link_to_node(near, pki.certificate(pki.a).outgoing, NODES, 0.1)
    near, far = socket.socketpair()
    far.sendall(b"UNKNOWN_COMMAND\r\n")
    with far, pytest.raises(OSError):
        link_to_node(near, pki.certificate(pki.a).outgoing, NODES, 10)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (b"cluster-node " + b"0" * 49 + b"\r\n", "looks for another node"),
        (b"put 0 0 60 1\r\n" * 20, "looks for another node"),
        (b"", "not answer in time"),
    ],
    ids=["another node", "no node", "nothing"],
)
def test_what_greets_otherwise_is_not_heard(pki: Pki, monkeypatch: pytest.MonkeyPatch, says: bytes, words: str) -> None:
    monkeypatch.setattr(node_links, "PATIENCE_S", 0.2)
    link, stream = linked(pki, pki.a, pki.b)
    if says:
        link.sendall(says)
    with pytest.raises(OSError, match=words):
        take_client(StreamSocket(stream), lambda line: answer_to(line, "b.1"))
    link.close()
    stream.close()


def test_both_directions_go_on_while_the_other_is_full(pki: Pki, seed: int) -> None:
    """Each end sends more than fits under way before it reads, while another greenlet reads."""
    draw = random.Random(seed)
    link, stream = linked(pki, pki.a, pki.b)
    ends = [link, StreamSocket(stream)]
    sent = [draw.randbytes(3_000_000), draw.randbytes(2_000_000)]

    def send(end: StreamSocket, data: bytes) -> None:
        at = 0
        while at < len(data):
            size = draw.randint(1, 200_000)
            end.sendall(data[at : at + size])
            at += size
        end.shutdown(socket.SHUT_WR)

    def receive(end: StreamSocket) -> bytes:
        gevent.sleep(0.3)  # by then both ends wait for room
        got = bytearray()
        while data := end.recv(draw.randint(1, 100_000)):
            got += data
        return bytes(got)

    senders = [gevent.spawn(send, end, data) for end, data in zip(ends, sent, strict=True)]
    readers = [gevent.spawn(receive, end) for end in ends]
    for sender in senders:
        sender.get(timeout=30)
    assert [each.get(timeout=30) for each in readers] == [sent[1], sent[0]]
    for end in ends:
        end.close()


def test_a_peer_that_does_not_read_what_tls_has_to_say_is_closed(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    link, stream = linked(pki, pki.a, pki.b)
    monkeypatch.setattr(node_links, "_OWN_BYTES_MAX", -1)
    with pytest.raises(OSError, match="does not read what TLS has to say"):
        link.recv(1)
    link.close()
    stream.close()


# Settings


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"nodes": ["node-a"]}, "nodes is for a listener with tls and client_ca"),
        ({"nodes": ["node-a"], "tls": {"certificate": "c", "key": "k"}}, "nodes is for a listener with tls"),
        (
            {"nodes": ["node-a"], "proxy": "10.0.0.0/8", "tls": {"certificate": "c", "key": "k", "client_ca": "a"}},
            "and not through a proxy",
        ),
    ],
)
def test_entries_that_do_not_go_together(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        listener({"address": "127.0.0.1:1", **entry})


def test_nodes_and_a_shared_journal_need_each_other() -> None:
    tls = {"certificate": "c", "key": "k", "client_ca": "a"}
    one = listener({"address": "127.0.0.1:1", "tls": tls, "nodes": "node-a"})
    assert one.terms == "with TLS, for nodes"
    require_fitting(Settings(journal="postgresql://h/d", listeners=(one,)))
    with pytest.raises(ConfigError, match="for nodes that share a journal"):
        require_fitting(Settings(listeners=(one,)))
    with pytest.raises(ConfigError, match="need TLS between the nodes"):
        require_fitting(Settings(journal="postgresql://h/d", listeners=(one._replace(nodes=()),)))


# Whole nodes

needs_psycopg = pytest.mark.skipif(not have_psycopg(), reason="psycopg is not installed")


class Cluster:
    """Two nodes with the same users, each on listeners of its own."""

    def __init__(self, pki: Pki, url: str, folder: Path) -> None:
        self.pki = pki
        self.folder = folder
        self._url = url
        self._open: list[socket.socket] = []
        self.nodes: dict[str, ServerProcess] = {}
        self.ports: dict[str, int] = {}
        self.webs: dict[str, Web] = {}
        self.write_users({"shop", "mailer", "me", "near"})

    def write_users(self, names: set[str]) -> None:
        users = {
            "shop": {"certificate": "shop", "rights": {"orders": "put"}},
            "mailer": {"token": hash_of(TOKEN), "rights": {"mail": ["put", "work"]}},
            "me": {"unix_user": os.getuid(), "rights": {"*": "all"}},
            "near": {"address": "127.0.0.2/32", "rights": {"near": "all"}},
            "boss": {"token": hash_of(OF_BOSS), "rights": {"*": ["all", "operate"]}},
        }
        path = self.folder / "access.yaml"
        path.write_text(yaml.safe_dump({"users": {name: users[name] for name in names | {"boss"}}}))
        path.chmod(0o600)

    def start(self, name: str, *, nodes: tuple[str, ...] = NODES, waits: bool = True) -> ServerProcess:
        pair = {"a": self.pki.a, "b": self.pki.b}[name]
        port = self.ports[name] = free_port()
        files = {
            "certificate": str(pair.certificate),
            "key": str(pair.key),
            "client_ca": str(self.pki.authority.trusted),
        }
        listeners = [
            {
                "address": f"127.0.0.1:{port}",
                "tls": files,
                "identity": ["certificate", "address", "token"],
                "nodes": [*nodes],
            },
            {"address": f"unix:{self.folder}/{name}.sock", "identity": "unix_user"},
        ]
        settings = self.folder / f"{name}.yaml"
        settings.write_text(yaml.safe_dump({"listeners": listeners, "access": str(self.folder / "access.yaml")}))
        web = self.webs[name] = Web(free_port(), OF_BOSS)
        words = ["-b", self._url, "--node", name, "--lease", "1", "--config", str(settings), "--http", str(web.port)]
        node = self.nodes[name] = ServerProcess(GEVENTSTALK, words, stderr=self.folder / f"{name}.log")
        return node.wait_ready() if waits else node

    def over_tls(self, name: str, pair: Pair | None, source: str = "127.0.0.1") -> Client:
        sock = socket.create_connection(("127.0.0.1", self.ports[name]), PATIENCE_S, (source, 0))
        wrapped = self.pki.authority.context(pair).wrap_socket(sock, server_hostname="127.0.0.1")
        self._open.append(wrapped)
        return Client(wrapped)

    def unix(self, name: str) -> Client:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE_S)
        sock.connect(f"{self.folder}/{name}.sock")
        self._open.append(sock)
        return Client(sock)

    def plain(self, name: str) -> Client:
        self._open.append(self.nodes[name].connect())
        return Client(self._open[-1])

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        for sock in self._open:
            sock.close()
        for node in self.nodes.values():
            if node.process.poll() is None:
                node.process.kill()
                node.process.wait(PATIENCE_S)
            node.read_log()


@pytest.fixture
def cluster(pki: Pki, postgres_server: Postgres, tmp_path: Path) -> Iterator[Cluster]:
    from journal import make_shared_log

    url = f"{postgres_server.url}?schema={new_schema()}"
    make_shared_log(url)
    made = Cluster(pki, url, tmp_path)
    yield made
    made.close()


AUTH = b"auth %b" % TOKEN.encode()
PUTS = (b"put-in orders 0 0 60 1\r\nx", b"put-in mail 0 0 60 1\r\nx", b"put-in near 0 0 60 1\r\nx")


def may_put(client: Client, *first: bytes) -> list[bool]:
    """Into which of three tubes a client may put; the answers to its first lines are as they have to be."""
    assert [client.ask(line) for line in first] == [b"AUTHENTICATED\r\n"] * len(first)
    answers = [client.ask(put) for put in PUTS]
    assert all(answer == FORBIDDEN or answer.startswith(b"INSERTED ") for answer in answers), answers
    return [answer != FORBIDDEN for answer in answers]


@pytest.mark.slow
@needs_psycopg
def test_users_are_the_same_at_each_node(cluster: Cluster, pki: Pki) -> None:
    cluster.start("a")
    cluster.start("b")
    for _ in range(2):
        for name in cluster.nodes:
            assert may_put(cluster.over_tls(name, pki.shop)) == [True, False, False], "a certificate"
            assert may_put(cluster.over_tls(name, None), AUTH) == [False, True, False], "a token"
            assert may_put(cluster.over_tls(name, None, "127.0.0.2")) == [False, False, True], "an address"
            assert may_put(cluster.unix(name)) == [True, True, True], "a user of the host"
            assert may_put(cluster.plain(name)) == [True, True, True], "a listener for all"
            assert cluster.over_tls(name, None).ask(b"peek 1") == UNAUTHORIZED
        if len(cluster.nodes) == 2:
            cluster.nodes.pop("a").kill()  # the other one leads from now on, with those users
    large = bytes(2_000_000)
    assert cluster.unix("b").ask(b"put 0 0 60 %d\r\n%b" % (len(large), large)) == b"JOB_TOO_BIG\r\n"


@pytest.mark.slow
@needs_psycopg
def test_what_a_standby_passes_on_comes_as_it_was_sent(cluster: Cluster, seed: int) -> None:
    draw = random.Random(seed)
    cluster.start("a")
    cluster.start("b")
    client = cluster.over_tls("b", None)
    assert client.ask(AUTH) == b"AUTHENTICATED\r\n"
    bodies = [draw.randbytes(draw.choice((0, 1, 5_000, 65_000))) for _ in range(60)]
    client.send(
        b"use mail\r\nwatch mail\r\n" + b"".join(b"put 0 0 60 %d\r\n%b\r\n" % (len(each), each) for each in bodies)
    )
    assert [client.reply() for _ in range(2)] == [b"USING mail\r\n", b"WATCHING 2\r\n"]
    ids = [int(client.reply().split()[1]) for _ in bodies]
    client.send(b"reserve\r\n" * len(bodies))
    for id, body in zip(ids, bodies, strict=True):
        assert client.reply() == b"RESERVED %d %d\r\n%b\r\n" % (id, len(body), body)
    seen = [each["address"] for each in cluster.webs["a"].get("/connections")["connections"]]
    assert any(address.startswith("127.0.0.1:") for address in seen), "the address is that of the client"


@pytest.mark.slow
@needs_psycopg
def test_a_user_that_is_gone_is_hung_up_on_behind_a_standby(cluster: Cluster, pki: Pki) -> None:
    cluster.start("a")
    cluster.start("b")
    shop, boss = cluster.over_tls("b", pki.shop), cluster.unix("b")
    assert may_put(shop) == [True, False, False] and may_put(boss) == [True, True, True]
    cluster.write_users({"mailer", "me", "near"})
    os.kill(cluster.nodes["a"].pid, signal.SIGHUP)
    assert shop.at_end(), "the node that leads has read the users again"
    assert may_put(boss) == [True, True, True]


@pytest.mark.slow
@needs_psycopg
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_change_of_nodes_takes_nothing_that_was_acknowledged(cluster: Cluster, number: int) -> None:
    """Clients of the standby put one after the other while it takes over."""
    cluster.start("a")
    cluster.start("b")
    acknowledged: list[bytes] = []
    clients = [cluster.over_tls("b", None) for _ in range(5)]
    for client in clients:
        assert client.ask(AUTH) == b"AUTHENTICATED\r\n"
        client.send(b"".join(b"put-in mail 0 0 60 3\r\nabc\r\n" for _ in range(400)))
    quiet = cluster.over_tls("b", None)
    acknowledged += [clients[0].reply()]
    cluster.nodes["a"].process.send_signal(number)
    for client in clients:
        with suppress(OSError, WireError):
            while True:
                acknowledged.append(client.reply())
    assert quiet.ask(AUTH) == b"AUTHENTICATED\r\n", "who has sent nothing stays connected"
    assert all(reply.startswith(b"INSERTED ") for reply in acknowledged), acknowledged
    boss = cluster.unix("b")
    for reply in acknowledged:
        assert boss.ask(b"peek %b" % reply.split()[1]).startswith(b"FOUND "), reply
    cluster.nodes.pop("a")


@pytest.mark.slow
@needs_psycopg
def test_only_a_node_is_believed(cluster: Cluster, pki: Pki) -> None:
    """A client that tells of another client as nodes do stays who it is."""
    cluster.start("a")
    told = header_of("127.0.0.2:1", json.dumps(PassedOn(("unix_user",), "x", (), "root")._asdict()).encode())
    for pair in (None, pki.shop):
        client = cluster.over_tls("a", pair)
        client.send(told + b"\r\npeek 1\r\n")
        answers = b"".join(client.reply() for _ in range(2))
        assert b"CLUSTER" not in answers and b"FOUND" not in answers
    node = cluster.over_tls("a", pki.b)
    node.send(b"cluster-node " + b"0" * 49 + b"\r\n")
    assert node.at_end(), "a node that looks for another process"
    assert "closed a connection of the node at 127.0.0.1:" in cluster.log("a")


@pytest.mark.slow
@needs_psycopg
def test_a_node_that_is_not_named_relays_no_client(cluster: Cluster) -> None:
    cluster.start("a", nodes=("node-a",))
    cluster.start("b", waits=False)
    until(lambda: "listening on" in cluster.log("b"), "b has begun")
    cluster.plain("b").send(PUTS[0] + b"\r\n")
    until(lambda: "another process answers than the node that leads" in cluster.log("b"), "b says why")
    assert cluster.plain("a").ask(b"peek 1") == NOT_FOUND
