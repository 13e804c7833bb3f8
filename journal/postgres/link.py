"""A connection to PostgreSQL, in blocking style over a Waiter, so that its owner decides what else happens meanwhile.

This module must not know tables. Every wait has a deadline of its own, for a backend that is frozen answers nothing and
TCP sees nothing wrong. Invariant: an answer that comes with a warning is not taken for a plain one: a commit whose wait
for the replica was cancelled says success, and warns (01000).
"""

from __future__ import annotations

import ctypes
import functools
import re
import select
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from psycopg import pq
from psycopg.errors import Error as PsycopgError
from psycopg.pq.misc import find_libpq_full_path

from journal.errors import JournalError, JournalLocked, JournalUnreachable
from journal.postgres.place import Place

Waiter = Callable[[int, bool, bool, float], bool]
"""(descriptor, for reading, for writing, seconds) to whether the descriptor is ready. An owner that serves others
meanwhile parks in it."""
Need = tuple[int, bool, bool, float]
"""The arguments of a Waiter. Work that waits is a generator: it yields needs, and is sent whether they came."""
Resolver = Callable[[str], list[str]]
"""A host's name to its addresses. Without one libpq looks names up, and nothing else happens meanwhile."""

CONNECT_S: Final = 2.0
"""A host may take this long to answer. When nothing is known yet, all others have as much time."""
_OTHERS_S: Final = 0.25
"""A server as new as the one that was seen waits this long for another host to be newer."""
_TIMELINE: Final = "SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"
_SYSTEM: Final = "SELECT system_identifier FROM pg_control_system()"
ANSWER_S: Final = 10.0
"""An answer may take this long where the caller does not say."""
_ANSWER_S_MAX: Final = 120.0
"""The most time for a large answer that comes slowly, without ever pausing for its time."""
_WARNINGS_MAX: Final = 20
"""The most warnings that are kept of one answer."""
SETTINGS: Final = {
    "application_name": "geventstalk",
    "keepalives_idle": "2",
    "keepalives_interval": "1",
    "keepalives_count": "3",
    "tcp_user_timeout": "5000",
    "target_session_attrs": "read-write",
}
"""The options for libpq unless the place says otherwise: a cut network shows after some seconds."""
SESSION: Final = (
    "SET client_min_messages = warning; SET statement_timeout = 0; SET lock_timeout = 0;"
    "SET idle_in_transaction_session_timeout = '60s'; SET default_transaction_isolation = 'read committed';"
    "SET bytea_output = hex; SET standard_conforming_strings = on;"
    "SELECT set_config(name, CASE name WHEN 'jit' THEN 'off' ELSE '0' END, false) FROM pg_settings"
    " WHERE name IN ('idle_session_timeout', 'transaction_timeout', 'jit');"
    "SELECT set_config('client_connection_check_interval', '2s', false)"
    " WHERE current_setting('server_version_num')::int >= 140000 AND version() NOT LIKE '%Visual C%'"
)
"""The settings of every session, whatever an administrator has set for this user or this database.

No time limit of the server ends it. A backend whose client is gone does not wait for a lock for ever, where it can
tell. Nothing is compiled: that takes a hundred times longer than any statement here.
"""
UNREACHABLE: Final = ("08", "57P")
"""Classes of errors with which a connection ends: the database shuts down, starts, or has lost its way."""
PASSING: Final = ("40", "53", "54000", "55", "57", "58")
"""Classes of errors after which the same statement may succeed: conflicts, no room, no transaction numbers, locks,
cancelled, the system."""
RELINK: Final = ("25006", "26000")
"""The database takes no writes any more, or has forgotten the session: another link is needed."""
POOLED: Final = (
    "a pooler stands before the database (pgbouncer or the like) and gives each transaction another session, "
    "so what was acknowledged could be lost: give the address of the database itself"
)
GONE: Final = ("3F000", "42P01")
"""There is no such schema or no such table."""
_UNRELATED: Final = (b"varsup.c", b"multixact.c")
"""PostgreSQL's files whose warnings say nothing of the statement: that numbers of transactions run out in some weeks.
They come with each commit until VACUUM was run."""
LOCKED: Final = ("28", "3D000", "42501", "55000")
"""Classes of refusals that another try does not change: this user, no such database, no right to it."""
_STATE: Final = re.compile(r":  ([0-9A-Z]{5}): ")
_SOURCE: Final = re.compile(r"\n[^\n]*:  \w+, \w+\.c:\d+")
_VERBOSE: Final = 2
"""libpq says a SQLSTATE of a connection that failed only so (PQERRORS_VERBOSE), and then its place in the source, too.
All words around them are in the language of the server."""


@functools.cache
def _set_verbosity() -> Callable[[int | None, int], int]:
    """libpq's PQsetErrorVerbosity, which psycopg does not have, out of the library that psycopg has loaded."""
    path = sys.modules[pq.PGconn.__module__].__file__ or ""
    function = ctypes.CDLL(find_libpq_full_path() if path.endswith(".py") else path).PQsetErrorVerbosity
    function.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return function


_REPLICA: Final = ("session is read-only", "hot standby")
"""Parts of libpq's message about a server that is there and takes no writes."""


class Refused(JournalError):
    """The database refuses a statement, which has changed nothing. `state` is its SQLSTATE."""

    def __init__(self, state: str, text: str) -> None:
        super().__init__(text)
        self.state = state

    @property
    def passing(self) -> bool:
        """Returns whether the same statement may succeed later, perhaps over another link."""
        return self.state.startswith(PASSING) or self.state in RELINK


class Stale(JournalUnreachable):
    """Only another database than before can be written to, or a part of it that was left behind."""


class Answer(NamedTuple):
    """The answer to a statement: its rows, how many rows it changed, and the warnings of the database."""

    rows: list[tuple[bytes | None, ...]]
    changed: int
    warnings: list[str]


def poll(descriptor: int, reading: bool, writing: bool, seconds: float) -> bool:
    """The Waiter of a thread that has nothing else to do."""
    waiter = select.poll()
    waiter.register(descriptor, (select.POLLIN if reading else 0) | (select.POLLOUT if writing else 0))
    return bool(waiter.poll(max(0, int(seconds * 1000 + 0.999))))


_T = TypeVar("_T")


def drive(work: Generator[Need, bool, _T], wait: Waiter) -> _T:
    """Does work to its end."""
    try:
        need = next(work)
        while True:
            need = work.send(wait(*need))
    except StopIteration as end:
        done: _T = end.value
        return done


class Link:
    """One connection, for one thread. connect() may be called again after any JournalUnreachable."""

    def __init__(self, place: Place, wait: Waiter = poll, resolve: Resolver | None = None) -> None:
        self.place = place
        self.shown = place.shown
        self.wait = wait
        self.warnings: list[str] = []
        """The warnings of the database since this was last emptied. Each begins with its SQLSTATE."""
        self.pid = 0
        """Of the backend, which has the session as long as the connection is up."""
        self._resolve = resolve
        self._conn: pq.abc.PGconn | None = None
        self.words: dict[str, str] = {}
        """The options with which the present connection was made: another link to the same server takes the same."""
        self._repeated = ""  # the statement that execute_again() need not prepare
        self.timeline = self.system = 0
        """Of the newest server that this was connected to. 0 is unknown."""
        self.untold: list[str] = []
        """Facts that the connected server does not tell of itself, and why."""
        self.tells: Callable[[str], None] = _say_nothing
        """Hears lines for the operator about hosts."""
        self._known = False  # whether a connection was ever made
        self._until_s = 0.0  # when connect() waits for no other host any more
        self.answer_s = ANSWER_S
        """A server that sends nothing for so long while it is asked is given up."""
        self.patient = True
        """True when that time begins anew with each piece of an answer. Otherwise it is for the whole answer."""

    # --- connecting

    def connect(self, settings: str = "") -> None:
        """Asks all hosts at once, and leaves a session on the newest, in which SESSION and `settings` (SQL) hold.

        Raises Stale when what can be written to is older than what was seen, JournalUnreachable. Raises JournalLocked
        when every host refuses this user, and none ever took him, or when hosts are of different database systems.
        """
        self.close()
        works, said = self._works(settings)
        refused, silent, stale = not said, said, ""
        best: Link | None = None
        self._until_s = time.monotonic() + CONNECT_S + self.answer_s
        try:
            for probe, error in self._race(works):
                if error is not None:
                    refused = refused and isinstance(error, JournalLocked)
                    said = str(error)
                    silent = silent if any(each in said for each in _REPLICA) else said
                elif wrong := self._what_is_wrong(probe):
                    refused, stale = False, f"{self.shown}: {probe.where} takes writes, and {wrong}"
                else:
                    best = self._newer(best, probe)
                    if best.timeline > self.timeline and self._known:
                        break
                    self._until_s = min(self._until_s, time.monotonic() + (_OTHERS_S if self._known else CONNECT_S))
            if stale:
                self.tells(stale)
            if best is None:
                raise (
                    Stale(stale)
                    if stale
                    else (JournalLocked if refused and not self._known else JournalUnreachable)(
                        said or f"{self.shown}: no host"
                    )
                )
            if silent and not self._known:
                self.tells(f"{silent}; whether there is a newer primary is not known")
            self._take(best)
        finally:
            for probe, work in works:
                work.close()
                probe.close()

    def _works(self, settings: str) -> tuple[list[tuple[Link, Generator[Need, bool, None]]], str]:
        """connecting() to each address of each host, and what is wrong with a name."""
        works, said = [], ""
        for host in self._hosts():
            try:
                addresses = self._addresses(host)
            except JournalUnreachable as error:  # its name is gone, as that of a container that has died
                said = str(error)
                continue
            for address in addresses:
                probe = Link(self.place)
                probe.answer_s = self.answer_s
                works.append((probe, probe.connecting({**host, "hostaddr": address} if address else host, settings)))
        return works, said

    def _race(
        self, works: list[tuple[Link, Generator[Need, bool, None]]]
    ) -> Generator[tuple[Link, JournalError | None], None, None]:
        """Runs all of these at once, until it is time to stop. Yields each that ends, with its error."""
        going: list[tuple[Link, Generator[Need, bool, None], Need, float]] = []
        ready: list[tuple[Link, Generator[Need, bool, None], bool | None]] = [(*each, None) for each in works]
        while ready or (going and time.monotonic() < self._until_s):
            for probe, work, came in ready:
                try:
                    need = next(work) if came is None else work.send(came)
                except StopIteration:
                    yield probe, None
                except JournalError as error:
                    yield probe, error
                else:
                    going.append((probe, work, need, time.monotonic() + need[3]))
            ready = []
            if not going:
                return
            until_s = min(self._until_s, min([end for *_, end in going]))
            there = _await_any([need for _, _, need, _ in going], until_s, self.wait)
            now_s = time.monotonic()
            ready = [
                (each[0], each[1], each[2][0] in there) for each in going if each[2][0] in there or each[3] <= now_s
            ]
            going = [each for each in going if each[2][0] not in there and each[3] > now_s]

    def _what_is_wrong(self, probe: Link) -> str:
        """Why the server that a probe has reached cannot be the one that was seen before; "" when it can be."""
        if probe.system and self.system and probe.system != self.system:
            return "is another database system than before"
        if probe.timeline and probe.timeline < self.timeline:
            return f"was left behind: its timeline {probe.timeline} is older than {self.timeline}; make it a replica"
        return ""

    def _newer(self, best: Link | None, probe: Link) -> Link:
        """Of two servers that both take writes the one to write to."""
        if best is None:
            return probe
        if best.system and probe.system and best.system != probe.system:
            raise JournalLocked(
                f"{self.shown}: {best.where} and {probe.where} are of different database systems: name those of one"
            )
        newer, older = (probe, best) if probe.timeline > best.timeline else (best, probe)
        if newer.timeline > older.timeline:
            self.tells(
                f"{self.shown}: {older.where} takes writes, and was left behind: its timeline {older.timeline} is "
                f"older than {newer.timeline} of {newer.where}; make it a replica"
            )
        return newer

    def _take(self, probe: Link) -> None:
        """Goes on with the connection of a probe."""
        conn = probe.give_up()
        assert conn is not None
        conn.notice_handler = self._notice
        self._conn, self.words, self.pid = conn, probe.words, probe.pid
        self.timeline, self.system = probe.timeline or self.timeline, probe.system or self.system
        self.untold = probe.untold
        self._known = True

    @property
    def where(self) -> str:
        """The host of the connection, for messages."""
        words = self.words
        host = words.get("host", "") or words.get("hostaddr", "") or "its socket"
        return f"{host}:{words['port']}" if "port" in words else host

    def connecting(self, words: dict[str, str], settings: str) -> Generator[Need, bool, None]:
        """connect() to one host, as work."""
        self.close()
        try:
            yield from self._connecting(words)
            conn = self.conn
            conn.nonblocking = 1
            conn.notice_handler = self._notice
            yield from self._running(f"{SESSION};{settings}", self.answer_s)
            answer = yield from self.asking("SELECT pg_backend_pid()", ())
            self.pid = int(answer.rows[0][0] or 0)
            if self.pid != conn.backend_pid:
                raise JournalLocked(f"{self.shown}: {POOLED}")
            self.words = words
            self.timeline = int((yield from self._fact(_TIMELINE, "its timeline")) or "0", 16)
            self.system = int((yield from self._fact(_SYSTEM, "its system identifier")) or "0")
            self.warnings.clear()
        except BaseException:
            self.close()
            raise

    def _fact(self, sql: str, what: str) -> Generator[Need, bool, str]:
        """A fact about the server; "" where this user may not know it."""
        try:
            answer = yield from self.asking(sql, ())
        except Refused as error:
            self.untold.append(f"the database does not tell {what}: {error}")
            return ""
        return (answer.rows[0][0] or b"").decode()

    def _hosts(self) -> list[dict[str, str]]:
        """A connection string in words for each host."""
        try:
            given = {
                option.keyword.decode(): option.val.decode()
                for option in pq.Conninfo.parse(self.place.libpq.encode())
                if option.val is not None
            }
        except PsycopgError as error:
            raise JournalLocked(f"{self.shown}: {_line(str(error))}") from error
        words = {**SETTINGS, **given, "client_encoding": "SQL_ASCII"}  # names come out as they went in
        if "service" in words:
            return [words]
        defaults = {
            option.keyword.decode(): option.val.decode()
            for option in pq.Conninfo.get_defaults()
            if option.val is not None
        }
        hosts = words.get("host", defaults.get("host", "")).split(",")
        addresses = words.get("hostaddr", "").split(",") if words.get("hostaddr") else []
        ports = words.get("port", defaults.get("port", "")).split(",")
        made = []
        for at in range(max(len(hosts), len(addresses))):
            one = dict(words)
            host = hosts[at] if at < len(hosts) else ""
            port = ports[at] if len(ports) > 1 and at < len(ports) else ports[0]
            if host:
                one["host"] = host
            if port:
                one["port"] = port
            if at < len(addresses):
                one["hostaddr"] = addresses[at]
            made.append(one)
        return made

    def _addresses(self, words: dict[str, str]) -> list[str]:
        """Of a host. [""] where libpq has to find the address itself. Raises JournalUnreachable."""
        host = words.get("host", "")
        if "service" in words or words.get("hostaddr"):
            return [""]
        if self._resolve is None or not host or host.startswith(("/", "@")) or not host.strip("0123456789."):
            return [""]
        if ":" in host:
            return [""]
        try:
            return self._resolve(host) or [""]
        except (OSError, UnicodeError) as error:
            raise JournalUnreachable(f"{self.shown}: the address of {host} cannot be found: {error}") from error

    def _connecting(self, words: dict[str, str]) -> Generator[Need, bool, None]:
        text = " ".join(f"{name}='{_quoted(value)}'" for name, value in words.items())
        made: Any = pq.PGconn.connect_start(text.encode())
        _set_verbosity()(made.pgconn_ptr, _VERBOSE)  # which psycopg's interface leaves out
        self._conn = conn = made
        end = time.monotonic() + CONNECT_S
        where = words.get("host", "") or words.get("hostaddr", "") or "its socket"
        state = pq.PollingStatus.WRITING
        while conn.status != pq.ConnStatus.BAD:
            left = end - time.monotonic()
            reading = state == pq.PollingStatus.READING
            came = left > 0 and (yield (conn.socket, reading, not reading, left))
            if not came:
                raise JournalUnreachable(f"{self.shown}: {where} does not answer for {CONNECT_S:g} s")
            state = pq.PollingStatus(conn.connect_poll())
            if state in (pq.PollingStatus.OK, pq.PollingStatus.FAILED):
                break
        if conn.status != pq.ConnStatus.OK:
            text = conn.get_error_message()
            locked = conn.needs_password or any(each.startswith(LOCKED) for each in _STATE.findall(text))
            text = _line(_SOURCE.sub("", text))
            raise (JournalLocked if locked else JournalUnreachable)(f"{self.shown}: {text}")

    def _notice(self, result: pq.abc.PGresult) -> None:
        if result.error_field(pq.DiagnosticField.SOURCE_FILE) in _UNRELATED or len(self.warnings) >= _WARNINGS_MAX:
            return
        state = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
        text = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b""
        self.warnings.append(f"{state.decode()} {text.decode(errors='replace')}")

    # --- talking

    @property
    def up(self) -> bool:
        """Returns whether there is a connection, as this end knows it."""
        return self._conn is not None and self._conn.status == pq.ConnStatus.OK

    @property
    def conn(self) -> pq.abc.PGconn:
        """For a caller that sends without waiting. Raises JournalUnreachable when there is none."""
        if self._conn is None:
            raise JournalUnreachable(f"{self.shown}: the connection is gone")
        return self._conn

    @property
    def fileno(self) -> int:
        return self._conn.socket if self._conn is not None and self._conn.status == pq.ConnStatus.OK else -1

    def run(self, sql: str, seconds: float = 0.0) -> None:
        """Statements without parameters, in one transaction. Raises Refused, JournalUnreachable."""
        drive(self._running(sql, seconds or self.answer_s), self.wait)

    def execute(
        self, sql: str, values: Sequence[bytes | None] = (), *, binary: bool = False, seconds: float = 0.0
    ) -> Answer:
        """One statement. `values` are in text form, the rows are in text form or binary.

        Raises Refused, which leaves the session as it was, and JournalUnreachable, after which there is none.
        """
        return drive(self.asking(sql, values, binary=binary, seconds=seconds), self.wait)

    def asking(
        self, sql: str, values: Sequence[bytes | None], *, binary: bool = False, seconds: float = 0.0
    ) -> Generator[Need, bool, Answer]:
        """execute() as work."""
        self.warnings.clear()
        self._repeated = ""
        try:
            self.conn.send_query_params(sql.encode(), values, result_format=int(binary))
        except PsycopgError as error:
            raise self.broken(error) from error
        return (yield from self._answer(seconds or self.answer_s))

    def execute_again(self, sql: str, values: Sequence[bytes | None], *, binary: bool = False) -> Answer:
        """execute() of a statement that this session often gets, one after the other: it is prepared once.

        The statement has no name. Whatever else is asked takes its place, so the database keeps no more than one.
        """
        if self._repeated != sql:
            drive(self._preparing(sql), self.wait)
        return drive(self._again(values, binary), self.wait)

    def _preparing(self, sql: str) -> Generator[Need, bool, None]:
        try:
            self.conn.send_prepare(b"", sql.encode())
        except PsycopgError as error:
            raise self.broken(error) from error
        yield from self._results(self.answer_s)
        self._repeated = sql

    def _again(self, values: Sequence[bytes | None], binary: bool) -> Generator[Need, bool, Answer]:
        self.warnings.clear()
        try:
            self.conn.send_query_prepared(b"", values, result_format=int(binary))
        except PsycopgError as error:
            raise self.broken(error) from error
        return (yield from self._answer(self.answer_s))

    def send(self, sql: str) -> None:
        """Begins run(); answer() ends it."""
        self.warnings.clear()
        self._repeated = ""
        try:
            self.conn.send_query(sql.encode())
        except PsycopgError as error:
            raise self.broken(error) from error

    def answer(self, seconds: float = 0.0) -> Answer:
        """Returns the result of send(). Raises as execute()."""
        return drive(self._answer(seconds or self.answer_s), self.wait)

    def _running(self, sql: str, seconds: float) -> Generator[Need, bool, None]:
        self.send(sql)
        yield from self._results(seconds)

    def _answer(self, seconds: float) -> Generator[Need, bool, Answer]:
        results = yield from self._results(seconds)
        return answer_of(results[0], self.warnings) if results else Answer([], 0, list(self.warnings))

    def _results(self, seconds: float) -> Generator[Need, bool, list[pq.abc.PGresult]]:
        conn = self.conn
        end = time.monotonic() + seconds
        last = end + max(0.0, _ANSWER_S_MAX - seconds) if self.patient else end
        results = []
        refused: Refused | None = None
        try:
            while True:
                unsent = conn.flush() != 0
                while unsent or conn.is_busy():
                    left = end - time.monotonic()
                    came = left > 0 and (yield (conn.socket, True, unsent, left))
                    if not self._is_mine(conn):
                        raise JournalUnreachable(f"{self.shown}: the connection was given up")
                    if not came:
                        raise self.broken(f"no answer for {seconds:g} s")
                    conn.consume_input()
                    end = min(time.monotonic() + seconds, last)
                    unsent = unsent and conn.flush() != 0
                result = conn.get_result()
                if result is None:
                    break
                results.append(result)
                refused = refused or refusal(result)
        except PsycopgError as error:
            raise self.broken(error) from error
        if conn.status != pq.ConnStatus.OK:
            raise self.broken(refused or "the connection is gone")
        if refused is not None:
            if refused.state.startswith(UNREACHABLE):
                raise self.broken(refused)
            raise refused
        return results

    def _is_mine(self, conn: pq.abc.PGconn) -> bool:
        """Returns whether this is the connection. A comparison in place would have mypy, without psycopg, think of
        None.
        """
        return conn is self._conn

    def broken(self, error: object) -> JournalUnreachable:
        """Closes the connection, and returns the error to raise."""
        self.close()
        return JournalUnreachable(f"{self.shown}: {_line(str(error))}")

    def refuse(self, error: Refused) -> NoReturn:
        """Returns what a refusal comes to where all can be begun anew. Raises JournalUnreachable when that may help.

        A schema that is not there may come back: it was renamed, or this is another database.

        Raises JournalLocked when this user may not, else the error itself.
        """
        if error.passing or error.state in GONE:
            raise self.broken(error) from error
        if error.state == "42501":
            raise JournalLocked(f"{self.shown}: {error}") from error
        raise error

    def close(self) -> None:
        """May be called again, also while another thread waits for an answer."""
        conn = self.give_up()
        if conn is not None:
            finish(conn)

    def give_up(self) -> pq.abc.PGconn | None:
        """Has no connection from now on, and gives the one that there was, for finish()."""
        conn, self._conn = self._conn, None
        self._repeated = ""
        return conn


def _await_any(needs: list[Need], until_s: float, wait: Waiter) -> set[int]:
    """The descriptors that are ready, once one is, or it is time."""
    with closing(select.epoll()) as group:
        for descriptor, reading, writing, _ in needs:
            group.register(descriptor, (select.EPOLLIN if reading else 0) | (select.EPOLLOUT if writing else 0))
        wait(group.fileno(), True, False, max(0.0, until_s - time.monotonic()))
        return {descriptor for descriptor, _ in group.poll(0)}


def finish(conn: pq.abc.PGconn) -> None:
    """Closes a connection. Nothing may watch its descriptor any more."""
    with suppress(PsycopgError):
        conn.finish()


def refusal(result: pq.abc.PGresult) -> Refused | None:
    """The error that a result is; None when it is none."""
    if result.status in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.SINGLE_TUPLE):
        return None
    state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    text = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY)
    said = text.decode(errors="replace") if text else _line(result.get_error_message())
    return Refused(state, _line(said))


def answer_of(result: pq.abc.PGresult, warnings: list[str]) -> Answer:
    """The rows of a result that is no error."""
    width = result.nfields
    get = result.get_value
    rows = [tuple([get(row, column) for column in range(width)]) for row in range(result.ntuples)]
    return Answer(rows, result.command_tuples or 0, list(warnings))


def _say_nothing(text: str) -> None:
    return


def _line(text: str) -> str:
    return " ".join(text.split())


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "\\'")
