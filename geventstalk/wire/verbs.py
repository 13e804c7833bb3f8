"""The verbs of the protocol: one entry of VERBS and one handler each, from a line to calls of the engine and a reply.

What finds a verb, counts it, or holds changes back reads VERBS: a new verb is one class and one entry. This module must
not know sockets, gevent, clocks or durability.
Invariant: a handler raises ProtocolError before it has changed or counted anything, or answers, now or in later slices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from geventstalk._build import BUILD
from geventstalk.core.ages import Search
from geventstalk.core.engine import ADMITTED
from geventstalk.core.job import BURIED, DELAYED, READY, TaggedTally
from geventstalk.core.order import EMPTY
from geventstalk.core.tube import Tube
from geventstalk.rights import ALL, LOOK, MANAGE, OPERATE, PUT, WORK
from geventstalk.tags import TAG_NAMES, Tags
from geventstalk.wire import protocol as p
from geventstalk.wire.added import (
    BuryWithText,
    Drain,
    FlushTube,
    ListJobs,
    Move,
    PeekReserved,
    PutIn,
    Reprioritize,
    ReserveMode,
)
from geventstalk.wire.batches import BuryBatch, DeleteBatch, ReleaseBatch, ReserveBatch, TouchBatch
from geventstalk.wire.commands import FOR_EVER, MOVE_SLICE, REFUSALS, VERBS_MAX, Commands, LongCommand
from geventstalk.wire.stats import group_stats, job_stats, server_stats, tube_stats
from geventstalk.wire.verb import JOB, JOBS, RESERVE, SERVER, TUBE, USED, Bare, OfTube, Verb

_NATIVE: Final = BUILD == "compiled"

LIST_SLICE: Final = 256
"""The tubes that one slice of a list names. A longer list is written as the client reads it."""
_MEASURE_SLICE: Final = 10_000
"""The names that one slice measures: half a millisecond."""
_NAMES_PER_UNIT: Final = 16
_STATS_UNITS: Final = 16
"""The work of the server's statistics, beside the unit of each command."""
_SEARCH_UNITS: Final = 128
"""The work of a slice of the search for the oldest jobs that is not at its end: a slice of its own."""
_SOME_STATS_UNITS: Final = 4
"""The work of the statistics of a job or a tube."""


class Put(Verb):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        service = client.service
        try:
            pri, delay_s, ttr_s, size = p.put_arguments(arguments)
        except p.BadFormat:
            size, tagged = p.put_tags(arguments)
            if size >= 0:
                self._put_tagged(client, size, tagged, now_ns)
                return
            size = p.put_size_with_garbage(arguments)
            if size >= 0:
                client.counts[self.number] += 1
            if size <= service.max_job_bytes:
                raise
            client.skip(size + 2, p.R_JOB_TOO_BIG)
            return
        client.counts[self.number] += 1
        outcome = service.admit(size)
        if outcome:
            client.skip(size + 2, REFUSALS[outcome])
            return
        client.begin_upload(client.engine.open_put(client, pri, delay_s, ttr_s or 1, now_ns), size, now_ns)

    def _put_tagged(self, client: Commands, size: int, tagged: tuple[int, int, int, Tags] | None, now_ns: int) -> None:
        """Begins a put with tags. A body that is announced is never read as commands, whatever is wrong."""
        client.counts[self.number] += 1
        outcome = client.service.admit(size)
        if outcome != ADMITTED or tagged is None:
            client.skip(size + 2, p.R_BAD_FORMAT if tagged is None else REFUSALS[outcome])
            return
        pri, delay_s, ttr_s, tags = tagged
        job = client.engine.open_put(client, pri, delay_s, ttr_s or 1, now_ns)
        job.tally = TaggedTally(tags)
        client.begin_upload(job, size, now_ns)


class ReserveWithTimeout(Verb):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        timeout_s = p.timeout_argument(arguments)
        client.counts[self.number] += 1
        client.reserve(timeout_s, now_ns)


class Delete(Verb):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        id = p.id_argument(arguments)
        client.counts[self.number] += 1
        client.reply(p.R_DELETED if client.engine.delete(client, id, now_ns) else p.R_NOT_FOUND)


class Release(Verb):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        id, pri, delay_s = p.release_arguments(arguments)
        client.counts[self.number] += 1
        done = client.engine.release(client, id, pri, delay_s, now_ns)
        client.reply(p.R_RELEASED if done else p.R_NOT_FOUND)


class Bury(Verb):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        id, pri, text = p.bury_arguments(arguments)
        client.counts[self.number] += 1
        if text:
            client.begin(BuryWithText(id, pri, text))
            return
        client.reply(p.R_BURIED if client.engine.bury(client, id, pri, now_ns) else p.R_NOT_FOUND)


class Touch(Verb):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        id = p.id_argument(arguments)
        client.counts[self.number] += 1
        client.reply(p.R_TOUCHED if client.engine.touch(client, id, now_ns) else p.R_NOT_FOUND)


class KickJob(Verb):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        id = p.id_argument(arguments)
        client.counts[self.number] += 1
        client.reply(p.R_KICKED if client.engine.kick_job(id, now_ns) else p.R_NOT_FOUND)


class ReserveJob(Verb):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        id = p.id_argument(arguments)
        client.counts[self.number] += 1
        client.reserve_job(id, now_ns)


class Peek(Verb):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        id = p.id_argument(arguments)
        client.counts[self.number] += 1
        client.found(client.engine.jobs.get(id))


class StatsJob(Verb):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        id = p.id_argument(arguments)
        client.counts[self.number] += 1
        engine = client.engine
        engine.work += _SOME_STATS_UNITS
        job = engine.jobs.get(id)
        client.reply(p.R_NOT_FOUND if job is None else p.ok(p.yaml_map(job_stats(engine, job, now_ns))))


class Kick(Verb):
    def refusal(self, arguments: bytes) -> bytes:
        p.kick_argument(arguments)
        return p.kicked(0)

    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        bound = p.kick_argument(arguments)
        client.counts[self.number] += 1
        if bound:
            client.begin(_Kick(client.used_tube(), bound))
        else:
            client.reply(p.kicked(0))


class Quit(Verb):
    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        client.closed = True


class PauseTube(Verb):
    def tube_name(self, arguments: bytes) -> bytes:
        return p.pause_arguments(arguments)[0]

    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        name, delay_s = p.pause_arguments(arguments)
        client.counts[self.number] += 1
        if not p.is_tube_name(name):
            raise p.BadFormat
        client.reply(p.R_PAUSED if client.engine.pause(name, delay_s, now_ns) else p.R_NOT_FOUND)


class Use(OfTube):
    def refusal(self, arguments: bytes) -> bytes:
        return p.R_FORBIDDEN

    def do(self, client: Commands, name: bytes, now_ns: int) -> None:
        engine = client.engine
        if engine.bodies is not None and name not in engine.tubes and not engine.takes_tubes():
            client.reply(p.R_OUT_OF_MEMORY)
            return
        engine.use(client, name)
        client.reply(p.using(name))


class Watch(OfTube):
    """Its argument may be followed by a weight, for reserve-mode."""

    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        weight = 0
        if b" " in arguments:
            arguments, weight = p.watch_arguments(arguments)
        super().run(client, arguments, now_ns)
        tube = client.engine.tubes.get(arguments)
        if weight and tube is not None and tube.number in client.watched:
            client.engine.shares_of(client).weights[tube.number] = weight

    def do(self, client: Commands, name: bytes, now_ns: int) -> None:
        engine = client.engine
        if engine.bodies is not None and not engine.takes_tubes():
            tube = engine.tubes.get(name)
            if tube is None or tube.number not in client.watched:
                client.reply(p.R_OUT_OF_MEMORY)
                return
        client.reply(p.watching(engine.watch(client, name)))


class Ignore(OfTube):
    def do(self, client: Commands, name: bytes, now_ns: int) -> None:
        count = client.engine.ignore(client, name)
        client.reply(p.watching(count) if count else p.R_NOT_IGNORED)


class StatsGroup(OfTube):
    """Its argument is the name of a group, which follows the rules of tube names."""

    def do(self, client: Commands, name: bytes, now_ns: int) -> None:
        rules = client.engine.rules
        group = None if rules is None else rules.groups.get(name)
        client.reply(p.R_NOT_FOUND if group is None else p.ok(p.yaml_map(group_stats(group))))


class StatsTube(OfTube):
    def do(self, client: Commands, name: bytes, now_ns: int) -> None:
        tube = client.engine.tubes.get(name)
        if tube is None:
            client.reply(p.R_NOT_FOUND)
        else:
            begin_stats(client, tube, now_ns)


class Reserve(Bare):
    def do(self, client: Commands, now_ns: int) -> None:
        client.reserve(FOR_EVER, now_ns)


class PeekFirst(Bare):
    def __init__(self, words: bytes, statistic: str, state: int) -> None:
        super().__init__(words, statistic)
        self._state = state

    def do(self, client: Commands, now_ns: int) -> None:
        client.found(client.engine.peek(client, self._state))


class Stats(Bare):
    def do(self, client: Commands, now_ns: int) -> None:
        begin_stats(client, None, now_ns)


class ListTubes(Bare):
    def do(self, client: Commands, now_ns: int) -> None:
        begin_list(client, client.engine.tubes)


class ListTubeUsed(Bare):
    def do(self, client: Commands, now_ns: int) -> None:
        client.reply(p.using(client.used_tube().name))


class ListTubesWatched(Bare):
    def do(self, client: Commands, now_ns: int) -> None:
        begin_list(client, [tube.name for tube in client.watched.values()])


_PUT: Final = Put(b"put ", "cmd-put").needs(PUT, USED)
_DELETE: Final = Delete(b"delete ", "cmd-delete", changes=True).needs(WORK, JOB)
_RESERVE_WITH_TIMEOUT: Final = ReserveWithTimeout(b"reserve-with-timeout ", "cmd-reserve-with-timeout").needs(
    WORK, RESERVE
)

_UPSTREAM: Final[tuple[Verb, ...]] = (
    _PUT,
    Peek(b"peek ", "cmd-peek").needs(LOOK, JOB),
    PeekFirst(b"peek-ready", "cmd-peek-ready", READY).needs(LOOK, USED),
    PeekFirst(b"peek-delayed", "cmd-peek-delayed", DELAYED).needs(LOOK, USED),
    PeekFirst(b"peek-buried", "cmd-peek-buried", BURIED).needs(LOOK, USED),
    Reserve(b"reserve", "cmd-reserve").needs(WORK, RESERVE),
    _RESERVE_WITH_TIMEOUT,
    _DELETE,
    Release(b"release ", "cmd-release", changes=True).needs(WORK, JOB),
    Use(b"use ", "cmd-use").needs(ALL, TUBE),  # any of these rights, and so do the next two
    Watch(b"watch ", "cmd-watch").needs(ALL, TUBE),
    Ignore(b"ignore ", "cmd-ignore").needs(ALL, TUBE),
    Bury(b"bury ", "cmd-bury", changes=True).needs(WORK, JOB),
    Kick(b"kick ", "cmd-kick", changes=True).needs(MANAGE, USED),
    Touch(b"touch ", "cmd-touch").needs(WORK, JOB),
    Stats(b"stats", "cmd-stats").needs(LOOK, SERVER),
    StatsJob(b"stats-job ", "cmd-stats-job").needs(LOOK, JOB),
    StatsTube(b"stats-tube ", "cmd-stats-tube").needs(LOOK, TUBE),
    ListTubes(b"list-tubes", "cmd-list-tubes").needs(LOOK, SERVER),
    ListTubeUsed(b"list-tube-used", "cmd-list-tube-used"),
    ListTubesWatched(b"list-tubes-watched", "cmd-list-tubes-watched").needs(LOOK, SERVER),
    PauseTube(b"pause-tube", "cmd-pause-tube").needs(MANAGE, TUBE),  # which needs no space behind it
    # Upstream does not count these.
    ReserveJob(b"reserve-job ", changes=True).needs(WORK, JOB),
    KickJob(b"kick-job ", changes=True).needs(MANAGE, JOB),
    Quit(b"quit"),
)
"""The verbs of upstream. Their statistics stand in upstream's order, in which stats tells them."""

ADDED: Final[tuple[Verb, ...]] = (
    ReserveBatch(b"reserve-batch ", "cmd-reserve-batch").needs(WORK, RESERVE),
    DeleteBatch(b"delete-batch ", "cmd-delete-batch", b"DELETED").needs(WORK, JOBS),
    ReleaseBatch(b"release-batch ", "cmd-release-batch", b"RELEASED", numbers=2).needs(WORK, JOBS),
    BuryBatch(b"bury-batch ", "cmd-bury-batch", b"BURIED", numbers=1).needs(WORK, JOBS),
    TouchBatch(b"touch-batch ", "cmd-touch-batch", b"TOUCHED", changes=False).needs(WORK, JOBS),
    StatsGroup(b"stats-group ", "cmd-stats-group").needs(LOOK, SERVER),
    PutIn(b"put-in ", "cmd-put-in").needs(PUT, TUBE),
    PeekReserved(b"peek-reserved", "cmd-peek-reserved").needs(LOOK, USED),
    ListJobs(b"list-jobs ", "cmd-list-jobs").needs(LOOK, TUBE),
    FlushTube(b"flush-tube ", "cmd-flush-tube", changes=True).needs(MANAGE, TUBE),
    Move(b"move ", "cmd-move", changes=True).needs(MANAGE, JOB),
    Reprioritize(b"reprioritize ", "cmd-reprioritize", changes=True).needs(MANAGE, JOB),
    ReserveMode(b"reserve-mode ", "cmd-reserve-mode"),
    Drain(b"drain", "cmd-drain", on=True).needs(OPERATE, SERVER),
    Drain(b"undrain", "cmd-undrain", on=False).needs(OPERATE, SERVER),
)
"""The verbs that upstream does not have. A line that only begins with their words is answered as upstream does."""

VERBS: Final = (*_UPSTREAM, *ADDED)

for _at, _verb in enumerate(VERBS):
    _verb.number = _at
assert len(VERBS) <= VERBS_MAX
COUNTED: Final = [(verb.statistic, int(verb.number)) for verb in VERBS if verb.statistic]
"""The keys of the statistics of verbs, and where Service.commands counts them."""
_COUNTED_FIRST: Final = len([verb for verb in _UPSTREAM if verb.statistic])
"""The number of keys that are upstream's."""
_FEATURES: Final = " ".join([verb.words.decode().rstrip() for verb in ADDED] + ["bury-text"])
_TAGS: Final = b" ".join(TAG_NAMES).decode()
_BY_WORD: Final = {verb.words.rstrip(b" "): verb for verb in VERBS if verb.words.endswith(b" ")}
_BY_LINE: Final = {verb.words: verb for verb in VERBS if isinstance(verb, Bare)}
_BY_LENGTH: Final = sorted(_UPSTREAM, key=lambda verb: -len(verb.words))
"""So the first one with which a line begins is upstream's."""


def find(line: bytes) -> tuple[Verb, bytes]:
    """Returns the verb of a line without its CRLF, and its arguments: the text behind the verb's words.

    Raises UnknownCommand, or BadFormat for a verb that must stand alone.
    """
    if _NATIVE:
        if line.startswith(b"put "):  # these three are most of what comes
            return _PUT, line[4:]
        if line.startswith(b"delete "):
            return _DELETE, line[7:]
        if line.startswith(b"reserve-with-timeout "):
            return _RESERVE_WITH_TIMEOUT, line[21:]
    word, space, arguments = line.partition(b" ")
    known = _BY_WORD.get(word) if space else _BY_LINE.get(word)
    if known is not None:
        return known, arguments  # what reads the arguments fails on a NUL in them
    if 0 in line:
        raise p.BadFormat
    for verb in _BY_LENGTH:
        if line.startswith(verb.words):
            if isinstance(verb, Bare) and len(line) != len(verb.words):
                raise p.BadFormat
            return verb, line[len(verb.words) :]
    raise p.UnknownCommand


def line_max(line: bytes) -> int:
    """Returns how long a line that begins like this may be, without its CRLF."""
    if line.startswith(_PUT.words) and body_behind(line):
        return p.TAGGED_LINE_BYTES_MAX - len(p.CRLF)
    verb = _BY_WORD.get(line.partition(b" ")[0])
    return (p.LINE_BYTES_MAX if verb is None else verb.line_bytes_max) - len(p.CRLF)


def body_behind(line: bytes) -> int:
    """Returns the bytes of the body, with its CRLF, behind a line that begins as a put with tags does, or a put-in.

    0 stands for other lines. Such a put may be too long, but its body is never read as commands.
    """
    if line.startswith(_PUT.words):
        size, _ = p.put_tags(line[len(_PUT.words) : p.LINE_BYTES_MAX])
        return 0 if size < 0 else size + len(p.CRLF)
    if line.startswith(b"put-in "):
        with suppress(p.BadFormat):
            return p.put_in_arguments(line[len(b"put-in ") : 2 * p.LINE_BYTES_MAX])[0] + len(p.CRLF)
    return 0


def changes(line: bytes) -> bool:
    """Returns whether a line without its CRLF is a command that may change what survives a restart."""
    try:
        return find(line)[0].changes
    except p.ProtocolError:
        return False


def is_put(data: bytes, at: int) -> bool:
    """Returns whether a put begins at this position."""
    return data.startswith(_PUT.words, at)


# --- commands that take several slices


class _Kick(LongCommand):
    def __init__(self, tube: Tube, bound: int) -> None:
        self.changes = True
        self._tube = tube
        self._buried = tube.buried.first() != EMPTY
        self._left = bound
        self._kicked = 0

    def go_on(self, client: Commands, now_ns: int) -> bool:
        engine = client.engine
        limit = min(self._left, MOVE_SLICE)
        kicked = engine.kick(self._tube, self._buried, limit, now_ns)
        engine.work += kicked
        self._kicked += kicked
        self._left = self._left - kicked if kicked == limit else 0
        if self._left:
            return False
        client.reply(p.kicked(self._kicked))
        return True


def begin_list(client: Commands, names: Collection[bytes]) -> None:
    """Answers with the names as they are now, however long it takes the client to read them."""
    engine = client.engine
    if len(names) <= LIST_SLICE:
        engine.work += len(names) // _NAMES_PER_UNIT
        client.reply(p.ok(p.yaml_list(names)))
    else:
        client.begin(_List(engine.tube_names() if names is engine.tubes else [*names]))


class _List(LongCommand):
    def __init__(self, names: list[bytes]) -> None:
        self._names = names
        self._bytes = len(p.YAML_HEAD)  # of the text of the names that were measured
        self._measured = 0
        self._listed = -1  # how many of them are written; -1 while they are measured

    def go_on(self, client: Commands, now_ns: int) -> bool:
        names, at = self._names, self._listed
        client.engine.work += LIST_SLICE // _NAMES_PER_UNIT
        if at < 0:
            end = min(self._measured + _MEASURE_SLICE, len(names))
            self._bytes += p.yaml_names_bytes(names[self._measured : end])
            self._measured = end
            if end == len(names):
                client.reply(p.ok_line(self._bytes))
                client.pass_on(p.YAML_HEAD)
                self._listed = 0
            return False
        self._listed = at + LIST_SLICE
        client.pass_on(p.yaml_names(names[at : self._listed]))
        if self._listed < len(names):
            return False
        client.pass_on(p.CRLF)
        return True


def begin_stats(client: Commands, tube: Tube | None, now_ns: int) -> None:
    """Answers with the statistics of a tube, or of the server, once it is known which jobs are the oldest ones."""
    stats = _Stats(Search(client.engine, tube), tube)
    if not stats.go_on(client, now_ns):
        client.begin(stats)


def begin_some_stats(client: Commands, now_ns: int, hides: Callable[[str], bool]) -> None:
    """Answers with the statistics of the server. A key for which `hides` returns True has the value 0."""
    stats = _Stats(Search(client.engine, None), None)
    stats.hides = hides
    if not stats.go_on(client, now_ns):
        client.begin(stats)


class _Stats(LongCommand):
    hides: Callable[[str], bool] | None = None

    def __init__(self, search: Search, tube: Tube | None) -> None:
        self._search = search
        self._tube = tube

    def go_on(self, client: Commands, now_ns: int) -> bool:
        engine, tube = client.engine, self._tube
        oldest = self._search.go_on()
        if oldest is None:
            engine.work += _SEARCH_UNITS
            return False
        if tube is None:
            engine.work += _STATS_UNITS
            service = client.service
            counts = [(key, service.commands[number]) for key, number in COUNTED]
            first, added = counts[:_COUNTED_FIRST], counts[_COUNTED_FIRST:]
            stats = server_stats(engine, first, service.max_job_bytes, service.facts(), oldest, now_ns)
            stats += [*added, ("features", _FEATURES), ("tags", _TAGS)]
            hides = self.hides
            if hides is not None:
                stats = [(key, 0 if hides(key) else value) for key, value in stats]
            stats += client.own_stats()
        elif engine.tube_by_number.get(tube.number) is tube:
            engine.work += _SOME_STATS_UNITS
            stats = tube_stats(engine, tube, oldest, now_ns)
        else:
            client.reply(p.R_NOT_FOUND)
            return True
        client.reply(p.ok(p.yaml_map(stats)))
        return True
