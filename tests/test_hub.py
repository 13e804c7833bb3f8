"""The hub never waits for a device: what it does with files while it serves is what is listed here, and no more."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from geventstalk._build import BUILD
from tests.support.clients import number, until
from tests.support.process import ServerProcess, free_port
from tests.support.web import Web
from tests.support.wire import Client
from tests.test_max_memory import FLAGS, SIZE, fill

MAY = {
    "sqlite BEGIN: journal.sqlite.writer.append",
    "sqlite INSERT: journal.sqlite.writer.append",
    "sqlite COMMIT: journal.sqlite.writer.append",
    "sqlite INSERT: journal.sqlite.sql.write_meta",
    "pwrite: journal.sqlite.bodies._write",
    "write: geventstalk.http.audit._write",
    "open: geventstalk.http.memory.resident_bytes",
}
"""Rows and large payloads of the current segment are appended, its notes, and lines of the audit, all without a sync.
What the kernel says of the process is on no device."""


@pytest.mark.slow
@pytest.mark.skipif(BUILD == "compiled", reason="calls out of a compiled module cannot be noted")
def test_the_hub_waits_for_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under compaction, with bodies on disk, bulk moves, searches, exports, and everything that is only looked at."""
    monkeypatch.setenv("HUB_NOTES", str(tmp_path / "notes"))
    port = free_port()
    flags = ["-b", str(tmp_path / "journal"), *FLAGS, "--http", str(port)]
    flags += ["--audit", str(tmp_path / "audit")]
    server = ServerProcess([sys.executable, "-m", "tests.support.hub"], flags, stderr=tmp_path / "log")
    server.wait_ready()
    web = Web(port)
    with Client(server.connect()) as client:
        ids = list(fill(client, 200))  # where the device is slow, some puts were refused, and their ids are gone
        until(lambda: number(client, "memory-jobs-on-disk") > 100, "bodies leave memory")
        for text in '"abcdef"', "body:/[0-9]abc/":
            assert web.json("GET", f"/api/v1/jobs?filter={text}")["searched"] > 0
        assert web.ask("GET", "/api/v1/export")[0] == 200
        for path in "/metrics", "/api/v1/server", "/api/v1/tubes/default", "/api/v1/journal", "/api/v1/connections":
            assert web.ask("GET", path)[0] == 200
        assert web.json("GET", "/api/v1/jobs/5")["size"] == SIZE
        assert web.json("PATCH", "/api/v1/jobs/5", {"ttr_s": 7})["ttr_s"] == 7
        wanted = f"id:{ids[9]}..{ids[109]}"
        work = web.json("POST", "/api/v1/bulk", {"filter": wanted, "action": "move", "tube": "other"})
        until(lambda: web.json("GET", f"/api/v1/bulk/{work['number']}")["done"] == 101, "all are moved")
        moved = number(client, "binlog-records-migrated")
        for at, id in enumerate(ids, 1):
            if at % 4:
                assert client.ask(b"delete %d" % id) == b"DELETED\r\n"
        until(lambda: number(client, "binlog-records-migrated") > moved + 20, "compaction moves what is left")
        client.ask(b"watch other")
        for _ in range(40):
            assert client.ask(b"reserve-with-timeout 5").startswith(b"RESERVED")
    assert server.stop() == 0
    found = set((tmp_path / "notes").read_text().splitlines())
    assert found >= {each for each in MAY if "append" in each}, "nothing was noted"
    assert not found - MAY, "\n".join(sorted(found - MAY))
    assert not os.path.exists(tmp_path / "journal" / "suspect")
