"""Listeners with an identity: whose session a connection has, how long a token may take, and new files of users.

This module must not know commands or rights. Invariant: once a new file is in use, no client does what the file does
not grant: each gets the rights of its user there, and is hung up on where that user is gone or is shown otherwise.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from time import monotonic, monotonic_ns
from typing import Any, Final

import gevent
from gevent.lock import BoundedSemaphore

from geventstalk.addresses import host_of
from geventstalk.config_listeners import TOKEN, Listener
from geventstalk.core.job import SECOND_NS
from geventstalk.rights import Access, User
from geventstalk.serving.address_shares import network_of
from geventstalk.serving.listen import peer_of
from geventstalk.serving.users import read_access, user_of
from geventstalk.stream import Stream
from geventstalk.turn.replies import Channel
from geventstalk.turn.turn import Turn
from geventstalk.wire.guarded import GuardedSession, SessionOwner, Usage
from geventstalk.wire.session import Service, Session

TOKEN_S: Final = 10.0
"""A client without a token by then is hung up on."""
_TELL_EVERY_S: Final = 60.0
_PROVING_MAX: Final = 8
"""Different tokens of a host that wait to be looked at."""


class _Guarded(SessionOwner):
    """A connection of a listener with an identity: its place among those of its user, and its timer."""

    def __init__(self, guard: Guard, stream: Stream) -> None:
        super().__init__()
        self._guard = guard
        self._stream = stream
        self._counted = False
        self._timer: Any = None

    def admit(self, user: User) -> bool:
        usage = self._guard.usage_of(user.name)
        if usage.connections >= user.limits.connections:
            usage.turned_away += 1
            self._guard.tell(self._stream, f"is closed: {user.name} has {user.limits.connections} connections")
            return False
        self.usage = usage
        usage.connections += 1
        self._counted = True
        return True

    def tell(self, what: str) -> None:
        self._guard.log.warning("%s", what)

    def prove(self, session: GuardedSession, token: str) -> bool:
        return self._guard.prove(session, token, self._stream)

    def suspend(self, session: GuardedSession, ns: int) -> None:
        self.wait(ns / SECOND_NS, partial(self._guard.resume, session))

    def wait(self, seconds: float, then: Callable[[], object]) -> None:
        """Calls `then` after this time, unless the connection has ended, or waits for something else."""
        self._stop()
        self._timer = gevent.get_hub().loop.timer(seconds)
        self._timer.start(then)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer.close()
            self._timer = None

    def end(self) -> None:
        self._stop()
        if self._counted:
            self.usage.connections -= 1


class Guard:
    """The users of a server, as of the last correct reading of their file."""

    def __init__(
        self, path: str, service: Service, turn: Turn, hang_up: Callable[[Channel], None], log: logging.Logger
    ) -> None:
        """Raises ConfigError."""
        self._path = path
        self._service = service
        self._turn = turn
        self._hang_up = hang_up
        self.log = log
        self._access = self._read()
        self._bound(self._access)
        self._told_s = -_TELL_EVERY_S
        self._usages: dict[str, Usage] = {}  # by the name of the user
        self._proofs: dict[str, list[GuardedSession]] = {}  # sessions, by the tokens that wait for a look
        self._proving: Counter[str] = Counter()  # how many of these there are, by the host of the first client
        self._one_at_a_time = BoundedSemaphore(1)

    def _bound(self, found: Access) -> None:
        quotas = {name.encode(): user.quota for name, user in found.users.items()}
        self._service.engine.quotas = {name: quota for name, quota in quotas.items() if quota is not None}

    def users(self) -> Access:
        """Returns the users as the file was read last."""
        return self._access

    def usage_of(self, name: str) -> Usage:
        """Returns the counts of a user since the server began."""
        usage = self._usages.get(name)
        if usage is None:
            usage = self._usages[name] = Usage()
        return usage

    def session_of(self, listener: Listener, stream: Stream) -> tuple[Session, Callable[[], None]] | None:
        """Returns the session of a new connection of this listener, and what its end has to call.

        A client that is to show a token and does not in time is hung up on. None says that the user of the connection
        has as many as it may have.
        """
        access = self._access
        user = user_of(listener, stream, access)
        wants_token = TOKEN in listener.identity
        owner = _Guarded(self, stream)
        if user is not None and not owner.admit(user):
            return None
        session = GuardedSession(self._service, user, access if wants_token else None, owner)
        if user is None and wants_token:
            owner.wait(TOKEN_S, partial(self._be_late, session, stream))
        elif user is None:
            self.tell(stream, "shows no user")
        return session, owner.end

    def prove(self, session: GuardedSession, token: str, stream: Stream) -> bool:
        """Looks at a chosen token in a thread: one at a time, and few of each host."""
        waiting = self._proofs.get(token)
        if waiting is not None:
            waiting.append(session)
            return True
        host = network_of(host_of(stream.peer or peer_of(stream.socket)))
        if self._proving[host] >= _PROVING_MAX:
            self.tell(stream, "shows tokens faster than they can be looked at")
            return False
        self._proving[host] += 1
        self._proofs[token] = [session]
        gevent.spawn(self._prove, token, host)
        return True

    def _prove(self, token: str, host: str) -> None:
        with self._one_at_a_time:
            if not all(session.gone for session in self._proofs[token]):
                access = self._access
                gevent.get_hub().threadpool.apply(access.prove, (token,))
                self._access.recall(access)  # a reload may have come meanwhile
        self._proving[host] -= 1
        if not self._proving[host]:
            del self._proving[host]
        for session in self._proofs.pop(token):
            self._service.resume(session)

    def resume(self, session: Session) -> None:
        """Resumes a session that was suspended."""
        self._service.resume(session)

    def _be_late(self, session: GuardedSession, stream: Stream) -> None:
        if session.waits_for_token:
            self.tell(stream, f"has shown no token within {TOKEN_S:g} s")
            stream.hang_up()

    def tell(self, stream: Stream, what: str) -> None:
        """Logs a client that is not served, seldom."""
        if monotonic() >= self._told_s + _TELL_EVERY_S:
            self._told_s = monotonic()
            self.log.warning(
                "a client at %s %s; for a minute no other one is told of", stream.peer or peer_of(stream.socket), what
            )

    # --- a new file

    @property
    def files(self) -> tuple[str]:
        return (self._path,)

    def read(self) -> Callable[[], None]:
        """Reads the file, and returns a function that puts it into use. Runs in a thread. Raises ConfigError."""
        return partial(self._use, self._read())

    def _read(self) -> Access:
        return read_access(self._path, os.geteuid())

    def _use(self, found: Access) -> None:
        if self._turn.failed:
            return
        for name, each in found.users.items():
            before = self._access.users.get(name)
            if before is None or before.limits != each.limits:
                self.usage_of(name).begin_anew()
        found.recall(self._access)
        self._access = found
        self._bound(found)
        self._turn.begin()
        changed: list[tuple[Channel, GuardedSession]] = []
        for channel in [*self._turn.channels.values()]:
            session = channel.session
            if not isinstance(session, GuardedSession):
                continue
            session.set_access(found)
            user = session.user
            if user is None:
                continue
            new = found.users.get(user.name)
            if new is None or new.proof != user.proof:
                session.revoke()
            else:
                session.become(new)
            changed.append((channel, session))
        for channel, session in changed:  # only now: what goes back is handed out to others at once
            session.gives_back(monotonic_ns())
            if session.user is None:
                self._hang_up(channel)
            elif session.suspended:
                self.resume(session)
        self.log.info("read the users of %s again", self._path)
