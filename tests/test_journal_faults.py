"""The faults of beanstalkd's binlog, each by its name in the list of weaknesses, shown to be absent; a failing disk.

What upstream does stands in the comment of each test. Errors of the disk and kills at a system call are injected by
strace; the small disk of tests/support/disk.py stands for a full one.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from journal.sqlite.files import read_watermark
from tests.support.clients import (
    Launch,
    burst,
    cpu_s,
    cpu_share,
    launcher,
    main_thread_cpu_ns,
    number,
    put_many,
    reserve_many,
    until,
)
from tests.support.disk import fill_up, small_disk
from tests.support.faults import inject, strace_problem
from tests.support.process import GEVENTSTALK, ServerProcess
from tests.support.wire import Client, WireError

FAILED = 74
FULL = b"OUT_OF_MEMORY\r\n"
END_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
needs_strace = pytest.mark.skipif(bool(strace_problem()), reason=strace_problem() or "strace works")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    with ExitStack() as stack:
        yield lambda size: stack.enter_context(small_disk(tmp_path / "disk", size))


@pytest.fixture
def launch(disk: Callable[[int], Path], start_server: Callable[..., ServerProcess], tmp_path: Path) -> Iterator[Launch]:
    yield from launcher(start_server, tmp_path, unix=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


class Trace(Protocol):
    def __call__(self, wrapper: list[str], *flags: str) -> ServerProcess: ...


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Trace]:
    """Starts servers inside strace, which log to tmp_path/traced; they may end as they like."""
    servers: list[ServerProcess] = []

    def start(wrapper: list[str], *flags: str) -> ServerProcess:
        servers.append(ServerProcess([*wrapper, *GEVENTSTALK], flags, stderr=tmp_path / "traced"))
        return servers[-1].wait_ready()

    yield start
    for server in servers:
        server.stop()


def segment(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:08d}.db"


def wal(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:08d}.db-wal"


def watching(calls: str, into: Path) -> list[str]:
    """Words that have strace write down these calls, with the paths of their files."""
    return ["strace", "-D", "-f", "-qq", "-y", "-s", "0", "-e", f"trace={calls}", "-o", str(into)]


def fill(client: Client, body: bytes) -> list[int]:
    """Puts until there is no room; returns the ids of what was accepted."""
    ids: list[int] = []
    command = b"put 5 0 600 %d\r\n%b\r\n" % (len(body), body)
    while True:
        replies = burst(client, [command] * 20)
        ids += [int(reply.split()[1]) for reply in replies if reply.startswith(b"INSERTED ")]
        if FULL in replies:
            assert set(replies) - {FULL} == {reply for reply in replies if reply.startswith(b"INSERTED ")}
            return ids


def words(replies: list[bytes]) -> Counter[bytes]:
    return Counter(reply.split(b" ")[0].rstrip() for reply in replies)


# W3 to W12


@pytest.mark.parametrize("limit", [65535, 100])
def test_w3_the_largest_bodies_come_back(launch: Launch, folder: Path, limit: int) -> None:
    # Upstream compares the size with its CRLF to the limit: a job of max - 1 or max bytes is refused at the restart,
    # with everything behind it in that file. The same for a limit that was made lower.
    server = launch("-b", str(folder))
    bodies = [b"1", b"x" * 65534, b"y" * 65535, b"4"]
    with Client(server.connect()) as client:
        for body in bodies:
            client.put(body)
    server.kill()
    with Client(launch("-b", str(folder), "-z", str(limit)).connect()) as client:
        for id, body in enumerate(bodies, 1):
            assert client.ask(b"peek %d" % id) == b"FOUND %d %d\r\n%b\r\n" % (id, len(body), body)


@needs_strace
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_w4_a_job_is_moved_before_its_segment_goes(traced: Trace, launch: Launch, folder: Path, nth: int) -> None:
    # Upstream's compaction unlinks the old file and then writes the moved job: a kill between the two loses it,
    # acknowledged and fsynced.
    only = [segment(folder, count) for count in range(1, 9)]
    server = traced(inject("unlink", "signal=KILL", nth, only=only), "-b", str(folder), "-f0",
                    "-s", "65536")  # fmt: skip
    client = Client(server.connect())
    old = client.put(b"old")
    kept = {old}
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            [id, *gone] = put_many(client, 20, body=b"x" * 2000)
            kept.add(id)
            assert set(burst(client, [b"delete %d\r\n" % each for each in gone])) == {b"DELETED\r\n"}
    except (WireError, OSError):
        pass
    client.close()
    assert server.process.wait(END_S) == -9, "no segment was removed"
    with Client(launch("-b", str(folder)).connect()) as client:
        for id in kept:
            assert client.ask(b"peek %d" % id).startswith(b"FOUND"), id


@pytest.mark.parametrize("policy", ["-f100", "-f0"])
def test_w5_what_is_written_last_is_synced_in_time(launch: Launch, folder: Path, policy: str) -> None:
    # Upstream has no timer: of two puts 10 ms apart, and then nothing, only the first is ever synced. Nor does it sync
    # a file that it leaves behind, or the directory.
    with Client(launch("-b", str(folder), policy).connect()) as client:
        client.put(b"first")
        time.sleep(0.01)
        client.put(b"second")
        until(lambda: read_watermark(str(folder)) == (1, 2), "both are on the device")


@needs_strace
def test_w5_a_segment_that_is_left_behind_is_synced(traced: Trace, folder: Path, tmp_path: Path) -> None:
    # Upstream closes a file that is full without a sync, and never syncs the directory.
    server = traced(watching("fsync,fdatasync,pwrite64", tmp_path / "calls"), "-b", str(folder), "-s", "65536", "-f50")
    with Client(server.connect()) as client:
        deadline = time.monotonic() + END_S
        while number(client, "binlog-current-index") < 3:
            put_many(client, 5, body=b"x" * 2000)
            assert time.monotonic() < deadline, "no third segment"
        put_many(client, 1)  # on a slow device the third segment comes late, and empty: only a change has it synced
        until(lambda: read_watermark(str(folder))[0] >= 3, "the third segment is synced")
    server.stop()
    calls = (tmp_path / "calls").read_text().splitlines()
    for count in (1, 2):
        ours = [line for line in calls if f"/{segment(folder, count).name}" in line]
        writes = [place for place, line in enumerate(ours) if "pwrite64(" in line]
        syncs = [place for place, line in enumerate(ours) if "sync(" in line]
        assert writes and syncs and syncs[-1] > writes[-1], ours[-5:]
    assert [line for line in calls if "fsync(" in line and f"<{folder}>" in line], "the directory is never synced"


@needs_strace
@pytest.mark.parametrize("policy", ["-f0", "-f50", "-F"])
def test_w6_a_write_that_fails_is_the_end(
    traced: Trace, launch: Launch, folder: Path, tmp_path: Path, policy: str
) -> None:
    # Upstream switches its binlog off after one write error and says nothing: what it acknowledges from then on is lost
    # by the next restart, and what was deleted comes back.
    server = traced(inject("pwrite64", "error=EIO", 40, only=[wal(folder, 1)]), "-b", str(folder), policy)
    acknowledged, deleted = traffic(server)
    ended_by_the_journal(server, tmp_path)
    found(launch, folder, acknowledged, deleted)


def test_w7_a_put_that_could_not_be_written_is_nowhere(launch: Launch, disk: Callable[[int], Path]) -> None:
    # Upstream answers BURIED and has the job in two places; the next reserve loops for ever at 100 % CPU.
    folder = disk(1 << 20)
    server = launch("-b", str(folder / "journal"))
    with Client(server.connect()) as client, Client(server.connect()) as other:
        ids = fill(client, b"x" * 500)
        assert number(client, "current-jobs-buried") == 0
        assert reserve_many(other, len(ids)) == ids
        assert other.ask(b"reserve-with-timeout 0") in (b"TIMED_OUT\r\n", b"DEADLINE_SOON\r\n")
        assert cpu_share(server.pid, 0.5) < 0.2


def test_w8_a_put_that_is_refused_for_space_leaves_nothing(launch: Launch, disk: Callable[[int], Path]) -> None:
    # Upstream keeps a ghost: peek finds it, no client can delete it, and its tube stays.
    server = launch("-b", str(disk(1 << 20) / "journal"))
    with Client(server.connect()) as client:
        last = max(fill(client, b"x" * 500))
        client.ask(b"use ghost")
        while True:
            reply = client.ask(b"put 0 0 60 60000\r\n%b" % bytes(60_000))
            if reply == FULL:
                break
            last = int(reply.split()[1])
        client.ask(b"use default")
        for id in range(last + 1, last + 30):
            assert client.ask(b"peek %d" % id) == b"NOT_FOUND\r\n"
            assert client.ask(b"delete %d" % id) == b"NOT_FOUND\r\n"
        jobs = number(client, "current-jobs-ready")
        assert client.ask(b"stats-tube ghost") == b"NOT_FOUND\r\n"
        assert jobs == len(burst(client, [b"peek-ready\r\n"] * jobs))


def test_w9_on_a_full_disk_jobs_are_released_and_buried(launch: Launch, disk: Callable[[int], Path]) -> None:
    # Upstream answers OUT_OF_MEMORY and INTERNAL_ERROR, and the job is reserved by no client until a restart.
    folder = disk(2 << 20)
    server = launch("-b", str(folder / "journal"))
    with Client(server.connect()) as client:
        ids = put_many(client, 40, body=b"x" * 100)
        fill_up(folder / "filler")
        assert reserve_many(client, 40) == ids
        half = len(ids) // 2
        assert words(burst(client, [b"release %d 3 100\r\n" % id for id in ids[:half]])) == {b"RELEASED": half}
        assert words(burst(client, [b"bury %d 3\r\n" % id for id in ids[half:]])) == {b"BURIED": half}
        assert number(client, "current-jobs-reserved") == 0
        assert words(burst(client, [b"delete %d\r\n" % id for id in ids])) == {b"DELETED": 40}


def test_w10_a_kick_on_a_full_disk_counts_what_it_kicked(launch: Launch, disk: Callable[[int], Path]) -> None:
    # Upstream counts failed kicks and tries up to the bound: three buried jobs, `kick 4000000000`, and it is gone.
    folder = disk(2 << 20)
    server = launch("-b", str(folder / "journal"))
    with Client(server.connect()) as client:
        put_many(client, 3)
        for id in reserve_many(client, 3):
            assert client.ask(b"bury %d 0" % id) == b"BURIED\r\n"
        fill_up(folder / "filler")
        begun_s = cpu_s(server.pid)
        assert client.ask(b"kick 4000000000") == b"KICKED 3\r\n"
        assert cpu_s(server.pid) - begun_s < 1
        assert number(client, "current-jobs-ready") == 3


# Bug: A segment of a newer format was called damaged, and --accept-damage set it aside with all its jobs.
def test_w11_a_segment_of_an_unknown_version_is_kept(
    launch: Launch, start_server: Callable[..., ServerProcess], folder: Path, tmp_path: Path
) -> None:
    # Upstream skips such a file, writes hundreds of thousands of lines about it, and in the end deletes it.
    server = launch("-b", str(folder))
    with Client(server.connect()) as client:
        client.put(b"kept")
    server.stop()
    path = segment(folder, 1)
    content = bytearray(path.read_bytes())
    assert content[60:63] == b"\0\0\0"
    content[63] = 9
    path.write_bytes(content)
    for flags in ((), ("--accept-damage",)):  # it is no damage, so accepting damage does not help
        with pytest.raises(RuntimeError, match="exit code 1"):
            start_server("-b", str(folder), *flags, stderr=tmp_path / "refused")
        said = (tmp_path / "refused").read_text()
        assert "was written by a newer geventstalk" in said and "format version 9" in said, said
        assert len(said.splitlines()) <= 3, said
        assert path.read_bytes() == content
        assert not list(folder.glob("*.damaged"))
    content[63] = 2
    path.write_bytes(content)
    with Client(launch("-b", str(folder)).connect()) as client:
        assert number(client, "current-jobs-ready") == 1


@pytest.mark.parametrize("end", [ServerProcess.stop, ServerProcess.kill], ids=["stop", "kill"])
def test_w12_ids_go_on_when_all_jobs_are_gone(
    launch: Launch, folder: Path, end: Callable[[ServerProcess], object]
) -> None:
    # Upstream takes the highest id that it still finds in a file: put, delete, restart twice, put, and it is 1 again.
    last = 0
    for _ in range(3):
        server = launch("-b", str(folder), "-s", "65536")
        with Client(server.connect()) as client:
            id = client.put(b"x")
            assert id == last + 1
            last = max(id, *put_many(client, 60, body=b"x" * 2000))
            for each in range(id, last + 1):
                assert client.ask(b"delete %d" % each) == b"DELETED\r\n"
        end(server)
        end(launch("-b", str(folder), "-s", "65536"))


# W27 to W31


def test_w27_the_size_of_segments_costs_nothing(launch: Launch, tmp_path: Path) -> None:
    # Upstream's compaction runs an empty loop of up to files x size / live rounds at each operation: put and delete
    # beside one live job cost 58 us with -s 100 kB, 251 us with the default and 1188 us with 50 MB.
    costs = []
    for size in (100_000, 50_000_000):
        server = launch("-b", str(tmp_path / f"journal-{size}"), "-F", "-s", str(size))
        with Client(server.connect()) as client:
            client.put(b"stays")
            rounds = []
            for _ in range(5):
                begun = main_thread_cpu_ns(server.pid)
                for id in put_many(client, 100, body=b"x"):
                    client.ask(b"delete %d" % id)
                rounds.append(main_thread_cpu_ns(server.pid) - begun)
            costs.append(min(rounds))
    assert costs[1] < 4 * costs[0], costs


@needs_strace
@pytest.mark.parametrize("alone", [True, False])
def test_only_an_fsync_for_which_every_client_waits_needs_no_thread(
    traced: Trace, folder: Path, tmp_path: Path, alone: bool
) -> None:
    """However quick the last ones were: the next one may take 300 ms."""
    calls = tmp_path / "calls"
    server = traced([*watching("fdatasync", calls), "-P", str(wal(folder, 1))], "-b", str(folder), "-f0")
    with Client(server.connect()) as client, ExitStack() as others:
        if not alone:
            others.enter_context(Client(server.connect())).sync()
        for _ in range(20):
            client.put(b"x")
        threads = [int(line.split()[0]) for line in calls.read_text().splitlines() if "fdatasync(" in line]
        assert len(threads) >= 20 and (set(threads) == {server.pid} if alone else server.pid not in threads)


@pytest.mark.parametrize(("policy", "ahead"), [("-f0", True), ("-f50", False), ("-F", False)])
def test_a_wal_is_allocated_ahead_where_replies_wait_for_its_fsync(
    launch: Launch, folder: Path, policy: str, ahead: bool
) -> None:
    """An fsync of a file that grows takes twice as long."""
    launch("-b", str(folder), policy)
    assert (os.path.getsize(wal(folder, 1)) > 1_000_000) == ahead


@needs_strace
def test_w28_clients_share_an_fsync(traced: Trace, folder: Path, tmp_path: Path) -> None:
    # Upstream does one fsync for each operation, on the thread that serves.
    # On a device that takes its time: where an fsync is as quick as a put, there is nothing to share.
    slow = [*watching("fdatasync", tmp_path / "calls"), "-P", str(wal(folder, 1))]
    server = traced([*slow, "-e", "inject=fdatasync:delay_enter=30000"], "-b", str(folder), "-f0")
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(server.connect())) for _ in range(20)]
        for _ in range(10):
            for client in clients:
                client.send(b"put 0 0 60 1\r\nx\r\n")
            for client in clients:
                assert client.reply().startswith(b"INSERTED ")
    server.stop()
    syncs = (tmp_path / "calls").read_text().count("fdatasync(")
    assert 10 <= syncs < 100, f"{syncs} syncs for 200 puts"


@needs_strace
def test_w29_rotation_happens_away_from_the_thread_that_serves(traced: Trace, folder: Path, tmp_path: Path) -> None:
    # Upstream writes a new file full of zeros, 2560 writes in a row, before it answers the put that needs it: 11.7 ms
    # instead of 98 us.
    trace = tmp_path / "calls"
    server = traced(watching("pwrite64,write,fsync,fdatasync,fallocate,rename", trace), "-b", str(folder), "-F",
                    "-s", "65536")  # fmt: skip
    with Client(server.connect()) as client:
        until(trace.exists, "strace is there")
        begun = len(trace.read_text().splitlines())
        ids = [client.put(b"x" * 2000) for _ in range(200)]
        deadline = time.monotonic() + 30
        while number(client, "binlog-current-index") <= 2:  # where the device is slow, segments come later
            assert time.monotonic() < deadline, "nothing is rotated"
            ids.append(client.put(b"x" * 2000))
    lines = [line for line in trace.read_text().splitlines()[begun:] if str(folder) in line]
    serving = [line for line in lines if line.split()[0] == str(server.pid)]
    assert not [line for line in serving if re.search(r"(fsync|fdatasync|fallocate|rename)\(", line)], serving[-5:]
    written = sum(int(match[1]) for line in serving if (match := re.search(r"pwrite64\(.*= (\d+)$", line)))
    assert written < len(ids) * 3 * 4096, f"{written} bytes for {len(ids)} puts of 2000"


@needs_strace
@pytest.mark.parametrize("nth", [2, 3, 5])
def test_w30_a_record_is_there_whole_or_not_at_all(traced: Trace, launch: Launch, folder: Path, nth: int) -> None:
    # Upstream writes a record in two to four pieces, without a checksum: a kill between two leaves a torn one, of which
    # a restart complains and drops the rest of the file.
    body = bytes(range(256)) * 40
    server = traced(inject("pwrite64", "signal=KILL", 20 + nth, only=[wal(folder, 1)]), "-b", str(folder), "-f0")
    acknowledged = 0
    with Client(server.connect()) as client:
        try:
            while acknowledged < 100:
                client.put(body)
                acknowledged += 1
        except (WireError, OSError):
            pass
    assert server.process.wait(END_S) == -9
    assert 0 < acknowledged < 100
    with Client(launch("-b", str(folder)).connect()) as client:
        assert acknowledged <= number(client, "current-jobs-ready") <= acknowledged + 1
        for id in range(1, number(client, "current-jobs-ready") + 1):
            assert client.ask(b"peek %d" % id) == b"FOUND %d %d\r\n%b\r\n" % (id, len(body), body)


def test_w31_a_restart_takes_no_room_for_each_job(launch: Launch, disk: Callable[[int], Path]) -> None:
    # Upstream reserves 84 bytes for each recovered job in files that it fills with zeros first: 200 jobs and -s 8192
    # make three files, and on a full disk it cannot start.
    folder = disk(2 << 20)
    flags = ["-b", str(folder / "journal"), "-s", "8192"]
    server = launch(*flags)
    with Client(server.connect()) as client:
        put_many(client, 200, body=b"x")
    server.stop()
    fill_up(folder / "filler")
    before = len(list((folder / "journal").glob("segment-*.db")))
    server = launch(*flags)
    with Client(server.connect()) as client:
        assert number(client, "current-jobs-ready") == 200
        assert len(list((folder / "journal").glob("segment-*.db"))) <= before + 2
        assert reserve_many(client, 200) == list(range(1, 201))


# A disk that fails


Traffic = tuple[dict[int, bytes], set[int]]


def traffic(server: ServerProcess, *, clients: int = 3) -> Traffic:
    """Puts and deletes until the server goes. Returns what was put and what was deleted, as far as it was answered."""
    deadline = time.monotonic() + END_S
    acknowledged: dict[int, bytes] = {}
    deleted: set[int] = set()
    with ExitStack() as stack:
        all_clients = [stack.enter_context(Client(server.connect())) for _ in range(clients)]
        count = 0
        while True:
            assert time.monotonic() < deadline, "nothing failed"
            bodies = [b"%d-%d-%b" % (count, place, b"x" * 500) for place in range(clients)]
            gone = 0
            for client, body in zip(all_clients, bodies, strict=True):
                try:
                    client.send(b"put 0 0 600 %d\r\n%b\r\n" % (len(body), body))
                except OSError:
                    gone += 1
            for client, body in zip(all_clients, bodies, strict=True):
                try:
                    reply = client.reply()
                except (WireError, OSError):
                    gone += 1
                    continue
                assert reply.startswith(b"INSERTED "), reply
                acknowledged[int(reply.split()[1])] = body
            if gone:
                return acknowledged, deleted
            if count % 3 == 2:
                id = next(id for id in acknowledged if id not in deleted)
                try:
                    reply = all_clients[0].ask(b"delete %d" % id)
                except (WireError, OSError):
                    del acknowledged[id]  # it may have happened or not
                    return acknowledged, deleted
                assert reply == b"DELETED\r\n"
                deleted.add(id)
            count += 1
            time.sleep(0.001)


def ended_by_the_journal(server: ServerProcess, tmp_path: Path) -> None:
    """The process has ended with the code for it, and said so in one line."""
    assert server.process.wait(END_S) == FAILED
    said = (tmp_path / "traced").read_text()
    assert "Traceback" not in said, said
    errors = [line for line in said.splitlines() if " ERROR " in line]
    assert len(errors) == 1, said
    assert "journal" in errors[0] and "nothing since the last commit was acknowledged" in errors[0], errors


def found(launch: Launch, folder: Path, acknowledged: dict[int, bytes], deleted: set[int]) -> None:
    """The next start has all that was promised."""
    assert len(acknowledged) > 3, "hardly anything happened"
    with Client(launch("-b", str(folder)).connect()) as client:
        for id, body in acknowledged.items():
            expected = b"NOT_FOUND\r\n" if id in deleted else b"FOUND %d %d\r\n%b\r\n" % (id, len(body), body)
            assert client.ask(b"peek %d" % id) == expected
        client.put(b"it goes on")


@needs_strace
@pytest.mark.parametrize("policy", ["-f0", "-f20"])
def test_an_fsync_that_fails_is_the_end(
    traced: Trace, launch: Launch, folder: Path, tmp_path: Path, policy: str
) -> None:
    """Never a second one behind it: Linux forgets what it could not write, and would say that all is well."""
    calls = tmp_path / "calls"
    server = traced(inject("fdatasync", "error=EIO", 7, trace=calls, only=[wal(folder, 1)]), "-b", str(folder), policy)
    acknowledged, deleted = traffic(server)
    ended_by_the_journal(server, tmp_path)
    lines = [line for line in calls.read_text().splitlines() if "fdatasync(" in line]
    assert [place for place, line in enumerate(lines) if "(INJECTED)" in line] == [len(lines) - 1], lines
    found(launch, folder, acknowledged, deleted)


@needs_strace
def test_nothing_of_a_batch_that_failed_is_answered(
    traced: Trace, launch: Launch, folder: Path, tmp_path: Path
) -> None:
    """Twenty puts of one packet are one batch: all are answered, or none is."""
    server = traced(inject("fdatasync", "error=EIO", 3, only=[wal(folder, 1)]), "-b", str(folder), "-f0")
    command = b"put 0 0 60 1\r\nx\r\n"
    answered = 0
    with Client(server.connect()) as client:
        try:
            for _ in range(10):
                client.send(command * 20)
                for _ in range(20):
                    assert client.reply().startswith(b"INSERTED ")
                    answered += 1
        except (WireError, OSError):
            pass
    ended_by_the_journal(server, tmp_path)
    assert answered == 40
    with Client(launch("-b", str(folder)).connect()) as client:
        assert number(client, "current-jobs-ready") in (40, 60)


@needs_strace
@pytest.mark.parametrize(
    ("call", "nth", "files"),
    [
        ("fsync", 4, [""]),
        ("fdatasync", 1, ["segment-00000001.db"]),
        ("pwrite64", 1, ["segment-00000001.db"]),
        ("unlink", 1, ["segment-00000001.db", "segment-00000002.db"]),
        ("rename", 1, ["segment-00000003.db", "segment-00000003.db.new"]),
        ("fsync", 1, ["segment-00000003.db.new"]),
    ],
    ids=["directory", "sealing-sync", "sealing-write", "removing", "naming", "creating"],
)
def test_an_error_while_segments_come_and_go_is_the_end(
    traced: Trace, launch: Launch, folder: Path, tmp_path: Path, call: str, nth: int, files: list[str]
) -> None:
    """In the journal's own thread, where no caller waits for it: the server hears of it all the same."""
    wrapper = inject(call, "error=EIO", nth, only=[folder / file for file in files])
    server = traced(wrapper, "-b", str(folder), "-s", "65536", "-f0")
    acknowledged, deleted = traffic(server)
    ended_by_the_journal(server, tmp_path)
    found(launch, folder, acknowledged, deleted)


def test_the_limit_on_a_files_size_is_an_error_like_any_other(launch: Launch, folder: Path, tmp_path: Path) -> None:
    """No strace: the kernel refuses to let a file grow (EFBIG)."""
    server = launch("-b", str(folder), "-f50")
    with Client(server.connect()) as client:
        kept = put_many(client, 10, body=b"x" * 100)
        # Else it is the next segment that finds no room, and the server only refuses puts.
        index = folder / "segment-00000002.db-shm"
        until(lambda: index.exists() and index.stat().st_size, "the next segment is there")
        limit = wal(folder, 1).stat().st_size + 4096
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises((WireError, OSError)):
            for _ in range(100):
                kept.append(client.put(b"y" * 1000))
    assert server.process.wait(END_S) == FAILED
    assert len([line for line in (tmp_path / "log").read_text().splitlines() if " ERROR " in line]) == 1
    with Client(launch("-b", str(folder)).connect()) as client:
        assert sorted(reserve_many(client, len(kept))) == kept


@needs_strace
def test_a_stop_while_an_fsync_is_under_way_answers_in_order(traced: Trace, folder: Path, tmp_path: Path) -> None:
    """The reply that waits for it comes first; once what came behind it took its place."""
    slow = [*watching("fdatasync", tmp_path / "calls"), "-P", str(wal(folder, 1))]
    server = traced([*slow, "-e", "inject=fdatasync:delay_enter=300000"], "-b", str(folder), "-f0")
    with Client(server.connect()) as idle, Client(server.connect()) as client:
        idle.ask(b"list-tube-used")  # waits for nothing, so the fsync happens in a thread
        client.send(b"put 0 0 60 1\r\nx\r\n")
        until(lambda: b"fdatasync" in (tmp_path / "calls").read_bytes(), "the fsync has begun")
        client.send(b"list-tube-used\r\n")
        idle.ask(b"list-tube-used")
        os.kill(server.pid, signal.SIGTERM)
        assert client.reply() == b"INSERTED 1\r\n"
        assert client.reply() == b"USING default\r\n"
