"""The client library: programs for threads, gevent and asyncio, with beanstalkd, our server, and broken ones."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from geventstalk.client import (
    BadFormat,
    BadReply,
    Buried,
    Client,
    ConnectionLost,
    DeadlineSoon,
    Draining,
    Forbidden,
    InternalError,
    Job,
    JobTooBig,
    NotFound,
    NotIgnored,
    TimedOut,
    Unauthorized,
    aio,
)
from geventstalk.client.protocol import Replies, Reply, delete, parse_list, parse_stats, put
from geventstalk.client.session import PIECE_BYTES, ClientSession, Connect, Probe, Receive, Send, parse_addresses
from tests.support import for_change
from tests.support.process import ROOT, ServerProcess

Starter = Callable[..., ServerProcess]
Program = Callable[[str], None]
BODY = b"\0\r\n" * 7_000_000


def lives_of_jobs(address: str) -> None:
    with Client(address, use="a", watch=["a"]) as client:
        id = client.put(BODY, priority=5, ttr=100)
        assert client.reserve() == Job(id, BODY)
        client.touch(id)
        client.release(id, priority=7)
        assert client.peek(id).body == client.peek_ready().body == BODY
        assert client.reserve_job(id).id == id
        client.bury(id)
        assert client.stats_job(id)["state"] == "buried"
        with pytest.raises(ValueError):
            client.bury(id, reason="a\nb")
        assert (client.peek_buried().id, client.kick(10), client.peek_ready().id) == (id, 1, id)
        client.delete(id)
        with pytest.raises(NotFound):
            client.delete(id)
        with pytest.raises(NotFound):
            client.peek_delayed()
        with pytest.raises(TimedOut):
            client.reserve_with_timeout(0)
        with pytest.raises(NotIgnored):
            client.ignore("a")
        with pytest.raises(JobTooBig):
            client.put(BODY + BODY)
        assert (client.use("007"), client.watch("007"), client.ignore("a")) == ("007", 2, 1)
        client.pause_tube("007", 0)
        client.kick_job(client.put("later", delay=1000))
        assert (client.list_tube_used(), client.list_tubes_watched()) == ("007", ["007"])
        assert client.stats_tube("007")["name"] == "007"
        assert (client.stats()["current-jobs-ready"], "007" in client.list_tubes()) == (1, True)


def pipelines(address: str) -> None:
    with Client(address) as client:
        with client.pipeline() as pipe:
            puts = [pipe.put(b"%d" % number) for number in range(10_000)]
            missing = pipe.delete(1 << 40)
            big = pipe.put(BODY)
            peeks = [pipe.peek_ready() for _ in range(1000)]
        assert len({put.get() for put in puts}) == 10_000
        assert {peek.get().body for peek in peeks} == {b"0"}
        with pytest.raises(NotFound):
            missing.get()
        assert client.delete_batch([big.get(), big.get()]) == 1
        jobs = client.reserve_batch(20_000)
        assert [job.body for job in jobs] == [b"%d" % number for number in range(10_000)]
        assert client.delete_batch([job.id for job in jobs]) == 10_000
        assert client.reserve_batch(2) == []


def with_asyncio(address: str) -> None:
    async def main() -> None:
        async with aio.Client(address, use="a", watch=["a"]) as client:
            id = await client.put(BODY)
            assert await client.reserve() == Job(id, BODY)
            await client.bury(id)
            assert (await client.stats_job(id))["state"] == "buried"
            assert await client.kick(1) == 1
            assert await client.delete_batch([id, id]) == 1
            with pytest.raises(NotFound):
                await client.delete(id)
            async with client.pipeline() as pipe:
                puts = [pipe.put(b"%d" % number) for number in range(10_000)]
            jobs = await client.reserve_batch(20_000)
            assert [job.id for job in jobs] == [put.get() for put in puts]
            assert await client.delete_batch([job.id for job in jobs]) == 10_000
            # Bug: asyncio.wait_for lost this cancellation, since the command was just written.
            waiting = asyncio.create_task(client.reserve_with_timeout(600))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError):
                await client.stats()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await client.list_tubes_watched() == ["a"]

    asyncio.run(main())


def with_gevent(address: str) -> None:
    program = (
        "from gevent import monkey; monkey.patch_all()\n"
        "import gevent, sys, tests.test_client_library as t\n"
        "waits = gevent.spawn(t.Client(sys.argv[1], watch=['w']).reserve)\n"
        "t.lives_of_jobs(sys.argv[1]); t.pipelines(sys.argv[1])\n"
        "t.Client(sys.argv[1], use='w').put(b'end')\n"
        "assert waits.get(timeout=60).body == b'end'\n"
    )
    subprocess.run([sys.executable, "-c", program, address], cwd=ROOT, timeout=120, check=True)


def with_threads(address: str) -> None:
    def work(bodies: list[bytes]) -> None:
        with Client(address) as client:
            while not bodies or bodies[-1] != b"end":
                job = client.reserve()
                client.delete(job.id)
                bodies.append(job.body)

    done: list[list[bytes]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=work, args=(bodies,)) for bodies in done]
    for thread in threads:
        thread.start()
    with Client(address) as client:
        for number in range(200):
            client.put(b"%d" % number)
        for _ in threads:
            client.put("end", priority=1 << 20)
        for thread in threads:
            thread.join(60)
    assert sorted(body for bodies in done for body in bodies) == sorted([b"%d" % n for n in range(200)] + [b"end"] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("program", [lives_of_jobs, pipelines, with_threads, with_gevent, with_asyncio])
@pytest.mark.parametrize("which", for_change(["start_beanstalkd", "start_server"], 1))
def test_a_program_with_a_server(request: pytest.FixtureRequest, which: str, program: Program) -> None:
    start: Starter = request.getfixturevalue(which)
    program(f"127.0.0.1:{start('-z', str(len(BODY) + 1)).port}")


# Servers that are broken


Talk = Callable[[socket.socket], None]


@contextmanager
def fake(*talks: Talk) -> Iterator[str]:
    """The address of a server that holds one talk with each connection, in turn, and then ends."""

    def serve() -> None:
        for talk in talks:
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(60)
                talk(peer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(60)
        assert not thread.is_alive()


def says(*turns: tuple[bytes, bytes], then: Talk | None = None) -> Talk:
    """Waits for the first of each pair, and answers the second."""

    def talk(peer: socket.socket) -> None:
        for wanted, answer in turns:
            got = b""
            while len(got) < len(wanted):
                data = peer.recv(len(wanted) - len(got))
                assert data, (got, wanted)
                got += data
            assert got == wanted
            peer.sendall(answer)
        if then is not None:
            then(peer)

    return talk


def until_the_end(peer: socket.socket) -> None:
    while peer.recv(1 << 16):
        pass


class Loop:
    """The asyncio client as a blocking one, so that the same test holds for both."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._runner = asyncio.new_event_loop()
        self._client = aio.Client(*args, **options)

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()
        self._runner.run_until_complete(asyncio.sleep(0))
        self._runner.close()

    def look(self) -> None:
        """Lets the loop see what the socket has."""
        assert self._client._streams is not None
        self._runner.run_until_complete(asyncio.wait_for(self._client._streams[0].read(1), 60))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **options: self._runner.run_until_complete(getattr(self._client, name)(*args, **options))


both = pytest.mark.parametrize("shell", [Client, Loop])


@both
@pytest.mark.parametrize("answer", [b"", b"INSERT", b"INSERTED 1"])
def test_a_put_whose_reply_does_not_come_is_not_repeated(shell: Any, answer: bytes) -> None:
    with fake(says((b"put 65536 0 60 1\r\nx\r\n", answer))) as address, shell(address) as client:
        with pytest.raises(ConnectionLost) as lost:
            client.put(b"x")
        assert lost.value.sent


@both
def test_a_server_that_stalls_is_given_up(shell: Any) -> None:
    with fake(says((b"delete 1\r\n", b"DEL"), then=until_the_end)) as address, shell(address, timeout=0.05) as client:
        with pytest.raises(ConnectionLost) as lost:
            client.delete(1)
        assert lost.value.sent


@both
@pytest.mark.parametrize(
    "answer",
    [
        b"\0" * 2000,
        b"HTTP/1.1 400 Bad\r\n",
        b"INSERTED\r\n",
        b"INSERTED 1\n",
        b"INSERTED x\r\n",
        b"OK -1\r\n",
        b"OK 1\r\nabc",
        b"OK 2147483649\r\n",
    ],
)
def test_garbage_closes_the_connection(shell: Any, answer: bytes) -> None:
    with fake(says((b"put 65536 0 60 1\r\nx\r\n", answer), then=until_the_end)) as address, shell(address) as client:
        with pytest.raises(BadReply) as bad:
            client.put(b"x")
        assert bad.value.sent


@both
def test_a_new_connection_uses_and_watches_what_the_last_one_did(shell: Any) -> None:
    begin = (b"use u\r\nwatch a\r\nignore default\r\n", b"USING u\r\nWATCHING 2\r\nWATCHING 1\r\n")
    again = (b"use v\r\nwatch b\r\nignore default\r\n", b"USING v\r\nWATCHING 2\r\nWATCHING 1\r\n")
    changes = [
        (b"use v\r\n", b"USING v\r\n"),
        (b"watch b\r\n", b"WATCHING 2\r\n"),
        (b"ignore a\r\n", b"WATCHING 1\r\n"),
        (b"reserve-with-timeout 9\r\n", b"RESERVED 1 4\r\nha"),
    ]
    first, second = says(begin, *changes), says(again, (changes[3][0], b"RESERVED 1 4\r\nhalf\r\n"))
    with fake(first, second) as address, shell(address, use="u", watch=["a"]) as client:
        client.use("v")
        client.watch("b")
        client.ignore("a")
        assert client.reserve_with_timeout(9) == Job(1, b"half")


OK_BATCHES = b"---\nfeatures: reserve-batch delete-batch\n"
HAS_BATCHES = (b"stats\r\n", b"OK %d\r\n%b\r\n" % (len(OK_BATCHES), OK_BATCHES))
HAS_NONE = (b"stats\r\n", b"OK 4\r\n---\n\r\n")


@both
def test_batches_are_those_of_the_server_where_it_has_some(shell: Any) -> None:
    ids = list(range(10**19, 10**19 + 1000))
    lines = [b"delete-batch " + b" ".join(b"%d" % id for id in part) + b"\r\n" for part in (ids[:700], ids[700:])]
    exchanges = (
        HAS_BATCHES,
        (b"reserve-batch 3 9\r\n", b"RESERVED_BATCH 2\r\nRESERVED 1 1\r\na\r\nRESERVED 7 2\r\nbc\r\n"),
        (b"reserve-batch 1\r\n", b"RESERVED_BATCH 0\r\n"),
        (b"reserve-batch 1000 9\r\n", b"RESERVED_BATCH 1\r\nRESERVED 8 0\r\n\r\n"),
        (b"reserve-batch 1000\r\n", b"DEADLINE_SOON\r\n"),
        (b"reserve-batch 2\r\n", b"DEADLINE_SOON\r\n"),
        (lines[0] + lines[1], b"DELETED_BATCH 700 0\r\nDELETED_BATCH 299 1\r\n"),
        (b"delete-batch 1\r\n", b"INTERNAL_ERROR\r\n"),
    )
    with fake(says(*exchanges)) as address, shell(address) as client:
        assert client.reserve_batch(3, 9) == [Job(1, b"a"), Job(7, b"bc")]
        assert client.reserve_batch(2000, 9) == [Job(8, b"")]
        with pytest.raises(DeadlineSoon):
            client.reserve_batch(2)
        assert all(len(line) <= 16384 for line in lines) and client.delete_batch(ids) == 999
        assert client.delete_batch([]) == 0
        with pytest.raises(InternalError):
            client.delete_batch([1])


@both
def test_batches_are_single_verbs_for_another_server(shell: Any) -> None:
    reserve = b"reserve-with-timeout 5\r\nreserve-with-timeout 0\r\n"
    first = says(
        HAS_NONE, (reserve, b"RESERVED 1 1\r\na\r\nTIMED_OUT\r\n"), (b"delete 1\r\ndelete 2\r\n", b"DELETED\r\n")
    )
    second = says(HAS_BATCHES, (b"delete-batch 1\r\n", b"DELETED_BATCH 0 1\r\n"))
    with fake(first, second) as address, shell(address) as client:
        assert client.reserve_batch(0) == []
        assert client.reserve_batch(2, 5) == [Job(1, b"a")]
        with pytest.raises(ConnectionLost):
            client.delete_batch([1, 2])
        assert client.delete_batch([1]) == 0, "the next server is asked again"


# Bug: later reserves of a large batch were sent again over a new connection, which does not hold the jobs of the first.
@pytest.mark.parametrize("batches", [True, False])
def test_a_batch_is_not_continued_over_a_new_connection(batches: bool) -> None:
    session = ClientSession(parse_addresses("127.0.0.1"), "default", ["default"], 5, 9, "")
    steps = session.reserve_batch(3000, 0, [])
    answers = [HAS_BATCHES[1] if batches else HAS_NONE[1]]
    if batches:
        answers.append(b"RESERVED_BATCH 1\r\nRESERVED 1 0\r\n\r\n")
    else:
        answers.append(b"RESERVED 1 0\r\n\r\n" * (PIECE_BYTES // len(b"reserve-with-timeout 0\r\n")))
    step: object = next(steps)
    while answers:
        step = steps.send(answers.pop(0) if isinstance(step, Receive) else b"")
    while not isinstance(step, Receive):
        step = steps.send(b"")
    with pytest.raises(ConnectionLost) as lost:
        steps.throw(ConnectionResetError())
    assert lost.value.sent


@both
@pytest.mark.parametrize(
    "answer",
    [b"RESERVED_BATCH\r\n", b"RESERVED_BATCH x\r\n", b"RESERVED_BATCH 10000\r\n", b"RESERVED_BATCH 1\r\nTIMED_OUT\r\n"],
)
def test_a_wrong_batch_closes_the_connection(shell: Any, answer: bytes) -> None:
    exchange = says(HAS_BATCHES, (b"reserve-batch 2\r\n", answer), then=until_the_end)
    with fake(exchange) as address, shell(address) as client, pytest.raises(BadReply):
        client.reserve_batch(2)


@both
def test_a_put_after_an_idle_connection_ended_goes_to_the_next_one(shell: Any) -> None:
    ended = threading.Event()
    put = (b"put 65536 0 60 1\r\nx\r\n", b"INSERTED 1\r\n")

    def end(peer: socket.socket) -> None:
        peer.close()
        ended.set()

    with fake(says(put, then=end), says(put)) as address, shell(address) as client:
        client.put(b"x")
        assert ended.wait(60)
        if shell is Loop:  # its loop has to see the end
            client.look()
        assert client.put(b"x") == 1


@both
def test_the_next_address_is_tried(shell: Any) -> None:
    with socket.socket() as taken, fake(says((b"kick 1\r\n", b"KICKED 1\r\n"))) as address:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        dead = f"127.0.0.1:{taken.getsockname()[1]}"
        with shell([dead, address]) as client:
            assert client.kick(1) == 1
        with shell(dead, attempts=2) as client, pytest.raises(ConnectionLost) as lost:
            client.kick(1)
        assert not lost.value.sent


def test_a_reserve_is_not_repeated_for_ever() -> None:
    request = (b"reserve-with-timeout 1\r\n", b"")
    with fake(says(request), says(request)) as address, Client(address, attempts=2) as client:
        with pytest.raises(ConnectionLost) as lost:
            client.reserve_with_timeout(1)
        assert lost.value.sent


def test_a_pipeline_that_is_cut_tells_what_is_known() -> None:
    with fake(says((b"delete 1\r\ndelete 2\r\n", b"DELETED\r\n"))) as address, Client(address) as client:
        pipe = client.pipeline()
        first, second, third = pipe.delete(1), pipe.delete(2), pipe.put(b"x" * 100_000)
        with pytest.raises(ConnectionLost):
            pipe.flush()
        first.get()
        for pending, sent in ((second, True), (third, False)):
            with pytest.raises(ConnectionLost) as lost:
                pending.get()
            assert lost.value.sent is sent


def test_tags_of_a_put(start_server: Starter) -> None:
    with Client(f"127.0.0.1:{start_server().port}") as client:
        first = client.put("x", tags="idp:k:60  grp:g")
        assert client.put("y", tags="idp:k") == first
        assert client.stats_group("g") == {
            "name": "g",
            "pending": 1,
            "buried": 0,
            "complete": "false",
            "waiting-jobs": 0,
        }
        with pytest.raises(NotFound):
            client.stats_group("other")
        for wrong in ("idp:\r\nquit", "note:\xfc", "note:\0"):
            with pytest.raises(ValueError, match="printable"):
                client.put("x", tags=wrong)
        with pytest.raises(BadFormat):
            client.put("delete 1", tags="idp:")
        assert client.peek(first).body == b"x"


def test_verbs_that_beanstalkd_does_not_have(start_server: Starter) -> None:
    with Client(f"127.0.0.1:{start_server().port}", watch=["default", "a"]) as client:
        first, second = client.put_in("a", "x", priority=7, tags="note:n"), client.put_in("a", "yy", delay=50)
        client.move(first, "b")
        client.reprioritize(second, 3)
        client.reprioritize(second, 3, 90)
        assert [(job["id"], job["pri"], job["size"]) for job in client.list_jobs("a", "delayed")] == [(second, 3, 2)]
        assert client.list_jobs("b", "ready", 5, first) == []
        with pytest.raises(NotFound):
            client.move(second + 1, "b")
        assert (client.flush_tube("a", "ready"), client.flush_tube("a"), client.flush_tube("none")) == (0, 1, 0)
        assert client.reserve_job(first).body == b"x"
        assert client.use("b") == "b" and client.peek_reserved().id == first
        assert client.watch("b", 5) == 3 and client.reserve_mode("weighted") == "weighted"
        client.drain()
        with pytest.raises(Draining):
            client.put("x")
        client.undrain()
        with pytest.raises(BadFormat):
            client.reserve_mode("fast")
        with pytest.raises(BadFormat):
            client.watch("b", 1001)


def test_a_token_comes_first_and_is_in_no_error() -> None:
    use = b"auth secret\r\nuse a\r\n", b"AUTHENTICATED\r\nUSING a\r\n"
    with (
        fake(says(use, (b"delete 1\r\n", b"FORBIDDEN\r\n"))) as address,
        Client(address, use="a", token="secret") as client,
        pytest.raises(Forbidden),
    ):
        client.delete(1)
    with (
        fake(says((use[0], b"UNAUTHORIZED\r\nUNAUTHORIZED\r\n"))) as address,
        Client(address, use="a", token="secret") as client,
        pytest.raises(Unauthorized) as refused,
    ):
        client.delete(1)
    assert "secret" not in str(refused.value)
    with pytest.raises(ValueError, match="a token is a word"):
        Client("127.0.0.1:1", token="a b")


def test_weights_and_the_mode_come_back_with_the_connection() -> None:
    said = (
        (b"watch a 5\r\n", b"WATCHING 2\r\n"),
        (b"watch default 2\r\n", b"WATCHING 2\r\n"),
        (b"reserve-mode weighted\r\n", b"USING weighted\r\n"),
    )
    again = b"watch default 2\r\nwatch a 5\r\nreserve-mode weighted\r\n"
    answers = b"WATCHING 1\r\nWATCHING 2\r\nUSING weighted\r\n"
    more = (again, answers), (b"stats-tube a\r\n", b"OK 4\r\n---\n\r\n")
    with fake(says(*said), says(*more)) as address, Client(address) as client:
        client.watch("a", 5)
        client.watch("default", 2)
        client.reserve_mode("weighted")
        assert client.stats_tube("a") == {}


def test_a_put_whose_key_stays_unique_is_sent_again() -> None:
    line = b"put 65536 0 60 1 idp:k:60\r\nx\r\n"
    with fake(says((line, b"")), says((line, b"INSERTED 5 READY\r\n"))) as address, Client(address) as client:
        assert client.put(b"x", tags="idp:k:60") == 5
    for tags in ("idp:k", "note:a"):
        line = b"put 65536 0 60 1 %b\r\nx\r\n" % tags.encode()
        with fake(says((line, b""))) as address, Client(address) as client, pytest.raises(ConnectionLost):
            client.put(b"x", tags=tags)


def test_a_buried_put_tells_the_id() -> None:
    with fake(says((b"put 65536 0 60 1\r\nx\r\n", b"BURIED 7\r\n"))) as address, Client(address) as client:
        with pytest.raises(Buried) as buried:
            client.put(b"x")
        assert buried.value.id == 7


@pytest.mark.parametrize("name", ["", "a b", "a\r\nquit", "-a", "x" * 201, "ü"])
def test_a_wrong_name_is_not_sent(name: str) -> None:
    with Client("127.0.0.1:1") as client:
        for verb in (client.use, client.watch, client.ignore, client.stats_tube):
            with pytest.raises(ValueError, match="no name of a tube"):
                verb(name)
        with pytest.raises(ValueError, match="negative"):
            client.delete(-1)


@pytest.mark.parametrize("address", ["", "h:0", "h:x", "[::1", "h:1:2", "h:65536", "a..b"])
def test_a_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="no address"):
        Client(address)


# The core


def test_replies_that_are_cut_anywhere_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    whole = [Reply([b"RESERVED", b"%d" % n, b"%d" % n], rng.randbytes(n)) for n in (0, 1, 2, 40, 3000)]
    whole += [Reply([b"OK", b"4"], b"\r\n\r\n"), Reply([b"DELETED"], b""), Reply([b"INSERTED", b"5"], b"")]
    for _ in range(100):
        rng.shuffle(whole)
        wire = b"".join(
            b" ".join(r.words) + b"\r\n" + (r.body + b"\r\n") * (len(r.words) > 1 and r.words[0] != b"INSERTED")
            for r in whole
        )
        replies, got, at = Replies(), [], 0
        longest = rng.choice((1, 3, 100, 5000))
        while at < len(wire):
            size = rng.randint(1, longest)
            replies.feed(wire[at : at + size])
            at += size
            while (reply := replies.next()) is not None:
                got.append(reply)
        assert got == whole
        assert replies.empty


def test_what_is_sent_without_a_reply_fits_into_the_buffers_or_is_one_command() -> None:
    commands = [delete(number) for number in range(5000)] + [put(b"x" * 100_000), put(b"y" * 20_000)] * 2
    session = ClientSession(parse_addresses("h"), "default", ["default"], 1.0, 1, "")
    outcomes: list[Any] = []
    steps = session.run(commands, outcomes)
    rounds: list[bytes] = []
    unread = data = b""
    with pytest.raises(StopIteration):
        while True:
            step = steps.send(data) if rounds or unread or data else next(steps)
            data = b""
            while isinstance(step, (Connect, Probe)):
                step = steps.send(b"")
            if isinstance(step, Send):
                unread += step.data
            else:
                rounds.append(unread)
                deletes, puts = unread.count(b"delete "), unread.count(b"put ")
                assert len(unread) <= PIECE_BYTES or (deletes, puts) == (0, 1)
                data = b"DELETED\r\n" * deletes + b"INSERTED 1\r\n" * puts
                unread = b""
    assert b"".join(rounds).count(b"delete ") == 5000
    assert outcomes == [None] * 5000 + [1] * 4


def test_statistics_of_old_and_new_servers_are_read() -> None:
    text = (
        b'---\nname: 007\ntube: "1.5"\nage: -3\nrusage-utime: 0.25\nversion: "1.13"\nos: #1 SMP: x\ndraining: false\n'
    )
    assert parse_stats(text) == {
        "name": "007",
        "tube": "1.5",
        "age": -3,
        "rusage-utime": 0.25,
        "version": "1.13",
        "os": "#1 SMP: x",
        "draining": "false",
    }
    assert parse_list(b'---\n- default\n- "007"\n') == ["default", "007"]


def test_the_standard_library_is_enough() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); before = set(sys.modules)\n"
        "import geventstalk.client.aio\n"
        "print(*sorted({n.split('.')[0] for n in set(sys.modules) - before} - sys.stdlib_module_names))\n"
        "print(*sorted(n for n in sys.modules if n.startswith('geventstalk')))"
    )
    command = [sys.executable, "-S", "-I", "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    parts = ["aio", "blocking", "errors", "protocol", "session"]
    ours = [
        "geventstalk",
        "geventstalk._version",
        "geventstalk.client",
        *(f"geventstalk.client.{part}" for part in parts),
    ]
    assert printed == ["geventstalk", " ".join(ours)]
