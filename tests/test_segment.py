"""One segment: what it keeps, what it says of damage, and how it is created, sealed and given up."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from geventstalk._build import BUILD
from journal import CHANGE, DELETE, FULL, JournalDamaged, JournalError, JournalFailed, JournalFull, JournalNewer
from journal.sqlite import format as format_module
from journal.sqlite import writer as writer_module
from journal.sqlite.files import BODIES_SUFFIX, NEW_SUFFIX, disk_bytes, sync_files, takes_files
from journal.sqlite.format import (
    EMPTY_BYTES,
    FORMAT_VERSION,
    GROUP,
    INSIDE_MAX,
    LAST,
    PAGE_BYTES,
    PART,
    checksum,
    row_bytes,
    split,
)
from journal.sqlite.reader import SegmentReader, join
from journal.sqlite.sql import failure_of, write_meta
from journal.sqlite.wal import torn_bytes
from journal.sqlite.writer import SegmentWriter, seal_left_over
from tests.support.disk import KIB, free_bytes, small_disk, take_inodes

Row = tuple[int, int, bytes]
ROWS: list[Row] = [
    (1, FULL, b"one"),
    (2, FULL, b""),
    (1, CHANGE, b"\x00" * 21),
    (2**63 - 1, FULL, bytes(range(256)) * 20),
    (2, DELETE, b""),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segment-00000007.db"


def write(path: Path, rows: list[Row] = ROWS, ahead: int = 0) -> SegmentWriter:
    """A segment with each row in a transaction of its own, left open."""
    writer = SegmentWriter(str(path), 7, 99, ahead)
    for row in rows:
        writer.append([row])
    return writer


def sealed(path: Path, rows: list[Row] = ROWS) -> Path:
    write(path, rows).seal()
    return path


def left(path: Path, into: Path, rows: list[Row] = ROWS, ahead: int = 0) -> Path:
    """The segment as kill -9 leaves it, in another folder."""
    writer = write(path, rows, ahead)
    into.mkdir()
    for name in (path.name, path.name + "-wal", path.name + BODIES_SUFFIX):
        shutil.copy(path.parent / name, into)
    writer.discard()
    return into / path.name


def read(path: Path) -> tuple[list[Row], SegmentReader]:
    reader = SegmentReader(str(path))
    try:
        return list(reader.rows()), reader
    finally:
        reader.close()


def alter(path: Path, statement: str, *values: object) -> None:
    """Damage by way of SQLite: every page is well-formed, what stands in them is not what was written."""
    db = sqlite3.connect(path, isolation_level=None)
    changed = db.execute(statement, values).rowcount
    db.close()
    assert changed != 0, "there was nothing to damage"


# Writing and reading


def test_rows_come_back_in_order(path: Path) -> None:
    rows, reader = read(sealed(path))
    assert rows == ROWS
    assert (reader.records, reader.skipped, reader.number, reader.high_water) == (5, 0, 7, 99)
    assert reader.sealed


def test_an_open_segment_is_read_with_its_wal(path: Path, tmp_path: Path) -> None:
    rows, reader = read(left(path, tmp_path / "crash"))
    assert rows == ROWS
    assert not reader.sealed


def test_reading_changes_nothing(path: Path, tmp_path: Path) -> None:
    """The WAL that a crash left stays as it is, until a start that goes through seals it."""
    place = left(path, tmp_path / "crash")
    before = {file.name: file.read_bytes() for file in place.parent.iterdir()}
    read(place)
    assert before == {file.name: file.read_bytes() for file in place.parent.iterdir() if "-shm" not in file.name}


def test_a_segment_says_what_it_is(path: Path) -> None:
    write(path).discard()
    sealed(path)
    head = path.read_bytes()[:100]
    assert head.startswith(b"SQLite format 3\0")
    assert head[68:72] == b"gvst"
    assert int.from_bytes(head[60:64], "big") == FORMAT_VERSION
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_note_is_what_the_reader_finds(path: Path) -> None:
    writer = write(path)
    writer.note(12345, 3)
    writer.seal()
    _, reader = read(path)
    assert (reader.high_water, reader.oldest) == (12345, 3)


# Bug: The file was accepted.
def test_a_sealed_segment_that_lacks_zeros_at_its_end_is_damaged(path: Path) -> None:
    """SQLite reads what lacks of the last page as zeros. What cuts a file by one byte cuts the next one by more."""
    size = next(
        size
        for size in range(1, 1900, 100)
        if sealed(path.with_name(f"segment-{size}.db"), [(1, FULL, bytes(size))]).read_bytes().endswith(b"\0")
    )
    path = path.with_name(f"segment-{size}.db")
    SegmentReader(str(path)).close()
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(JournalDamaged, match="cut short"):
        SegmentReader(str(path))


def test_keys_after_looks_at_whole_records_only(path: Path) -> None:
    reader = SegmentReader(str(sealed(path)))
    whole = [(1, 1), (2, 2), (4, 2**63 - 1)]
    assert reader.keys_after(0, 100) == (whole, len(ROWS))
    assert reader.keys_after(0, 2) == (whole[:2], 2)
    assert reader.keys_after(2, 100) == (whole[2:], len(ROWS))
    assert reader.keys_after(len(ROWS), 100) == ([], len(ROWS))
    reader.close()


# Transactions


def test_a_batch_is_whole_or_absent_wherever_its_write_was_cut(path: Path, tmp_path: Path) -> None:
    """W30: each length of the WAL gives this many whole batches, and never a part of one."""
    writer = SegmentWriter(str(path), 7, 0)
    ends = [os.path.getsize(f"{path}-wal")]
    batches = [[(1, FULL, b"a" * 100), (2, FULL, b"b" * 5000)], [(3, FULL, b"c" * 9000)], [(1, DELETE, b"")]]
    for batch in batches:
        writer.append(batch)
        ends.append(os.path.getsize(f"{path}-wal"))
    wal = Path(f"{path}-wal").read_bytes()
    place = tmp_path / "cut" / path.name
    place.parent.mkdir()
    shutil.copy(path, place)
    bodies = shutil.copy(f"{path}{BODIES_SUFFIX}", f"{place}{BODIES_SUFFIX}")
    writer.discard()
    for size in [*range(0, len(wal), 97), *(end + by for end in ends[1:] for by in (-1, 0, 1))]:
        Path(f"{place}-shm").unlink(missing_ok=True)
        Path(f"{place}-wal").write_bytes(wal[:size])
        whole = sum(size >= end for end in ends[1:])
        rows, _ = read(place)
        assert rows == [row for batch in batches[:whole] for row in batch], size
    payloads = b"b" * 5000 + b"c" * 9000
    for size, zeros in product([*range(0, 14_000, 490), 4999, 5000, 13_999], [0, 14_000]):
        Path(bodies).write_bytes(payloads[:size] + bytes(zeros))  # a loss of power took payloads, and not their rows
        rows, reader = read(place)
        assert rows == (batches[0] if size >= 5000 else []) and reader.torn and not reader.skipped, (size, zeros)


def test_after_a_full_disk_the_same_batch_goes_through(path: Path) -> None:
    """Nothing of it was written; it has the same place as before."""
    writer = write(path)
    limit, *_ = writer._db.execute("PRAGMA page_count").fetchone()
    writer._db.execute(f"PRAGMA max_page_count={limit + 1}")
    batch: list[Row] = [(10, FULL, b"w" * 5000), *[(key, FULL, b"y" * 1900) for key in range(11, 40)]]
    for _ in range(2):
        with pytest.raises(JournalFull) as caught:
            writer.append(batch)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        assert writer.records == 5
    writer._db.execute("PRAGMA max_page_count=1000000")
    writer.append(batch)
    writer.seal()
    assert read(path)[0] == ROWS + batch


# Small records that share a row


def write_batches(path: Path, batches: list[list[Row]]) -> SegmentWriter:
    writer = SegmentWriter(str(path), 7, 99)
    for batch in batches:
        writer.append(batch)
    return writer


def ask(path: Path, question: str) -> list[tuple[Any, ...]]:
    db = sqlite3.connect(f"file:{path}?immutable=1", uri=True)
    try:
        return db.execute(question).fetchall()
    finally:
        db.close()


SMALL: list[Row] = [(key, FULL, b"%03d" % key * 20) for key in range(100, 130)]


def test_every_reading_gives_what_was_appended_however_it_is_grouped(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    batches: list[list[Row]] = []
    for _ in range(40):
        sizes = draw.choice([[0, 1, 60, 100], [190, 200, 201, 210], [0, 60, 990, 5000]])
        batch: list[Row] = []
        for _ in range(draw.choice([1, 2, 3, 10, 60, 300])):
            kind = draw.choice([FULL, FULL, CHANGE, DELETE])
            batch.append(
                (draw.choice([1, 10**9, 2**63 - 1, draw.randrange(2**40)]), kind, draw.randbytes(draw.choice(sizes)))
            )
        batches.append(batch)
    every = [row for batch in batches for row in batch]
    writer = write_batches(path, batches)
    assert writer.records == len(every)
    writer.seal()
    assert len(ask(path, "SELECT seq FROM record")) < len(every)
    rows, reader = read(path)
    assert rows == every and (reader.records, reader.skipped) == (len(every), 0)
    reader = SegmentReader(str(path))
    assert [row[1:3] + row[4:] for some in reader.batches() for row in some] == every
    assert reader.records == len(every)
    wholes = [(seq, key) for seq, (key, kind, _) in enumerate(every, 1) if kind == FULL]
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(every):
        some, seen = reader.keys_after(at, draw.randrange(1, 30))
        assert seen > at
        kept = draw.randrange(len(some) + 1)  # a slice of compaction may end anywhere
        at = some[kept - 1][0] if 0 < kept < len(some) else seen
        found += some if at == seen else some[:kept]
    assert found == wholes
    reader.close()
    shown = ask(path, "SELECT * FROM each_record ORDER BY seq")
    inside = [(key, kind, row if len(row) <= INSIDE_MAX else row[: 256 * (kind == FULL)]) for key, kind, row in every]
    assert shown == [(seq, *row) for seq, row in enumerate(inside, 1)]


@pytest.mark.parametrize("grouped", [False, True])
def test_keys_are_found_behind_any_number_of_records_without(path: Path, grouped: bool) -> None:
    """Else compaction would take the rest of its segment for dead, and wait for it for ever.

    A slice looks at some rows only: with a hundred thousand deletes in a segment it took 100 ms.
    """
    changes: list[Row] = [(1, CHANGE, b"change")] * 9000
    batches = [changes] if grouped else [[change] for change in changes]
    write_batches(path, [SMALL[:2], *batches, SMALL[2:3]]).seal()
    reader = SegmentReader(str(path))
    at, slices = 2, 0
    found: list[tuple[int, int]] = []
    while not found:
        before = at
        found, at = reader.keys_after(at, 50)
        assert before < at <= before + (50 if not grouped else 50 // 9 * 200 + 200)
        slices += 1
    assert found == [(9003, SMALL[2][0])] and slices > 5
    reader.close()


def test_only_small_records_of_one_commit_share_a_row(path: Path) -> None:
    large: Row = (1, FULL, b"x" * 201)
    write_batches(path, [[SMALL[0]], [SMALL[1], large, SMALL[2], SMALL[3], large], SMALL[4:6]]).seal()
    kinds = ask(path, "SELECT seq, key, kind FROM record")
    assert kinds == [(1, 100, FULL), (2, 101, FULL), (3, 1, FULL), (5, 2, GROUP), (6, 1, FULL), (8, 2, GROUP)]
    (payload,) = ask(path, "SELECT payload FROM record WHERE seq = 8")[0]
    assert payload == b"[[104,1,60],[105,1,60]]\n" + SMALL[4][2] + SMALL[5][2], "as the header of format.py says"


@pytest.mark.parametrize("size", [0, 21, 60, 100, 130, 170, 200])
@pytest.mark.parametrize("together", [2, 3, 8, 9, 50, 300])
def test_a_group_takes_hardly_more_than_its_records_would_alone(path: Path, size: int, together: int) -> None:
    """The journal counts what is live by record; what a segment comes to must not be far from that."""
    writer = SegmentWriter(str(path), 7, 0)
    empty = disk_bytes(str(path))
    count = 300_000 // (size + 24) // together
    for at in range(count):
        writer.append([(100_000 + at * together + key, FULL, b"x" * size) for key in range(together)])
    written = writer.bytes
    writer.seal()
    grown = path.stat().st_size - empty
    assert grown <= (1.15 if together == 300 else 1.4) * count * together * row_bytes(size)
    assert 1.0 <= written / grown < 1.4


# Payloads that are larger than a row


@pytest.mark.skipif(BUILD == "compiled", reason="a constant of a compiled module cannot be replaced")
@pytest.mark.parametrize("size", [9, 10, 11, 20, 21, 95])
def test_a_large_payload_is_split_and_joined(path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(format_module, "PART_BYTES", 10)
    payload = bytes(range(size))
    rows = split(5, payload)
    assert [kind for _, kind, _ in rows] == [PART] * (len(rows) - 1) + [LAST]
    reader = SegmentReader(str(sealed(path, [(1, FULL, b"before"), *rows, (6, FULL, b"behind")])))
    assert list(join(reader)) == [(1, FULL, b"before"), (5, FULL, payload), (6, FULL, b"behind")]
    assert reader.skipped == 0
    assert [key for _, key in reader.keys_after(0, 100)[0]] == [1, 5, 6], "such a key is moved like any other"
    reader.close()


@pytest.mark.skipif(BUILD == "compiled", reason="a constant of a compiled module cannot be replaced")
@pytest.mark.parametrize("gone", [1, 2, 3, 4])
def test_a_split_payload_that_misses_a_part_is_no_payload(
    path: Path, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    monkeypatch.setattr(format_module, "PART_BYTES", 10)
    rows = split(5, bytes(35))
    assert len(rows) == 4
    alter(sealed(path, [*rows, (6, FULL, b"behind")]), "DELETE FROM record WHERE seq = ?", gone)
    reader = SegmentReader(str(path))
    assert list(join(reader)) == [(6, FULL, b"behind")]
    assert reader.skipped > 0
    reader.close()


# Damage


@pytest.mark.parametrize("size", [40, 226, 500, 980, 1063, 1960, 2100, 3000, 4100, 10_000])
def test_what_a_row_takes_is_what_the_file_grows_by(path: Path, size: int) -> None:
    """A page holds whole records only: those of 1,063 bytes take twice of what they are."""
    count = 300_000 // size
    writer = SegmentWriter(str(path), 7, 0)
    empty = disk_bytes(str(path))
    for key in range(count):
        writer.append([(1000 + key, FULL, b"x" * size)])
    writer.seal()
    grown = (disk_bytes(str(path)) - empty) / count
    assert abs(row_bytes(size) / grown - 1) < 0.2, grown


def test_the_checksum_depends_on_all_that_it_stands_for() -> None:
    one = checksum(1, 2, FULL, b"payload")
    others = [(2, 2, FULL, b"payload"), (1, 3, FULL, b"payload"), (1, 2, CHANGE, b"payload"), (1, 2, FULL, b"pazload")]
    assert one not in [checksum(*other) for other in others]
    assert checksum(1, 2**40, FULL, b"") != checksum(1, 0, FULL, b"")


@pytest.mark.parametrize(
    "change",
    ["payload = x'6f6e66'", "key = 3", "kind = 3", "kind = 9", "kind = 0", "crc = crc + 1", "crc = NULL"],
)
def test_a_changed_record_is_left_out_and_counted(path: Path, change: str) -> None:
    sealed(path)
    if "NULL" in change:  # the schema forbids it; a file made by hand need not have it
        alter(path, "CREATE TABLE other AS SELECT * FROM record")
        for statement in ("DROP VIEW each_record", "DROP TABLE record", "ALTER TABLE other RENAME TO record"):
            alter(path, statement)
    alter(path, f"UPDATE record SET {change} WHERE seq = 1")
    rows, reader = read(path)
    assert rows == ROWS[1:]
    assert (reader.skipped, reader.records) == (1, 5)


def test_two_records_that_changed_places_are_both_left_out(path: Path) -> None:
    sealed(path)
    for old, new in ((1, 100), (4, 1), (100, 4)):
        alter(path, "UPDATE record SET seq = ? WHERE seq = ?", new, old)
    rows, reader = read(path)
    assert rows == [ROWS[1], ROWS[2], ROWS[4]]
    assert reader.skipped == 2


def test_records_that_are_gone_in_the_middle_are_counted(path: Path) -> None:
    alter(sealed(path), "DELETE FROM record WHERE seq IN (2, 3)")
    rows, reader = read(path)
    assert rows == [ROWS[0], ROWS[3], ROWS[4]]
    assert reader.skipped == 2


def test_a_page_in_the_place_of_another_hides_none(path: Path) -> None:
    """As one flipped bit in SQLite's tree can do it. The records of the page come twice, those it hides do not."""
    many: list[Row] = [(key, FULL, b"x" * 500) for key in range(1, 40)]
    content = bytearray(sealed(path, many).read_bytes())
    root = 2 * PAGE_BYTES
    assert content[root] == 5, "the table has no inner page"
    cells = [int.from_bytes(content[root + 12 + 2 * at :][:2], "big") + root for at in range(4)]
    content[cells[2] : cells[2] + 4] = content[cells[1] : cells[1] + 4]
    path.write_bytes(content)
    rows, reader = read(path)
    assert rows == [row for row in many if row in rows] != many
    assert reader.skipped >= len(many) - len(rows)


@pytest.mark.parametrize(
    "change",
    [
        "payload = CAST(replace(payload, x'313034', x'313035') AS BLOB)",  # 104 becomes 105, in a body
        "payload = substr(payload, 2)",
        "key = key + 1",
        "key = -1",
        "kind = 1",
        "crc = crc + 1",
        None,
    ],
)
def test_a_damaged_group_is_left_out_and_its_records_are_counted(path: Path, change: str | None) -> None:
    write_batches(path, [ROWS[:1], SMALL[:6], ROWS[2:3], SMALL[6:8]]).seal()
    alter(path, f"UPDATE record SET {change} WHERE seq = 7" if change else "DELETE FROM record WHERE seq = 7")
    rows, reader = read(path)
    assert rows == [ROWS[0], ROWS[2], *SMALL[6:8]]
    assert (reader.skipped, reader.records) == (6, 10)
    reader = SegmentReader(str(path))
    assert [row[1] for some in reader.batches() for row in some] == [1, 1, 106, 107]
    assert reader.skipped == 6
    reader.close()


@pytest.mark.parametrize(
    "payload",
    [b"", b"\n", b"[]\n", b"[[1,1,1]]\nx", b"[[1,1,1],[2,1,1]]\nx", b"[[1,1,1],[2,1,1]]\nxyz", b"[[1,1],[2,1]]\nxy",
     b"[[1,1,1],[2,1,1]xy", b"[[1,1,1],[2,9,1]]\nxy", b"[[1,1,2],[2,1,-1]]\nxy", b"[[1,1,3],[2,1,-1]]\nxy", b"{}\n",
     b"[[1,1,1],[2,1,1]] \nxy", b"[[1,1,1],[2,1,1]],\nxy", b"[[1,1],[2,1,1]]\nxy", b"[[],[]]\n", b"[null,null]\n",

     b"\xff\xfe\n", b"[1,2]\nxy", b"[[-1,1,1],[2,1,1]]\nxy", b"[[1,1,1],[9223372036854775808,1,1]]\nxy",
     b"[" * 100000 + b"\n"],
)  # fmt: skip
def test_a_group_that_is_none_is_left_out_whatever_its_checksum(path: Path, payload: bytes) -> None:
    write_batches(path, [SMALL[:1], SMALL[1:3], SMALL[3:4]]).seal()
    alter(path, "UPDATE record SET payload = ?, crc = ? WHERE seq = 3", payload, checksum(3, 2, GROUP, payload))
    rows, reader = read(path)
    assert rows == [SMALL[0], SMALL[3]] and reader.skipped == 2
    reader = SegmentReader(str(path))
    assert [row[1] for some in reader.batches() for row in some] == [SMALL[0][0], SMALL[3][0]]
    reader.close()


@pytest.mark.parametrize("statement", ["UPDATE record SET payload = 'x' WHERE kind = 6", "DROP TABLE record"])
def test_compaction_is_told_of_a_segment_that_was_damaged_meanwhile(path: Path, statement: str) -> None:
    """In one line, as every other damage: it reads what its own server wrote, and what was not looked at since."""
    write_batches(path, [SMALL[:6]]).seal()
    if "DROP" in statement:
        alter(path, "DROP VIEW each_record")
    alter(path, statement)
    reader = SegmentReader(str(path))
    with pytest.raises(JournalDamaged, match="is damaged behind record 0"):
        reader.keys_after(0, 10)
    reader.close()


def test_a_group_that_overlaps_what_was_read_says_nothing_new(path: Path) -> None:
    write_batches(path, [SMALL[:6], SMALL[6:8]]).seal()
    payload = b"[[1,1,1],[2,1,1],[3,1,1]]\nxyz"
    alter(
        path, "UPDATE record SET payload = ?, key = 3, crc = ? WHERE seq = 8", payload, checksum(8, 3, GROUP, payload)
    )
    with pytest.raises(JournalDamaged, match="was sealed with 8 records and has 6"):
        read(path)
    reader = SegmentReader(str(path))
    found: list[int] = []
    with pytest.raises(JournalDamaged, match="was sealed with 8 records and has 6"):
        for some in reader.batches():
            found += [row[1] for row in some]
    assert found == list(range(100, 106))
    reader.close()


def test_what_is_gone_before_a_group_is_counted(path: Path) -> None:
    write_batches(path, [ROWS[:1], ROWS[2:3], SMALL[:6]]).seal()
    alter(path, "DELETE FROM record WHERE seq = 2")
    reader = SegmentReader(str(path))
    assert [row[1] for some in reader.batches() for row in some] == [1, *range(100, 106)]
    assert (reader.skipped, reader.records) == (1, 8)
    reader.close()


def test_records_that_are_gone_at_the_end_of_a_sealed_segment_are_missed(path: Path) -> None:
    alter(sealed(path), "DELETE FROM record WHERE seq > 3")
    with pytest.raises(JournalDamaged, match="was sealed with 5 records and has 3"):
        read(path)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("PRAGMA application_id=1", "not a journal segment"),
        ("PRAGMA user_version=-1", "format version -1"),
        ("PRAGMA user_version=0", "format version 0"),
        ("DELETE FROM meta", "cannot be read"),
        ("UPDATE meta SET value = 'x'", "cannot be read"),
        ("UPDATE meta SET value = value + 1 WHERE name = 'high_water'", "its head is damaged"),
        ("DELETE FROM meta WHERE name = 'records'", "its head is damaged"),
        ("DELETE FROM meta WHERE name = 'crc'", "cannot be read"),
        ("DROP TABLE meta", "cannot be read"),
        ("DROP TABLE record", "is damaged behind record 0"),
    ],
)
def test_what_is_no_segment_of_this_format_is_told_in_one_line(path: Path, statement: str, says: str) -> None:
    alter(sealed(path), statement)
    with pytest.raises(JournalDamaged) as caught:
        read(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("segment", 0),
        ("segment", -7),
        ("segment", 2**32),
        ("high_water", -1),
        ("oldest", 0),
        ("oldest", 8),
        ("oldest", -(2**63)),
        ("records", -1),
    ],
)
def test_numbers_that_no_segment_says_of_itself_are_damage(path: Path, name: str, value: int) -> None:
    """Their checksum is right."""
    with closing(sqlite3.connect(sealed(path), isolation_level=None)) as db:
        meta = {key: number for key, number in db.execute("SELECT name, value FROM meta") if key != "crc"}
        write_meta(db, {**meta, name: value})
    with pytest.raises(JournalDamaged, match="its head is damaged"):
        read(path)


# Bug: A pipe under a segment's name stopped a start for ever. A link to a disk that was not mounted counted as damage,
# and accepting the damage gave its jobs up.
@pytest.mark.parametrize("kind", ["directory", "pipe", "loop", "nowhere"])
def test_what_is_no_file_is_told_and_never_waited_for(path: Path, kind: str) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == "loop" else path.parent / "a-disk-that-is-not-mounted")
    failure = (
        JournalDamaged if kind in ("directory", "pipe") else JournalFailed
    )  # the other end of a link may come back
    with pytest.raises(failure) as caught:
        SegmentReader(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# Bug: A file without read permission passed for damage.
def test_what_may_not_be_read_is_no_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed(path)
    monkeypatch.setattr(os, "access", lambda name, mode: False)
    with pytest.raises(JournalFailed, match="Permission denied"):
        SegmentReader(str(path))


def test_a_segment_of_a_newer_format_is_no_damage(path: Path) -> None:
    alter(sealed(path), f"PRAGMA user_version={FORMAT_VERSION + 1}")
    before = path.read_bytes()
    with pytest.raises(JournalNewer, match="written by a newer geventstalk") as caught:
        read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"binlog\n" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_foreign_file_is_told_in_one_line(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(JournalDamaged) as caught:
        read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_bytes() == content


def test_other_types_in_the_columns_are_damage(path: Path) -> None:
    """SQLite would store text in an integer column; no TypeError may come of that."""
    for column, value in (("key", "'x'"), ("kind", "'x'"), ("crc", "x'00'"), ("payload", "'text'"), ("payload", "7")):
        path.unlink(missing_ok=True)
        Path(f"{path}{BODIES_SUFFIX}").unlink(missing_ok=True)
        alter(sealed(path), f"UPDATE record SET {column} = {value} WHERE seq = 3")
        try:
            rows, reader = read(path)
        except JournalDamaged as error:
            assert "\n" not in str(error)
        else:
            assert rows == ROWS[:2] + ROWS[3:], column
            assert reader.skipped == 1


# Sealing


def test_sealing_merges_the_wal(path: Path) -> None:
    sealed(path)
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, path.name + BODIES_SUFFIX]


def test_without_large_payloads_there_is_no_file_for_them(path: Path, tmp_path: Path) -> None:
    place = left(path, tmp_path / "crash", ROWS[:2])
    seal_left_over(str(place), 2)
    assert [file.name for file in place.parent.iterdir()] == [path.name]
    sealed(path, ROWS[:2])
    assert not os.path.exists(f"{path}{BODIES_SUFFIX}") and read(path)[0] == ROWS[:2]


def test_a_reader_delays_the_merge_and_loses_nothing(path: Path) -> None:
    writer = write(path)
    reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM record").fetchone() == (5,)
    writer.append([(8, FULL, b"late")])
    writer._db.execute("PRAGMA busy_timeout=20")  # or the merge waits 5 s for the reader
    writer.seal()
    assert os.path.exists(f"{path}-wal"), "nothing was held up"
    reader.close()
    rows, found = read(path)
    assert rows == [*ROWS, (8, FULL, b"late")] and found.sealed


@pytest.mark.skipif(BUILD == "compiled", reason="a function of a compiled module cannot be replaced")
def test_a_reader_that_goes_at_the_wrong_moment_costs_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept the WAL from being merged, and is gone when the writer closes, which then merges it."""
    writer = write(path)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM record").fetchone()
    writer.append([(9, FULL, b"nine")])
    connection = writer._db

    class Closing:
        """The writer's connection; the reader goes at the last moment."""

        def __getattr__(self, name: str) -> object:
            return getattr(connection, name)

        def close(self) -> None:
            reader.close()
            connection.close()

    writer._db = Closing()  # type: ignore[assignment]  # as good as a connection
    synced: list[str] = []

    def sync_then(path: str) -> None:
        synced.append(path)
        sync_files(path)

    monkeypatch.setattr(writer_module, "sync_files", sync_then)
    writer.seal()
    assert synced == [str(path)]
    rows, _ = read(path)
    assert rows == [*ROWS, (9, FULL, b"nine")]


def test_what_has_no_wal_is_synced_all_the_same(path: Path) -> None:
    sync_files(str(sealed(path)))
    path.unlink()
    with pytest.raises(JournalFailed):
        sync_files(str(path))


def test_a_left_over_segment_is_sealed_as_the_writer_would_have(path: Path, tmp_path: Path) -> None:
    place = left(path, tmp_path / "crash")
    assert seal_left_over(str(place), 5) == 0
    assert sorted(file.name for file in place.parent.iterdir()) == [path.name, path.name + BODIES_SUFFIX]
    rows, reader = read(place)
    assert rows == ROWS and reader.sealed


@pytest.mark.parametrize("torn", [1, 100, 3000])
def test_a_torn_end_is_measured_and_dropped(path: Path, tmp_path: Path, seed: int, torn: int) -> None:
    place = left(path, tmp_path / "crash")
    with open(f"{place}-wal", "ab") as file:
        file.write(random.Random(seed).randbytes(torn - 1) + b"\1")
    assert read(place)[0] == ROWS
    assert torn_bytes(str(place)) == torn
    assert seal_left_over(str(place), 5) == torn
    assert read(place)[0] == ROWS


def test_no_room_for_the_index_is_a_full_disk_although_there_is_room_by_now(path: Path) -> None:
    """SQLite calls it an I/O error, and the thread that seals may have given room back since."""
    for code, meaning in ((4874, JournalFull), (1034, JournalFailed)):  # SQLITE_IOERR_SHMSIZE, SQLITE_IOERR_FSYNC
        error: Any = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = code
        assert isinstance(failure_of(error, "cannot write to", str(path)), meaning)


AHEAD = 200_000


def test_a_wal_that_was_allocated_ahead_is_no_torn_end(path: Path, tmp_path: Path) -> None:
    place = left(path, tmp_path / "crash", ahead=AHEAD)
    assert os.path.getsize(f"{place}-wal") == AHEAD
    assert read(place)[0] == ROWS
    assert torn_bytes(str(place)) == 0
    assert seal_left_over(str(place), 5) == 0
    rows, reader = read(place)
    assert rows == ROWS and reader.sealed
    assert os.path.getsize(place) < AHEAD / 2 and not os.path.exists(f"{place}-wal")


@pytest.mark.parametrize("torn", [1, 100, 3000, 100_000])
def test_a_torn_write_into_what_was_allocated_is_measured(path: Path, tmp_path: Path, seed: int, torn: int) -> None:
    place = left(path, tmp_path / "crash", ahead=AHEAD)
    content = Path(f"{place}-wal").read_bytes()
    end = len(content.rstrip(b"\0"))
    end += -(end - 32) % (24 + PAGE_BYTES)  # the last page may end in zeros
    with open(f"{place}-wal", "r+b") as file:
        file.seek(end)
        file.write(random.Random(seed).randbytes(torn - 1) + b"\1")
    assert os.path.getsize(f"{place}-wal") == AHEAD
    assert read(place)[0] == ROWS
    frames = -(-torn // (24 + PAGE_BYTES))  # what of them was not written cannot be told from zeros that were
    assert torn_bytes(str(place)) == frames * (24 + PAGE_BYTES)
    assert seal_left_over(str(place), 5) == frames * (24 + PAGE_BYTES)
    assert read(place)[0] == ROWS


def test_zeros_in_a_torn_write_are_part_of_it(path: Path, tmp_path: Path) -> None:
    place = left(path, tmp_path / "crash")
    with open(f"{place}-wal", "ab") as file:
        file.write(b"torn" + bytes(700))
    assert read(place)[0] == ROWS
    assert torn_bytes(str(place)) == 704
    assert seal_left_over(str(place), 5) == 704


def test_more_than_was_allocated_is_written_behind_it(path: Path, tmp_path: Path) -> None:
    rows: list[Row] = [(key, FULL, bytes(1000)) for key in range(1, 40)]
    writer = write(path, rows, ahead=20_000)
    assert writer.wal.size() > 40_000
    writer.seal()
    assert read(path)[0] == rows


def test_what_is_allocated_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are only set aside cost an fsync more."""
    written: list[int] = []
    real = os.write

    def write_some(file: int, data: bytes) -> int:
        written.append(real(file, data[:50_000]))
        return written[-1]

    monkeypatch.setattr(os, "write", write_some)
    writer = SegmentWriter(str(path), 7, 99, AHEAD)
    assert sum(written) == AHEAD == writer.wal.size()
    writer.append(ROWS)
    assert writer.wal.size() == AHEAD
    writer.seal()
    assert read(path)[0] == ROWS


def test_without_room_nothing_is_allocated_ahead(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, size: int) -> None:
        os.ftruncate(file, size // 2)  # as far as the room went
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    writer = SegmentWriter(str(path), 7, 99, AHEAD)
    assert writer.wal.size() == 0
    writer.append(ROWS)
    writer.seal()
    assert read(path)[0] == ROWS


def test_a_device_that_fails_while_it_allocates_is_a_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(file: int, offset: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fallocate", fails)
    with pytest.raises(JournalFailed):
        SegmentWriter(str(path), 7, 99, AHEAD)
    assert not list(path.parent.iterdir())


# Creation


def test_a_segment_gets_its_name_when_it_is_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands under its name is a segment, whenever the process ended."""
    seen: list[str] = []
    real = os.rename

    def rename(source: str, target: str) -> None:
        seen.append(os.path.basename(source))
        assert not os.path.exists(target)
        rows, reader = read(Path(source))
        assert rows == [] and reader.number == 7 and reader.high_water == 99
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    SegmentWriter(str(path), 7, 99).discard()
    assert seen == [path.name + NEW_SUFFIX]


@pytest.mark.parametrize("blocks", range(13))
def test_a_disk_that_is_full_while_a_segment_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """The segment gets its name only when it is whole; else nothing is left behind, and the room is free again."""
    whole: list[bool] = []
    real = os.rename

    def rename(source: str, target: str) -> None:  # from here on a loss of power leaves what stands there now
        whole.append(not os.path.exists(source + "-wal") and os.path.getsize(source) == EMPTY_BYTES)
        assert read(Path(source))[0] == []
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with small_disk(tmp_path / "disk", 64 * KIB) as disk:
        (disk / "full").write_bytes(bytes(free_bytes(disk) - 4 * KIB * blocks))
        free = free_bytes(disk)
        try:
            SegmentWriter(str(disk / "segment-00000007.db"), 7, 99).discard()
        except JournalFull:
            pass
        else:
            assert whole == [True]
        assert all(whole)
        assert [file.name for file in disk.iterdir()] == ["full"]
        assert free_bytes(disk) == free == 4 * KIB * blocks


@pytest.mark.parametrize("inodes", range(5))
def test_a_disk_without_inodes_for_all_files_of_a_segment_is_full(tmp_path: Path, inodes: int) -> None:
    """SQLite says only that it cannot open a file."""
    with small_disk(tmp_path / "disk", 1024 * KIB, inodes=20) as disk:
        take_inodes(disk)
        for number in range(inodes):
            (disk / f"file-{number}").unlink()
        before = sorted(disk.iterdir())
        assert takes_files(str(disk)) == (inodes == 4)
        try:
            SegmentWriter(str(disk / "segment-00000007.db"), 7, 99).discard()
        except JournalFull:
            assert inodes < 4
        assert sorted(disk.iterdir()) == before


def test_what_is_not_complete_without_a_word_is_a_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite said that all was well. It says so, too, when it could not merge a WAL."""
    real = os.path.getsize
    monkeypatch.setattr(os.path, "getsize", lambda name: real(name) - (0 if str(name).endswith("-wal") else PAGE_BYTES))
    with pytest.raises(JournalFailed, match="not complete"):
        SegmentWriter(str(path), 7, 0)
    assert list(path.parent.iterdir()) == []


def test_what_cannot_be_created_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(source: str, target: str) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(JournalFailed) as caught:
        SegmentWriter(str(path), 7, 0)
    assert "\n" not in str(caught.value)
    assert list(path.parent.iterdir()) == []


def test_a_folder_that_is_gone_is_told_as_such(path: Path) -> None:
    with pytest.raises(JournalError) as caught:
        SegmentWriter(str(path.parent / "gone" / path.name), 7, 0)
    assert "\n" not in str(caught.value)


def test_an_unused_segment_goes_without_a_trace(path: Path) -> None:
    SegmentWriter(str(path), 7, 0).discard()
    assert list(path.parent.iterdir()) == []


def test_a_copy_of_an_open_segment_is_a_sealed_one(path: Path, tmp_path: Path) -> None:
    writer = write(path)
    reader = SegmentReader(str(path))
    assert reader.copy_to(str(tmp_path / "copy")) == 5
    reader.close()
    rows, copy = read(tmp_path / "copy")
    assert rows == ROWS and copy.sealed
    writer.append([(8, FULL, b"later")])
    writer.seal()
    assert len(read(path)[0]) == 6


# Bug: A snapshot opened the segment between its name and its WAL, and read damage into it once it was sealed.
def test_a_pinned_segment_that_was_just_made_stays_empty(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was opened before it had a WAL, so SQLite does not keep the writer from merging the WAL."""
    readers = []
    rename = os.rename

    def open_at_once(old: str, new: str) -> None:
        rename(old, new)
        assert not os.path.exists(new + "-wal")
        readers.append(SegmentReader(new))
        readers[0].pin()

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", open_at_once)
        writer = write(path)
    writer.seal()
    assert read(path)[0] == ROWS
    assert list(readers[0].rows()) == []
    assert readers[0].copy_to(str(tmp_path / "copy")) == 0
    readers[0].close()
    assert read(tmp_path / "copy")[0] == []
