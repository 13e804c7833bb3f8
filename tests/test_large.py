"""Large bodies, from the session to the journal and back: written in parts, so that no other client waits for them.

Sessions, engine, store and journal are the real ones. Each step stands for a turn of the server: what it appended is
counted, because a slice is to take about a millisecond whatever the body is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from geventstalk.core.engine import OUT_OF_MEMORY, UNFINISHED
from geventstalk.core.job import BURIED, Job, held_body
from geventstalk.core.operate import DONE, KEEP, NOT_FOUND, Operate
from geventstalk.durable.large import LARGE_BYTES
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from geventstalk.wire.session import Service, Session
from journal import Journal, make_shared_log
from tests.support.check import check
from tests.support.clients import until
from tests.support.clock import SECOND, ManualClock
from tests.support.faults import wants_compaction

PART_BYTES_MAX = 1 << 19
"""This many bytes are appended within a millisecond or two."""
STEPS_MAX = 10_000
BODY = random.Random(1).randbytes(3 * LARGE_BYTES + 12345)


class Counted(Journal):
    """A journal that notes what it was asked to admit, and admits nothing when it is told so."""

    full = False

    def __init__(self, directory: str, **options: Any) -> None:
        super().__init__(directory, **options)
        self.asked: list[int] = []

    def admits(self, size: int) -> bool:
        self.asked.append(size)
        return not self.full and super().admits(size)


def counted(place: Path | str, **options: Any) -> Any:
    """The same of either kind: a path is a directory, a text is a database."""
    if isinstance(place, Path):
        return Counted(str(place), **options)
    from tests.support.shared_log import Pumped

    class CountedRows(Pumped):
        full = False

        def __init__(self, url: str, **options: Any) -> None:
            super().__init__(url, **options)
            self.asked: list[int] = []
            self.open()

        def admits(self, size: int) -> bool:
            self.asked.append(size)
            return not self.full and super().admits(size)

    return CountedRows(place, **options)


class Rig:
    """A server without sockets and greenlets over a journal, one step a turn."""

    def __init__(self, place: Path | str, **options: Any) -> None:
        self.clock = ManualClock()
        self.place = place
        if isinstance(place, str):
            make_shared_log(place)
        self.journal = counted(place, segment_bytes=1 << 16, **options)
        self.store = Store(self.journal, 50, ClockOffset(1_700_000_000 * SECOND, self.clock.ns))
        self.engine = Operate(self.clock.ns)
        for job, name in self.store.replay(self.engine.jobs):
            self.engine.restore(job, name, self.clock.ns)
        self.engine.next_id = self.store.start(self._find)
        self.engine.ledger = self.store
        self.service = Service(self.engine, 1 << 30, dict)
        self.most_bytes = 0  # what was appended in one turn, at the most

    def _find(self, id: int) -> tuple[Job, bytes] | None:
        job = self.engine.jobs.get(id)
        return None if job is None else (job, self.engine.tube_of(job).name)

    def commit(self) -> None:
        self.most_bytes = max(self.most_bytes, sum(len(row[2]) for row in self.journal._batch))
        self.store.commit(self.clock.ns)
        if self.store.behind:
            wants_compaction(self.store)
            self.store.catch_up(self.clock.ns)

    def say(self, session: Session, data: bytes) -> bytes:
        """Returns what is answered in this turn."""
        session.receive(data, self.clock.ns)
        self.commit()
        return replies(session)

    def go_on(self, session: Session, until: Callable[[], bool] | None = None) -> bytes:
        """Lets a session go on, turn by turn."""
        out = replies(session)
        for _ in range(STEPS_MAX):
            if not session.unfinished or (until is not None and until()):
                return out
            session.run(self.clock.ns)
            self.commit()
            out += replies(session)
        raise AssertionError("the session does not come to an end")

    def put(self, session: Session, body: bytes, head: bytes = b"put 0 0 60 %d\r\n") -> bytes:
        return self.say(session, head % len(body) + body + b"\r\n") + self.go_on(session)

    def alter(self, id: int, tube: bytes = b"", ttr_s: int = KEEP) -> int:
        """One slice, and the commit."""
        outcome = self.engine.alter(id, KEEP, KEEP, ttr_s, tube, self.clock.ns)
        self.commit()
        return outcome

    def begin_to_alter(self, id: int, tube: bytes) -> None:
        """Until the journal has a part of it: a journal that is behind comes first."""
        for _ in range(STEPS_MAX):
            assert self.alter(id, tube) == UNFINISHED
            job = self.engine.jobs.get(id)
            assert job is not None
            if self.store.has_begun(job):
                return
        raise AssertionError("it never begins")

    def alter_wholly(self, id: int, tube: bytes = b"", ttr_s: int = KEEP, outcome: int = DONE) -> int:
        """All slices, with this outcome. Returns how many there were."""
        for slices in range(1, STEPS_MAX):
            found = self.alter(id, tube, ttr_s)
            if found != UNFINISHED:
                assert found == outcome
                return slices
        raise AssertionError("it does not come to an end")

    def seen(self, id: int) -> tuple[bytes, int, bytes]:
        """Tube, ttr and body of a job."""
        job = self.engine.jobs.get(id)
        assert job is not None
        return self.engine.tube_of(job).name, job.ttr_s, held_body(job)[:-2]

    def compact(self, turn: Callable[[], None] = lambda: None) -> None:
        """Compacts to the end. `turn` is called behind each slice."""
        for _ in range(STEPS_MAX):
            if wants_compaction(self.store):
                self.store.compact_slice(self.clock.ns)
                turn()
                self.commit()
            elif not self.store.settling:
                return
            else:
                time.sleep(0.001)
        raise AssertionError("compaction does not come to an end")

    def begin_anew(self) -> None:
        """A start over what is there."""
        self.__dict__.update(Rig(self.place).__dict__)

    def kill(self) -> None:
        """As kill -9, and a start. In a database only what was waited for is there for sure."""
        if isinstance(self.place, str) and (point := self.store.sync_point()) is not None:
            point.run()
        self.store.abandon()
        self.begin_anew()

    def lack_room(self, lacking: bool) -> None:
        """The disk is full, or not any more."""
        if isinstance(self.place, str):
            self.journal._writer.full = lacking
        else:
            self.journal._space.tight = lacking

    def settle(self) -> None:
        """Lets the journal's own work come to an end; compacts nothing."""
        for _ in range(STEPS_MAX):
            if wants_compaction(self.store) or not self.store.settling:
                return
            time.sleep(0.001)
        raise AssertionError("the journal's work does not come to an end")

    def close(self) -> None:
        check(self.engine)
        self.store.close()


def replies(session: Session) -> bytes:
    out = b""
    while session.out:
        out += session.take_out()
    return out


@pytest.fixture(params=["sqlite", "postgres"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(request.getfixturevalue("postgres_url") if request.param == "postgres" else tmp_path / "journal")
    yield made
    made.close()


def reopened(rig: Rig, tmp_path: Path) -> Rig:
    """The rig after a clean end and a start; the old one may be closed again."""
    rig.store.close()
    rig.begin_anew()
    return rig


def body_of(rig: Rig, id: int) -> bytes | None:
    job = rig.engine.jobs.get(id)
    return None if job is None else held_body(job)[:-2]


# Bug: A body of 150 MB held up all clients for a second, and took 3.4 times its size in memory.
def test_a_large_put_is_written_in_slices(rig: Rig, tmp_path: Path) -> None:
    client, other = Session(rig.service), Session(rig.service)
    assert rig.say(client, b"put 7 0 60 %d\r\n" % len(BODY) + BODY + b"\r\n") == b""
    assert client.unfinished, "the put goes on in the next turn"
    turns = 0
    while not client.out:
        assert rig.say(other, b"peek 1\r\nreserve-job 1\r\n") == b"NOT_FOUND\r\nNOT_FOUND\r\n"
        assert rig.put(other, b"small").startswith(b"INSERTED")
        client.run(rig.clock.ns)
        rig.commit()
        turns += 1
    assert replies(client) == b"INSERTED 1\r\n"
    assert turns > 5 and rig.most_bytes <= PART_BYTES_MAX
    reopened(rig, tmp_path)
    assert body_of(rig, 1) == BODY and len(rig.engine.jobs) == turns + 1


def test_a_large_put_with_a_delay_is_found_as_it_was(rig: Rig, tmp_path: Path) -> None:
    client = Session(rig.service)
    assert rig.put(client, BODY, b"put 5 1000 60 %d\r\n") == b"INSERTED 1\r\n"
    reopened(rig, tmp_path)
    job = rig.engine.jobs.get(1)
    assert job is not None and (job.pri, job.delay_s, job.ttr_s) == (5, 1000, 60) and body_of(rig, 1) == BODY
    assert job.rank == rig.clock.ns + 1000 * SECOND


@pytest.mark.parametrize("turns", [0, 1, 4])
def test_a_client_that_goes_in_the_middle_leaves_no_job(rig: Rig, tmp_path: Path, turns: int) -> None:
    client, other = Session(rig.service), Session(rig.service)
    rig.say(client, b"put 0 0 60 %d\r\n" % len(BODY) + BODY + b"\r\n")
    for _ in range(turns):
        client.run(rig.clock.ns)
        rig.commit()
    assert client.leave(rig.clock.ns)
    assert rig.put(other, BODY[::-1]) == b"INSERTED 2\r\n", "the next large put finds its way free"
    check(rig.engine)
    reopened(rig, tmp_path)
    assert body_of(rig, 1) is None and body_of(rig, 2) == BODY[::-1]


def test_a_kill_in_the_middle_leaves_no_job_and_no_damage(rig: Rig, tmp_path: Path) -> None:
    client, other = Session(rig.service), Session(rig.service)
    rig.put(other, b"small")
    rig.say(client, b"put 0 0 60 %d\r\n" % len(BODY) + BODY + b"\r\n")
    client.run(rig.clock.ns)
    rig.commit()
    rig.kill()
    assert body_of(rig, 2) is None and body_of(rig, 1) == b"small"


def test_two_large_puts_at_once_come_one_after_the_other(rig: Rig, tmp_path: Path) -> None:
    clients = [Session(rig.service) for _ in range(3)]
    bodies = [BODY, BODY[::-1], BODY[1:]]
    for client, body in zip(clients, bodies, strict=True):
        assert rig.say(client, b"put 0 0 60 %d\r\n" % len(body) + body + b"\r\n") == b""
    answers = {}
    for _ in range(STEPS_MAX):
        for number, client in enumerate(clients):
            if client.unfinished:
                client.run(rig.clock.ns)
            if client.out:
                answers[number] = replies(client)
        rig.commit()
        if len(answers) == 3:
            break
    assert answers == {0: b"INSERTED 1\r\n", 1: b"INSERTED 2\r\n", 2: b"INSERTED 3\r\n"}
    reopened(rig, tmp_path)
    assert [body_of(rig, id) for id in (1, 2, 3)] == bodies


def test_all_parts_go_to_one_segment_and_then_it_rotates(rig: Rig) -> None:
    client = Session(rig.service)
    before = rig.journal.current
    rig.say(client, b"put 0 0 60 %d\r\n" % len(BODY) + BODY + b"\r\n")
    rig.go_on(client, lambda: rig.journal.current != before and client.unfinished)
    assert not client.unfinished, "the segment stays the same while parts of a record stand in it"
    for _ in range(STEPS_MAX):
        if rig.journal.current != before:
            return
        rig.put(client, b"small")
        wants_compaction(rig.store)
    raise AssertionError("the segment is far beyond full, and nothing follows it")


def one_of_three_is_left(rig: Rig, tmp_path: Path) -> Session:
    """The first of three large jobs: compaction has to move it before the others' garbage goes."""
    client = Session(rig.service)
    for body in (BODY, BODY[::-1], BODY[1:]):
        rig.put(client, body)
    reopened(rig, tmp_path)
    client = Session(rig.service)
    assert rig.say(client, b"delete 2\r\ndelete 3\r\n") == b"DELETED\r\nDELETED\r\n"
    rig.settle()
    return client


def test_compaction_moves_a_large_job_in_slices(rig: Rig, tmp_path: Path) -> None:
    one_of_three_is_left(rig, tmp_path)
    moved_before = rig.journal.records_moved
    rig.most_bytes = 0

    def bury_in_the_middle() -> None:
        job = rig.engine.jobs.get(1)
        assert job is not None
        if job.state != BURIED and rig.store._large is not None:
            session = Session(rig.service)
            session.receive(b"reserve\r\n", rig.clock.ns)
            assert replies(session).startswith(b"RESERVED 1 ")
            session.receive(b"bury 1 99\r\n", rig.clock.ns)
            assert replies(session) == b"BURIED\r\n"
            assert session.leave(rig.clock.ns)

    rig.compact(bury_in_the_middle)
    assert rig.journal.records_moved == moved_before + 1
    assert rig.most_bytes <= PART_BYTES_MAX
    reopened(rig, tmp_path)
    job = rig.engine.jobs.get(1)
    assert job is not None and (job.state, job.pri) == (BURIED, 99) and body_of(rig, 1) == BODY
    assert rig.journal.disk_bytes < 2 * len(BODY)


def test_a_large_job_that_is_deleted_while_it_is_moved_is_gone(rig: Rig, tmp_path: Path) -> None:
    client = one_of_three_is_left(rig, tmp_path)

    def delete_in_the_middle() -> None:
        if rig.engine.jobs.get(1) is not None and rig.store._large is not None:
            assert rig.say(client, b"delete 1\r\n") == b"DELETED\r\n"

    rig.compact(delete_in_the_middle)
    assert rig.engine.jobs.get(1) is None
    assert rig.put(client, BODY) == b"INSERTED 4\r\n"
    reopened(rig, tmp_path)
    assert body_of(rig, 1) is None and body_of(rig, 4) == BODY


# What an operator gives another tube or ttr is written anew


@pytest.mark.parametrize("body", [b"small", BODY], ids=["small", "large"])
def test_a_job_with_another_tube_and_ttr_is_found_so(rig: Rig, tmp_path: Path, body: bytes) -> None:
    client = Session(rig.service)
    rig.put(client, body)
    rig.put(client, b"other")
    rig.most_bytes = 0
    slices = 6 if body is BODY else 1  # at least: a journal that is behind comes first
    assert rig.alter_wholly(1, b"t", 7) >= slices and rig.most_bytes <= PART_BYTES_MAX
    assert rig.journal.live.keys == 2 and rig.journal.live.total_bytes < 1.1 * len(body) + 1000, "it counts once"
    job = rig.engine.jobs.get(1)
    assert job is not None and job.segment == rig.journal.live.segment_of(1)
    assert rig.alter_wholly(1, b"u") >= slices and rig.alter_wholly(2, ttr_s=9) == 1
    rig.say(client, b"reserve-job 1\r\n")
    assert rig.alter_wholly(1, ttr_s=8) >= slices, "also of a reserved job"
    reopened(rig, tmp_path)
    assert rig.seen(1) == (b"u", 8, body) and rig.seen(2) == (b"default", 9, b"other")
    rig.compact()
    reopened(rig, tmp_path)
    assert rig.seen(1) == (b"u", 8, body) and rig.journal.live.keys == 2


@pytest.mark.parametrize("end", ["kill", "delete", "bury", "abandon"])
@pytest.mark.parametrize("slices", [0, 5])
def test_what_comes_in_the_middle_of_a_move(rig: Rig, tmp_path: Path, end: str, slices: int) -> None:
    client = Session(rig.service)
    rig.put(client, BODY)
    rig.begin_to_alter(1, b"t")
    for _ in range(slices):
        assert rig.alter(1, b"t") == UNFINISHED and rig.seen(1)[0] == b"default"
    if end == "kill":
        rig.kill()
        assert rig.seen(1) == (b"default", 60, BODY)
        return
    if end == "delete":
        assert rig.say(client, b"delete 1\r\n") == b"DELETED\r\n"
        assert rig.alter(1, b"t") == NOT_FOUND
    elif end == "bury":
        rig.say(client, b"reserve-job 1\r\n")
        assert rig.say(client, b"bury 1 99\r\n") + rig.go_on(client) == b"BURIED\r\n"
        rig.alter_wholly(1, b"t")
    else:
        rig.engine.abandon_alter(1)
    assert rig.put(client, BODY[::-1]) == b"INSERTED 2\r\n", "the next large job finds its way free"
    reopened(rig, tmp_path)
    assert body_of(rig, 2) == BODY[::-1]
    job = rig.engine.jobs.get(1)
    if end == "delete":
        assert job is None
    else:
        assert rig.seen(1) == (b"t" if end == "bury" else b"default", 60, BODY)
        assert job is not None and (job.state == BURIED and job.pri == 99) == (end == "bury")


def test_a_kill_behind_the_move_of_a_large_job(rig: Rig, tmp_path: Path) -> None:
    rig.put(Session(rig.service), BODY)
    rig.alter_wholly(1, b"t", 7)
    rig.kill()
    assert rig.seen(1) == (b"t", 7, BODY)


def test_compaction_leaves_a_job_alone_that_an_operator_moves(rig: Rig, tmp_path: Path) -> None:
    """Compaction would have ended the operator's record, with a tube in which the job is not yet."""
    one_of_three_is_left(rig, tmp_path)
    rig.begin_to_alter(1, b"t")
    asked = 0
    for _ in range(STEPS_MAX):
        if wants_compaction(rig.store):
            rig.store.compact_slice(rig.clock.ns)
            rig.commit()
            asked += 1
        if asked > 15:
            break
        time.sleep(0.001)
    assert asked > 15 and rig.journal.records_moved == 0
    assert rig.seen(1)[0] == b"default"
    rig.alter_wholly(1, b"t")
    rig.compact()
    reopened(rig, tmp_path)
    assert rig.seen(1) == (b"t", 60, BODY) and rig.journal.disk_bytes < 2 * len(BODY)


def test_an_operator_waits_for_a_job_that_compaction_moves(rig: Rig, tmp_path: Path) -> None:
    one_of_three_is_left(rig, tmp_path)
    outcomes: list[int] = []

    def move_in_the_middle() -> None:
        if rig.store._large is not None and len(outcomes) < 3:
            outcomes.append(rig.alter(1, b"t"))
            large = rig.store._large
            rig.engine.abandon_alter(1)
            assert rig.store._large is large, "these parts are not the operator's"

    rig.compact(move_in_the_middle)
    assert outcomes == [UNFINISHED] * 3 and rig.journal.records_moved == 1
    rig.alter_wholly(1, b"t")
    reopened(rig, tmp_path)
    assert rig.seen(1) == (b"t", 60, BODY)


@pytest.mark.parametrize("waits", ["put", "alter"])
def test_who_waits_for_a_large_job_of_compaction_moves_the_rest(rig: Rig, tmp_path: Path, waits: str) -> None:
    """Compaction may sleep, or wait for the device: who waits would ask it in vain, turn by turn."""
    client = one_of_three_is_left(rig, tmp_path)
    assert rig.say(client, b"put 0 0 60 3\r\nabc\r\n") == b"INSERTED 4\r\n"
    until(lambda: wants_compaction(rig.store), "there is something to compact")
    for _ in range(STEPS_MAX):
        if rig.store._large is not None:
            break
        if wants_compaction(rig.store):
            rig.store.compact_slice(rig.clock.ns)
        else:
            time.sleep(0.001)
    assert rig.store._large is not None and rig.journal.records_moved == 0
    if waits == "put":
        assert rig.put(client, BODY) == b"INSERTED 5\r\n"
    else:
        assert rig.alter_wholly(1, b"t") > 5
    assert rig.journal.records_moved == 1
    reopened(rig, tmp_path)
    assert body_of(rig, 1) == BODY


def test_two_operators_move_a_large_job_one_after_the_other(rig: Rig, tmp_path: Path) -> None:
    rig.put(Session(rig.service), BODY)
    rig.begin_to_alter(1, b"t")
    for _ in range(3):
        appended = rig.journal.appended
        assert rig.alter(1, b"u") == rig.alter(1, b"t", 7) == UNFINISHED and rig.journal.appended == appended
    rig.alter_wholly(1, b"t")
    assert rig.alter_wholly(1, b"u") > 5
    reopened(rig, tmp_path)
    assert rig.seen(1) == (b"u", 60, BODY)


@pytest.mark.parametrize("large", [False, True])
def test_on_a_full_disk_nothing_is_written_anew(rig: Rig, tmp_path: Path, large: bool) -> None:
    rig.put(Session(rig.service), BODY if large else b"small")
    if large:
        rig.begin_to_alter(1, b"t")
    refused = rig.store.facts()["journal-puts-refused"]
    rig.lack_room(True)
    assert rig.alter(1, b"t") == rig.alter(1, b"t") == OUT_OF_MEMORY
    rig.lack_room(False)
    assert rig.store.facts()["journal-puts-refused"] == refused, "that was no put"
    assert rig.seen(1)[0] == b"default"
    rig.alter_wholly(1, b"u")
    reopened(rig, tmp_path)
    assert rig.seen(1)[0] == b"u"


def test_what_is_not_admitted_is_not_written_anew(rig: Rig) -> None:
    client = Session(rig.service)
    rig.put(client, BODY)
    rig.put(client, b"small")
    rig.journal.full = True
    rig.journal.asked.clear()
    appended = rig.journal.appended
    rig.alter_wholly(1, b"t", outcome=OUT_OF_MEMORY)
    rig.alter_wholly(2, b"t", outcome=OUT_OF_MEMORY)
    assert rig.journal.appended == appended
    large, small = rig.journal.asked
    assert len(BODY) < large < len(BODY) + 100 and 5 < small < 100


def test_a_full_disk_in_the_middle_refuses_the_put(rig: Rig, tmp_path: Path) -> None:
    client = Session(rig.service)
    rig.say(client, b"put 0 0 60 %d\r\n" % len(BODY) + BODY + b"\r\n")
    rig.lack_room(True)
    assert rig.go_on(client) == b"OUT_OF_MEMORY\r\n"
    rig.lack_room(False)
    assert rig.put(client, BODY) == b"INSERTED 2\r\n"
    reopened(rig, tmp_path)
    assert body_of(rig, 1) is None and body_of(rig, 2) == BODY


def test_on_a_full_disk_a_large_put_does_not_wait_for_another_large_job(rig: Rig) -> None:
    """That other one may go on only when there is room again: until then no client was answered, again and again."""
    first, second = Session(rig.service), Session(rig.service)
    for client in (first, second):
        assert rig.say(client, b"put 0 0 60 %d\r\n" % len(BODY) + BODY + b"\r\n") == b""
    rig.lack_room(True)
    assert rig.go_on(second) == b"OUT_OF_MEMORY\r\n"
    assert rig.go_on(first) == b"OUT_OF_MEMORY\r\n"
    rig.lack_room(False)


def test_draining_refuses_a_large_put_before_anything_is_written(rig: Rig) -> None:
    client = Session(rig.service)
    rig.engine.draining = True
    before = rig.journal.appended
    assert rig.put(client, BODY) == b"DRAINING\r\n"
    assert rig.journal.appended == before


def test_a_large_body_is_never_copied_on_its_way_out(rig: Rig) -> None:
    client = Session(rig.service)
    rig.put(client, BODY)
    client.receive(b"list-tube-used\r\npeek 1\r\nlist-tube-used\r\n", rig.clock.ns)
    pieces = []
    while client.out:
        pieces.append(client.take_out())
        if not client.out:
            client.run(rig.clock.ns)
    job = rig.engine.jobs.get(1)
    assert job is not None and any(piece is job.body for piece in pieces)
    assert b"".join(pieces) == b"USING default\r\nFOUND 1 %d\r\n%b\r\nUSING default\r\n" % (len(BODY), BODY)
    assert client.out_bytes == 0


def test_without_a_journal_a_large_put_is_answered_at_once() -> None:
    engine = Operate(0)
    client = Session(Service(engine, 1 << 30, dict))
    client.receive(b"put 0 0 60 %d\r\n" % len(BODY) + BODY + b"\r\n", 0)
    assert replies(client) == b"INSERTED 1\r\n"
    check(engine)
