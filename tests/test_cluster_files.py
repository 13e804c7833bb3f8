"""The files of conf/cluster: a compose file, the scripts of its servers of PostgreSQL, and a drop-in for systemd.

And the commands of docs/cluster.md, typed in an empty directory.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from geventstalk.config import Settings
from tests.clients.programs import missing
from tests.support.clients import until
from tests.support.postgres import programs, require_postgres, scratch
from tests.support.process import GEVENTSTALK, ROOT, free_port
from tests.support.wire import Client, WireError

FOLDER = ROOT / "conf" / "cluster"
SERVICE = ROOT / "conf" / "geventstalk.service"
DROP_IN = FOLDER / "geventstalk.service.d.conf"


@pytest.fixture
def compose() -> Any:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())


def is_setting(name: str) -> bool:
    return name.removeprefix("GEVENTSTALK_").lower() in {field.name for field in fields(Settings)}


def test_the_compose_file_names_what_there_is(compose: Any) -> None:
    services = compose["services"]
    assert set(services) == {"a", "b", "one", "two"}
    files = {path.name for path in FOLDER.iterdir()}
    for name in ("one", "two"):
        for volume in services[name]["volumes"]:
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or source.removeprefix("./") in files, volume
        assert set(services[name]["secrets"]) <= set(compose["secrets"])
    for name in ("a", "b"):
        ours = [key for key in services[name]["environment"] if key.startswith("GEVENTSTALK_")]
        assert ours and all(map(is_setting, ours)), ours
        flags = [word.removeprefix("--") for word in services[name]["command"] if word.startswith("--")]
        assert all(map(is_setting, flags)), flags
        assert f"{name}:11300" in services[name]["command"]


def test_no_password_stands_in_a_url(compose: Any) -> None:
    """The program refuses those on a command line; in a file it would be read by each user that sees the unit."""
    assert not re.search(
        r"postgresql://[^@/\s]*:[^@/\s]*@", (FOLDER / "compose.yaml").read_text() + DROP_IN.read_text()
    )


def test_systemd_takes_the_drop_in(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze") or missing("systemd-analyze is not installed")
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", SERVICE.read_text(), flags=re.M)
    (tmp_path / SERVICE.name).write_text(text)
    (tmp_path / f"{SERVICE.name}.d").mkdir()
    shutil.copy(DROP_IN, tmp_path / f"{SERVICE.name}.d" / "cluster.conf")
    command = [program, "--no-pager", "verify", "--man=no", f"./{SERVICE.name}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    names = re.findall(r"^Environment=(GEVENTSTALK_\w+)=", DROP_IN.read_text(), re.MULTILINE)
    assert len(names) >= 4 and all(map(is_setting, names)), names


class Containers:
    """Does without an image what the image of PostgreSQL does around the two scripts."""

    def __init__(self, folder: Path) -> None:
        found = programs()
        assert found is not None
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.ports = {"one": free_port(), "two": free_port()}
        self.running: list[tuple[Path, Path]] = []
        self._postgres = found
        self._shim("gosu", 'user=$1; shift; exec setpriv --reuid="$user" --regid="$user" --init-groups "$@"')
        self._shim("docker-entrypoint.sh", "exit 0")
        self.folder.chmod(0o755)

    def _shim(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def environment(self, name: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        kept["PATH"] = os.pathsep.join([str(self.bin), str(self._postgres), kept["PATH"]])
        kept |= {"PGDATA": str(self.folder / name), "POSTGRES_USER": "geventstalk", "POSTGRES_DB": "geventstalk"}
        return kept

    def run(self, name: str, *words: str, as_user: bool = True, more: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            [str(self.bin / "gosu"), "postgres", *words] if as_user else words,
            env=self.environment(name) | (more or {}),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (words, done.stdout)
        return done.stdout

    def start(self, name: str) -> None:
        data = self.folder / name
        options = f"-p {self.ports[name]} -k {self.folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        log = self.folder / f"{name}.log"
        self.run(name, "pg_ctl", "-D", str(data), "-w", "-l", str(log), "-o", options, "start")
        self.running.append((data, log))

    def stop(self, name: str) -> None:
        self.run(name, "pg_ctl", "-D", str(self.folder / name), "-m", "immediate", "stop")
        self.running = [(data, log) for data, log in self.running if data.name != name]

    def ask(self, name: str, sql: str) -> str:
        where = ["-h", "127.0.0.1", "-p", str(self.ports[name]), "-U", "geventstalk", "geventstalk"]
        return self.run(name, "psql", *where, "-Atc", sql, more={"PGPASSWORD": "secret"}).strip()


@pytest.fixture
def containers() -> Iterator[Containers]:
    require_postgres()
    if os.geteuid() != 0:
        pytest.skip("only root can be what a container begins as")
    made = Containers(scratch())
    yield made
    for data, _ in list(made.running):
        made.stop(data.name)
    shutil.rmtree(made.folder, ignore_errors=True)


def adapted(containers: Containers, script: str) -> Path:
    """A script of conf/cluster with the ports and the place of the secret that it has here."""
    text = (FOLDER / script).read_text().replace("/run/secrets/password", str(containers.folder / "password"))
    text = text.replace("host=one ", f"host=127.0.0.1 port={containers.ports['one']} ")
    copy = containers.folder / script
    copy.write_text(text)
    copy.chmod(0o755)
    return copy


@pytest.mark.long
def test_the_scripts_make_a_synchronous_replica(containers: Containers) -> None:
    password = containers.folder / "password"
    password.write_text("secret")
    password.chmod(0o600)
    os.chown(password, pwd.getpwnam("postgres").pw_uid, -1)
    words = ["-U", "geventstalk", "-A", "scram-sha-256", "--pwfile", str(password), "-N"]
    containers.run("one", "initdb", *words)
    # What the image does: a server for the scripts of the first start, which also makes the database.
    containers.start("one")
    options = {"PGHOST": str(containers.folder), "PGPORT": str(containers.ports["one"]), "PGPASSWORD": "secret"}
    containers.run("one", "createdb", "-U", "geventstalk", "geventstalk", more=options)
    containers.run("one", "bash", str(adapted(containers, "primary.sh")), more=options)
    containers.stop("one")
    containers.start("one")
    containers.run("two", "bash", str(adapted(containers, "replica.sh")), as_user=False)
    data = containers.folder / "two"
    assert (data / "standby.signal").exists() and stat.S_IMODE(data.stat().st_mode) == 0o700
    containers.start("two")
    containers.ask("one", "CREATE TABLE t AS SELECT 7 AS n")  # comes back when the replica has it
    assert containers.ask("one", "SELECT application_name, sync_state FROM pg_stat_replication") == "two|sync"
    containers.run(
        "two", "bash", str(adapted(containers, "replica.sh")), as_user=False
    )  # a second start copies nothing
    # As the page says: the replica is promoted, and is told not to wait while it is alone.
    containers.stop("one")
    containers.run("two", "pg_ctl", "-D", str(data), "-w", "promote")
    containers.ask("two", "ALTER SYSTEM SET synchronous_standby_names = ''")
    containers.ask("two", "SELECT pg_reload_conf()")
    assert containers.ask("two", "SELECT n FROM t") == "7"


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck") or missing("shellcheck is not installed")
    scripts = sorted(FOLDER.glob("*.sh"))
    assert len(scripts) == 2
    done = subprocess.run([program, *map(str, scripts)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


# The page

PROGRAMS = ("initdb", "pg_basebackup", "pg_ctl", "psql")


class Reader:
    """A reader who types the commands of the page in an empty directory, but with free ports."""

    def __init__(self) -> None:
        self.folder = scratch()
        self.home = self.folder / "empty"
        self.home.mkdir()
        self.ports = {number: str(free_port()) for number in ("5433", "5434", "11300", "11301")}
        self.nodes: list[int] = []
        bin = self.folder / "bin"
        bin.mkdir()
        found = programs()
        assert found is not None
        user = "setpriv --reuid=postgres --regid=postgres --init-groups " if os.geteuid() == 0 else ""
        shims = {name: f"exec {user}{shlex.quote(str(found / name))}" for name in PROGRAMS}
        shims["geventstalk"] = f"PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.join(GEVENTSTALK)}"
        for name, command in shims.items():
            (bin / name).write_text(f'#!/bin/bash\n{command} "$@"\n')
            (bin / name).chmod(0o755)
        self.folder.chmod(0o755)
        if os.geteuid() == 0:
            user_id = pwd.getpwnam("postgres")
            os.chown(self.home, user_id.pw_uid, user_id.pw_gid)
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("PG", "GEVENTSTALK"))
        }
        self.environment["PATH"] = os.pathsep.join([str(bin), self.environment["PATH"]])

    def types(self, text: str) -> str:
        """Runs commands, those with `&` beside. Returns what they print."""
        for number, port in self.ports.items():
            text = re.sub(rf"\b{number}\b", port, text)
        with (self.folder / "said").open("w+") as said:
            done = subprocess.run(
                ["bash", "-ec", f"{text}\njobs -p >{self.folder}/jobs"],
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                timeout=120,
                check=False,
            )
            said.seek(0)
            output = said.read()
        assert done.returncode == 0, (text, output)
        self.nodes += map(int, (self.folder / "jobs").read_text().split())
        return output

    def client(self, port: str) -> Client:
        """Waits until a node answers there."""
        address = ("127.0.0.1", int(self.ports[port]))
        until(lambda: answers(address), f"a node answers on {port}", 60)
        return Client(socket.create_connection(address, 30))

    def close(self) -> None:
        for pid in self.nodes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for data in ("db2", "db"):
            if (self.home / data / "postmaster.pid").exists():
                self.types(f"pg_ctl -D {data} -m immediate stop")
        shutil.rmtree(self.folder, ignore_errors=True)


def answers(address: tuple[str, int]) -> bool:
    try:
        with Client(socket.create_connection(address, 5)) as client:
            return client.ask(b"list-tube-used").startswith(b"USING")
    except (OSError, WireError):
        return False


@pytest.fixture
def reader() -> Iterator[Reader]:
    require_postgres()
    made = Reader()
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_commands_of_the_page_work(reader: Reader) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    first, second = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    assert len(first.splitlines()) == 5
    reader.types(first)
    with reader.client("11300") as client:
        id = client.put(b"kept")
    with reader.client("11301") as client:
        assert client.ask(b"peek %d" % id).startswith(b"FOUND")
    reader.types(second)
    with reader.client("11301") as client:
        client.put(b"on both")
    sql = "SELECT application_name, sync_state FROM pg_stat_replication"
    assert "two|sync" in reader.types(f"psql -h 127.0.0.1 -p 5433 -U geventstalk postgres -Atc '{sql}'")
    (status,) = re.findall(r"`(geventstalk cluster status -b postgresql:\S+)`", page)
    said = reader.types(status)
    assert "active" in said and "standby" in said
    os.kill(reader.nodes[0], signal.SIGKILL)
    with reader.client("11301") as client:
        assert client.ask(b"peek %d" % id).startswith(b"FOUND")
        assert client.stats(b"stats")["current-jobs-ready"] == "2"
