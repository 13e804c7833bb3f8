"""The commands for a running server where it has TLS, and users with tokens and certificates."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from geventstalk.exits import EXIT_NOT_ALLOWED, EXIT_UNREACHABLE, EXIT_USAGE
from geventstalk.rights import hash_of
from tests.clients.programs import missing
from tests.support.clients import until
from tests.support.live import Runner, answering
from tests.support.pki import Authority, Pair
from tests.support.process import GEVENTSTALK, ServerProcess, free_port

TOKEN = "a" * 43


class Site:
    """A server with a listener of each kind, by name, and the files of its clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        authority = Authority(folder, "authority")
        own, self.worker = authority.certify("server"), authority.certify("worker")
        self.trusted = str(authority.trusted)
        self.token = self.file("token", TOKEN)
        self.ports = {name: free_port() for name in ("open", "token", "certificate", "plain")}
        pair = {"certificate": str(own.certificate), "key": str(own.key)}
        at = {name: f"127.0.0.1:{port}" for name, port in self.ports.items()}
        listeners = [
            {"address": at["open"], "tls": pair},
            {"address": at["token"], "tls": pair, "identity": ["token"]},
            {"address": at["certificate"], "tls": pair | {"client_ca": self.trusted}, "identity": ["certificate"]},
            {"address": f"unix:{folder}/socket", "identity": ["token"]},
            {"address": at["plain"]},
        ]
        users = {
            "shop": {"token": hash_of(TOKEN), "rights": {"orders": "all"}},
            "boss": {"certificate": "worker", "rights": {"*": "all"}},
        }
        access = self.file("access", json.dumps({"users": users}))
        self.http = free_port()
        http = {"http": [f"127.0.0.1:{self.http}"], "http_cert": pair["certificate"], "http_key": pair["key"]}
        self.settings = self.file("settings", json.dumps({"listeners": listeners, "access": access, **http}))

    def file(self, name: str, content: str) -> str:
        path = self.folder / name
        path.write_text(content)
        path.chmod(0o600)
        return str(path)

    def to(self, name: str) -> list[str]:
        """Returns the words of a command for a listener with TLS."""
        return ["-p", str(self.ports[name]), "--tls-ca", self.trusted]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if shutil.which("openssl") is None:
        missing("openssl is not installed")
    site = Site(tmp_path_factory.mktemp("site"))
    server = ServerProcess(GEVENTSTALK, ["--config", site.settings])
    try:
        server.wait_ready()
        yield site
    finally:
        server.stop()


@pytest.fixture
def run(site: Site, bare: Runner, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.delenv("GEVENTSTALK_TOKEN", raising=False)
    return bare.to("--timeout", "5")


def pair_words(pair: Pair) -> list[str]:
    return ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]


def test_commands_speak_tls_and_show_a_token(site: Site, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("put", "all", "x", *site.to("open"), "--api", "none").code == 0
    with_token = [*site.to("token"), "--token-file", site.token, "--api", "none"]
    assert run("put", "orders", "x", *with_token).code == 0
    assert run("tubes", "--json", *with_token).lines[0]["name"] == "orders"
    ran = run("put", "others", "x", *with_token)
    assert ran.code == EXIT_NOT_ALLOWED and "does not allow that to the user" in ran.err
    assert run("flush", "orders", "--yes", *with_token).out == "deleted 1 job\n"
    monkeypatch.setenv("GEVENTSTALK_TOKEN", TOKEN)
    assert run("put", "orders", "x", *site.to("token"), "--api", "none").code == 0
    assert run("put", "orders", "x", "-l", f"unix:{site.folder}/socket", "--api", "none").code == 0
    ran = run("put", "orders", "x", "-p", str(site.ports["plain"]), "--api", "none")
    assert ran.code == 0, "no token is shown where none is wanted: the server does not know the verb there"


def test_commands_show_a_certificate(site: Site, run: Runner) -> None:
    words = [*site.to("certificate"), *pair_words(site.worker), "--api", "none"]
    assert run("put", "any", "x", *words).code == 0
    both = site.file("both", site.worker.certificate.read_text() + site.worker.key.read_text())
    assert run("stats", "any", *site.to("certificate"), "--tls-cert", both).code == 0
    ran = run("stats", *site.to("certificate"))
    assert ran.code == EXIT_UNREACHABLE and "certificate required" in ran.err


def test_the_authority_counts_for_the_api_as_well(site: Site, run: Runner) -> None:
    """The command finds the API by the statistics of the server."""
    assert run("put", "orders", "x", *site.to("open"), "--token-file", site.token).code == 0
    assert run("jobs", "size<9", *site.to("open"), "--token-file", site.token).code == 0
    ran = run("jobs", "size<9", "-p", str(site.ports["plain"]), "--token-file", site.token)
    assert ran.code == EXIT_UNREACHABLE and "local issuer" in ran.err


def test_settings_lead_to_the_listener_with_tls(site: Site, run: Runner) -> None:
    assert run("stats", "--config", site.settings, "--tls-ca", site.trusted).code == 0
    assert run("stats", "--config", site.settings).code == 0
    only = json.loads(Path(site.settings).read_text())
    del only["listeners"][3:]
    ran = run("stats", "--config", site.file("only", json.dumps(only)))
    assert ran.code == EXIT_USAGE and "give --tls" in ran.err
    ran = run("connections", "--config", site.file("only", json.dumps(only)), "--api", "127.0.0.1:1")
    assert ran.code == EXIT_UNREACHABLE and "no API listens" in ran.err, "the address is not needed"


@pytest.mark.parametrize(
    ("name", "words", "code", "says"),
    [
        ("open", [], EXIT_UNREACHABLE, "closed the connection; where it serves TLS, give --tls"),
        ("open", ["--tls"], EXIT_UNREACHABLE, "unable to get local issuer certificate; --tls-ca names its authority"),
        (
            "open",
            ["--tls-ca", "trusted", "-l", "localhost"],
            EXIT_UNREACHABLE,
            "certificate is not valid for 'localhost'.\n",
        ),
        ("plain", ["--tls-ca", "trusted"], EXIT_UNREACHABLE, "did not answer within 0.5 s"),
        ("token", ["--tls-ca", "trusted"], EXIT_NOT_ALLOWED, "wants the token of a user: --token-file or GEVENTSTALK"),
        ("token", ["--tls-ca", "trusted", "--token-file", "other"], EXIT_NOT_ALLOWED, "does not know the token"),
        ("open", ["--tls-ca", "token"], EXIT_USAGE, "as authority: no certificate or crl found"),
        ("open", ["--tls-ca", "absent"], EXIT_USAGE, "absent as authority: No such file or directory"),
        ("open", ["--tls-cert", "authority.pem"], EXIT_USAGE, ": no PEM of this kind, or an encrypted key"),
        ("open", ["--tls-key", "token"], EXIT_USAGE, "--tls-key is the key of --tls-cert, which is missing"),
    ],
)
def test_what_goes_wrong_is_one_line(
    site: Site, run: Runner, name: str, words: list[str], code: int, says: str
) -> None:
    site.file("other", "b" * 43)
    files = {"trusted": site.trusted} | {name: f"{site.folder}/{name}" for name in ("token", "other", "absent")}
    files["authority.pem"] = site.trusted
    wait = ["--timeout", "0.5"] if name == "plain" else []
    ran = run("stats", "-p", str(site.ports[name]), *(files.get(word, word) for word in words), *wait)
    assert ran.code == code and says in ran.err and ran.err.count("\n") == 1 and not ran.out


@pytest.mark.parametrize("token", ["two words", "\udcff", "a\tb"])
@pytest.mark.parametrize("command", ["stats", "work"])
def test_what_is_no_token_is_refused(
    site: Site, run: Runner, monkeypatch: pytest.MonkeyPatch, command: str, token: str
) -> None:
    monkeypatch.setenv("GEVENTSTALK_TOKEN", token)
    words = {"stats": [], "work": ["t", "--", "true"]}[command]
    ran = run(command, *site.to("token"), *words)
    assert ran.code == EXIT_USAGE and "$GEVENTSTALK_TOKEN holds no token" in ran.err and ran.err.count("\n") == 1


def test_a_token_never_goes_out_in_plain_text(run: Runner, tmp_path: Path) -> None:
    """Any server can say that it wants one. The command would connect again to show it, and get no answer here."""
    (tmp_path / "token").write_text(TOKEN)
    with answering(b"UNAUTHORIZED\r\n") as port:
        ran = run("stats", "-p", str(port), "--token-file", str(tmp_path / "token"))
    assert ran.code == EXIT_NOT_ALLOWED and "wants the token of a user" in ran.err


def test_a_server_that_goes_is_no_fault_of_tls(site: Site, run: Runner) -> None:
    """Without the farewell of TLS, as after a kill."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(site.folder / "server.pem", site.folder / "server.key")

    def serve() -> None:
        with context.wrap_socket(listener.accept()[0], server_side=True) as client:
            client.recv(100)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        ran = run("stats", "-p", str(listener.getsockname()[1]), "--tls-ca", site.trusted)
        thread.join()
    assert ran.code == EXIT_UNREACHABLE and ran.err.endswith("closed the connection\n")


def test_a_worker_takes_its_jobs_over_tls(site: Site, run: Runner) -> None:
    words = [*site.to("token"), "--token-file", site.token]
    assert run("put", "orders", "x", *words, "--api", "none").code == 0
    command = [*GEVENTSTALK, "work", *words, "orders", "--", "cat"]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            until(lambda: not ready(run, *words), "the worker does not take the job")
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0 and out.startswith("x") and "failed: 0" in out
    for more, says in (
        (words, "Tasks have their own TLS"),
        (["--token-file", site.token], "over TLS or a unix socket only"),
    ):
        ran = run("work", *more, "json")
        assert ran.code == EXIT_USAGE and says in ran.err


def ready(run: Runner, *words: str) -> int:
    found = run("tubes", "orders", "--json", *words).lines
    return sum(found[0]["jobs"].values()) if found else 0
