"""A session whose client is a user with rights: it looks at each command before the verb does.

This module must not know sockets, files or how a connection showed whose it is.
What a user has no right to is not there: such an id becomes that of no job, 0, and the verb goes its usual way, so that
the reply, its time and the statistics are those of a job that does not exist. A tube without the right to work is
watched in name only. Invariant: no job is shown or handed to a user without the right, nor changed by one.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk.core.engine import OUT_OF_MEMORY
from geventstalk.core.job import RESERVED, Job, TaggedTally, tags_of
from geventstalk.rights import ALL, LOOK, MANAGE, NO_LIMIT, OPERATE, PUT, WORK, Access, User
from geventstalk.tags import Tags, owned_by
from geventstalk.wire import protocol as p
from geventstalk.wire.batches import OfIds
from geventstalk.wire.commands import Commands, LongCommand, Service
from geventstalk.wire.session import COMMAND_SLICE, Session
from geventstalk.wire.verb import JOB, JOBS, RESERVE, SERVER, TUBE, USED, Verb
from geventstalk.wire.verbs import begin_list, begin_some_stats, find

R_UNAUTHORIZED: Final = b"UNAUTHORIZED\r\n"
R_AUTHENTICATED: Final = b"AUTHENTICATED\r\n"
AUTH: Final = b"auth "
_SUMS: Final = (
    "current-jobs-",
    "cmd-",
    "oldest-",
    "queued-",
    "worked-",
    "memory-",
    "journal-",
    "policy-",
    "binlog-records-",
)
_BLIND_MAX: Final = 1000
"""Tubes that a client may watch in name only: no limit of memory knows them."""
_NAMES_SLICE: Final = 500
"""The tubes that one slice of a list looks at: a millisecond or two."""
_MORE_SUMS: Final = ("job-timeouts", "total-jobs", "current-tubes")


QUIET_NS: Final = 60_000_000_000
"""A limit that begins and ends to hold all the time is logged once a minute."""
_NO_JOB: Final = Job(0, 0, 0, 0, 0)
_FULL_WAIT_NS: Final = 1_000_000_000
"""A reserve of a connection that holds all the jobs it may hold waits at most this long."""


class Hold:
    """Says whether a limit holds. A limit ends to hold when it refuses and delays nothing for QUIET_NS."""

    __slots__ = ("_last_ns", "holds")

    def __init__(self) -> None:
        self.holds = False
        self._last_ns = 0

    def begins(self, now_ns: int) -> bool:
        """Hears that the limit refuses or delays something. Returns whether it begins to hold."""
        begins = not self.holds
        self.holds = True
        self._last_ns = now_ns
        return begins

    def ends(self, now_ns: int) -> bool:
        """Hears that the limit lets something pass. Returns whether it has just ended."""
        ends = self.holds and now_ns - self._last_ns > QUIET_NS
        if ends:
            self.holds = False
        return ends


class Usage:
    """Counts what the connections of a user have done since the server began. `refused`: commands without the right."""

    __slots__ = ("_due_ns", "commands", "connections", "full", "paced", "puts", "refused", "turned_away", "waits")

    def __init__(self) -> None:
        self.connections = 0
        self.turned_away = 0  # connections that were too many
        self.commands = 0
        self.puts = 0
        self.refused = 0
        self.waits = 0  # puts that had to wait for their turn
        self._due_ns = 0  # when the next put has its turn, if puts come evenly
        self.full = Hold()  # the user has as many jobs or bytes as it may have
        self.paced = Hold()  # its puts wait for their turn

    def turn_of_put(self, user: User, now_ns: int) -> int:
        """Takes the next turn of a put. Returns when that is."""
        due_ns = max(self._due_ns, now_ns)
        self._due_ns = due_ns + user.put_step_ns
        return due_ns - user.put_ahead_ns

    def takes_put(self, user: User, now_ns: int) -> bool:
        """Takes the turn of a put if that is now. Returns whether it is."""
        before = self._due_ns
        if user.put_step_ns and self.turn_of_put(user, now_ns) > now_ns:
            self._due_ns = before
            return False
        return True

    def begin_anew(self) -> None:
        """Forgets the turns of puts: the limits are other ones now."""
        self._due_ns = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class SessionOwner:
    """The questions of a session to its owner. `usage` is that of its user. This one has no limits and no clock."""

    def __init__(self) -> None:
        self.usage = Usage()

    def admit(self, user: User) -> bool:
        """Has the connection be this user's from now on. Returns False when the user has all its connections."""
        return True

    def prove(self, session: GuardedSession, token: str) -> bool:
        """Has Access.prove() look at a token, and resumes the session then. Returns False if it will not."""
        return False

    def tell(self, what: str) -> None:
        """Logs what happens to the user."""

    def suspend(self, session: GuardedSession, ns: int) -> None:
        """Resumes the session after this time: resets `suspended`, and has run() called."""


@mypyc_attr(allow_interpreted_subclasses=True)
class GuardedSession(Session):
    """`user` is None until the client has shown whose it is: by `auth`, where `access` is given for that, or never."""

    __slots__ = ("_access", "_astray", "_blind", "_owner", "_waited", "user")

    def __init__(
        self,
        service: Service,
        user: User | None,
        access: Access | None,
        owner: SessionOwner | None = None,
    ) -> None:
        super().__init__(service)
        self.user: User | None = None
        self._access = access
        self._owner = SessionOwner() if owner is None else owner
        self._waited = False  # the command that comes next has waited for its turn
        self._astray = False  # a use was refused; client libraries that do not see that go on with puts
        self._blind: dict[bytes, None] = {}  # tubes that are watched in name only
        if user is not None:
            self.become(user)

    def become(self, user: User) -> None:
        """Gives the client these rights from now on. What it holds or waits for without a right goes back.

        A client that is suspended has to be resumed: its turn was that of other limits.
        """
        self.user = user
        self._waited = False
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
        for tube in [*self.watched.values()]:
            self.engine.unwatch(self, tube.name)  # a reserve that waits gets nothing any more

    def set_access(self, access: Access) -> None:
        """Takes the tokens of a new file, where the client has not shown one yet."""
        if self._access is not None:
            self._access = access

    @property
    def waits_for_token(self) -> bool:
        """Returns whether the client has still to show a token."""
        return self.user is None and self._access is not None

    def own_stats(self) -> list[tuple[str, object]]:
        user, usage, rules = self.user, self._owner.usage, self.engine.rules
        if user is None:
            return []
        owned = None if rules is None else rules.owned.get(user.name.encode())
        stats: list[tuple[str, object]] = [
            ("user", p.spoken(user.name.encode())),
            ("user-connections", usage.connections),
            ("user-puts", usage.puts),
            ("user-delayed-puts", usage.waits),
            ("user-refused-commands", usage.refused),
            ("user-refused-connections", usage.turned_away),
        ]
        if user.quota is not None:
            stats.append(("user-jobs", 0 if owned is None else owned.jobs))
            stats.append(("user-bytes", 0 if owned is None else owned.bytes))
        return stats

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
        user = self.user
        if user is None:
            self._done_up_to(end + 2)
            self._authenticate(line)
            return True
        try:
            verb, arguments = find(line)
            if user.is_paced and self._has_to_wait(user, verb, arguments, now_ns):
                return True
            instead = self._judge(user, verb, arguments, now_ns)
        except p.ProtocolError:  # the verb itself says what is wrong
            return super()._take_command(now_ns)
        if instead is None and end - at > p.LINE_BYTES_MAX - len(p.CRLF):
            return super()._take_command(now_ns)  # which knows what is too long
        self._done_up_to(end + 2)
        if self.trace is not None:
            self.trace("<", line)
        if instead is None or instead:
            self._run_verb(verb, arguments if instead is None else instead, now_ns)
            if user.bounds_puts and self.upload is not None:
                bound_put(self.upload, user, self.body_left - len(p.CRLF))
        return True

    def _run_verb(self, verb: Verb, arguments: bytes, now_ns: int) -> None:
        try:
            verb.run(self, arguments, now_ns)
        except p.ProtocolError as error:
            self.reply(error.reply)
        except MemoryError:
            if self.engine.changing:
                raise
            self.reply(p.R_OUT_OF_MEMORY)

    def _finish_put(self, job: Job, body: bytes, now_ns: int) -> None:
        super()._finish_put(job, body, now_ns)
        usage, user = self._owner.usage, self.user
        if usage.full.holds and user is not None and usage.full.ends(now_ns):
            self._owner.tell(f"puts of user {user.name} are accepted again")

    def _refuse(self, outcome: int) -> None:
        usage, user, rules = self._owner.usage, self.user, self.engine.rules
        usage.refused += outcome == OUT_OF_MEMORY
        full = outcome == OUT_OF_MEMORY and rules is not None and rules.over_quota
        if full and user is not None and user.quota is not None and usage.full.begins(self.engine.wheel.now_ns):
            self._owner.tell(f"user {user.name} has the jobs or bytes that it may have: its puts are refused")
        super()._refuse(outcome)

    # --- a client without a user yet

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
        token = line[len(AUTH) :].decode("utf-8", "surrogateescape")
        if access.of_token(token) is None and access.is_slow(token):
            self.suspended = True
            self.begin(_Proving(token))
            if self._owner.prove(self, token):
                return
            self.suspended = False
        else:
            self.show(token)

    def show(self, token: str) -> None:
        """Answers a client that has shown a token."""
        user = None if self._access is None else self._access.of_token(token)
        if user is None or not self._owner.admit(user):
            self._turn_away()
            return
        self.become(user)
        self.reply(R_AUTHENTICATED)

    def _turn_away(self) -> None:
        self._inbox = b""
        self._at = 0
        self.reply(R_UNAUTHORIZED)
        self.closed = True

    # --- how much a user may take

    def _has_to_wait(self, user: User, verb: Verb, arguments: bytes, now_ns: int) -> bool:
        """Returns whether the command has to wait for its turn. If so, the session is suspended until then."""
        if self.suspended:
            return self._stop()
        if self._waited:
            self._waited = False
            return False
        ns = 0
        if verb.right == PUT:
            if user.put_step_ns:
                usage = self._owner.usage
                ns = usage.turn_of_put(user, now_ns) - now_ns
                if ns > 0 or usage.paced.holds:
                    self._tell_of_pace(user, ns, now_ns)
        elif verb.right == WORK and len(self.reserved) >= user.reserved_max:
            ns = _wait_of_reserve(verb, arguments)
        if ns <= 0:
            return False
        self._waited = self.suspended = True
        self._owner.suspend(self, ns)
        return self._stop()

    def _tell_of_pace(self, user: User, ns: int, now_ns: int) -> None:
        """Counts a put that waits for this long, and logs when puts begin and cease to wait."""
        usage = self._owner.usage
        usage.waits += ns > 0
        if ns <= 0:
            if usage.paced.ends(now_ns):
                self._owner.tell(f"puts of user {user.name} do not wait any more")
        elif usage.paced.begins(now_ns):
            most = user.limits.puts_per_second
            self._owner.tell(f"user {user.name} puts more than {most} jobs a second: its puts wait for their turn")

    def _stop(self) -> bool:
        """Ends this slice of run() without the next command, which stays in the input."""
        self.engine.work += COMMAND_SLICE
        return True

    def _reserve(self, user: User, verb: Verb, arguments: bytes) -> bytes | None:
        """Answers a reserve of a connection that holds all the jobs it may hold; a batch has fewer jobs."""
        left = user.reserved_max - len(self.reserved)
        if left > 0 and verb.words != b"reserve-batch ":
            return None
        if verb.words == b"reserve-batch ":
            count, timeout_s = p.reserve_batch_arguments(arguments)
            if count <= left:
                return None
            if left > 0:
                return b"%d %d" % (left, timeout_s)
            reply = p.reserved_batch(0)
        elif verb.words == b"reserve-with-timeout ":
            p.timeout_argument(arguments)
            reply = p.R_TIMED_OUT
        else:
            reply = p.R_DEADLINE_SOON if verb.words == b"reserve" else p.R_OUT_OF_MEMORY
        self.counts[verb.number] += 1
        self.reply(reply)
        return b""

    # --- what a user may do

    def _judge(self, user: User, verb: Verb, arguments: bytes, now_ns: int) -> bytes | None:
        """Returns None when the command may be run as it is, other arguments for it, or b"" when it is answered.

        Raises ProtocolError for arguments that the verb does not take.
        """
        subject = verb.subject
        self._owner.usage.commands += 1
        if subject == RESERVE:
            return self._reserve(user, verb, arguments) if user.reserved_max < NO_LIMIT else None
        if subject == JOB:
            return self._job(user, verb, arguments)
        if subject == JOBS:
            return self._jobs(user, verb, arguments)
        if subject == USED:
            return self._used(user, verb, arguments)
        if subject == TUBE:
            return self._tube(user, verb, arguments)
        return self._server(user, verb, arguments, now_ns) if subject == SERVER else None

    def _may(self, user: User, id: int, verb: Verb) -> bool:
        """Returns whether there is such a job and the user may do this to it. Who holds it may also look at it.

        A job that is not there has the same steps as one of others: the time that a reply takes tells nothing.
        """
        found = self.engine.jobs.get(id)
        job = _NO_JOB if found is None else found
        tube = self.engine.tube_by_number.get(job.tube, self.used_tube())
        right = verb.right
        if right == WORK and verb.deletes and job.state != RESERVED:
            right = MANAGE
        elif right == LOOK and job.state == RESERVED and job.holder == self.number:
            right = LOOK | WORK
        is_there, granted = found is not None, user.on(tube.name) & right != 0
        self._owner.usage.refused += is_there > granted
        return is_there & granted

    def _job(self, user: User, verb: Verb, arguments: bytes) -> bytes | None:
        word, space, rest = arguments.lstrip(b" ").partition(b" ")
        if not word.isdigit() or len(word) > 20:
            return None
        if len(self.reserved) >= user.reserved_max and verb.words == b"reserve-job ":
            return self._reserve(user, verb, arguments)
        allowed = self._may(user, int(word), verb)
        if verb.right == MANAGE and verb.words == b"move ":
            allowed = user.on(rest.strip(b" ")) & MANAGE != 0 and allowed
        return None if allowed else b"0" + space + rest

    def _jobs(self, user: User, verb: Verb, arguments: bytes) -> bytes | None:
        assert isinstance(verb, OfIds)
        numbers = p.batch_arguments(arguments, verb.numbers)
        usage, changed = self._owner.usage, False
        refused = usage.refused
        for at in range(verb.numbers, len(numbers)):
            if not self._may(user, numbers[at], verb):
                numbers[at] = 0
                changed = True
        usage.refused = min(usage.refused, refused + 1)  # it is one command
        return b" ".join([b"%d" % number for number in numbers]) if changed else None

    def _used(self, user: User, verb: Verb, arguments: bytes) -> bytes | None:
        allowed = not self._astray and user.on(self.used_tube().name) & verb.right != 0
        if verb.words == b"put ":
            return self._put(user, verb, arguments, allowed)
        return None if allowed else self._refuse_it(verb, verb.refusal(arguments))

    def _refuse_it(self, verb: Verb, reply: bytes) -> bytes:
        """Answers a command that the user has no right to."""
        self._owner.usage.refused += 1
        self.counts[verb.number] += 1
        self.reply(reply)
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
        if allowed and size <= user.job_bytes:
            self._owner.usage.puts += 1
            return None
        if size > self.service.max_job_bytes:
            return None
        self._owner.usage.refused += 1
        self.counts[verb.number] += 1
        self.skip(size + 2, p.R_JOB_TOO_BIG if allowed else p.R_FORBIDDEN)
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
        granted = user.on(verb.tube_name(arguments)) & verb.right != 0
        if words == b"use ":
            self._astray = not granted
        return None if granted else self._refuse_it(verb, verb.refusal(arguments))

    def _watch(self, user: User, verb: Verb, arguments: bytes) -> bytes | None:
        name = p.watch_arguments(arguments)[0] if b" " in arguments else p.name_argument(arguments)
        granted = user.on(name)
        if not granted & ALL:
            return self._refuse_it(verb, p.R_FORBIDDEN)
        if len(self.watched) + len(self._blind) >= user.limits.watched and not self._watches(name):
            return self._refuse_it(verb, p.R_OUT_OF_MEMORY)
        if granted & WORK and not self._blind:
            return None
        self.counts[verb.number] += 1
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

    def _watches(self, name: bytes) -> bool:
        tube = self.engine.tubes.get(name)
        return name in self._blind or (tube is not None and tube.number in self.watched)

    def _ignore(self, verb: Verb, arguments: bytes) -> bytes | None:
        name = p.name_argument(arguments)
        blind = self._blind
        if not blind:
            return None
        self.counts[verb.number] += 1
        if self._watches(name) and len(self.watched) + len(blind) == 1:
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
            return None if user.operates else self._refuse_it(verb, verb.refusal(arguments))
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
        elif words == b"stats":
            self.counts[verb.number] += 1
            begin_some_stats(self, now_ns, _is_sum)
            return b""
        else:
            p.name_argument(arguments)
            return self._refuse_it(verb, p.R_NOT_FOUND)
        self.counts[verb.number] += 1
        begin_list(self, names)
        return b""


class _Proving(LongCommand):
    """A token that a person has chosen, and that is looked at outside of turns."""

    def __init__(self, token: str) -> None:
        self._token = token

    def go_on(self, client: Commands, now_ns: int) -> bool:
        assert isinstance(client, GuardedSession)
        if not client.suspended:
            client.show(self._token)
        return not client.suspended


class _Names(LongCommand):
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


def bound_put(job: Job, user: User, body_bytes: int) -> None:
    """Bounds a put that has begun by the limits of its user."""
    job.ttr_s = min(job.ttr_s, max(user.limits.ttr, 1))
    job.delay_s = min(job.delay_s, user.limits.delay)
    if user.quota is not None:
        job.tally = TaggedTally(tags_for(user, tags_of(job), body_bytes))


def tags_for(user: User, tags: Tags | None, body_bytes: int) -> Tags:
    """Returns the tags of a put of a user whose jobs are counted."""
    return owned_by(tags, user.name, body_bytes if user.limits.bytes < NO_LIMIT else 0)


def _wait_of_reserve(verb: Verb, arguments: bytes) -> int:
    """Returns the time that a reserve waits which cannot get a job."""
    timeout_s = 1 if verb.words == b"reserve" else 0
    if verb.words == b"reserve-with-timeout ":
        timeout_s = p.timeout_argument(arguments)
    elif verb.words == b"reserve-batch ":
        timeout_s = p.reserve_batch_arguments(arguments)[1]
    return _FULL_WAIT_NS if timeout_s else 0


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
