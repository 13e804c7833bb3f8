"""journal/postgres/place.py, link.py and schema.py: where a log is, how it is reached, and what stands there."""

from __future__ import annotations

import time

import pytest

from journal.errors import JournalLocked, JournalNewer, JournalUnreachable
from tests.support.postgres import Pair, Postgres, have_psycopg
from tests.support.process import free_port

if not have_psycopg():
    pytest.skip("psycopg is not installed", allow_module_level=True)

from journal.postgres import schema
from journal.postgres.link import Link, Refused
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
    assert not link.pooled
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


def test_nobody_listens_and_no_such_database(postgres_server: Postgres) -> None:
    with pytest.raises(JournalUnreachable, match="refused"):
        Link(Place(f"postgresql://x@127.0.0.1:{free_port()}/d")).connect()
    with pytest.raises(JournalLocked, match="no_such"):
        Link(Place(f"postgresql://geventstalk@127.0.0.1:{postgres_server.port}/no_such")).connect()


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
