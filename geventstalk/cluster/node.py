"""A node of a cluster, wired with gevent: it drives the member, fills the engine while others lead, writes the log.

member.py decides who leads. This module does what the member wants, and tells its host, the server, what to do for
clients.
Invariant: clients are served here from Host.leads() on, and never before the log was read to its end; whatever fails
unexpectedly is the host's to report.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from contextlib import closing
from time import clock_gettime_ns, monotonic_ns
from typing import Any, Final, NamedTuple

import gevent
from gevent import socket as green
from gevent.event import Event

from geventstalk.cluster.clocks import Clocks
from geventstalk.cluster.member import Member
from geventstalk.cluster.relay import Relays, Stranger, answer_to, connect, greet, greeting_bytes, has_gone
from geventstalk.cluster.wants import (
    OPEN,
    REFUSED,
    SILENT,
    LeadLog,
    MemberOwner,
    Probe,
    ReadOn,
    ResumeLog,
    Steps,
    Want,
    drive,
)
from geventstalk.core.engine import NEVER
from geventstalk.core.jobtable import JobTable
from geventstalk.core.operate import Operate
from geventstalk.durable.follow import Follower
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from geventstalk.turn.tasks import NEXT_TURN, Wait
from geventstalk.wire.protocol import R_UNKNOWN_COMMAND
from journal.errors import JournalError, JournalUnreachable
from journal.fence import Fence, Identity, View
from journal.log import Row
from journal.shared import SharedLog

NEXT_TURN_S: Final = 1e-9
"""A sleep of this length lets every socket have its turn."""
ROWS: Final = 250
"""The number of records that are applied at once: a millisecond in pure Python."""
_PROBE_S: Final = 0.1
_RESOLVE_S: Final = 2.0
"""The look-up of a name may take this long: a name server that is cut off delays the next host by as much."""
_OPEN_RETRY_S: Final = 0.5
_SAY_S: Final = 5.0
"""A node that waits for its database says so this often."""
_HANGS_NS: Final = 30 * 10**9
"""A commit without an answer for this long, while heartbeats come through, is looked for over another connection."""
_CONNECTS: Final = 4
"""The number of attempts in a lease to reach the node that leads. This node may take over meanwhile."""
_HELD: Final = b"?"
"""Stands for input of a client that is not in the client's socket any more."""
_LEADER_RETRY_S: Final = 0.02
"""A connection that waits for a leading node looks for one after this time."""
_REACH_AGAIN_S: Final = 0.1
"""After a failed attempt to reach the leader, no connection tries again for this long, unless another node leads."""


Link = Callable[[Any, float], Any]
_LEASES: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def lease_clock_ns() -> int:
    """Returns the time of the clock of leases, which runs on while this machine is suspended."""
    return clock_gettime_ns(_LEASES)


class Host:
    """The interface of the server around a node. Each method returns soon."""

    def waits(self, text: str) -> None:
        """The start goes on, and may take long. The text says what the node waits for."""

    def loads(self, records: int) -> None:
        """The jobs are being read. `records` is the number of records so far."""

    def loaded(self, seconds: float) -> None:
        """The engine has all jobs."""

    def follows(self) -> None:
        """Another node leads, or none does."""

    def leads(self, store: Store) -> None:
        """This node serves. Has the turn write to the store, and drives its tasks."""

    def speaks(self) -> None:
        """The lease may hold again."""

    def hands_over(self) -> None:
        """Ends what clients do, in a greenlet of its own, and then calls Node.finish()."""

    def ends(self, why: str) -> None:
        """This process may never answer again, and has to begin anew or to end."""

    def fails(self, error: BaseException) -> None:
        """The node cannot go on."""


class RelayedClient(NamedTuple):
    """A client that may be passed on: its header for the node, and a function that makes a waiting stream of its
    socket.
    """

    header: Callable[[], bytes] = bytes
    open: Callable[[socket.socket], Any] | None = None
    holds_input: bool = False  # it has sent something that is not in the socket any more


class Node(MemberOwner):
    """`make_log` and `make_fence` make new ones that have not connected yet.

    `seen` is what the last program of this process knew of the log.
    A log that is missing is waited for, and never made: that would be to serve as if nothing had been acknowledged.
    """

    def __init__(
        self,
        me: Identity,
        engine: Operate,
        host: Host,
        log: logging.Logger,
        make_log: Callable[[], SharedLog],
        make_fence: Callable[[], Fence],
        takeover_wait_s: float,
        wall_clock: Callable[[], int],
        *,
        syncs: bool = True,
        seen: list[int] | None = None,
        link: Link | None = None,
    ) -> None:
        """`link(sock, seconds)` returns a connection to another node with TLS. Raises OSError when the time is over."""
        self.me = me
        self._link = link
        self.member = Member(me, lease_clock_ns, self, self._place)
        self.serves = False
        self.shared: SharedLog | None = None
        self.relays = Relays()
        self.clocks = Clocks()
        self._engine = engine
        self._host = host
        self._log = log
        self._make_log = make_log
        self._make_fence = make_fence
        self._takeover_wait_s = takeover_wait_s
        self._wall_clock = wall_clock
        self._syncs = syncs
        self._seen = seen or []
        self._fence: Fence | None = None
        self._store: Store | None = None
        self._follower: Follower | None = None
        self._pending: list[tuple[int, list[Row]]] = []  # read and not applied, the last ones first
        self._leader = ""  # incarnation of the process that clients are passed through to
        self._again_s = 0.0  # when to try again to reach it
        self._told_of = ""  # the one that was not found at its address
        self._changed: Any = Event()  # what waits for a node that leads looks again
        self._loop: Any = gevent.get_hub().loop
        self._watcher: Any = None
        self._watched = (-1, 0)
        self._greenlets: list[Any] = []
        self._leaves = False
        self._doubt_of = (0, 0)  # the commit that was given up last, and the connection that made this doubtful

    # --- for the server

    def start(self) -> None:
        """Begins to look for its database. Returns at once."""
        self._greenlets.append(gevent.spawn(self._begin))

    def leave(self) -> None:
        """The process is to end; Host.ends() follows."""
        self._leaves = True
        if self._fence is None:
            self._host.ends("asked to leave")
        else:
            self.member.leave()

    def finish(self) -> None:
        """The owner calls this after Host.hands_over(): nothing more leaves this process."""
        self.member.finish()

    def stop(self) -> None:
        """Ends everything. Nothing of it is called any more."""
        gevent.killall(self._greenlets)
        self._stop_watcher()
        self.relays.part()
        if self._fence is not None:
            self._fence.close()

    @property
    def role(self) -> str:
        return self.member.role

    @property
    def epoch(self) -> int:
        """The last one that this node knows of."""
        view = self.member.view
        return max(self.member.epoch, 0 if view is None else view.epoch)

    @property
    def lag(self) -> int:
        """Returns how many records this node has read and not yet applied."""
        return sum([len(rows) for _, rows in self._pending])

    @property
    def replication(self) -> str:
        """Returns the name of the way in which the database replicates the log; empty while unknown."""
        view = self.member.view
        return "" if view is None else view.replication

    @property
    def clock_ahead_s(self) -> float:
        """Returns by how much the wall clock of this host is ahead of the database's."""
        return self.clocks.ahead_s

    @property
    def seen(self) -> list[int]:
        """Returns the facts about the log for the program that follows in this process."""
        return self._seen if self.shared is None else self.shared.seen()

    @property
    def passed(self) -> int:
        """Returns how many connections are passed through."""
        return len(self.relays)

    @property
    def leader(self) -> str:
        """Returns the name and the address of the node that leads; an empty text when this node knows of none."""
        if self.serves:
            return f"{self.me.node} ({self.me.address})"
        view = self.member.view
        return "" if view is None or not view.epoch or view.released else f"{view.node} ({view.address})"

    def waits_for(self) -> str:
        """Returns the reason why commits wait, in words for the operator."""
        shared = self.shared
        return "" if shared is None else shared.waits_for

    def pass_on(self, client: socket.socket, relayed: RelayedClient | None = None) -> bool:
        """Passes a client through to the node that leads once it has sent something, and waits for a node if need be.

        Returns whether this node leads by then, and the client is to be served here. Otherwise it is closed.
        """
        relayed = RelayedClient() if relayed is None else relayed
        end_s = 0.0
        while not self.serves:
            word = _HELD if relayed.holds_input else self.relays.await_word(client)
            if word is None:
                continue
            end_s = end_s or time.monotonic() + self._takeover_wait_s
            greeting = greeting_bytes(word)
            if greeting and answer_to(word[: greeting - 2], self.me.incarnation) is None:
                if not _turn_away(client, greeting):
                    break
                end_s = 0.0
                continue
            if not greeting and self._reaches(client, relayed, end_s - time.monotonic()):
                return False
            left_s = end_s - time.monotonic()
            if not word or left_s <= 0 or has_gone(client):
                break
            self._changed.clear()
            self._changed.wait(min(left_s, _LEADER_RETRY_S))
        if not self.serves:
            client.close()
        return self.serves

    def await_lead(self, seconds: float) -> bool:
        """Waits until this node serves, or for the given seconds. Returns whether the node serves."""
        end_s = time.monotonic() + seconds
        while not self.serves and time.monotonic() < end_s:
            self._changed.clear()
            self._changed.wait(min(end_s - time.monotonic(), _LEADER_RETRY_S))
        return self.serves

    def _reaches(self, client: socket.socket, relayed: RelayedClient, seconds: float) -> bool:
        """Passes a client through until it is closed. Returns False when the node that leads was not reached."""
        address, leader = self.member.whom(lease_clock_ns()), self._leader
        if address is None or seconds <= 0 or time.monotonic() < self._again_s:
            return False
        try:
            header = b"" if self._link is None else relayed.header()
            node = _connect(address, self.me.lease_ms / 1000 / _CONNECTS, self._link)
            if self.serves or leader != self._leader:
                node.close()  # meanwhile another node leads
                return False
            self.relays.run(client, node, leader, seconds, header, relayed.open)
        except OSError as error:
            if leader == self._leader:
                self._again_s = time.monotonic() + _REACH_AGAIN_S
                if isinstance(error, Stranger) and self._told_of != leader:
                    self._told_of = leader
                    self.tells(f"at {address}, another process answers than the node that leads: {error}")
            return False
        return True

    # --- the start

    def _begin(self) -> None:
        said_s = time.monotonic() - _SAY_S
        while True:
            try:
                self._open_log()
                break
            except JournalUnreachable as error:
                if time.monotonic() - said_s >= _SAY_S:
                    said_s = time.monotonic()
                    self._log.warning("waiting for the database of the cluster: %s", error)
                    self._host.waits(f"Waiting for the database: {error}")
                gevent.sleep(_OPEN_RETRY_S)
            except Exception as error:
                self._host.fails(error)
                return
        self._fence = self._make_fence()
        if self._leaves:
            self._host.ends("asked to leave")
            return
        for steps in self.member.tasks():
            self._greenlets.append(gevent.spawn(self._drive, steps))

    def _open_log(self) -> None:
        shared = self._make_log()
        try:
            shared.remember(self._seen)
            shared.open()
        except BaseException:
            shared.abandon()
            raise
        self.shared = shared
        shared.rewired = self._rewire
        shared.on_cut = self._log_is_cut

    def _drive(self, steps: Steps) -> None:
        try:
            drive(steps, self._do)
        except Exception as error:
            self._host.fails(error)

    def _do(self, want: Want) -> Any:
        if isinstance(want, Wait):
            return _sleep(want)
        if isinstance(want, ReadOn):
            return self._read_on()
        if isinstance(want, Probe):
            return _probe(want.address, want.incarnation, self._link)
        if isinstance(want, LeadLog | ResumeLog):
            shared = self.shared
            assert shared is not None
            return shared.lead(want.epoch) if isinstance(want, LeadLog) else shared.resume(want.epoch)
        fence = self._fence
        assert fence is not None
        asked_ns = self._wall_clock()
        answer = want.of(fence)
        if want.method == "beat":
            self._doubt(fence.linked_ns)
        elif want.method == "tell" and (
            off := self.clocks.compare(answer.clock_s, asked_ns / 1e9, self._wall_clock() / 1e9)
        ):
            self.tells(off)
        return answer

    def _doubt(self, linked_ns: int) -> None:
        """A heartbeat has come through. A commit that hangs since before the connection of the heartbeat hangs for
        ever.

        The database server that has the commit may be frozen, while another one has taken its place. A commit that is
        only slow is left alone, because no connection had to be made anew then; but not without limit, because the
        connection of the commit may be dead.
        """
        shared = self.shared
        if shared is None or shared.cut or shared.fenced:
            return
        doubt = shared.waits_ns, linked_ns
        late = monotonic_ns() - doubt[0] > _HANGS_NS
        if doubt[0] and (doubt[0] < linked_ns or late) and doubt != self._doubt_of:
            self._doubt_of = doubt
            self.tells("a commit hangs in the database: this node looks for it over another connection")
            self.member.log_is_cut()

    # --- following

    def _read_on(self) -> bool:
        if self._follower is None:
            self._load()
            return True
        shared = self.shared
        assert shared is not None and self._store is not None
        if not self._pending:
            self._pending = shared.more()
            self._pending.reverse()
            if not self._pending:
                return False
        self._store.follow_wall_clock(self._wall_clock, monotonic_ns)
        segment, rows = self._pending.pop()
        if len(rows) > ROWS:
            self._pending.append((segment, rows[ROWS:]))
            del rows[ROWS:]
        self._follower.apply(segment, rows, monotonic_ns())
        if self._pending:
            gevent.sleep(NEXT_TURN_S)
        return True

    def _load(self) -> None:
        begun_s = time.monotonic()
        shared = self.shared
        if shared is None:
            self._open_log()
            shared = self.shared
        assert shared is not None
        store = Store(shared, 0 if self._syncs else None, ClockOffset(self._wall_clock(), monotonic_ns()))
        follower = Follower(self._engine, store)

        def progress(count: int) -> None:
            self._host.loads(count)
            gevent.sleep(NEXT_TURN_S)

        try:
            follower.load(monotonic_ns, progress)
        except JournalUnreachable:
            self.shared = None
            shared.abandon()
            self._engine.jobs = JobTable()
            raise
        self._store, self._follower = store, follower
        self._host.loaded(time.monotonic() - begun_s)

    def _place(self) -> int:
        return 0 if self.shared is None else self.shared.place

    # --- the link that the log is written over

    def _rewire(self) -> None:
        shared = self.shared
        assert shared is not None
        watched = shared.fileno, 3 if shared.wants_write else 1
        if watched == self._watched:
            return
        self._stop_watcher()
        self._watched = watched
        if watched[0] >= 0:
            self._watcher = self._loop.io(*watched)
            self._watcher.start(self._pump)

    def _stop_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.close()
            self._watcher = None

    def _pump(self) -> None:
        assert self.shared is not None
        try:
            self.shared.pump()
        except JournalError as error:
            self._host.fails(error)

    def _log_is_cut(self, text: str) -> None:
        shared = self.shared
        if shared is not None and shared.fenced:
            self.member.log_is_fenced()
        else:
            self.tells(f"the link to the log is cut: {' '.join(text.split())}")
            self.member.log_is_cut()

    # --- what the member tells

    def follows(self, view: View) -> None:
        leads = view.epoch > 0 and not view.released
        leader = view.incarnation if leads else ""
        if leader != self._leader:
            self._leader, self._again_s = leader, 0.0
            if not view.released:  # a node that says goodbye has closed its connections, behind its last answers
                self.relays.close()
            if leads:
                self._log.info("%s leads, at %s, epoch %d", view.node, view.address, view.epoch)
            else:
                self._log.info("no node leads")
        self._host.follows()
        self._changed.set()

    def leads(self, epoch: int) -> None:
        assert self._store is not None
        self.relays.close()
        self._leader = self.me.incarnation
        self._log.info("this node leads: %s, at %s, epoch %d", self.me.node, self.me.address, epoch)
        self._host.leads(self._store)
        self.serves = True
        self.relays.wake()
        self._changed.set()

    def speaks_again(self) -> None:
        self._host.speaks()

    def hands_over(self) -> None:
        self._host.hands_over()

    def steps_down(self, why: str) -> None:
        self.serves = False
        self._host.ends(why)

    def tells(self, text: str) -> None:
        self._log.warning("%s", text)


def wait_for(descriptor: int, reading: bool, writing: bool, seconds: float) -> bool:
    """The Waiter of a log in a server: others are served meanwhile."""
    hub: Any = gevent.get_hub()
    watcher = hub.loop.io(descriptor, (1 if reading else 0) | (2 if writing else 0))
    timeout = gevent.Timeout.start_new(max(seconds, 0))
    try:
        hub.wait(watcher)
        return True
    except gevent.Timeout as over:
        if over is not timeout:
            raise
        return False
    finally:
        timeout.close()
        watcher.stop()
        watcher.close()


def resolve(host: str) -> list[str]:
    """Looks up the addresses of a host without holding up others. Raises OSError."""
    timeout = gevent.Timeout.start_new(_RESOLVE_S)
    try:
        found = green.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except gevent.Timeout as over:
        if over is not timeout:
            raise
        raise TimeoutError(f"no name server answers for {_RESOLVE_S:g} s") from None
    finally:
        timeout.close()
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def _sleep(wait: Wait) -> None:
    flag = wait.flag
    if wait.at_ns == NEXT_TURN and flag is None:
        gevent.sleep(NEXT_TURN_S)
        return
    left_s = None if wait.at_ns == NEVER else max(0, wait.at_ns - lease_clock_ns()) / 1e9
    if flag is None:
        assert left_s is not None, "it would be for ever"
        gevent.sleep(left_s)
        return
    raised: Any = Event()
    flag.raised = raised.set
    try:
        if not flag.is_set:
            raised.wait(left_s)
    finally:
        flag.raised = None


def _connect(address: str, seconds: float, link: Link | None) -> Any:
    node = connect(address, seconds)
    return node if link is None else link(node, seconds)


def _probe(address: str, incarnation: str, link: Link | None = None) -> str:
    try:
        with closing(_connect(address, _PROBE_S, link)) as node:
            greet(node, incarnation, _PROBE_S)
    except ConnectionRefusedError:
        return REFUSED
    except OSError:
        return SILENT
    return OPEN


def _turn_away(client: socket.socket, size: int) -> bool:
    """Answers a greeting that is for another process as any server does that knows none. Returns whether it left."""
    try:
        client.recv(size)
        return client.send(R_UNKNOWN_COMMAND) == len(R_UNKNOWN_COMMAND)
    except OSError:
        return False
