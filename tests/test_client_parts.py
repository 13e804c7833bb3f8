"""The parts of the commands for a running server: addresses, filters, shapes, tables, differences of two looks."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from geventstalk.api_shapes import body_shape
from geventstalk.cli import client_progress, client_top
from geventstalk.cli import client_show as show
from geventstalk.cli.client import server_of
from geventstalk.cli.client_progress import progress
from geventstalk.cli.client_show import Column
from geventstalk.cli.ending import Stopped, signals, whole
from geventstalk.config import ConfigError, load
from geventstalk.exits import EXIT_USAGE
from geventstalk.filters import STATES
from geventstalk.remote import address, api, sampling, select, shapes
from geventstalk.remote.address import Address
from geventstalk.remote.errors import Nonsense
from geventstalk.remote.watching import Event, Look, compare
from tests.support.live import Runner

# Addresses


@pytest.mark.parametrize(
    ("listen", "found"),
    [
        ((), "127.0.0.1:11300"),
        (("0.0.0.0",), "127.0.0.1:11300"),
        (("::",), "[::1]:11300"),
        (("10.0.0.5", "127.0.0.1"), "10.0.0.5:11300"),
        (("unix:/run/s",), "unix:/run/s"),
    ],
)
def test_the_server_is_where_it_listens(listen: tuple[str, ...], found: str) -> None:
    assert str(address.of_server(listen, "11300")) == found


_TLS = {"certificate": "c", "key": "k"}


@pytest.mark.parametrize(
    ("listeners", "found"),
    [
        ([{"address": "0.0.0.0:11301"}], "127.0.0.1:11301"),
        ([{"address": "[::]:11301"}], "[::1]:11301"),
        ([{"address": "1:2", "tls": _TLS}, {"address": "unix:/s", "identity": ["token", "unix_user"]}], "unix:/s"),
        ([{"address": "unix:/t", "identity": "token"}, {"address": "h:3", "identity": "address"}], "h:3"),
        ([{"address": "unix:/t", "identity": "token"}], "unix:/t"),
        ([{"address": "h:1", "proxy": "10.0.0.0/8"}, {"address": "h:2", "tls": _TLS}], "give --tls, or an address"),
    ],
)
def test_the_server_of_settings_with_listeners(tmp_path: Path, listeners: list[dict[str, object]], found: str) -> None:
    """The first one without TLS and proxy, those for tokens last; an address of -l comes before all of them."""
    path = tmp_path / "settings"
    path.write_text(json.dumps({"listeners": listeners}))
    try:
        assert str(server_of(load({}, {}, str(path))[0])) == found
    except ConfigError as error:
        assert found in str(error)
    assert str(server_of(load({"listen": ("h",)}, {}, str(path))[0])) == "h:11300"


def test_the_server_of_settings_with_tls(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    user, node = {"address": "h:2", "tls": _TLS}, {"address": "h:1", "tls": _TLS | {"client_ca": "a"}, "nodes": ["n"]}
    for listeners, found in (([{"address": "h:3"}, node, user], "h:2"), ([node], "h:1")):
        path.write_text(json.dumps({"listeners": listeners}))
        assert str(server_of(load({}, {}, str(path))[0], tls=True)) == found
    path.write_text(json.dumps({"listeners": [{"address": "h:3"}]}))
    with pytest.raises(ConfigError, match="give an address"):
        server_of(load({}, {}, str(path))[0], tls=True)


HERE, THERE, SOCKET = Address("127.0.0.1", "11300"), Address("10.0.0.5", "11300"), Address("/run/s", None)


@pytest.mark.parametrize(
    ("said", "server", "found"),
    [
        ("127.0.0.1:8080", HERE, "127.0.0.1:8080"),
        ("[::1]:8080", HERE, "[::1]:8080"),
        ("0.0.0.0:8080", THERE, "10.0.0.5:8080"),
        ("0.0.0.0:8080", SOCKET, "127.0.0.1:8080"),
        ("10.0.0.5:8080", THERE, "10.0.0.5:8080"),
        ("unix:/run/web", HERE, "unix:/run/web"),
        ("unix:/run/web,[::]:8080", THERE, "10.0.0.5:8080"),
        ("127.0.0.1:8080", SOCKET, "127.0.0.1:8080"),
        ("https://127.0.0.1:8080", HERE, "https://127.0.0.1:8080"),
        ("https://[::]:8443, unix:/run/web", THERE, "https://10.0.0.5:8443"),
        ("https://192.0.2.1:80", THERE, None),
        ("127.0.0.1:8080", THERE, None),
        ("unix:/run/web", THERE, None),
        ("192.0.2.1:80", HERE, None),
        ("192.0.2.1:80", THERE, None),
        ("", HERE, None),
        ("what", HERE, None),
        (":", HERE, None),
    ],
)
def test_a_token_goes_to_no_other_host(said: str, server: Address, found: str | None) -> None:
    """A server could name any address in its statistics, and would be sent the token."""
    api_address = address.of_api(said, server)
    assert (None if api_address is None else str(api_address)) == found


@pytest.mark.parametrize(
    "where", ["unix:", "ftp://x", "http://", "http://a:b@c", "http://x:99999", "http://x/?a=1", ""]
)
def test_what_is_no_address_of_an_api(where: str) -> None:
    with pytest.raises(api.BadAddress):
        api.Api(where, None, 1, "test")


# Filters


def test_ids_are_ids() -> None:
    assert select.parse(["1", "22", "1"], bare_words=False).ids == (1, 22)


def test_what_the_protocol_can_follow() -> None:
    found = select.parse(["tube:mail*,x", "-tube:mail/3", "state:ready,buried", "-state:ready"], bare_words=False)
    assert (set(found.states), found.beyond) == ({"buried"}, None)
    assert found.filter == "tube:mail*,x -tube:mail/3 state:ready,buried -state:ready"
    assert found.matching(["mail", "mail/2", "mail/3", "post", "x"]) == ["mail", "mail/2", "x"]
    assert found.exact_tubes is None
    assert select.parse(["tube:/a/b/,c"], bare_words=False).exact_tubes == ("/a/b/", "c")
    assert select.parse(["-tube:a"], bare_words=False).exact_tubes is None


@pytest.mark.parametrize(
    ("words", "beyond"),
    [
        ("tube:a age>1h", "age>1h"),
        ("tube:a id:1..2 pri<5", "id:1..2"),
        ('tube:a body:"user 42"', 'body:"user 42"'),
        (r"BODY:/a \/ b/i tube:a", r"BODY:/a \/ b/i"),
    ],
)
def test_what_only_the_server_can_follow(words: str, beyond: str) -> None:
    assert select.parse([words], bare_words=False).beyond == beyond
    assert select.parse(words.split(" "), bare_words=False).filter == words


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("mail", "mail could mean anything; write tube:mail, or body:mail, or ids alone"),
        ("-mail", "-mail could mean anything; write body:-mail"),
        ("tube:mail 17", "17 could mean anything"),
        ('body:"a b" mail', "mail could mean anything"),
        ('"body:x"', '"body:x" could mean anything'),
        ("", "say which jobs"),
        ("tub:mail", 'There is no "tub" to filter by, only age, body,'),
        (
            "state:raedy",
            'There is no state "raedy", only ready, delayed, reserved, buried (character 7 of state:raedy)',
        ),
        ("0", "ids go from 1"),
        ("9223372036854775808", "ids go from 1"),
        ("tube:" + "x" * 2000, "A filter has at most 2000 characters"),
    ],
)
def test_a_word_that_could_mean_more_than_its_author_thinks_is_refused(words: str, text: str) -> None:
    with pytest.raises(select.BadSelection) as caught:
        select.parse(words.split(" "), bare_words=False)
    assert str(caught.value).startswith(text)


def test_a_bare_word_looks_for_bodies_where_nothing_is_changed() -> None:
    assert select.parse(["mail"], bare_words=True).beyond == "mail"


# Shapes


def test_a_number_that_is_none_is_nonsense() -> None:
    for value in ("", "x", "1.5", "٣", "1_000", "1" * 30):
        with pytest.raises(Nonsense):
            shapes.number({"key": value}, "key")
    assert shapes.number({"key": "-5"}, "key") == -5


def test_what_geventstalk_tells_beyond_beanstalkd() -> None:
    facts = {f"current-jobs-{state}": "0" for state in ("urgent", *STATES)}
    facts |= dict.fromkeys(("current-using", "current-watching", "current-waiting", "pause", "pause-time-left"), "0")
    assert not {"ages", "latency"} & shapes.tube({**facts, "name": "x"}, asker_in="x").keys()
    facts |= {f"oldest-{state}-age": "7" for state in STATES} | {"name": "x", "current-jobs-ready": "2"}
    for part in ("queued", "worked"):
        facts |= {f"{part}-p50": "0.000000", f"{part}-p95": "0.250000", f"{part}-p99": "1.500000"}
    found = shapes.tube(facts, asker_in="x")
    assert found["ages"] == {"ready": 7, "delayed": None, "reserved": None, "buried": None}
    assert (found["using"], found["watching"]) == (0, 0), "never below 0"
    assert found["latency"]["worked"] == {"p50": None, "p95": 0.25, "p99": 1.5}
    for text in ("soon", "nan", "-1.0", "1e9", "", "."):
        with pytest.raises(Nonsense):
            shapes.tube({**facts, "worked-p99": text}, asker_in="x")
    assert "rates" not in found
    for event in ("put", "reserve", "delete", "timeout", "bury"):
        facts |= {f"{event}-rate-1m": "1.25", f"{event}-rate-15m": "0.5"}
    assert shapes.tube(facts, asker_in="x")["rates"]["bury"] == {"m1": 1.25, "m15": 0.5}


def test_what_the_api_tells_of_a_job_is_checked() -> None:
    facts = {
        "id": "1",
        "tube": "x",
        "state": "ready",
        **dict.fromkeys(("pri", "age", "delay", "ttr", "time-left"), "1"),
    }
    facts |= dict.fromkeys(("reserves", "timeouts", "releases", "buries", "kicks"), "0")
    job = shapes.job(facts, b"x", 10)
    assert shapes.checked_job(job) == job
    fine = (("tube", "x"), ("time_left_s", None), ("tags", None))
    others: list[Any] = [None, "x", [], {}, {"encoding": "base64", "data": "?", "whole": True}]
    spoilt: list[Any] = [{**job, key: value} for key in job for value in others if (key, value) not in fine]
    spoilt += [{name: job[name] for name in job if name != key} for key in job]
    for answer in [*spoilt, None, [], "x", 1]:
        with pytest.raises(Nonsense):
            shapes.checked_job(answer)


@pytest.mark.parametrize(
    ("body", "most", "shape"),
    [
        (b"", 9, {"encoding": "text", "data": "", "whole": True}),
        (b"abc", 2, {"encoding": "text", "data": "ab", "whole": False}),
        ("aé".encode(), 2, {"encoding": "text", "data": "a", "whole": False}),
        ("a\U0001f600".encode(), 4, {"encoding": "text", "data": "a", "whole": False}),
        (b"a\xff", 2, {"encoding": "base64", "data": "Yf8=", "whole": True}),
        (b"a\xffxxxx", 2, {"encoding": "base64", "data": "Yf8=", "whole": False}),
        (b"\xff\xff\xffxxx", 3, {"encoding": "base64", "data": "////", "whole": False}),
        (b"\xff" * 9, 5, {"encoding": "base64", "data": "//////8=", "whole": False}),
    ],
)
def test_a_body_is_text_where_it_can_be(body: bytes, most: int, shape: dict[str, object]) -> None:
    assert body_shape(body, len(body), most) == shape


# What is shown


def test_ages_sizes_and_rates() -> None:
    ages = {0: "0 s", 45.9: "45 s", 60: "1 min", 725: "12 min 5 s", 11520: "3 h 12 min", 187200: "2 d 4 h", -3: "0 s"}
    assert {seconds: show.age(seconds) for seconds in ages} == ages
    assert show.age(86400 * 2000) == "2,000 d"
    times = {0.00085: "850 µs", 0.0011: "1.1 ms", 0.012: "12 ms", 1.5: "1.5 s", 59.9: "59.9 s", 200: "3 min 20 s"}
    assert {seconds: show.time_of(seconds) for seconds in times} == times
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 64_000: "64.0 kB", 999_949: "999.9 kB", 999_950: "1.0 MB"}
    assert {count: show.size(count) for count in sizes} == sizes
    assert [show.rate(value) for value in (None, 0, 0.25, 12, 1204)] == ["-", "0", "0.25", "12.0", "1,204"]


COLUMNS = (Column("NAME", flexible=True), Column("A", right=True), Column("B", right=True, rank=1))


def test_a_table_is_aligned() -> None:
    assert show.table(COLUMNS, [["mail", "1,204", "5"], ["r", "7", "12"]], None) == [
        "NAME      A   B",
        "mail  1,204   5",
        "r         7  12",
    ]


def test_a_narrow_table_cuts_names_and_then_leaves_columns_out() -> None:
    rows = [["x" * 30, "1,204", "55555"]]
    assert show.table(COLUMNS, rows, 30)[1] == "x" * 15 + "…  1,204  55555"
    assert show.table(COLUMNS, rows, 20)[1] == "x" * 12 + "…  1,204"
    assert show.table(COLUMNS, rows, 5)[1] == "x" * 11 + "…  1,204"


def test_no_width_breaks_a_table() -> None:
    rows = [["x" * 30, "1,204", "55555"], ["日本" * 9, "1", "2"], ["", "", ""]]
    for room in range(1, 60):
        for line in show.table(COLUMNS, rows, room):
            assert show.cells(line) <= max(room, 12 + 2 + 5)


def test_facts_give_way_on_a_narrow_terminal() -> None:
    facts = [("5 ready", 0), ("1 reserved", 1), ("7 buried", 0), ("0 urgent", 2)]
    assert show.facts_line("jobs", facts, None) == "jobs      5 ready   1 reserved   7 buried   0 urgent"
    assert show.facts_line("jobs", facts, 50) == "jobs  5 ready   1 reserved   7 buried   0 urgent"
    assert show.facts_line("jobs", facts, 40) == "jobs  5 ready  1 reserved  7 buried"
    assert show.facts_line("jobs", facts, 30) == "jobs  5 ready  7 buried"
    assert show.facts_line("127.0.0.1:11300", facts, None).startswith("127.0.0.1:11300  5 ready   ")
    for room in range(1, 70):
        assert show.cells(show.facts_line("jobs", facts, room)) <= room


# Bug: No tube was shown.
@pytest.mark.parametrize("there_is", [0, 1, 4, 200])
def test_a_low_terminal_shows_tubes_all_the_same(there_is: int) -> None:
    """The lines about the server once took all ten lines of a terminal."""
    jobs = dict.fromkeys(("urgent", *STATES), 0)
    tube = {"jobs": jobs, "per_s": None, "watching": 0, "waiting": 0, "paused_s": 0, "pause_left_s": 0}
    tube["trouble"] = sampling.trouble_of(tube)._asdict()
    times = dict.fromkeys(("queued", "worked"), dict.fromkeys(("p50", "p95", "p99")))
    server = {"version": "1", "uptime_s": 1, "draining": True, "jobs": jobs, "per_s": None, "tubes": there_is}
    server |= {"connections": dict.fromkeys(("open", "producers", "workers", "waiting"), 0), "latency": times}
    sample = sampling.Sample(0.0, 0.0, server, [{**tube, "name": f"tube-{at}"} for at in range(there_is)])
    for height in range(5, 30):
        for room in (20, 40, 80, None):
            head, lines = client_top.lines(HERE, sample, "name", room, height)
            assert len(head) + len(lines) <= height
            assert len(head) == 5 or height < 11
            assert "DRAINING" in head[0] or room == 20
            shown = sum(line.startswith("tube-") for line in lines)
            assert shown == there_is or (shown > 0 and lines[-1] == f"and {there_is - shown} more tubes")


def test_top_says_where_bodies_are() -> None:
    facts = {
        "memory-max": 64_000_000,
        "memory-bytes": 61_234_567,
        "memory-jobs-on-disk": 1,
        "memory-bytes-on-disk": 9_000,
    }
    facts |= {"memory-loads": 4321, "memory-puts-refused": 0}
    keys = ["pid", "uptime", "total-jobs", "job-timeouts", "current-tubes", "max-job-size", "total-connections"]
    keys += [f"cmd-{name}" for name in ("reserve", "reserve-with-timeout", "delete", "release", "bury")]
    keys += [f"current-{name}" for name in ("connections", "producers", "workers", "waiting")]
    keys += [f"current-jobs-{name}" for name in ("urgent", *STATES)]
    for refused, said in (0, ""), (2, "2 puts refused"):
        every = {**dict.fromkeys(keys, 0), **facts, "memory-puts-refused": refused}
        server = shapes.server({key: str(value) for key, value in every.items()})
        assert server["memory"]["bodies"] == {
            "max_bytes": 64_000_000,
            "bytes": 61_234_567,
            "jobs_on_disk": 1,
            "bytes_on_disk": 9_000,
            "loads": 4321,
            "refused_puts": refused,
        }
        server["per_s"] = None
        head, _ = client_top.lines(HERE, sampling.Sample(0.0, 0.0, server, []), "name", None, None)
        (line,) = [line for line in head if line.startswith("bodies")]
        for part in ("61.2 MB of 64.0 MB in memory", "9.0 kB on disk", "1 job there", "4,321 came back", said):
            assert part in line
        assert ("refused" in line) == bool(refused)


def test_progress_counts_where_the_end_is_not_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client_progress, "_SHOWN_AFTER_S", 0.0)
    with progress("put", 0) as bar:
        bar.reach(1)
    assert capsys.readouterr() == ("", ""), "there is no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("put", 0) as bar:
        bar.reach(1204)
        bar.reach(1205)  # too soon to be shown
    assert capsys.readouterr() == ("", "\rput: 1,204\n")


def test_wide_characters_take_two_cells() -> None:
    assert show.cells("日本e\u0301") == 5
    assert show.cut("日本語", 5) == "日本…"
    assert show.cut("日本語", 4) == "日…"
    assert show.cut("abc", 0) == ""


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "a\nb", "a\rb", "\x9b31m", "\u202eabc", "\u2028", "\ud800"])
def test_nothing_of_a_job_moves_the_cursor(text: str) -> None:
    shape = {"encoding": "text", "data": text.replace("\n", "\r"), "whole": True}
    shown = [*show.table((Column("A"),), [[text]], None), show.body_line(shape), *show.body_lines(shape)]
    assert all(line.isprintable() for line in shown)


def test_bodies() -> None:
    assert show.body_line({"encoding": "text", "data": "a\nb", "whole": False}) == "a\\nb…"
    assert show.body_line({"encoding": "base64", "data": "/wA=", "whole": True}) == "hex ff 00"
    assert show.body_lines({"encoding": "text", "data": "a\tb\n\x1b", "whole": True}) == ["a\tb", "\\x1b"]
    (line,) = show.body_lines({"encoding": "base64", "data": "/0Fi", "whole": True})
    assert line == f"00000000  {'ff 41 62':<47}  .Ab"


# What happened between two looks


def job(id: int, state: str, **counts: int) -> dict[str, Any]:
    zero = dict.fromkeys(("reserves", "timeouts", "releases", "buries", "kicks"), 0)
    return {"id": id, "state": state, "counts": {**zero, **counts}}


def look(*jobs: dict[str, Any], put: int = 0, deleted: int = 0, fresh: tuple[int, ...] = ()) -> Look:
    return Look({one["id"]: one for one in jobs}, lambda id: id < 100, put, deleted, frozenset(fresh))


def happened(before: Look, now: Look, where: dict[int, str] | None = None) -> list[tuple[str, int | None, int]]:
    return [(event.event, event.id, event.jobs) for event in compare(before, now, (where or {}).get)]


def test_what_happened_to_a_job() -> None:
    cases = [
        (job(1, "ready"), job(1, "reserved", reserves=1), ["reserved"]),
        (job(1, "ready"), job(1, "buried", reserves=1, buries=1), ["reserved", "buried"]),
        (job(1, "reserved", reserves=1), job(1, "reserved", reserves=2, timeouts=1), ["timed out", "reserved"]),
        (job(1, "reserved", reserves=1), job(1, "delayed", reserves=1, releases=1), ["released"]),
        (job(1, "buried"), job(1, "ready", kicks=1), ["kicked"]),
        (job(1, "delayed"), job(1, "ready"), ["ready"]),
        (job(1, "ready"), job(1, "ready"), []),
    ]
    for old, new, events in cases:
        assert [event for event, _, _ in happened(look(old), look(new))] == events


def test_jobs_that_come_and_go() -> None:
    before = look(job(1, "ready"), job(2, "ready"), job(200, "ready"), put=3)
    now = look(job(3, "ready"), job(4, "reserved", reserves=1), put=9, deleted=5, fresh=(4,))
    assert happened(before, now, {2: "other"}) == [
        ("deleted", 1, 1),
        ("moved", 2, 1),
        ("put", 4, 1),
        ("reserved", 4, 1),
        ("put", None, 5),
        ("deleted", None, 4),
    ]


def test_a_tube_that_was_gone_meanwhile_counts_from_0_again() -> None:
    assert happened(look(put=9, deleted=9), look(put=1)) == []


def test_an_event_is_plain_data() -> None:
    assert vars(Event("put", jobs=2)) == {"event": "put", "id": None, "job": None, "jobs": 2, "tube": None}


# Signals


def test_a_signal_waits_for_what_must_be_whole() -> None:
    done = []
    with pytest.raises(Stopped) as caught, signals():
        with whole():
            os.kill(os.getpid(), signal.SIGINT)
            with whole():
                done.append("inner")
            done.append("outer")
        done.append("behind")
    assert (done, caught.value.number) == (["inner", "outer"], signal.SIGINT)


def test_a_second_signal_does_not_wait() -> None:
    done = []
    with pytest.raises(Stopped) as caught, signals(), whole():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("first")
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("second")
    assert (done, caught.value.number) == (["first"], signal.SIGTERM)
    with signals(), whole():
        done.append("nothing is left over")


# Tokens


@pytest.mark.parametrize("user", ["", "a b", "\u202ea", "x" * 65, "a\nb"])
@pytest.mark.parametrize("action", ["new", "choose"])
def test_a_token_is_for_a_name_that_the_file_of_users_takes(bare: Runner, action: str, user: str) -> None:
    ran = bare("token", action, user)
    assert (ran.code, ran.out, ran.err.count("\n")) == (EXIT_USAGE, "", 1) and "the name of a user" in ran.err
