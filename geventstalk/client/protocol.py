"""The protocol without I/O: commands to bytes, bytes to replies, replies to results or errors.

One function makes the command of each verb. The shells make their methods from these functions.
Invariant: nothing that a caller gives as a name or a number can end a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from geventstalk.client import errors

T = TypeVar("T")
Stats = dict[str, "int | float | str"]

DEFAULT_PRIORITY: Final = 1 << 16
DEFAULT_TTR: Final = 60
BATCH_MAX: Final = 1000
"""The most jobs of a reserve-batch."""
ROUND_S: Final = 60
"""The seconds after which a reserve without a limit asks again: so a host that vanished is noticed."""
_OLD_LINE_BYTES_MAX: Final = 224
"""Of a line with a verb that beanstalkd knows, with its CRLF."""
_LINE_BYTES_MAX: Final = 1024
_DIGITS_MAX: Final = 20
_BODY_BYTES_MAX: Final = 1 << 31
"""The most bytes of a reply's body: twice the largest body of a job. A larger number is no reply of a server."""
_TUBE: Final = re.compile(rb"[A-Za-z0-9+/;.$_()][A-Za-z0-9+/;.$_()-]{0,199}")
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}")
_FRACTION: Final = re.compile(r"-?[0-9]{1,20}\.[0-9]{1,20}")
_TEXTS: Final = {"name", "tube", "version", "os", "platform", "hostname", "state"}
_WITH_BODY: Final = {b"RESERVED", b"FOUND", b"OK"}
_ERRORS: Final[dict[bytes, type[errors.ServerError]]] = {
    b"NOT_FOUND": errors.NotFound,
    b"TIMED_OUT": errors.TimedOut,
    b"DEADLINE_SOON": errors.DeadlineSoon,
    b"DRAINING": errors.Draining,
    b"JOB_TOO_BIG": errors.JobTooBig,
    b"OUT_OF_MEMORY": errors.OutOfMemory,
    b"INTERNAL_ERROR": errors.InternalError,
    b"BAD_FORMAT": errors.BadFormat,
    b"EXPECTED_CRLF": errors.ExpectedCrlf,
    b"UNKNOWN_COMMAND": errors.UnknownCommand,
    b"NOT_IGNORED": errors.NotIgnored,
    b"UNAUTHORIZED": errors.Unauthorized,
    b"FORBIDDEN": errors.Forbidden,
}
_SECRET: Final = b"auth "
"""A line with a secret begins so: no error shows it."""


class Job(NamedTuple):
    id: int
    body: bytes


class Reply(NamedTuple):
    words: list[bytes]
    body: bytes


class Command(Generic[T]):
    """The bytes of a command, and the function that reads the reply that begins with the word `wanted`.

    `waits_s` is the time that the server may take beside the usual. A `safe` command may be sent again when it is not
    known whether the server has done it. `tube` is what a use, watch or ignore names. With `many`, the reply says how
    many others follow it, each a RESERVED: these jobs are the result. A command with the number of a `connection` is
    sent over no other one, where its id may be that of another job.
    """

    def __init__(
        self,
        line: bytes,
        wanted: bytes,
        take: Callable[[Reply], T],
        *,
        body: bytes | None = None,
        waits_s: int = 0,
        safe: bool = False,
        tube: str = "",
        many: bool = False,
        connection: int = 0,
    ) -> None:
        self.many = many
        self.connection = connection
        self.line = line + b"\r\n"
        self.wanted = wanted
        self.take = take
        self.body = body
        self.waits_s = waits_s
        self.safe = safe
        self.tube = tube

    def following(self, reply: Reply) -> int:
        """Returns how many other replies belong to this one. Raises BadReply."""
        if not self.many or reply.words[0] != self.wanted:
            return 0
        number = reply.words[1] if len(reply.words) == 2 else b""
        if not number.isdigit() or len(number) > len(str(BATCH_MAX)):
            raise _bad(reply.words)
        return int(number)

    def result(self, reply: Reply) -> T | errors.ServerError:
        """Returns what the reply says. Raises BadReply if it is none to this command."""
        word = reply.words[0]
        try:
            if word == self.wanted:
                return self.take(reply)
            if word == b"BURIED":
                return errors.Buried(int(reply.words[1]) if len(reply.words) > 1 else None)
        except (ValueError, IndexError):
            raise _bad(reply.words) from None
        if word not in _ERRORS or len(reply.words) > 1:
            raise _bad(reply.words)
        line = b"auth" if self.line.startswith(_SECRET) else self.line[:-2]
        return _ERRORS[word](f"the server answers {word.decode()} to {line.decode()}")


class Replies:
    """Bytes to replies. The bytes come in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._words: list[bytes] = []  # of a reply whose body is not complete
        self._size = 0
        self._searched = 0

    @property
    def empty(self) -> bool:
        return not self._words and not self._buffer

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Reply | None:
        """Returns the next reply, or None until it is complete. Raises BadReply."""
        if not self._words and not self._head():
            return None
        words = self._words
        body = b""
        if words[0] in _WITH_BODY:
            if len(self._buffer) < self._size + 2:
                return None
            with memoryview(self._buffer) as view:
                body = bytes(view[: self._size])
            if self._buffer[self._size : self._size + 2] != b"\r\n":
                raise _bad(words)
            del self._buffer[: self._size + 2]
        self._words = []
        return Reply(words, body)

    def _head(self) -> bool:
        end = self._buffer.find(b"\n", self._searched)
        if (end if end >= 0 else len(self._buffer)) > _LINE_BYTES_MAX:
            raise _bad([bytes(self._buffer[:40])])
        if end < 0:
            self._searched = len(self._buffer)
            return False
        line = bytes(self._buffer[: end + 1])
        if not line.endswith(b"\r\n"):
            raise _bad([line[:40]])
        words = line[:-2].split(b" ")
        del self._buffer[: end + 1]
        self._searched = 0
        if words[0] in _WITH_BODY:
            if not words[-1].isdigit() or len(words[-1]) > _DIGITS_MAX or int(words[-1]) > _BODY_BYTES_MAX:
                raise _bad(words)
            self._size = int(words[-1])
        self._words = words
        return True


def _bad(words: list[bytes]) -> errors.BadReply:
    return errors.BadReply(f"the server answers {b' '.join(words)[:80]!r}, which is no reply to the command", sent=True)


def parse_stats(text: bytes) -> Stats:
    """Reads the flat YAML of statistics. What is a name or a version stays text, as do numbers with quotes."""
    stats: Stats = {}
    for line in text.decode("utf-8", "surrogateescape").split("\n"):
        key, colon, value = line.partition(": ")
        if not colon:
            continue
        if key in _TEXTS:
            stats[key] = _unquoted(value)
        elif _NUMBER.fullmatch(value):
            stats[key] = int(value)
        else:
            stats[key] = float(value) if _FRACTION.fullmatch(value) else _unquoted(value)
    return stats


def parse_list(text: bytes) -> list[str]:
    lines = text.decode("utf-8", "surrogateescape").split("\n")
    return [_unquoted(line[2:]) for line in lines if line.startswith("- ")]


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value


# What makes a line of an argument


def _tube(name: str) -> bytes:
    word = name.encode()
    if not _TUBE.fullmatch(word):
        raise ValueError(f"{name!r} is no name of a tube")
    return word


def _line(verb: bytes, *numbers: int) -> bytes:
    for number in numbers:
        if number < 0:
            raise ValueError(f"{number} is negative")
    return b" ".join((verb, *(b"%d" % number for number in numbers)))


# What makes a result of a reply


def _nothing(reply: Reply) -> None:
    return None


def _nothing_yet(reply: Reply) -> list[Job]:
    return []


def _number(reply: Reply) -> int:
    return int(reply.words[1])


def _name(reply: Reply) -> str:
    return reply.words[1].decode()


def job_of(reply: Reply) -> Job:
    """Returns the job of a RESERVED. Raises BadReply."""
    try:
        if reply.words[0] == b"RESERVED":
            return _job(reply)
    except (ValueError, IndexError):
        pass
    raise _bad(reply.words)


def _job(reply: Reply) -> Job:
    return Job(int(reply.words[1]), reply.body)


def _stats(reply: Reply) -> Stats:
    return parse_stats(reply.body)


def _server_stats(reply: Reply) -> Stats:
    # The server's id is a text of hexadecimal digits, which may all be decimal ones.
    id = re.search(rb'^id: "?([0-9a-f]*)', reply.body, re.MULTILINE)
    return {**parse_stats(reply.body), **({"id": id[1].decode()} if id else {})}


def _listed_jobs(reply: Reply) -> list[Stats]:
    lines = re.findall(rb"^- \{(.*)\}$", reply.body, re.MULTILINE)
    return [parse_stats(line.replace(b", ", b"\n")) for line in lines]


def _list(reply: Reply) -> list[str]:
    return parse_list(reply.body)


# The verbs


def put(
    body: bytes | str, *, priority: int = DEFAULT_PRIORITY, delay: int = 0, ttr: int = DEFAULT_TTR, tags: str = ""
) -> Command[int]:
    """Puts a job into the used tube; returns its id, or that of the job that has the same unique key.

    `tags` are words of docs/protocol.md, such as "idp:order-7:60 tries:3"; beanstalkd does not know them. A put whose
    key stays unique for some seconds after its job may be sent again. Raises ValueError for other characters.
    """
    return _put(b"put", body, (priority, delay, ttr), tags)


def put_in(
    tube: str,
    body: bytes | str,
    *,
    priority: int = DEFAULT_PRIORITY,
    delay: int = 0,
    ttr: int = DEFAULT_TTR,
    tags: str = "",
) -> Command[int]:
    """Does what put() does, in this tube. beanstalkd does not know it."""
    return _put(b"put-in " + _tube(tube), body, (priority, delay, ttr), tags)


def _put(verb: bytes, body: bytes | str, numbers: tuple[int, int, int], tags: str) -> Command[int]:
    data = body.encode() if isinstance(body, str) else bytes(body)
    if not tags.isascii() or (tags and not tags.isprintable()):
        raise ValueError(f"tags are words of printable ASCII characters: {tags!r}")
    words = [word.encode() for word in tags.split()]
    again = any(word.startswith(b"idp:") and word.count(b":") == 2 for word in words)
    line = b" ".join([_line(verb, *numbers, len(data)), *words])
    return Command(line, b"INSERTED", _number, body=data, safe=again)


def auth(token: str) -> Command[None]:
    """Proves with a token whose the connection is. Raises ValueError for characters that no token has."""
    word = token.encode()
    if not word or not word.isascii() or not token.isprintable() or b" " in word:
        raise ValueError("a token is a word of printable ASCII characters")
    return Command(_SECRET + word, b"AUTHENTICATED", _nothing, safe=True)


def use(tube: str) -> Command[str]:
    """Says into which tube jobs are put."""
    return Command(b"use " + _tube(tube), b"USING", _name, safe=True, tube=tube)


def reserve_with_timeout(seconds: int) -> Command[Job]:
    """Takes a job of the watched tubes. Raises TimedOut when none comes in time."""
    return Command(_line(b"reserve-with-timeout", seconds), b"RESERVED", _job, waits_s=seconds, safe=True)


def reserve_batch(most: int, seconds: int, *, safe: bool) -> Command[list[Job]]:
    """Takes up to this many jobs, at most 1,000, and waits for the first. More jobs may be ready."""
    line = _line(b"reserve-batch", most, *([seconds] if seconds else []))
    return Command(line, b"RESERVED_BATCH", _nothing_yet, waits_s=seconds, safe=safe, many=True)


def delete_batch(ids: Sequence[int]) -> Command[int]:
    """Deletes jobs, up to 700; returns how many there were."""
    return Command(_line(b"delete-batch", *ids), b"DELETED_BATCH", _number)


def reserve_job(id: int) -> Command[Job]:
    return Command(_line(b"reserve-job", id), b"RESERVED", _job, safe=True)


def delete(id: int, *, connection: int = 0) -> Command[None]:
    """Deletes a job. With the number of the `connection` that has reserved the job, over no other connection.

    Raises ConnectionLost when that connection is lost: then another worker may have the job.
    """
    return Command(_line(b"delete", id), b"DELETED", _nothing, connection=connection)


def release(id: int, *, priority: int = DEFAULT_PRIORITY, delay: int = 0) -> Command[None]:
    """Gives a reserved job back."""
    return Command(_line(b"release", id, priority, delay), b"RELEASED", _nothing)


def bury(id: int, *, priority: int = DEFAULT_PRIORITY, reason: str = "") -> Command[None]:
    """Buries a job. geventstalk's server keeps the reason, cut to what fits into the command's line."""
    line = _line(b"bury", id, priority)
    if reason:
        if not reason.isprintable() or reason.isspace() or reason.isdecimal():
            raise ValueError("a reason is printable text, and not a number alone")
        line += b" " + reason.encode()[: _OLD_LINE_BYTES_MAX - len(line) - 3].decode("utf-8", "ignore").strip().encode()
    return Command(line, b"BURIED", _nothing)


def touch(id: int) -> Command[None]:
    """Starts the time to run of a reserved job again."""
    return Command(_line(b"touch", id), b"TOUCHED", _nothing)


def watch(tube: str, weight: int = 0) -> Command[int]:
    """Reserves from this tube, too; returns how many are watched. A weight, up to 1,000, is for reserve_mode()."""
    line = _line(b"watch " + _tube(tube), *([weight] if weight else []))
    return Command(line, b"WATCHING", _number, safe=True, tube=tube)


def reserve_mode(mode: str) -> Command[str]:
    """Says how reserves are shared among the watched tubes: default, weighted, weighted-fair or fifo-fair."""
    return Command(b"reserve-mode " + _tube(mode), b"USING", _name, safe=True, tube=mode)


def ignore(tube: str) -> Command[int]:
    """Stops watching this tube. Returns the number of watched tubes."""
    return Command(b"ignore " + _tube(tube), b"WATCHING", _number, safe=True, tube=tube)


def peek(id: int) -> Command[Job]:
    return Command(_line(b"peek", id), b"FOUND", _job, safe=True)


def peek_ready() -> Command[Job]:
    return Command(b"peek-ready", b"FOUND", _job, safe=True)


def peek_delayed() -> Command[Job]:
    return Command(b"peek-delayed", b"FOUND", _job, safe=True)


def peek_buried() -> Command[Job]:
    return Command(b"peek-buried", b"FOUND", _job, safe=True)


def peek_reserved() -> Command[Job]:
    return Command(b"peek-reserved", b"FOUND", _job, safe=True)


def list_jobs(tube: str, state: str, most: int = 1000, after: int = 0) -> Command[list[Stats]]:
    """Lists jobs of a tube by their ids, those above `after`: what stats_job() tells, but the tube, and their size."""
    line = b"list-jobs " + _tube(tube) + b" " + _tube(state)
    return Command(_line(line, most, after), b"OK", _listed_jobs, safe=True)


def flush_tube(tube: str, state: str = "") -> Command[int]:
    """Deletes all jobs of a tube, or those of a state; returns how many there were."""
    words = [b"flush-tube", _tube(tube), *([_tube(state)] if state else [])]
    return Command(b" ".join(words), b"FLUSHED", _number)


def move(id: int, tube: str) -> Command[None]:
    """Moves a job that is not reserved to another tube."""
    return Command(_line(b"move", id) + b" " + _tube(tube), b"MOVED", _nothing)


def reprioritize(id: int, priority: int, delay: int | None = None) -> Command[None]:
    """Gives a job that is not reserved another priority, and perhaps another delay, which begins now."""
    numbers = [priority] if delay is None else [priority, delay]
    return Command(_line(b"reprioritize", id, *numbers), b"CHANGED", _nothing)


def drain() -> Command[None]:
    """Has the server refuse all puts."""
    return Command(b"drain", b"DRAINING", _nothing, safe=True)


def undrain() -> Command[None]:
    """Has the server take puts again."""
    return Command(b"undrain", b"NOT_DRAINING", _nothing, safe=True)


def kick(most: int) -> Command[int]:
    """Makes up to this many buried jobs of the used tube ready, or delayed ones when no job is buried."""
    return Command(_line(b"kick", most), b"KICKED", _number)


def kick_job(id: int) -> Command[None]:
    return Command(_line(b"kick-job", id), b"KICKED", _nothing)


def stats() -> Command[Stats]:
    return Command(b"stats", b"OK", _server_stats, safe=True)


def stats_job(id: int) -> Command[Stats]:
    return Command(_line(b"stats-job", id), b"OK", _stats, safe=True)


def stats_tube(tube: str) -> Command[Stats]:
    return Command(b"stats-tube " + _tube(tube), b"OK", _stats, safe=True)


def stats_group(name: str) -> Command[Stats]:
    """Says how many jobs of a group are not deleted, and how many jobs wait for that. beanstalkd does not know it."""
    return Command(b"stats-group " + _tube(name), b"OK", _stats, safe=True)


def list_tubes() -> Command[list[str]]:
    return Command(b"list-tubes", b"OK", _list, safe=True)


def list_tube_used() -> Command[str]:
    return Command(b"list-tube-used", b"USING", _name, safe=True)


def list_tubes_watched() -> Command[list[str]]:
    return Command(b"list-tubes-watched", b"OK", _list, safe=True)


def pause_tube(tube: str, seconds: int) -> Command[None]:
    """Pauses the tube for this many seconds: no client can reserve a job of the tube."""
    return Command(_line(b"pause-tube " + _tube(tube), seconds), b"PAUSED", _nothing, safe=True)
