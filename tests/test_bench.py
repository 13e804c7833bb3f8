"""scripts/bench, scripts/soak, scripts/attack: their pieces, a row measured in earnest, proof that they find fault."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import os
import random
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from geventstalk._build import BUILD
from scripts.benchmark import __main__ as program
from scripts.benchmark import attack, backlog, bodies, cluster, curves, fronts, report, servers, soak, tails
from scripts.benchmark.load import Client, Load, LoadError, fill
from scripts.benchmark.prober import Waits, probing
from scripts.benchmark.rows import BY_NAME, ROWS, Scale, journals, throughput
from tests.support.postgres import require_postgres
from tests.support.process import ServerProcess, beanstalkd_path, free_port

TINY = Scale(seconds=0.2, jobs=2000, things=50)
PURE = servers.pure(sys.executable)
pytestmark = pytest.mark.when_changed(
    *("scripts/bench", "scripts/benchmark", "scripts/soak", "scripts/attack", "tests/test_bench.py")
)
needs_the_source = pytest.mark.skipif(BUILD == "compiled", reason="scripts/bench measures a tree of sources")


@pytest.fixture
def server() -> Iterator[servers.Server]:
    with servers.serving(PURE) as running:
        yield running


# the load


@pytest.mark.parametrize("depth", [1, 16])
@pytest.mark.parametrize("cycle", [True, False])
def test_the_load_counts_what_the_server_did(server: servers.Server, depth: int, cycle: bool) -> None:
    load = Load(server.port, connections=5, depth=depth, cycle=cycle)
    commands = load.work(0.2) + load.work(30.0, commands=3000)
    with Client(server.port) as client:
        stats = dict(line.split(b": ", 1) for line in client.text(b"stats\r\n").splitlines() if b": " in line)
    load.close()
    done = sum(int(stats[b"cmd-" + name]) for name in (b"put", b"reserve-with-timeout", b"delete"))
    assert commands >= 3000
    # What is under way is done and not yet counted: at most one batch a connection.
    assert commands <= done <= commands + 5 * depth
    assert (int(stats[b"cmd-delete"]) > 0) == cycle


@pytest.mark.parametrize("depth", [1, 16])
def test_the_load_does_not_count_a_wrong_reply(depth: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            client, _ = listener.accept()
            with client, contextlib.suppress(ConnectionError):
                client.recv(65536)
                client.sendall(b"OUT_OF_MEMORY\r\n" * depth)
                client.recv(65536)

        thread = threading.Thread(target=refuse)
        thread.start()
        load = Load(listener.getsockname()[1], connections=1, depth=depth)
        with pytest.raises(LoadError, match="OUT_OF_MEMORY"):
            load.work(10.0)
        load.close()
        thread.join()


def test_replies_that_come_in_pieces_are_counted_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        load = Load(listener.getsockname()[1], connections=1, depth=3, cycle=False)
        client, _ = listener.accept()
        with client:
            assert load.work(0.1) == 0
            counts = []
            for piece in (b"INSER", b"TED 1\r\nINSERTED 2\r\nIN", b"SERTED 3\r\n"):
                client.sendall(piece)
                counts.append(load.work(0.1))
            assert counts == [0, 2, 1]
            assert client.recv(65536).count(b"put ") == 6  # the next batch is on its way
        load.close()


def test_a_server_that_stays_silent_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Client(listener.getsockname()[1]) as client:
        client.sock.settimeout(0.1)
        with pytest.raises(LoadError, match="silent"):
            client.ask(b"stats\r\n", b"OK ")


def test_fill_puts_exactly_as_many_as_asked(server: servers.Server) -> None:
    fill(server.port, 2345)
    with Client(server.port) as client:
        assert b"current-jobs-ready: 2345\n" in client.text(b"stats\r\n")


def test_the_prober_measures_something(server: servers.Server) -> None:
    with probing(server.port, server.pid) as waits, Client(server.port) as client:
        for _ in range(100):
            client.text(b"stats\r\n")
    assert waits.requests > 0
    assert 0 < waits.p50_ms <= waits.worst_ms
    assert waits.net_worst_ms <= waits.worst_ms


# the table


@needs_the_source
@pytest.mark.slow
@pytest.mark.skipif(beanstalkd_path() is None, reason="beanstalkd is not installed")
def test_a_row_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.json"
    arguments = ["plain", "--builds", "beanstalkd,pure", "--runs", "2", "--seconds", "0.5", "--json", str(results)]
    assert program.main(arguments) == 0
    said = capsys.readouterr().out
    assert re.search(r"^plain +beanstalkd +[\d,]+ .* pure +[\d,]+ .*busy", said, re.MULTILINE)
    found = report.load_results(results)["rows"]["plain"]
    assert [len(found[name]) for name in ("beanstalkd", "pure")] == [2, 2]
    # No bound below: on a busy machine both servers may get less than a tick of the processor in half a second.
    assert all(value > 0 and 0 <= busy < 1.5 for runs in found.values() for value, busy, *_ in runs)
    assert program.main(["--from", str(results)]) == 0
    assert "50 connections" in capsys.readouterr().out


# Bug: A server that was silent for a minute ended scripts/bench, and all figures measured before were gone.
@needs_the_source
@pytest.mark.slow
def test_what_was_measured_is_kept_when_the_rest_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(curves, "measure", fails)
    kept = tmp_path / "results.json"
    words = ["plain", "--curves", "--table", "--runs=1", "--seconds=0.2", "--builds=pure", f"--json={kept}"]
    assert program.main(words) == 1
    assert "timed out" in capsys.readouterr().err
    assert report.load_results(kept)["rows"]["plain"]["pure"]


@pytest.mark.parametrize("name", ["tubes", "batches", "blocked", "restart", "restart-churned", "memory", "f0-put-100"])
def test_every_kind_of_row_can_be_measured(name: str) -> None:
    row = BY_NAME[name]
    try:
        sample = row.measure(PURE, row, TINY, 0)
    finally:
        journals.remove()
    assert sample.value > 0
    assert sample.server_busy > 0


def test_a_run_that_is_lost_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = itertools.count()

    def work(load: Load, seconds: float, commands: int = 0) -> int:
        if next(measured) == 3:  # the interval of the second run
            raise LoadError("the server was silent for 60 s")
        return 1

    monkeypatch.setattr(Load, "work", work)
    table = program.measure_table([BY_NAME["plain"], BY_NAME["plain-1"]], [PURE], 3, TINY, 0)
    assert {name: len(found["pure"]) for name, found in table.items()} == {"plain": 2, "plain-1": 3}
    assert "plain: a run of pure is lost: the server was silent for 60 s" in capsys.readouterr().err


def test_a_slow_run_goes_on_until_there_is_something_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([5, 0, 0, 7])
    monkeypatch.setattr(Load, "work", lambda *_: next(counts))
    assert throughput(PURE, BY_NAME["plain-1"], TINY, 0).value > 0


def test_rows_say_how_many_there_really_were() -> None:
    row = BY_NAME["restart"]
    assert row.said(Scale()) == "restart with 1,000,000 jobs until served"
    assert row.said(program.QUICK) == "restart with 100,000 jobs until served"
    assert "10,000 jobs that followed" in BY_NAME["restart-churned"].said(program.QUICK)
    rows = {"memory": {"pure": [[500.0, 0.9, 0.5]]}}
    assert "memory a job, 2,000 jobs, no journal" in report.table(rows, TINY)[2]


def test_a_row_without_answers_is_no_result(tmp_path: Path) -> None:
    broken = servers.Build("broken", (sys.executable, "-c", "raise SystemExit(3)"), tmp_path)
    with pytest.raises(LoadError, match="exit code 3"):
        throughput(broken, BY_NAME["plain"], TINY, 0)


def test_the_table_says_what_is_met_missed_and_doubtful() -> None:
    rows = {
        "plain": {"beanstalkd": [[100.0, 1, 0.5]], "pure": [[80.0, 1, 0.5]], "compiled": [[90.0, 0.5, 0.5]]},
        "restart": {"beanstalkd": [[3.0, 1, 0]], "pure": [[3.3, 1, 0]], "compiled": [[3.0, 1, 0]]},
    }
    lines = report.table(rows)
    plain, restart = lines[2:4]
    assert "**0.80** (at least 0.75: met)" in plain
    assert "**0.90** (at least 1: missed)" in plain
    assert "90.0 ±0 % *" in plain
    assert plain.endswith("| 10,000 / 12,500 / 5,556 |"), "processor time a command"
    assert restart.endswith("| - |")
    assert "**1.10** (at most 1.2: met)" in restart
    assert "**1.00** (at most 0.8: missed)" in restart
    assert "do not trust" in lines[-1]


def test_processor_time_is_that_of_the_cheapest_run_with_its_part_in_user_space() -> None:
    runs = [[100.0, 0.5, 0.5, 0.1], [100.0, 0.4, 0.5, 0.3], [10.0, 0.4, 0.5, 0.0]]
    line = report.table({"plain": {"beanstalkd": runs, "pure": [run[:3] for run in runs]}})[2]
    assert line.endswith("| 4,000 (3000.0) / 4,000 / - |")


def test_the_part_in_user_space_is_a_share_of_what_was_spent() -> None:
    before = servers.Spent(1.0, 10, 20)
    assert servers.Spent(3.0, 13, 29).since(before) == (2.0, 0.5)
    assert servers.Spent(1.0, 10, 20).since(before) == (0.0, 0.0)
    own = servers.spent(os.getpid())
    assert own.all_s > 0 and own.user > 0


def test_rows_have_names_of_their_own_and_reasons_to_be_idle() -> None:
    assert len(BY_NAME) == len(ROWS)
    assert all(row.why_idle for row in ROWS if "-f0" in row.flags)


def test_half_the_way_from_the_least_to_the_greatest_is_the_spread() -> None:
    assert report.spread([[90.0], [100.0], [120.0]]) == pytest.approx(0.15)


# the page


def test_the_page_has_a_place_for_every_part() -> None:
    for key, (name, _) in report.PARTS.items():
        text = report.PAGES.get(key, report.PAGE).read_text(encoding="utf-8")
        filled = report.fill_page(text, name, ["a new line"])
        assert "<!-- bench:%s -->\na new line\n<!-- /bench:%s -->" % (name, name) in filled  # noqa: UP031
        assert report.fill_page(filled, name, ["a new line"]) == filled


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no marks for table"):
        report.fill_page("nothing here", "table", [])


@pytest.mark.parametrize(
    "argument", [["nonsense"], ["--runs", "many"]], ids=["a row that is not there", "a number that is none"]
)
def test_a_wrong_argument_is_one_line(argument: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        program.main(argument)
    assert raised.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("scripts/bench: error: ")


# growth and tails


def test_sizes_go_up_by_tens() -> None:
    assert curves.sizes(1_000_000) == [1, 10, 100, 1000, 10_000, 100_000, 1_000_000]
    assert curves.sizes(50) == [1, 10, 50]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(curves.curves(TINY))))
def test_every_curve_can_be_measured(number: int) -> None:
    curve = curves.curves(TINY)[number]
    assert 0 < curves.cost_us(PURE, curve, min(curve.most, 50), 0.2, 0) < 10_000


@pytest.mark.slow
def test_every_case_of_large_work_ends() -> None:
    """Those that wait for seconds to pass are left out."""
    for case in tails.cases(TINY):
        if "fall due" not in case.title and "expire" not in case.title:
            waits = tails.run(case, PURE, TINY, 0)
            assert waits.get("requests", 0) > 0, (case.title, waits)


# front-end processes, and a backlog


@pytest.mark.slow
def test_what_fronts_cost_is_measured_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts, "ROWS", fronts.ROWS[2:4])
    core = min(os.sched_getaffinity(0))
    found = fronts.measure([PURE], Scale(seconds=0.2), core, core, 1)
    for row in found["rows"]:
        ((rate, engine_us, _, front_us, _),) = row["kinds"]["front"]
        ((_, alone_us, _),) = row["kinds"]["alone"]
        assert rate > 0 and engine_us > 0 and front_us > 0 and alone_us > 0, row
    lines = report.fronts_part({"fronts": found, "machine": "a machine", "taken": "today"})
    assert len(lines) == 4 + len(fronts.ROWS)
    assert "the front on the core of the load" in lines[0]


def test_figures_of_fronts_are_the_least_processor_time_and_median_rates() -> None:
    kinds = {
        "reference": [[100.0, 5.0, 0.5], [300.0, 4.0, 0.6], [200.0, 6.0, 0.1]],
        "front": [[10.0, 3.0, 2.0, 8.0, 1.0], [30.0, 4.0, 1.0, 7.0, 2.0], [20.0, 5.0, 5.0, 9.0, 9.0]],
    }
    found = {"build": "pure", "cores": "a core each", "runs": 3, "rows": [{"title": "a row", "kinds": kinds}]}
    line = report.fronts_part({"fronts": found, "machine": "a machine", "taken": "today"})[-1]
    assert line == "| a row | 4.00 (0.6) | - | 3.00 (2.0) | 7.00 (2.0) | 200 | - | 20.0 |"


@pytest.mark.slow
def test_what_bodies_cost_is_measured_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SIZES", {"1 kB": (1 << 10, 5), "1 MB": (1 << 20, 2)})
    monkeypatch.setattr(bodies, "POLICIES", {"no journal": (), "`-f0`": ("-f0",)})
    monkeypatch.setattr(bodies, "_DEVICE_BYTES", 1 << 20)
    found = bodies.measure([PURE], Scale(seconds=0.2), min(os.sched_getaffinity(0)), 1)
    titles = ["1 kB, no journal", "1 kB, `-f0`", "1 MB, no journal", "1 MB, `-f0`"]
    assert [row["title"] for row in found["rows"]] == titles
    for row in found["rows"]:
        ((rate, all_us, user_us, p99_ms),) = row["builds"]["pure"]
        assert rate > 0 and all_us >= user_us >= 0 and p99_ms > 0, row
    lines = report.bodies_part({"bodies": found, "machine": "a machine", "taken": "today"})
    assert len(lines) == 4 + 4 and "MB/s" in lines[0] and lines[2].count("|") == lines[4].count("|") == 5


@pytest.mark.slow
@pytest.mark.long
def test_a_backlog_is_measured_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "GIVEN_BACK_S", 0.1)
    scale = Scale(seconds=0.1, jobs=20_000, things=50)
    found = backlog.measure([PURE], scale, min(os.sched_getaffinity(0)), 1)
    ((rate, _, size),), ((rate_of_cap, _, size_with_cap),) = found["rates"]["pure"].values()
    assert rate > 0 and rate_of_cap > 0
    assert size_with_cap < size - 5, "20 MB of bodies, of which 5 may be in memory"
    full, left, fresh = found["drained"]["pure"]
    assert full > fresh + 2 and left > 0
    lines = report.backlog_part({"backlog": found, "machine": "a machine", "taken": "today"})
    assert [line.split(" | ")[0] for line in lines if line.startswith("| pure")] == ["| pure"] * 2
    assert f"**{rate_of_cap / rate:.2f}**" in lines[4]


# the soak


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param([], id="plain", marks=pytest.mark.long),
        pytest.param(["--io-processes", "2", "--max-memory", "500k"], id="fronts-bound"),
    ],
)
def test_a_short_soak_ends_with_a_verdict(capsys: pytest.CaptureFixture[str], shape: list[str]) -> None:
    """Its verdict on growth means nothing after seconds. Its other findings count."""
    soak.main(["--minutes", "0.08", "--seed", "1", "--build", "pure", "--jobs", "3000", *shape])
    said = capsys.readouterr().out
    assert re.search(r"journal check: \d+ segments, \d+ records, \d+ jobs, 0 findings", said)
    assert len(re.findall(r"commands/s  server" + ".*; front" * 2 * bool(shape), said)) >= 5
    assert ("; front" in said) == bool(shape)
    loads = [int(found) for found in re.findall(r"(\d+) came back", said)]
    assert (len(loads) >= 5 and loads[-1] > loads[0] > 0) if shape else not loads
    assert "verdict: " in said
    assert not re.search(r"FAULT: (?![\w ]+ grew)", said)


ENGINE = soak.Process(1, 50.0, 40, 12, 0.5)
FRONT = soak.Process(2, 20.0, 30, 1, 0.5)


def reading(engine: soak.Process = ENGINE, front: soak.Process = FRONT, **changed: Any) -> soak.Reading:
    memory = {"max": 100, "bytes": 90}
    flat = soak.Reading(1.0, 1000.0, (engine, FRONT, front), 0.1, 1.0, 5.0, 3.0, 30, memory)
    return dataclasses.replace(flat, **changed)


@pytest.mark.parametrize(
    ("grown", "said"),
    [
        (reading(dataclasses.replace(ENGINE, rss_mib=60.0)), "memory grew from 50.0 to 60.0"),
        (reading(dataclasses.replace(ENGINE, descriptors=60)), "descriptors grew from 40.0 to 60.0"),
        (reading(dataclasses.replace(ENGINE, threads=15)), "threads grew from 12.0 to 15.0"),
        (reading(front=dataclasses.replace(FRONT, rss_mib=30.0)), "memory of front 2 grew from 20.0 to 30.0"),
        (reading(front=dataclasses.replace(FRONT, descriptors=50)), "descriptors of front 2 grew from 30.0 to 50.0"),
        (reading(front=dataclasses.replace(FRONT, pid=3)), "processes did not stay the same"),
        (reading(p50_ms=0.9), "p50 grew from 0.1 to 0.9"),
        (reading(p99_ms=9.0), "p99 grew from 1.0 to 9.0"),
        (reading(journal_mib=9.0), "journal grew from 3.0 to 9.0"),
    ],
)
def test_the_soak_finds_what_grows(grown: soak.Reading, said: str) -> None:
    flat = [reading() for _ in range(10)]
    assert soak.faults(flat) == []
    assert soak.faults([*flat[:6], grown, grown, grown, grown]) == [said]
    # Once longer is not grown: others on the machine make a request wait, too.
    assert soak.faults([*flat[:9], reading(p99_ms=100.0)]) == []


def test_the_soak_finds_a_bound_that_is_broken() -> None:
    flat = [reading() for _ in range(9)]
    assert soak.faults([*flat, reading(memory={"max": 100, "bytes": 101})]) == [
        "bodies took 101 bytes of memory, and 100 is the bound"
    ]


# the attack


@pytest.mark.slow
def test_a_short_attack_ends_with_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """Waits and growth mean nothing after seconds on a busy machine; the other findings do."""
    attack.main(["--minutes", "0.05", "--seed", "1", "--build", "pure"])
    said = capsys.readouterr().out
    assert re.search(r"journal check: \d+ segments, \d+ records, \d+ jobs, 0 findings", said)
    assert len(re.findall("/healthz .* at most  [1-9]", said)) == attack.INTERVALS_MIN
    assert re.search(r"with attacks: [\d,]+ requests of a sane client", said)
    assert "verdict: " in said
    assert not re.search("FAULT: (?!a sane client waited|/healthz took|memory grew|threads grew)", said)


# Bug: Most requests of the attack named paths of an API that had another prefix by then, and were answered 404.
def test_the_attack_requests_what_there_is(start_server: Callable[..., ServerProcess]) -> None:
    port = free_port()
    server = start_server("--http", f"127.0.0.1:{port}")
    with Client(server.port) as client:
        client.ask(b"put 0 0 60 1\r\nx\r\n", b"INSERTED")
    found = {}
    for path in attack.PATHS:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            connection.request("GET", path.decode())
            found[path] = connection.getresponse().status
    wrong = {path: status for path, status in found.items() if status != 200}
    assert [*wrong.values()] == [404, 400] and b"/no" in wrong, wrong
    data = attack.changes(random.Random(1))
    for statuses, path in (({200, 202}, b" /api/v1/bulk "), ({201}, b" /api/v1/jobs ")):
        piece = next(
            each for each in data.split(b"POST") if each.startswith(path) and each[-1:] == b"}" and len(each) < 999
        )
        head, _, body = piece.partition(b"\r\n\r\n")
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            connection.request("POST", head.split()[0].decode(), body, {"Content-Type": "application/json"})
            assert connection.getresponse().status in statuses


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rss_mib": 60.0}, "memory grew from 50 to 60 MiB"),
        ({"rss_mib": 90.0}, "memory reached 90 MiB, 80 is the bound"),
        ({"threads": 9}, "threads grew from 3 to 9"),
        ({"health_s": 2.5}, "/healthz took 2.5 s"),
    ],
)
def test_the_attack_finds_what_grows(changed: dict[str, Any], said: str) -> None:
    flat = [attack.Reading(50.0, 400, 3, 0.1, 9)] * 9
    grown = [*flat[:5], *[dataclasses.replace(flat[0], **changed)] * 4]
    assert attack.faults(Waits(), Waits(net_p999_ms=9.9), flat, 80.0) == []
    assert said in attack.faults(Waits(), Waits(), grown, 80.0)


def test_the_attack_finds_a_sane_client_that_waits() -> None:
    flat = [attack.Reading(50.0, 400, 3, 0.1, 9)] * 9
    assert attack.faults(Waits(net_p999_ms=1.0), Waits(net_p999_ms=11.5), flat, 80.0) == [
        "a sane client waited 11.5 ms (p99.9), 1.0 ms without"
    ]


# Bug: scripts/bench threw stderr away, and the demo read stderr only when the server ended by itself.
def test_a_traceback_of_a_measured_server_is_a_failure(tmp_path: Path) -> None:
    program = (
        "import runpy, traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\n"
        "runpy.run_module('geventstalk', run_name='__main__')"
    )
    broken = servers.Build("broken", (sys.executable, "-c", program), servers.ROOT)
    server = servers.Server(broken)
    server.wait_ready()
    with pytest.raises(LoadError, match="broken wrote a traceback"):
        server.stop()
    server.kill()


# the cluster


@pytest.mark.slow
@pytest.mark.long
@needs_the_source
def test_the_cluster_is_measured_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    require_postgres()
    monkeypatch.setattr(cluster, "TAKEOVERS", 1)
    monkeypatch.setattr(cluster, "RATES", cluster.RATES[:1])
    found = cluster.measure([PURE], Scale(seconds=0.2, jobs=500), min(os.sched_getaffinity(0)), 1)
    (rate,) = found["rates"]
    assert all(values[0] > 50 for values in rate["values"]["pure"].values())
    assert [each["jobs"] for each in found["takeovers"]] == [0, 500]
    assert all(0 < each["seconds"][0] < 60 for each in found["takeovers"])
    lines = report.cluster_part({"cluster": found, "machine": "a machine", "taken": "today"})
    assert sum(line.startswith(f"| {rate['title']} | ") for line in lines) == 2, "rates, and processor time"
    assert any(line.startswith("| pure, 500 jobs in the queue | ") for line in lines)
