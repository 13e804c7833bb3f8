"""journal/postgres/place.py, link.py and schema.py: where a log is, how it is reached, and what stands there."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from journal.errors import JournalLocked, JournalNewer, JournalUnreachable
from tests.clients.programs import missing
from tests.support.postgres import Pair, Postgres, have_psycopg, new_schema
from tests.support.process import ROOT, free_port

if not have_psycopg():
    pytest.skip("psycopg is not installed", allow_module_level=True)

from psycopg.pq import DiagnosticField
from psycopg.pq.misc import find_libpq_full_path

from journal.postgres import schema
from journal.postgres.link import CONNECT_S, Link, Refused, Stale
from journal.postgres.place import Place, PlaceError


def linked(url: str) -> Link:
    link = Link(Place(url))
    link.connect()
    return link


def test_a_place_is_libpqs_but_for_the_schema() -> None:
    place = Place("postgresql://h/d")
    assert (place.libpq, place.shown, place.schema) == ("postgresql://h/d", "postgresql://h/d", "geventstalk")


def test_no_password_is_shown() -> None:
    place = Place("postgres://u:p%40w@h:1,i:2/d?schema=a_1&sslmode=require")
    assert place.libpq == "postgres://u:p%40w@h:1,i:2/d?sslmode=require"
    assert place.shown == "postgres://u:***@h:1,i:2/d?schema=a_1&sslmode=require"
    assert place.schema == "a_1"
    place = Place("postgresql:///d?host=/tmp/x&password=secret")
    assert "secret" not in place.shown and "secret" in place.libpq


@pytest.mark.parametrize("text", ["./data", "postgresql://h/d?schema=A", "postgresql://h/d?schema=a&schema=b"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(PlaceError):
        Place(text)


def test_a_link_asks_and_is_refused(postgres_url: str) -> None:
    link = linked(postgres_url)
    assert link.execute("SELECT $1::int + 1", [b"41"]).rows == [(b"42",)]
    assert link.execute("SELECT pg_backend_pid()").rows == [(b"%d" % link.pid,)]
    with pytest.raises(Refused) as caught:
        link.execute("SELECT 1 FROM no_such_table")
    assert caught.value.state == "42P01"
    assert link.execute("SELECT 1").rows == [(b"1",)], "the session goes on"
    link.run("DO $$ BEGIN RAISE WARNING 'careful'; END $$")
    assert link.warnings == ["01000 careful"]
    link.close()
    with pytest.raises(JournalUnreachable):
        link.execute("SELECT 1")


def test_an_answer_that_does_not_come_ends_the_link(postgres_url: str) -> None:
    link = linked(postgres_url)
    with pytest.raises(JournalUnreachable, match="no answer for"):
        link.execute("SELECT pg_sleep(1)", seconds=0.05)
    assert not link.up and link.fileno == -1


def test_a_backend_that_is_ended_is_unreachable(postgres_server: Postgres, postgres_url: str) -> None:
    link = linked(postgres_url)
    postgres_server.ask(f"SELECT pg_terminate_backend({link.conn.backend_pid})")
    with pytest.raises(JournalUnreachable):
        link.execute("SELECT 1")
    link.connect()
    assert link.execute("SELECT 1").rows == [(b"1",)]
    link.close()


def test_no_server_listens_and_no_such_database(postgres_server: Postgres) -> None:
    with pytest.raises(JournalUnreachable, match="refused"):
        Link(Place(f"postgresql://x@127.0.0.1:{free_port()}/d")).connect()
    with pytest.raises(JournalLocked, match="no_such"):
        Link(Place(f"postgresql://geventstalk@127.0.0.1:{postgres_server.port}/no_such")).connect()


class Refusing:
    """A server that lets no connection in, for a reason in the language of its administrator."""

    def __init__(self, state: str, text: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"postgresql://u@127.0.0.1:{self._listener.getsockname()[1]}/d?sslmode=disable"
        fields = {"S": "FATAL", "V": "FATAL", "C": state, "M": text, "F": "postinit.c", "L": "1", "R": "InitPostgres"}
        said = b"".join(name.encode() + value.encode() + b"\0" for name, value in fields.items()) + b"\0"
        self._says = b"E" + (len(said) + 4).to_bytes(4, "big") + said
        self._thread = threading.Thread(target=self._refuse, daemon=True)
        self._thread.start()

    def _refuse(self) -> None:
        with suppress(OSError):
            while True:
                with self._listener.accept()[0] as sock:
                    sock.recv(1000)
                    sock.sendall(self._says)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30)


@pytest.mark.parametrize(
    ("state", "text", "kind"),
    [
        ("28P01", "Passwort-Authentifizierung für Benutzer »u« fehlgeschlagen", JournalLocked),
        ("28000", "nincs pg_hba.conf bejegyzés", JournalLocked),
        ("3D000", 'データベース"d"は存在しません', JournalLocked),
        ("42501", "keine Berechtigung für Datenbank d", JournalLocked),
        ("57P03", "das Datenbanksystem startet", JournalUnreachable),
        ("53300", "authentication failed for 28P01: too many clients", JournalUnreachable),
    ],
)
def test_a_refusal_is_known_by_its_state_in_any_language(state: str, text: str, kind: type[Exception]) -> None:
    refusing = Refusing(state, text)
    try:
        with pytest.raises((JournalLocked, JournalUnreachable)) as caught:
            linked(refusing.place)
        assert type(caught.value) is kind and str(caught.value).endswith(f"FATAL: {state}: {text}")
    finally:
        refusing.close()


def test_a_refusal_is_known_with_each_kind_of_psycopg(postgres_server: Postgres) -> None:
    """One without compiled parts, as distributions have it, loads the system's libpq."""
    code = (
        "from journal.errors import JournalLocked; from journal.postgres.link import Link, pq\n"
        "from journal.postgres.place import Place; import sys; assert pq.__impl__ == 'python', pq.__impl__\n"
        "try: Link(Place(sys.argv[1])).connect()\nexcept JournalLocked as error: print(error)\n"
    )
    if find_libpq_full_path() is None:
        missing("libpq is not installed")
    place = f"postgresql://geventstalk@127.0.0.1:{postgres_server.port}/no_such"
    environment = {**os.environ, "PSYCOPG_IMPL": "python"}
    done = subprocess.run(
        [sys.executable, "-c", code, place], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert "3D000" in done.stdout and "postinit" not in done.stdout, done


def test_the_schema_is_made_once(postgres_url: str) -> None:
    link, name = linked(postgres_url), Place(postgres_url).schema
    assert schema.version(link, name) is None
    assert schema.make(link, name)
    assert not schema.make(link, name)
    assert schema.version(link, name) == schema.VERSION
    assert link.execute(f"SELECT epoch FROM {name}.leader").rows == [(b"0",)]
    assert link.execute(f"SELECT no, first_seq FROM {name}.segment").rows == [(b"1", b"1")]
    link.run(f"UPDATE {name}.meta SET value = 9 WHERE name = 'version'")
    with pytest.raises(JournalNewer, match="version 9"):
        schema.make(link, name)
    link.close()


# Bug: It kept the node from the other host.
def test_a_host_whose_name_is_gone_is_passed_over(postgres_server: Postgres) -> None:
    """As that of a container that has died."""
    asked: list[str] = []

    def resolve(host: str) -> list[str]:
        asked.append(host)
        if host == "gone":
            raise OSError("no such name")
        return ["127.0.0.1"]

    place = Place(f"postgresql://geventstalk@gone:1,there:{postgres_server.port}/postgres")
    link = Link(place, resolve=resolve)
    link.connect()
    assert asked == ["gone", "there"]
    link.connect()
    assert asked == ["gone", "there"] * 2
    link.close()
    for name in ("gone", "a..b", "x" * 70):
        with pytest.raises(JournalUnreachable, match="cannot be found"):
            Link(
                Place(f"postgresql://h@{name}/d"), resolve=lambda host: resolve(host.encode("idna").decode())
            ).connect()


def test_all_addresses_of_a_host_are_tried(postgres_server: Postgres) -> None:
    place = Place(f"postgresql://geventstalk@there:{postgres_server.port}/postgres")
    link = Link(place, resolve=lambda host: ["127.0.0.9", "127.0.0.1"])
    link.connect()
    assert link.words["hostaddr"] == "127.0.0.1"
    link.connect()
    assert link.words["hostaddr"] == "127.0.0.1"
    link.close()


# Bug: The start ended, although the other host was only away.
def test_one_host_that_refuses_is_not_the_last_word(postgres_server: Postgres) -> None:
    port = postgres_server.port
    with pytest.raises(JournalUnreachable):
        Link(Place(f"postgresql://geventstalk@127.0.0.1:{port},127.0.0.1:{free_port()}/no_such")).connect()
    with pytest.raises(JournalLocked):
        Link(Place(f"postgresql://geventstalk@127.0.0.1:{port},localhost:{port}/no_such")).connect()


# Bug: A password that was changed while a node ran ended the node at its next connection.
def test_a_user_that_was_known_and_is_refused_is_waited_for(postgres_server: Postgres) -> None:
    """A password changes in the database a moment before it changes in the file, or after it."""
    name = new_schema()
    postgres_server.ask(f"CREATE ROLE {name} LOGIN")
    link = linked(f"postgresql://{name}@127.0.0.1:{postgres_server.port}/postgres")
    postgres_server.ask(f"ALTER ROLE {name} NOLOGIN")
    with pytest.raises(JournalUnreachable, match="not permitted"):
        link.connect()
    with pytest.raises(JournalLocked, match="not permitted"):
        linked(link.place.url)
    postgres_server.ask(f"ALTER ROLE {name} LOGIN")
    link.connect()
    link.close()


# Bug: idle_session_timeout cut the connection of a node that had nothing to write, and each cut cost an epoch.
def test_no_limit_of_the_server_ends_a_session(postgres_server: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    name = new_schema()
    postgres_server.ask(f"CREATE ROLE {name} LOGIN")
    limits = ("statement_timeout", "lock_timeout", "idle_session_timeout")
    for each in limits:
        postgres_server.ask(f"ALTER ROLE {name} SET {each} = 5000")
    monkeypatch.setenv("PGCLIENTENCODING", "EUC_JP")
    link = linked(f"postgresql://{name}@127.0.0.1:{postgres_server.port}/postgres")
    assert [link.execute(f"SHOW {each}").rows for each in limits] == [[(b"0",)]] * 3
    assert link.execute("SELECT $1::text", ["ü→".encode()]).rows == [("ü→".encode(),)]
    link.close()


def test_a_session_does_not_grow(postgres_url: str) -> None:
    link = linked(postgres_url)
    for at in range(5):
        for _ in range(2):
            assert link.execute_again(f"SELECT $1::int + {at}", [b"1"]).rows == [(b"%d" % (at + 1),)]
            if at > 2:
                link.execute("SELECT 1")  # takes the place of the statement
    assert link.execute("SELECT count(*) FROM pg_prepared_statements").rows == [(b"0",)]
    link.close()


# Bug: An answer that came in drops held a heartbeat for as long as the drops came.
def test_an_answer_in_drops(postgres_url: str) -> None:
    link = linked(postgres_url)
    drops = "SELECT repeat('x', 9000) FROM generate_series(1, 12), pg_sleep(0) WHERE pg_sleep(0.05) IS NOT NULL"
    assert len(link.execute(drops, seconds=0.3).rows) == 12
    link.patient = False
    with pytest.raises(JournalUnreachable, match="no answer"):
        link.execute(drops, seconds=0.3)


# Bug: In transaction mode 46 acknowledged jobs were lost.
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["transaction", "statement", "session"])
def test_a_pooler_is_refused(mode: str, postgres_server: Postgres, tmp_path: Path) -> None:
    """In all modes: that of a pool can change while a node runs, and nothing but the session tells a node."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin") or missing("pgbouncer is not installed")
    port, settings, folder = free_port(), tmp_path / "pgbouncer.ini", postgres_server.folder
    settings.write_text(
        f"[databases]\n* = host={folder} port={postgres_server.port} user=geventstalk\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = any\npool_mode = {mode}\nunix_socket_dir =\n"
        "ignore_startup_parameters = extra_float_digits\n"
    )
    words = [program, *(["-u", "postgres"] if os.geteuid() == 0 else []), "/dev/stdin"]
    with settings.open() as file, (tmp_path / "said").open("w+") as said:
        pooler = subprocess.Popen(words, stdin=file, stdout=said, stderr=said)
        try:
            place, end = f"postgresql://geventstalk@127.0.0.1:{port}/postgres", time.monotonic() + 30
            with pytest.raises(JournalLocked, match="give the address of the database itself"):
                while True:
                    assert pooler.poll() is None and time.monotonic() < end, (tmp_path / "said").read_text()
                    with suppress(JournalUnreachable):
                        linked(place)
                        break
        finally:
            pooler.kill()
            pooler.wait(30)


class Warned:
    """A warning from a file of PostgreSQL."""

    def __init__(self, file: bytes) -> None:
        self._fields = {DiagnosticField.SQLSTATE: b"01000", DiagnosticField.SOURCE_FILE: file}

    def error_field(self, field: DiagnosticField) -> bytes | None:
        return self._fields.get(field)


# Bug: No commit counted any more.
def test_warnings_that_are_not_about_the_commit(postgres_url: str) -> None:
    """Some weeks before its numbers of transactions run out, the database warns at each of them."""
    link = linked(postgres_url)
    for file in (b"varsup.c", b"multixact.c", b"syncrep.c"):
        link._notice(Warned(file))  # type: ignore[arg-type]  # all that is asked of a result
    assert len(link.warnings) == 1
    link.run("DO $$ BEGIN FOR i IN 1..1000 LOOP RAISE WARNING 'flood'; END LOOP; END $$")
    assert 1 < len(link.warnings) < 100
    link.close()


# Bug: A user that owned the schema could not start a node, though the message advised exactly that.
def test_a_schema_made_for_a_user_without_the_right(postgres_server: Postgres) -> None:
    name = new_schema()
    postgres_server.ask(f"CREATE ROLE {name} LOGIN")
    postgres_server.ask(f"CREATE SCHEMA {name} AUTHORIZATION {name}")
    link = linked(f"postgresql://{name}@127.0.0.1:{postgres_server.port}/postgres")
    assert schema.make(link, name)
    with pytest.raises(JournalLocked, match="permission denied"):
        schema.make(link, new_schema())
    link.close()


# Bug: Two nodes gave out the same jobs.
@pytest.mark.slow
def test_of_two_primaries_the_newer_one_is_taken_and_never_the_older_one(postgres_pair: Pair) -> None:
    """The old one came back, and stands first in the list: it was served from, beside the new one."""
    pair = postgres_pair
    before = linked(pair.url)
    pair.fail_over()
    old, new = pair.replica, pair.primary
    url = f"postgresql://geventstalk@127.0.0.1:{old.port},127.0.0.1:{new.port}/postgres"
    told: list[str] = []
    for link in Link(Place(url)), before:
        link.tells = told.append
        link.connect()
        assert (link.timeline, link.where) == (2, f"127.0.0.1:{new.port}")
    assert told and f"127.0.0.1:{old.port} takes writes, and was left behind" in told[0], told
    new.kill()
    for _ in range(2):
        with pytest.raises(Stale, match="its timeline 1 is older than 2"):
            link.connect()
    assert "make it a replica" in told[-1]


def test_hosts_of_different_databases_are_refused(postgres_server: Postgres, postgres_alone: Postgres) -> None:
    one, other = postgres_server.port, postgres_alone.port
    with pytest.raises(JournalLocked, match="are of different database systems: name those of one"):
        linked(f"postgresql://geventstalk@127.0.0.1:{one},127.0.0.1:{other}/postgres")
    link = linked(f"postgresql://geventstalk@127.0.0.1:{other}/postgres")
    link.place = Place(f"postgresql://geventstalk@127.0.0.1:{one}/postgres")
    with pytest.raises(Stale, match="is another database system than before"):
        link.connect()


def test_no_host_is_waited_for_that_hangs_where_another_is_as_new_as_before(postgres_server: Postgres) -> None:
    """All are asked at once. Only the first time, when nothing is known, a host that hangs has time to answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hangs = silent.getsockname()[1]
        url = f"postgresql://geventstalk@127.0.0.1:{hangs},127.0.0.1:{postgres_server.port}/postgres"
        link, told = Link(Place(url)), list[str]()
        link.tells = told.append
        link.connect()
        assert len(told) == 1 and "whether there is a newer primary is not known" in told[0], told
        began = time.monotonic()
        for _ in range(3):
            link.connect()
        assert time.monotonic() - began < 3 * CONNECT_S and len(told) == 1
        link.close()


@pytest.mark.slow
def test_a_link_takes_the_host_that_may_be_written_to(postgres_pair: Pair) -> None:
    pair = postgres_pair
    link = linked(pair.url)
    assert link.execute("SHOW port").rows == [(str(pair.primary.port).encode(),)]
    pair.primary.freeze()
    pair.fail_over()
    began = time.monotonic()
    link.connect()
    assert link.execute("SHOW port").rows == [(str(pair.primary.port).encode(),)]
    assert time.monotonic() - began < 10
    link.close()
