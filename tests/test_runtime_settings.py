"""Policies and schedules that are made at run time: they outlive the process, and go wherever the jobs go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from geventstalk.core.job import READY
from geventstalk.core.operate import DONE, SETTINGS_TUBE
from geventstalk.policies import Policies, Terms
from geventstalk.runtime_settings import RuntimeSettings, TooLarge
from geventstalk.tags import SETTINGS_BYTES_MAX, kept_settings, parse, parse_put
from geventstalk.turn.operations import SettlePauses
from tests.support.check import check
from tests.support.clients import until
from tests.support.clock import ManualClock
from tests.support.process import GEVENTSTALK, ServerProcess, free_port
from tests.support.web import Web
from tests.support.wire import Client
from tests.test_tags import Server

Starter = Callable[..., ServerProcess]


def test_what_is_made_at_run_time_stands_in_front() -> None:
    kept = RuntimeSettings()
    kept.of_file["policies"] = (("a", Terms(max_jobs=1)), ("*", Terms(max_jobs=2)))
    assert kept.text() == b""
    assert kept.load(kept.text_with("policies", "*", {"max_jobs": 3})) == []
    assert kept.load(kept.text_with("policies", "b", {"max_jobs": 4})) == []
    assert [(glob, terms.max_jobs) for glob, terms in kept.all("policies")] == [("*", 3), ("b", 4), ("a", 1)]
    assert kept.load(kept.text_with("policies", "*", {"max_jobs": 5})) == []
    assert [(glob, terms.max_jobs) for glob, terms in kept.all("policies")] == [("*", 5), ("b", 4), ("a", 1)]
    assert kept.load(kept.text_with("policies", "*", None)) == []
    assert [(glob, terms.max_jobs) for glob, terms in kept.all("policies")] == [("b", 4), ("a", 1), ("*", 2)]
    assert kept.entry("policies", "b") == {"max_jobs": 4} and kept.entry("policies", "a") is None
    again = RuntimeSettings()
    assert again.load(kept.text()) == [] and again.text() == kept.text()
    with pytest.raises(KeyError):
        kept.text_with("policies", "a", None)
    with pytest.raises(ValueError, match="policy of c: a policy has no key max"):
        kept.text_with("policies", "c", {"max": 1})
    with pytest.raises(TooLarge):
        kept.text_with("schedules", "s", {"cron": "@daily", "tube": "t", "body": "x" * SETTINGS_BYTES_MAX})


def test_a_setting_of_another_version_stays_and_does_not_count() -> None:
    kept = RuntimeSettings()
    text = json.dumps({"policies": {"a": {"newer": 1}, "b": {"tries": 1}}, "more": {}}).encode()
    (refused,) = kept.load(text)
    assert "a policy has no key newer" in refused
    assert [glob for glob, _ in kept.all("policies")] == ["b"] and kept.entry("policies", "a") == {"newer": 1}


@pytest.mark.parametrize("size", [1, 2, 3, 100, SETTINGS_BYTES_MAX])
def test_tags_hold_settings(size: int) -> None:
    text = os.urandom(size)
    tags = kept_settings(text)
    assert len(tags.text) < 1 << 16 and parse(tags.text).settings == text
    with pytest.raises(ValueError, match=r"no client can give this tag|too long"):
        parse_put(tags.text)


def settings_of(server: Server) -> bytes:
    return b"" if server.engine.rules is None else server.engine.rules.settings()


def test_the_engine_keeps_the_last_settings() -> None:
    server = Server(ManualClock())
    client = server.come()
    first = server.put(client)
    for text in (b"one", b"two" * 10_000, b"three"):
        assert server.engine.keep_settings(text, server.clock.ns) == DONE
        assert settings_of(server) == text and len(server.engine.rules.marks) == 1  # type: ignore[union-attr]
        check(server.engine)
        assert settings_of(Server(server.clock, server.log)) == text
    server.clock.pass_s(100_000_000)
    again = Server(server.clock, server.log)
    assert settings_of(again) == b"three" and SETTINGS_TUBE not in again.engine.tubes
    assert again.job(first).state == READY and len(again.engine.jobs) == 1
    assert again.put(again.come(), "idp:settings") > 0, "a key of clients is another one"
    assert again.engine.keep_settings(b"", again.clock.ns) == DONE
    assert settings_of(again) == settings_of(Server(server.clock, server.log)) == b""
    again.engine.undo()
    check(again.engine)


def test_settings_stay_when_the_engine_is_made_whole() -> None:
    server = Server(ManualClock())
    assert server.engine.keep_settings(b"kept", server.clock.ns) == DONE
    server.engine.undo()
    assert settings_of(server) == b"kept"
    check(server.engine)


# --- a lasting pause


def test_a_policy_pauses_its_tubes() -> None:
    server = Server(ManualClock())
    engine, client, waiting = server.engine, server.come(), server.come()
    for each in (client, waiting):
        engine.watch(each, b"ab")
    id = server.put(client, tube=b"a")
    engine.policies = Policies([("a*", Terms(pause=True))])
    operation = SettlePauses(engine)
    while not operation.run(server.clock.ns):
        engine.work = 0
    later = server.put(client, tube=b"ab")
    new = server.put(client, tube=b"anew")
    engine.watch(client, b"anew")
    assert not server.reserve(client) and later and new
    assert engine.delete(client, new, server.clock.ns)
    assert server.put(client) and server.reserve(client) == 4, "other tubes are not paused"
    assert engine.delete(client, 4, server.clock.ns)
    for seconds in (0, 5):
        assert engine.pause(b"a", seconds, server.clock.ns), "a client cannot end it"
    server.pass_s(10)
    assert not server.reserve(client)
    engine.undo()
    check(engine)
    assert not server.reserve(client)
    engine.wait(waiting, server.clock.ns, 100)
    engine.policies = None
    operation, engine.work = SettlePauses(engine), 0
    tubes = len(engine.tube_by_number)
    assert operation.run(server.clock.ns)
    assert not waiting.waiting and waiting.reserved, "a client that waits gets a job"
    assert engine.work == tubes + 1, "a slice counts the jobs that it hands out"
    assert {*waiting.reserved, server.reserve(client)} == {id, later}
    check(engine)


# --- a server


def run(server: ServerProcess, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*GEVENTSTALK, *words, "-p", str(server.port)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_settings_of_run_time_outlive_a_kill(start_server: Starter, tmp_path: Path) -> None:
    path, port = tmp_path / "settings.yaml", free_port()
    path.write_text("policies: {'full': {max_jobs: 9}}\n")
    flags = ["--config", str(path), "--http", str(port), "-b", str(tmp_path / "data"), "-f0"]
    server = start_server(*flags)
    web = Web(port)
    for kind, name, entry in (
        ("policies", "full", {"max_jobs": 1}),
        ("policies", "odd/*+;$()", {"tries": 2}),
        ("policies", "still*", {"pause": True}),
        ("schedules", "nightly", {"cron": "0 3 * * *", "tube": "reports", "body": "b"}),
    ):
        status, _, answer = web.ask("PUT", f"/api/v1/{kind}/{name.replace('/', '%2F').replace(';', '%3B')}", entry)
        assert (status, answer) == (204, b""), name
    with Client(server.connect()) as client:
        assert client.ask(b"put-in still1 0 0 60 1\r\nx").startswith(b"INSERTED ")
        for wanted in (b"INSERTED", b"OUT_OF_MEMORY"):
            assert client.ask(b"put-in full 0 0 60 1\r\nx").split()[0] == wanted
    os.kill(server.pid, signal.SIGKILL)
    server.process.wait(20)
    server = start_server(*flags)
    with Client(server.connect()) as client:
        assert client.ask(b"put-in full 0 0 60 1\r\nx") == b"OUT_OF_MEMORY\r\n"
        assert client.ask(b"watch still1") == b"WATCHING 2\r\n"
        assert client.ask(b"reserve-with-timeout 0") == b"TIMED_OUT\r\n"
        assert client.ask(b"pause-tube still1 0") == b"PAUSED\r\n"
        assert client.ask(b"reserve-with-timeout 0") == b"TIMED_OUT\r\n"
        names = [(each["tubes"], each["at_run_time"]) for each in web.get("/policies")["policies"]]
        assert names == [("full", True), ("odd/*+;$()", True), ("still*", True)]
        assert [(each["name"], each["at_run_time"]) for each in web.get("/schedules")["schedules"]] == [
            ("nightly", True)
        ]
        assert web.ask("DELETE", "/api/v1/policies/still*")[0] == 204
        until(lambda: client.ask(b"reserve-with-timeout 0").startswith(b"RESERVED "), "the pause is over")
        assert web.ask("DELETE", "/api/v1/policies/full")[0] == 204
        assert client.ask(b"put-in full 0 0 60 1\r\nx").startswith(b"INSERTED "), "that of the file counts again"
        assert [each["tubes"] for each in web.get("/policies")["policies"]] == ["odd/*+;$()", "full"]
        for kind, name, status, words in (
            ("policies", "full", 404, b"No policy of this name was made at run time"),
            ("schedules", "x", 404, b"No schedule of this name"),
        ):
            found, _, answer = web.ask("DELETE", f"/api/v1/{kind}/{name}")
            assert found == status and words in answer
        for kind, name, entry, status, words in (
            ("policies", "a%20b", {"tries": 1}, 400, b"a b is no pattern of tubes"),
            ("policies", "a", {"tries": -1}, 400, b"tries"),
            ("policies", "a", {"pause": 5}, 400, b"invalid switch"),
            ("schedules", "a", {"cron": "x", "tube": "t"}, 400, b"cron is x"),
            ("schedules", "a", {"cron": "@daily", "tube": "t", "body": "x" * 45_000}, 507, b"at most 40000 bytes"),
        ):
            found, _, answer = web.ask("PUT", f"/api/v1/{kind}/{name}", entry)
            assert found == status and words in answer, answer
        actions = [(each["action"], each["detail"]) for each in web.get("/audit")["entries"]]
        assert ("remove policy", "still*") in actions
        path.write_text("policies: {'other': {max_jobs: 1}}\n")
        assert web.json("POST", "/api/v1/reload", {})["at_restart"] == []
        assert [each["tubes"] for each in web.get("/policies")["policies"]] == ["odd/*+;$()", "other"]
    assert server.stop() == 0


def test_settings_go_with_the_jobs(start_server: Starter, tmp_path: Path) -> None:
    """By an export and an import."""
    port = free_port()
    server = start_server("--http", str(port), "-b", str(tmp_path / "one"))
    assert Web(port).ask("PUT", "/api/v1/policies/a", {"max_jobs": 7})[0] == 204
    with Client(server.connect()) as client:
        client.put(b"x")
    assert server.stop() == 0
    exported = subprocess.run(
        [*GEVENTSTALK, "export", str(tmp_path / "one")], capture_output=True, timeout=60, check=True
    ).stdout
    subprocess.run([*GEVENTSTALK, "import", str(tmp_path / "two")], input=exported, timeout=60, check=True)
    server = start_server("--http", str(port), "-b", str(tmp_path / "two"))
    assert [each["max_jobs"] for each in Web(port).get("/policies")["policies"]] == [7]
    assert server.stop() == 0


def test_commands_for_settings(start_server: Starter, tmp_path: Path) -> None:
    server = start_server("--http", str(free_port()), "-b", str(tmp_path / "data"))
    words = ["tries=3", "dead_letter=lost", "backoff=[1,5]", "max_rate=10", "pause=true", "ttr={min: 5}"]
    done = run(server, "policy", "set", "mail.*", *words)
    assert (done.returncode, done.stdout) == (0, "the policy of mail.* is set\n"), done.stderr
    shown = run(server, "policies").stdout.splitlines()[1]
    assert run(server, "put", "mail.a", "x").returncode == 0
    (listed,) = [line for line in run(server, "tubes").stdout.splitlines() if line.startswith("mail.a")]
    assert listed.endswith(" by policy")
    assert shown == "mail.*  pause tries:3 dead:lost backoff:1;5 ttr>=5 max_rate=10"
    done = run(server, "schedule", "set", "often", "cron=*/5 * * * *", "tube=t", 'body={"a": 1}', "ttr=90")
    assert (done.returncode, done.stdout) == (0, "the schedule often is set\n"), done.stderr
    assert run(server, "schedules").stdout.splitlines()[1].split()[:6] == ["often", "*/5", "*", "*", "*", "*"]
    for command, words_of_error in (
        (("policy", "set", "a"), "set needs KEY=VALUE"),
        (("policy", "remove", "a", "tries=1"), "remove takes none"),
        (("policy", "set", "a", "tries"), "tries is not KEY=VALUE"),
        (("policy", "set", "a", "backoff=["), "[ is not YAML, the value of backoff"),
        (("policy", "set", "a", "tires=1"), "a policy has no key tires"),
        (("policy", "remove", "a"), "no policy of this name was made at run time"),
        (("schedule", "set", "a", "cron=x"), "cron is x"),
    ):
        done = run(server, *command)
        assert done.returncode and words_of_error in done.stderr and done.stdout == "", (command, done)
    assert run(server, "schedule", "remove", "often").returncode == 0
    assert run(server, "policy", "remove", "mail.*").stdout == "the policy of mail.* is removed\n"
    assert run(server, "policies").stderr == "geventstalk: there is no policy\n"
    assert server.stop() == 0
