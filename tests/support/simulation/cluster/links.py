"""A process's connection to the database: it may be slow, cut, or end up at a server that was left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from journal.errors import JournalError, JournalUnreachable
from journal.fence import FenceStale, View
from tests.support.simulation.cluster.database import Server, Statement
from tests.support.simulation.cluster.world import MS_NS, World

Done = Callable[[Any, JournalError | None], None]


class Link:
    """One statement at a time. A caller must wait for the end of what was asked before."""

    def __init__(
        self, world: World, host: str, servers: Callable[[], Sequence[Server]], deadline_ns: int, heeds_timeline: bool
    ) -> None:
        self.world = world
        self.host = host
        self.server: Server | None = None
        self.session: object = object()
        self.linked_ns = 0
        self.cut: Callable[[], None] = lambda: None  # the link is gone while nothing was asked
        self.closed = False
        self.timeline = 0
        self._heeds_timeline = heeds_timeline
        self._servers = servers
        self._deadline_ns = deadline_ns
        self._number = 0  # of what is asked now; an answer to something else is late
        self._done: Done | None = None
        self._generation = 0
        self._sessions = 0  # how often it was made

    def ask(self, statement: Callable[[Server], Statement], done: Done, deadline_ns: int = 0) -> None:
        assert self._done is None, "two questions at once"
        self._number += 1
        number = self._number
        self._done = done
        self.world.after(deadline_ns or self._deadline_ns, lambda: self._late(number))
        if self.server is None:
            self._connect(number, statement)
        else:
            self._send(number, statement)

    def _connect(self, number: int, statement: Callable[[Server], Statement]) -> None:
        there = [each for each in self._servers() if each.up and self.world.reaches(self.host, each.name)]
        if not there:
            self.world.after(MS_NS, lambda: self._fail(number, "no server is there"))
            return
        server = self.world.draw.choice(there)
        if server.timeline < self.timeline and self._heeds_timeline:
            self.world.after(MS_NS, lambda: self._fail(number, "", FenceStale("left behind")))
            return

        def connected() -> None:
            if number != self._number or self._done is None or self.closed:
                return
            self.server, self.timeline, self._generation = server, server.timeline, server.generation
            self.session = object()
            self._sessions += 1
            self.linked_ns = self.world.now_ns
            self._send(number, statement)

        self.world.after(2 * self.world.hop_ns(), connected)

    def _send(self, number: int, statement: Callable[[Server], Statement]) -> None:
        server, generation = self.server, self._generation
        assert server is not None

        def arrives() -> None:
            if server.up and server.generation == generation:
                server.run(statement(server), replies)

        def replies(result: Any, done: bool) -> None:
            self.world.send(server.name, self.host, lambda: self._answer(number, result, done))

        self.world.send(self.host, server.name, arrives)

    def _answer(self, number: int, result: Any, done: bool) -> None:
        if number == self._number and self._done is not None:
            if done:
                self._number += 1
                self._end(result._replace(session=self._sessions) if isinstance(result, View) else result, None)
            else:
                self._fail(number, "the server has ended the statement")

    def _late(self, number: int) -> None:
        self._fail(number, "no answer in time")

    def _fail(self, number: int, words: str, error: JournalError | None = None) -> None:
        if number == self._number and self._done is not None:
            self._number += 1
            self.drop()
            self._end(None, error or JournalUnreachable(words))

    def _end(self, result: Any, error: JournalError | None) -> None:
        done, self._done = self._done, None
        if done is not None and not self.closed:
            done(result, error)

    def drop(self) -> None:
        """Gives the connection up. The server notices when it hears of it."""
        server, session = self.server, self.session
        self.server = None
        if server is not None:
            self.world.send(self.host, server.name, lambda: server.leave(session))

    def break_(self) -> None:
        """Something between here and there, or the server itself, has cut the connection."""
        if self.server is not None and not self.closed:
            self.drop()
            if self._done is not None:
                self._fail(self._number, "the connection was cut")
            else:
                self.cut()

    def close(self) -> None:
        self.drop()
        self.closed = True
