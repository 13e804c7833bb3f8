"""The tools on a journal in a database: what they read beside nodes, what they write, and when they refuse to.

Logs are made by the tools themselves or by a log that leads, damaged by SQL, and looked at afterwards.
"""

from __future__ import annotations

import base64
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from geventstalk.core.job import BURIED, DELAYED, Tally
from geventstalk.durable.records import ClockOffset, encode_change, encode_whole
from geventstalk.offline import move
from journal import CHANGE, DELETE, FULL, JournalDamaged, JournalUnreachable, Record, tools_for
from journal.fence import Identity, View
from journal.parts import LOST_KEYS
from journal.postgres import exclusive
from journal.postgres.builder import PostgresBuilder
from journal.postgres.exclusive import Exclusive
from journal.postgres.fence import PostgresFence
from journal.postgres.format import FIRST, LOST, ROW_BYTES
from journal.postgres.log import PostgresLog
from journal.postgres.place import Place
from tests.support.cluster.nodes import ACTIVE, STANDBY, Cluster, Node
from tests.support.postgres import Pair, Postgres, new_schema, programs, require_postgres
from tests.support.process import GEVENTSTALK, ROOT, ServerProcess
from tests.support.shared_log import claim, open_log, take_over
from tests.support.tools import SECOND, Jobs, Ran, exported, fill, make_job, open_store, prints, run_tool
from tests.support.wire import Client

WALL = ClockOffset(0, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A journal in a directory, with jobs in every state."""
    folder = tmp_path / "source"
    store = open_store(folder)
    fill(store)
    store.close()
    return folder


@pytest.fixture
def url(folder: Path, postgres_url: str) -> str:
    """The same jobs in a database."""
    assert run_tool("copy", folder, postgres_url).code == 0
    return postgres_url


def ask(server: Postgres, url: str, sql: str) -> list[tuple[str | None, ...]]:
    return server.ask(sql.replace("{}", Place(url).schema))


def body(id: int, size: int = 3000) -> bytes:
    return random.Random(id).randbytes(size)


class Live:
    """A log that leads, with jobs whose state is known."""

    def __init__(self, url: str, *, segment_bytes: int = 1 << 16) -> None:
        self.log = PostgresLog(url, segment_bytes=segment_bytes)
        self.jobs: dict[int, tuple[str, int]] = {}
        take_over(self.log)
        self.log.start()
        self.next = 1
        self._draw = random.Random(7)

    def step(self) -> None:
        """A put, and what becomes of older jobs."""
        log, id = self.log, self.next
        self.next += 1
        log.append(id, FULL, encode_whole(make_job(id, body=body(id)), b"tube-%d" % (id % 3), WALL))
        self.jobs[id] = ("ready", 0)
        if id % 3 and len(self.jobs) > 20:
            old = self._draw.choice(sorted(self.jobs))
            log.append(old, DELETE, b"")
            del self.jobs[old]
        elif self.jobs:
            old = self._draw.choice(sorted(self.jobs))
            log.append(old, CHANGE, encode_change(make_job(old, BURIED, rank=id, tally=Tally(1, 0, 0, 1, 0)), WALL))
            self.jobs[old] = ("buried", id)
        log.commit()
        point = log.sync_point()
        if point is not None:
            point.run()
        until = time.monotonic() + 0.02  # a table that others read is not dropped before they let it go
        while time.monotonic() < until and (log.settling or log.wants_compaction()):
            log.tend()
            if log.wants_compaction():
                log.compact_slice(self._payload)

    def _payload(self, key: int) -> bytes:
        job = make_job(key, body=body(key))
        state, rank = self.jobs[key]
        if state == "buried":
            job = make_job(key, BURIED, body=body(key), rank=rank, tally=Tally(1, 0, 0, 1, 0))
        return encode_whole(job, b"tube-%d" % (key % 3), WALL)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def states(jobs: Jobs) -> dict[int, tuple[str, int]]:
    return {id: (str(job["state"]), int(str(job.get("burying", 0)))) for id, job in jobs.items()}


# --- copying, and what it is read as


def test_there_and_back(folder: Path, url: str, tmp_path: Path) -> None:
    before = prints(folder)
    ran = run_tool("copy", url, tmp_path / "back")
    assert ran.code == 0 and ran.out.endswith("; the next id is 62\n") and ran.err == ""
    first, second, third = (run_tool("export", place).out for place in (folder, url, tmp_path / "back"))
    assert first == second == third and len(first.splitlines()) > 30
    assert prints(folder) == before
    open_store(tmp_path / "back").close()


def test_a_node_finds_everything_and_goes_on(folder: Path, url: str) -> None:
    jobs = exported(run_tool("export", folder))
    log = PostgresLog(url, segment_bytes=1 << 20)
    found: dict[int, Record] = {}
    for record in take_over(log):
        if record.kind == FULL:
            found[record.key] = record
    assert set(found) == set(jobs) and log.high_water == 61 and not log.live.keys - len(jobs)
    log.start()
    log.append(62, FULL, encode_whole(make_job(62), b"new", WALL))
    log.close()
    assert set(exported(run_tool("export", url))) == {*jobs, 62}


def test_a_log_that_an_older_version_wrote_is_served(postgres_server: Postgres, postgres_url: str) -> None:
    """tests/data/postgres-v1/log.sql is what pg_dump said of one."""
    text = (ROOT / "tests" / "data" / "postgres-v1" / "log.sql").read_text()
    psql = programs()
    assert psql is not None
    where = ["-h", str(postgres_server.folder), "-p", str(postgres_server.port), "-U", "geventstalk", "postgres"]
    text = text.replace("geventstalk.", f"{Place(postgres_url).schema}.")
    text = text.replace("SCHEMA geventstalk;", f"SCHEMA {Place(postgres_url).schema};")
    subprocess.run([psql / "psql", "-q", "-v", "ON_ERROR_STOP=1", *where], input=text, text=True, check=True)
    jobs = exported(run_tool("export", postgres_url))
    assert {id: (job["tube"], job["pri"], job["ttr"]) for id, job in jobs.items()} == {
        1: ("default", 5, 60),
        2: ("mail", 7, 61),
        3: ("mail", 11, 62),
        4: ("mail", 1, 63),
        6: ("mail", 12, 64),
    }
    bodies = {1: b"ready", 2: b"delayed", 3: b"buried", 4: bytes(range(48, 98)) * 60, 6: b"\xff\x00"}
    for _ in range(2):
        server = ServerProcess(GEVENTSTALK, ["-b", postgres_url])
        try:
            with Client(server.wait_ready().connect()) as client:
                for id, content in bodies.items():
                    assert client.ask(b"peek %d" % id) == b"FOUND %d %d\r\n%b\r\n" % (id, len(content), content)
                assert client.stats(b"stats-job 3")["state"] == "buried"
                if 1 in bodies:
                    assert client.ask(b"put 0 0 60 3\r\nnew") == b"INSERTED 7\r\n", "no id comes again"
                    assert client.ask(b"delete 1") == b"DELETED\r\n"
                    bodies |= {7: b"new"}
                    del bodies[1]
        finally:
            server.stop()


def test_many_segments_and_large_jobs(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder seals a segment as a node does, and nodes follow it from one to the next."""
    monkeypatch.setattr("journal.postgres.builder.SEGMENT_BYTES", 1 << 20)
    monkeypatch.setattr(PostgresBuilder.__init__, "__defaults__", (0, 1 << 20))
    sizes = {1: 10, 2: ROW_BYTES - 100, 3: ROW_BYTES, 4: 3 * ROW_BYTES + 5, 5: 0, 6: 2_500_000, 7: 1000}
    store = open_store(tmp_path / "large")
    for id, size in sizes.items():
        store.put(make_job(id, body=body(id, size)), b"t")
        store.commit(0)
    store.change(make_job(4, BURIED, rank=9))
    store.close()
    assert run_tool("cluster", "init", "-b", postgres_url).out == "made an empty journal\n"
    assert "it is left as it is" in run_tool("cluster", "init", "-b", postgres_url).out
    follower = PostgresLog(postgres_url, segment_bytes=1 << 20)
    follower.open()
    assert not list(follower.replay())
    assert run_tool("copy", tmp_path / "large", postgres_url).code == 0
    read = [row for _, rows in iter_more(follower) for row in rows]
    assert [row[1] for row in read if row[2] == FULL] == list(sizes)
    follower.abandon()
    assert len(yaml.safe_load(run_tool("journal", "stats", postgres_url).out)["segments"]) > 4
    assert run_tool("copy", postgres_url, tmp_path / "back").code == 0
    jobs = exported(run_tool("export", tmp_path / "back"))
    assert {id: base64.b64decode(str(job["body"])) for id, job in jobs.items()} == {
        id: body(id, size) for id, size in sizes.items()
    }
    assert jobs[4]["state"] == "buried"


def iter_more(log: PostgresLog) -> Iterator[tuple[int, list[tuple[int, int, int, int, bytes]]]]:
    while True:
        batches = log.more()
        if not batches:
            return
        yield from batches


def test_export_import_repair_and_backup(url: str, postgres_server: Postgres, tmp_path: Path) -> None:
    jobs = exported(run_tool("export", url))
    other = f"{postgres_server.unix_url}&schema={Place(url).schema}_b"
    text = run_tool("export", url).out
    ran = run_tool("import", other, stdin=text)
    assert ran.code == 0 and f"imported {len(jobs)} jobs into" in ran.out and "the next id is 62" in ran.out
    assert run_tool("export", other).out == text
    again = run_tool("import", other, stdin=text)
    assert again.code == 10 and f"has {len(jobs)} jobs already" in again.err
    assert run_tool("journal", "repair", other, tmp_path / "x").out == f"nothing to repair: {len(jobs)} jobs\n"
    assert run_tool("journal", "repair", "--in-place", other).code == 0
    ran = run_tool("journal", "backup", url, tmp_path / "backup")
    assert ran == (0, f"copied 1 segments with {len(jobs)} jobs to {tmp_path / 'backup'}\n", "")
    assert run_tool("export", tmp_path / "backup").out == text
    open_store(tmp_path / "backup").close()


def test_an_import_into_a_log_without_jobs_keeps_the_ids(postgres_url: str) -> None:
    live = Live(postgres_url)
    live.steps(5)
    for id in list(live.jobs):
        live.log.append(id, DELETE, b"")
    live.log.close()
    header = '{"format":"geventstalk-jobs","version":1}\n'
    line = '{"id":2,"tube":"a","ttr":60,"body":"aGk="}\n'
    assert run_tool("import", postgres_url, stdin=header + line + "x").code == 1
    assert exported(run_tool("export", postgres_url)) == {}
    ran = run_tool("import", postgres_url, stdin=header + line)
    assert ran.code == 0 and "the next id is 6" in ran.out
    assert list(exported(run_tool("export", postgres_url))) == [2]


def test_dump_stats_and_check(url: str, folder: Path) -> None:
    ran = run_tool("journal", "check", url)
    assert ran.code == 0 and ran.err == "" and ran.out.endswith(" jobs, 0 findings\n") and "note" not in ran.out
    lines = [json.loads(line) for line in run_tool("journal", "dump", url).out.splitlines()]
    jobs = exported(run_tool("export", url))
    assert [line["id"] for line in lines if line["kind"] == "whole"] == list(jobs)
    assert {line["segment"] for line in lines} == {1} and [line["seq"] for line in lines] == sorted(
        line["seq"] for line in lines
    )
    stats = yaml.safe_load(run_tool("journal", "stats", url).out)
    there = yaml.safe_load(run_tool("journal", "stats", folder).out)
    assert stats["tubes"] == there["tubes"] and stats["jobs"] == there["jobs"] and stats["highest-id"] == 61
    assert stats["bytes"] == stats["live-bytes"] + stats["dead-bytes"] > 0


def test_dump_has_dead_records_and_deletes(postgres_url: str) -> None:
    log = PostgresLog(postgres_url, segment_bytes=1 << 20)
    take_over(log)
    log.start()
    large = encode_whole(make_job(1, body=bytes(3 * ROW_BYTES)), b"t", WALL)
    log.append(1, FULL, large)
    log.append(2, FULL, encode_whole(make_job(2), b"t", WALL))
    log.append(1, DELETE, b"")
    log.append(2, CHANGE, encode_change(make_job(2, DELAYED, rank=SECOND), WALL))
    log.append(2, DELETE, b"")
    log.close()
    lines = [json.loads(line) for line in run_tool("journal", "dump", "--no-bodies", postgres_url).out.splitlines()]
    kinds = [(line["id"], line["kind"]) for line in lines]
    assert kinds == [(1, "whole"), (2, "whole"), (1, "delete"), (2, "change"), (2, "delete")]
    assert lines[0]["size"] == 3 * ROW_BYTES


# --- beside a node


def test_a_survey_sees_one_moment(postgres_url: str) -> None:
    live = Live(postgres_url)
    live.steps(80)
    expected = dict(live.jobs)
    survey = tools_for(postgres_url).survey(lambda record: None)
    live.steps(150)
    found = {record.key: change is not None for record, change in survey.live_records()}
    assert set(found) == set(expected) and not survey.findings
    survey.close()
    live.steps(100)
    assert live.log.facts().oldest > 1, "compaction has dropped segments"
    assert states(exported(run_tool("export", postgres_url))) == live.jobs
    live.log.close()


@pytest.mark.slow
def test_tools_beside_a_node(postgres_url: str, tmp_path: Path) -> None:
    live = Live(postgres_url)
    live.steps(50)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            live.step()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for at in range(8):
            jobs = exported(run_tool("export", postgres_url))
            assert len(jobs) >= 20
            assert run_tool("journal", "check", postgres_url).code == 0
            assert run_tool("journal", "dump", "--no-bodies", postgres_url).code == 0
            ran = run_tool("journal", "backup", postgres_url, tmp_path / f"backup-{at}")
            assert ran.code == 0, ran.err
            assert run_tool("journal", "check", tmp_path / f"backup-{at}").code == 0
    finally:
        stop.set()
        worker.join()
    assert live.log.facts().oldest > 1
    assert states(exported(run_tool("export", postgres_url))) == live.jobs
    live.log.close()


class Leader:
    """A node that has the lead and says so, as far as the rows show."""

    def __init__(self, url: str, lease_ms: int = 500) -> None:
        self.fence = PostgresFence(Place(url), Identity("a", "127.0.0.1:11300", f"a-{id(self)}", lease_ms))
        self.beats = True
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Leader:
        view = self.fence.look()
        assert self.fence.claim(view, 1)
        self.epoch = view.epoch + 1
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._over.wait(0.05):
            if self.beats:
                self.fence.beat(self.epoch)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.fence.close()


JOB = '{"format":"geventstalk-jobs","version":1}\n{"id":2,"tube":"a","ttr":60,"body":"aGk="}\n'


def test_what_writes_wants_no_node_to_lead(url: str, folder: Path, tmp_path: Path) -> None:
    with Leader(url):
        for words in (
            ["copy", url, tmp_path / "target"],
            ["journal", "repair", "--in-place", url],
            ["import", url],
        ):
            ran = run_tool(*words, stdin=JOB)
            assert ran.code == 10, (words, ran)
            assert "a at 127.0.0.1:11300 leads; stop all nodes first" in ran.err and ran.err.count("\n") == 1
        assert not (tmp_path / "target").exists()
        for words in (["journal", "check", url], ["export", url], ["journal", "backup", url, tmp_path / "backup"]):
            assert run_tool(*words).code == 0
    assert run_tool("copy", url, tmp_path / "target").code == 0, "a node that is gone holds no command up for long"


@pytest.mark.long
def test_a_command_takes_nothing_from_a_node_whose_database_confirms_no_commit(postgres_pair: Pair) -> None:
    """Its heartbeat stands still, and looks succeed. A claim would come through when the replica is back."""
    pair = postgres_pair
    url = f"{pair.primary.url}?schema={new_schema()}"
    open_log(url).close()
    leader = PostgresFence(Place(url), Identity("a", "127.0.0.1:11300", "a-1", 500))
    assert leader.claim(leader.look(), 1)
    epoch = leader.look().epoch
    pair.replica.freeze()
    with pytest.raises(JournalUnreachable), Exclusive(Place(url)):
        pass
    pair.replica.thaw()
    end = time.monotonic() + 30
    while pair.primary.ask("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"):
        assert time.monotonic() < end
    view = leader.look()
    assert (view.epoch, view.node) == (epoch, "a")
    leader.close()


def test_no_node_leads_meanwhile(folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby sees heartbeats, and no reason to claim. Afterwards it sees a goodbye."""
    monkeypatch.setattr(exclusive, "LEASE_MS", 500)
    standby = PostgresFence(Place(url), Identity("b", "127.0.0.1:2", "b-1", 500))
    seen: list[View] = []

    def step(what: str, at: int, total: int) -> None:
        if what == "writing" and not seen:
            seen.append(standby.look())
            time.sleep(0.7)
            seen.append(standby.look())

    monkeypatch.setattr(move, "_EVERY", 1)
    move.copy(url, str(tmp_path / "target"), lambda findings: None, step)
    first, second = seen
    assert first.epoch == second.epoch and first.beat != second.beat and not second.released
    assert first.address == "" and first.node.startswith("command ") and first.owed_ms
    after = standby.look()
    assert after.released and after.epoch == first.epoch
    standby.close()


@pytest.mark.parametrize("moment", ["reading", "writing"])
def test_a_node_that_takes_the_lead_all_the_same_ends_it(
    moment: str, folder: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a pause of the command that was longer than its lease."""
    monkeypatch.setattr(move, "_EVERY", 1)
    monkeypatch.setattr(exclusive, "_BEATS", 0.01)
    standby = PostgresFence(Place(postgres_url), Identity("b", "127.0.0.1:2", "b-1", 1000))
    claimed: list[bool] = []

    def step(what: str, at: int, total: int) -> None:
        if what == moment and at == 20 and not claimed:
            claimed.append(standby.claim(standby.look(), 1))

    monkeypatch.setattr("geventstalk.cli.copy_jobs._Steps.step", lambda self, *words: step(*words))
    monkeypatch.setattr(PostgresBuilder, "_add", flushing(PostgresBuilder._add))
    ran = run_tool("copy", folder, postgres_url)
    assert claimed == [True] and ran.code in (10, 69), ran
    assert ran.err.count("\n") == 1
    standby.close()
    check = run_tool("journal", "check", postgres_url)
    assert check.code == 1 and "did not finish" in check.err, "the node would refuse it as well"


def flushing(add: Callable[..., None]) -> Callable[..., None]:
    """Each record has a row of its own, so that the transaction is under way."""

    def added(self: PostgresBuilder, entry: tuple[int, int, bytes]) -> None:
        add(self, entry)
        self._write()

    return added


# --- all or nothing


@pytest.mark.parametrize("job", [1, 30])
def test_what_is_killed_passes_for_no_journal_and_may_begin_anew(job: int, folder: Path, postgres_url: str) -> None:
    program = (
        "import os, sys; from geventstalk.offline import move; move._EVERY = 1\n"
        "from journal.postgres import exclusive; exclusive.LEASE_MS = 200\n"
        "def step(what, at, total):\n"
        f"    if what == 'writing' and at == {job}: os._exit(9)\n"
        "move.copy(sys.argv[1], sys.argv[2], lambda findings: None, step)"
    )
    command = [sys.executable, "-c", program, str(folder), postgres_url]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, check=False)
    assert done.returncode == 9
    for words in (["journal", "check"], ["export"], ["journal", "stats"]):
        ran = run_tool(*words, postgres_url)
        assert ran.code == 1 and "did not finish; let it begin anew" in ran.err
    log = PostgresLog(postgres_url, segment_bytes=1 << 20)
    with pytest.raises(JournalDamaged, match="did not finish"):
        log.open()
    log.abandon()
    with pytest.raises(JournalDamaged, match="did not finish"):
        tools_for(postgres_url).require_usable()
    assert run_tool("copy", folder, postgres_url).code == 0
    assert run_tool("export", postgres_url).out == run_tool("export", folder).out


@pytest.mark.parametrize("schema_was_there", [False, True])
def test_what_fails_leaves_nothing(
    schema_was_there: bool,
    folder: Path,
    postgres_url: str,
    postgres_server: Postgres,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of ours. What others have in the schema stays."""
    if schema_was_there:
        ask(postgres_server, postgres_url, "CREATE SCHEMA {}; CREATE TABLE {}.mine(x integer)")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PostgresBuilder, "finish", fail)
        assert run_tool("copy", folder, postgres_url) == (1, "", "geventstalk: No space left on device\n")
    schema = Place(postgres_url).schema
    left = postgres_server.ask(f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}'")
    assert left == ([("mine",)] if schema_was_there else [])
    assert (postgres_server.ask(f"SELECT to_regnamespace('{schema}') IS NULL") == [("f",)]) == schema_was_there
    assert run_tool("copy", folder, postgres_url).code == 0


def test_a_target_that_has_something_is_refused(folder: Path, url: str, postgres_server: Postgres) -> None:
    ran = run_tool("copy", folder, url)
    assert ran.code == 10 and "is not empty" in ran.err
    blank = f"{postgres_server.unix_url}&schema={Place(url).schema}_n"
    log = PostgresLog(blank, segment_bytes=1 << 20)
    take_over(log)  # as nodes leave it that were started too early
    log.close()
    with_epoch = claim(blank)
    ran = run_tool("copy", folder, blank)
    assert ran.code == 0 and with_epoch > 1
    assert run_tool("export", blank).out == run_tool("export", folder).out


def test_a_backup_that_cannot_be_leaves_nothing(url: str, postgres_server: Postgres, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert run_tool("journal", "backup", url, tmp_path / "full").code == 10
    ran = run_tool("journal", "backup", url, f"{postgres_server.unix_url}&schema=x")
    assert ran.code == 10 and "a backup goes to a directory" in ran.err
    ran = run_tool("journal", "backup", tmp_path / "source", f"{postgres_server.unix_url}&schema=x")
    assert ran.code == 10 and not list(tmp_path.glob("postgresql*"))
    flip_row(postgres_server, url)
    ran = run_tool("journal", "backup", url, tmp_path / "target")
    assert ran.code == 1 and "is damaged: row " in ran.err and not (tmp_path / "target").exists()


# --- damage


@pytest.fixture
def rows(postgres_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Jobs in a database, each record in a row of its own, in several segments."""
    with monkeypatch.context() as patch:
        patch.setattr(PostgresBuilder, "_add", flushing(PostgresBuilder._add))
        patch.setattr(PostgresBuilder.__init__, "__defaults__", (0, 1 << 15))
        assert run_tool("copy", folder, postgres_url).code == 0
    return postgres_url


def flip_row(server: Postgres, url: str, segment: int = 1, row: str = "min(seq)") -> str:
    size = f"(octet_length(packed) - {FIRST.size}) / 2 + {FIRST.size}"
    where = f"seq = (SELECT {row} FROM {{}}.seg_{segment})"
    changed = f"set_byte(packed, {size}, get_byte(packed, {size}) # 255)"
    ask(server, url, f"UPDATE {{}}.seg_{segment} SET packed = {changed} WHERE {where}")
    return "is damaged: its checksum is wrong"


def lose_row(server: Postgres, url: str) -> str:
    ask(server, url, "DELETE FROM {}.seg_2 WHERE seq = (SELECT min(seq) + 1 FROM {}.seg_2)")
    return "is missing before row"


def lose_rows(server: Postgres, url: str) -> str:
    ask(server, url, "DELETE FROM {}.seg_2 WHERE seq < (SELECT min(seq) + 3 FROM {}.seg_2)")
    return "is missing before row"


def move_row(server: Postgres, url: str) -> str:
    ask(server, url, "UPDATE {}.seg_2 SET packed = (SELECT packed FROM {}.seg_1 ORDER BY seq LIMIT 1) WHERE seq = "
        "(SELECT min(seq) + 2 FROM {}.seg_2)")  # fmt: skip
    return "its checksum is wrong"


def cut_row(server: Postgres, url: str) -> str:
    ask(server, url, "UPDATE {}.seg_2 SET packed = '' WHERE seq = (SELECT min(seq) + 2 FROM {}.seg_2)")
    return "it is too short"


def flip_sealed(server: Postgres, url: str) -> str:
    return flip_row(server, url, 2, "max(seq)")


DAMAGES = [flip_row, flip_sealed, lose_row, lose_rows, move_row, cut_row]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_repaired(
    damage: Callable[[Postgres, str], str], rows: str, postgres_server: Postgres, tmp_path: Path
) -> None:
    whole = exported(run_tool("export", rows))
    said = damage(postgres_server, rows)
    ran = run_tool("journal", "check", rows)
    assert ran.code == 1 and said in ran.out
    assert run_tool("journal", "stats", rows).code == 1 and run_tool("journal", "dump", rows).code == 1
    refused = run_tool("export", rows)
    assert refused.code == 1 and refused.out == "" and "finding" in refused.err
    accepted = run_tool("export", "--accept-damage", rows)
    intact = exported(accepted)
    assert len(whole) - 4 <= len(intact) and intact != whole
    for id, job in intact.items():
        assert job["body"] == whole[id]["body"]
    highest = json.loads(accepted.out.splitlines()[0])["highest_id"]
    assert highest == 61 + LOST_KEYS

    ran = run_tool("journal", "repair", rows, tmp_path / "target")
    assert ran.code == 1 and ran.out.startswith(f"wrote {len(intact)} jobs to ")
    assert run_tool("journal", "check", tmp_path / "target").code == 0
    assert exported(run_tool("export", tmp_path / "target")) == intact

    ran = run_tool("journal", "repair", "--in-place", rows)
    assert ran.code == 1 and f"has {len(intact)} jobs\n" in ran.out and "set aside row" in ran.out
    check = run_tool("journal", "check", rows)
    assert check.code == 0, check.out
    kept = ask(postgres_server, rows, "SELECT count(*) FROM {}.damaged")[0][0]
    assert (kept != "0") == ("note: table damaged has " in check.out) == (damage not in (lose_row, lose_rows))
    assert exported(run_tool("export", rows)) == intact
    log = PostgresLog(rows, segment_bytes=1 << 15)
    take_over(log)
    log.start()
    assert log.high_water == highest and log.live.keys == len(intact)
    log.close()
    assert run_tool("journal", "check", rows).code == 0


def test_changes_whose_job_is_lost_are_forgotten(rows: str, postgres_server: Postgres) -> None:
    lines = [json.loads(line) for line in run_tool("journal", "dump", "--no-bodies", rows).out.splitlines()]
    change = next(line for line in lines if line["kind"] == "change")
    whole = next(line for line in lines if line["id"] == change["id"] and line["kind"] == "whole")
    ask(postgres_server, rows, f"DELETE FROM {{}}.seg_{whole['segment']} WHERE seq = {whole['seq']}")
    ran = run_tool("journal", "check", rows)
    assert ran.code == 1 and f"known by their changes only: {change['id']}" in ran.out
    ran = run_tool("journal", "repair", "--in-place", rows)
    assert f"lost: job {change['id']}\n" in ran.out
    assert run_tool("journal", "check", rows).code == 0


def test_a_record_that_is_no_jobs_goes_and_what_stands_beside_it_stays(postgres_url: str) -> None:
    log = PostgresLog(postgres_url, segment_bytes=1 << 20)
    take_over(log)
    log.start()
    for id in (1, 2, 3):
        log.append(id, FULL, encode_whole(make_job(id), b"t", WALL))
    log.commit()
    point = log.sync_point()
    assert point is not None
    point.run()
    log.append(2, CHANGE, encode_change(make_job(2, BURIED, rank=5), WALL))
    log.append(1, DELETE, b"")
    log.append(4, FULL, b"no job")
    log.append(5, FULL, encode_whole(make_job(5), b"t", WALL))
    log.close()
    ran = run_tool("journal", "check", postgres_url)
    assert ran.code == 1 and "a record of job 4 is not a job's" in ran.out
    before = exported(run_tool("export", "--accept-damage", postgres_url))
    assert set(before) == {2, 3, 5} and before[2]["state"] == "buried"
    ran = run_tool("journal", "repair", "--in-place", postgres_url)
    assert ran.code == 1 and "lost: job 4\n" in ran.out and "has 3 jobs\n" in ran.out
    assert run_tool("journal", "check", postgres_url).code == 0
    assert exported(run_tool("export", postgres_url)) == before


# --- places


# Bug: The database's library named a part of the password as a port or a host.
@pytest.mark.parametrize("mistake", ["se@cret", "se/cret", "12/cret", "se:cret", "cret?se"])
def test_no_message_has_a_password_or_a_part_of_it(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setenv("GEVENTSTALK_JOURNAL", f"postgresql://u:{mistake}@127.0.0.1:1/db")
    ran = run_tool("cluster", "status")
    assert ran.code in (10, 69) and ran.err.count("\n") == 1
    assert "cret" not in ran.err and "se" not in ran.err.split()


@pytest.mark.parametrize(
    ("place", "code", "said"),
    [
        ("postgresql://127.0.0.1:1/db", 69, "127.0.0.1"),
        ("postgresql://127.0.0.1/db?schema=No-Name", 10, "schema 'No-Name'"),
        ("postgresql://127.0.0.1/db?nonsense=1", 10, "nonsense"),
        ("postgresql://127.0.0.1/d@b", 10, "%40"),
        ("postgresql://127.0.0.1:x/db", 10, "a port is no number"),
        ("postgresql://127.0.0.1:1,[::1]:1,localhost/db?port=1", 69, "127.0.0.1"),
    ],
)
def test_places_that_cannot_be_used(place: str, code: int, said: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    for words in (
        ["journal", "check", place],
        ["export", place],
        ["import", place],
        ["copy", folder, place],
        ["copy", place, tmp_path / "target"],
        ["cluster", "status", "-b", place],
    ):
        ran = run_tool(*words, stdin=JOB)
        assert ran.code == code and said in ran.err and ran.err.count("\n") == 1 and ran.out == "", (words, ran)
    assert not (tmp_path / "target").exists()


def test_a_database_without_a_log(postgres_url: str, postgres_server: Postgres, tmp_path: Path) -> None:
    for words in (
        ["journal", "check", postgres_url],
        ["export", postgres_url],
        ["copy", postgres_url, tmp_path / "target"],
        ["journal", "backup", postgres_url, tmp_path / "target"],
        ["cluster", "status", "-b", postgres_url],
    ):
        ran = run_tool(*words)
        assert ran.code == 10 and "has no journal in it" in ran.err, (words, ran)
    assert not (tmp_path / "target").exists()
    schema = Place(postgres_url).schema
    assert postgres_server.ask(f"SELECT to_regnamespace('{schema}') IS NULL") == [("t",)], "looking makes nothing"


def test_a_newer_schema_is_refused(url: str, postgres_server: Postgres, folder: Path, tmp_path: Path) -> None:
    ask(postgres_server, url, "UPDATE {}.meta SET value = 99 WHERE name = 'version'")
    for words in (["journal", "check", url], ["export", url], ["import", url], ["copy", folder, url],
                  ["copy", url, tmp_path / "target"], ["journal", "repair", "--in-place", url]):  # fmt: skip
        ran = run_tool(*words, stdin=JOB)
        assert ran.code == 1 and "newer geventstalk" in ran.err and ran.err.count("\n") == 1, (words, ran)


def test_without_the_library_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    program = "import sys; sys.modules['psycopg'] = None\nfrom geventstalk.cli.main import main; sys.exit(main())"
    for words in (["journal", "check"], ["export"], ["cluster", "status", "-b"], ["--check-config", "-p0", "-b"]):
        command = [sys.executable, "-c", program, *words, "postgresql://h/db"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 5 and done.stderr.count("\n") == 1
        assert "pip install 'geventstalk[postgres]'" in done.stderr


def test_commands_of_a_cluster_on_real_rows(url: str) -> None:
    ran = run_tool("cluster", "status", "-b", url)
    assert ran.code == 1 and ran.out.startswith("no node leads, epoch ")
    with Leader(url) as leader:
        leader.fence.serve(leader.epoch)
        ran = run_tool("cluster", "status", "-b", url)
        assert ran.code == 0 and ran.out.startswith(
            f"a leads, epoch {leader.epoch}, lease 500 ms, for 0 s; replication: none\n"
        )
        assert run_tool("cluster", "promote", "-b", url, "b").code == 1
    ran = run_tool("cluster", "status", "-b", url)
    assert ran.code == 1 and "the last one was a" in ran.out


def test_a_tenure_that_was_lost_is_no_success(url: str) -> None:
    other = PostgresFence(Place(url), Identity("b", "127.0.0.1:2", "b-1", 1000))
    with pytest.raises(Exception, match="taken the lead meanwhile"), Exclusive(Place(url)):
        assert other.claim(other.look(), 1)
    other.close()


def test_flags_of_a_repair(rows: str, postgres_server: Postgres) -> None:
    flip_row(postgres_server, rows)
    assert run_tool("journal", "repair", "--in-place", rows).code == 1
    found = ask(postgres_server, rows, "SELECT get_byte(packed, 1) FROM {}.seg_1 ORDER BY seq LIMIT 1")
    assert found == [(str(LOST),)]


# --- --check-config


def checked(url: str, *words: str) -> Ran:
    command = [sys.executable, "-m", "geventstalk", "--check-config", "-l", "127.0.0.1", "-p", "0", "-b", url, *words]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_check_config_says_what_this_node_would_be(folder: Path, postgres_url: str, postgres_server: Postgres) -> None:
    ran = checked(postgres_url)
    assert ran.code == 0 and "this node would wait for one" in ran.err
    schema = Place(postgres_url).schema
    assert postgres_server.ask(f"SELECT to_regnamespace('{schema}') IS NULL") == [("t",)], "it makes nothing"
    assert run_tool("copy", folder, postgres_url).code == 0
    ran = checked(postgres_url)
    assert ran.code == 0 and "no node leads: this one would take over" in ran.err
    with Leader(postgres_url) as leader:
        leader.fence.serve(leader.epoch)
        ran = checked(postgres_url)
        assert ran.code == 0 and f"node a leads, epoch {leader.epoch}: this one would stand by" in ran.err
    ask(postgres_server, postgres_url, "UPDATE {}.meta SET value = 99 WHERE name = 'version'")
    ran = checked(postgres_url)
    assert ran.code == 1 and "newer geventstalk" in ran.err


@pytest.mark.slow
def test_check_config_finds_a_database_that_cannot_be_used(postgres_url: str, postgres_server: Postgres) -> None:
    schema = Place(postgres_url).schema
    ran = checked("postgresql://127.0.0.1:1/db")
    assert ran.code == 0 and "at this moment the database cannot be reached" in ran.err
    ran = checked(postgres_url.replace("/postgres?", "/absent?"))
    assert ran.code == 10 and 'database "absent" does not exist' in ran.err
    postgres_server.ask(f"CREATE ROLE {schema} LOGIN")
    poor = postgres_url.replace("geventstalk@", f"{schema}@")
    ran = checked(poor)
    assert ran.code == 10 and f"schema {schema} is not there, and this user may not make it" in ran.err
    assert run_tool("import", poor, stdin=JOB).code == 10
    assert run_tool("import", postgres_url, stdin=JOB).code == 0
    for _ in range(2):
        ran = checked(poor)
        assert (ran.code == 10 and "permission denied" in ran.err) or "may not" in ran.err
        assert run_tool("export", poor).code == 10
        assert run_tool("import", poor, stdin=JOB).code == 10
        postgres_server.ask(f"GRANT USAGE ON SCHEMA {schema} TO {schema}")
        postgres_server.ask(f"GRANT SELECT ON {schema}.meta TO {schema}")


# --- beside nodes that are processes


def listed(cluster: Cluster) -> dict[str, str]:
    """The role of each node, as `cluster status` says it."""
    ran = run_tool("cluster", "status", "--json", "-b", cluster.url)
    return {node["node"]: node["role"] for node in json.loads(ran.out)["nodes"]}


def ask_for(node: Node, command: bytes) -> bytes:
    with socket.create_connection(node.address, 10) as sock:
        sock.sendall(command)
        return sock.makefile("rb").readline()


@pytest.mark.slow
def test_a_journal_moves_into_a_cluster_changes_nodes_and_moves_out(folder: Path, tmp_path: Path) -> None:
    require_postgres()
    jobs = exported(run_tool("export", folder))
    with Cluster(replica=False) as cluster:
        url = cluster.url
        assert run_tool("copy", folder, url).code == 10, "a node leads"
        stop_all(cluster)
        assert run_tool("copy", folder, url).code == 0
        for node in cluster.nodes:
            node.start()
        cluster.wait_healthy()
        before, other = cluster.leader(), cluster.standby()
        assert ask_for(other, b"put 0 0 60 2\r\nhi\r\n") == b"INSERTED 62\r\n"
        cluster.wait(lambda: listed(cluster)[other.name] == "standby", "the standby tells of itself")
        ran = run_tool("journal", "backup", url, tmp_path / "backup")
        assert ran.code == 0 and set(exported(run_tool("export", tmp_path / "backup"))) == {*jobs, 62}

        done = json.loads(run_tool("cluster", "promote", "--json", "-b", url, other.name).out)
        assert (done["before"], done["leader"], done["changed"]) == (before.name, other.name, True)
        assert 0 < done["gap_ms"] < 5000
        assert ask_for(other, b"peek 62\r\n") == b"FOUND 62 2\r\n"
        cluster.wait(lambda: listed(cluster)[before.name] == "standby", "the other one stands by")
        done = json.loads(run_tool("cluster", "demote", "--json", "-b", url, other.name).out)
        assert (done["before"], done["leader"]) == (other.name, before.name)
        assert run_tool("cluster", "demote", "-b", url, other.name).out.startswith(f"{other.name} does not lead")

        stop_all(cluster)
        assert run_tool("cluster", "status", "-b", url).code == 1
        assert run_tool("copy", url, tmp_path / "out").code == 0
    out = exported(run_tool("export", tmp_path / "out"))
    assert {id: job for id, job in out.items() if id != 62} == jobs
    assert json.loads(run_tool("export", tmp_path / "out").out.splitlines()[0])["highest_id"] == 62
    open_store(tmp_path / "out").close()


# Bug: The node took the command for a node with an address, and each waiting client brought a traceback.
@pytest.mark.long
def test_a_node_that_is_started_while_a_command_works_waits_and_so_do_its_clients(tmp_path: Path) -> None:
    require_postgres()
    with Cluster(nodes=1, replica=False) as cluster:
        stop_all(cluster)
        node = cluster.nodes[0]
        with Exclusive(Place(cluster.url)):
            node.start()
            cluster.wait(lambda: node.role() == STANDBY, "the node stands by")
            client = socket.create_connection(node.address, 60)
            client.sendall(b"put 0 0 60 2\r\nhi\r\n")
            time.sleep(0.5)
            ran = run_tool("cluster", "status", "-b", cluster.url)
            assert ran.code == 1 and "has the journal to itself" in ran.out, ran.out
            assert node.role() == STANDBY
        assert client.makefile("rb").readline() == b"INSERTED 1\r\n"
        client.close()
        assert "rror" not in node.log.read_text()


def stop_all(cluster: Cluster) -> None:
    """Standbys first, so that no node takes over."""
    for node in sorted(cluster.nodes, key=lambda each: each.role() == ACTIVE):
        node.terminate()
        assert node.end() == 0
