"""kill -9 of the real server at random and at every named moment of its journal; clients' histories decide.

Life after life on one directory, with segments so small that they are made, sealed, compacted and removed all the
time. A named moment is the entry of the n-th system call of a kind on some of the journal's files: strace puts the
signal there, so that the server itself needs no hook. `scripts/crash` runs hundreds of such lives.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import for_change
from tests.support.clients import fronts_of, is_there, until
from tests.support.faults import strace_problem
from tests.support.history import Broken, Command, History, Traffic, own_tube
from tests.support.process import ServerProcess
from tests.support.shapes import BOUND
from tests.support.wire import Client, WireError

needs_strace = pytest.mark.skipif(bool(strace_problem()), reason=strace_problem() or "strace works")

POLICIES = {"f0": ["-f0"], "f50": ["-f50"], "F": ["-F"]}
SEGMENT_BYTES = (20_000, 50_000, 100_000)
CLIENTS = 4
BOUND_BYTES = 20_000
"""Of bodies in memory, where they have a bound: a fifth of what there is."""
LIFE_S = 1.5
REPLY_LIMIT_S = 60.0
AHEAD = 60  # segments that a life may make
DAMAGE = re.compile(r"Traceback|damaged|missing|cannot|failed|INTERNAL", re.IGNORECASE)


@dataclass(frozen=True)
class Moment:
    """System calls on the files of the journal whose names these are; `{}` stands for the name of a segment.

    The first `start` of them are about those of a server's start; `reach` is how many a life surely comes to.
    """

    call: str
    files: tuple[str, ...]
    start: int
    reach: int
    end: bool = False  # after a short life the server is asked to end

    def draw(self, random: random.Random) -> int:
        """Which of the calls is to be the last."""
        if self.end or random.random() < 0.25:
            return random.randint(1, self.start)
        return random.randint(self.start + 1, self.reach)


NEW_FILES = ("{}.new", "{}.new-wal", "{}.new-shm", "{}.new-journal")
MOMENTS = {
    "write": Moment("pwrite64", ("{}-wal",), 10, 2000),
    "sync": Moment("fdatasync", ("{}-wal",), 3, 40),
    "watermark": Moment("pwrite64", ("synced",), 2, 20),
    "make: open": Moment("openat", NEW_FILES, 12, 60),
    "make: write": Moment("pwrite64", NEW_FILES, 18, 250),
    "make: sync": Moment("fdatasync", NEW_FILES, 18, 90),
    "make: rename": Moment("rename", ("{}.new",), 2, 10),
    "make: sync by name": Moment("fsync", ("{}.new",), 2, 10),
    "make: open by name": Moment("openat", ("{}", "{}-wal", "{}-shm"), 15, 60),
    "make: unlink": Moment("unlink", NEW_FILES[1:], 6, 30),
    "sync of the directory": Moment("fsync", ("",), 5, 20),
    "seal: write": Moment("pwrite64", ("{}",), 60, 500),
    "seal: sync": Moment("fdatasync", ("{}",), 3, 10),
    "seal: truncate": Moment("ftruncate", ("{}", "{}-wal"), 4, 20),
    "seal: unlink": Moment("unlink", ("{}-wal", "{}-shm"), 6, 20),
    "compact: read": Moment("pread64", ("{}",), 100, 300),
    "retire: unlink": Moment("unlink", ("{}",), 3, 10),
    "reserve": Moment("ftruncate", ("reserve",), 1, 2),
    "end: write": Moment("pwrite64", ("{}",), 80, 0, end=True),
    "end: sync": Moment("fdatasync", ("{}", "{}-wal"), 10, 0, end=True),
    "end: unlink": Moment("unlink", ("{}", "{}-wal", "{}-shm"), 10, 0, end=True),
}
STARTS = {"make: open": (1, 2, 4), "make: write": (1, 3, 6)}
"""The first, a middle and the last of the calls by which the main thread of a start makes its segment; strace counts by
thread. How far a life comes depends on the machine, but it surely starts: where such a call kills nothing, the numbers
are those of an older way to make segments."""


@dataclass
class Campaign:
    """Lives on one directory. `killed` counts the kills by the moment of them, `phases` by what the server was at."""

    folder: Path
    seed: int
    policy: str
    segment_bytes: int = SEGMENT_BYTES[0]
    max_memory: int = 0  # 0: no bound
    fronts: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.history = History(self.seed + 1, CLIENTS, bounded=self.max_memory > 0)
        self.directory = self.folder / "journal"
        self.directory.mkdir()
        self.log = self.folder / "log"
        self.log.touch()

    @property
    def kills(self) -> int:
        return sum(self.killed.values())

    def live(self, name: str = "", at: int = 0) -> None:
        """One life that ends at a named moment, or at random when that does not come. Raises Broken.

        `at` says which of the calls is to be the last, instead of a drawn one.
        """
        moment = MOMENTS.get(name)
        ends = moment.end if moment else self.random.random() < 0.2
        server = self._start(self._wrapper(moment, at) if moment else [])
        try:
            phase, by_us = "start", False
            fronts: list[int] = []
            if self._begin(server):
                if self.fronts and not moment:
                    self._disturb(server)
                fronts = fronts_of(server)
                life_s = LIFE_S if moment and not ends else self.random.uniform(0.0, 0.05 if ends else 1.0)
                phase, by_us = self._work(server, life_s, end=ends, kill=not moment)
            code = server.process.wait(REPLY_LIMIT_S)
            until(lambda: not any(map(is_there, fronts)), "the fronts have ended, too")
        finally:
            server.kill()
        if code == -signal.SIGKILL:
            self.killed["random" if by_us else name] += 1
            self.phases[phase] += 1
        elif code != 0 or phase != "end":
            raise Broken(f"the server ended with exit code {code}: {self._said()}")
        self._require_silence()

    def end(self) -> int:
        """The last life: looks at everything once more, takes it all out, stops. Returns how many jobs those were."""
        server = self._start([])
        try:
            with self._client(server.wait_ready()) as client:
                self.history.verify(client)
                count = self.history.drain(client)
            code = server.stop()
        except RuntimeError as error:
            raise Broken(f"{error}: {self._said()}") from error
        finally:
            server.kill()
        if code:
            raise Broken(f"the server ended with exit code {code}: {self._said()}")
        self._require_silence()
        return count

    def _start(self, wrapper: list[str]) -> ServerProcess:
        args = ["-b", str(self.directory), "-s", str(self.segment_bytes), *POLICIES[self.policy]]
        if self.max_memory:
            args += ["--max-memory", str(self.max_memory)]
        if self.fronts:
            args += ["--io-processes", str(self.fronts)]
        path = str(self.folder / "s")
        Path(path).unlink(missing_ok=True)
        return ServerProcess([*wrapper, *BOUND], args, unix_path=path, cwd=self.folder, stderr=self.log)

    def _client(self, server: ServerProcess) -> Client:
        return Client(server.connect(REPLY_LIMIT_S))

    def _begin(self, server: ServerProcess) -> bool:
        """Checks what came back. Returns whether the server lived long enough for that."""
        try:
            with self._client(server.wait_ready()) as client:
                self.history.verify(client)
        except (RuntimeError, WireError, OSError) as error:
            try:
                code: int | str = server.process.wait(REPLY_LIMIT_S)
            except subprocess.TimeoutExpired:
                code = "it hangs"
            if code != -signal.SIGKILL:
                raise Broken(f"no start: {error} ({code}): {self._said()}") from error
            return False
        return True

    def _disturb(self, server: ServerProcess) -> None:
        """Kills fronts, or has them stand still. The server and the clients of other fronts go on. Raises Broken."""
        for _ in range(self.random.randint(0, 3)):
            traffic = Traffic(self.history, lambda: self._client(server), apart=True)
            time.sleep(self.random.uniform(0.0, 0.3))
            before = fronts_of(server)
            victim = self.random.choice(before)
            freezes, kills = self.random.choice([(False, True), (False, True), (True, True), (True, False)])
            if freezes:
                os.kill(victim, signal.SIGSTOP)
                time.sleep(self.random.uniform(0.0, 0.3))
                os.kill(victim, signal.SIGKILL if kills else signal.SIGCONT)
            else:
                os.kill(victim, signal.SIGKILL)
            if kills:
                self.killed["front"] += 1
                until(lambda: self._is_replaced(server, victim), "another front is started", REPLY_LIMIT_S)  # noqa: B023
            turns = list(traffic.turns)
            for number in traffic.left:
                until(
                    lambda: traffic.turns[number] > turns[number] or number not in traffic.left,  # noqa: B023
                    "the clients of other fronts are served",
                )
            lost = CLIENTS - len(traffic.left)
            traffic.stop()
            if lost and not kills:
                raise Broken(f"{lost} clients are gone, and their front only stood still")
            with self._client(server) as client:
                until(lambda: client.stats(b"stats")["current-connections"] == "1", "all are gone")
                until(lambda: client.stats(b"stats")["current-jobs-reserved"] == "0", "so is what they held")
                self.history.verify(client, restarted=False)

    def _is_replaced(self, server: ServerProcess, victim: int) -> bool:
        fronts = fronts_of(server)
        return victim not in fronts and len(fronts) == self.fronts

    def _work(self, server: ServerProcess, life_s: float, *, end: bool, kill: bool) -> tuple[str, bool]:
        """Traffic until the server is killed or, with `end`, asked to end; with both, killed while it does so.

        Returns what it was at then, and whether it was killed from here.
        """
        traffic = Traffic(self.history, lambda: self._client(server))
        deadline = time.monotonic() + life_s
        while server.process.poll() is None and traffic.at_work and time.monotonic() < deadline:
            time.sleep(0.005)
        phase, kills = "work", False
        if server.process.poll() is None:
            kills = kill or not end
            if end and traffic.at_work:
                phase = "end"
                server.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    server.process.wait(self.random.uniform(0.0, 0.04) if kill else REPLY_LIMIT_S)
            if server.process.poll() is None:
                server.process.kill()
        traffic.join()
        return phase, kills

    def _wrapper(self, moment: Moment, at: int) -> list[str]:
        """strace, with the order to kill. It sits beside the server (-D), which stays the process that was started."""
        numbers = [int(path.name[8:16]) for path in self.directory.glob("segment-????????.db")] or [1]
        names: list[str] = []
        for file in moment.files:
            if "{}" in file:
                names += [file.format(f"segment-{n:08d}.db") for n in range(min(numbers), max(numbers) + AHEAD)]
            else:
                names.append(file)
        where = [word for name in names for word in ("-P", str(self.directory / name))]
        order = f"inject={moment.call}:signal=KILL:when={at or moment.draw(self.random)}"
        return ["strace", "-D", "-f", "-qq", "-o", "/dev/null", *where, "-e", f"trace={moment.call}", "-e", order]

    def _said(self) -> str:
        return " | ".join(self.log.read_text().splitlines()[-5:])

    def _require_silence(self) -> None:
        if DAMAGE.search(self.log.read_text()):
            raise Broken(f"the server complains: {self.log.read_text()[-1000:]}")

    def summary(self) -> str:
        """Returns what happened, for people."""
        phases = ", ".join(f"{self.phases[phase]} at {phase}" for phase in ("start", "work", "end"))
        doubts = ", ".join(f"{count} {word}" for word, count in sorted(self.history.doubts.items())) or "none"
        shape = f" --max-memory {self.max_memory}" if self.max_memory else ""
        shape += f" --io-processes {self.fronts}" if self.fronts else ""
        counts = self.history.counts
        return (
            f"{self.policy} -s {self.segment_bytes}{shape}: {self.kills} kills ({phases}); "
            f"{counts.total() - counts['refused']} commands answered, {counts['refused']} puts refused; "
            f"of the unanswered {doubts}"
        )


def test_killed_at_random_nothing_that_was_acknowledged_is_lost(tmp_path: Path, seed: int, times: int) -> None:
    campaigns = []
    for number, policy in enumerate(POLICIES):
        (tmp_path / policy).mkdir()
        campaign = Campaign(tmp_path / policy, seed + number, policy)
        campaigns.append(campaign)
        for _ in range(2 * times):
            campaign.live()
        campaign.end()
        print(campaign.summary())
    assert any(campaign.kills for campaign in campaigns)  # a life may end before the signal comes


SHAPES = {"disk": (BOUND_BYTES, 0), "fronts": (0, 2), "disk and fronts": (BOUND_BYTES, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("shape", for_change(SHAPES, 1))
def test_killed_in_another_shape_nothing_that_was_acknowledged_is_lost(tmp_path: Path, seed: int, shape: str) -> None:
    policy = list(POLICIES)[seed % 3]
    campaign = Campaign(tmp_path, seed, policy, SEGMENT_BYTES[0], *SHAPES[shape])
    for _ in range(3):
        campaign.live()
    campaign.end()
    print(campaign.summary())
    assert campaign.kills


@needs_strace
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("shape", SHAPES)
def test_killed_at_named_moments_in_another_shape(tmp_path: Path, seed: int, shape: str) -> None:
    campaign = Campaign(tmp_path, seed, list(POLICIES)[seed % 3], SEGMENT_BYTES[0], *SHAPES[shape])
    for name in ["", *MOMENTS]:
        campaign.live(name)
    campaign.end()
    print(campaign.summary(), dict(campaign.killed))


@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "policy", [pytest.param(policy, marks=[] if policy == "f0" else pytest.mark.long) for policy in POLICIES]
)
def test_killed_at_named_moments_nothing_that_was_acknowledged_is_lost(
    tmp_path: Path, seed: int, times: int, policy: str
) -> None:
    """Each policy has a third of the moments, so that together they have all; what does not come ends at random.

    A change has half of them, which the seed chooses.
    """
    campaign = Campaign(tmp_path, seed, policy, SEGMENT_BYTES[0])
    campaign.live()
    number = list(POLICIES).index(policy)
    names = list(MOMENTS)[number :: len(POLICIES)]
    for name in names if times > 1 else names[seed % 2 :: 2]:
        campaign.live(name)
    for name, calls in STARTS.items():
        before = campaign.killed[name]
        campaign.live(name, calls[number])
        assert campaign.killed[name] == before + 1, "strace has killed nothing"
    campaign.end()
    print(campaign.summary(), dict(campaign.killed))


# The histories themselves


def traffic_for(history: History, server: ServerProcess, commands: int = 600) -> None:
    """Clients that end in peace after this many commands more, on a server that goes on."""
    enough = history.counts.total() + commands
    traffic = Traffic(history, lambda: Client(server.connect(REPLY_LIMIT_S)))
    try:
        until(lambda: history.counts.total() >= enough or not traffic.at_work, "there is traffic", REPLY_LIMIT_S)
    finally:
        traffic.stop()


def lose(client: Client, ids: list[int]) -> None:
    assert client.ask(b"delete %d" % ids[0]) == b"DELETED\r\n"


def invent(client: Client, ids: list[int]) -> None:
    client.put(b"put by no crew")


def hand_back(client: Client, ids: list[int]) -> None:
    assert client.ask(b"reserve-job %d" % ids[0]).startswith(b"RESERVED")
    assert client.ask(b"release %d 77 0" % ids[0]) == b"RELEASED\r\n"


def put_off(client: Client, ids: list[int]) -> None:
    assert client.ask(b"reserve-job %d" % ids[0]).startswith(b"RESERVED")
    assert client.ask(b"bury %d 0" % ids[0]) == b"BURIED\r\n"


def wake(client: Client, ids: list[int]) -> None:
    replies = [client.ask(b"kick-job %d" % id) for id in ids]
    assert b"KICKED\r\n" in replies


def put_again(client: Client, ids: list[int]) -> None:
    """The same job under another id."""
    body = client.ask(b"peek %d" % ids[0]).partition(b"\r\n")[2][:-2]
    client.ask(b"delete %d" % ids[0])
    client.put(body)


@pytest.mark.parametrize("tamper", [None, lose, invent, hand_back, put_off, wake, put_again])
def test_histories_see_what_is_not_as_it_was_promised(
    start_server: Callable[..., ServerProcess], seed: int, tamper: Callable[[Client, list[int]], None] | None
) -> None:
    """Of the tool: on a server that was not even restarted, until another client has a hand in it."""
    server = start_server()
    history = History(seed, CLIENTS)
    for _ in range(2):
        traffic_for(history, server)
        with Client(server.connect()) as client:
            wait_for_no_holders(client)
            history.verify(client, restarted=False)
    with Client(server.connect()) as client:
        if tamper is None:
            assert history.drain(client) > 5
            return
        tamper(client, history.ids)
        with pytest.raises(Broken):
            history.verify(client, restarted=False)


def wait_for_no_holders(client: Client) -> None:
    """The server has heard that the clients have gone, and given back what they held."""
    until(lambda: client.stats(b"stats")["current-jobs-reserved"] == "0", "what they held comes back")


def test_histories_see_that_everything_is_forgotten(start_server: Callable[..., ServerProcess], seed: int) -> None:
    """Of the tool: a server without a journal, restarted."""
    history = History(seed, CLIENTS)
    traffic_for(history, start_server())
    with Client(start_server().connect()) as client, pytest.raises(Broken):
        history.verify(client)


# Bug: jobs behind the ids of half puts were not looked for, when a front was killed and the server ran on.
def test_ids_of_half_puts_are_not_given_again(start_server: Callable[..., ServerProcess], seed: int) -> None:
    """Of the tool: three puts lack their last byte; a later one whose reply is lost has none of their ids."""
    history = History(seed, CLIENTS)
    server = start_server()
    for lacks in (1, 1, 1, 0):
        with Client(server.connect()) as client:
            client.ask(b"use %b" % own_tube(0))
            line = history._put(0, own_tube(0)).line
            client.send(line[: len(line) - lacks])
            client.sock.shutdown(socket.SHUT_WR)
            assert client.sock.recv(100) == (b"" if lacks else b"INSERTED 4\r\n")
        if lacks:
            with Client(server.connect()) as client:
                history.verify(client, restarted=False)
    with Client(server.connect()) as client:
        history.verify(client, restarted=False)
        assert history.ids == [4]


def test_an_id_is_seen_to_be_given_twice(start_server: Callable[..., ServerProcess], seed: int) -> None:
    """Of the tool: the second server begins anew, with nothing to miss."""
    history = History(seed, CLIENTS)
    server = start_server()
    traffic_for(history, server)
    with Client(server.connect()) as client:
        wait_for_no_holders(client)
        history.verify(client, restarted=False)
        history.drain(client)
    with pytest.raises(Broken, match="is given"):
        traffic_for(history, start_server())


@pytest.mark.parametrize("wrong", ["half", "gap"])
def test_unanswered_commands_happen_whole_and_in_order(wrong: str) -> None:
    """Of the tool: of a connection's unanswered commands the first may not be missing, nor half of one."""
    first, second = Command(1, 1, b"kick 2\r\n", b""), Command(1, 2, b"bury 3 4\r\n", b"")
    fates = [(first if wrong == "half" else second, True), (first, False)]
    history = History(1, CLIENTS)
    with pytest.raises(Broken):
        history.judge_order([first, second], fates)
    first.happened = second.happened = None
    history.judge_order([first, second], [(first, True), (second, False)])


# scripts/crash

LIVES = 24  # on one directory


def main(args: list[str]) -> int:
    """Hundreds of kills, directory after directory. Returns 0 when the histories were kept."""
    parser = argparse.ArgumentParser(prog="scripts/crash", description=main.__doc__)
    parser.add_argument("--kills", type=int, default=300, metavar="N", help="how many at least (default: %(default)s)")
    parser.add_argument("--seed", type=int, metavar="S", help="of the first directory; the next has S + 1 (drawn)")
    parser.add_argument("--minutes", type=float, default=12.0, metavar="M", help="give up then (default: %(default)s)")
    parser.add_argument("--max-memory", type=int, default=0, metavar="BYTES", help="of the server's bodies (no bound)")
    parser.add_argument("--io-processes", type=int, default=0, metavar="N", help="fronts, which are killed, too (none)")
    options = parser.parse_args(args)
    problem = strace_problem()
    if problem:
        print(f"{problem}: kills at random only")
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    deadline = time.monotonic() + options.minutes * 60
    killed: Counter[str] = Counter()
    while sum(killed.values()) < options.kills:
        if time.monotonic() > deadline:
            print(f"only {sum(killed.values())} kills in {options.minutes:g} minutes")
            return 1
        with tempfile.TemporaryDirectory(prefix="crash-") as folder:
            campaign = Campaign(Path(folder), seed, *_kind(seed), options.max_memory, options.io_processes)
            try:
                for _ in range(LIVES):
                    names = [""] if problem else ["", *MOMENTS]
                    campaign.live(campaign.random.choice(names))
                campaign.end()
            except Broken as error:
                kept = Path(tempfile.mkdtemp(prefix="crash-")) / "directory"
                shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("s"))
                print(f"seed {seed}: {campaign.summary()}\nBROKEN: {error}\nleft in {kept}")
                return 1
        print(f"seed {seed}: {campaign.summary()}", flush=True)
        killed += campaign.killed
        seed += 1
    print(f"{sum(killed.values())} kills, all histories kept; by moment:")
    for name in ("random", "front", *MOMENTS):
        print(f"  {killed[name]:4} {name}")
    return 0


def _kind(seed: int) -> tuple[str, int]:
    """Policy and size of segments, so that neighbouring seeds have different ones."""
    return list(POLICIES)[seed % 3], SEGMENT_BYTES[seed // 3 % 3]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
