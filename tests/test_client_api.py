"""The commands against a running server, over its API."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import greenstalk
import pytest

from geventstalk.exits import EXIT_NONSENSE, EXIT_NOT_ALLOWED, EXIT_UNREACHABLE, EXIT_USAGE
from geventstalk.remote.api import Api
from geventstalk.remote.watching import EACH_END, OverApi, compare
from geventstalk.rights import hash_of
from tests.support.clients import burst, until
from tests.support.live import Ran, Runner
from tests.support.process import GEVENTSTALK, ServerProcess, free_port
from tests.support.proxy import Proxy, patch
from tests.support.wire import Client

Run = Callable[..., Ran]


class Behind:
    """A server behind a proxy, and a client of its port."""

    def __init__(self, server: ServerProcess, http_port: int) -> None:
        self.proxy = Proxy()
        self.proxy.target = http_port
        self.client = Client(server.connect())

    def put(self, count: int, tube: str = "mail") -> None:
        burst(self.client, [b"use %b\r\n" % tube.encode()])
        for number in range(1, count + 1):
            body = b"body %d" % number
            self.client.ask(b"put 1 0 60 %d\r\n%b" % (len(body), body))

    def posted(self) -> list[Any]:
        """The contents of the POST requests so far."""
        return [content for method, _, content in self.proxy.asked if method == "POST"]


@pytest.fixture
def api(start_server: Callable[..., ServerProcess]) -> Iterator[Behind]:
    port = free_port()
    behind = Behind(start_server("--http", str(port)), port)
    yield behind
    behind.client.close()
    behind.proxy.stop()


@pytest.fixture
def run(api: Behind, bare: Runner) -> Run:
    return bare.to("--api", f"127.0.0.1:{api.proxy.server_port}")


def test_jobs_come_page_by_page(api: Behind, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    api.put(8)
    monkeypatch.setattr("geventstalk.remote.api.PAGE", 3)
    assert [job["id"] for job in run("jobs", "pri<9", "--json").lines] == list(range(1, 9))
    queries = [query for _, path, query in api.proxy.asked if path == "/jobs"]
    assert len(queries) == 3 and {query["filter"] for query in queries} == {"pri<9"}
    assert [job["id"] for job in run("jobs", "--json", "--newest", "--limit", "4").lines] == [8, 7, 6, 5]
    assert run("jobs", "--json", "--limit", "8").err == ""
    ran = run("jobs", "--limit", "2", "--body", "10")
    assert ran.out.splitlines()[1].split() == ["1", "mail", "ready", "1", "0", "s", "-", "0", "6", "B", "body", "1"]
    assert ran.err == "note: there are more than 2; --limit says how many are shown\n"
    assert api.proxy.asked[-1][2]["body"] == "10"


def test_a_job_and_the_connection_that_holds_it(api: Behind, run: Run) -> None:
    api.put(1)
    api.client.ask(b"watch mail")
    api.client.ask(b"reserve")
    api.proxy.edits["job"] = patch(since_s=61.5, holder=12, time_left_s=3.2)
    ran = run("job", "1", "2")
    assert (ran.code, ran.err) == (1, "there is no job 2\n")
    assert "\nstate        reserved, 3 s left, since 1 min 1 s, held by connection 12\n" in ran.out
    (job,) = run("job", "1", "--json").lines
    assert (job["id"], job["holder"], job["body"]["data"]) == (1, 12, "body 1")


def test_no_job_matches(run: Run) -> None:
    assert run("jobs", "age>1h") == (1, "", "geventstalk: no job matches\n")
    assert run("jobs", "age>1h", "--json") == (1, "", "")
    assert run("kick", "age>1h") == (1, "", "no job matches\n")
    assert run("delete", "age>1h") == (1, "", "no job matches\n")


def test_changes_of_ids(api: Behind, run: Run) -> None:
    api.put(5)
    assert run("delete", "1") == (0, "deleted 1 job\n", "")
    assert run("bury", "2", "3", "4").code == run("kick", "2").code == run("move", "5", "--to", "dead").code == 0
    found = [api.client.stats(b"stats-job %d" % id) for id in (2, 3, 4, 5)]
    assert [(job["state"], job["tube"].strip('"')) for job in found] == [
        ("ready", "mail"),
        ("buried", "mail"),
        ("buried", "mail"),
        ("ready", "dead"),
    ]
    ran = run("bury", "1", "2")
    assert (ran.code, ran.out) == (1, "buried 1 job; 1 was left alone\n")
    assert ran.err == "job 1: there is no such job\n"
    assert run("kick", "5").err == "job 5: the job is ready. Only a buried or a delayed job can be kicked\n"
    api.proxy.spoilt["POST", "/jobs/4/kick"] = problem(409, "Conflict", "\\u001b[2J")
    assert run("kick", "4").err == "job 4: \\x1b[2J\n"
    assert run("delete", "2", "9", "--dry-run", "--json").lines[0]["matched"] == 1


def problem(status: int, title: str, detail: str) -> bytes:
    text = f'{{"title": "{title}", "status": {status}, "detail": "{detail}"}}'
    return f"HTTP/1.1 {status} x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def test_changes_by_a_filter(api: Behind, run: Run) -> None:
    api.put(10)
    ran = run("move", "tube:mail", "pri<9", "--to", "dead", "--limit", "7", "--json")
    assert ran.code == 0
    assert ran.lines == [
        {"action": "move", "filter": "tube:mail pri<9", "tube": "dead", "matched": 7, "done": 7, "failed": 0}
        | {"dry_run": False, "stopped": False, "problems": []}
    ]
    assert api.posted() == [{"filter": "tube:mail pri<9 -tube:dead", "action": "move", "limit": 7, "tube": "dead"}]
    assert run("delete", "pri<9", "--dry-run") == (0, "10 jobs would be deleted\n", "")
    assert run("delete", "pri<9").code == EXIT_USAGE
    assert run("bury", "8").code == run("kick", "tube:mail", "--dry-run").code == 0
    assert run("kick", "state:buried", "--dry-run").code == 0
    assert [content["filter"] for content in api.posted()[-2:]] == ["tube:mail state:buried", "state:buried"]
    assert run("delete", "pri<9", "--yes") == (0, "deleted 10 jobs\n", "")
    assert run("flush", "mail", "--yes", "--state", "reserved").code == 1
    assert api.posted()[-1]["filter"] == "tube:mail state:reserved"


def test_ctrl_c_cancels_the_servers_work(api: Behind, run: Run) -> None:
    api.put(10)
    goes_on = patch(state="running", done=1)
    api.proxy.edits["bulk"] = lambda bulk: bulk if bulk["state"] == "dry-run" else goes_on(bulk)
    cancelled = {"state": "cancelled", "matched": 10, "done": 1, "failed": 0, "searched": 1, "error": None}
    api.proxy.answers["DELETE", "bulk"] = lambda _: cancelled

    def stop() -> None:
        until(lambda: [path for method, path, _ in api.proxy.asked if method == "GET"][-1:] == ["/bulk/1"], "a look")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    ran = run("delete", "pri<9", "--yes")
    thread.join()
    assert ran == (130, "", "stopped: deleted 1 job\n")
    assert ("DELETE", "/bulk/1", {}) in api.proxy.asked


def test_work_that_does_not_begin(run: Run) -> None:
    ran = run("kick", "body:/(/")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("geventstalk: filter, character 1: ") and ran.err.count("\n") == 1


def test_work_that_ends_early(api: Behind, run: Run) -> None:
    api.put(10)
    ends = patch(state="failed", error="no room", matched=9, done=4, failed=1, searched=5)
    api.proxy.edits["bulk"] = lambda bulk: bulk if bulk["state"] == "dry-run" else ends(bulk)
    ran = run("bury", "pri<9")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "stopped: buried 4 jobs; 1 was left alone\ngeventstalk: the change ended early: no room\n"


def test_a_reader_may_look_and_not_change(api: Behind, run: Run) -> None:
    api.put(1)
    api.proxy.edits["session"] = patch(role="read")
    assert run("jobs", "pri<9").code == 0
    ran = run("kick", "tube:mail")
    assert (ran.code, ran.out) == (EXIT_NOT_ALLOWED, "") and "may only read" in ran.err
    api.proxy.spoilt["GET", "/session"] = problem(401, "Unauthorized", "")
    ran = run("jobs")
    assert (ran.code, ran.out) == (EXIT_NOT_ALLOWED, "")
    assert ran.err.endswith("wants a token: --token-file or GEVENTSTALK_TOKEN\n")


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"", EXIT_UNREACHABLE),
        (None, EXIT_UNREACHABLE),
        (b"+OK\r\n", EXIT_NONSENSE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{", EXIT_UNREACHABLE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", EXIT_NONSENSE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", EXIT_NONSENSE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<!DOCTYPE", EXIT_NONSENSE),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 29\r\n\r\n{"jobs": [{"id": 1}], "a": 1}', EXIT_NONSENSE),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"jobs": ["a"]', EXIT_NONSENSE),
        (b"HTTP/1.1 301 x\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", EXIT_NONSENSE),
        (b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n", EXIT_NONSENSE),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n", EXIT_NONSENSE),
    ],
)
def test_an_api_that_misbehaves(api: Behind, run: Run, answer: bytes | None, code: int) -> None:
    api.proxy.spoilt["GET", "/jobs"] = answer
    ran = run("jobs", "--timeout", "0.2")
    assert (ran.code, ran.out) == (code, "") and ran.err.count("\n") == 1 and "unexpected" not in ran.err


def test_files_that_hold_no_token(bare: Runner, run: Run, tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "\u00e9\n"):
        with open(f"{tmp_path}/token", "w", encoding="utf-8") as file:
            file.write(text)
        assert run("jobs", "--token-file", f"{tmp_path}/token").code == EXIT_USAGE
    assert run("jobs", "--token-file", f"{tmp_path}/absent").code == EXIT_USAGE
    assert bare("jobs", "--api", "ftp://x").code == EXIT_USAGE


# Without a proxy

ADMIN, READER = "a" * 32, "r" * 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server that every user of this host may steer, with an audit file."""
    started = HttpServer(tmp_path_factory.mktemp("http"))
    try:
        yield started
    finally:
        started.process.stop()


class HttpServer:
    """A server with HTTP on a port and on a unix socket, with tokens or without."""

    def __init__(self, folder: Path, tokens: str = "") -> None:
        self.port = free_port()
        self.socket, self.audit = f"{folder}/http", folder / "audit"
        words = ["--http", f"127.0.0.1:{self.port}", "--http", f"unix:{self.socket}", "--audit", str(self.audit)]
        if tokens:
            (folder / "tokens").write_text(tokens, encoding="utf-8")
            (folder / "tokens").chmod(0o600)
            words += ["--http-tokens", f"{folder}/tokens"]
        self.process = ServerProcess(GEVENTSTALK, words).wait_ready()

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def real(server: HttpServer, bare: Runner) -> Run:
    """Runs a command for the real server, whose API it finds by itself."""
    return bare.to("-p", str(server.process.port))


def test_the_audit_knows_what_the_command_line_did(server: HttpServer, real: Run) -> None:
    (line,) = real("put", "mail", "--pri", "7", "--delay", "1h", "--ttr", "9", "--json", stdin=b"\xff\x00").lines
    last = server.audited()[-1]
    assert (last["via"], last["action"], last["tube"], last["job"]) == ("cli", "put", "mail", line["id"])
    (job,) = ask(real, "job", str(line["id"]))
    assert (job["pri"], job["delay_s"], job["ttr_s"], job["state"], job["size"]) == (7, 3600, 9, "delayed", 2)
    assert job["body"]["data"] == "/wA="
    assert real("put", "mail", "x") == (0, f"put job {line['id'] + 1} into mail\n", "")
    assert real("put", "mail", stdin=b"x" * 70_000).code == 1
    (tagged,) = real("put", "mail", "x", "--tags", "idp:k note:n", "--json").lines
    assert ask(real, "job", str(tagged["id"]))[0]["tags"]["text"] == "idp:k note:n"
    before = server.audited()
    again = real("put", "mail", "x", "--tags", "idp:k")
    assert again == (0, f"job {tagged['id']} has the same unique key: it is ready\n", "")
    assert server.audited() == before, "nothing was put"
    assert real("pause", "mail", "60") == (0, "mail is paused for 1 min\n", "")
    last = server.audited()[-1]
    assert (last["via"], last["action"], last["tube"], last["who"]) == ("cli", "pause", "mail", "local")
    assert real("pause", "mail", "0").code == 0
    assert real("drain", "--json").lines == [{"draining": True}]
    assert real("put", "mail", "x").err == "geventstalk: the server is draining: it refuses puts\n"
    assert "DRAINING: puts are refused" in real("top").out
    assert real("drain", "--off") == (0, "the server takes jobs\n", "")
    assert real("reload") == (0, "the server has no files to read again\n", "")
    assert real("reload", "--json").lines == [{"files": [], "at_restart": []}]
    assert server.audited()[-1]["action"] == "reload"
    assert "kill -HUP" in real("reload", "--api", "none").err


def test_a_job_has_its_tags_and_its_reason(server: HttpServer, real: Run) -> None:
    text = "note:n tries:4 idp:u:60 con:k:2 grp:g backoff:1:2:60 ttl:99 dead:lost aft:h"
    (plain,) = real("put", "tagged", "x", "--json").lines
    (line,) = real("put", "tagged", "x", "--tags", text, "--pri", "1", "--json").lines
    with Client(server.process.connect()) as client:
        client.ask(b"watch tagged")
        assert client.ask(b"reserve-job %d" % line["id"]).startswith(b"RESERVED ")
        assert client.ask(b'bury %d 1 5\\ of "x"' % line["id"]) == b"BURIED\r\n"
    for words in ([], ["--api", "none"]):
        (job,) = ask(real, "job", str(line["id"]), *words)
        assert sorted(job["tags"]["text"].split()) == sorted(text.split())
        assert (job["tags"]["tried"], job["tags"]["reason"]) == (1, '5\\ of "x"')
        shown = real("job", str(line["id"]), *words).out
        assert 'reason       5\\ of "x"\n' in shown and "tried        1\n" in shown and "note:n" in shown
        assert ask(real, "job", str(plain["id"]), *words)[0]["tags"] is None
        assert "tags" not in real("job", str(plain["id"]), *words).out


def test_a_user_does_what_its_rights_grant(
    start_server: Callable[..., ServerProcess], tmp_path: Path, bare: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = {"north": {"token": hash_of(READER), "rights": {"north.*": "all"}}}
    access, port = tmp_path / "access", free_port()
    access.write_text(json.dumps({"users": users}), encoding="utf-8")
    access.chmod(0o600)
    listeners = [{"address": f"unix:{tmp_path}/guarded", "identity": "token"}, {"address": f"unix:{tmp_path}/open"}]
    (tmp_path / "settings").write_text(json.dumps({"listeners": listeners, "access": str(access)}), encoding="utf-8")
    start_server("--config", str(tmp_path / "settings"), "--http", str(port))
    monkeypatch.setenv("GEVENTSTALK_TOKEN", READER)
    run = bare.to("-l", f"unix:{tmp_path}/open", "--api", f"127.0.0.1:{port}")
    assert run("put", "south", "x", "--api", "none").code == 0, "a job of another"
    changes: list[list[str]] = [
        ["put", "north.a", "x"],
        ["bury", "2"],
        ["kick", "tube:north.a"],
        ["change", "2", "--pri", "3"],
        ["pause", "north.a", "1"],
        ["move", "2", "--to", "north.b"],
        ["delete", "2"],
    ]
    for words in changes:
        ran = run(*words)
        assert (ran.code, ran.err) == (0, ""), words
    for words, says in (
        (["put", "south", "x"], "no right to put"),
        (["pause", "south", "1"], "no tube south"),
        (["drain"], "has no right"),
    ):
        ran = run(*words)
        assert (ran.code, ran.out) == (EXIT_NOT_ALLOWED if "right" in says else 1, "") and says in ran.err, words
    for words in (
        ["bury", "1"],
        ["kick", "1"],
        ["delete", "1"],
        ["move", "1", "--to", "north.a"],
        ["flush", "south", "-y"],
    ):
        ran = run(*words)
        assert ran.code == 1 and ("no such job" in ran.err or "no job matches" in ran.err), words
    assert run("jobs", "--api", "none", "1", "--json").lines[0]["counts"]["buries"] == 0


def test_the_api_on_a_unix_socket(server: HttpServer, bare: Runner) -> None:
    words = ["-p", str(free_port()), "--api", f"unix:{server.socket}"]
    assert bare("drain", "--off", *words).code == 0
    assert bare("drain", "--off", *words[:3], "unix:/nowhere").code == EXIT_UNREACHABLE


# Bug: A token that may only read changed jobs all the same: the command took the protocol, past the roles and the
# audit.
def test_tokens(tmp_path: Path, bare: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    server = HttpServer(tmp_path, f"reader read {READER}\nboss admin {ADMIN}\n")
    try:
        run = bare.to("-p", str(server.process.port))
        assert run("put", "mail", "x", "--api", "none").code == 0
        changes = (["pause", "mail", "60"], ["put", "mail", "x"], ["kick", "tube:mail"], ["drain"])
        for words in (*changes, ["jobs"], ["job", "1"], ["watch", "mail", "--for", "1"]):
            ran = run(*words)
            assert (ran.code, ran.out) == (EXIT_NOT_ALLOWED, ""), words
        monkeypatch.setenv("GEVENTSTALK_TOKEN", READER)
        for words in changes:
            assert run(*words).code == EXIT_NOT_ALLOWED, words
        assert run("jobs", "--json").lines[0]["state"] == "ready", "nothing went over the protocol instead"
        assert "may only read" in run("drain").err
        (tmp_path / "mine").write_text(f"# mine\nboss admin {ADMIN}\n", encoding="utf-8")
        assert run("drain", "--token-file", f"{tmp_path}/mine").code == 0
        assert server.audited()[-1]["who"] == "boss"
        monkeypatch.setenv("GEVENTSTALK_TOKEN", "x" * 32)
        assert run("drain").err.endswith("does not know the token\n")
        monkeypatch.setenv("GEVENTSTALK_TOKEN", ADMIN)
        assert run("drain", "--off").code == 0
    finally:
        server.process.stop()


def ask(real: Run, *words: str) -> list[dict[str, Any]]:
    """Returns what a command prints with --json. It has to end well."""
    ran = real(*words, "--json")
    assert ran.code == 0, ran.err
    return ran.lines


def test_any_job_by_any_filter(server: HttpServer, real: Run) -> None:
    assert real("put", "any", "--lines", stdin=b"".join(b"job %d\n" % number for number in range(40))).code == 0
    found = ask(real, "jobs", "tube:any", "body:/^job 1.$/")
    assert [job["body"]["data"] for job in found] == [f"job {number}" for number in range(10, 20)]
    ids = [job["id"] for job in ask(real, "jobs", "tube:any", "--limit", "0")]
    assert len(ids) == 40 and ids == sorted(ids)
    assert [job["id"] for job in ask(real, "jobs", "tube:any", "--newest", "--limit", "2")] == ids[:-3:-1]
    assert ask(real, "bury", "tube:any", "body:/^job 1.$/")[0]["done"] == 10
    assert ask(real, "move", "tube:any", "state:buried", "--to", "dead")[0]["done"] == 10
    assert ask(real, "kick", "tube:dead", "--limit", "4")[0]["done"] == 4
    assert {job["state"] for job in ask(real, "jobs", "tube:dead")} == {"ready", "buried"}
    assert ask(real, "delete", "tube:any,dead", "--dry-run")[0]["matched"] == 40
    assert real("delete", "tube:any,dead", "--yes") == (0, "deleted 40 jobs\n", "")
    assert (server.audited()[-1]["via"], server.audited()[-1]["count"]) == ("cli", 40)
    ran = real("jobs", "body:/(/")
    assert ran.code == 1 and ran.err.startswith("geventstalk: filter, character ")


def test_an_export_of_what_matches(server: HttpServer, real: Run, bare: Runner, tmp_path: Path) -> None:
    assert real("put", "out", "--lines", stdin=b"a\nb\nc\n").code == 0
    ran = real("jobs", "tube:out", "body:/[ab]/", "--export")
    lines = ran.out.splitlines()
    assert ran.code == 0 and len(lines) == 3 and "body" in lines[1]
    assert bare("import", f"{tmp_path}/in", stdin=ran.out.encode()).code == 0
    assert [json.loads(line)["body"] for line in bare("export", f"{tmp_path}/in").out.splitlines()[1:]] == [
        "YQ==",
        "Yg==",
    ]
    ids = [job["id"] for job in ask(real, "jobs", "tube:out")]
    assert len(real("jobs", *map(str, ids[:2]), "--export").out.splitlines()) == 3
    assert real("jobs", "tube:nowhere", "--export").code == 1
    assert real("jobs", "tube:out", "--export", "--limit", "1").code == EXIT_USAGE
    assert real("jobs", "body:/(/", "--export").err.startswith("geventstalk: filter, character ")
    assert real("delete", "tube:out", "--yes").code == 0


def test_connections(server: HttpServer, real: Run) -> None:
    with server.process.connect() as one, server.process.connect() as other:
        one.sendall(b"use shown\r\nwatch a\r\nwatch b\r\nput 0 0 60 1\r\nx\r\nreserve-job 1\r\n")
        other.sendall(b"use shown\r\nreserve\r\n")
        until(lambda: len(ask(real, "connections", "--tube", "shown")) == 2, "both are shown")
        shown = real("connections", "--tube", "shown", "--sort", "reserved").out.splitlines()
        assert shown[0].split() == ["NUMBER", "ADDRESS", "USER", "USES", "WATCHES", "HOLDS", "WAITS", "SILENT"]
        assert "default, a, b" in shown[1] and shown[2].split()[3:5] == ["shown", "default"]
        assert real("connections", "--tube", "none") == (1, "", "geventstalk: there is no such connection\n")
        assert real("connections", "--user", "shop").code == 1
    ask(real, "flush", "shown", "--yes")


def test_a_change_of_a_job(server: HttpServer, real: Run) -> None:
    id = ask(real, "put", "alter", "x")[0]["id"]
    assert real("change", str(id), "--pri", "7", "--ttr", "5min", "--tube", "altered") == (0, f"changed job {id}\n", "")
    (job,) = ask(real, "job", str(id))
    assert (job["pri"], job["ttr_s"], job["tube"]) == (7, 300, "altered")
    assert server.audited()[-1]["via"] == "cli" and server.audited()[-1]["job"] == id
    assert ask(real, "change", str(id), "--delay", "1h")[0]["state"] == "delayed"
    assert real("change", str(id)).code == EXIT_USAGE
    assert real("change", "999999", "--pri", "1").code == 1
    assert real("delete", str(id)).code == 0


def test_jobs_that_others_hold(server: HttpServer, real: Run) -> None:
    with greenstalk.Client(("127.0.0.1", server.process.port), encoding=None, use="held", watch="held") as worker:
        ids = [worker.put(b"x") for _ in range(3)]
        for _ in range(3):
            worker.reserve()
        (line,) = ask(real, "job", str(ids[0]))
        assert line["state"] == "reserved" and line["holder"] is not None
        assert "held by connection" in real("job", str(ids[0])).out
        assert real("bury", str(ids[0])) == (0, "buried 1 job\n", "")
        ran = real("move", "tube:held", "--to", "other")
        assert (ran.code, ran.out) == (0, "moved 1 job to other; 2 were left alone\n"), "held jobs stay where they are"
        assert real("release", "tube:held", "id:1..", "--limit", "1") == (0, "released 1 job\n", "")
        assert worker.reserve(timeout=0).id == ids[1]
        assert real("release", str(ids[0])).code == 1
        assert real("delete", str(ids[1])).code == 0
        assert real("flush", "held", "--yes", "--state", "reserved").out == "deleted 1 job\n"
        assert real("kick", *map(str, ids)).out == "kicked 1 job; 2 were left alone\n"


def test_watch_over_the_api(server: HttpServer) -> None:
    api = Api(f"127.0.0.1:{server.port}", None, 30, "test")
    source = OverApi(api, "watched", 100)
    before = source.look()

    def told() -> list[tuple[str, object]]:
        nonlocal before
        then, before = before, source.look()
        return [(event.event, event.id or f"{event.jobs} jobs") for event in compare(then, before, source.where)]

    where = ("127.0.0.1", server.process.port)
    with greenstalk.Client(where, encoding=None, use="watched", watch="watched") as client:
        ids = [client.put(b"x") for _ in range(3)]
        assert told() == [("put", id) for id in ids]
        client.bury(client.reserve())
        assert told() == [("reserved", ids[0]), ("buried", ids[0])]
        client.kick(1)
        client.release(client.reserve(), delay=1000)
        assert told() == [("reserved", ids[0]), ("released", ids[0]), ("kicked", ids[0])]
        api.patch(f"/jobs/{ids[1]}", {"tube": "elsewhere"})
        client.delete(ids[2])
        client.delete(client.put(b"y"))
        assert told() == [("moved", ids[1]), ("deleted", ids[2]), ("put", "1 jobs"), ("deleted", "1 jobs")]
        api.patch(f"/jobs/{ids[1]}", {"tube": "watched"})
        assert told() == []
        many = [client.put(b"z") for _ in range(2 * EACH_END + 100)]
        assert len(told()) == 2 * EACH_END - 1
        client.delete(many[0])
        client.delete(many[EACH_END + 50])
        client.delete(many[-1])
        assert told() == [("deleted", many[0]), ("deleted", many[-1]), ("deleted", "1 jobs")]
        more = [client.put(b"z") for _ in range(5)]
        assert told() == [("put", id) for id in more], "those that went out of sight did not go"
    api.close()
