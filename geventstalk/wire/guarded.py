"""A session whose client is a user with rights: it looks at each command before the verb does.

This module must not know sockets, files or how a connection showed whose it is.
What a user has no right to is not there: such an id becomes that of no job, 0, and the verb goes its usual way, so that
the reply, its time and the statistics are those of a job that does not exist. A tube without the right to work is
watched in name only. Invariant: no job is shown or handed to a user without the right, nor changed by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk.core.job import RESERVED, Job
from geventstalk.rights import ALL, LOOK, MANAGE, OPERATE, PUT, WORK, Access, User
from geventstalk.tags import Tags
from geventstalk.wire import protocol as p
from geventstalk.wire.batches import OfIds
from geventstalk.wire.commands import Commands, Going, Service
from geventstalk.wire.session import Session
from geventstalk.wire.verb import JOB, JOBS, SERVER, TUBE, USED, Verb
from geventstalk.wire.verbs import begin_list, begin_some_stats, find

R_FORBIDDEN: Final = b"FORBIDDEN\r\n"
R_UNAUTHORIZED: Final = b"UNAUTHORIZED\r\n"
R_AUTHENTICATED: Final = b"AUTHENTICATED\r\n"
AUTH: Final = b"auth "
_SUMS: Final = ("current-jobs-", "cmd-", "oldest-", "queued-", "worked-", "memory-", "journal-", "binlog-records-")
_BLIND_MAX: Final = 1000
"""Tubes that a client may watch in name only: no limit of memory knows them."""
_NAMES_SLICE: Final = 500
"""Tubes that one slice of a list looks at: a millisecond or two."""
_MORE_SUMS: Final = ("job-timeouts", "total-jobs", "current-tubes")


def _admit_all(session: object, user: User) -> bool:
    return True


@mypyc_attr(allow_interpreted_subclasses=True)
class GuardedSession(Session):
    """`user` is None until the client has shown whose it is: by `auth`, where `access` is given for that, or never.

    `admit` is asked before a client becomes a user by `auth`: it returns whether that user may have one more.
    """

    __slots__ = ("_access", "_admit", "_astray", "_blind", "user")

    def __init__(
        self,
        service: Service,
        user: User | None,
        access: Access | None,
        admit: Callable[[GuardedSession, User], bool] = _admit_all,
    ) -> None:
        super().__init__(service)
        self.user: User | None = None
        self._access = access
        self._admit = admit
        self._astray = False  # a use was refused; client libraries that do not see that go on with puts
        self._blind: dict[bytes, None] = {}  # tubes that are watched in name only
        if user is not None:
            self.become(user)

    def become(self, user: User) -> None:
        """Gives the client these rights from now on. What it holds or waits for without a right goes back."""
        self.user = user
        names = [tube.name for tube in self.watched.values()] + [*self._blind]
        for name in names:
            if not user.on(name) & WORK:
                self.engine.unwatch(self, name)
                self._blind[name] = None
            elif name in self._blind:
                del self._blind[name]
                self.engine.watch(self, name)

    def revoke(self) -> None:
        """Takes all rights from the client. Its next command ends the connection."""
        self.user = self._access = None

    def set_access(self, access: Access) -> None:
        """Takes the tokens of a new file, where the client has not shown one yet."""
        if self._access is not None:
            self._access = access

    @property
    def waits_for_token(self) -> bool:
        """Returns whether the client has still to show a token."""
        return self.user is None and self._access is not None

    def gives_back(self, now_ns: int) -> None:
        """Releases the jobs that the client holds without the right to work."""
        user = self.user
        for job in [*self.reserved.values()]:
            if user is None or not user.on(self.engine.tube_of(job).name) & WORK:
                self.engine.release(self, job.id, job.pri, 0, now_ns)

    def _take_command(self, now_ns: int) -> bool:
        inbox, at = self._inbox, self._at
        end = int(p.line_end(inbox, at))
        if end < 0 or end - at > p.BATCH_LINE_BYTES_MAX:
            if self.user is None and self._access is None:
                self._turn_away()
                return True
            return super()._take_command(now_ns)
        line = inbox[at:end]
        if self.user is None:
            self._done_up_to(end + 2)
            self._authenticate(line)
            return True
        try:
            verb, arguments = find(line)
            instead = self._judge(self.user, verb, arguments, now_ns)
        except p.ProtocolError:  # the verb itself says what is wrong
            return super()._take_command(now_ns)
        if instead is None:
            return super()._take_command(now_ns)
        self._done_up_to(end + 2)
        if self.trace is not None:
            self.trace("<", line)
        if instead:
            try:
                verb.run(self, instead, now_ns)
            except p.ProtocolError as error:
                self.reply(error.reply)
        return True

    # --- a client that is nobody's yet

    def _authenticate(self, line: bytes) -> None:
        access = self._access
        if access is None:
            self._turn_away()
            return
        if not line.startswith(AUTH):
            size = _body_of(line)
            if size >= 0:
                self.skip(size + 2, R_UNAUTHORIZED)
            else:
                self.reply(R_UNAUTHORIZED)
            return
        user = access.of_token(line[len(AUTH) :].decode("utf-8", "surrogateescape"))
        if user is None or not self._admit(self, user):
            self._turn_away()
            return
        self.become(user)
        self.reply(R_AUTHENTICATED)

    def _turn_away(self) -> None:
        self._inbox = b""
        self._at = 0
        self.reply(R_UNAUTHORIZED)
        self.closed = True

    # --- what a user may do

    def _judge(self, user: User, verb: Verb, arguments: bytes, now_ns: int) -> bytes | None:
        """Returns None when the command may be run as it is, other arguments for it, or b"" when it is answered.

        Raises ProtocolError for arguments that the verb does not take.
        """
        subject = verb.subject
        if subject == JOB:
            return self._job(user, verb, arguments)
        if subject == JOBS:
            return self._jobs(user, verb, arguments)
        if subject == USED:
            return self._used(user, verb, arguments)
        if subject == TUBE:
            return self._tube(user, verb, arguments)
        return self._server(user, verb, arguments, now_ns) if subject == SERVER else None

    def _may(self, user: User, job: Job, right: int) -> bool:
        """Returns whether the user may do this to the job. Who holds it may work on it, and look at it."""
        granted = user.on(self.engine.tube_of(job).name)
        holds = job.state == RESERVED and job.holder == self.number
        if right == LOOK and holds:
            return granted & (LOOK | WORK) != 0
        return granted & right != 0

    def _job(self, user: User, verb: Verb, arguments: bytes) -> bytes | None:
        word, space, rest = arguments.lstrip(b" ").partition(b" ")
        if not word.isdigit() or len(word) > 20:
            return None
        job = self.engine.jobs.get(int(word))
        allowed = False  # for a job that is not there it takes as long to say so as for one of others
        if job is not None:
            right = MANAGE if verb.words == b"delete " and job.state != RESERVED else verb.right
            allowed = self._may(user, job, right)
            if verb.words == b"move ":
                allowed = allowed and user.on(rest.strip(b" ")) & MANAGE != 0
        return None if allowed else b"0" + space + rest

    def _jobs(self, user: User, verb: Verb, arguments: bytes) -> bytes | None:
        assert isinstance(verb, OfIds)
        numbers = p.batch_arguments(arguments, verb.numbers)
        changed = False
        for at in range(verb.numbers, len(numbers)):
            job = self.engine.jobs.get(numbers[at])
            if job is None:
                continue
            right = MANAGE if verb.words == b"delete-batch " and job.state != RESERVED else verb.right
            if not self._may(user, job, right):
                numbers[at] = 0
                changed = True
        return b" ".join([b"%d" % number for number in numbers]) if changed else None

    def _used(self, user: User, verb: Verb, arguments: bytes) -> bytes | None:
        allowed = not self._astray and user.on(self.used_tube().name) & verb.right != 0
        if verb.words == b"put ":
            return self._put(user, verb, arguments, allowed)
        if allowed:
            return None
        if verb.words == b"kick ":
            p.kick_argument(arguments)
        self.counts[verb.number] += 1
        self.reply(p.kicked(0) if verb.words == b"kick " else p.R_NOT_FOUND)
        return b""

    def _put(self, user: User, verb: Verb, arguments: bytes, allowed: bool) -> bytes | None:
        tags: Tags | None = None
        try:
            size = p.put_arguments(arguments)[3]
        except p.BadFormat:
            size, tagged = p.put_tags(arguments)
            if tagged is None:
                return None
            tags = tagged[3]
        return self._refuse_put(user, verb, size, tags, allowed)

    def _refuse_put(self, user: User, verb: Verb, size: int, tags: Tags | None, allowed: bool) -> bytes | None:
        """Refuses a put into a tube, or with a tube of dead letters, that the user has no right to put into."""
        if tags is not None and tags.dead and not user.on(tags.dead) & PUT:
            allowed = False
        if allowed or size > self.service.max_job_bytes:
            return None
        self.counts[verb.number] += 1
        self.skip(size + 2, R_FORBIDDEN)
        return b""

    def _tube(self, user: User, verb: Verb, arguments: bytes) -> bytes | None:
        words = verb.words
        if words == b"put-in ":
            size, name, numbers = p.put_in_arguments(arguments)
            if numbers is None:
                return None
            return self._refuse_put(user, verb, size, numbers[3], user.on(name) & PUT != 0)
        if words == b"watch ":
            return self._watch(user, verb, arguments)
        if words == b"ignore ":
            return self._ignore(verb, arguments)
        if words == b"pause-tube":
            name = p.pause_arguments(arguments)[0]
        elif words == b"list-jobs ":
            name = p.list_arguments(arguments)[0]
        elif words == b"flush-tube ":
            name = p.flush_arguments(arguments)[0]
        else:
            name = p.name_argument(arguments)
        granted = user.on(name) & verb.right != 0
        if words == b"use ":
            self._astray = not granted
        if granted:
            return None
        self.counts[verb.number] += 1
        if words == b"use ":
            self.reply(R_FORBIDDEN)
        else:
            self.reply(p.flushed(0) if words == b"flush-tube " else p.R_NOT_FOUND)
        return b""

    def _watch(self, user: User, verb: Verb, arguments: bytes) -> bytes | None:
        name = p.watch_arguments(arguments)[0] if b" " in arguments else p.name_argument(arguments)
        granted = user.on(name)
        if granted & WORK and not self._blind:
            return None
        self.counts[verb.number] += 1
        if not granted & ALL:
            self.reply(R_FORBIDDEN)
            return b""
        if not granted & WORK:
            if len(self._blind) >= _BLIND_MAX and name not in self._blind:
                self.reply(p.R_OUT_OF_MEMORY)
                return b""
            self._blind[name] = None
        elif not self.engine.takes_tubes() and name not in self.engine.tubes:
            self.reply(p.R_OUT_OF_MEMORY)
            return b""
        else:
            self.engine.watch(self, name)
            if b" " in arguments:
                tube = self.engine.tubes[name]
                self.engine.shares_of(self).weights[tube.number] = p.watch_arguments(arguments)[1]
        self.reply(p.watching(len(self.watched) + len(self._blind)))
        return b""

    def _ignore(self, verb: Verb, arguments: bytes) -> bytes | None:
        name = p.name_argument(arguments)
        blind = self._blind
        if not blind:
            return None
        self.counts[verb.number] += 1
        tube = self.engine.tubes.get(name)
        watches = name in blind or (tube is not None and tube.number in self.watched)
        if watches and len(self.watched) + len(blind) == 1:
            self.reply(p.R_NOT_IGNORED)
            return b""
        if name in blind:
            del blind[name]
        else:
            self.engine.unwatch(self, name)
        self.reply(p.watching(len(self.watched) + len(blind)))
        return b""

    def _server(self, user: User, verb: Verb, arguments: bytes, now_ns: int) -> bytes | None:
        words = verb.words
        if verb.right == OPERATE:
            if user.operates:
                return None
            self.counts[verb.number] += 1
            self.reply(R_FORBIDDEN)
            return b""
        if words == b"list-tubes-watched":
            if not self._blind:
                return None
            names = [*self._blind, *[tube.name for tube in self.watched.values()]]
        elif user.sees_all:
            return None
        elif words == b"list-tubes":
            self.counts[verb.number] += 1
            self.begin(_Names(user, self.engine.tube_names()))
            return b""
        else:
            self.counts[verb.number] += 1
            if words == b"stats":
                begin_some_stats(self, now_ns, _is_sum)
            else:
                p.name_argument(arguments)
                self.reply(p.R_NOT_FOUND)
            return b""
        self.counts[verb.number] += 1
        begin_list(self, names)
        return b""


class _Names(Going):
    """Lists the tubes that a user may look at."""

    def __init__(self, user: User, names: list[bytes]) -> None:
        self._user = user
        self._names = names
        self._at = 0
        self._found: list[bytes] = []

    def go_on(self, client: Commands, now_ns: int) -> bool:
        user, end = self._user, self._at + _NAMES_SLICE
        self._found += [name for name in self._names[self._at : end] if user.on(name) & LOOK]
        self._at = end
        client.engine.work += _NAMES_SLICE // 4
        if end < len(self._names):
            return False
        begin_list(client, self._found)
        return client.going is self


def _is_sum(key: str) -> bool:
    """Returns whether a statistic of the server tells of jobs in all tubes."""
    return key.startswith(_SUMS) or key in _MORE_SUMS or "-rate-" in key


def _body_of(line: bytes) -> int:
    """Returns the size of the body behind the line of a put; -1 behind other lines, and where it is not known."""
    try:
        if line.startswith(b"put-in "):
            return p.put_in_arguments(line[7:])[0]
        if line.startswith(b"put "):
            size, _ = p.put_tags(line[4:])
            return size if size >= 0 else p.put_arguments(line[4:])[3]
    except p.ProtocolError:
        pass
    return -1
