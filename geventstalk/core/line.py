"""The waiting line of one tube: first come, first served.

This module must not know clients, only their numbers, and the numbers of their waits, which grow with each wait.
A client that watches many tubes cannot leave all their lines whenever its wait ends. So an entry may be outdated: its
client does not wait any more, or has begun a later wait. The caller that takes out such an entry adds the client again
at the place of its later wait, if it has one.
Invariant: a client has at most one entry, and no entry is later than its client's true place.
"""

from __future__ import annotations

from geventstalk.core.order import Order


class Line:
    """Clients by number, in the order of the waits that their entries name."""

    __slots__ = ("_order", "entries")

    def __init__(self) -> None:
        self._order = Order()  # clients, whose rank is their wait
        self.entries: dict[int, int] = {}  # waits by client; whether it is empty is asked with each job

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, client: int, wait: int) -> None:
        """Adds a client that has no entry, with its wait."""
        self._order.push(wait, client)
        self.entries[client] = wait

    def take_first(self) -> tuple[int, int]:
        """Takes the first entry out; there is one. Returns its client and wait."""
        client = int(self._order.pop())
        return client, self.entries.pop(client)

    def remove(self, client: int) -> None:
        """Removes the client's entry, if it has one."""
        wait = self.entries.pop(client, None)
        if wait is not None:
            self._order.discard(wait, client)

    def waits(self) -> dict[int, int]:
        """Returns the client and the wait of every entry, in order of the line. O(n): for tests."""
        entries = self._order.entries(len(self.entries) + 1)
        assert sorted([(wait, client) for client, wait in self.entries.items()]) == entries
        self._order.check()
        return {client: wait for wait, client in entries}
