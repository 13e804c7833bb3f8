"""Nodes as processes, on one PostgreSQL with a synchronous replica or on one alone; and what can be done to them.

Each node listens on an address of its own: a port of 127.0.0.1, or with a Network a namespace that can be cut off. It
serves HTTP on a unix socket, which no cut reaches, so that its role can always be asked.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from journal import make_shared_log
from tests.support.cluster.load import Address
from tests.support.cluster.net import CLIENTS, DATABASE, Network, Place
from tests.support.postgres import Pair, Postgres, scratch
from tests.support.process import GEVENTSTALK, ServerProcess, free_port

ACTIVE, STANDBY = "active", "standby"
LEASE_S = 1.0
HEALTHY_S = 60.0
POLL_S = 0.02


class OverUnix(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Node:
    """One node. It has several lives; its name, its address and its log stay."""

    def __init__(self, cluster: Cluster, name: str, place: Place | None) -> None:
        self.name = name
        self.place = place
        self.frozen = False
        self._cluster = cluster
        self._port = free_port()
        self._http = str(cluster.folder / f"{name}.http")
        self.log = cluster.folder / f"{name}.log"
        self.process: ServerProcess | None = None

    @property
    def address(self) -> Address:
        return (self.place.address if self.place else "127.0.0.1", self._port)

    def start(self) -> Node:
        """Begins a life. Does not wait for it to serve."""
        host, port = self.address
        args = ["-b", self._cluster.url, "--node", self.name, "--advertise", f"{host}:{port}"]
        args += ["--lease", str(self._cluster.lease_s), "--http", f"unix:{self._http}", *self._cluster.flags]
        command = [*(self.place.prefix if self.place else []), *self._cluster.command]
        self.process = ServerProcess(command, args, host=host, port=port, cwd=self._cluster.cwd, stderr=self.log)
        self.frozen = False
        return self

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.process.poll() is None

    def role(self) -> str:
        """Returns what it says of itself: ACTIVE or STANDBY; "" while it is neither, or does not answer."""
        if not self.running or self.frozen:
            return ""
        connection = OverUnix(self._http, 1.0)
        try:
            for role, path in ((ACTIVE, "/readyz?role=active"), (STANDBY, "/readyz?role=standby")):
                connection.request("GET", path)
                answer = connection.getresponse()
                answer.read()
                if answer.status == 200:
                    return role
        except (OSError, http.client.HTTPException):
            return ""
        finally:
            connection.close()
        return ""

    def _signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)
        self.frozen = False

    def terminate(self) -> None:
        """SIGTERM; does not wait."""
        self._signal(signal.SIGTERM)

    def end(self) -> int:
        """Waits for the end of a node that was told to end. Returns the exit code."""
        assert self.process is not None
        return self.process.stop()

    def last_words(self, lines: int = 5) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else "it was not started"
        return " | ".join(text.splitlines()[-lines:])

    def close(self) -> None:
        if self.process is not None and self.running:
            with suppress(ProcessLookupError):
                self._signal(signal.SIGCONT)
            self.process.kill()


class Cluster:
    """So many nodes on one database, in a scratch folder. Use it as a context manager: it starts all, and ends all."""

    def __init__(
        self,
        *,
        nodes: int = 2,
        replica: bool = True,
        cuttable: bool = False,
        lease_s: float = LEASE_S,
        flags: Sequence[str] = (),
        command: Sequence[str] = tuple(GEVENTSTALK),
        cwd: Path | None = None,
        plain: bool = False,
    ) -> None:
        """With `plain` the servers of PostgreSQL are in all things as users begin with them."""
        self.folder = scratch()
        self._plain = plain
        self.cwd = cwd or self.folder
        self.lease_s = lease_s
        self.flags = list(flags)
        self.command = list(command)
        self.network = Network("c") if cuttable else None
        self.pair: Pair | None = None
        self.alone: Postgres | None = None
        self._replica = replica
        self.nodes = [Node(self, name, self.network.place() if self.network else None) for name in "abcdefgh"[:nodes]]

    def __enter__(self) -> Cluster:
        try:
            self._start_database()
            self.nodes[0].start()
            self.wait(lambda: self.nodes[0].role() == ACTIVE, "the first node leads")
            for node in self.nodes[1:]:
                node.start()
            self.wait_healthy()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            for node in self.nodes:
                node.close()
        finally:
            if self.pair is not None:
                self.pair.close()
            if self.alone is not None:
                self.alone.close()
            if self.network is not None:
                self.network.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def keep(self) -> Path:
        """Copies the logs to where they stay, for a look into a failure."""
        kept = Path(tempfile.mkdtemp(prefix="cluster-"))
        for node in self.nodes:
            shutil.copy(node.log, kept)
        servers = [self.pair.primary, self.pair.replica] if self.pair else [self.alone] if self.alone else []
        for server in servers:
            with suppress(ValueError):  # it is just being replaced
                (kept / f"{server.name}.log").write_text(server.log())
        return kept

    # --- the database

    def _start_database(self) -> None:
        listen = [self.network.database] if self.network else []
        if self._replica:
            self.pair = Pair(self.folder, listen, plain=self._plain)
            self.pair.start()
        else:
            self.alone = Postgres.create(self.folder, listen=listen)
            self.alone.start()
        make_shared_log(self.url)

    @property
    def url(self) -> str:
        host = self.network.database if self.network else "127.0.0.1"
        database = self.pair or self.alone
        assert database is not None
        return database.url.replace("127.0.0.1", host)

    # --- roles

    @property
    def addresses(self) -> list[Address]:
        return [node.address for node in self.nodes]

    def active(self) -> Node | None:
        """Returns the node that serves; None when no node does, or none can be asked."""
        return next((node for node in self.nodes if node.role() == ACTIVE), None)

    def standby(self) -> Node:
        """A node that follows. Raises AssertionError when there is none."""
        node = next((node for node in self.nodes if node.role() == STANDBY), None)
        assert node is not None, "no node follows"
        return node

    def leader(self) -> Node:
        """Returns the node that serves. Raises AssertionError when no node does."""
        node = self.active()
        assert node is not None, "no node serves"
        return node

    def healthy(self) -> bool:
        """Returns whether one node serves, all others follow, and each commit waits for the replica."""
        roles = sorted(node.role() for node in self.nodes)
        return roles == sorted([ACTIVE] + [STANDBY] * (len(self.nodes) - 1))

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = HEALTHY_S) -> None:
        """Returns once it is so. Raises AssertionError, with what the nodes said last."""
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                said = "\n".join(
                    f"{node.name} ({node.role() or 'no role'}): {node.last_words()}" for node in self.nodes
                )
                raise AssertionError(f"not in {timeout_s:g} s: {what}\n{said}")
            time.sleep(POLL_S)

    def wait_healthy(self) -> None:
        self.wait(self.healthy, "one node serves and the others follow")


__all__ = ["ACTIVE", "CLIENTS", "DATABASE", "STANDBY", "Cluster", "Node"]
