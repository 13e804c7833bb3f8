"""Tags over kill -9: a server with small segments, clients that use every tag, and a model of what was acknowledged."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support import for_change
from tests.support.process import GEVENTSTALK, ServerProcess
from tests.support.wire import Client, WireError, yaml_lines

TUBES = ("default", "a", "dead")
STATES = ("ready", "delayed", "reserved", "buried")
TAGS = (
    """note:n,con:k,con:k:2,con:l,grp:g,aft:g,grp:h aft:g,aft:h,backoff:1,backoff:1;2 con:l,tries:1,tries:2 dead:dead,
tries:3 backoff:1,tries:2 con:k note:x,idp:i:3600,idp:j:3600,idp:i,idp:j tries:2 dead:dead,ttl:3600 grp:g,
idp:i:3600 con:k aft:h,ttl:1 con:k,ttl:1 dead:dead con:l,ttl:1 idp:m:3600""".replace("\n", "").split(",")
    + [""] * 3
)
Key = tuple[str, str]


class Known:
    """A job, as far as replies say."""

    def __init__(self, tube: str, text: str, token: bytes) -> None:
        self.tags = dict(word.split(":", 1) for word in text.split())
        self.tube = tube  # where it was put
        self.token = token
        self.moved = "dead" in self.tags  # or may be, by the server
        self.delivered = 0  # since the put or the last kick
        self.ever = False  # it was delivered once
        self.reason = ""  # that its worker told
        self.fleeting = self.tags.get("ttl") == "1"  # its time may end at any moment
        self.perhaps_deleted = self.fleeting
        self.freed = False  # its group was done at some time

    @property
    def key(self) -> Key | None:
        unique = self.tags.get("idp")
        return None if unique is None else (self.tube, unique.partition(":")[0])


class Life:
    """A directory, the servers that live in it one after the other, and what they have acknowledged."""

    def __init__(self, seed: int, folder: Path, fsync: str) -> None:
        self.draw = random.Random(seed)
        self._words = ["-b", str(folder), fsync, "-s", "4096"]
        self.jobs: dict[int, Known] = {}
        self.marks: dict[Key, int] = {}  # keys of deleted jobs
        self.unclear: set[Key] = set()  # keys of jobs that an unanswered command may have deleted
        self.unanswered: dict[bytes, Known] = {}  # puts
        self.tokens = 0
        self.kills = 0
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        self.server = ServerProcess(GEVENTSTALK, self._words).wait_ready()
        self.clients = [self._stack.enter_context(Client(self.server.connect())) for _ in range(3)]
        self.held: list[dict[int, str]] = [{}, {}, {}]  # by client: job and its key of `con`
        for client in self.clients:
            for tube in TUBES:
                client.ask(b"watch %b" % tube.encode())

    def close(self) -> None:
        self._stack.close()
        self.server.stop()

    # --- one command

    def step(self) -> None:
        at = self.draw.randrange(3)
        client, held = self.clients[at], self.held[at]
        what = self.draw.randrange(14)
        some = self.draw.choice([*self.jobs]) if self.jobs else 0
        mine = self.draw.choice([*held]) if held else 0
        if what < 5:
            self.put(client)
        elif what < 8:
            self.took(at, client.ask(b"reserve-with-timeout 0"))
        elif what == 8 and some:
            self.took(at, client.ask(b"reserve-job %d" % some))
        elif what == 9 and mine:
            assert client.ask(b"delete %d" % mine) == b"DELETED\r\n"
            self.deleted(mine)
        elif what == 10 and mine:
            delay = self.draw.choice((0, 0, 1))
            assert client.ask(b"release %d 5 %d" % (mine, delay)) == b"RELEASED\r\n"
            del held[mine]
        elif what == 11 and mine:
            reason = self.draw.choice((b"", b"x", b"no: \\ 'y'"))
            assert client.ask(b"bury %d 5 %b" % (mine, reason) if reason else b"bury %d 5" % mine) == b"BURIED\r\n"
            self.jobs[mine].reason = reason.decode()
            del held[mine]
        elif what == 12 and some:
            if client.ask(b"kick-job %d" % some) == b"KICKED\r\n":
                self.jobs[some].delivered = 0
                self.jobs[some].reason = ""
        elif what == 13 and some:
            tube = self.draw.choice(TUBES)
            if client.ask(b"move %d %b" % (some, tube.encode())) == b"MOVED\r\n":
                self.jobs[some].moved = True
        if self.draw.random() < 0.01:
            time.sleep(1.1)  # backoffs and delays end

    def new(self) -> tuple[bytes, Known]:
        self.tokens += 1
        token = b"%08d" % self.tokens
        text, tube = self.draw.choice(TAGS), self.draw.choice(TUBES[:2])
        known = Known(tube, text, token)
        delay = self.draw.choice((0, 0, 0, 1))
        line = f"put-in {tube} 5 {delay} 600 8 {text}".rstrip()
        return line.encode() + b"\r\n%b\r\n" % token, known

    def put(self, client: Client) -> None:
        line, known = self.new()
        client.send(line)
        self.told(client.reply(), known)

    def told(self, reply: bytes, known: Known, *, racing: bool = False) -> None:
        """Takes in the reply to a put. `racing` says that the server may have done commands of others before it."""
        if reply == b"BAD_FORMAT\r\n":
            assert "grp" in known.tags and "aft" in known.tags, "only a circle of groups is refused"
            return
        found = re.fullmatch(rb"INSERTED (\d+)(?: ([A-Z]+))?(?: \d+)?\r\n", reply)
        assert found, reply
        id, key = int(found[1]), known.key
        if found[2] is None:
            assert id not in self.jobs
            if key is not None and key not in self.unclear and not racing:
                assert key not in self.marks, "a key came again within its time"
                same = [job for job in self.jobs.values() if job.key == key and not job.moved]
                assert not same or any(job.perhaps_deleted for job in same), "two jobs have one key"
            self.jobs[id] = known
            self.look()
            return
        assert key is not None
        if racing:
            return
        if found[2] == b"DELETED":
            assert id not in self.jobs or self.jobs[id].fleeting, "a mark is of a job that lives"
        else:
            assert self.jobs[id].tags["idp"].partition(":")[0] == key[1]

    def took(self, at: int, reply: bytes) -> None:
        found = re.match(rb"RESERVED (\d+) ", reply)
        if not found:
            assert reply in (b"TIMED_OUT\r\n", b"NOT_FOUND\r\n"), reply
            return
        id = int(found[1])
        job = self.jobs[id]
        assert job.token in reply, "the body is another job's"
        key, _, most = job.tags.get("con", "").partition(":")
        if key:
            taken = [each for held in self.held for each in held.values()]
            assert taken.count(key) < int(most or 1), "too many of a key are reserved"
        self.held[at][id] = key
        job.delivered += 1
        job.ever = True
        job.reason = ""
        facts = self.clients[at].stats(b"stats-job %d" % id)
        if "tries" in job.tags and facts["tube"] != '"dead"':
            assert job.delivered <= int(job.tags["tries"]), "a job was delivered too often"
            assert int(facts["tried"]) == job.delivered
        assert "aft" not in job.tags or job.freed, "a job was given out before its group was done"

    def deleted(self, id: int) -> None:
        job = self.jobs.pop(id)
        for held in self.held:
            held.pop(id, None)
        if job.key is not None and not job.moved and job.tags["idp"].endswith(":3600"):
            self.marks[job.key] = id
        elif job.key is not None:
            self.unclear.discard(job.key)
        self.look()

    def look(self) -> None:
        members = {job.tags["grp"] for job in self.jobs.values() if "grp" in job.tags}
        for job in self.jobs.values():
            job.freed = job.freed or job.tags.get("aft") not in members

    # --- a kill

    def kill(self) -> None:
        """Ends the server while commands are under way, starts it again, and compares."""
        self.kills += 1
        pending: list[tuple[int, int, Known | None]] = []  # client, id of a delete or 0, put
        for at, client in enumerate(self.clients):
            lines = b""
            for _ in range(self.draw.randrange(6)):
                if self.held[at] and self.draw.random() < 0.5:
                    id = self.held[at].popitem()[0]
                    lines += b"delete %d\r\n" % id
                    pending.append((at, id, None))
                else:
                    line, known = self.new()
                    lines += line
                    pending.append((at, 0, known))
            if lines:
                client.send(lines)
        time.sleep(self.draw.choice((0, 0.0005, 0.002, 0.01)))
        self.server.process.kill()
        self.server.process.wait(30)
        lost = [False, False, False]
        for at, id, put in pending:
            reply = b""
            if not lost[at]:
                with suppress(WireError, OSError):
                    reply = self.clients[at].reply()
            lost[at] = lost[at] or not reply
            if put is not None and reply:
                self.told(reply, put, racing=True)
            elif put is not None:
                self.unanswered[put.token] = put
            elif reply:
                assert reply == b"DELETED\r\n"
                self.deleted(id)
            else:
                self.jobs[id].perhaps_deleted = True
        self._stack.close()
        self.server.read_log()
        self.start()
        self.compare()

    def compare(self) -> None:
        """Each acknowledged job is there, with its tags, and no other job."""
        client = self.clients[0]
        found: set[int] = set()
        for tube in TUBES:
            for state in STATES:
                reply = client.ask(b"list-jobs %b %b 1000" % (tube.encode(), state.encode()))
                if reply != b"NOT_FOUND\r\n":
                    found |= {int(line.split(",")[0].removeprefix("- {id: ")) for line in yaml_lines(reply)}
        for id in sorted(found - set(self.jobs)):
            token = client.ask(b"peek %d" % id).split(b"\r\n")[1]
            self.jobs[id] = self.unanswered.pop(token)
        self.unanswered.clear()
        for id in [id for id in self.jobs if id not in found]:
            assert self.jobs[id].perhaps_deleted, f"job {id} is lost"
            key = self.jobs[id].key
            if key is not None:
                self.unclear.add(key)
            self.deleted(id)
        for id, job in self.jobs.items():
            job.perhaps_deleted = job.fleeting
            reply = client.ask(b"stats-job %d" % id)
            if job.fleeting and reply == b"NOT_FOUND\r\n":
                continue  # its time has ended since the lists
            facts = dict(line.split(": ", 1) for line in yaml_lines(reply))
            if job.tags:
                assert facts["tries"] == job.tags.get("tries", "0") and facts["group"].strip('"') == job.tags.get(
                    "grp", ""
                )
                assert facts["after-group"].strip('"') == job.tags.get("aft", "")
                assert facts["backoff"].strip('"') == job.tags.get("backoff", "")
                assert facts["idempotency-key"].strip('"') == job.tags.get("idp", "").partition(":")[0]
            if job.reason and facts["state"] == "buried":
                expected = job.reason.replace("\\", "\\\\")
                assert facts["reason"] == f'"{expected}"'
            if "tries" in job.tags and facts["reason"] == "none":
                assert int(facts["tried"]) == job.delivered, "a delivery is forgotten"
            # Others wait for members that came since, as well.
            job.freed = job.ever
        self.look()


@pytest.fixture(params=for_change(["-f0", "-F"], 0))
def life(request: pytest.FixtureRequest, seed: int, tmp_path: Path) -> Iterator[Life]:
    made = Life(seed, tmp_path / "journal", request.param)
    yield made
    made.close()


@pytest.mark.slow
def test_tags_outlive_kills(life: Life, times: int) -> None:
    for _ in range(5 * times):
        for _ in range(120):
            life.step()
        life.kill()
