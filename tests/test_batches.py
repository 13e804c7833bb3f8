"""Batches: what a slice of one may do, what a reply may weigh, bodies on disk, and what is lost on the way.

The bytes of each verb and of each mistake are in transcripts/batch-*.txt.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.test_bodies as bodies
from geventstalk.wire import protocol as p
from geventstalk.wire.batches import BATCH_BYTES_MAX
from geventstalk.wire.commands import LARGE_BODY
from geventstalk.wire.session import MOVE_SLICE, OUT_BYTES_MAX
from geventstalk.wire.verbs import ADDED
from tests.support.check import check
from tests.support.clock import SECOND
from tests.support.forgetful import Forgetful
from tests.support.process import GEVENTSTALK, ServerProcess
from tests.support.wire import Client, read_transcript
from tests.test_bodies import needs_pure, reserved
from tests.test_session import Rig, all_of, played, whole

JOBS = 1000


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    check(rig.engine)


def put(count: int, size: int = 1, more: bytes = b"0 0 60") -> bytes:
    return (b"put %b %d\r\n" % (more, size) + b"x" * size + b"\r\n") * count


def ids(first: int, last: int) -> bytes:
    return b"".join(b" %d" % id for id in range(first, last + 1))


def counted(reply: bytes) -> tuple[int, list[int]]:
    """Returns the number of jobs that a reserve-batch announces, and the ids that follow."""
    head, _, rest = reply.partition(b"\r\n")
    found = []
    while rest:
        line, _, rest = rest.partition(b"\r\n")
        word, id, size = line.split()
        assert word == b"RESERVED" and rest[int(size) : int(size) + 2] == b"\r\n"
        found.append(int(id))
        rest = rest[int(size) + 2 :]
    assert head.split()[0] == b"RESERVED_BATCH"
    return int(head.split()[1]), found


@pytest.mark.parametrize(
    "verb", [b"delete-batch", b"release-batch 7 0", b"release-batch 7 9", b"bury-batch 7", b"touch-batch"]
)
def test_a_batch_of_ids_gives_others_a_turn(rig: Rig, verb: bytes) -> None:
    session = rig.connect()
    rig.feed(session, put(JOBS))
    assert counted(rig.feed(session, b"reserve-batch %d\r\n" % JOBS)) == (JOBS, [*range(1, JOBS + 1)])
    slices = 1
    session.receive(verb + ids(1, JOBS) + b"\r\n", rig.clock.ns)
    while session.unfinished:
        assert rig.engine.work <= MOVE_SLICE and not session.out
        session.run(rig.clock.ns)
        slices += 1
    assert slices == JOBS // MOVE_SLICE
    done = {b"delete-batch": b"DELETED", b"touch-batch": b"TOUCHED", b"bury-batch 7": b"BURIED"}.get(verb, b"RELEASED")
    assert all_of(session) == b"%b_BATCH %d 0\r\n" % (done, JOBS)


def test_a_reserve_of_many_gives_others_a_turn(rig: Rig) -> None:
    session, other = rig.connect(), rig.connect()
    rig.feed(other, put(JOBS))
    session.receive(b"reserve-batch %d\r\n" % JOBS, rig.clock.ns)
    assert session.unfinished and not session.out and rig.engine.work <= MOVE_SLICE
    assert rig.feed(other, b"delete 1\r\ndelete %d\r\n" % JOBS) == b"NOT_FOUND\r\nDELETED\r\n"
    assert counted(rig.finish(session)) == (JOBS - 1, [*range(1, JOBS)])


def test_what_is_lost_between_two_slices_is_not_counted(rig: Rig) -> None:
    """A ttr that ends, and a job that an operator deletes; the others begin their ttr with the reply."""
    session, other = rig.connect(), rig.connect()
    rig.feed(other, put(1, more=b"0 0 1") + put(JOBS, more=b"0 0 2"))
    session.receive(b"reserve-batch %d\r\n" % JOBS, rig.clock.ns)
    rig.advance(SECOND + 1)
    assert rig.feed(other, b"reserve-job 1\r\n").startswith(b"RESERVED 1 "), "its ttr has ended"
    rig.engine.delete(session, 2, rig.clock.ns)
    count, found = counted(rig.finish(session))
    assert (count, found) == (JOBS - 2, [*range(3, JOBS + 1)])
    rig.advance(SECOND)
    assert rig.feed(session, b"touch-batch 3 4 %d\r\n" % JOBS) == b"TOUCHED_BATCH 3 0\r\n"


def test_a_job_that_comes_back_within_the_batch_is_in_it_once(rig: Rig) -> None:
    session = rig.connect()
    rig.feed(session, put(300, more=b"0 0 1"))
    session.receive(b"reserve-batch 500\r\n", rig.clock.ns)
    rig.advance(SECOND + 1)
    count, found = counted(rig.finish(session))
    assert count == len(found) == len(set(found)) == 300


@pytest.mark.parametrize("size", [100, 5_000, LARGE_BODY, 60_000])
def test_a_reply_has_a_bound(rig: Rig, size: int) -> None:
    """A client that does not read costs no more memory than one reply; fewer jobs than asked for is no fault."""
    session = rig.connect()
    rig.service.max_job_bytes = 1 << 16
    rig.feed(session, put(300, size))
    session.receive(b"reserve-batch 1000\r\n" * 5, rig.clock.ns)
    while session.unfinished and session.out_bytes < OUT_BYTES_MAX:
        session.run(rig.clock.ns)
    assert session.out_bytes <= BATCH_BYTES_MAX + size + 100 * 300
    rig.service.out_bytes_max = 1 << 12
    all_of(session)
    rig.feed(session, b"release-batch 0 0%b\r\n" % ids(1, 300))
    count, found = counted(rig.feed(session, b"reserve-batch 1000\r\n").partition(b"TIMED_OUT")[0])
    least = BATCH_BYTES_MAX // OUT_BYTES_MAX << 12
    assert 1 <= count == len(found) <= max(1, least // size + 1), "while all replies together are too many"


def test_a_job_that_is_larger_than_the_bound_comes_alone(rig: Rig) -> None:
    session = rig.connect()
    rig.service.max_job_bytes = 1 << 22
    rig.feed(session, put(2, BATCH_BYTES_MAX + 1))
    assert counted(rig.feed(session, b"reserve-batch 2\r\n")) == (1, [1])


def test_a_long_line_costs_no_more_than_itself(rig: Rig) -> None:
    session = rig.connect()
    for piece in (b"delete-batch ", *[b"1 " * 700] * 12):
        assert rig.feed(session, piece) == b""
        assert session.pending_bytes < p.BATCH_LINE_BYTES_MAX
    for _ in range(20):
        assert rig.feed(session, b"1 " * 700) == b""
        assert session.pending_bytes <= 1
    assert rig.feed(session, b"1\r\nlist-tube-used\r\n") == b"BAD_FORMAT\r\nUSING default\r\n"
    for other in (b"delete ", b"delete-batchX ", b"reserve-batch ", b"delete-batch\t"):
        rig.feed(session, other + b"1" * 224)
        assert session.pending_bytes <= 1, "other lines are as long as ever"
        rig.feed(session, b"\r\n")


def test_a_client_that_goes_while_it_waits_leaves_nothing(rig: Rig) -> None:
    session, other = rig.connect(), rig.connect()
    rig.feed(session, b"reserve-batch 3 10\r\n")
    rig.leave(session)
    assert rig.feed(other, put(2) + b"reserve-batch 3 10\r\n")[-60:].count(b"RESERVED ") == 2
    assert not rig.engine.waiting_count


@needs_pure
def test_what_memory_does_not_suffice_for_is_not_half_done(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    session = rig.connect()
    rig.feed(session, put(3))

    def fails(id: int, body: bytes) -> bytes:
        raise MemoryError

    monkeypatch.setattr(p, "reserved", fails)
    assert rig.feed(session, b"reserve-batch 3\r\n") == b"OUT_OF_MEMORY\r\n"
    monkeypatch.undo()
    check(rig.engine)
    rig.leave(session)
    assert counted(rig.feed(rig.connect(), b"reserve-batch 3\r\n"))[0] == 3


# --- bodies that are not in memory


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[bodies.Rig]:
    """200 jobs of which the first ones have left memory."""
    rig = bodies.Rig(tmp_path / "journal", Forgetful(10_000))
    rig.fill(rig.client(), 200)
    assert rig.forget() > 125
    yield rig
    check(rig.engine)
    assert rig.bodies is not None and not rig.bodies._pins
    rig.close()


def test_a_batch_ends_with_the_first_body_that_has_to_be_read(forgetful: bodies.Rig) -> None:
    rig, wire = forgetful, forgetful.client()
    assert rig.bodies is not None
    rig.bodies.max_bytes = 1 << 18
    assert rig.tell(wire, b"reserve-batch 50\r\nuse x\r\n") == b""
    rig.fetch()
    assert wire.take() == b"RESERVED_BATCH 1\r\n" + reserved(1) + b"USING x\r\n"
    count, found = counted(rig.tell(wire, b"reserve-batch 50\r\n"))
    assert count > 1 and found == [*range(2, 2 + count)], "those that came ahead"


@pytest.mark.parametrize("goes", [False, True])
def test_bodies_of_a_batch_stay_until_it_is_told_or_its_client_goes(forgetful: bodies.Rig, goes: bool) -> None:
    rig, wire = forgetful, forgetful.client()
    assert rig.bodies is not None
    rig.bodies.max_bytes = 1 << 18
    rig.tell(wire, b"reserve-batch 50\r\n")
    rig.fetch()
    wire.take()
    rig.bodies.max_bytes = 1 << 20
    assert rig.tell(wire, b"reserve-batch 1000\r\n") == b""
    taken = len(wire.session.reserved)
    assert taken > 5 and rig.forget() > 125
    assert rig.bodies._pins
    if goes:
        rig.turn.leave(wire)
        rig.turn.end()
        assert not rig.bodies._pins and len(rig.engine.default.ready) == 200
        return
    rig.fetch()
    assert counted(wire.take()) == (taken - 1, [*range(2, taken + 1)])


@pytest.mark.parametrize("how", ["expired", "deleted", "gone"])
def test_a_reservation_ends_while_its_body_is_read(forgetful: bodies.Rig, how: str) -> None:
    rig, wire, other = forgetful, forgetful.client(), forgetful.client()
    rig.tell(wire, b"reserve-batch 2\r\n")
    if how == "expired":
        rig.clock.pass_s(101)
        rig.turn.advance()
        rig.fetch()
        assert wire.take() == b"RESERVED_BATCH 0\r\n"
    elif how == "deleted":
        rig.engine.force_delete(1, rig.clock.ns)
        rig.turn.let_awaiting_go_on()
        rig.turn.end()
        rig.turn.step(wire, b"")
        rig.turn.end()
        assert wire.take() == b"RESERVED_BATCH 0\r\n"
    else:
        rig.turn.leave(wire)
        rig.turn.end()
    assert rig.tell(other, b"stats-job 2\r\n").count(b"state: ready") == 1


# --- the page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "protocol.md"
EXAMPLES = re.findall(r"\n##+ ([^\n]+)\n(?:(?!\n##).)*?```transcript\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(("title", "example"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_the_examples_of_the_page_are_true(title: str, example: str) -> None:
    played(read_transcript(title.replace(" ", "-"), example), whole)


def test_the_page_has_an_example_of_each_verb() -> None:
    lines = "".join(example for _, example in EXAMPLES)
    page = PAGE.read_text()
    for verb in ADDED:
        words = verb.words.decode()
        assert f"> {words}" in lines and f"\n{words}" in page, words


# --- what is promised


@pytest.mark.slow
def test_a_batch_that_was_answered_survives_a_kill(tmp_path: Path) -> None:
    """Each reply stands for a fsync: what was deleted stays deleted, what was buried or released is as it was told."""
    flags = ["-b", str(tmp_path / "journal"), "-f0", "-s", "100000"]
    server = ServerProcess(GEVENTSTALK, flags).wait_ready()
    with Client(server.connect()) as client:
        client.send(put(1000, 50))
        assert {client.reply().split()[0] for _ in range(1000)} == {b"INSERTED"}
        assert client.ask(b"reserve-batch 1000") == b"RESERVED_BATCH 1000\r\n"
        assert {client.reply().split()[0] for _ in range(1000)} == {b"RESERVED"}
        assert client.ask(b"delete-batch" + ids(1, 600)) == b"DELETED_BATCH 600 0\r\n"
        assert client.ask(b"bury-batch 3" + ids(601, 700)) == b"BURIED_BATCH 100 0\r\n"
        assert client.ask(b"release-batch 9 1000" + ids(701, 710)) == b"RELEASED_BATCH 10 0\r\n"
        server.process.send_signal(signal.SIGKILL)
    server.kill()
    server = ServerProcess(GEVENTSTALK, flags).wait_ready()
    try:
        with Client(server.connect()) as client:
            stats = client.stats(b"stats-tube default")
            assert [stats[f"current-jobs-{state}"] for state in ("ready", "delayed", "buried")] == ["290", "10", "100"]
            assert client.stats(b"stats-job 650")["pri"] == "3" and client.stats(b"stats-job 705")["pri"] == "9"
            assert client.ask(b"delete-batch" + ids(1, 601)) == b"DELETED_BATCH 1 600\r\n"
    finally:
        server.stop()
