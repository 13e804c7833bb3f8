"""A hierarchical timer wheel: add, cancel and re-arm in O(1), whatever the number of timers.

This room must not read a clock: time comes in as integer nanoseconds of whatever clock the caller keeps.
Eight levels of 64 slots; a slot of the lowest level is a tick of 2**20 ns (1.05 ms), the highest spans 9,000 years.
A timer stands on the level of the highest digit in which its tick differs from the wheel's, so it moves down only when
the wheel reaches its slot. Invariant: no slot that the wheel has passed holds a timer.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

TICK_BITS: Final = 20
_LEVEL_BITS: Final = 6
_SLOTS: Final = 1 << _LEVEL_BITS
_LEVELS: Final = 8
_DUE: Final = _SLOTS * _LEVELS  # the slot of those that pop_due() has found due and not given back yet
NEVER: Final = -1
"""What next_ns() returns when no timer is armed."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Timer:
    """Something with a deadline. Subclass it, or own one; a wheel does the rest."""

    __slots__ = ("_place", "_slot", "deadline_ns")

    def __init__(self) -> None:
        self.deadline_ns = 0
        self._slot = -1  # level * 64 + slot, or -1 when not armed
        self._place = 0  # index in the slot's list

    @property
    def armed(self) -> bool:
        return self._slot >= 0


class TimerWheel:
    """Holds armed timers and gives them back when their deadline has come, never before it."""

    def __init__(self, now_ns: int) -> None:
        self._tick = now_ns >> TICK_BITS
        self._slots: list[list[Timer]] = [[] for _ in range(_SLOTS * _LEVELS + 1)]
        self._occupied: list[int] = [0] * _LEVELS  # one bit for each slot that holds a timer
        self._next_ns = NEVER  # a lower bound of the next deadline, valid while _next_known
        self._next_known = True
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, timer: Timer, deadline_ns: int) -> None:
        """Arms a timer, or moves an armed one. A deadline in the past is due at once."""
        if timer._slot >= 0:
            self.cancel(timer)
        timer.deadline_ns = deadline_ns
        self._count += 1
        if self._next_known and (self._next_ns == NEVER or deadline_ns < self._next_ns):
            self._next_ns = deadline_ns
        self._place(timer)

    def cancel(self, timer: Timer) -> None:
        """Disarms a timer; nothing happens when it is not armed."""
        number = timer._slot
        if number < 0:
            return
        slot = self._slots[number]
        last = slot.pop()
        if last is not timer:
            slot[timer._place] = last
            last._place = timer._place
        elif not slot and number != _DUE:
            self._occupied[number >> _LEVEL_BITS] &= ~(1 << (number & (_SLOTS - 1)))
        timer._slot = -1
        self._count -= 1
        # The bound may be too early now; it is never too late, and the next look at it puts it right.
        if not self._count or timer.deadline_ns == self._next_ns:
            self._next_known = False

    def next_ns(self) -> int:
        """When to call pop_due() next: never later than the earliest deadline, or NEVER."""
        if not self._next_known:
            self._next_ns = self._earliest()
            self._next_known = True
        return self._next_ns

    def pop_due(self, now_ns: int) -> Timer | None:
        """Disarms and returns one timer whose deadline is at or before `now_ns`; None when there is none left.

        Time never runs backwards from call to call.
        """
        now_tick = now_ns >> TICK_BITS
        due = self._slots[_DUE]
        while self._count:
            if due:
                timer = due[-1]
                self.cancel(timer)
                return timer
            number = self._first_slot()
            level = number >> _LEVEL_BITS
            tick = self._start_of(number)
            if tick > now_tick:
                break
            if level:
                self._tick = tick
                self._cascade(number)
                continue
            self._tick = max(self._tick, tick)
            if not self._gather_due(number, now_ns):
                break
        self._tick = max(self._tick, now_tick)
        self._next_known = False
        return None

    def _gather_due(self, number: int, now_ns: int) -> bool:
        """Moves all timers of a slot that are due out of it, looking at each once. Returns whether there were any."""
        due = self._slots[_DUE]
        rest: list[Timer] = []
        for timer in self._slots[number]:
            if timer.deadline_ns <= now_ns:
                timer._slot = _DUE
                timer._place = len(due)
                due.append(timer)
            else:
                timer._place = len(rest)
                rest.append(timer)
        self._slots[number] = rest
        if not rest:
            self._occupied[0] &= ~(1 << number)
        return bool(due)

    def _place(self, timer: Timer) -> None:
        tick = max(timer.deadline_ns >> TICK_BITS, self._tick)
        level = max((tick ^ self._tick).bit_length() - 1, 0) // _LEVEL_BITS
        assert level < _LEVELS, "deadline beyond the wheel's span"
        digit = (tick >> (level * _LEVEL_BITS)) & (_SLOTS - 1)
        number = (level << _LEVEL_BITS) | digit
        slot = self._slots[number]
        timer._slot = number
        timer._place = len(slot)
        slot.append(timer)
        self._occupied[level] |= 1 << digit

    def _first_slot(self) -> int:
        """The number of the earliest slot that holds a timer: lower levels come before higher ones."""
        for level in range(_LEVELS):
            bits = self._occupied[level]
            if bits:
                return (level << _LEVEL_BITS) | ((bits & -bits).bit_length() - 1)
        raise AssertionError("timers are counted but no slot is occupied")

    def _start_of(self, number: int) -> int:
        """The tick at which the slot begins. All its digits above the slot's own are those of the wheel."""
        shift = (number >> _LEVEL_BITS) * _LEVEL_BITS
        above = self._tick >> (shift + _LEVEL_BITS) << (shift + _LEVEL_BITS)
        return above | ((number & (_SLOTS - 1)) << shift)

    def _cascade(self, number: int) -> None:
        """Puts the timers of a slot that the wheel has reached onto lower levels."""
        timers = self._slots[number]
        self._slots[number] = []
        self._occupied[number >> _LEVEL_BITS] &= ~(1 << (number & (_SLOTS - 1)))
        for timer in timers:
            self._place(timer)

    def _earliest(self) -> int:
        if not self._count:
            return NEVER
        due_ns = [timer.deadline_ns for timer in self._slots[_DUE]]
        if len(due_ns) < self._count:
            number = self._first_slot()
            if number < _SLOTS:
                due_ns += [timer.deadline_ns for timer in self._slots[number]]
            else:
                due_ns.append(self._start_of(number) << TICK_BITS)
        return min(due_ns)

    def check(self) -> None:
        """Asserts that every timer stands where its deadline belongs."""
        counted = 0
        for number, slot in enumerate(self._slots[:_DUE]):
            level, digit = number >> _LEVEL_BITS, number & (_SLOTS - 1)
            assert bool(slot) == bool(self._occupied[level] >> digit & 1)
            counted += len(slot)
            start = self._start_of(number)
            for place, timer in enumerate(slot):
                assert timer._slot == number and timer._place == place
                tick = max(timer.deadline_ns >> TICK_BITS, self._tick)
                assert tick >> (level * _LEVEL_BITS) == start >> (level * _LEVEL_BITS)
        for place, timer in enumerate(self._slots[_DUE]):
            assert timer._slot == _DUE and timer._place == place
        assert counted + len(self._slots[_DUE]) == self._count
        if self._next_known and self._count:
            deadlines = [timer.deadline_ns for slot in self._slots for timer in slot]
            assert self._next_ns <= min(deadlines)
