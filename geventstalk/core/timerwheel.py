"""A hierarchical timer wheel: add, cancel and re-arm in O(1), whatever the number of timers.

This module must not read a clock: time comes in as integer nanoseconds of any clock.
Eight levels of 64 slots; a slot of the lowest level is a tick of 2**20 ns (1.05 ms), the highest spans 9,000 years.
A timer stands on the level of the highest digit in which its tick differs from the wheel's. When the wheel reaches a
slot, the slot's timers move to lower levels, and from the lowest into a heap. A call moves only as many timers as it is
allowed to. Invariant: no slot that the wheel has passed holds a timer.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from mypy_extensions import mypyc_attr

TICK_BITS: Final = 20
_LEVEL_BITS: Final = 6
_SLOTS: Final = 1 << _LEVEL_BITS
_LEVELS: Final = 8
_NEAR: Final = _SLOTS * _LEVELS  # the slot of timers whose tick has come
_NO_SLOT: Final = -1
_EXACT_MAX: Final = 64
"""Among more timers in one slot the earliest is not searched: the slot's beginning is at most a tick too early."""
NEVER: Final = -1
"""The result of next_ns() when no timer is armed."""
ANY_NUMBER: Final = 1 << 60
"""An allowance that is never used up."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Timer:
    """Has a deadline."""

    __slots__ = ("_place", "deadline_ns", "slot")

    def __init__(self) -> None:
        self.deadline_ns = 0
        self.slot = _NO_SLOT  # level * 64 + slot, or _NEAR; less than 0: not armed
        self._place = 0  # index in the slot's list, or the number of its entry in the heap

    def forget(self) -> None:
        """Disarms the timer of a wheel that is gone."""
        self.slot = _NO_SLOT

    @property
    def armed(self) -> bool:
        return self.slot >= 0


class TimerWheel:
    """Holds armed timers and gives them back when their deadline has come, never before it.

    `allowance` is how many timers pop_due() may still move from slot to slot; the caller sets it.
    """

    def __init__(self, now_ns: int) -> None:
        self.allowance = ANY_NUMBER
        self._tick = now_ns >> TICK_BITS
        self._slots: list[list[Timer]] = [[] for _ in range(_SLOTS * _LEVELS)]
        self._occupied: list[int] = [0] * _LEVELS  # one bit for each slot that holds a timer
        self._near: list[tuple[int, int, Timer]] = []  # deadline, number of the entry, timer; also of cancelled ones
        self._entry_number = 0
        self._moving = _NO_SLOT  # a slot of a higher level that the wheel has reached and not emptied yet
        self._next_ns = NEVER  # a lower bound of the next deadline, valid while _next_known
        self._next_known = True
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def now_ns(self) -> int:
        """About when pop_due() was last called, never later."""
        return self._tick << TICK_BITS

    def add(self, timer: Timer, deadline_ns: int) -> None:
        """Arms a timer, or moves an armed one. A deadline in the past is due at once."""
        if timer.slot >= 0:
            self.cancel(timer)
        timer.deadline_ns = deadline_ns
        self._count += 1
        if self._next_known and (self._next_ns == NEVER or deadline_ns < self._next_ns):
            self._next_ns = deadline_ns
        self._place(timer)

    def cancel(self, timer: Timer) -> None:
        """Disarms a timer. A timer that is not armed stays so."""
        number = timer.slot
        if number < 0:
            return
        if number != _NEAR:
            slot = self._slots[number]
            last = slot.pop()
            if last is not timer:
                slot[timer._place] = last
                last._place = timer._place
            elif not slot:
                self._occupied[number >> _LEVEL_BITS] &= ~(1 << (number & (_SLOTS - 1)))
        timer.slot = _NO_SLOT
        self._count -= 1
        # The bound may be too early now. It is never too late, and the next look at it puts it right.
        if not self._count or timer.deadline_ns == self._next_ns:
            self._next_known = False

    def next_ns(self) -> int:
        """Returns when to call pop_due() next: never later than the earliest deadline, or NEVER."""
        if not self._next_known:
            self._next_ns = self._earliest()
            self._next_known = True
        return self._next_ns

    def pop_due(self, now_ns: int) -> Timer | None:
        """Disarms and returns one timer whose deadline is at or before `now_ns`.

        Returns None when there is none left, or when the allowance is used up: then there may be more, and next_ns()
        says that they are due. Time never runs backwards from call to call.
        """
        now_tick = now_ns >> TICK_BITS
        while self._count:
            if self._near and self._first_near() and self._near[0][0] <= now_ns:
                timer = self._near[0][2]
                self.cancel(timer)
                return timer
            number = self._moving if self._moving >= 0 else self._first_slot()
            if number < 0:
                break
            tick = self._start_of(number)
            if tick > now_tick:
                break
            if self.allowance <= 0:
                self._next_known = False
                return None
            self._tick = max(self._tick, tick)
            self._move_some(number)
        self._tick = max(self._tick, now_tick)
        self._next_known = False
        return None

    def _first_near(self) -> bool:
        """Drops entries of timers that were cancelled from the top of the heap. Returns whether one is left."""
        near = self._near
        while near:
            _, number, timer = near[0]
            if timer.slot == _NEAR and timer._place == number:
                return True
            heappop(near)
        return False

    def _move_some(self, number: int) -> None:
        """Moves timers out of a slot that the wheel has reached, as many as are allowed."""
        level = number >> _LEVEL_BITS
        slot = self._slots[number]
        count = min(len(slot), self.allowance)
        self.allowance -= count
        for _ in range(count):
            timer = slot.pop()
            if level:
                self._place(timer)
            else:
                self._entry_number += 1
                timer.slot = _NEAR
                timer._place = self._entry_number
                heappush(self._near, (timer.deadline_ns, self._entry_number, timer))
        self._moving = number if slot and level else _NO_SLOT
        if not slot:
            self._occupied[level] &= ~(1 << (number & (_SLOTS - 1)))

    def _place(self, timer: Timer) -> None:
        tick = max(timer.deadline_ns >> TICK_BITS, self._tick)
        level = max((tick ^ self._tick).bit_length() - 1, 0) // _LEVEL_BITS
        assert level < _LEVELS, "deadline beyond the wheel's span"
        digit = (tick >> (level * _LEVEL_BITS)) & (_SLOTS - 1)
        number = (level << _LEVEL_BITS) | digit
        slot = self._slots[number]
        timer.slot = number
        timer._place = len(slot)
        slot.append(timer)
        self._occupied[level] |= 1 << digit

    def _first_slot(self) -> int:
        """The number of the earliest slot that holds a timer, or _NO_SLOT: lower levels come before higher ones."""
        for level in range(_LEVELS):
            bits = self._occupied[level]
            if bits:
                return (level << _LEVEL_BITS) | ((bits & -bits).bit_length() - 1)
        return _NO_SLOT

    def _start_of(self, number: int) -> int:
        """The tick at which the slot begins. All its digits above the slot's own are those of the wheel."""
        shift = (number >> _LEVEL_BITS) * _LEVEL_BITS
        above = self._tick >> (shift + _LEVEL_BITS) << (shift + _LEVEL_BITS)
        return above | ((number & (_SLOTS - 1)) << shift)

    def _earliest(self) -> int:
        if not self._count:
            return NEVER
        if self._moving >= 0:
            return 0  # at once: the wheel has not done its work yet
        near_ns = self._near[0][0] if self._near and self._first_near() else NEVER
        number = self._first_slot()
        if number < 0:
            return near_ns
        slot = self._slots[number]
        if number < _SLOTS and len(slot) <= _EXACT_MAX:
            first_ns = min([timer.deadline_ns for timer in slot])
        else:
            first_ns = self._start_of(number) << TICK_BITS
            if number < _SLOTS and number == self._tick & (_SLOTS - 1):
                first_ns = 0  # at once: some of these may have been overdue when they were added
        return first_ns if near_ns == NEVER else min(near_ns, first_ns)

    def check(self) -> None:
        """Asserts that every timer stands where its deadline belongs."""
        counted = 0
        for number, slot in enumerate(self._slots):
            level, digit = number >> _LEVEL_BITS, number & (_SLOTS - 1)
            assert bool(slot) == bool(self._occupied[level] >> digit & 1)
            counted += len(slot)
            start = self._start_of(number)
            for place, timer in enumerate(slot):
                assert timer.slot == number and timer._place == place
                tick = max(timer.deadline_ns >> TICK_BITS, self._tick)
                assert number == self._moving or tick >> (level * _LEVEL_BITS) == start >> (level * _LEVEL_BITS)
        for deadline_ns, number, timer in self._near:
            if timer.slot == _NEAR and timer._place == number:
                counted += 1
                assert deadline_ns == timer.deadline_ns and deadline_ns >> TICK_BITS <= self._tick
        assert counted == self._count
        if self._next_known and self._count:
            deadlines = [timer.deadline_ns for slot in self._slots for timer in slot]
            deadlines += [timer.deadline_ns for _, _, timer in self._near if timer.slot == _NEAR]
            assert self._next_ns <= min(deadlines)
