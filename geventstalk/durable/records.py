"""Jobs to journal payloads and back, and the wall clock of the journal to the monotonic clock of the engine.

This module must not know the engine, SQLite or gevent. Layout, little-endian, format versions 1 to 4; 4 brought tags:
  change: state u8 | pri u32 | delay u32 | rank i64 | [tally 5 x u32] | [tried u32 | why u8] | [stamp u32]
  whole:  all of a change | ttr u32 | created i64 (wall clock, ns) | name length u8 | name | [tags] | body
Bits of the state say that a tally follows (reserves, timeouts, releases, buries, kicks), and that there are tags (their
length u16 | text). `rank` is a deadline (wall clock, ns) or the number of a burying. `body` has its CRLF. See fits().
To change the format: raise FORMAT_VERSION in journal/sqlite/format.py, keep the old reader beside the new one,
chosen by the segment's version, and add a file of the old version to the tests' data.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final
from zlib import crc32

from geventstalk.core.job import (
    BURIED,
    DELAYED,
    DELETED,
    READY,
    RESERVED,
    SECOND_NS,
    U32_MAX,
    Job,
    TaggedTally,
    Tally,
    held_body,
)
from geventstalk.tags import Tags, parse

_HEAD: Final = Struct("<BIIq")
_TALLY: Final = Struct("<5I")
_WHOLE: Final = Struct("<IqB")
_READY: Final = Struct("<BIIqIqB")  # head and whole of a job without a tally
_READY_BYTES: Final = _READY.size
_STAMP: Final = Struct("<I")
_STAMPED_BYTES: Final = _HEAD.size + _STAMP.size
_STAMPED_WITH_TALLY_BYTES: Final = _STAMPED_BYTES + _TALLY.size
_TRIED: Final = Struct("<IB")
_STAMPED_WITH_TAGS_BYTES: Final = _STAMPED_WITH_TALLY_BYTES + _TRIED.size
_TAGS: Final = Struct("<H")
_HAS_TALLY: Final = 0x80
_HAS_TAGS: Final = 0x40  # and a tally: UNCUT_MIN of journal/log.py, since a start needs all of the tags
WHOLE_BYTES: Final = _HEAD.size + _TALLY.size + _WHOLE.size
"""The most bytes of a whole job beside its body, the name of its tube and its tags: see job.tags_bytes()."""
_NO_TAGS: Final = Tags()
"""Stands for the tags of a job until the end of its head is read."""
STEP_NS: Final = 10_000_000
"""A smaller difference between two readings is no step of the clock: on a busy machine readings take that long."""
_READINGS: Final = 5
_FIRST_NS: Final = -(1 << 62)
_LAST_NS: Final = (1 << 63) - 1
"""The longest delay is 136 years. make_plausible() corrects a later deadline."""


class ClockOffset:
    """Converts monotonic nanoseconds of this process to wall-clock nanoseconds and back.

    The wall clock may be wrong at the start and step later. After follow(), new records have its new time.
    """

    def __init__(self, wall_ns: int, monotonic_ns: int) -> None:
        self.offset_ns = wall_ns - monotonic_ns
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns

    def follow(self, wall_clock: Callable[[], int], clock: Callable[[], int]) -> bool:
        """Adopts the wall clock's time if it has stepped. Returns whether it has."""
        offset_ns = wall_clock() - clock()
        if -STEP_NS < offset_ns - self.offset_ns < STEP_NS:
            return False
        # The process may have stood still between the two readings. The quickest of several readings is right.
        quickest_ns = STEP_NS
        found_ns = self.offset_ns
        for _ in range(_READINGS):
            before_ns = clock()
            wall_ns = wall_clock()
            after_ns = clock()
            if after_ns - before_ns < quickest_ns:
                quickest_ns = after_ns - before_ns
                found_ns = wall_ns - after_ns
        if -STEP_NS < found_ns - self.offset_ns < STEP_NS:
            return False
        self.offset_ns = found_ns
        return True

    def to_wall(self, monotonic_ns: int) -> int:
        return monotonic_ns + self.offset_ns

    def to_monotonic(self, wall_ns: int) -> int:
        """Converts back. Moments that no clock ever told are brought into 64 bits."""
        if wall_ns != self._wall_ns:
            self._wall_ns = wall_ns
            self._monotonic_ns = min(max(wall_ns - self.offset_ns, _FIRST_NS), _LAST_NS)
        return self._monotonic_ns


def make_plausible(job: Job, now_ns: int) -> None:
    """Corrects the times of a job that another process wrote, perhaps with a wrong clock.

    No job was created in the future, and no delay and no mark lasts longer from now than its full length.
    """
    if job.created_ns > now_ns:
        job.created_ns = now_ns
    if job.state in (DELAYED, DELETED):
        tally = job.tally
        longest_s = job.delay_s
        if job.state == DELETED and isinstance(tally, TaggedTally):
            longest_s = tally.tags.unique_s
        latest_ns = now_ns + longest_s * SECOND_NS
        if job.rank > latest_ns:
            job.rank = latest_ns


def encode_change(job: Job, offset: ClockOffset) -> bytes:
    """Returns the fields of a job that can change. A reserved job is written as ready, as a restart makes it."""
    state, rank = job.state, 0
    if state in (DELAYED, DELETED):
        rank = offset.to_wall(job.rank)
    elif state == BURIED:
        rank = job.rank
    elif state == RESERVED:
        state = READY
    tally = job.tally
    if tally is None:
        return _HEAD.pack(state, job.pri, job.delay_s, rank)
    counts = _TALLY.pack(
        tally.reserves & U32_MAX,
        tally.timeouts & U32_MAX,
        tally.releases & U32_MAX,
        tally.buries & U32_MAX,
        tally.kicks & U32_MAX,
    )
    if not isinstance(tally, TaggedTally):
        return _HEAD.pack(state | _HAS_TALLY, job.pri, job.delay_s, rank) + counts
    head = _HEAD.pack(state | _HAS_TALLY | _HAS_TAGS, job.pri, job.delay_s, rank)
    return head + counts + _TRIED.pack(tally.tried & U32_MAX, tally.why)


def encode_whole(job: Job, tube_name: bytes, offset: ClockOffset) -> bytes:
    """Returns all of a job."""
    return encode_head(job, tube_name, job.ttr_s, offset) + held_body(job)


def encode_head(job: Job, tube_name: bytes, ttr_s: int, offset: ClockOffset) -> bytes:
    """Returns all of a job that stands before its body."""
    rest = _WHOLE.pack(ttr_s, offset.to_wall(job.created_ns), len(tube_name))
    tags = b""
    tally = job.tally
    if isinstance(tally, TaggedTally):
        text = tally.tags.text
        tags = _TAGS.pack(len(text)) + text
    return b"".join((encode_change(job, offset), rest, tube_name, tags))


class Encoder:
    """Does encode_whole() for job after job.

    It keeps the part before the body for the next job: ready jobs that are put at the same moment mostly share it. In a
    pipeline that saves 8 % of a durable put.
    """

    def __init__(self, offset: ClockOffset) -> None:
        self._offset = offset
        self._created_ns = self._pri = self._delay_s = self._ttr_s = -1
        self._name = b""
        self._head = b""

    def forget(self) -> None:
        """Forgets the part that it keeps, after the offset has changed."""
        self._created_ns = -1

    def whole(self, job: Job, tube_name: bytes) -> bytes:
        """Returns all of a job."""
        if job.state != READY or job.tally is not None:
            return encode_whole(job, tube_name, self._offset)
        if (
            job.created_ns != self._created_ns
            or job.pri != self._pri
            or job.delay_s != self._delay_s
            or job.ttr_s != self._ttr_s
            or tube_name != self._name
        ):
            created = self._offset.to_wall(job.created_ns)
            head = _READY.pack(READY, job.pri, job.delay_s, 0, job.ttr_s, created, len(tube_name))
            self._created_ns, self._pri, self._delay_s, self._ttr_s = job.created_ns, job.pri, job.delay_s, job.ttr_s
            self._name = tube_name
            self._head = head + tube_name
        return self._head + held_body(job)


def stamp_of(tube_name: bytes, ttr_s: int) -> bytes:
    """Returns the end of a change that is made to a job after its tube or ttr changed, see fits()."""
    return _STAMP.pack(crc32(tube_name, ttr_s))


def fits(payload: bytes, tube_name: bytes, ttr_s: int) -> bool:
    """Returns whether a change was made to a job with this tube and ttr. A change without a stamp fits any.

    A loss of power can take the record with another tube or ttr and leave a later change, which stands in the next
    segment. Applied to an older whole record, that change would make a job that never was.
    """
    size = len(payload)
    if size not in (_STAMPED_BYTES, _STAMPED_WITH_TALLY_BYTES, _STAMPED_WITH_TAGS_BYTES):
        return True
    return payload.endswith(stamp_of(tube_name, ttr_s))


def apply_change(job: Job, payload: bytes, offset: ClockOffset) -> int:
    """Sets the fields of a change. Returns where its bytes end. Raises ValueError when they are not a change."""
    if len(payload) < _HEAD.size:
        raise ValueError("record is too short")
    state, pri, delay_s, rank = _HEAD.unpack_from(payload)
    at = _HEAD.size
    before = job.tally
    job.tally = None
    if state & _HAS_TAGS:
        tagged = TaggedTally(_NO_TAGS)
        if isinstance(before, TaggedTally):
            tagged.tags = before.tags
            tagged.freed = before.freed
        if not state & _HAS_TALLY:
            raise ValueError(f"unknown state {state}")
        if len(payload) < at + _TALLY.size + _TRIED.size:
            raise ValueError("record is too short")
        (
            tagged.reserves,
            tagged.timeouts,
            tagged.releases,
            tagged.buries,
            tagged.kicks,
        ) = _TALLY.unpack_from(payload, at)
        tagged.tried, tagged.why = _TRIED.unpack_from(payload, at + _TALLY.size)
        job.tally = tagged
        at += _TALLY.size + _TRIED.size
    elif state & _HAS_TALLY:
        if len(payload) < at + _TALLY.size:
            raise ValueError("record is too short")
        job.tally = Tally(*_TALLY.unpack_from(payload, at))
        at += _TALLY.size
    state &= ~(_HAS_TALLY | _HAS_TAGS)
    if state not in (READY, DELAYED, BURIED) and not (state == DELETED and isinstance(job.tally, TaggedTally)):
        raise ValueError(f"unknown state {state}")
    job.state = state
    job.pri = pri
    job.delay_s = delay_s
    job.rank = offset.to_monotonic(rank) if state in (DELAYED, DELETED) else rank
    return at


def decode_whole(id: int, payload: bytes, offset: ClockOffset) -> tuple[Job, bytes]:
    """Returns the job, not yet in a tube, and the name of its tube. Raises ValueError for other bytes."""
    job = Job(id, 0, 0, 0, 0)
    name_at, name_end, body_at = _decode_head(job, payload, offset)
    name = payload[name_at:name_end]
    body = payload[body_at:]
    job.body = body
    if not body.endswith(b"\r\n"):
        raise ValueError("record is too short")
    return job, name


def decode_head(id: int, payload: bytes, size: int, offset: ClockOffset) -> tuple[Job, bytes, int]:
    """Returns them from the beginning of `size` bytes, which holds all but the body, and the body's size."""
    job = Job(id, 0, 0, 0, 0)
    name_at, name_end, body_at = _decode_head(job, payload, offset)
    if body_at > len(payload) or body_at + 2 > size:
        raise ValueError("record is too short")
    job.body = None
    return job, payload[name_at:name_end], size - body_at


def _decode_head(job: Job, payload: bytes, offset: ClockOffset) -> tuple[int, int, int]:
    """Sets all but tube and body. Returns where the tube's name begins and ends, and where the body begins.

    Raises ValueError.
    """
    created: int
    length: int
    if len(payload) > _READY_BYTES and payload[0] == READY:
        # Most of what a restart reads: one step instead of two, a fifth of the time.
        _, job.pri, job.delay_s, _, job.ttr_s, created, length = _READY.unpack_from(payload)
        job.state = READY
        at = _READY_BYTES
    else:
        at = apply_change(job, payload, offset)
        if len(payload) < at + _WHOLE.size:
            raise ValueError("record is too short")
        job.ttr_s, created, length = _WHOLE.unpack_from(payload, at)
        at += _WHOLE.size
    job.created_ns = offset.to_monotonic(created)
    body_at = at + length
    tally = job.tally
    if isinstance(tally, TaggedTally):
        if len(payload) < body_at + _TAGS.size:
            raise ValueError("record is too short")
        (size,) = _TAGS.unpack_from(payload, body_at)
        name_end, body_at = body_at, body_at + _TAGS.size + size
        tally.tags = parse(payload[name_end + _TAGS.size : body_at])
        return at, name_end, body_at
    return at, body_at, body_at
