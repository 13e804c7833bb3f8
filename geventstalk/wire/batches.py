"""The verbs that take or name many jobs: reserve-batch, and the same change to each of up to 1,000 ids.

This module must not know sockets, gevent, clocks or durability.
Invariant: a batch does as much in one slice as a kick. A reply that hands out jobs tells how many follow, is made at
once, and names each job that its client holds then.
"""

from __future__ import annotations

from typing import Final

from geventstalk.core.job import RESERVED, Job
from geventstalk.core.tube import DEADLINE_SOON, RESERVED_JOB
from geventstalk.wire import protocol as p
from geventstalk.wire.commands import LARGE_BODY, MOVE_SLICE, OUT_BYTES_MAX, Commands, LongCommand
from geventstalk.wire.verb import Verb

BATCH_BYTES_MAX: Final = 1 << 20
"""Bytes of replies from which a batch takes no further job. It is less while too many replies of all clients wait."""
_REPLY_BYTES: Final = 64
"""About the memory of a reply beside its body."""


class OfIds(Verb):
    """A verb of `numbers` numbers and 1 to 1,000 ids. The reply tells how many of them were found."""

    def __init__(self, words: bytes, statistic: str, done: bytes, numbers: int = 0, changes: bool = True) -> None:
        super().__init__(words, statistic, changes)
        self.line_bytes_max = p.BATCH_LINE_BYTES_MAX
        self.done = done
        self.numbers = numbers

    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        numbers = p.batch_arguments(arguments, self.numbers)
        client.counts[self.number] += 1
        client.begin_with(_Changes(self, numbers), now_ns)

    def change(self, client: Commands, id: int, numbers: list[int], now_ns: int) -> bool:
        """Changes a job, with the numbers of the command. Returns whether it was there for this client."""
        raise NotImplementedError


class DeleteBatch(OfIds):
    def change(self, client: Commands, id: int, numbers: list[int], now_ns: int) -> bool:
        return client.engine.delete(client, id, now_ns)


class ReleaseBatch(OfIds):
    def change(self, client: Commands, id: int, numbers: list[int], now_ns: int) -> bool:
        return client.engine.release(client, id, numbers[0], numbers[1], now_ns)


class BuryBatch(OfIds):
    def change(self, client: Commands, id: int, numbers: list[int], now_ns: int) -> bool:
        return client.engine.bury(client, id, numbers[0], now_ns)


class TouchBatch(OfIds):
    def change(self, client: Commands, id: int, numbers: list[int], now_ns: int) -> bool:
        return client.engine.touch(client, id, now_ns)


class _Changes(LongCommand):
    def __init__(self, verb: OfIds, numbers: list[int]) -> None:
        self.changes = verb.changes
        self._verb = verb
        self._numbers = numbers  # those of the command, then the ids
        self._next = verb.numbers
        self._done = 0

    def go_on(self, client: Commands, now_ns: int) -> bool:
        verb, numbers = self._verb, self._numbers
        end = min(self._next + MOVE_SLICE, len(numbers))
        client.engine.work += end - self._next
        for id in numbers[self._next : end]:
            if verb.change(client, id, numbers, now_ns):
                self._done += 1
        self._next = end
        if end < len(numbers):
            return False
        client.reply(p.batch_done(verb.done, self._done, len(numbers) - verb.numbers - self._done))
        return True


class ReserveBatch(Verb):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        count, timeout_s = p.reserve_batch_arguments(arguments)
        client.counts[self.number] += 1
        engine = client.engine
        most = BATCH_BYTES_MAX * client.service.out_bytes_max // OUT_BYTES_MAX
        if engine.bodies is not None:
            most = min(most, engine.bodies.ahead_bytes)
        batch = _Reserved(count, most)
        job = engine.reserve(client, now_ns)
        if job is not None:
            batch.take(client, job)
            client.begin_with(batch, now_ns)
        elif not timeout_s or client.eof:
            client.reply(p.reserved_batch(0))
        elif engine.deadline_soon(client, now_ns):
            client.reply(p.R_DEADLINE_SOON)
        else:
            client.begin(batch)
            engine.wait(client, now_ns, timeout_s)


class _Reserved(LongCommand):
    """Takes jobs until there are as many as asked for, none is ready, or the replies are long enough.

    The body of the last one only may have to come from the journal: the batch ends with it.
    """

    def __init__(self, count: int, most: int) -> None:
        self._left = count
        self._most = most  # bytes of replies
        self._jobs: dict[int, Job] = {}  # in order of reservation; their bodies stay in memory

    def take(self, client: Commands, job: Job) -> None:
        body, bodies = job.body, client.engine.bodies
        client.engine.work += 1
        if job.id in self._jobs:  # its ttr has ended between two slices
            return
        self._jobs[job.id] = job
        self._left -= 1
        if body is not None:
            self._most -= len(body) + _REPLY_BYTES
        else:
            self._left = 0
        if bodies is not None:
            bodies.handed_out(job)
            bodies.hold(job)

    def answered(self, client: Commands, outcome: int, job: Job | None) -> bool:
        if outcome == RESERVED_JOB:
            assert job is not None
            self.take(client, job)
            return False
        client.reply(p.R_DEADLINE_SOON if outcome == DEADLINE_SOON else p.reserved_batch(0))
        return True

    def go_on(self, client: Commands, now_ns: int) -> bool:
        engine = client.engine
        while self._left > 0 and self._most > 0:
            if engine.work >= MOVE_SLICE:
                return False
            job = engine.reserve(client, now_ns)
            if job is None:
                break
            self.take(client, job)
        self._left = 0
        held = [job for job in self._jobs.values() if job.state == RESERVED and job.holder == client.number]
        for job in held:
            if job.body is None:
                assert engine.bodies is not None
                engine.bodies.want(job)
                client.awaited = job
                return False
        self.stop(client)
        for job in held:
            if job.since_ns != now_ns:
                engine.touch(client, job.id, now_ns)  # its ttr begins with the answer
        engine.changing = False  # if memory lacks for the reply, nothing is half done
        _show(client, held)
        return True

    def stop(self, client: Commands) -> None:
        client.awaited = None
        bodies = client.engine.bodies
        if bodies is not None:
            for job in self._jobs.values():
                bodies.let_be(job)
        self._jobs = {}


def _show(client: Commands, jobs: list[Job]) -> None:
    pieces = [p.reserved_batch(len(jobs))]
    for job in jobs:
        body = job.body
        assert body is not None
        if len(body) < LARGE_BODY:
            pieces.append(p.reserved(job.id, body))
        else:
            pieces += [p.reserved_line(job.id, body), body]
    if jobs:
        client.shows_job = True
    client.reply_in_pieces(pieces)
