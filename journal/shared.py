"""The interface of a log that several nodes read, beside that of any log.

This module must not know sockets, SQL, nor which node should lead: geventstalk/cluster decides that.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy_extensions import mypyc_attr

from journal.batched import BatchedLog
from journal.log import Row


@mypyc_attr(allow_interpreted_subclasses=True)
class SharedLog(BatchedLog):
    """A log that several nodes read, and of which one at a time may append: the node whose epoch is the last one.

    open(), then batches() to its end, then more() again and again while another node leads. To lead, the owner claims
    an epoch, calls more() until it gives nothing, lead(), and start(); from then on it is a Log as any other.
    These methods wait by way of a Waiter that the owner gives; while they do, the owner goes on with other work. The
    methods of Log never wait, but for start(), repair() and close().
    Invariant: nothing is appended under an epoch that is not the last one, and a SyncPoint never ends before all that
    it covers is safe on the other end.
    """

    epoch: int
    """Under which this node appends. 0 while it follows."""
    refuse_puts: bool
    """The owner sets this: admits() says no."""
    on_cut: Callable[[str], None]
    """Called once when `cut` or `fenced` becomes true, with words for the operator."""
    rewired: Callable[[], None]
    """Called when `fileno` or `wants_write` has changed."""

    @property
    def place(self) -> int:
        """The number of the last row that was read or is safe. It tells how far a node lags behind another."""
        raise NotImplementedError

    @property
    def cut(self) -> bool:
        """The link is gone while this node leads: a commit may be there or not, and SyncPoints wait for resume()."""
        raise NotImplementedError

    @property
    def fenced(self) -> bool:
        """The epoch is over. Where another node leads, nothing that was not acknowledged before will ever be.

        Where the newer epoch is this node's own, whose claim was late or on its way, resume() under one more goes on.
        """
        raise NotImplementedError

    @property
    def wants_write(self) -> bool:
        """Returns whether the owner's watcher has to look whether the descriptor can be written."""
        raise NotImplementedError

    @property
    def waits_ns(self) -> int:
        """Returns when the oldest statement without an answer was sent last, on the monotonic clock. 0 when there is
        none.
        """
        raise NotImplementedError

    @property
    def waits_for(self) -> str:
        """Returns the reason of the wait, in words for the operator; "" when there is none."""
        raise NotImplementedError

    def open(self) -> None:
        """Connects, and checks the log. Waits.

        Raises JournalLocked when it may not be used, JournalNewer, JournalUnreachable: then it may be called again. A
        log that is missing is JournalUnreachable, too: only a person knows whether there was one, and makes a new one.
        """
        raise NotImplementedError

    def seen(self) -> list[int]:
        """Returns the facts about the log for the process that begins anew after this one; [] when there are none."""
        raise NotImplementedError

    def remember(self, seen: list[int]) -> None:
        """Takes the result of seen(), before open(). No known key is used again, even if the other end has lost it."""
        raise NotImplementedError

    def more(self) -> list[tuple[int, list[Row]]]:
        """Returns the next records, in one round trip, as batches() gives them; [] when there are none. Waits.

        Raises JournalUnreachable: the next call links anew. Raises JournalForked, and JournalDamaged.
        """
        raise NotImplementedError

    def lead(self, epoch: int) -> bool:
        """This node has claimed `epoch`, and more() gave nothing since. Writes the row that begins the epoch. Waits.

        Returns whether the epoch still is the last one. Raises JournalUnreachable: call again. Raises JournalForked
        when the row that was read last is not there.
        """
        raise NotImplementedError

    def resume(self, epoch: int) -> bool:
        """After a cut, or a fence, or to leave a link that hangs: this node has claimed the newer `epoch`. Waits.

        Links anew, finds out what became of the commit that was under way, and goes on; no SyncPoint is lost. Returns
        whether the epoch still is the last one. Raises JournalUnreachable: call again, with a newer epoch. Raises
        JournalForked when the other end lacks what was safe.
        """
        raise NotImplementedError

    @property
    def fileno(self) -> int:
        """The descriptor that the owner watches, for reading always, and for writing while `wants_write`. -1: none."""
        raise NotImplementedError

    def pump(self) -> None:
        """The descriptor is ready: takes what has come, sends what waits, and ends SyncPoints. Raises JournalFailed."""
        raise NotImplementedError
