"""The waiting line of one tube: who is served next, first come, first served.

This room must not know clients, only their numbers, and the numbers of their waits, which grow with each wait.
A client that watches many tubes cannot leave all their lines whenever its wait ends. So an entry may be out of date:
its client does not wait any more, or has begun a later wait. Whoever takes such an entry out adds the client again,
at the place of its later wait, if it has one.
Invariant: a client has at most one entry, and no entry is later than its client's true place.
"""

from __future__ import annotations

from typing import Final

from geventstalk.core.order import Order

_NUMBER_BITS: Final = 40
"""Room for 2**40 clients: with 10,000 new connections a second that takes 3 years."""
_NUMBER_MASK: Final = (1 << _NUMBER_BITS) - 1


class Line:
    """Clients by number, in the order of the waits that their entries name."""

    __slots__ = ("_order", "entries")

    def __init__(self) -> None:
        self._order = Order()  # `wait << _NUMBER_BITS | client`
        self.entries: dict[int, int] = {}  # by client; whether it is empty is asked with each job

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, client: int) -> bool:
        return client in self.entries

    def add(self, client: int, wait: int) -> None:
        """A client that has no entry stands in line since this wait."""
        entry = wait << _NUMBER_BITS | client
        self._order.push(entry)
        self.entries[client] = entry

    def take_first(self) -> tuple[int, int]:
        """Takes the first entry out; there is one. Returns its client and the wait it is for."""
        entry = self._order.pop()
        client = entry & _NUMBER_MASK
        del self.entries[client]
        return client, entry >> _NUMBER_BITS

    def remove(self, client: int) -> None:
        """The client's entry goes, wherever it stands; nothing happens when it has none."""
        entry = self.entries.pop(client, None)
        if entry is not None:
            self._order.discard(entry)

    def waits(self) -> dict[int, int]:
        """Of every entry the client and its wait, in order of the line. O(n): for check()."""
        entries = self._order.smallest(len(self.entries) + 1)
        assert sorted(self.entries.values()) == entries
        self._order.check()
        return {entry & _NUMBER_MASK: entry >> _NUMBER_BITS for entry in entries}
