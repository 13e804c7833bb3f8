"""The syncs of a turn: one at a time, in a thread, or without one where the log can do that.

This module must not know replies: turn.py decides which of them wait for a sync.
Invariant: after a sync that failed, nothing that waits for it is safe.
"""

from __future__ import annotations

from collections.abc import Callable

from geventstalk.durable.store import Store
from geventstalk.turn.tasks import Flag, Sync, Task, Wait


class Syncs:
    """`under_way` is the sync that waits in a thread, or for a networked log. The last sync took `took_ns`."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.under_way: Sync | None = None
        self.took_ns = 0
        self.written = Flag()  # there is something to sync
        self._arrived = Flag()  # a sync that was begun without a thread is over
        self._clock = clock

    @property
    def is_under_way(self) -> bool:
        """Returns whether a sync is under way."""
        return self.under_way is not None and not self.under_way.over

    def when_due(self, store: Store) -> Task:
        """Under `-fMS`: a sync, MS after the first commit that it covers."""
        while True:
            yield Wait(self.written)
            self.written.clear()
            if store.sync_due_ns:
                yield Wait(at_ns=store.sync_due_ns)
                yield from self.wait(store)

    def wait(self, store: Store) -> Task:
        """Syncs everything that is committed by now. Raises the failure of the sync."""
        sync = self._sync(store)
        if sync is None:
            return
        self.under_way = sync
        if sync.begin(self._arrived.set):
            while not sync.over:
                yield Wait(self._arrived)
                self._arrived.clear()
        else:
            yield Wait(sync=sync)
        self._ended(store, sync)

    def run(self, store: Store) -> None:
        """Syncs everything that is committed by now, and holds the caller meanwhile. Raises the failure of the sync."""
        sync = self._sync(store)
        if sync is not None:
            sync.run()
            self._ended(store, sync)

    def take_last(self, store: Store) -> None:
        """Takes the sync that was under way when its task ended. It is over. Raises the failure of the sync."""
        sync = self.under_way
        if sync is not None:
            assert sync.over
            self._ended(store, sync)

    def _sync(self, store: Store) -> Sync | None:
        """Returns a sync of everything that is committed by now; None when nothing has to be synced."""
        point = store.sync_point()
        return None if point is None else Sync(point, self._clock)

    def _ended(self, store: Store, sync: Sync) -> None:
        self.under_way = None
        if sync.error is not None:
            raise sync.error
        self.took_ns = sync.took_ns
        store.sync_took(sync.took_ns)
        store.synced_ns = self._clock()
