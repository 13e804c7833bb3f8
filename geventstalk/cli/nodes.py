"""The nodes of a cluster, for the console: status and changes of `geventstalk cluster`, within a server's process.

Each method waits for the database, and runs in a thread. The module imports what it needs at the first request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from geventstalk.offline.cluster import Watch

_PROMOTE_S: Final = 10.0
_ASK_S: Final = 1.0
"""The timeout of the request for the address of the leader's console."""


class Nodes:
    """The nodes that share the journal `place`."""

    def __init__(self, place: str) -> None:
        self._place = place

    def status(self) -> dict[str, Any]:
        from geventstalk.cli.cluster import facts_of

        with self._watch() as seen:
            facts = facts_of(seen.status())
        leads = [each["address"] for each in facts["nodes"] if each["node"] == facts["leader"]]
        return facts | {"console": _console(leads[0]) if leads else None}

    def promote(self, node: str) -> None:
        with self._watch() as seen:
            seen.promote(node, _PROMOTE_S)

    @contextlib.contextmanager
    def _watch(self) -> Iterator[Watch]:
        from geventstalk.durable.reading import JournalError
        from geventstalk.http.backend import ClusterFault
        from geventstalk.offline.cluster import NotDone, watch

        try:
            with contextlib.closing(watch(self._place)) as seen:
                yield seen
        except (NotDone, JournalError) as error:
            raise ClusterFault(str(error)) from None


def _console(at: str) -> str | None:
    """Returns the address of the console of the node at this address, from its `stats`; None when it has none."""
    from geventstalk.remote import address
    from geventstalk.remote.errors import ClientError
    from geventstalk.remote.protocol import Beanstalk

    host, _, port = at.rpartition(":")
    leader = address.Address(host.strip("[]"), port)
    try:
        with contextlib.closing(Beanstalk(leader, _ASK_S)) as server:
            found = address.of_api(server.facts.get("http", ""), leader)
    except ClientError:
        return None
    return None if found is None or found.is_unix else f"{found}/" if found.secure else f"http://{found}/"
