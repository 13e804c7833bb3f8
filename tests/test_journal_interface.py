"""The interface of a log: a kind of log implements all of it, with the names and arguments that the interface has."""

from __future__ import annotations

import inspect

import pytest

from geventstalk._build import BUILD
from journal import Journal, Log, SyncPoint, tools_for
from journal.fence import Fence
from journal.shared import SharedLog
from journal.sqlite.builder import SegmentBuilder
from journal.sqlite.sealed import FileSync
from journal.sqlite.survey import SegmentSurvey
from journal.sqlite.tools import DirectoryTools
from journal.tools import Builder, LogTools, Survey
from tests.support.minimal_log import MinimalLog

SQLITE = [
    (Log, Journal),
    (SyncPoint, FileSync),
    (LogTools, DirectoryTools),
    (Survey, SegmentSurvey),
    (Builder, SegmentBuilder),
]
OPTIONAL = {(Log, name) for name in vars(Log) if name not in vars(MinimalLog)} | {(SyncPoint, "begin")}
"""For these the interface has a default."""


@pytest.mark.skipif(BUILD == "compiled", reason="compiled classes say nothing of their methods' arguments")
@pytest.mark.parametrize(("interface", "kind"), SQLITE, ids=lambda each: each.__name__)
def test_a_kind_implements_every_method(interface: type, kind: type) -> None:
    implements(interface, kind)


@pytest.mark.skipif(BUILD == "compiled", reason="compiled classes say nothing of their methods' arguments")
def test_a_database_implements_every_method() -> None:
    pytest.importorskip("psycopg")
    from journal.postgres.builder import PostgresBuilder
    from journal.postgres.fence import PostgresFence
    from journal.postgres.log import PostgresLog
    from journal.postgres.survey import PostgresSurvey
    from journal.postgres.tools import PostgresTools
    from journal.postgres.writer import CommitPoint

    implements(Log, PostgresLog)
    implements(SharedLog, PostgresLog)
    implements(SyncPoint, CommitPoint)
    implements(Fence, PostgresFence)
    implements(LogTools, PostgresTools)
    implements(Survey, PostgresSurvey)
    implements(Builder, PostgresBuilder)


def implements(interface: type, kind: type) -> None:
    for name, method in vars(interface).items():
        if name.startswith("_") or not (inspect.isfunction(method) or isinstance(method, property)):
            continue
        if (interface, name) in OPTIONAL and name not in vars(kind):
            continue
        own = inspect.getattr_static(kind, name)
        assert own is not method, f"{kind.__name__} does not implement {name}"
        if inspect.isfunction(method):
            wanted, given = inspect.signature(method).parameters, inspect.signature(own).parameters
            assert list(given)[: len(wanted)] == list(wanted), name


def test_a_url_names_a_database() -> None:
    pytest.importorskip("psycopg")
    from journal.postgres.tools import PostgresTools

    for url in ("postgresql://h/db", "postgres://h"):
        tools = tools_for(url)
        assert isinstance(tools, PostgresTools) and tools.place == url
    assert tools_for("postgresql://u:secret@h/db").place == "postgresql://u:***@h/db"


def test_a_path_names_a_directory() -> None:
    tools = tools_for("/no/such/place")
    assert isinstance(tools, DirectoryTools) and tools.place == "/no/such/place"
