"""journal/postgres/fence.py on real servers: of two that claim one gets it, and nothing of an old epoch comes late."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from journal.fence import FenceStale, FenceUnreachable, Identity, MemberFacts, Patience, View
from tests.support.postgres import Pair, Postgres, have_psycopg, new_schema

if not have_psycopg():
    pytest.skip("psycopg is not installed", allow_module_level=True)

from journal.postgres import schema
from journal.postgres.fence import LATE, PostgresFence
from journal.postgres.link import CONNECT_S, Link, Refused
from journal.postgres.place import Place

LEASE_MS = 1000
RACED_TAKEOVERS = 150
LONG_RACED_TAKEOVERS = 10_000

Make = Callable[..., PostgresFence]


@pytest.fixture
def fences() -> Iterator[Make]:
    """Makes fences, and closes them."""
    with ExitStack() as stack:

        def make(url: str, node: str = "", lease_ms: int = LEASE_MS, **words: object) -> PostgresFence:
            me = Identity(node, f"{node}:1", f"{node}.1", lease_ms) if node else Identity("", "", "", lease_ms)
            fence = PostgresFence(Place(url), me, **words)  # type: ignore[arg-type]  # they pass through
            stack.callback(fence.close)
            return fence

        yield make


@pytest.fixture
def url(postgres_url: str) -> str:
    """A place whose schema is made."""
    return made(postgres_url)


def made(url: str) -> str:
    link = Link(Place(url))
    link.connect()
    schema.make(link, Place(url).schema)
    link.close()
    return url


def claim(fence: PostgresFence, owed_ms: int = 0) -> View:
    """The view after a claim that came through."""
    assert fence.claim(fence.look(), owed_ms)
    return fence.look()


def test_no_node_has_led_a_new_log(url: str, fences: Make) -> None:
    view = fences(url).look()
    assert (view.epoch, view.node, view.incarnation, view.owed_ms, view.transfer_to) == (0, "", "", 0, "")
    assert view.timeline == 1 and view.system > 0


def test_a_takeover_is_dated_and_a_newer_epoch_of_the_same_process_is_none(
    postgres_server: Postgres, url: str, fences: Make
) -> None:
    one, other = fences(url, "one"), fences(url, "other")
    assert one.takeover_age_s() is None
    claim(one)
    age_s = other.takeover_age_s()
    assert age_s is not None and 0 <= age_s < 30
    back = f"UPDATE {Place(url).schema}.meta SET value = value - 7200 * 1000000::bigint WHERE name = 'claimed'"
    postgres_server.ask(back)
    assert claim(one).epoch == 2 and not other.claim(one.look()._replace(epoch=1), 0)
    age_s = other.takeover_age_s()
    assert age_s is not None and 7200 <= age_s < 7230
    claim(other)
    age_s = one.takeover_age_s()
    assert age_s is not None and 0 <= age_s < 30


def test_of_two_that_claim_one_gets_it(url: str, fences: Make) -> None:
    one, other = fences(url, "one"), fences(url, "other")
    seen = one.look()
    assert one.claim(seen, 0)
    assert not other.claim(seen, 0)
    view = other.look()
    assert (view.epoch, view.node, view.address, view.incarnation) == (1, "one", "one:1", "one.1")
    assert not other.claim(view._replace(incarnation="another process"), 0)
    assert other.claim(view, 700)
    view = one.look()
    assert (view.epoch, view.node, view.lease_ms, view.owed_ms) == (2, "other", LEASE_MS, 700)


# Bug: A node took a heartbeat with the number that an earlier node had reached for an old one, and served while the
# lease ran.
def test_each_heartbeat_looks_unlike_all_before(url: str, fences: Make) -> None:
    one, other = fences(url, "one"), fences(url, "other")
    claim(one)
    beats = [one.look().beat]
    for _ in range(3):
        view = one.beat(1)
        assert view is not None and view.epoch == 1
        beats.append(view.beat)
    claim(other)
    view = other.beat(2)
    assert view is not None
    assert len({*beats, view.beat}) == 5
    assert one.look().beat == view.beat


def test_a_heartbeat_under_another_epoch_is_none(url: str, fences: Make) -> None:
    one, other = fences(url, "one"), fences(url, "other")
    claim(one)
    assert one.beat(1) is not None and one.beat(2) is None and other.beat(1) is None
    claim(other, 500)
    before = one.look()
    assert one.beat(1) is None and one.serve(1) is None and not one.release(1, "")
    assert one.look() == before


def test_a_node_that_serves_owes_nothing(url: str, fences: Make) -> None:
    one = fences(url, "one")
    assert claim(one, 500).owed_ms == 500
    beaten, served = one.beat(1), one.serve(1)
    assert beaten is not None and beaten.owed_ms == 500
    assert served is not None and served.owed_ms == 0
    assert served.beat != beaten.beat and one.look().owed_ms == 0


def test_a_goodbye_names_the_next_and_withdraws_the_request(url: str, fences: Make) -> None:
    one, other, operator = fences(url, "one"), fences(url, "other"), fences(url)
    claim(one)
    operator.request_transfer("other")
    view = one.beat(1)
    assert view is not None and view.transfer_to == "other" and not view.released
    assert one.release(1, "other")
    view = other.look()
    assert view.released and view.successor == "other" and view.transfer_to == ""
    view = claim(other)
    assert not view.released and view.successor == ""


def test_a_request_is_taken_back_by_its_name(url: str, fences: Make) -> None:
    one, operator = fences(url, "one"), fences(url)
    operator.request_transfer("*")
    one.withdraw_transfer("two")
    assert one.look().transfer_to == "*"
    one.withdraw_transfer("*")
    assert one.look().transfer_to == ""


def test_a_commit_that_only_confirms_changes_nothing_that_others_see(url: str, fences: Make) -> None:
    one, other = fences(url, "one"), fences(url, "other")
    claim(one)
    before, link = other.look(), Link(Place(url))
    link.connect()
    for _ in range(3):
        one.confirm()
        other.confirm()
    assert other.look() == before and other.members() == []
    assert link.execute(f"SELECT count(*) FROM {Place(url).schema}.meta WHERE name LIKE 'commits of %'").rows == [
        (b"2",)
    ]
    assert schema.version(link, Place(url).schema) == schema.VERSION
    link.close()


def test_nodes_tell_of_themselves(url: str, fences: Make) -> None:
    one, operator = fences(url, "one"), fences(url)
    assert operator.members() == []
    one.tell(MemberFacts("one", "one:1", "standby", 0, 7, 0.0))
    one.tell(MemberFacts("one", "one:1", "active", 1, 9, 0.0))
    (facts,) = operator.members()
    assert facts[:5] == ("one", "one:1", "active", 1, 9) and 0 <= facts.age_s < 30


def test_two_processes_of_one_name_hear_of_each_other(postgres_server: Postgres, url: str, fences: Make) -> None:
    """The word of a process that has ended counts for nothing, and neither does a failover that takes it back."""
    facts = MemberFacts("one", "one:1", "standby", 0, 7, 0.0)
    before = fences(url, "one")
    before.tell(facts._replace(address="before:1"))
    one, other = fences(url, "one"), fences(url, "one")
    told = one.tell(facts)
    (((now,),)) = postgres_server.ask("SELECT extract(epoch FROM clock_timestamp())")
    assert told.namesake == "" and abs(told.clock_s - float(now or 0)) < 30
    assert other.tell(facts._replace(address="other:1")).namesake == "", "it may be a new process of that node"
    assert one.tell(facts)[1:] == ("other:1", False)
    assert one.tell(facts).namesake == ""
    assert other.tell(facts)[1:] == ("one:1", True)
    schema = Place(url).schema
    postgres_server.ask(f"UPDATE {schema}.meta SET value = 1 WHERE name = 'process of one'")
    postgres_server.ask(f"UPDATE {schema}.member SET seen = seen - interval '1 hour'")
    assert one.tell(facts).namesake == ""


def test_answers_are_waited_for_by_how_long_they_took_lately(url: str, fences: Make) -> None:
    one = fences(url, "one", lease_ms=2000)
    for lately_s, waits_s, lock in ((0.0, 2.0, b"500"), (1.2, 3.6, b"1500"), (50.0, 6.0, b"1500")):
        one._patience = Patience()
        one._patience.took(lately_s)
        one._ask("SELECT 1", most=LATE)
        assert one._link.answer_s == pytest.approx(waits_s)
        assert one._link.execute("SELECT setting FROM pg_settings WHERE name = 'lock_timeout'").rows == [(lock,)]
        one._ask("SELECT 1")
        assert one._link.answer_s == 2.0, "a heartbeat that comes later is worth nothing"


def test_a_session_that_is_there_is_seen(url: str, fences: Make) -> None:
    one, other = fences(url, "one"), fences(url, "other")
    claim(one)
    assert other.look().locked
    one.close()
    end = time.monotonic() + 10
    while other.look().locked:
        assert time.monotonic() < end
    assert one.beat(1) is not None
    assert other.look().locked
    claim(other)
    assert one.look().locked, "the lock is that of the process which leads"


def test_a_link_that_is_cut_is_made_again(postgres_server: Postgres, url: str, fences: Make) -> None:
    one = fences(url, "one")
    session = claim(one).session
    postgres_server.ask(f"SELECT pg_terminate_backend({one._pid})")
    with pytest.raises(FenceUnreachable):
        one.look()
    view = one.look()
    assert view.epoch == 1 and view.session != session
    beaten = one.beat(1)
    assert beaten is not None and beaten.session == view.session


def test_a_server_that_does_not_answer_is_unreachable_in_time(postgres_alone: Postgres, fences: Make) -> None:
    one = fences(made(f"{postgres_alone.url}?schema={new_schema()}"), "one", 300)
    claim(one)
    postgres_alone.freeze()
    began = time.monotonic()
    with pytest.raises(FenceUnreachable, match="no answer"):
        one.beat(1)
    assert 0.2 < time.monotonic() - began < 10
    postgres_alone.thaw()
    assert one.look().epoch == 1


def test_a_writer_that_hangs_in_a_transaction_is_ended(postgres_server: Postgres, url: str, fences: Make) -> None:
    """As a node that was frozen while it made a table. It has a share of the row's lock for as long as it likes."""
    told: list[str] = []
    one, other = fences(url, "one", 400), fences(url, "other", 400, tells=told.append)
    claim(one)
    link = Link(Place(url))
    link.connect()
    link.run(f"BEGIN; SELECT 1 FROM {Place(url).schema}.leader WHERE epoch = 1 FOR SHARE")
    assert claim(other).epoch == 2
    assert told == ["ended 1 sessions of the database that held up a takeover"]
    with pytest.raises(Exception, match=r"terminat|connection"):
        link.run("COMMIT")


def test_a_transaction_of_the_new_epoch_is_not_ended(url: str, fences: Make) -> None:
    """A node that claims too late finds that the epoch is another one, and leaves its writers alone."""
    one, other, late = fences(url, "one", 400), fences(url, "other", 400), fences(url, "late", 400)
    claim(one)
    seen = late.look()
    claim(other)
    link = Link(Place(url))
    link.connect()
    link.run(f"BEGIN; SELECT 1 FROM {Place(url).schema}.leader WHERE epoch = 2 FOR SHARE")
    assert not late.claim(seen, 0)
    link.run("COMMIT")
    link.close()


def test_what_a_user_may_not_know_is_said_once(postgres_server: Postgres, fences: Make) -> None:
    name = new_schema()
    postgres_server.ask(f"CREATE ROLE {name} LOGIN")
    postgres_server.ask(f"GRANT CREATE ON DATABASE postgres TO {name}")
    postgres_server.ask("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
    told: list[str] = []
    url = postgres_server.unix_url.replace("://geventstalk@", f"://{name}@")
    one = fences(made(f"{url}&schema={name}"), "one", tells=told.append)
    one.look()
    one.close()
    view = one.look()
    assert view.timeline == 1 and view.system == 0
    assert len(told) == 1 and "system identifier" in told[0]


def test_another_session_than_this_one_is_no_answer(url: str, fences: Make) -> None:
    one = fences(url, "one")
    assert one.look().epoch == 0
    one._link.pid += 1  # as if the statement had met another backend
    with pytest.raises(FenceUnreachable, match="a pooler stands before the database"):
        one.look()
    assert one.look().epoch == 0, "over a new connection"


def test_a_schema_that_is_not_there_is_no_row(postgres_url: str, fences: Make) -> None:
    with pytest.raises(FenceUnreachable, match="does not exist"):
        fences(postgres_url).look()


# Bug: A deleted row, or PGCLIENTENCODING, ended nodes with exit code 70.
def test_a_deleted_row_is_no_fault_of_the_program(url: str, fences: Make) -> None:
    one = fences(url, "one")
    one.look()
    link = Link(Place(url))
    link.connect()
    link.run(f"DELETE FROM {Place(url).schema}.wish")
    with pytest.raises(FenceUnreachable, match="is gone"):
        one.look()
    link.close()


def test_answers_come_in_time_from_the_connection_on(url: str, fences: Make) -> None:
    one = fences(url, "one", lease_ms=500)
    assert one._link.answer_s == 0.5 and not one._link.patient


# Bug: Each look took 137 ms of processor time; the tests ran with jit=off and saw none of it.
def test_a_look_costs_little_from_the_first_second(url: str, fences: Make) -> None:
    """The planner expected 961 million rows of tables that were never analysed, and had such a look compiled."""
    one = fences(url, "one")
    claim(one)
    assert one.beat(1) is not None
    values = {one._look: [], one._beat: [b"1", b"one.1", b"2"], one._serve: [b"1", b"one.1", b"3"]}
    for sql, parameters in values.items():
        ((plan,), *_) = one._link.execute(f"EXPLAIN {sql}", parameters).rows
        found = re.search(rb"cost=[0-9.]+\.\.([0-9.]+) ", plan or b"")
        assert found is not None and float(found[1]) < 1000, plan
    assert one._link.execute("SHOW jit").rows == [(b"off",)]


# --- a replica that is lost, and a failover


@pytest.mark.long
def test_without_its_replica_the_primary_confirms_nothing(postgres_pair: Pair, fences: Make) -> None:
    """And a writer that waits for the replica is not ended by a takeover: its commit would look like a safe one."""
    pair = postgres_pair
    told: list[str] = []
    url = made(f"{pair.url}?schema={new_schema()}")
    one, other = fences(url, "one", 500), fences(url, "other", 500, tells=told.append)
    claim(one)
    other.look()
    pair.replica.freeze()
    link = Link(Place(url))
    link.connect()
    link.send(
        f"WITH ok AS (SELECT 1 FROM {Place(url).schema}.leader WHERE epoch = 1 FOR SHARE)"
        f" INSERT INTO {Place(url).schema}.seg_1 SELECT 1, 1, '' FROM ok"
    )
    with pytest.raises(FenceUnreachable, match="no answer"):
        one.beat(1)
    with pytest.raises(FenceUnreachable, match="synchronous replica"):
        other.claim(other.look(), 0)
    assert told == [] and other.look().epoch == 1
    pair.replica.thaw()
    assert link.answer().changed == 1
    link.close()
    assert one.beat(1) is not None
    pair.replica.freeze()
    for _ in range(4):
        with pytest.raises(FenceUnreachable):
            other.claim(other.look(), 0)
    pair.replica.thaw()
    end = time.monotonic() + 10
    while pair.primary.ask(WAITING):
        assert time.monotonic() < end
    assert other.look().epoch == 2, "claims that wait for the replica raise the epoch only once"


WAITING = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@pytest.mark.slow
def test_while_a_commit_that_confirms_hangs_looks_go_on(postgres_pair: Pair, fences: Make) -> None:
    """The replica hangs for long. No attempt leaves a session behind, and no node looks at the replica first."""
    pair = postgres_pair
    one = fences(made(f"{pair.url}?schema={new_schema()}"), "one", 400)
    one.confirm()
    pair.replica.freeze()
    with pytest.raises(FenceUnreachable, match="no answer"):
        one.confirm()
    begun = time.monotonic()
    for _ in range(5):
        assert one.look().epoch == 0
        with pytest.raises(FenceUnreachable, match="synchronous replica"):
            one.confirm()
        one.tell(MemberFacts("one", "one:1", "standby", 0, 7, 0.0))
    # All this takes some 30 ms. A host that does not answer takes the whole time.
    assert time.monotonic() - begun < CONNECT_S, "a look went to the replica first, which does not answer"
    assert pair.primary.ask(WAITING) == [("1",)]
    pair.replica.thaw()
    end = time.monotonic() + 30
    while pair.primary.ask(WAITING):
        assert time.monotonic() < end
    one.confirm()


@pytest.mark.slow
@pytest.mark.parametrize("default", ["off", "local"])
def test_what_the_fence_commits_waits_for_the_replica_whatever_the_database_is_set_to(
    postgres_pair: Pair, fences: Make, default: str
) -> None:
    """A heartbeat that is not on the replica would let a node serve which a failover knows nothing of."""
    pair = postgres_pair
    pair.primary.reload(synchronous_commit=default)
    end = time.monotonic() + 30
    while pair.primary.ask("SHOW synchronous_commit") != [(default,)]:
        assert time.monotonic() < end
    one = fences(made(f"{pair.primary.url}?schema={new_schema()}"), "one", 400)
    claim(one)
    assert one.beat(1) is not None
    pair.replica.freeze()
    with pytest.raises(FenceUnreachable, match="no answer"):
        one.beat(1)
    with pytest.raises(FenceUnreachable, match="no answer"):
        one.confirm()
    pair.replica.thaw()


@pytest.mark.slow
def test_a_wait_for_the_replica_that_is_cancelled_confirms_nothing(postgres_pair: Pair, fences: Make) -> None:
    """PostgreSQL answers with success and a warning then, though nothing is on the replica."""
    pair = postgres_pair
    one = fences(made(f"{pair.primary.url}?schema={new_schema()}"), "one", 5000)
    claim(one)
    pair.replica.freeze()
    thread = threading.Thread(target=_cancel_when_it_waits, args=(pair.primary, one._pid))
    thread.start()
    with pytest.raises(FenceUnreachable, match="01000"):
        one.beat(1)
    thread.join()
    pair.replica.thaw()


def _cancel_when_it_waits(server: Postgres, pid: int) -> None:
    end = time.monotonic() + 10
    while server.ask(f"SELECT wait_event FROM pg_stat_activity WHERE pid = {pid}") != [("SyncRep",)]:
        assert time.monotonic() < end
    server.ask(f"SELECT pg_cancel_backend({pid})")


# Bug: Nothing told the operator before the failover that the replica was asynchronous.
@pytest.mark.slow
def test_a_look_says_how_the_log_is_replicated(postgres_pair: Pair, fences: Make) -> None:
    """A user who may read no statistics sees it, too."""
    pair, name = postgres_pair, new_schema()
    pair.primary.ask(f"CREATE ROLE {name} LOGIN")
    pair.primary.ask(f"GRANT CREATE ON DATABASE postgres TO {name}")
    one = fences(made(f"{pair.primary.url.replace('://geventstalk@', f'://{name}@')}?schema={name}"), "one")
    assert one.look().replication == "synchronous"
    pair.primary.reload(synchronous_standby_names="")
    end = time.monotonic() + 30
    while one.look().replication != "asynchronous":
        assert time.monotonic() < end
    pair.replica.kill()
    while one.look().replication != "none":
        assert time.monotonic() < end
    claim(one)
    view = one.beat(1)
    assert view is not None and view.replication == "none"


@pytest.mark.long
def test_a_primary_that_was_left_behind_is_refused(postgres_pair: Pair, fences: Make) -> None:
    pair = postgres_pair
    url = made(f"{pair.url}?schema={new_schema()}")
    one = fences(url, "one")
    assert claim(one).timeline == 1
    pair.fail_over()  # the old primary still runs, and takes writes
    one.close()
    pair.replica.freeze()
    end = time.monotonic() + 30
    while True:
        try:
            assert one.look().timeline == 2
            break
        except FenceUnreachable:
            assert time.monotonic() < end
    pair.replica.thaw()
    pair.primary.kill()
    with pytest.raises(FenceStale, match="left behind"):
        for _ in range(5):  # the first ones notice that the connection is gone
            with pytest.raises(FenceUnreachable) as caught:
                one.look()
            if isinstance(caught.value, FenceStale):
                raise caught.value


# --- races


def raced(url: str, fences: Make, takeovers: int, lock: str) -> int:
    """Nodes race for the epoch while others write under the one that they know. Returns how many rows came late."""
    name = Place(url).schema
    link = Link(Place(url))
    link.connect()
    link.run(f"CREATE TABLE {name}.raced(epoch bigint)")
    write = (
        f"WITH ok AS (SELECT epoch FROM {name}.leader WHERE epoch = $1 {lock})"
        f" INSERT INTO {name}.raced SELECT epoch FROM ok, pg_sleep(0.002 * random())"
    )
    epoch, stop = 0, threading.Event()
    taken: list[int] = []
    written: dict[int, int] = {}
    errors: list[BaseException] = []

    def writes() -> None:
        mine = Link(Place(url))
        mine.connect()
        while not stop.is_set():
            mine.execute(write, [str(epoch).encode()])
        mine.close()

    def claims(node: str) -> None:
        nonlocal epoch
        fence, mine = fences(url, node, 10_000), Link(Place(url))
        mine.connect()
        while not stop.is_set():
            seen = fence.look()
            if fence.claim(seen, 0):
                taken.append(seen.epoch)
                epoch = seen.epoch + 1
                old = str(seen.epoch).encode()
                rows = mine.execute(f"SELECT count(*) FROM {name}.raced WHERE epoch = $1", [old]).rows
                written[seen.epoch] = int(rows[0][0] or 0)
                if len(taken) >= takeovers:
                    stop.set()
        mine.close()

    def guarded(work: Callable[..., None], *words: str) -> None:
        try:
            work(*words)
        except (FenceUnreachable, Refused, AssertionError) as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=guarded, args=(writes,)) for _ in range(4)]
    threads += [threading.Thread(target=guarded, args=(claims, f"n{number}")) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
        assert not thread.is_alive()
    assert not errors, errors
    assert sorted(taken) == list(range(len(taken))), "two got the same epoch"
    counts = {
        int(e or 0): int(n or 0) for e, n in link.execute(f"SELECT epoch, count(*) FROM {name}.raced GROUP BY 1").rows
    }
    link.close()
    return sum(counts.get(epoch, 0) - count for epoch, count in written.items())


@pytest.mark.slow
def test_no_row_of_an_old_epoch_comes_late(url: str, fences: Make) -> None:
    assert raced(url, fences, RACED_TAKEOVERS, "FOR SHARE") == 0


@pytest.mark.long
def test_no_row_of_an_old_epoch_comes_late_in_many_takeovers(url: str, fences: Make) -> None:
    assert raced(url, fences, LONG_RACED_TAKEOVERS, "FOR SHARE") == 0


@pytest.mark.slow
def test_the_race_is_one(url: str, fences: Make) -> None:
    """Without the lock rows do come late: the proof that the tests above can see it."""
    assert raced(url, fences, RACED_TAKEOVERS, "") > 0
