"""The wiring with gevent: listeners, a greenlet for each connection, signals, the end.

turn.py decides what is done, and in which order; driver.py runs the tasks of the turn. This module decides which
greenlet is woken, and when. The first step of a connection begins a turn. Every other readable connection has its step.
Then _end_turn() commits, and the replies leave.
Invariant: code that touches the engine or the journal never waits in the middle of its work, so it needs no lock.
Nothing fails in silence: an exception out of a greenlet, a callback or a thread is logged and ends the process.
"""

from __future__ import annotations

import logging
import os
import resource
import secrets
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import gevent
from gevent.event import Event

from geventstalk._version import __version__
from geventstalk.addresses import host_of
from geventstalk.config import Settings
from geventstalk.config_listeners import Listener
from geventstalk.core.bodies import Bodies
from geventstalk.core.operate import Operate
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from geventstalk.exits import EXIT_DAMAGE, EXIT_JOURNAL, EXIT_LOCKED, EXIT_OK, EXIT_UNEXPECTED, STOP_SIGNALS
from geventstalk.front.parting import let_read, send_rest
from geventstalk.logs import Trace, make_trace
from geventstalk.serving.acceptor import CANNOT_ACCEPT, TELL_SELDOM_S, Acceptor
from geventstalk.serving.address_shares import AddressShares
from geventstalk.serving.busy_poll import BusyPoll
from geventstalk.serving.connection import Ahead, Connection, Unsent
from geventstalk.serving.driver import NEXT_TURN_S, Driver
from geventstalk.serving.fd_limits import Descriptors
from geventstalk.serving.listen import describe, full_address_of, own_end_of, peer_of
from geventstalk.serving.live_settings import LiveSettings
from geventstalk.serving.memory import Collector, Memory, Spare, memory_bytes
from geventstalk.serving.parking import Parking
from geventstalk.serving.reload import Reload
from geventstalk.serving.runqueue import RunQueue
from geventstalk.serving.sd_notify import Manager
from geventstalk.serving.throttle import Throttle
from geventstalk.stream import Stream
from geventstalk.turn.replies import Channel
from geventstalk.turn.turn import Turn
from geventstalk.wire.commands import Commands, UploadShare
from geventstalk.wire.session import Service, Session
from journal import DESCRIPTORS_MAX, DESCRIPTORS_MIN, Journal, JournalError, JournalFailed, JournalLocked

if TYPE_CHECKING:
    from geventstalk.http.backend import Backend
    from geventstalk.http.site import Site
    from geventstalk.serving.fronts import Fronts
    from geventstalk.serving.guard import Guard
    from geventstalk.serving.handshakes import Handshakes
    from geventstalk.serving.link import FrontClient, Link
    from geventstalk.serving.schedules import Schedules

PROGRESS_EVERY_S = 2.0
_ACTIVE_NS = 1_000_000_000
"""A client that has sent nothing for this long has read what was sent to it."""


class Server:
    """Serves on listening sockets until stop(). A server runs once."""

    def __init__(
        self, settings: Settings, listeners: list[socket.socket], log: logging.Logger, site: Site | None = None
    ) -> None:
        """`site` is HTTP's; None where it is off."""
        self._settings = settings
        self._listeners = listeners
        extra = settings.extra_listeners  # the last ones: a program that begins anew has the sockets only
        pairs = list(zip(listeners[len(listeners) - len(extra) :], extra, strict=True))
        self._plain = listeners[: len(listeners) - len(extra)] + [one for one, each in pairs if each.is_plain]
        self._guarded = [(one, each) for one, each in pairs if not each.is_plain]  # which want handshakes first
        self._handshakes: Handshakes | None = None
        self._guard: Guard | None = None
        self._told_of_proxy_s = -TELL_SELDOM_S
        self.reload = Reload(log)
        self._site = site
        self._backend: Backend | None = None
        self._log = log
        self._trace = make_trace(settings.verbose)
        hub: Any = gevent.get_hub()
        hub.handle_error = self._crash
        threading.excepthook = self._thread_crashed
        self._loop: Any = hub.loop
        self._wall_clock = time.time_ns
        self._engine = Operate(monotonic_ns())
        if settings.max_memory is not None:
            self._engine.bodies = Bodies(settings.max_memory)
        self._service = Service(self._engine, settings.max_job_bytes, self._facts, self._tell)
        self._service.drain = self.drain
        memory = Memory()
        if memory.limited:
            self._service.watch_memory(memory.is_left)
        self._turn = self._make_turn()
        self._turn.tell = self._tell
        self._throttle = Throttle(self._turn)
        self._service.suspend, self._service.resume = self._throttle.suspend, self._throttle.resume
        self.live = LiveSettings(self._service, self._turn, self._throttle, log, self._unix_s, self._run_schedules)
        self.live.use(settings)
        self._spare = Spare()
        self._turn.maintenance.give_memory_back = self._spare.give_back
        self._ahead = Ahead()
        self._unsent = Unsent(self._service)
        self._run_queue = RunQueue(self._loop, self._turn)
        self._descriptors: Descriptors
        # Nodes pass on the connections of all their clients, so that their addresses may have many.
        most = memory_bytes() // 4 if settings.max_memory is None else settings.max_memory // 2
        self.shares = None if settings.shared else AddressShares(self._connections_max, most, log)
        self._service.share_of = self._share_of
        self._fronts: Fronts | None = None  # where they have the clients' sockets
        self._idle: Any = self._loop.idle()
        self._look: Any = self._loop.timer(0)
        self._busy_poll = BusyPoll()
        self._tasks = Driver(self._turn.fail)
        self._acceptors: list[Acceptor] = []
        self._stopped = Event()
        self._stopped_by = ""
        self._exit_code = EXIT_OK
        self._manager = Manager.of(os.environ)
        self._id = secrets.token_hex(8)
        self._uname = os.uname()

    def run(self, drains: Callable[[], bool] = lambda: False) -> int:  # noqa: C901 - one order of starts
        """Opens the journal, replays its jobs, and serves until stop(). Returns the exit code of the process.

        `drains` says whether SIGUSR1 arrived before the handlers of this server were set.

        Raises TooFewError when no client could be served.
        """
        # A garbage collection with a million jobs stops the server for 200 ms. Jobs, tubes and sessions have no
        # reference cycles, and Connection.close() takes the cycles of a connection apart, so only what HTTP's libraries
        # make needs collecting.
        collector = Collector()
        collector.begin()
        if self._settings.io_processes and self._plain:
            self._start_fronts()
        elif self._settings.io_processes:
            self._log.warning("no front-end process is started: the server's own process has all of these listeners")
        self._descriptors = self._make_descriptors()
        self._descriptors.warn_of_few(self._log)
        if self._settings.certificates:
            self._handshakes = self._make_handshakes()
            self.reload.add(self._handshakes)
        if self._settings.access is not None:
            self._guard = self._make_guard(self._settings.access)
            self.reload.add(self._guard)
            if self._site is not None:
                self._site.admit_users(self._guard.users)
        acceptors = [] if self._site is None else self._open_site(self._site, collector)
        if self._reloads:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # during the replay; all files have just been read
        try:
            self._open_journal()
        except JournalError as error:
            self._log.error("%s", error)
            if self._fronts is not None:
                self._fronts.finish()
            return EXIT_LOCKED if isinstance(error, JournalLocked) else EXIT_DAMAGE
        self._handle_signals()
        if drains():
            self.drain(True)
        self._tasks.drive(self._turn.tasks())
        if self._fronts is not None:
            self._fronts.accept()
        else:
            self._acceptors = [self._acceptor_of(each) for each in self._plain]
        for one, listener in self._guarded:
            self._acceptors.append(self._acceptor_of(one, listener))
        for acceptor in self._acceptors:
            acceptor.start()
        for each in self._plain:
            self._log.info("listening on %s", describe(each))
        for one, listener in self._guarded:
            self._log.info("listening on %s, %s", describe(one), listener.terms)
        self._accepts()
        period_s = self._manager.watchdog_s / 2
        alive: Any = self._loop.timer(period_s, period_s)
        if period_s:
            alive.start(self._show_life)
        self._stopped.wait()
        alive.stop()
        alive.close()
        self._manager.stopping(self._stopped_by or "a failure")
        for acceptor in self._acceptors + acceptors:
            self._stop_accepting(acceptor)
        if self._fronts is not None:
            self._fronts.stop_accepting()
        if self._site is not None and not self._turn.failed:
            self._site.stop()
        self._tasks.stop()
        return self._finish()

    @property
    def _reloads(self) -> bool:
        """Returns whether SIGHUP reads files again. Without any, `systemctl reload` must not end the server."""
        return bool(self.reload.files) or self._manager.is_there

    def _handle_signals(self) -> None:
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and self._reloads:
                gevent.signal_handler(number, self.reload.run_and_log)
            elif signal.getsignal(number) != signal.SIG_IGN:
                gevent.signal_handler(number, self.stop, f"stopped by {number.name}")
        gevent.signal_handler(signal.SIGUSR1, self.drain, True)
        gevent.signal_handler(signal.SIGUSR2, self.drain, False)

    def stop(self, why: str = "stopped") -> None:
        """Ends run() cleanly: every change that was answered is safe, and no other change is made."""
        self._stopped_by = self._stopped_by or why
        self._stopped.set()

    def _unix_s(self) -> float:
        return self._wall_clock() / 1e9

    def _run_schedules(self, schedules: Schedules) -> None:
        self._tasks.run(partial(schedules.run, durable=self._settings.journal is not None))
        if self._backend is not None:
            self._backend.schedules = schedules

    def drain(self, on: bool) -> None:
        """While the server drains, it refuses puts and serves every other command."""
        self._engine.draining = on
        self._log.info("draining" if on else "no longer draining")
        if not self._stopped.is_set():
            self._manager.runs(self._status())

    # --- start and end

    def _make_turn(self) -> Turn:
        return Turn(self._engine, monotonic_ns, self._wall_clock, self._turn_begins, self._turn_failed)

    def _make_descriptors(self) -> Descriptors:
        durable = self._settings.journal is not None
        return Descriptors(DESCRIPTORS_MIN, DESCRIPTORS_MAX) if durable else Descriptors()

    def _make_handshakes(self) -> Handshakes:
        from geventstalk.serving.handshakes import Handshakes  # here: most servers have none

        made = Handshakes(self._settings.certificates.values(), self._log)
        # Clients that begin no handshake leave half of the connections to others.
        made.unfinished_max = min(made.unfinished_max, max(1, self._descriptors.for_clients // 2))
        return made

    def _make_guard(self, path: str) -> Guard:
        from geventstalk.serving.guard import Guard  # here: most servers have none

        return Guard(path, self._service, self._turn, self._hang_up, self._log)

    def _connections_max(self) -> int:
        """Returns how many connections there may be in all processes."""
        return self._descriptors.for_clients * max(1, self._settings.io_processes)

    def _acceptor_of(self, sock: socket.socket, listener: Listener | None = None) -> Acceptor:
        """Returns the acceptor of a socket. Behind a proxy the address of a connection is not that of the client."""
        serve = self.serve if listener is None else partial(self._let_in, listener)
        shares = None if listener is not None and listener.proxy else self.shares
        return Acceptor(sock, serve, self._descriptors, self._log, shares)

    def _stop_accepting(self, acceptor: Acceptor) -> None:
        acceptor.stop()

    def _accepts(self) -> None:
        """The listeners accept."""
        if self._backend is not None:
            self._backend.replayed = True
        self._manager.ready(self._status())
        self.live.lead()

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
            descriptors=self._descriptors.for_journal,
            log=self._log.warning,
        )
        if journal.created:
            self._log.info("created journal directory %s", directory)
        _warn_of_binlog(directory, self._log)
        mode = stat.S_IMODE(os.stat(directory).st_mode)
        if mode & stat.S_IRWXO:
            self._log.warning("mode %04o of %s lets every user of this host in: chmod 750 is fine", mode, directory)
        store = Store(journal, self._settings.fsync_ms, ClockOffset(self._wall_clock(), monotonic_ns()))
        begun_s = time.monotonic()
        shown_s = [begun_s]

        def progress(records: int) -> None:
            if self._backend is not None:
                gevent.sleep(NEXT_TURN_S)
            if time.monotonic() - shown_s[0] > PROGRESS_EVERY_S:
                shown_s[0] = time.monotonic()
                self._log.info("replaying the journal: %d records so far", records)
                self._manager.replaying(records)

        self._turn.open(store, progress)
        self.live.load()
        self._tell_of_replay(time.monotonic() - begun_s)

    def _tell_of_replay(self, seconds: float) -> None:
        """Logs how many jobs the journal has brought back, and keeps how long it took."""
        if self._backend is not None:
            self._backend.replay_s = seconds
        engine = self._engine
        counts = engine.ready_count, engine.delayed_count, engine.buried_count
        self._log.info(
            "replayed the journal: %d jobs in %.1f s (%d ready, %d delayed, %d buried)", sum(counts), seconds, *counts
        )

    def _open_site(self, site: Site, collector: Collector) -> list[Acceptor]:
        """Serves HTTP, already while the journal is replayed; then only to say so. Returns the acceptors."""
        from geventstalk.http.backend import Backend
        from geventstalk.serving.web import Web

        backend = self._backend = Backend(
            self._engine,
            self._service,
            self._turn,
            self._settings,
            self._log,
            monotonic_ns,
            self._wall_clock,
            self._facts,
            self.drain,
        )
        backend.commands = self._service.commands
        backend.runtime_settings = self.live.runtime_settings
        backend.use_runtime_settings = self.live.load
        backend.look_at = self._look_at
        backend.hang_up = self._hang_up
        backend.fronts = self._fronts
        backend.handshakes = self._handshakes
        backend.shares = self.shares
        backend.guard = self._guard
        backend.reload = self.reload
        backend.listen = [full_address_of(each) for each in self._listeners]
        web = Web(site, backend, self._descriptors, self._handshakes, self._settings, self._log)
        web.collect(self._loop, collector)
        return web.acceptors

    def _look_at(self, channel: Channel) -> tuple[str, str, int, int]:
        """A client's address, where it came in, replies that it has not taken, and input that its session has not."""
        if isinstance(channel, Connection):
            sock = channel.stream.socket
            return channel.stream.peer or peer_of(sock), own_end_of(sock), channel.output_bytes, 0
        client = _client_of_front(channel)
        return client.peer, client.own_end, client.output_bytes, client.queued_bytes

    def _hang_up(self, channel: Channel) -> None:
        if isinstance(channel, Connection):
            channel.hang_up()
        else:
            _client_of_front(channel).hang_up()

    def _finish(self) -> int:
        self._tasks.await_threads()
        self._turn.finish()
        self._send_rest(lambda: True)
        self._part()
        if self._fronts is not None:
            self._fronts.finish()
        if self._exit_code == EXIT_OK and self._stopped_by:
            self._log.info("%s", self._stopped_by)
        return self._exit_code

    def _send_rest(self, may: Callable[[], bool]) -> None:
        """Sends the replies that clients have not taken, while they may be sent and clients take some of them."""
        connections = [each for each in self._turn.channels.values() if isinstance(each, Connection)]
        for each in connections:
            each.stop_reading()
        send_rest(lambda: sum([each.flush() for each in connections]), may, gevent.sleep)

    def _part(self) -> None:
        """Closes all clients behind their last replies. A client that was silent for long has nothing on its way."""
        active_ns = monotonic_ns() - _ACTIVE_NS
        channels = list(self._turn.channels.values())
        let_read(
            [each.stream for each in channels if isinstance(each, Connection) and each.heard_ns >= active_ns],
            gevent.sleep,
        )
        for channel in channels:
            if isinstance(channel, Connection):
                channel.close()
            else:
                _client_of_front(channel).close()

    def _show_life(self) -> None:
        """Tells the manager's watchdog that the event loop goes round."""
        self._manager.runs(self._status())

    def _status(self) -> str:
        """The server in one line, for an operator who asks the manager."""
        engine = self._engine
        return (
            f"{'Draining' if engine.draining else 'Serving'}: {len(self._turn.channels)} connections; jobs: "
            f"{engine.ready_count} ready, {engine.reserved_count} reserved, {engine.delayed_count} delayed, "
            f"{engine.buried_count} buried"
        )

    # --- connections

    def _let_in(self, listener: Listener, sock: socket.socket) -> None:
        """Serves one connection of a listener with TLS or an identity. Runs in the greenlet of the connection."""
        stream: Stream | None = None
        client = self._client_behind(listener, sock) if listener.proxy else ""
        if client is None:
            sock.close()
        elif listener.tls is None:
            stream = Stream(sock)
        elif self._handshakes is not None:
            stream = self._handshakes.run(sock, listener)
        if stream is not None and client:
            stream.peer = client
        host = host_of(client or "")
        has_room = self._enter(host)
        try:
            if stream is not None and has_room and not self._stopped.is_set():
                self._serve(stream, listener)
                return
            if stream is not None:
                stream.close()
            self._descriptors.give_back()
        finally:
            self._end(host)

    def _enter(self, host: str) -> bool:
        return self.shares is None or self.shares.enter(host)

    def _share_of(self, client: Commands) -> UploadShare | None:
        """Returns the share that bounds the uploads of a client's address. Called for the first part of a body."""
        self._spare.keep()
        channel = self._turn.channels.get(client.number)
        if self.shares is None or channel is None:
            return None
        if isinstance(channel, Connection):
            return self.shares.of(host_of(channel.stream.peer or peer_of(channel.stream.socket)))
        return self.shares.of(host_of(_client_of_front(channel).peer))

    def _end(self, host: str) -> None:
        if self.shares is not None:
            self.shares.leave(host)

    def _client_behind(self, listener: Listener, sock: socket.socket) -> str | None:
        """Returns the address of the client, as a proxy tells it; None where the connection is to be closed."""
        from geventstalk.serving.proxied import NoHeader, client_of  # here: most servers have no proxy

        try:
            return client_of(sock, listener.proxy)
        except NoHeader as error:
            if time.monotonic() >= self._told_of_proxy_s + TELL_SELDOM_S:
                self._told_of_proxy_s = time.monotonic()
                self._log.warning("closed a connection of %s to %s: %s", peer_of(sock), listener.address, error)
        except OSError:
            pass  # it has gone
        return None

    def serve(self, sock: socket.socket) -> None:
        """Serves one connection until its end. Runs in the greenlet of the connection."""
        self._serve(Stream(sock))

    def _serve(self, stream: Stream, listener: Listener | None = None) -> None:
        fd = stream.fd
        if self._trace:
            self._trace.accept(fd)
        guard = self._guard
        ended: Callable[[], None] | None = None
        if guard is None or listener is None or not listener.identity:
            session = Session(self._service)
        else:
            found = guard.session_of(listener, stream)
            if found is None:
                stream.close()
                self._descriptors.give_back()
                return
            session, ended = found
        if self._trace and self._trace.wire:
            session.trace = _WireTrace(self._trace, fd)
        turn = self._turn
        connection = self._connect(stream, session)
        turn.join(connection)
        try:
            connection.serve()
        finally:
            if ended is not None:
                ended()
            if not self._stopped.is_set():
                connection.close()
                self._descriptors.give_back()
                turn.leave(connection)
            if self._trace:
                self._trace.close(fd)

    def _connect(self, stream: Stream, session: Session) -> Connection:
        return Connection(stream, session, self._turn, self._ahead, self._unsent, self._run_queue, Parking())

    # --- connections whose sockets front-end processes have

    def _start_fronts(self) -> None:
        from geventstalk.serving.fronts import Fronts  # here: most servers have none

        self._fronts = Fronts(self._settings.io_processes, self._plain, self._make_link, self._log, self._fronts_failed)
        self._fronts.start()

    def _make_link(self, sock: socket.socket, fronts: Fronts) -> Link:
        from geventstalk.serving.link import Link

        shared = self._ahead, self._unsent, self._run_queue
        return Link(sock, self._loop, self._join, self._leave, self._turn.step, *shared, self._cannot_accept, fronts)

    def _join(self, link: Link, number: int, peer: str, own_end: str) -> FrontClient:
        """A client has come to a front."""
        from geventstalk.serving.link import FrontClient

        session = Session(self._service)
        if self._trace:
            self._trace.accept(session.number)
            if self._trace.wire:
                session.trace = _WireTrace(self._trace, session.number)
        client = FrontClient(link, number, session, peer, own_end)
        self._turn.join(client)
        if not self._enter(host_of(peer)):
            client.hang_up()
        return client

    def _leave(self, client: FrontClient) -> None:
        self._end(host_of(client.peer))
        if not self._stopped.is_set():
            self._turn.leave(client)
        if self._trace:
            self._trace.close(client.session.number)

    def _cannot_accept(self, why: str) -> None:
        self._log.warning(CANNOT_ACCEPT, why)

    def _fronts_failed(self, text: str) -> None:
        if self._exit_code == EXIT_OK:
            self._exit_code = EXIT_UNEXPECTED
            self._log.error("%s; stopping, no client can be served", text)
        self._stopped.set()

    # --- turns

    def _turn_begins(self) -> None:
        self._loop.run_callback(self._end_turn)

    def _end_turn(self) -> None:
        if self._turn.gathers() or self._run_queue.lasts():
            self._look.start(self._turn_begins)  # by way of a timer: a callback alone would run again before any socket
            return
        self._turn.end()
        if self._unsent.turn_bytes:
            self._unsent.turn_ends()
        if self._busy_poll.turn_ends(monotonic_ns()):
            self._idle.start(self._look_again)

    def _look_again(self) -> None:
        """The idle watcher calls this whenever the event loop finds nothing to do."""
        if self._busy_poll.over(monotonic_ns()):
            self._idle.stop()

    # --- failures

    def _tell(self, text: str, error: BaseException | None) -> None:
        """Logs a line. The server goes on: the exception, if any, was undone or came before anything had changed."""
        self._log.error("%s", text, exc_info=error)

    def _turn_failed(self, error: BaseException) -> None:
        """Ends the process: no reply leaves any more. A journal brings acknowledged changes back at the next start."""
        if self._settings.journal is not None:
            self._end_with(EXIT_JOURNAL, error, "nothing since the last commit was acknowledged")
        else:
            self._end_with(EXIT_UNEXPECTED, error, "all jobs are lost, because there is no journal")

    def _crash(self, context: object, kind: Any, error: Any, trace: Any) -> None:
        """gevent's hub calls this with an exception out of a greenlet or a callback. gevent itself would go on."""
        if isinstance(error, gevent.GreenletExit):
            return
        if not isinstance(error, BaseException):
            error = RuntimeError(f"{kind} {error}")
        self._turn.failed = True
        self._end_with(EXIT_UNEXPECTED, error.with_traceback(trace), "this is a fault of geventstalk")

    def _thread_crashed(self, found: threading.ExceptHookArgs) -> None:
        """Python calls this in a thread that an exception ended: a thread of gevent, or a thread of the journal."""
        self._loop.run_callback_threadsafe(self._crash, None, found.exc_type, found.exc_value, found.exc_traceback)

    def _end_with(self, code: int, error: BaseException, what: str) -> None:
        """Logs once why the process ends: one line for an expected failure of the journal, else a traceback, too."""
        if self._exit_code == EXIT_OK:
            self._exit_code = code
            found: BaseException | None = error
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            if isinstance(error, JournalError):
                text = str(error)
                found = error.unexpected if isinstance(error, JournalFailed) else None
            self._log.error("%s; stopping, %s", text, what, exc_info=found)
        self._stopped.set()

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
        bodies = self._engine.bodies
        if bodies is not None:
            facts |= bodies.facts()
        policies = self._engine.policies
        if policies is not None:
            facts["policy-refused-puts"] = sum(each.refused for _, each in policies.all)
            facts["policy-delayed-puts"] = sum(each.delayed for _, each in policies.all)
        if self._backend is not None:
            facts["http"] = ", ".join(self._backend.http).encode()
        store = self._turn.store
        if store is not None:
            return facts | store.facts()
        return facts | {
            "binlog-oldest-index": 0,
            "binlog-current-index": 0,
            "binlog-records-migrated": 0,
            "binlog-records-written": 0,
            "binlog-max-size": self._settings.segment_bytes,
        }


def _client_of_front(channel: Channel) -> FrontClient:
    from geventstalk.serving.link import FrontClient

    assert isinstance(channel, FrontClient)
    return channel


class _WireTrace:
    """Writes the lines of a session to the log, as `-VV` wants."""

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
    """Warns an operator who has replaced beanstalkd that the files of beanstalkd are not read."""
    names = [name for name in os.listdir(directory) if name.startswith("binlog.")]
    if names:
        log.warning("%s holds %d binlog files of beanstalkd, which are not read", directory, len(names))
