"""A server that is a node of a cluster: it serves while it leads, and passes clients through while it stands by.

This module must not know how nodes agree on who leads: geventstalk/cluster does. When the node leads no more, run()
ends, and `begins_anew` says that the process is to run the same command again, with its listening sockets.
Invariant: a client reaches a session only while this node leads, and its replies leave only while the lease holds.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Mapping
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

import gevent

from geventstalk.addresses import peer_of
from geventstalk.cluster.member import STANDBY
from geventstalk.cluster.node import Host, Node, RelayedClient, lease_clock_ns, resolve, wait_for
from geventstalk.cluster.relay import answer_to
from geventstalk.config import ConfigError, Settings
from geventstalk.config_listeners import Listener
from geventstalk.durable.store import Store
from geventstalk.exits import EXIT_DAMAGE, EXIT_JOURNAL, EXIT_LOCKED, EXIT_OK
from geventstalk.serving.acceptor import TELL_SELDOM_S, Acceptor
from geventstalk.serving.connection import Ahead, Connection, Unsent
from geventstalk.serving.fd_limits import Descriptors
from geventstalk.serving.listen import advertised
from geventstalk.serving.node_links import StreamSocket, header_for, is_node, link_to_node, take_client
from geventstalk.serving.parking import Parking
from geventstalk.serving.proxied import NoHeader
from geventstalk.serving.runqueue import RunQueue
from geventstalk.serving.server import PROGRESS_EVERY_S, Server
from geventstalk.serving.tls import TlsStream
from geventstalk.stream import Stream
from geventstalk.turn.leader import LeasedTurn
from geventstalk.turn.turn import Turn
from geventstalk.wire.protocol import R_UNKNOWN_COMMAND
from geventstalk.wire.session import Session
from journal import JournalDamaged, JournalFailed, JournalLocked, JournalNewer, SharedLog, fence_for, shared_log
from journal.fence import Identity

if TYPE_CHECKING:
    from geventstalk.http.site import Site

_DESCRIPTORS: Final = 10
"""Connections to the database, and descriptors that are needed while all hosts are asked at once."""
_MUTE_S: Final = 0.05
_ANSWER_S_MIN: Final = 1.0
"""A database may be silent for at least this long, also where leases are short."""
_END_S: Final = 10.0
"""The end waits at most this long for a commit that is under way."""


class ClusterServer(Server):
    """A Server whose journal is a shared one. `seen` is as a Node says."""

    def __init__(
        self,
        settings: Settings,
        listeners: list[socket.socket],
        log: logging.Logger,
        site: Site | None = None,
        seen: list[int] | None = None,
    ) -> None:
        self.begins_anew = False
        self._leased: LeasedTurn
        self._node: Node
        self._loaded = False
        self._ready = False
        self._stops = False  # the end of the process was asked for
        self._over = False  # nothing leaves this process any more
        self._told_of_nodes_s = -TELL_SELDOM_S
        self._shown_s = time.monotonic()
        super().__init__(settings, listeners, log, site)
        lease_ms = round(settings.lease * 1000)
        of_nodes = [one for one, each in self._guarded if each.nodes]
        address = settings.advertise or advertised(settings, of_nodes or listeners)
        name = settings.node or f"{self._uname.nodename}:{address.rpartition(':')[2]}"
        me = Identity(name, address, secrets.token_hex(8), lease_ms)
        place = str(settings.journal)
        self._require_usable()
        self._service.unknown = lambda line: answer_to(line, me.incarnation) or R_UNKNOWN_COMMAND
        self._node = Node(
            me,
            self._engine,
            _NodeHost(self),
            log,
            self._make_log,
            lambda: fence_for(place, me, wait_for, resolve, log.warning),
            settings.takeover_wait,
            self._wall_clock,
            syncs=settings.fsync_ms is not None,
            seen=seen,
            link=self._link if of_nodes else None,
        )

    def _make_log(self) -> SharedLog:
        settings = self._settings
        return shared_log(
            str(settings.journal),
            segment_bytes=settings.segment_bytes,
            compact=settings.compact,
            budget=settings.max_journal_bytes,
            accept_damage=settings.accept_damage,
            synchronous=settings.fsync_ms is not None,
            answer_s=max(settings.lease, _ANSWER_S_MIN),
            wait=wait_for,
            resolve=resolve,
            log=self._log.warning,
        )

    def _require_usable(self) -> None:
        """Raises ConfigError."""
        try:
            self._make_log()  # connects to nothing
        except ImportError as error:
            raise ConfigError(
                f"a journal in PostgreSQL needs {error.name or 'psycopg'}: pip install 'geventstalk[postgres]'"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{error} (-b, --journal)") from None

    def stop(self, why: str = "stopped") -> None:
        """A node that leads hands over first. A second call does not wait for that."""
        if self._stops:
            self.end(why)
            return
        self._stops = True
        self._stopped_by = self._stopped_by or why
        self._node.leave()

    # --- parts of run()

    def _make_turn(self) -> Turn:
        self._leased = LeasedTurn(
            self._engine,
            monotonic_ns,
            self._wall_clock,
            self._turn_begins,
            self._turn_failed,
            self._service,
            self._may_answer,
            round(self._settings.put_wait * 1e9),
        )
        self._leased.waits = self._say_wait
        return self._leased

    def _may_answer(self, _now_ns: int) -> bool:
        """The clock of the turn stands still while the machine is suspended. That of the lease does not."""
        return self._node.member.lease.holds(lease_clock_ns())

    def _make_descriptors(self) -> Descriptors:
        self._shares = _NodeDescriptors(_DESCRIPTORS, _DESCRIPTORS)
        return self._shares

    def _open_journal(self) -> None:
        backend = self._backend
        if backend is not None:
            backend.node = self._node
        self._node.start()

    def _stop_accepting(self, acceptor: Acceptor) -> None:
        acceptor.stop_accepting()  # the next program of this process may need the socket

    def _accepts(self) -> None:
        """The manager is told later: when this node stands by or leads."""
        self._manager.starting("Looking for the database")

    def _connect(self, stream: Stream, session: Session) -> Connection:
        return _LeasedConnection(stream, session, self._leased, self._ahead, self._unsent, self._run_queue, Parking())

    def _serve(self, stream: Stream, listener: Listener | None = None) -> None:
        """Serves a connection while this node leads, and passes it on otherwise."""
        if listener is not None and is_node(stream, listener.nodes):
            self._serve_for_node(stream)
        elif self._node.serves or self._node.pass_on(stream.socket, self._relayed(stream, listener)):
            super()._serve(stream, listener)
        else:
            self._descriptors.give_back()

    # --- other nodes, where they connect with TLS

    def _relayed(self, stream: Stream, listener: Listener | None) -> RelayedClient | None:
        """Returns how a client is passed on: as it comes, or with TLS behind the proofs that it has shown here."""
        if self._settings.node_listener is None:
            return None
        has_input = isinstance(stream, TlsStream) and stream.has_input
        return RelayedClient(lambda: header_for(stream, listener), lambda _: StreamSocket(stream), has_input)

    def _link(self, sock: Any, seconds: float) -> StreamSocket:
        """Returns a connection to another node with TLS. Raises OSError."""
        listener, handshakes = self._settings.node_listener, self._handshakes
        assert listener is not None and handshakes is not None
        return link_to_node(sock, handshakes.outgoing_context_of(listener.tls), listener.nodes, seconds)

    def _serve_for_node(self, stream: Stream) -> None:
        """Serves a client that another node passes on, with the rights that it has here."""
        try:
            told = take_client(StreamSocket(stream), lambda line: answer_to(line, self._node.me.incarnation))
            if told.identity and self._guard is None:
                raise NoHeader("its client is a user, and this node has no users")
        except OSError as error:
            if isinstance(error, NoHeader) and time.monotonic() >= self._told_of_nodes_s + TELL_SELDOM_S:
                self._told_of_nodes_s = time.monotonic()
                self._log.warning("closed a connection of the node at %s: %s", peer_of(stream.socket), error)
        else:
            stream.peer, stream.passed_on = told.peer, told
            if self._node.await_lead(self._settings.takeover_wait) and not self._stopped.is_set():
                super()._serve(stream, Listener("", identity=told.identity))
                return
        stream.close()
        self._descriptors.give_back()

    def _status(self) -> str:
        node = self._node
        if node.serves:
            return super()._status()
        leader = node.leader
        return f"Standby: {leader or 'no node'} leads; {len(node.relays)} connections passed through"

    def _facts(self) -> dict[str, object]:
        node = self._node
        return super()._facts() | {
            "cluster-node": node.me.node.encode(),
            "cluster-role": node.role,
            "cluster-epoch": node.epoch,
            "cluster-lag": node.lag,
            "cluster-replication": node.replication,
        }

    # --- what the node tells, see cluster.node.Host

    def show_start(self, text: str) -> None:
        if not self._ready:
            self._manager.starting(text)

    def show_progress(self, records: int) -> None:
        if time.monotonic() - self._shown_s > PROGRESS_EVERY_S:
            self._shown_s = time.monotonic()
            self._log.info("replaying the journal: %d records so far", records)
            if not self._ready:
                self._manager.replaying(records)

    def take_jobs(self, seconds: float) -> None:
        self._loaded = True
        self._tell_of_replay(seconds)
        if self._backend is not None:
            self._backend.replayed = True
        self.show_role()

    def show_role(self) -> None:
        if not self._ready and (self._node.serves or (self._loaded and self._node.role == STANDBY)):
            self._ready = True
            self._manager.ready(self._status())
        elif self._ready and not self._stopped.is_set():
            self._manager.runs(self._status())

    def lead(self, store: Store) -> None:
        self._shares.each = 1
        turn = self._leased
        turn.write_to(store)
        self.live.load()
        self._tasks.drive(turn.tasks_of(store))
        self.live.lead()
        self._loop.run_callback(self.show_role)

    def renew(self) -> None:
        self._leased.renewed.set()

    def hand_over(self) -> None:
        gevent.spawn(self._hand_over)

    def _hand_over(self) -> None:
        """Takes nothing more from clients, and sends the replies that are safe."""
        for acceptor in self._acceptors:
            acceptor.stop_accepting()
        self._tasks.stop()
        turn = self._leased
        turn.take_no_more()
        self._await_sync()
        if not turn.syncs.is_under_way:
            turn.finish()
        turn.step_down()
        self._over = True
        self._send_rest(turn.speaks)
        self._node.finish()

    def _await_sync(self) -> None:
        """Waits for a commit that is under way, within a bound: no client was told of the commit."""
        turn = self._leased
        end_ns = monotonic_ns() + round(_END_S * 1e9)
        while turn.syncs.is_under_way and not turn.failed and monotonic_ns() < end_ns:
            gevent.sleep(0.001)

    def end(self, why: str) -> None:
        """Ends the answers of this process."""
        if self._stopped.is_set():
            return
        self._leased.step_down()
        if not self._stops:
            self.begins_anew = True
            self._log.warning("this node does not lead any more: %s" if self._node.epoch else "%s", why)
        self._stopped.set()

    def fail(self, error: BaseException) -> None:
        """The node cannot go on."""
        if self._over or self._stopped.is_set():
            return
        if self._leased.store is not None:
            self._leased.fail(error)
            return
        expected = {JournalLocked: EXIT_LOCKED, JournalDamaged: EXIT_DAMAGE, JournalNewer: EXIT_DAMAGE}
        code = next((code for kind, code in expected.items() if isinstance(error, kind)), None)
        if code is None:
            self._end_with(EXIT_JOURNAL, error, "this node served no client")
            return
        self._log.error("%s", error)
        self._exit_code = code
        self._stopped.set()

    def _turn_failed(self, error: BaseException) -> None:
        shared = self._node.shared
        if isinstance(error, JournalFailed) and shared is not None and shared.fenced:
            return  # another node leads: the member says so, and run() ends
        super()._turn_failed(error)

    def _say_wait(self, what: str) -> None:
        if not what:
            self._log.warning("replies leave again")
        elif what == "the lease":
            self._log.warning("no reply leaves: the lease has run out, for the database did not confirm a heartbeat")
        else:
            why = self._node.waits_for() or "a commit takes long in the database"
            self._log.warning("replies to changes wait: %s", why)

    # --- the end

    def _finish(self) -> int:
        self._node.stop()
        for channel in self._turn.channels.values():
            assert isinstance(channel, Connection)
            channel.stop_reading()
        self._part()
        if self._exit_code != EXIT_OK:
            self.begins_anew = False
        elif self._stops:
            self.begins_anew = False
            self._log.info("%s", self._stopped_by)
        return self._exit_code

    @property
    def seen(self) -> list[int]:
        """Returns the facts about the log for the program that follows in this process."""
        return self._node.seen

    @property
    def draining(self) -> bool:
        return self._engine.draining

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment for the same command, which follows in this process. The manager is told of that."""
        if self._ready:
            self._manager.reloading("Stands by from now on", monotonic_ns())
        made = dict(environment)
        self._manager.give_back(made)
        return made


class _NodeDescriptors(Descriptors):
    """While the node stands by, each client has room for two: the second one is for the way to the node that leads."""

    each = 2

    @property
    def for_clients(self) -> int:
        return super().for_clients // self.each


class _NodeHost(Host):
    """The interface of the server for the node."""

    def __init__(self, server: ClusterServer) -> None:
        self._server = server

    def waits(self, text: str) -> None:
        self._server.show_start(text)

    def loads(self, records: int) -> None:
        self._server.show_progress(records)

    def loaded(self, seconds: float) -> None:
        self._server.take_jobs(seconds)

    def follows(self) -> None:
        self._server.show_role()

    def leads(self, store: Store) -> None:
        self._server.lead(store)

    def speaks(self) -> None:
        self._server.renew()

    def hands_over(self) -> None:
        self._server.hand_over()

    def ends(self, why: str) -> None:
        self._server.end(why)

    def fails(self, error: BaseException) -> None:
        self._server.fail(error)


class _LeasedConnection(Connection):
    """Replies that a client was slow to take wait for the lease, too."""

    def __init__(
        self,
        stream: Stream,
        session: Session,
        turn: LeasedTurn,
        ahead: Ahead,
        unsent: Unsent,
        queue: RunQueue,
        parking: Parking,
    ) -> None:
        super().__init__(stream, session, turn, ahead, unsent, queue, parking)
        self._leased = turn

    def _write(self) -> None:
        if not self._leased.speaks():
            self._writer.stop()
            while not self._leased.speaks():
                gevent.sleep(_MUTE_S)
            self._writer.start(self._parking.wake)
        super()._write()
