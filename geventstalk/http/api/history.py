"""Figures over time, of the server or of a tube."""

from __future__ import annotations

import json
from typing import Any

import falcon

from geventstalk.core.job import SECOND_NS
from geventstalk.http.backend import House
from geventstalk.http.history import RANGES, SERIES, TUBE_RANGES, TUBE_SERIES
from geventstalk.http.params import Parameters
from geventstalk.http.slices import Pace


class History:
    """GET /api/v1/history"""

    def __init__(self, house: House) -> None:
        self._house = house

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        asked = Parameters(req)
        name = asked.choice("range", RANGES, "15m")
        tube = asked.tube("tube")
        asked.end()
        house, pace = self._house, Pace(self._house)
        pace.step()
        names: tuple[str, ...]
        if tube is None:
            names, (step_ns, size) = SERIES, RANGES[name]
            end_ns, columns = house.history.series(name, house.now_ns())
        else:
            names, (step_ns, size) = TUBE_SERIES, TUBE_RANGES[name]
            end_ns, columns = house.tube_history.series(tube, name, house.now_ns())
        head = {
            "step_s": step_ns / SECOND_NS,
            "from": house.unix_s(end_ns - size * step_ns),
            "to": house.unix_s(end_ns),
        }
        pieces = []
        for series, column in zip(names, columns, strict=True):
            pace.step()
            pieces.append(f'"{series}":{json.dumps(column, separators=(",", ":"))}')
        resp.data = f'{json.dumps(head)[:-1]},"series":{{{",".join(pieces)}}}}}'.encode()
        resp.content_type = falcon.MEDIA_JSON


def add(app: Any, house: House) -> None:
    """Gives the resources of this module their routes."""
    app.add_route("/api/v1/history", History(house))
