"""geventstalk copy: a whole journal to another place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from geventstalk.dsn import has_password, is_shared, without_password
from geventstalk.offline import move
from journal.errors import JournalUnreachable
from journal.postgres.place import is_place
from journal.sqlite.builder import SegmentBuilder
from journal.sqlite.lock import DirectoryLock
from journal.tools import Survey
from tests.support.process import ROOT
from tests.support.tools import (
    exported,
    fill,
    make_folder,
    make_job,
    open_store,
    prints,
    run_tool,
    segments,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A journal of some segments, closed, with jobs in every state."""
    folder = tmp_path / "source"
    store = open_store(folder)
    fill(store)
    store.close()
    return folder


def test_a_copy_has_everything(folder: Path, tmp_path: Path) -> None:
    before = prints(folder)
    target = tmp_path / "target"
    jobs = exported(run_tool("export", folder))
    assert {job["state"] for job in jobs.values()} == {"ready", "delayed", "buried"}
    assert any("buries" in job for job in jobs.values())
    ran = run_tool("copy", folder, target)
    assert ran == (0, f"copied {len(jobs)} jobs from {folder} to {target}; the next id is 62\n", "")
    assert prints(folder) == before
    assert run_tool("export", target).out == run_tool("export", folder).out, "jobs, their order, and the highest id"
    open_store(target).close()
    assert exported(run_tool("export", target)) == jobs


def test_ids_behind_an_empty_journal_are_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a")
    store.put(make_job(77), b"t")
    store.commit(0)
    store.delete(make_job(77))
    store.close()
    ran = run_tool("copy", "--json", tmp_path / "a", tmp_path / "b")
    assert ran.code == 0 and ran.err == ""
    assert json.loads(ran.out) == {"source": f"{tmp_path}/a", "target": f"{tmp_path}/b", "jobs": 0, "next_id": 78}
    assert json.loads(run_tool("export", tmp_path / "b").out)["highest_id"] == 77


def test_places_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "empty")
    (make_folder(tmp_path / "full") / "file").touch()
    places = [
        (folder, tmp_path / "full"),
        (folder, folder),
        (folder, tmp_path / "no" / "parent"),
        (tmp_path / "absent", tmp_path / "target"),
        (tmp_path / "empty", tmp_path / "target"),
    ]
    for source, target in places:
        ran = run_tool("copy", source, target)
        assert ran.code == 10 and ran.out == "" and ran.err.count("\n") == 1, (source, target)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "empty", "full"}
    assert not list((tmp_path / "empty").iterdir())


def held(folder: Path) -> subprocess.Popen[bytes]:
    program = (
        "import sys; from journal.sqlite.lock import DirectoryLock; lock = DirectoryLock(sys.argv[1]);"
        "print('held', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program, str(folder)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=pipe, stdout=pipe)
    assert process.stdout and process.stdout.readline() == b"held\n"
    return process


def test_neither_place_has_a_server(folder: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "target")
    for place in (folder, tmp_path / "target"):
        process = held(place)
        try:
            ran = run_tool("copy", folder, tmp_path / "target")
        finally:
            process.communicate(timeout=60)
        assert ran.code == 10 and f"{place} is in use by another process" in ran.err
    assert run_tool("copy", folder, tmp_path / "target").code == 0


def test_no_server_comes_meanwhile(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own asks while the jobs are written: a lock does not keep its own process out."""
    asked: list[bool] = []

    def append(self: SegmentBuilder, key: int, payload: bytes, change: bytes | None = None) -> None:
        if not asked:
            program = "import sys; from journal.sqlite.lock import DirectoryLock; DirectoryLock(sys.argv[1])"
            for place in (folder, tmp_path / "target"):
                command = [sys.executable, "-c", program, str(place)]
                environment = {**os.environ, "PYTHONPATH": str(ROOT)}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
                asked.append("in use by another process" in done.stderr)
        real(self, key, payload, change)

    real = SegmentBuilder.append
    monkeypatch.setattr(SegmentBuilder, "append", append)
    assert run_tool("copy", folder, tmp_path / "target").code == 0
    assert asked == [True, True]


def test_a_source_without_a_lock_is_not_changed_and_a_server_that_comes_is_seen(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "lock").unlink()
    assert run_tool("copy", folder, tmp_path / "a").code == 0
    assert not (folder / "lock").exists()

    def append(self: SegmentBuilder, key: int, payload: bytes, change: bytes | None = None) -> None:
        DirectoryLock(str(folder)).close()
        real(self, key, payload, change)

    real = SegmentBuilder.append
    monkeypatch.setattr(SegmentBuilder, "append", append)
    ran = run_tool("copy", folder, tmp_path / "b")
    assert ran.code == 10 and "in use by another process" in ran.err


def damage(folder: Path) -> None:
    path = segments(folder)[0]
    path = path.with_name(path.name + "-bodies")
    data = bytearray(path.read_bytes())
    data[data.index(b"\x02" * 1000) + 500] ^= 0xFF
    path.write_bytes(data)


def test_damage_is_refused_or_accepted(folder: Path, tmp_path: Path) -> None:
    damage(folder)
    ran = run_tool("copy", folder, tmp_path / "target")
    assert ran.code == 1 and "finding: " in ran.err and "--accept-damage" in ran.err
    assert not (tmp_path / "target").exists()
    ran = run_tool("copy", "--accept-damage", folder, tmp_path / "target")
    assert ran.code == 0 and "finding: " in ran.err
    assert run_tool("export", tmp_path / "target").out == run_tool("export", "--accept-damage", folder).out
    assert run_tool("journal", "check", tmp_path / "target").code == 0


@pytest.mark.parametrize("fails", ["append", "finish"])
def test_a_copy_that_fails_leaves_nothing(
    fails: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SegmentBuilder, fails, fail)
    ran = run_tool("copy", folder, tmp_path / "target")
    assert ran == (1, "", "geventstalk: No space left on device\n")
    assert not (tmp_path / "target").exists()


# Bug: An import, a repair or a copy that was killed before its first thousand jobs passed for a journal without jobs.
@pytest.mark.parametrize("job", [1, 20, 50])
def test_a_copy_that_is_killed_passes_for_no_journal(job: int, folder: Path, tmp_path: Path) -> None:
    program = (
        "import os, sys; from geventstalk.offline import move; move._EVERY = 1\n"
        "def step(what, at, total):\n"
        f"    if what == 'writing' and at == {job}: os._exit(9)\n"
        "move.copy(sys.argv[1], sys.argv[2], lambda findings: None, step)"
    )
    command = [sys.executable, "-c", program, str(folder), str(tmp_path / "target")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, check=False)
    assert done.returncode == 9
    check = run_tool("journal", "check", tmp_path / "target")
    assert check.code == 1 and "is missing" in check.out
    assert run_tool("copy", folder, tmp_path / "target").code == 10
    assert run_tool("journal", "check", folder).code == 0


def test_what_was_written_is_compared(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: SegmentBuilder, key: int, payload: bytes, change: bytes | None = None) -> None:
        real(self, key, payload, None if key == spoilt else change)

    real = SegmentBuilder.append
    monkeypatch.setattr(SegmentBuilder, "append", append)
    spoilt = next(id for id, job in exported(run_tool("export", folder)).items() if job["state"] == "buried")
    ran = run_tool("copy", folder, tmp_path / "target")
    assert ran.code == 1 and "is not what was read" in ran.err


def test_a_place_that_is_lost_while_it_is_compared_has_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(survey: Survey, high_water: int) -> None:
        survey.close()
        raise JournalUnreachable("the database is gone")

    monkeypatch.setattr(move, "_read_again", lose)
    ran = run_tool("copy", folder, tmp_path / "target")
    words = "geventstalk: the database is gone; all jobs were written, but not compared\n"
    assert (ran.code, ran.err) == (69, words)
    monkeypatch.undo()
    assert exported(run_tool("export", tmp_path / "target")) == exported(run_tool("export", folder))


def test_it_tells_how_far_it_is(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move, "_EVERY", 1)
    told: list[tuple[str, int, int]] = []
    done = move.copy(str(folder), str(tmp_path / "target"), lambda findings: None, lambda *step: told.append(step))
    assert [step for step in told if step[0] == "writing"] == [
        ("writing", n, done.jobs) for n in range(1, done.jobs + 1)
    ]
    records = sum(step[0] == "reading" for step in told)
    assert records > done.jobs and told[-1][0] == "comparing"


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("postgresql://u:secret@h/db", "postgresql://u:***@h/db"),
        ("postgres://:secret@h", "postgres://:***@h"),
        ("postgresql://u:se:cr@et@h1:1,h2:2/db?x=1", "postgresql://u:***@h1:1,h2:2/db?x=1"),
        ("postgresql://u:secret/s2@h/db", "postgresql://u:***@h/db"),
        ("postgresql://h/db?password=secret", "postgresql://h/db?password=***"),
        ("postgresql://h/db?a=b&pass%77ord=secret&sslpassword=s2", "postgresql://h/db?a=b&pass%77ord=***&sslpassword=***"),
        ("postgresql://u@h1:5432,h2:5433/db?passfile=/x:y@z&user=a", None),
        ("postgresql:///db?host=/run:1@x", None),
        ("/a/directory:with@signs?password=x", None),
    ],
)  # fmt: skip
def test_a_password_is_no_word_of_a_command(place: str, shown: str | None, tmp_path: Path) -> None:
    assert is_shared(place) == is_place(place), "the program and the journal know the same schemes"
    assert has_password(place) == (shown is not None)
    assert without_password(place) == (shown or place)
    if shown is None:
        return
    for words in (["copy", tmp_path, place], ["copy", place, tmp_path], ["export", place], ["journal", "check", place]):
        ran = run_tool(*words)
        assert ran.code == 5 and ran.out == "" and "PGPASSWORD" in ran.err and shown in ran.err
        assert "secret" not in ran.err and "s2" not in ran.err
