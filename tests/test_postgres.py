"""The servers under the tests of nodes over PostgreSQL: they start, follow, die, freeze and fail over."""

from __future__ import annotations

import time

import pytest

from tests.support.postgres import Pair, Postgres


def test_a_server_answers_and_freezes(postgres_server: Postgres) -> None:
    assert postgres_server.ask("SELECT 1 + 1") == [("2",)]
    assert postgres_server.ask("SHOW fsync") == [("on",)]


def test_a_server_is_as_users_have_it(postgres_server: Postgres) -> None:
    """The tests switched JIT off, and did not see that it took a hundred times as long as the statements of a node."""
    ours = "SELECT name FROM pg_settings WHERE source = 'command line' AND name <> 'data_directory' ORDER BY name"
    assert postgres_server.ask(ours) == [("listen_addresses",), ("port",), ("unix_socket_directories",)]
    assert [postgres_server.ask(f"SHOW {name}") for name in ("jit", "autovacuum", "fsync")] == [[("on",)]] * 3


@pytest.mark.slow
def test_a_replica_is_synchronous_and_takes_over(postgres_pair: Pair) -> None:
    pair = postgres_pair
    pair.primary.ask("CREATE TABLE t(a int)")
    link = pair.primary.connect()
    pair.replica.freeze()
    link.pgconn.send_query(b"INSERT INTO t VALUES(1)")
    time.sleep(0.05)
    link.pgconn.consume_input()
    assert link.pgconn.is_busy(), "a commit does not wait for the replica"
    pair.replica.thaw()
    assert link.pgconn.get_result().command_tuples == 1
    link.close()
    pair.primary.kill()
    pair.fail_over()
    assert pair.primary.ask("SELECT a FROM t") == [("1",)]
    pair.rejoin()
    pair.primary.ask("INSERT INTO t VALUES(2)")
    assert pair.replica.ask("SELECT a FROM t ORDER BY a") == [("1",), ("2",)]
