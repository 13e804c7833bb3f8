"""Samples of the server and its tubes, and rates from two samples.

geventstalk has rates of its own, averages over one minute or fifteen; a sample has them as `rates`. The terminal shows
`per_s`, from the counters: it follows a change at once, and means the same for any beanstalkd. Invariant: a server that
answers slowly gets fewer requests, so that samples never keep it busy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from geventstalk.remote import shapes
from geventstalk.remote.protocol import DEFAULT, Beanstalk
from geventstalk.remote.shapes import Shape
from geventstalk.trouble import Trouble, trouble

_REST: Final = 4
"""The pause after an answer is at least this many times the time that the answer took."""
_UNTOLD_S: Final = 60
_SERVER_RATES: Final = ("put", "reserve", "delete", "timeout")
_TUBE_RATES: Final = ("put", "delete", "bury")


@dataclass(frozen=True)
class Sample:
    """The server at one time. `per_s` of the server and of each tube are None in the first sample."""

    at: float
    took_s: float
    server: Shape
    tubes: list[Shape]

    def rest_s(self, interval_s: float) -> float:
        """Returns the time until the next sample."""
        return max(interval_s, _REST * self.took_s)


def take(server: Beanstalk, before: Sample | None) -> Sample:
    """Takes a sample of the server. Raises ClientError."""
    began = time.monotonic()
    whole = shapes.server(server.stats())
    tubes = [shapes.tube(facts, asker_in=DEFAULT) for facts in server.tube_stats(server.tubes())]
    at = time.monotonic()
    same = before is not None and (before.server["pid"], before.server["hostname"]) == (whole["pid"], whole["hostname"])
    past_s = at - before.at if before is not None and same else 0.0
    known = {tube["name"]: tube for tube in before.tubes} if before is not None and same else {}
    whole["per_s"] = _rates(before.server if before is not None and same else None, whole, past_s, _SERVER_RATES)
    for tube in tubes:
        tube["per_s"] = _rates(known.get(tube["name"]), tube, past_s, _TUBE_RATES)
        tube["trouble"] = trouble_of(tube)._asdict()
    return Sample(at, at - began, whole, tubes)


def _rates(before: Shape | None, now: Shape, past_s: float, keys: tuple[str, ...]) -> dict[str, float] | None:
    if before is None or past_s <= 0:
        return None
    then, totals = before["totals"], now["totals"]
    # A tube that was gone meanwhile begins to count at 0.
    return {key: round(max(0, totals.get(key, 0) - then.get(key, 0)) / past_s, 3) for key in keys}


def trouble_of(tube: Shape) -> Trouble:
    """Returns how much the tube needs an operator, by the rule of the server's console.

    beanstalkd tells no ages and no rates. There, a ready job in a tube without a watcher counts as one that has waited
    for a while, and the rates since the last sample count.
    """
    jobs, now, rates = tube["jobs"], tube.get("per_s") or {}, tube.get("rates")
    put, delete, bury = (rates[key]["m1"] if rates else now.get(key, 0.0) for key in ("put", "delete", "bury"))
    return trouble(
        ready=jobs["ready"],
        waits_s=tube["ages"]["ready"] or 0 if "ages" in tube else 0 if tube["watching"] else _UNTOLD_S,
        consumers=tube["watching"],
        growth=put - delete,
        buried=jobs["buried"],
        bury_rate=bury,
        paused=tube["paused_s"] > 0,
    )
