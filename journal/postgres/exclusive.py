"""A command has the log to itself: it leads without serving, so that no node serves meanwhile.

This module must not know what the command does. A heartbeat goes on in a thread of its own, for the command works in
one long piece. The lease is the command's own, and longer than a node's: nothing waits for its answers.
Invariant: it never takes the epoch of a node that may be alive, and it claims by the rules of all others.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from types import TracebackType
from typing import Final

from journal.errors import JournalLocked, JournalUnreachable
from journal.fence import Identity, View
from journal.postgres.fence import PostgresFence
from journal.postgres.place import Place

LEASE_MS: Final = 5000
_BEATS: Final = 5
_PART: Final = 0.4
"""For so large a part of its lease a node that leads is waited for after the database has confirmed a commit: it has
two heartbeats in that time."""
_LOOKS: Final = 20
"""The looks in a lease at whether the node that leads is alive."""


class Exclusive:
    """A context. Raises JournalLocked when a node leads, also at the end when one has taken the lead meanwhile."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.epoch = 0
        node = f"command {os.getpid()} on {os.uname().nodename}"
        self.me: Final = Identity(node, "", secrets.token_hex(16), LEASE_MS)
        self._fence = PostgresFence(place, self.me)
        self._over = threading.Event()
        self._beating: threading.Thread | None = None

    def __enter__(self) -> Exclusive:
        try:
            view = self._await_silence()
            owed_ms = view.owed_ms if view.released else max(view.owed_ms, view.lease_ms)
            if not self._fence.claim(view, max(owed_ms, 1)):
                raise JournalLocked(f"{self.place.shown}: a node has just taken the lead: stop all nodes first")
        except BaseException:
            self._fence.close()
            raise
        self.epoch = view.epoch + 1
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._beating.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._beating is not None:
            self._beating.join()
        try:
            kept = self._fence.release(self.epoch, "")
        except JournalUnreachable:
            kept = True  # the next node waits for the lease instead
        finally:
            self._fence.close()
        if not kept and error is None:
            raise JournalLocked(f"{self.place.shown}: a node has taken the lead meanwhile: stop all nodes first")

    def _await_silence(self) -> View:
        """Waits until it is certain that no node leads. Raises JournalLocked when one does.

        While the database confirms no commit, a node that is well has no heartbeat. So it gets time for one after a
        commit of this command was confirmed.
        """
        first = view = self._fence.look()
        end = time.monotonic() + view.lease_ms / 1000
        confirmed = False
        while view.epoch and not view.released:
            if (view.epoch, view.beat) != (first.epoch, first.beat):
                where = f" at {view.address}" if view.address else ""
                raise JournalLocked(f"{self.place.shown} is in use: {view.node}{where} leads; stop all nodes first")
            if time.monotonic() >= end:
                if confirmed:
                    break
                self._fence.confirm()
                confirmed = True
                end = time.monotonic() + _PART * view.lease_ms / 1000
            time.sleep(view.lease_ms / 1000 / _LOOKS)
            view = self._fence.look()
        return view

    def _beat(self) -> None:
        """Until the end, or until the epoch is another one: then the writes of this one are refused by themselves."""
        while not self._over.wait(LEASE_MS / 1000 / _BEATS):
            try:
                if self._fence.beat(self.epoch) is None:
                    return
            except JournalUnreachable:
                continue
