"""PostgreSQL servers as child processes: one alone, or a primary with a synchronous replica.

Each is a scratch directory below /tmp, a unix socket in it and a port of 127.0.0.1. PostgreSQL refuses to run as root:
then it runs as the user `postgres`. The starter of a server stops it; kill(), freeze() and thaw() reach all of its
processes and nothing else.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.process import free_port

USER = "geventstalk"
DATABASE = "postgres"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
SMALL = "--locale=C --wal-segsize=1 --no-sync --no-instructions"
QUICK = {"wal_retrieve_retry_interval": "100ms"}
"""What docs/cluster.md has users set on replicas: without it a promotion may take 5 s. All else is as Debian has it.

A test on other settings than users have does not see what users meet: JIT, autovacuum, the sizes of caches. So no
setting is changed because it makes servers smaller or quicker, and fsync is on. initdb differs in three things that no
query sees: the new files are not synced, files of the WAL have 1 MB, and names are sorted by their bytes.
"""


@functools.cache
def programs() -> Path | None:
    """The folder of PostgreSQL's programs; None where it is not installed, or root has no user to run it as."""
    folders = [Path(each) for each in os.environ.get("PATH", "").split(os.pathsep)]
    installed = Path("/usr/lib/postgresql")
    if installed.is_dir():
        versions = [each for each in installed.iterdir() if each.name.isdigit()]
        folders += [each / "bin" for each in sorted(versions, key=lambda each: -int(each.name))]
    wanted = ("initdb", "postgres", "pg_basebackup")
    found = next((each for each in folders if all((each / name).exists() for name in wanted)), None)
    if found is not None and os.geteuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            return None
    return found


def have_psycopg() -> bool:
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return False
    return True


def require_postgres() -> None:
    """Skips the test where PostgreSQL, or the library for it, is missing."""
    if programs() is None:
        pytest.skip("PostgreSQL is not installed")
    if not have_psycopg():
        pytest.skip("psycopg is not installed")


def scratch() -> Path:
    """A new folder that the user of PostgreSQL may enter, with a path that is short enough for a unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="gvst-pg-"))
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
    return folder


def _as_user() -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam("postgres")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": [], "umask": 0o077}


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """In the child: tests that are killed leave no server behind."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGQUIT), 0, 0, 0)


def _run(*words: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, cwd="/", env=environment, **_as_user()
    )
    assert done.returncode == 0, (words, done.stderr.decode(errors="replace")[-2000:])


class Postgres:
    """One server. `folder` holds its data, its socket and its log."""

    def __init__(self, folder: Path, name: str = "primary") -> None:
        self.folder = folder
        self.name = name
        self.data = folder / name
        self.port = free_port()
        self.settings = {"listen_addresses": "127.0.0.1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open for as long as this object lives

    # --- making one

    @classmethod
    def create(cls, folder: Path, name: str = "primary", listen: Sequence[str] = (), initdb: str = SMALL) -> Postgres:
        """A new empty server that does not run. `listen` names further addresses; all in their /24 may connect."""
        server = cls(folder, name)
        server.listen(listen)
        command = programs()
        assert command is not None
        _run(
            *[str(command / "initdb"), "-D", str(server.data), "-A", "trust", "-U", USER, "-E", "UTF8"], *initdb.split()
        )
        with (server.data / "pg_hba.conf").open("a") as file:
            file.writelines(f"host all all {address}/24 trust\n" for address in listen)
        return server

    def listen(self, addresses: Sequence[str]) -> None:
        """From the next start on also there."""
        self.settings["listen_addresses"] = ",".join(["127.0.0.1", *addresses])

    def replica(self, name: str = "replica", port: int = 0) -> Postgres:
        """A copy of this server, which runs, that follows it once started. `name` is its application_name."""
        copy = Postgres(self.folder, name)
        copy.settings = dict(self.settings)
        copy.port = port or copy.port
        command = programs()
        assert command is not None
        source = f"host=127.0.0.1 port={self.port} user={USER} application_name={name}"
        words = [str(command / "pg_basebackup"), "-D", str(copy.data), "-d", source, "-c", "fast", "-X", "stream"]
        _run(*words, "-R", "--no-sync")
        return copy

    def twin(self, name: str) -> Postgres:
        """A replica of this server made before its first start: quicker than replica()."""
        copy = Postgres(self.folder, name)
        copy.settings = dict(self.settings)
        _run("cp", "-a", str(self.data), str(copy.data))
        with (copy.data / "postgresql.auto.conf").open("a") as file:
            source = f"host=127.0.0.1 port={self.port} user={USER} application_name={name}"
            file.write(f"primary_conninfo = '{source}'\n")
        (copy.data / "standby.signal").touch()
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(copy.data / "standby.signal", user.pw_uid, user.pw_gid)
        return copy

    # --- running

    def start(self) -> Postgres:
        assert self._process is None, "it runs"
        command = programs()
        assert command is not None
        words = [str(command / "postgres"), "-D", str(self.data), "-k", str(self.folder), "-p", str(self.port)]
        words += [word for name, value in self.settings.items() for word in ("-c", f"{name}={value}")]
        with suppress(FileNotFoundError):
            (self.data / "postmaster.pid").unlink()  # of a server that was killed
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd="/",
            preexec_fn=_die_with_parent,
            **_as_user(),
        )
        self._wait_until_ready()
        return self

    def _wait_until_ready(self) -> None:
        process = self._process
        assert process is not None
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            with suppress(OSError, IndexError):
                lines = (self.data / "postmaster.pid").read_text().splitlines()
                if lines[7].strip() in ("ready", "standby"):
                    return
            assert process.poll() is None, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.005)

    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None

    def processes(self) -> list[int]:
        """All of its processes, the first one first."""
        found = [self.pid]
        with suppress(OSError):  # it has ended by itself
            found += map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())
        return found

    def stop(self) -> None:
        """The usual end: connections are closed, and everything is on the disk."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Ends all processes at once, as a machine that dies does; what is written to the system stays."""
        if self._process is None:
            return
        self.freeze()  # so that no new process comes
        for pid in reversed(self.processes()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT_S)
        self._process = None

    def freeze(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        for pid in self.processes():  # those that came meanwhile
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in reversed(self.processes()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def reload(self, **settings: str) -> None:
        """Changes settings of a server that runs. Those of start() stay in force: they come from its command line."""
        with (self.data / "postgresql.auto.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
        os.kill(self.pid, signal.SIGHUP)

    def serve_tls(self, password: str) -> Path:
        """From now on over TCP only with TLS and this password. Returns the file of the authority to trust.

        Raises FileNotFoundError without the program `openssl`.
        """
        self.ask(f"ALTER ROLE {USER} PASSWORD '{password}'")
        trusted, key = self.data / "server.crt", self.data / "server.key"
        _run(
            *["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"],
            *["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
            *["-keyout", str(key), "-out", str(trusted)],
        )
        (self.data / "pg_hba.conf").write_text("local all all trust\nhostssl all all 127.0.0.1/32 scram-sha-256\n")
        self.reload(ssl="on")
        return trusted

    def promote(self, timeout_s: float = 30.0) -> None:
        """Makes a replica a primary, and waits until it takes writes."""
        (self.data / "promote").touch()
        os.kill(self.pid, signal.SIGUSR1)
        end = time.monotonic() + timeout_s
        while self.ask("SELECT pg_is_in_recovery()") != [("f",)]:
            assert time.monotonic() < end, self.log()
            time.sleep(0.002)

    def close(self) -> None:
        """Ends it, whatever state it is in."""
        self.kill()
        self._log.close()

    def _end(self, number: int) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._process = None

    # --- talking to it

    @property
    def url(self) -> str:
        """Where clients find it, over TCP."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{DATABASE}"

    @property
    def unix_url(self) -> str:
        return f"postgresql://{USER}@/{DATABASE}?host={self.folder}&port={self.port}"

    def connect(self, **options: Any) -> Any:
        """A connection of psycopg, in autocommit mode."""
        import psycopg

        return psycopg.connect(self.url, autocommit=True, connect_timeout=10, **options)

    def ask(self, sql: str) -> list[tuple[str | None, ...]]:
        """The rows of one statement, as text."""
        from psycopg import pq

        link = pq.PGconn.connect(f"{self.url}?connect_timeout=10".encode())
        try:
            assert link.status == pq.ConnStatus.OK, link.get_error_message()
            result = link.exec_(sql.encode())
            fine = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK)
            assert result.status in fine, result.get_error_message()
            return [
                tuple(_text(result.get_value(row, column)) for column in range(result.nfields))
                for row in range(result.ntuples)
            ]
        finally:
            link.finish()

    def log(self) -> str:
        """The end of what it wrote."""
        size = self._log.seek(0, os.SEEK_END)
        return os.pread(self._log.fileno(), 20_000, max(0, size - 20_000)).decode(errors="replace")


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


class Pair:
    """A primary and a synchronous replica, once start() was called. After fail_over() they have changed places."""

    def __init__(self, folder: Path, listen: Sequence[str] = (), *, plain: bool = False) -> None:
        """With `plain` no setting at all is another one than users begin with."""
        self.folder = folder
        self.primary = Postgres.create(folder, "one", listen, *([""] if plain else []))
        if not plain:
            self.primary.settings |= QUICK
        self.replica = self.primary.twin("two")

    def start(self) -> Pair:
        self._follow()
        return self

    def _follow(self) -> None:
        if not self.primary.running:
            self.primary.start()
        self.replica.start()
        self.primary.reload(synchronous_standby_names="*")
        self.await_replica()

    def await_replica(self, timeout_s: float = 30.0) -> None:
        """Waits until the primary waits for the replica at each commit."""
        end = time.monotonic() + timeout_s
        while self.primary.ask("SELECT sync_state FROM pg_stat_replication") != [("sync",)]:
            assert time.monotonic() < end, self.primary.log()
            time.sleep(0.01)

    @property
    def url(self) -> str:
        """Both of them: a client takes the one that may be written to."""
        ports = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.replica.port}"
        return f"postgresql://{USER}@{ports}/{DATABASE}"

    def fail_over(self) -> None:
        """Promotes the replica, which then waits for no other. The old primary must not run any more, or be cut off."""
        self.replica.reload(synchronous_standby_names="")
        self.replica.promote()
        self.primary, self.replica = self.replica, self.primary

    def rejoin(self) -> None:
        """Makes a new replica out of the server that is none: its data goes. Clients find it where it was."""
        old = self.replica
        old.close()
        shutil.rmtree(old.data)
        self.replica = self.primary.replica(old.name, old.port)
        self._follow()

    def close(self) -> None:
        self.primary.close()
        self.replica.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_schemas = itertools.count(1)


def new_schema() -> str:
    """A name that no other test has."""
    return f"test_{os.getpid()}_{next(_schemas)}"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """A server for all tests of this worker: none of them stops it, freezes it or changes its settings."""
    require_postgres()
    folder = scratch()
    server = Postgres.create(folder)
    try:
        yield server.start()
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: Postgres) -> str:
    """A place for a log of its own, in the server of this worker."""
    return f"{postgres_server.unix_url}&schema={new_schema()}"


@pytest.fixture
def postgres_alone() -> Iterator[Postgres]:
    """A server that only this test uses, and may stop, kill and freeze."""
    require_postgres()
    folder = scratch()
    server = Postgres.create(folder)
    try:
        yield server.start()
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_pair() -> Iterator[Pair]:
    """A primary with a synchronous replica that only this test uses."""
    require_postgres()
    pair = Pair(scratch())
    try:
        yield pair.start()
    finally:
        pair.close()
