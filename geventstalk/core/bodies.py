"""Bounds the memory that job bodies use.

This module must not know the journal: `reads_back` says whether the ledger can read whole records of a segment, and the
ledger says where a job's record stands in its segment. The engine tells of jobs that come and go.
Only bodies leave memory, and only while the ledger can read them back. Uploads that have begun, and replies that
clients do not take, count beside them in `claimed_bytes`.
Invariant: `held_bytes` and `gone_bytes` are those of all jobs in the table, with and without their body. A body is
handed out only once it is in memory. A body never changes, so one that comes late is right.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from geventstalk.core.job import DELETED, READY, Job
from geventstalk.core.jobtable import JobTable

if TYPE_CHECKING:
    from geventstalk.core.state import EngineState

BODY_BYTES: Final = 48
"""Memory that a body takes beside its bytes: Python's header, and what the allocator rounds up."""
AHEAD_MAX: Final = 64
"""Bodies of a tube with reserving workers that are fetched at once, before they are needed."""
AHEAD_BYTES_MAX: Final = 1 << 20
"""Their bytes, if that is less than an eighth of the bound."""
FETCH_MAX: Final = 128
"""The most bodies of one fetch. A fetch also takes at most AHEAD_BYTES_MAX bytes and one body."""
_NEAR: Final = 4 * AHEAD_MAX
"""A ready job whose id is this close behind its tube's first job is about to be reserved."""
_PAGE_BITS: Final = 6
_PAGE_SLOTS: Final = 1 << _PAGE_BITS
_PAGE_MASK: Final = _PAGE_SLOTS - 1
_SIZE_BITS: Final = 24
_SIZE_MASK: Final = (1 << _SIZE_BITS) - 1
SIZE_MAX: Final = _SIZE_MASK
_PLACE_MAX: Final = (1 << 40) - 1
_PAGES_KEPT: Final = 128
"""Pages that are searched for bodies that are not about to be reserved; one takes some microseconds."""
_PAGES_TAKEN: Final = 256
"""Pages that are searched if that does not suffice: then any body may leave."""
_TRIGGERS_MAX: Final = 4096
_SEALED_MIN: Final = 1 << 12
"""The newest segment is not sealed for fewer bytes than this: its files take some space of their own."""
_ZEROS: Final = array("Q", bytes(8 * _PAGE_SLOTS))


class _Page:
    """The positions of the records of 64 sequential ids: `place << 24 | size of the body`, 0 if not readable."""

    __slots__ = ("count", "held", "stored")

    def __init__(self) -> None:
        self.stored = array("Q", _ZEROS)
        self.count = 0  # how many are not 0
        self.held = 0  # of how many of those the body is in memory


@mypyc_attr(allow_interpreted_subclasses=True)
class Bodies:
    """The bodies of an engine's jobs, of which `max_bytes` may be in memory."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.reads_back: Callable[[int], bool] = _never
        self.held_bytes = 0  # in memory
        self.claimed_bytes = 0  # what else counts
        self.gone_bytes = 0  # bodies that only the ledger has
        self.gone = 0  # how many those are
        self.fetched = 0  # bodies that came back
        self.refused = 0  # puts
        self.is_full = False  # puts are refused, or were a short while ago
        self._refused_bytes = 0  # the body that was refused last within this turn
        self._claims: dict[int, int] = {}  # what uploads have of `claimed_bytes`, by the ids of their jobs
        self.wanted: dict[int, Job] = {}  # whose bodies are to be fetched next, in order
        self.fetching: dict[int, Job] = {}  # and those that are under way
        self._pages: dict[int, _Page] = {}
        self._ring: deque[int] = deque()  # pages that may hold bodies which may go; the next one first
        self._ringed: set[int] = set()
        self._pins: dict[int, int] = {}  # ids to how many clients wait for the body
        self._ahead: dict[int, None] = {}  # tubes of which bodies are to be fetched ahead
        self._triggers: dict[int, int] = {}  # ids to their tubes: when such a job is handed out, more are fetched
        self._trigger_of: dict[int, int] = {}  # the same, by the tube
        self._tried = False  # whether in this turn no room was found

    @property
    def taken_bytes(self) -> int:
        """All that counts."""
        return self.held_bytes + self.claimed_bytes

    # --- what the ledger says

    def stands(self, id: int, place: int, size: int) -> None:
        """Notes where the whole record of a job stands; 0: it cannot be read back. For a new job came() follows.

        Raises MemoryError having changed nothing.
        """
        number = id >> _PAGE_BITS
        page = self._pages.get(number)
        at = id & _PAGE_MASK
        if not place or place > _PLACE_MAX or size > SIZE_MAX:
            if page is not None and page.stored[at]:
                self._clear(number, page, at)
            return
        stored = place << _SIZE_BITS | size
        if page is None:
            page = _Page()
            page.count = 1
            page.stored[at] = stored
            self._pages[number] = page
            return
        count = page.count + (not page.stored[at])
        page.stored[at] = stored
        page.count = count

    def place_of(self, job: Job) -> int:
        """Returns where the job's record stands; 0 when it cannot be read back."""
        page = self._pages.get(job.id >> _PAGE_BITS)
        return 0 if page is None else page.stored[job.id & _PAGE_MASK] >> _SIZE_BITS

    def size_of(self, job: Job) -> int:
        """Returns the size of a job's body, in memory or not; 0 when the job is gone."""
        body = job.body
        if body is not None:
            return len(body)
        page = self._pages.get(job.id >> _PAGE_BITS)
        return 0 if page is None else page.stored[job.id & _PAGE_MASK] & _SIZE_MASK

    # --- jobs come and go

    def claim(self, engine: EngineState, id: int, size: int, left: int = 0) -> bool:
        """Counts bytes of a new job's body that have come, if it fits with `left` more. Returns whether it does.

        They count until the job comes, or unclaim() is called.
        """
        claimed = self._claims.get(id, BODY_BYTES)
        more = size if id in self._claims else size + BODY_BYTES
        whole = claimed + size + left
        if (whole > self.max_bytes or not self._has_room(engine, more)) and not self._refuse(whole - BODY_BYTES):
            return False
        self._claims[id] = claimed + size
        self.claimed_bytes += more
        return True

    def unclaim(self, id: int) -> None:
        """Ends the claim of a job."""
        self.claimed_bytes -= self._claims.pop(id, 0)

    def _has_room(self, engine: EngineState, size: int) -> bool:
        if self.held_bytes + self.claimed_bytes + size <= self.max_bytes:
            return True
        if not self._tried:
            self.make_room(engine, size)
            if self.held_bytes + self.claimed_bytes + size <= self.max_bytes:
                return True
            self._tried = True
        return False

    def _refuse(self, size: int) -> bool:
        self.refused += 1
        self.is_full = True
        self._refused_bytes = size
        return False

    def came(self, job: Job) -> None:
        """Counts a new job whose body is in memory."""
        body = job.body
        assert body is not None
        if self._claims:
            self.unclaim(job.id)
        self.held_bytes += len(body) + BODY_BYTES
        number = job.id >> _PAGE_BITS
        page = self._pages.get(number)
        if page is not None and page.stored[job.id & _PAGE_MASK]:
            page.held += 1
            self._enter(number)

    def came_without(self, job: Job, place: int, size: int) -> None:
        """Counts a new job whose body, of this size, only the ledger has."""
        self.stands(job.id, place, size)
        self.gone_bytes += size
        self.gone += 1

    def left(self, job: Job) -> None:
        """A job is deleted."""
        body = job.body
        number = job.id >> _PAGE_BITS
        at = job.id & _PAGE_MASK
        page = self._pages.get(number)
        stored = 0 if page is None else page.stored[at]
        if body is not None:
            self.held_bytes -= len(body) + BODY_BYTES
            if page is not None and stored:
                page.held -= 1
        else:
            self.gone_bytes -= stored & _SIZE_MASK
            self.gone -= 1
        if page is not None and stored:
            self._clear(number, page, at)

    def _clear(self, number: int, page: _Page, at: int) -> None:
        page.stored[at] = 0
        page.count -= 1
        if not page.count:
            del self._pages[number]

    def recount(self, jobs: JobTable, uploads: Iterable[Job] = ()) -> None:
        """Counts everything again, with these uploads under way: O(jobs)."""
        under_way = {job.id for job in uploads}
        for id in [id for id in self._claims if id not in under_way]:
            self.unclaim(id)
        self.held_bytes = self.gone_bytes = self.gone = 0
        for page in self._pages.values():
            page.held = 0
        self._ring.clear()
        self._ringed.clear()
        for job in jobs.in_order():
            if job.body is not None:
                self.came(job)
            else:
                self.gone_bytes += self.size_of(job)
                self.gone += 1

    def _enter(self, number: int) -> None:
        if number not in self._ringed:
            self._ringed.add(number)
            self._ring.append(number)
            if len(self._ring) > 2 * len(self._pages) + _PAGES_TAKEN:
                self._tidy()

    def _tidy(self) -> None:
        """Forgets pages without jobs. At least half of all pages are such."""
        self._ring = deque([number for number in self._ring if self._holds(number)])
        self._ringed = set(self._ring)

    def _holds(self, number: int) -> bool:
        page = self._pages.get(number)
        return page is not None and page.held > 0

    # --- bodies go

    def turn_ends(self) -> bool:
        """Ends a turn: the next one may have memory again. Returns whether next_fetch() has something."""
        self._tried = False
        room = self.max_bytes - self.taken_bytes
        if self.is_full and room >= self.max_bytes // 8:
            self.is_full = False
        self._refused_bytes = 0
        return len(self.wanted) > 0 or len(self._ahead) > 0

    def seal_at(self) -> int:
        """Returns the size from which the newest segment is to be sealed, so that bodies can leave; 0: not now.

        That happens before puts have to be refused, and for a large body also where little was written.
        """
        if self._refused_bytes:
            return max(_SEALED_MIN, min(self.max_bytes // 8, self.max_bytes - self._refused_bytes))
        crowded = self.taken_bytes > self.max_bytes - self.max_bytes // 4
        return max(_SEALED_MIN, self.max_bytes // 8) if crowded else 0

    def refused_text(self) -> str:
        """Returns why a body was refused within this turn, for the operator; "" when none was."""
        size, most = self._refused_bytes, self.max_bytes
        if not size:
            return ""
        if size + BODY_BYTES > most:
            return f"a body of {size} bytes is larger than the {most} bytes of memory that bodies may take"
        return f"bodies take {self.taken_bytes} of {most} bytes of memory"

    def keep_bound(self, engine: EngineState) -> None:
        """Lets bodies go after others have come back, if need be."""
        if self.taken_bytes > self.max_bytes:
            self.make_room(engine, 0)

    def make_room(self, engine: EngineState, size: int) -> None:
        """Lets bodies go until this many bytes fit, and some more; a millisecond's work at most.

        First go those that are not about to be reserved, then any that no client waits for.
        """
        least = self.max_bytes - self.claimed_bytes - size
        left = min(len(self._ring), _PAGES_KEPT)
        while left and self.held_bytes > least - self.max_bytes // 16:
            left -= 1
            self._look_at(engine, True, least)
        left = min(len(self._ring), _PAGES_TAKEN)
        while left and self.held_bytes > least:
            left -= 1
            self._look_at(engine, False, least)

    def _look_at(self, engine: EngineState, keeps: bool, least: int) -> None:
        """Lets bodies of the next page go."""
        number = self._ring.popleft()
        page = self._pages.get(number)
        if page is None or not page.held:
            self._ringed.discard(number)
            return
        segment, readable = 0, False
        for job in engine.jobs.up_from(number << _PAGE_BITS):
            if job.id >> _PAGE_BITS != number or (not keeps and self.held_bytes <= least):
                break
            stored = page.stored[job.id & _PAGE_MASK]
            if not stored or job.body is None or job.id in self._pins:
                continue
            if job.segment != segment:
                segment = job.segment
                readable = self.reads_back(segment)
                if keeps and not readable:
                    break  # the others are as young, most of them
            if readable and not (keeps and _is_near(engine, job)):
                self._let_go(job, page, stored)
        if page.held:
            self._ring.append(number)
        else:
            self._ringed.discard(number)

    def _let_go(self, job: Job, page: _Page, stored: int) -> None:
        size = stored & _SIZE_MASK
        page.held -= 1
        self.held_bytes -= size + BODY_BYTES
        self.gone_bytes += size
        self.gone += 1
        job.body = None

    def let_go_at_once(self, job: Job) -> None:
        """Lets a body beyond the bound go at a start, if its record can be read back."""
        page = self._pages.get(job.id >> _PAGE_BITS)
        if page is not None and page.stored[job.id & _PAGE_MASK]:
            self._let_go(job, page, page.stored[job.id & _PAGE_MASK])

    # --- bodies come back

    def want(self, job: Job) -> None:
        """Has a body fetched that is not in memory."""
        if job.id not in self.fetching:
            self.wanted[job.id] = job

    def wait_for(self, job: Job) -> None:
        """Has a body fetched for a client or an operation; it stays in memory until let_be()."""
        self.hold(job)
        self.want(job)

    def hold(self, job: Job) -> None:
        """Keeps the body of a job in memory until let_be(), once it is there."""
        self._pins[job.id] = self._pins.get(job.id, 0) + 1

    def let_be(self, job: Job) -> None:
        """Ends one wait_for() or hold()."""
        pins = self._pins[job.id] - 1
        if pins:
            self._pins[job.id] = pins
        else:
            del self._pins[job.id]

    def handed_out(self, job: Job) -> None:
        """Notes that a worker gets this job: other jobs of the tube may be next."""
        if job.body is None:
            self._ahead[job.tube] = None
        elif self._triggers:
            tube = self._triggers.pop(job.id, 0)
            if tube:
                self._trigger_of.pop(tube, None)
                self._ahead[tube] = None

    def next_fetch(self, engine: EngineState) -> list[Job]:
        """Returns the jobs whose bodies are to be fetched now, in one fetch. fetch_ended() follows.

        Jobs that clients wait for come first. A tube that does not fit waits for the next call.
        """
        wanted = self.wanted
        left = AHEAD_BYTES_MAX
        for id in list(wanted):
            if len(self.fetching) >= FETCH_MAX or left <= 0:
                break
            job = wanted.pop(id)
            if job.body is None and job.state != DELETED:
                self.fetching[id] = job
                left -= self.size_of(job)
        left = min(left, self.ahead_bytes)
        for number in list(self._ahead):
            if len(self.fetching) >= FETCH_MAX or left <= 0:
                break
            del self._ahead[number]
            left = self._fetch_ahead(engine, number, left)
        return list(self.fetching.values())

    def _fetch_ahead(self, engine: EngineState, number: int, left: int) -> int:
        """Adds jobs of a tube that will be reserved next, up to `left` bytes of bodies. Returns what is left then."""
        tube = engine.tube_by_number.get(number)
        if tube is None:
            return left
        first = 0
        for id in tube.ready.smallest(2 * AHEAD_MAX):
            job = engine.jobs.get(id)
            assert job is not None
            if job.body is not None or job.id in self.fetching:
                continue
            left -= self.size_of(job)
            if left < 0:
                break
            self.fetching[job.id] = job
            first = first or job.id
        before = self._trigger_of.pop(number, 0)
        if before:
            self._triggers.pop(before, None)
        if len(self._triggers) > _TRIGGERS_MAX:  # of tubes that are gone, most of them
            self._triggers.clear()
            self._trigger_of.clear()
        if first:
            self._triggers[first] = number
            self._trigger_of[number] = first
        return left

    @property
    def ahead_bytes(self) -> int:
        """Bytes of bodies that are fetched before they are needed, beside one more body."""
        return min(AHEAD_BYTES_MAX, max(self.max_bytes // 8, 1))

    def fetch_ended(self) -> None:
        """Ends the fetch: each body has come, or will be wanted again."""
        self.fetching.clear()

    def take(self, job: Job, body: bytes) -> None:
        """Puts a body into memory again, unless it is there or the job is gone."""
        if job.body is not None or job.state == DELETED:
            return
        number = job.id >> _PAGE_BITS
        page = self._pages[number]
        page.held += 1
        job.body = body
        self.held_bytes += len(body) + BODY_BYTES
        self.gone_bytes -= page.stored[job.id & _PAGE_MASK] & _SIZE_MASK
        self.gone -= 1
        self.fetched += 1
        self._enter(number)

    def facts(self) -> dict[str, int]:
        """Returns statistics by their key."""
        return {
            "memory-max": self.max_bytes,
            "memory-bytes": self.taken_bytes,
            "memory-jobs-on-disk": self.gone,
            "memory-bytes-on-disk": self.gone_bytes,
            "memory-loads": self.fetched,
            "memory-puts-refused": self.refused,
        }

    # --- for tests

    def check(self, jobs: JobTable) -> None:
        """Asserts every invariant by a recount: O(everything)."""
        held = gone = count = 0
        pages: dict[int, int] = {}
        stored: dict[int, int] = {}
        for job in jobs.in_order():
            number = job.id >> _PAGE_BITS
            place = self.place_of(job)
            stored[number] = stored.get(number, 0) + (place > 0)
            if job.body is None:
                assert place, "a body is gone for ever"
                assert self.reads_back(job.segment), "a body is gone that cannot be read back now"
                gone += self.size_of(job)
                count += 1
            else:
                held += len(job.body) + BODY_BYTES
                assert not place or self._pages[number].stored[job.id & _PAGE_MASK] & _SIZE_MASK == len(job.body)
                pages[number] = pages.get(number, 0) + (place > 0)
        assert (held, gone, count) == (self.held_bytes, self.gone_bytes, self.gone)
        for number, page in self._pages.items():
            assert page.held == pages.get(number, 0) and page.count == stored.get(number, 0) > 0
            assert page.count == sum([each > 0 for each in page.stored])
            assert not page.held or number in self._ringed
        assert self._ringed == set(self._ring) and len(self._ring) == len(self._ringed)
        assert sum(self._claims.values()) <= self.claimed_bytes and not any(map(jobs.get, self._claims))


def _is_near(engine: EngineState, job: Job) -> bool:
    """Returns whether a job is about to be reserved."""
    if job.state != READY:
        return False
    ready = engine.tube_by_number[job.tube].ready
    return ready.first_rank() == job.pri and job.id - ready.first() < _NEAR


def _never(segment: int) -> bool:
    return False
