"""Searching: the same jobs as a naive look at each, whatever happens meanwhile, and no slice that is long."""

from __future__ import annotations

import random
import time
from time import monotonic_ns

import gevent
import pytest
import re2

from geventstalk.core.bodies import Bodies
from geventstalk.core.job import SECOND_NS, Job, held_body
from geventstalk.filters import FilterError, parse
from geventstalk.http import patterns
from geventstalk.http import search as search_module
from geventstalk.http.backend import SLICE_NS
from geventstalk.http.patterns import Pattern, PatternError
from geventstalk.http.search import Search, SearchFailed
from geventstalk.wire.session import Session
from tests.support.filters import TUBES, body_of, holds, random_filter
from tests.support.web import Inside


class Stock(Inside):
    """An engine that random traffic fills and changes."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.draw = draw
        self.workers = [self.session() for _ in range(3)]
        self.now_ns = monotonic_ns() - 100 * SECOND_NS
        self.ids: list[int] = []

    def put(self, body: bytes | None = None, tube: str | None = None) -> int:
        draw, worker = self.draw, self.draw.choice(self.workers)
        data = body_of(draw) if body is None else body
        delay, ttr = draw.choice((0, 0, 0, 1, 1000)), draw.choice((1, 2, 100))
        self.say(worker, b"use %s" % (tube or draw.choice(TUBES)).encode())
        self.say(worker, b"put %d %d %d %d\r\n%s" % (draw.randrange(6), delay, ttr, len(data), data))
        self.ids.append(self.engine.next_id - 1)
        return self.ids[-1]

    def say(self, worker: Session, line: bytes) -> None:
        worker.receive(line + b"\r\n", self.now_ns)
        worker.take_out()

    def change(self) -> None:
        """One change of some job, as clients make them."""
        draw, worker = self.draw, self.draw.choice(self.workers)
        id = draw.choice(self.ids)
        self.now_ns = min(monotonic_ns(), self.now_ns + draw.randrange(SECOND_NS))
        line = draw.choice(
            (
                b"reserve-job %d" % id,
                b"release %d %d %d" % (id, draw.randrange(5), draw.choice((0, 1, 500))),
                b"bury %d %d" % (id, draw.randrange(5)),
                b"kick-job %d" % id,
                b"reserve-with-timeout 0",
                b"touch %d" % id,
                b"delete %d" % id if draw.random() < 0.3 else b"watch sms",
            )
        )
        self.say(worker, line)
        self.engine.advance(self.now_ns, 100)

    def job(self, id: int) -> Job:
        job = self.engine.jobs.get(id)
        assert job is not None
        return job

    def naive(self, text: str, now_ns: int) -> list[int]:
        terms = parse(text)
        return sorted(job.id for job in self.engine.jobs if holds(self.engine, job, terms, now_ns))

    def search(self, text: str, descending: bool = False, at: int | None = None) -> Search:
        return Search(self.backend, parse(text), descending, at)


@pytest.fixture
def stock(seed: int) -> Stock:
    return Stock(random.Random(seed))


def found(search: Search) -> list[int]:
    return [job.id for jobs in search.pages() for job in jobs]


# Bug: A search had the bodies of 64 jobs in memory at once.
def test_bodies_that_are_not_in_memory_are_matched_some_at_a_time(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = stock.engine.bodies = Bodies(1 << 30)
    stash: dict[int, bytes] = {}
    for number in range(40):
        job = stock.job(stock.put(b"%d." % (number % 2) * 500))
        stash[job.id] = held_body(job)
        bodies.left(job)
        bodies.stands(job.id, 1, len(stash[job.id]))
        bodies.came(job)
        bodies.let_go_at_once(job)
    sizes = []

    def with_bodies(jobs: list[Job]) -> list[tuple[Job, bytes]]:
        sizes.append(sum(len(stash[job.id]) for job in jobs))
        return [(job, stash[job.id]) for job in jobs]

    monkeypatch.setattr(search_module, "_READ_BYTES_MAX", 10_000)
    monkeypatch.setattr(stock.backend, "with_bodies", with_bodies)
    assert found(stock.search("body:1.1")) == stock.ids[1::2]
    assert max(sizes) <= 10_000 and len(sizes) < 10


def test_a_search_finds_what_a_look_at_each_job_finds(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each way: through the table, through lists, on the hub and in a thread."""
    for _ in range(300):
        stock.put()
    for _ in range(1000):
        stock.change()
    matched = 0
    now_ns = monotonic_ns()
    monkeypatch.setattr(stock.backend, "now_ns", lambda: now_ns)
    for number in range(150):
        monkeypatch.setattr(search_module, "_WORTH", 1 if number % 2 else 10**9)
        monkeypatch.setattr(search_module, "_LISTED_MAX", stock.draw.choice((0, 50, 8000)))
        monkeypatch.setattr(search_module, "_HUB_COST_MAX", stock.draw.choice((0, 500, 100_000)))
        monkeypatch.setattr(search_module, "_BATCH_COST_MAX", stock.draw.choice((0, 1000, 100_000)))
        monkeypatch.setattr(search_module, "_WINDOW_BYTES", stock.draw.choice((1, 3, 1 << 16)))
        text = random_filter(stock.draw, stock.ids)
        expected = stock.naive(text, now_ns)
        up, down = stock.search(text), stock.search(text, True)
        assert found(up) == expected, text
        assert found(down) == expected[::-1], text
        assert up.exhausted and down.exhausted
        matched += bool(expected)
    assert matched > 30


def test_a_search_goes_on_where_another_one_stopped(stock: Stock) -> None:
    for _ in range(300):
        stock.put()
    for _ in range(500):
        stock.change()
    now_ns = monotonic_ns()
    for _ in range(30):
        text = random_filter(stock.draw, stock.ids)
        if "age" in text or "since" in text:
            continue
        for descending in (False, True):
            at: int | None = None
            ids: list[int] = []
            while True:
                search = stock.search(text, descending, at)
                pages = search.pages()
                for _ in range(stock.draw.randrange(1, 3)):
                    ids += [job.id for job in next(pages, [])]
                if search.exhausted:
                    break
                at = search.position
            assert ids == (stock.naive(text, now_ns)[::-1] if descending else stock.naive(text, now_ns)), text


def test_jobs_that_stay_are_seen_once_whatever_others_do(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two looks others put, reserve, bury, move between states and delete."""
    for _ in range(250):
        stock.put()
    staying = {job.id for job in stock.engine.jobs if job.id % 3 == 0}
    stock.ids = [id for id in stock.ids if id not in staying]

    def yield_now() -> None:
        for _ in range(2):
            stock.change()
        stock.put()
        id = stock.draw.choice([*staying])
        stock.say(stock.workers[0], stock.draw.choice((b"kick-job %d", b"reserve-job %d", b"bury %d 1")) % id)

    monkeypatch.setattr(search_module, "SLICE_NS", 0)
    monkeypatch.setattr(stock.backend, "yield_now", yield_now)
    for text in (
        "",
        "tube:mail",
        "tube:mail,x -body:/nothing/",
        "body:/./",
        "-body:zzz",
        "state:ready,delayed,reserved",
    ):
        for descending in (False, True):
            terms, ids = parse(text), list[int]()
            always = (
                {id for id in staying if holds(stock.engine, stock.job(id), terms, 0)} if "state" not in text else set()
            )
            search = Search(stock.backend, terms, descending, last=stock.engine.next_id + 20)
            for jobs in search.pages():
                for job in jobs:
                    assert holds(stock.engine, job, terms, monotonic_ns()) and stock.engine.jobs.get(job.id) is job
                    ids.append(job.id)
            assert ids == sorted(set(ids), reverse=descending)
            assert always <= set(ids), text


def test_a_job_that_is_gone_does_not_match_any_more(stock: Stock) -> None:
    stock.put(b"hello", "mail")
    search = stock.search("tube:mail")
    (job,) = next(search.pages())
    assert search.still(job)
    stock.say(stock.workers[0], b"delete %d" % job.id)
    assert not search.still(job)


def test_what_was_searched_is_counted(stock: Stock) -> None:
    for _ in range(200):
        stock.put(b"x", "mail")
    search = stock.search("size:1")
    counts = [search.searched for jobs in search.pages() if jobs]
    assert counts == sorted(counts) and search.searched == 200
    search = stock.search("id>100", descending=True)
    assert len(found(search)) == 100 == search.searched


def test_few_jobs_among_many_are_found_without_a_look_at_the_others(stock: Stock) -> None:
    for _ in range(2000):
        stock.put(b"x", "sms")
    stock.put(b"x", "mail")
    for id in (5, 1000):
        stock.say(stock.workers[0], b"reserve-job %d" % id)
    for text, count in (
        ("tube:mail", 1),
        ("tube:mail,none", 1),
        ("state:reserved", 2),
        ("id:5,1700", 2),
        ("id:3..9", 7),
    ):
        search = stock.search(text)
        assert len(found(search)) == count and search.searched == count
    stock.say(stock.workers[0], b"bury 5 0")
    for text, searched in (("state:buried", 1), ("state:buried,reserved tube:s*", 2), ("-state:ready,delayed", 2)):
        search = stock.search(text)
        assert found(search) and search.searched == searched, text
    search = stock.search("tube:m*")
    assert len(found(search)) == 1 and search.searched == 2001


def test_no_filter_holds_up_others(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever bodies and filters: between two yields pass little more than a millisecond of this process's time."""
    for number in range(3000):
        stock.put(b"ab" * stock.draw.choice((1, 50, 500)) if number % 500 else b"ab" * 60_000, "mail")
    last = [time.thread_time_ns()]
    slices: list[int] = []

    def yield_now() -> None:
        slices.append(time.thread_time_ns() - last[0])
        gevent.sleep(0)
        last[0] = time.thread_time_ns()

    in_thread = Search._match_in_thread

    def match(search: Search, bodies: list[bytes]) -> list[bool]:  # meanwhile the event loop serves others as well
        slices.append(time.thread_time_ns() - last[0])
        verdicts = in_thread(search, bodies)
        last[0] = time.thread_time_ns()
        return verdicts

    monkeypatch.setattr(Search, "_match_in_thread", match)
    monkeypatch.setattr(stock.backend, "yield_now", yield_now)
    yields = 0
    for text in (
        "",
        "tube:m* size>0 age<1d reserves<1 pri<9",
        "body:/(a|aa)+$/ body:/(?:a|b)*[xy]/",
        "body:/(a|b){1,90}c/",
        "body:" + "ab" * 900 + "c",
        "-abababababx -babababay",
    ):
        runs: list[list[int]] = []
        for _ in range(3):  # what the filter takes, it takes in each run; what the machine takes, it takes in one
            slices.clear()
            last[0] = time.thread_time_ns()
            found(stock.search(text))
            yields += len(slices)
            slices.append(time.thread_time_ns() - last[0])
            runs.append(sorted([0, *slices]))
        assert min(run[len(run) * 9 // 10] for run in runs) < 2 * SLICE_NS, (text, runs)
        assert min(run[-1] for run in runs) < 10 * SLICE_NS, (text, runs)
    assert yields > 15


def test_a_large_body_is_matched_in_a_thread_and_one_too_large_is_refused(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = stock.put(b"a" * 60_000 + b"b", "mail")
    assert found(stock.search("body:/a{10}b$/")) == [id]
    assert found(stock.search("body:/b$/ -body:/^b/ " + "a" * 100)) == [id]
    monkeypatch.setattr(search_module, "_COST_MAX", 100_000)
    assert found(stock.search("tube:sms body:/b/")) == []
    with pytest.raises(SearchFailed, match=rf"Job {id} has 60001 bytes, too many .* size<=\d+ to the filter"):
        found(stock.search("body:/b/"))


# Bug: The package regex was tried before RE2: its time limit does not hold inside its inner loops, and nested counts
# end in a segmentation fault.
@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", r"cannot be used: missing \): \(\."),
        ("a{2,1}", "invalid repetition size"),
        ("(?=a)", "invalid perl operator"),
        ("(a)\\1", "invalid escape sequence"),
        ("(?R)", "invalid perl operator"),
        ("(?:foo){e<=1}(?P<x>", "cannot be used"),
        ("((a{100}){100}){100}", "too large"),
        ("\\pL" * 100, "too large"),
        (".{1000}" * 70, "too large"),
        ("(?:(?:abcdefghij){30}){30}", "too large"),
        ("a\\", "trailing"),
    ],
)
def test_patterns_that_are_refused(pattern: str, why: str) -> None:
    begun = time.thread_time()
    with pytest.raises(PatternError, match=why):
        Pattern(pattern, False)
    assert time.thread_time() - begun < 0.05


def test_a_refused_pattern_says_where(stock: Stock) -> None:
    with pytest.raises(FilterError) as caught:
        stock.search("tube:x -body:/(/")
    assert caught.value.at == 7 and str(caught.value) == "The regular expression cannot be used: missing ): (."


def test_patterns_see_utf8_and_nothing_behind_the_body(stock: Stock) -> None:
    texts = [b"na\xc3\xafve", b"NA\xc3\x8fVE", b"x", b"line\nnext", b"\xff", b""]
    ids = [stock.put(text, "mail") for text in texts]
    for pattern, expected in {
        "^na.ve$": [0],
        "na\u00efve/i": [0, 1],
        "^.$": [2],
        "x$": [2],
        "\\n": [3],
        "(?m)^next": [3],
        "^$": [5],
        "\\r": [],
        "[\u00e0-\u00ff]": [0],
        "^\\C$": [2, 4],
    }.items():
        pattern, _, flag = pattern.partition("/")
        assert found(stock.search(f"body:/{pattern}/{flag}")) == [ids[n] for n in expected], pattern


def test_patterns_are_matched_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a private name of the package: its public one takes three times as long, and serves where that is missing."""
    assert "anchor" in Pattern("a", False).matches.__code__.co_freevars
    monkeypatch.setattr(patterns, "re2", PublicOnly)
    pattern = Pattern("a+$", True)
    assert "anchor" not in pattern.matches.__code__.co_freevars
    assert [pattern.matches(body) for body in (b"baA", b"ab", memoryview(b"xab")[:2])] == [True, False, True]


class PublicOnly:
    """RE2's package without its private names."""

    Options, error, purge = re2.Options, re2.error, staticmethod(re2.purge)

    class compile:
        def __init__(self, text: str, options: object) -> None:
            compiled = re2.compile(text, options)
            self.search, self.programsize = compiled.search, compiled.programsize


def test_without_the_package_there_are_no_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "re2", None)
    with pytest.raises(PatternError, match="google-re2 is not installed"):
        Pattern("a", False)


# Bug: An operation on many jobs failed at the first tube that was made after the undo.
def test_a_search_goes_on_after_an_undo(stock: Stock) -> None:
    """Which makes the tables of tubes anew."""
    stock.put(b"x", "mail")
    search = stock.search("tube:m*")
    stock.engine.undo()
    stock.put(b"x", "more")
    assert len(found(search)) == 2
