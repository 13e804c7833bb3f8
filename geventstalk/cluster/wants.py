"""The requests of a member to its owner, one at a time in each of its tasks, and the messages to its owner.

This module must not know how anything is done: the server does it with greenlets, the simulation with a database of its
own. The owner sends each answer into the task, or throws the JournalError that came instead of the answer. Invariant:
an answer may be late, by any time. An answer is never older than its request.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec

from geventstalk.turn.tasks import Wait
from journal.errors import JournalError
from journal.fence import Fence, View

Arguments = ParamSpec("Arguments")

REFUSED: Final = "refused"
OPEN: Final = "open"
SILENT: Final = "silent"
"""Results of a probe of a node's port: no process listens there; the process is there; neither is known."""


class Ask(NamedTuple):
    """A call of the fence: the name of the method, and its arguments. The answer is what the method returns."""

    method: str
    arguments: tuple[Any, ...] = ()

    def of(self, fence: Fence) -> Any:
        """Makes the call."""
        return getattr(fence, self.method)(*self.arguments)


def ask(method: Callable[Concatenate[Fence, Arguments], object], *given: Arguments.args, **_: Arguments.kwargs) -> Ask:
    """Returns the request to call this method of the fence."""
    return Ask(method.__name__, given)


class Probe(NamedTuple):
    """Asks at the address of a node's port for one process of it, for two tenths of a second at the most.

    The answer is REFUSED only if the address itself answers that no process listens, and OPEN only if that very process
    has answered, and leads.
    """

    address: str
    incarnation: str


class ReadOn(NamedTuple):
    """Reads what other nodes have written since the last time, and applies it: about a millisecond of it.

    The answer is whether there was anything. False says that there was nothing at the moment of the request.
    """


class LeadLog(NamedTuple):
    """Makes the log ready to be written under this epoch, behind all that was read. All was read when this is asked.

    Asked again after JournalUnreachable. The answer is whether the epoch still is the last. Raises JournalForked when
    the record that was read last is not there: a failover of the database has lost it.
    """

    epoch: int


class ResumeLog(NamedTuple):
    """Goes on writing under this epoch: what was on its way when the link broke is there, or is written again.

    Requested again after JournalUnreachable, each time with a newer epoch. Answers and raises as LeadLog does.
    """

    epoch: int


Want = Ask | Probe | ReadOn | LeadLog | ResumeLog | Wait
"""The values that a task yields. A Wait has a flag, a moment, or both, and no sync."""

Steps = Generator[Want, Any, None]
"""A task of a member."""


class MemberOwner:
    """The interface to the process around a member. Each method returns soon, and calls no method of the member."""

    def follows(self, view: View) -> None:
        """Another process leads now, or none does. Called at the start, and for every epoch or goodbye after that."""

    def leads(self, epoch: int) -> None:
        """From now on this node serves clients, whenever the lease holds."""

    def falls_silent(self) -> None:
        """The lease has run out. The owner need not act: the lease itself holds all replies back."""

    def speaks_again(self) -> None:
        """The lease holds again: replies may leave. Also called after a lapse too short for falls_silent()."""

    def hands_over(self) -> None:
        """Take nothing more from clients, commit, and send what is safe. Then call Member.finish()."""

    def steps_down(self, why: str) -> None:
        """The member has ended: this process may never answer again. `why` is for the log."""

    def tells(self, text: str) -> None:
        """A line for the log."""


def drive(steps: Steps, do: Callable[[Want], Any]) -> None:
    """Runs a task to its end, where `do` may wait: it does what the task wants, and returns the answer or raises it."""
    answer, error = None, None
    try:
        while True:
            want = steps.send(answer) if error is None else steps.throw(error)
            answer, error = None, None
            try:
                answer = do(want)
            except JournalError as failure:
                error = failure
    except StopIteration:
        return
