"""The verbs that upstream does not have, beside the batches: clearing, listing, moving, and shares of a client's tubes.

This module must not know sockets, gevent, clocks or durability.
Invariant: a command that may find many jobs does as much in one slice as a kick.
"""

from __future__ import annotations

from typing import Final

from geventstalk.core.engine import ADMITTED, OUT_OF_MEMORY, UNFINISHED
from geventstalk.core.figures import field_of, has_deadline
from geventstalk.core.job import BURIED, DELAYED, READY, RESERVED, SECOND_NS, STATE_NAMES, Job, TaggedTally
from geventstalk.core.listing import Listing
from geventstalk.core.operate import DONE, KEEP
from geventstalk.core.order import EMPTY, Order
from geventstalk.core.shares import MODES
from geventstalk.core.tube import Tube
from geventstalk.fields import FIELDS, SINCE, UNTIL
from geventstalk.wire import protocol as p
from geventstalk.wire.commands import MOVE_SLICE, PART_UNITS, REFUSALS, Commands, LongCommand
from geventstalk.wire.verb import Bare, Verb

_STATES: Final = {STATE_NAMES[state].encode(): state for state in (READY, DELAYED, RESERVED, BURIED)}
_LISTED_FIELDS: Final = [field for field in FIELDS if field.in_stats]
_LIST_SLICE: Final = 32
"""The jobs that one slice of a list writes."""
_LOOK_UNITS: Final = 128
"""The work of a slice of a search through all jobs: a slice of its own."""


class _Added(Verb):
    def __init__(self, words: bytes, statistic: str, changes: bool = False) -> None:
        super().__init__(words, statistic, changes)
        self.line_bytes_max = p.ADDED_LINE_BYTES_MAX


class PutIn(Verb):
    """A put that names its tube."""

    def __init__(self, words: bytes, statistic: str) -> None:
        super().__init__(words, statistic)
        self.line_bytes_max = p.PUT_IN_LINE_BYTES_MAX

    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        size, name, numbers = p.put_in_arguments(arguments)
        client.counts[self.number] += 1
        engine = client.engine
        outcome = client.service.admit(size)
        if outcome == ADMITTED and name not in engine.tubes and not engine.takes_tubes():
            outcome = OUT_OF_MEMORY
        if outcome != ADMITTED or numbers is None:
            client.skip(size + 2, p.R_BAD_FORMAT if numbers is None else REFUSALS[outcome])
            return
        pri, delay_s, ttr_s, tags = numbers
        job = engine.open_put_to(name, pri, delay_s, ttr_s or 1, now_ns)
        engine.becomes_producer(client)
        if tags is not None:
            job.tally = TaggedTally(tags)
        client.begin_upload(job, size, now_ns)


class FlushTube(_Added):
    """Deletes the jobs of a tube, of one state or of all, whichever clients hold them."""

    def tube_name(self, arguments: bytes) -> bytes:
        return p.flush_arguments(arguments)[0]

    def refusal(self, arguments: bytes) -> bytes:
        return p.flushed(0)

    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        name, word = p.flush_arguments(arguments)
        states = [_state(word)] if word else [*_STATES.values()]
        client.counts[self.number] += 1
        tube = client.engine.tubes.get(name)
        if tube is None:
            client.reply(p.flushed(0))
        else:
            client.begin(_Flush(tube, states))


class PeekReserved(Bare):
    def do(self, client: Commands, now_ns: int) -> None:
        client.begin(_PeekReserved(Listing(client.engine, client.used_tube(), RESERVED, 0, 1)))


class ListJobs(_Added):
    def tube_name(self, arguments: bytes) -> bytes:
        return p.list_arguments(arguments)[0]

    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        name, word, count, after = p.list_arguments(arguments)
        state = _state(word)
        client.counts[self.number] += 1
        tube = client.engine.tubes.get(name)
        if tube is None:
            client.reply(p.R_NOT_FOUND)
        else:
            client.begin(_List(Listing(client.engine, tube, state, after, count)))


class Move(_Added):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        id, name = p.move_arguments(arguments)
        client.counts[self.number] += 1
        if name not in client.engine.tubes and not client.engine.takes_tubes():
            client.reply(p.R_OUT_OF_MEMORY)
        else:
            client.begin(_Move(id, name))


class Reprioritize(_Added):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        id, pri, delay_s = p.reprioritize_arguments(arguments)
        client.counts[self.number] += 1
        outcome = client.engine.alter(id, pri, delay_s, KEEP, b"", now_ns)
        client.reply(_told(outcome, p.R_CHANGED))


class Drain(Bare):
    """Has the server refuse puts, or take them again."""

    def refusal(self, arguments: bytes) -> bytes:
        return p.R_FORBIDDEN

    def __init__(self, words: bytes, statistic: str, on: bool) -> None:
        super().__init__(words, statistic)
        self._on = on

    def do(self, client: Commands, now_ns: int) -> None:
        client.service.drain(self._on)
        client.reply(p.R_DRAINING if self._on else p.R_NOT_DRAINING)


class ReserveMode(_Added):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        mode = p.word_argument(arguments).decode()
        if mode not in MODES:
            raise p.BadFormat
        client.counts[self.number] += 1
        client.engine.shares_of(client).set_mode(MODES.index(mode))
        client.reply(p.using(arguments))


def _state(word: bytes) -> int:
    state = _STATES.get(word)
    if state is None:
        raise p.BadFormat
    return state


def _told(outcome: int, done: bytes) -> bytes:
    if outcome == DONE:
        return done
    return p.R_OUT_OF_MEMORY if outcome == OUT_OF_MEMORY else p.R_NOT_FOUND


class _Flush(LongCommand):
    """Flushes at most as many jobs of each state as there are now, so that it ends while others put."""

    def __init__(self, tube: Tube, states: list[int]) -> None:
        self.changes = True
        self._tube = tube
        self._states = states
        self._left = 0
        self._reserved: Listing | None = None
        self._flushed = 0
        self._begin()

    def _begin(self) -> None:
        """Begins with the first of the states that are left."""
        tube, state = self._tube, self._states[0]
        if state == RESERVED:
            self._left = tube.reserved
        else:
            self._left = tube.ready_count() if state == READY else len(_order(tube, state))

    def go_on(self, client: Commands, now_ns: int) -> bool:
        engine, tube = client.engine, self._tube
        while self._states:
            done = engine.tube_by_number.get(tube.number) is not tube
            if done or self._flush(client, now_ns):
                del self._states[0]
                if done:
                    break
                if self._states:
                    self._begin()
            elif engine.work >= MOVE_SLICE:
                return False
        client.reply(p.flushed(self._flushed))
        return True

    def _flush(self, client: Commands, now_ns: int) -> bool:
        """Deletes a slice of the jobs of a state. Returns whether that was all."""
        engine, tube, state = client.engine, self._tube, self._states[0]
        if state == RESERVED:
            return self._flush_reserved(client, now_ns)
        while self._left > 0:
            if engine.work >= MOVE_SLICE:
                return False
            id = int(_order(tube, state).first())
            if id == EMPTY:
                break
            engine.force_delete(id, now_ns)
            self._left -= 1
            self._flushed += 1
        return True

    def _flush_reserved(self, client: Commands, now_ns: int) -> bool:
        engine, tube = client.engine, self._tube
        if not tube.reserved:
            return True
        if self._reserved is None:
            self._reserved = Listing(engine, tube, RESERVED, 0, self._left)
        done = self._reserved.go_on(MOVE_SLICE)
        engine.work += _LOOK_UNITS
        for id in self._reserved.found:
            job = engine.jobs.get(id)
            if job is not None and job.state == RESERVED and job.tube == tube.number:
                engine.force_delete(id, now_ns)
                self._flushed += 1
        self._reserved.forget()
        if done:
            self._reserved = None
        return done


def _order(tube: Tube, state: int) -> Order:
    if state == READY:
        blocked = tube.blocked
        return tube.ready if blocked is None or tube.ready.first() != EMPTY else blocked
    return tube.delayed if state == DELAYED else tube.buried


class _PeekReserved(LongCommand):
    def __init__(self, listing: Listing) -> None:
        self._listing = listing

    def go_on(self, client: Commands, now_ns: int) -> bool:
        client.engine.work += _LOOK_UNITS
        if not self._listing.go_on():
            return False
        found = self._listing.found
        job = client.engine.jobs.get(found[0]) if found else None
        client.found(job if job is not None and job.state == RESERVED else None)
        return True


class _List(LongCommand):
    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._searched = False
        self._at = 0
        self._lines: list[bytes] = []

    def go_on(self, client: Commands, now_ns: int) -> bool:
        engine = client.engine
        if not self._searched:
            engine.work += _LOOK_UNITS
            self._searched = self._listing.go_on()
            return False
        end = self._at + _LIST_SLICE
        for id in self._listing.found[self._at : end]:
            job = engine.jobs.get(id)
            if job is not None:
                self._lines.append(_line(job, engine.size_of(job), now_ns))
        engine.work += _LIST_SLICE
        self._at = end
        if end < len(self._listing.found):
            return False
        client.shows_job = True
        client.reply(p.ok(p.YAML_HEAD + b"".join(self._lines)))
        return True


def _line(job: Job, size: int, now_ns: int) -> bytes:
    """Returns a job as an entry of a YAML list: a map on one line, with the keys of stats-job and its size."""
    facts = [f"id: {job.id}", f"state: {STATE_NAMES[job.state]}"]
    for field in _LISTED_FIELDS:
        value = field_of(job, field, now_ns)
        if field.kind == UNTIL and not has_deadline(job):
            value = 0
        facts.append(f"{field.name}: {value // SECOND_NS if field.kind in (SINCE, UNTIL) else value}")
    return f"- {{{', '.join(facts)}, size: {size - len(p.CRLF)}}}\n".encode()


class _Rewrite(LongCommand):
    """Writes a job again, in parts when it is large, and once its body is in memory."""

    def __init__(self, id: int) -> None:
        self.changes = True
        self._id = id
        self._kept: Job | None = None

    def attempt(self, client: Commands, now_ns: int) -> int:
        """Returns the outcome of a slice."""
        raise NotImplementedError

    def reply(self, client: Commands, outcome: int, now_ns: int) -> bytes:
        raise NotImplementedError

    def go_on(self, client: Commands, now_ns: int) -> bool:
        engine = client.engine
        client.awaited = None
        outcome = self.attempt(client, now_ns)
        if outcome != UNFINISHED:
            self.stop(client)
            client.reply(self.reply(client, outcome, now_ns))
            return True
        job = engine.jobs.get(self._id)
        self.changes = job is None or not engine.ledger.has_begun(job)  # the ledger may need the end of what has begun
        if job is not None and job.body is None:
            if self._kept is None:
                assert engine.bodies is not None
                engine.bodies.wait_for(job)
                self._kept = job
            client.awaited = job
        else:
            engine.work += PART_UNITS
        return False

    def stop(self, client: Commands) -> None:
        client.awaited = None
        engine = client.engine
        engine.abandon_alter(self._id)
        if self._kept is not None:
            assert engine.bodies is not None
            engine.bodies.let_be(self._kept)
            self._kept = None


class _Move(_Rewrite):
    """Moves a job to another tube."""

    def __init__(self, id: int, name: bytes) -> None:
        super().__init__(id)
        self._name = name

    def attempt(self, client: Commands, now_ns: int) -> int:
        return client.engine.alter(self._id, KEEP, KEEP, KEEP, self._name, now_ns)

    def reply(self, client: Commands, outcome: int, now_ns: int) -> bytes:
        return _told(outcome, p.R_MOVED)


class BuryWithText(_Rewrite):
    """Buries a job and keeps the text that tells why; without the text when there is no room for it."""

    def __init__(self, id: int, pri: int, text: bytes) -> None:
        super().__init__(id)
        self._pri = pri
        self._text = text

    def attempt(self, client: Commands, now_ns: int) -> int:
        return client.engine.explain(client, self._id, self._text)

    def reply(self, client: Commands, outcome: int, now_ns: int) -> bytes:
        done = client.engine.bury(client, self._id, self._pri, now_ns)
        return p.R_BURIED if done else p.R_NOT_FOUND
