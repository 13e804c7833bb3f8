"""One seed, one life of a cluster: what fails, when it heals, what clients are told; and what must be true of it.

Safety: a node that replies has the highest epoch under which a node ever replied; what was acknowledged is in memory
of every node that leads later, and nothing else; the rows of the log are in the order of their epochs, without a gap.
Liveness: once nothing fails any more, a node serves, and a put is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from geventstalk.cluster.member import Member
from geventstalk.cluster.wants import OPEN, REFUSED, SILENT
from tests.support.simulation.cluster.database import Server
from tests.support.simulation.cluster.process import Process
from tests.support.simulation.cluster.world import FAULTS, MS_NS, Scenario, Violation, World, require

ACTS = 40
"""This often in a lease a client asks for something."""
LAST_LEASES = 20
"""After this many leases without a fault all must be well."""


@dataclass
class Parts:
    """The parts of a cluster. A canary replaces a part by one that is broken."""

    member: type[Member] = Member
    process: type[Process] = Process
    server: type[Server] = Server
    looks_behind: bool = True


@dataclass
class Outcome:
    """The outcome of a life. `digest` is the same for the same seed."""

    scenario: Scenario
    digest: str
    events: int
    replies: int
    takeovers: int
    trace: list[str]
    failure: str | None = None


@dataclass
class Fact:
    """The replies of clients about a job. `open` counts the requested changes whose reply never came."""

    body: bytes = b""  # empty until the put was acknowledged: others may hold the job before
    buried: bool = False
    open: int = 0
    deleted: bool | None = False  # None: it was asked for


@dataclass
class Node:
    """A machine. Its processes come and go."""

    name: str
    address: str
    offset_ns: int
    rate: float
    process: Process | None = None
    door: bool = False  # whether the node listens
    gateway: bool = True  # whether what stands before the door lets others in: if not, it refuses them
    lives: int = 0


class Life:
    """run() raises Violation, or whatever the code under test raises."""

    def __init__(self, seed: int, parts: Parts | None = None, show: Callable[[str], None] | None = None) -> None:
        self.parts = parts or Parts()
        self.scenario = scenario = Scenario.drawn(seed)
        self.world = World(scenario, show)
        self.lease_ns = scenario.lease_ms * MS_NS
        draw = scenario.draw
        self.nodes: list[Node] = []
        for number in range(scenario.nodes):
            name = f"n{number}"
            wrong = scenario.wrong_address and number == 0
            rate = 1 + scenario.drift * draw.choice((-1, 0, 1))
            self.nodes.append(Node(name, name + (":wrong" if wrong else ":port"), draw.randrange(10**15), rate))
        self.primary = self._new_server(1, [])
        self.behind: list[Server] = []
        self.replies_sent = 0
        self.takeovers = 0
        self.ids = 0
        self.tokens = 0
        self.top = (0, "")  # the highest epoch under which a node has replied, and which node
        self.puts: set[int] = set()  # acknowledged
        self.deletes: set[int] = set()  # asked for
        self.gone: set[int] = set()  # acknowledged to be deleted
        self.facts: dict[int, Fact] = {}  # the same of whole servers, by the ids that they gave
        self.bodies: set[bytes] = set()  # all that clients have put

    def run(self) -> None:
        world, scenario = self.world, self.scenario
        world.note(repr(scenario))
        for node in self.nodes:
            world.after(world.draw.randrange(1, self.lease_ns), partial(self._start, node))
        world.after(0, self._act)
        for name in FAULTS:
            if scenario.faults[name]:
                world.after(world.draw.randrange(self.lease_ns), partial(self._fault, name))
        world.run(scenario.leases * self.lease_ns)
        self._heal_all()
        replies, puts = self.replies_sent, len(self.puts)
        world.run(world.now_ns + LAST_LEASES * self.lease_ns)
        serving = [each for each in self._processes() if each.member.lease.holds(each.clock())]
        require(serving, "no node serves, though nothing fails any more")
        require(len(serving) == 1, "more than one node serves:", [each.me.incarnation for each in serving])
        require(self.replies_sent > replies, "no client gets a reply, though nothing fails any more")
        require(len(self.puts) > puts, "no put is acknowledged, though nothing fails any more")
        self._judge_log()
        serving[0].judge()

    # --- what the processes ask and tell

    def servers(self) -> list[Server]:
        return [self.primary, *self.behind]

    def token(self) -> int:
        self.tokens += 1
        return self.tokens

    def next_id(self) -> int:
        self.ids += 1
        return self.ids

    def probe(self, address: str, incarnation: str) -> str:
        """Returns what comes of a question for a process at an address.

        A gateway does not begin to refuse a process that lives when its session has just been cut as well: the two
        together are what a node takes for an end.
        """
        node = next((each for each in self.nodes if each.address == address and ":port" in address), None)
        if node is None or not node.door:
            return REFUSED
        process = node.process
        if process is None or process.me.incarnation != incarnation or not process.member.serves:
            return SILENT
        fence = process.fence
        if not node.gateway and fence.server is not None and self.world.now_ns - fence.linked_ns > self.lease_ns:
            return REFUSED
        return SILENT if process.frozen else OPEN

    def begins_to_lead(self, process: Process) -> None:
        self.takeovers += 1
        self._judge_leases(process)
        process.judge()
        self._judge_log()

    def leaves(self, process: Process) -> None:
        """A reply leaves. A node that has claimed a higher epoch may have replied already: then this one is late."""
        epoch, incarnation = process.member.epoch, process.me.incarnation
        if (epoch, incarnation) != self.top:
            require(epoch > self.top[0], incarnation, "replies under epoch", epoch, "after", *self.top)
            self.world.note(f"{incarnation} replies under epoch {epoch}")
            process.judge()
        self._judge_leases(process)
        self.top = (epoch, incarnation)
        self.replies_sent += 1

    def replies(self, process: Process, what: str, id: int) -> None:
        """A client hears that its put, reserve or delete is done."""
        self.leaves(process)
        require(id not in self.gone, "job", id, "is back after it was deleted")
        if what == "put":
            self.puts.add(id)
        elif what == "delete":
            self.gone.add(id)

    def ends(self, process: Process) -> None:
        """A process has stepped down. It starts anew in place, and its port stays open, unless it was to stop."""
        process.die()
        node = next(each for each in self.nodes if each.process is process)
        node.process = None
        if process.stops:
            node.door = False
        self.world.after(self.world.draw.randrange(5 * MS_NS, 2 * self.lease_ns), partial(self._start, node))

    # --- what must be true

    def _judge_leases(self, process: Process) -> None:
        """No other process may answer now, whether it does or not."""
        for other in self._processes():
            if other is not process and other.member.lease.holds(other.clock()):
                raise Violation(f"{process.me.incarnation} serves while {other.me.incarnation} may still answer")

    def _judge_log(self) -> None:
        epoch = 0
        rows = self.primary.state.rows
        for seq in range(1, self.primary.state.last + 1):
            require(seq in rows, "row", seq, "is missing in the log")
            require(rows[seq].epoch >= epoch, "row", seq, "of epoch", rows[seq].epoch, "is behind one of", epoch)
            epoch = rows[seq].epoch

    # --- what goes on

    def _processes(self) -> list[Process]:
        return [node.process for node in self.nodes if node.process is not None]

    def _act(self) -> None:
        processes = self._processes()
        if processes:
            self.world.draw.choice(processes).act()
        self.world.after(self.world.draw.randrange(2 * self.lease_ns // ACTS) + 1, self._act)

    def _start(self, node: Node) -> None:
        if node.process is not None:
            return
        node.lives += 1
        incarnation = f"{node.name}.{node.lives}"
        self.world.note(f"{incarnation} starts")
        node.process = self.parts.process(self, node.name, node.address, incarnation, node.offset_ns, node.rate)
        node.door = True
        node.process.start()

    def _new_server(self, timeline: int, wal: list[dict[str, object]]) -> Server:
        return self.parts.server(self.world, f"db{timeline}", timeline, wal, self.scenario.replicates)

    def _while_ns(self) -> int:
        return int(self.lease_ns * self.world.draw.choice((0.1, 0.5, 1, 2, 4)) * (0.1 + self.world.draw.random()))

    # --- faults

    def _fault(self, name: str) -> None:
        if not self.world.faulty:
            return
        if self.world.draw.random() < self.scenario.faults[name]:
            getattr(self, "_" + name.replace(" ", "_"))()
        self.world.after(self.lease_ns, partial(self._fault, name))

    def _some_process(self) -> Process | None:
        """Most often the one that leads."""
        processes = self._processes()
        leading = [each for each in processes if each.member.epoch]
        if leading and self.world.draw.random() < 0.7:
            return self.world.draw.choice(leading)
        return self.world.draw.choice(processes) if processes else None

    def stumble(self, process: Process) -> None:
        """It stands still for a while, or dies, just now."""
        if self.world.faulty and self.world.draw.random() < self.scenario.stumbles:
            if self.world.draw.random() < 0.7:
                self._freeze(process)
            else:
                self._kill(process)

    def _kill(self, process: Process | None = None) -> None:
        process = process or self._some_process()
        if process is not None:
            self.world.note(f"{process.me.incarnation} is killed")
            process.die()
            node = next(each for each in self.nodes if each.process is process)
            node.process = None
            node.door = False
            self.world.after(self._while_ns(), partial(self._start, node))

    def _stop(self) -> None:
        process = self._some_process()
        if process is not None:
            self.world.note(f"{process.me.incarnation} is asked to stop")
            process.stops = True
            process.soon(process.member.leave)

    def _freeze(self, process: Process | None = None) -> None:
        process = process or self._some_process()
        if process is not None and not process.frozen:
            self.world.note(f"{process.me.incarnation} is frozen")
            process.freeze()
            self.world.after(self._while_ns(), partial(self._thaw, process))

    def _thaw(self, process: Process) -> None:
        if process.frozen and process.alive:
            self.world.note(f"{process.me.incarnation} goes on")
            process.thaw()

    def _promote(self) -> None:
        node = self.world.draw.choice([*(each.name for each in self.nodes), "*", "nobody"])
        self.world.note(f"an operator wants {node} to lead")
        self.primary.run(self.primary.request_transfer(node), lambda result, done: None)

    def _cut_link(self) -> None:
        process = self._some_process()
        if process is not None:
            self.world.note(f"a link of {process.me.incarnation} is cut")
            self.world.draw.choice((process.fence, process.log)).break_()

    def _cut_off(self) -> None:
        """A node from the database, or from all that there is."""
        node = self.world.draw.choice(self.nodes)
        others = [server.name for server in self.servers()]
        if self.world.draw.random() < 0.3:
            others += [each.name for each in self.nodes if each is not node]
        self.world.note(f"{node.name} is cut off from {', '.join(others)}")
        for other in others:
            self.world.sever(node.name, other)
        self.world.after(self._while_ns(), partial(self._heal, node.name, others))

    def _heal(self, name: str, others: list[str]) -> None:
        for other in others:
            self.world.heal(name, other)

    def _part_nodes(self) -> None:
        one, other = self.world.draw.sample(self.nodes, 2)
        self.world.note(f"{one.name} and {other.name} do not see each other")
        self.world.sever(one.name, other.name)
        self.world.after(self._while_ns(), lambda: self.world.heal(one.name, other.name))

    def _refuse(self) -> None:
        """A firewall before a node refuses connections to it, and the node does not know."""
        node = self.world.draw.choice(self.nodes)
        self.world.note(f"the gateway of {node.name} refuses")
        node.gateway = False
        self.world.after(self._while_ns(), partial(setattr, node, "gateway", True))

    def _fail_over(self) -> None:
        """The primary is gone, and after a while its replica takes over."""
        old = self.primary
        if not old.up:
            return
        self.world.note(f"{old.name} dies with {len(old.wal)} commits, {old.replicated} of them replicated")
        old.failed = True
        self._take_down(old)
        if self.world.draw.random() < 0.8:
            self.world.after(self._while_ns(), partial(self._promote_replica, old))
        else:
            self._promote_replica(old)

    def _leave_behind(self) -> None:
        """The replica takes over while the primary still runs: without its replica it commits nothing."""
        old = self.primary
        if not old.up or not self.scenario.replicates:
            return
        self.world.note(f"{old.name} is left behind with {len(old.wal)} commits, {old.replicated} of them replicated")
        old.replica_there = False
        self._promote_replica(old)
        self.behind.append(old)
        self.world.after(self._while_ns(), partial(self._take_down, old))

    def _promote_replica(self, old: Server) -> None:
        if old is self.primary and (old.failed or old.up):
            wal = old.wal[: old.replicated] if self.scenario.replicates else old.wal
            self.primary = self._new_server(old.timeline + 1, list(wal))
            self.world.note(f"{self.primary.name} is the primary with {len(wal)} commits")

    def _take_down(self, server: Server) -> None:
        if server in self.behind:
            self.behind.remove(server)
        server.up = False
        self._break_links(server)

    def _crash_database(self) -> None:
        """The primary comes back by itself, with all that it had written."""
        server = self.primary
        if not server.up:
            return
        self.world.note(f"{server.name} crashes")
        server.up = False
        server.crash()
        self._break_links(server)
        self.world.after(self._while_ns() // 4, partial(self._come_back, server))

    def _come_back(self, server: Server) -> None:
        if server is self.primary and not server.up and not server.failed:
            self.world.note(f"{server.name} is back")
            server.up = True
            if server.replica_there:
                server.find_replica()

    def _break_links(self, server: Server) -> None:
        for process in self._processes():
            for link in (process.fence, process.log):
                if link.server is server and (not self.world.faulty or self.world.draw.random() < 0.9):
                    link.break_()  # otherwise its host is gone, too, and nothing says so

    def _lose_replica(self) -> None:
        server = self.primary
        if server.replicates and server.replica_there:
            self.world.note(f"{server.name} loses its replica")
            server.replica_there = False
            self.world.after(self._while_ns(), partial(self._find_replica, server))

    def _find_replica(self, server: Server) -> None:
        if server is self.primary and not server.replica_there:
            self.world.note(f"{server.name} has its replica again")
            server.find_replica()

    def _terminate(self) -> None:
        """Ends a backend; best one that waits for the replica."""
        backends = self.primary.backends
        waiting = [each for each in backends if each.commits is not None]
        if backends:
            self.world.note("a backend is ended")
            self.primary.terminate(self.world.draw.choice(waiting or backends))

    def _phantom(self) -> None:
        """Shows all sessions a commit that is not on the replica; then the replica takes over without it."""
        self._lose_replica()
        self.world.after(self._while_ns() // 4, self._terminate)
        self.world.after(self._while_ns() // 2, self._fail_over)
        if self.world.draw.random() < 0.5:
            self.world.after(self._while_ns() // 2, self._kill)

    # --- the end of all faults

    def _heal_all(self) -> None:
        world = self.world
        world.note("nothing fails any more")
        world.faulty = False
        world.severed.clear()
        for server in list(self.behind):
            self._take_down(server)
        if self.primary.failed:
            self._promote_replica(self.primary)
        elif not self.primary.up:
            self.primary.up = True
            self._break_links(self.primary)
        self.primary.find_replica()
        for process in self._processes():
            self._thaw(process)


def live(seed: int, parts: Parts | None = None, show: Callable[[str], None] | None = None) -> Outcome:
    """Lives one life. Whatever goes wrong in it is the outcome's `failure`, one line."""
    life = Life(seed, parts, show)
    failure = None
    try:
        life.run()
    except Violation as violation:
        failure = str(violation)
    except Exception as error:  # the code under test may fail in any way: all of them are findings
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = "" if trace is None else f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
        failure = f"{type(error).__name__}: {error} ({place})"
    world = life.world
    if failure is not None:
        world.note(f"VIOLATION: {failure}")
    return Outcome(
        life.scenario,
        world.hash.hexdigest(),
        world.events,
        life.replies_sent,
        life.takeovers,
        list(world.lines),
        failure,
    )
