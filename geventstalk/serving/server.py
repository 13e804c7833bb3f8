"""gevent: listeners, a greenlet for each connection, the clock greenlet, the commit at the end of a turn, the end.

A turn of the event loop: every connection that is readable gives its bytes to its session, without yielding; then
_end_turn() commits what all of them changed in one transaction, and only then their replies leave. The one lock is held
from the first step of a turn to its commit: whatever else works on the engine or the journal does so between two turns,
and looks at them anew when it gets it. Under `-f0` replies to changes also wait for an fsync, which happens in a thread
unless it is quick or everybody waits for it.
Invariant: no reply leaves before the commit that covers it; after a failed commit no reply leaves at all.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import secrets
import signal
import socket
import time
from time import monotonic_ns
from typing import Any

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from geventstalk._version import __version__
from geventstalk.config import Settings
from geventstalk.core.engine import NEVER, Engine
from geventstalk.core.job import Job
from geventstalk.durable.records import Epoch
from geventstalk.durable.store import Store
from geventstalk.logs import Trace, make_trace
from geventstalk.serving.acceptor import Acceptor
from geventstalk.serving.connection import Connection
from geventstalk.serving.linger import Linger
from geventstalk.serving.listen import describe
from geventstalk.wire.session import MOVE_SLICE, Service, Session
from journal import Journal, JournalError, JournalFailed, JournalLocked, SyncPoint

EXIT_OK = 0
EXIT_REPLAY = 1
EXIT_LOCKED = 10
EXIT_JOURNAL = 74

NEXT_TURN_S = 1e-9
"""Lets all others have their turn: after sleep(0) gevent comes back up to 50 times before it looks at any socket."""
HOUSEKEEPING_S = 0.05
PROGRESS_EVERY_S = 2.0


class Server:
    """Serves on listening sockets until stop(). A server runs once."""

    def __init__(self, settings: Settings, listeners: list[socket.socket], log: logging.Logger) -> None:
        self._settings = settings
        self._listeners = listeners
        self._log = log
        self._trace = make_trace(settings.verbose)
        self._lock = BoundedSemaphore(1)
        self._loop: Any = gevent.get_hub().loop
        self._store: Store | None = None
        self._engine = Engine(monotonic_ns())
        self._service = Service(self._engine, settings.max_job_bytes, self._facts)
        self._connections: dict[int, Connection] = {}
        self._touched: list[Connection] = []
        self._in_turn = False
        self._idle: Any = self._loop.idle()
        self._linger = Linger()
        self._armed_ns = NEVER
        self._nudge = Event()
        self._written = Event()  # there is something to fsync
        self._grown = Event()  # there may be something to compact
        self._grown.set()
        self._held: list[tuple[Connection, bytes]] = []
        self._sync_wanted = Event()
        self._syncing: Any = None  # the last fsync in a thread
        self._stopped = Event()
        self._exit_code = EXIT_OK
        self._id = secrets.token_hex(8)
        self._uname = os.uname()

    def run(self) -> int:
        """Opens the journal, brings its jobs back, serves until stopped. Returns the exit code of the process."""
        # Jobs, tubes and sessions are free of cycles, and a collection with a million jobs stops everything for
        # 200 ms. What a connection leaves behind is taken apart by hand in Connection.close().
        gc.collect()
        gc.disable()
        try:
            self._open_journal()
        except JournalError as error:
            self._log.error("%s", error)
            return EXIT_LOCKED if isinstance(error, JournalLocked) else EXIT_REPLAY
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) != signal.SIG_IGN:
                gevent.signal_handler(number, self.stop)
        gevent.signal_handler(signal.SIGUSR1, self.drain, True)
        gevent.signal_handler(signal.SIGUSR2, self.drain, False)
        greenlets = [gevent.spawn(self._keep_time)]
        if self._store is not None:
            greenlets.append(gevent.spawn(self._keep_house))
            if self._store.syncs_before_replies:
                greenlets.append(gevent.spawn(self._sync_for_replies))
            elif self._settings.fsync_ms is not None:
                greenlets.append(gevent.spawn(self._sync_when_due))
        durable = self._store is not None
        acceptors = [Acceptor(listener, self.serve, self._log, durable=durable) for listener in self._listeners]
        for acceptor in acceptors:
            acceptor.start()
        for listener in self._listeners:
            self._log.info("listening on %s", describe(listener))
        self._stopped.wait()
        for acceptor in acceptors:
            acceptor.stop()
        gevent.killall(greenlets)
        return self._finish()

    def stop(self) -> None:
        """Ends run() cleanly: what was answered is safe, what was not answered is not done."""
        self._stopped.set()

    def drain(self, on: bool) -> None:
        """While draining, puts are refused; everything else goes on."""
        with self._lock:
            self._engine.draining = on
        self._log.info("draining" if on else "no longer draining")

    # --- start and end

    def _open_journal(self) -> None:
        directory = self._settings.journal
        if directory is None:
            return
        journal = Journal(
            directory,
            segment_bytes=self._settings.segment_bytes,
            compact=self._settings.compact,
            budget=self._settings.max_journal_bytes,
            allocate=self._settings.fsync_ms == 0,
            accept_damage=self._settings.accept_damage,
            log=self._log.warning,
        )
        if journal.created:
            self._log.info("created journal directory %s", directory)
        _warn_of_binlog(directory, self._log)
        now_ns = monotonic_ns()
        store = Store(journal, self._settings.fsync_ms, Epoch(time.time_ns(), now_ns))
        engine = self._engine
        begun_s = time.monotonic()
        shown_s = [begun_s]

        def progress(records: int) -> None:
            if time.monotonic() - shown_s[0] > PROGRESS_EVERY_S:
                shown_s[0] = time.monotonic()
                self._log.info("replaying the journal: %d records so far", records)

        count = 0
        for job, tube_name in store.replay(engine.jobs, progress):
            engine.restore(job, tube_name, now_ns)
            count += 1
        engine.next_id = max(engine.next_id, store.start(self._find))
        engine.ledger = store
        self._store = store
        self._log.info(
            "replayed the journal: %d jobs in %.1f s (%d ready, %d delayed, %d buried)",
            count,
            time.monotonic() - begun_s,
            engine.ready_count,
            engine.delayed_count,
            engine.buried_count,
        )

    def _find(self, id: int) -> tuple[Job, bytes] | None:
        job = self._engine.jobs.get(id)
        return None if job is None else (job, self._engine.tube_of(job).name)

    def _finish(self) -> int:
        if self._exit_code == EXIT_OK:
            try:
                # The greenlet that waited for it is dead by now; what waits in `_held` may have waited for this.
                error = None if self._syncing is None else self._syncing.get()[0]
                if error is not None:
                    raise error
                self._begin_turn()
                self._end_turn()
                if self._store is not None:
                    point = self._store.sync_point()
                    if point is not None:
                        point.run()
                    self._release(self._held)
                    self._store.close()
            except JournalError as error:
                self._fail(error)
        for connection in list(self._connections.values()):
            connection.close()
        return self._exit_code

    def _fail(self, error: JournalError) -> None:
        """The journal cannot be written: nothing since the last commit is acknowledged, and the process ends."""
        if self._exit_code == EXIT_OK:
            bug = error.unexpected if isinstance(error, JournalFailed) else None
            self._log.error("%s; stopping, nothing since the last commit was acknowledged", error, exc_info=bug)
            self._exit_code = EXIT_JOURNAL
        self._stopped.set()

    # --- connections

    def serve(self, sock: socket.socket) -> None:
        """A connection's whole life; runs in its greenlet."""
        fd = sock.fileno()
        if self._trace:
            self._trace.accept(fd)
        with self._lock:
            session = Session(self._service)
        if self._trace and self._trace.wire:
            session.trace = _WireTrace(self._trace, fd)
        connection = Connection(sock, session, self._step)
        self._connections[session.number] = connection
        try:
            connection.serve()
        finally:
            if not self._stopped.is_set():
                connection.close()
                self._give_back(session)
            if self._trace:
                self._trace.close(fd)

    def _give_back(self, session: Session) -> None:
        """Returns what a client held that is gone, slice by slice."""
        while True:
            with self._lock:
                done = session.leave(monotonic_ns())
            self._begin_turn()
            if done:
                self._connections.pop(session.number)
                return
            gevent.sleep(NEXT_TURN_S)

    def _step(self, connection: Connection, data: bytes | None) -> None:
        """Gives bytes to a session; none (b"") lets it go on, None is the end of what the client sends."""
        if not self._in_turn:
            self._begin_turn()
        session = connection.session
        store = self._store
        before = 0 if store is None else store.appended
        now_ns = monotonic_ns()
        try:
            if data is None:
                session.hang_up(now_ns)
            elif data:
                session.receive(data, now_ns)
            else:
                session.run(now_ns)
        except Exception:
            self._log.exception("a command failed in a way it must not; closing its connection")
            session.out.append(b"INTERNAL_ERROR\r\n")
            session.closed = True
        if store is not None and store.appended != before:
            connection.changed = True
        if not connection.touched:
            connection.touched = True
            self._touched.append(connection)

    # --- the end of a turn

    def _begin_turn(self) -> None:
        """Something has happened that a commit and replies must follow; the lock is held until then."""
        if not self._in_turn:
            self._lock.acquire()
            self._in_turn = True
            self._loop.run_callback(self._end_turn)

    def _end_turn(self) -> None:
        if not self._in_turn:
            return
        now_ns = monotonic_ns()
        try:
            if self._exit_code or not self._commit(now_ns):
                return
        finally:
            self._in_turn = False
            self._lock.release()
        touched = self._touched
        self._touched = []
        store = self._store
        if store is not None and store.syncs_before_replies:
            self._flush_durably(touched)
        else:
            for connection in touched:
                connection.touched = False
                session = connection.session
                if session.out:
                    connection.send(session.take_out())
                connection.after_flush()
        self._arm(now_ns)
        if self._linger.turn_ends(monotonic_ns()):
            self._idle.start(self._look_again)

    def _look_again(self) -> None:
        """Called as often as the event loop finds nothing to do, while the watcher runs."""
        if self._linger.over(monotonic_ns()):
            self._idle.stop()

    def _commit(self, now_ns: int) -> bool:
        """What all connections changed in this turn, in one transaction. Returns whether replies may leave."""
        self._collect_served()
        store = self._store
        if store is not None and store.dirty:
            try:
                store.commit(now_ns)
            except JournalError as error:
                self._fail(error)
                return False
            self._written.set()
            self._grown.set()
        return True

    def _collect_served(self) -> None:
        """Clients whose wait ended in this turn have replies, too."""
        served = self._engine.served
        if served:
            for client in served:
                connection = self._connections.get(client.number)
                if connection is not None and not connection.touched:
                    connection.touched = True
                    self._touched.append(connection)
            served.clear()

    def _flush_durably(self, touched: list[Connection]) -> None:
        """Under `-f0`: replies to changes, and what comes behind them, wait until the changes are on the device."""
        for connection in touched:
            connection.touched = False
            session = connection.session
            if session.out:
                data = session.take_out()
                if connection.changed or connection.holds:
                    connection.changed = False
                    connection.hold(data)
                    self._held.append((connection, data))
                else:
                    connection.send(data)
            connection.after_flush()
        if self._held and not self._sync_wanted.is_set() and not self._sync_here():
            self._sync_wanted.set()

    def _sync_here(self) -> bool:
        """The fsync that replies wait for, when it needs no thread: to hand it over and back costs as much as a quick
        one, and when everybody waits there is nobody else to serve. Returns whether that was so.
        """
        assert self._store is not None
        everybody_waits = len(self._held) + self._engine.waiting_count >= len(self._connections)
        if not everybody_waits and not self._store.syncs_quickly:
            return False
        held = self._held
        self._held = []
        point = self._store.sync_point()
        if point is not None:
            error, took_ns = _run(point)
            if error is not None:
                self._fail(error)
                return True
            self._store.sync_took(took_ns)
        self._release(held)
        return True

    def _release(self, held: list[tuple[Connection, bytes]]) -> None:
        for connection, data in held:
            connection.release(data)

    # --- greenlets

    def _keep_time(self) -> None:
        """Sleeps until the next deadline of the engine, and lets happen what is due, in slices."""
        while True:
            with self._lock:
                done = self._engine.advance(monotonic_ns(), MOVE_SLICE)
                deadline_ns = self._engine.next_deadline_ns()
            if self._engine.served:
                self._begin_turn()
            if not done:
                gevent.sleep(NEXT_TURN_S)
                continue
            self._armed_ns = deadline_ns
            self._nudge.clear()
            timeout_s = None if deadline_ns == NEVER else max(0, deadline_ns - monotonic_ns()) / 1e9
            self._nudge.wait(timeout_s)

    def _arm(self, now_ns: int) -> None:
        """Wakes the clock when something is due earlier than it knows."""
        deadline_ns = self._engine.next_deadline_ns()
        if deadline_ns != NEVER and (self._armed_ns == NEVER or deadline_ns < self._armed_ns):
            self._nudge.set()

    def _sync_when_due(self) -> None:
        """Under `-fMS`: an fsync in a thread, MS after the first commit that it covers."""
        store = self._store
        assert store is not None
        while self._exit_code == EXIT_OK:
            self._written.wait()
            self._written.clear()
            if store.sync_due_ns:
                gevent.sleep(max(0, store.sync_due_ns - monotonic_ns()) / 1e9)
                self._sync_away()

    def _sync_for_replies(self) -> None:
        """Under `-f0`: an fsync in a thread for all replies that wait, then one for those that came meanwhile."""
        while self._exit_code == EXIT_OK:
            self._sync_wanted.wait()
            count = len(self._held)  # they stay in it: stop() may kill this greenlet while it waits
            if self._sync_away():
                held, self._held = self._held[:count], self._held[count:]
                self._release(held)
                if self._held:
                    self._sync_here()
            if not self._held:
                self._sync_wanted.clear()

    def _sync_away(self) -> bool:
        """fsyncs what is committed, in a thread; returns whether it is on the device. A failure ends the server."""
        assert self._store is not None
        point = self._store.sync_point()
        if point is None:
            return True
        self._syncing = gevent.get_hub().threadpool.spawn(_run, point)
        error, took_ns = self._syncing.get()
        if error is not None:
            self._fail(error)
            return False
        self._store.sync_took(took_ns)
        return True

    def _keep_house(self) -> None:
        """Compacts in slices, one a turn, while there is something to compact; sleeps while nothing is written."""
        store = self._store
        assert store is not None
        while True:
            if not store.settling:
                self._grown.clear()
                self._grown.wait()
            gevent.sleep(HOUSEKEEPING_S)
            try:
                while self._compact_slice(store):
                    gevent.sleep(NEXT_TURN_S)
            except JournalError as error:
                self._fail(error)
                return

    def _compact_slice(self, store: Store) -> bool:
        """Returns whether there was something to compact. A turn's commit may have been quicker: it compacts, too."""
        with self._lock:
            if not store.wants_compaction():
                return False
            store.compact_slice(monotonic_ns())
        self._written.set()
        return True

    # --- statistics

    def _facts(self) -> dict[str, object]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        uname = self._uname
        facts: dict[str, object] = {
            "pid": os.getpid(),
            "version": __version__.encode(),
            "rusage-utime": f"{usage.ru_utime:.6f}",
            "rusage-stime": f"{usage.ru_stime:.6f}",
            "id": self._id,
            "hostname": uname.nodename.encode(),
            "os": uname.version.encode(),
            "platform": uname.machine.encode(),
        }
        if self._store is not None:
            return facts | self._store.facts()
        return facts | {
            "binlog-oldest-index": 0,
            "binlog-current-index": 0,
            "binlog-records-migrated": 0,
            "binlog-records-written": 0,
            "binlog-max-size": self._settings.segment_bytes,
        }


def _run(point: SyncPoint) -> tuple[JournalError | None, int]:
    """Syncs. Returns what failed, which gevent would print if it were raised in a thread, and how long it took."""
    begun_ns = monotonic_ns()
    try:
        point.run()
    except JournalError as error:
        return error, 0
    return None, monotonic_ns() - begun_ns


class _WireTrace:
    """Turns a session's lines into those of `-VV`."""

    def __init__(self, trace: Trace, fd: int) -> None:
        self._trace = trace
        self._fd = fd

    def __call__(self, direction: str, data: bytes) -> None:
        if direction == "<":
            self._trace.command(self._fd, data.partition(b" ")[0])
            return
        line = data.partition(b"\r\n")[0]
        words = line.split(b" ")
        if words[0] == b"INSERTED":
            self._trace.job_in(self._fd, int(words[1]))
        self._trace.reply(self._fd, line)
        if words[0] in (b"RESERVED", b"FOUND"):
            self._trace.job_out(self._fd, int(words[1]))


def _warn_of_binlog(directory: str, log: logging.Logger) -> None:
    """beanstalkd's files are not read; somebody who replaced it must hear of that before missing the jobs."""
    names = [name for name in os.listdir(directory) if name.startswith("binlog.")]
    if names:
        log.warning("%s holds %d binlog files of beanstalkd, which are not read", directory, len(names))
